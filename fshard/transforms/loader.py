"""`Loader`: a dataset in batches, of which each device has its part.

A batch has `batch_size` samples on all devices together.  Its samples, and their order, depend on the seed and the epoch
alone; so training is the same on any number of devices, and a position, the number of samples that have been taken, means
the same on another mesh.  No sample is left out or taken twice: where the last batch does not divide, parts differ by one.

    10 samples, batch_size 4, 2 devices      device 0   [3 8] [1 9] [0]
                                             device 1   [5 2] [7 4] [6]

Outside of `fs.run`, where who asks stands for all devices, a batch is whole.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from inspect import signature
from math import prod
from typing import Any, cast, get_type_hints

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from fshard.errors import LayoutError, ScopeError
from fshard.mesh.mesh import Mesh
from fshard.mesh.spmd import device_of, is_outside
from fshard.transforms.batch import Cut
from fshard.transforms.complaints import misfits

Notice = Callable[[Mesh, tuple[str, ...], int | None, Any], None]
"""Where a batch is cut, how many samples all devices have of it, and this device's part; None after the last one."""
_OPTIONS = frozenset(signature(DataLoader.__init__).parameters)
_DECIDED = ("sampler", "batch_sampler", "generator")


class Position:
    """What a loader's `state_dict` has."""

    epoch: int
    sample: int
    seed: int


class Given:
    """What a loader is given, as far as it is known what that is."""

    batch_size: int
    shuffle: bool
    seed: int
    drop_last: bool
    pin_memory: bool
    num_workers: int
    prefetch_factor: int | None
    persistent_workers: bool
    timeout: float
    in_order: bool


class Sampler:
    """What a loader has in the place of a `DistributedSampler`: which samples of an epoch are this device's.

    Unlike that one's they are as many as the device really has, so the lengths of all devices add up to the dataset's, or,
    with `drop_last`, to what its whole batches have.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    @property
    def epoch(self) -> int:
        """The epoch that comes, or is under way."""
        return self._loader.epoch

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch anew, as the loader's `set_epoch` does."""
        self._loader.set_epoch(epoch)

    def __len__(self) -> int:
        """Return how many samples of an epoch are this device's."""
        return sum(map(len, self._loader.own_parts()))

    def __iter__(self) -> Iterator[int]:
        """Go through the indices of this device's samples in the epoch, from its beginning; nothing counts as taken."""
        return (index for part in self._loader.own_parts() for index in part)


def _of_torch(name: str) -> Any:
    """Return a property that tells what torch's DataLoader, which fetches samples, has been given."""
    return property(lambda loader: getattr(loader.by_torch, name), doc=f"As torch's DataLoader has it: {name}.")


class Loader:
    """A dataset's batches, as one device gets them; whole ones, where all devices are asked for at once.

    Iterating goes on from the position, and then to the next epoch.  `epoch` and `sample` are the position; each batch that
    comes tells `notice` how many samples all devices have of it.  `samples` is how many of the batch that came last this
    device has: 0, where a neighbour's stands in for one of its own.  What else torch's loaders have is told: `sampler`, say.
    """

    num_workers, collate_fn, pin_memory = _of_torch("num_workers"), _of_torch("collate_fn"), _of_torch("pin_memory")
    timeout, worker_init_fn, in_order = _of_torch("timeout"), _of_torch("worker_init_fn"), _of_torch("in_order")
    prefetch_factor, persistent_workers = _of_torch("prefetch_factor"), _of_torch("persistent_workers")
    multiprocessing_context = _of_torch("multiprocessing_context")

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        mesh: Mesh,
        axes: tuple[str, ...],
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        notice: Notice = lambda mesh, axes, samples, part: None,
        **options: Any,
    ) -> None:
        given = {"batch_size": batch_size, "shuffle": shuffle, "seed": seed, "drop_last": drop_last, **options}
        if wrong := _complaints(dataset, given):
            raise LayoutError(f"prepare_dataloader: {'; '.join(wrong)}.")
        self.dataset, self.batch_size, self.shuffle, self.seed, self.drop_last = (
            dataset,
            batch_size,
            shuffle,
            seed,
            drop_last,
        )
        self.notice, self.epoch, self.sample, self.samples = notice, 0, 0, 0
        self._mesh, self._axes, self._outside, self._options = mesh, axes, is_outside(mesh), options
        self._parts, self._loops, self._taken = list[list[int]](), 0, 0
        try:
            self.by_torch = DataLoader(dataset, batch_sampler=self._parts, **options)
        except (TypeError, ValueError) as error:
            raise LayoutError(f"prepare_dataloader: torch's DataLoader refused what it was given: {error}") from error

    @classmethod
    def of(cls, loader: DataLoader[Any], **where: Any) -> Loader:
        """Return what stands for a loader of torch, whose batches are then those of all devices together."""
        if isinstance(loader.dataset, IterableDataset):
            raise LayoutError(
                "boost: an IterableDataset has no indices; which device gets what is not known then. Iterate it yourself, a "
                "part on each device, or give a dataset with indices."
            )
        how = None if type(loader.sampler) in (RandomSampler, SequentialSampler) else loader.sampler
        how = loader.batch_sampler if loader.batch_size is None else how
        if how is not None or loader.batch_size is None:
            draws = "makes no batches" if how is None else f"draws by {type(how).__name__}"
            raise LayoutError(
                f"boost: the dataloader {draws}; which device gets what is not known then. "
                "Give booster.prepare_dataloader(dataset, batch_size=...), or iterate it yourself, a part on each device."
            )
        replaced = [name for name in ("__iter__", "__len__", "_get_iterator") if _is_replaced(loader, name)]
        if replaced:
            raise LayoutError(
                f"boost: {type(loader).__name__} has {', '.join(replaced)} of its own, which would not be asked: another "
                "loader takes its place, on each device. Do what it does in collate_fn, in the dataset or in the loop, or "
                "iterate it yourself, a part on each device."
            )
        dataset, sampler = cast(Any, loader.dataset), cast(Any, loader.sampler)
        own = [name for name in ("replacement", "generator") if getattr(sampler, name, None)]
        own += ["generator"] if loader.generator is not None and "generator" not in own else []
        own += ["num_samples"] if len(sampler) != len(dataset) else []
        if own:
            raise LayoutError(
                f"boost: the dataloader draws samples by its own {', '.join(own)}. Here each is taken once an epoch, in an "
                "order that the plugin's seed= decides, the same on any mesh. Leave that out, or iterate it yourself, a part "
                "on each device."
            )
        same = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor")
        same = (*same, "multiprocessing_context", "in_order", "persistent_workers")
        flags = ("pin_memory", "in_order", "persistent_workers", "drop_last")  # torch takes what is true
        options: dict[str, Any] = {name: getattr(loader, name) for name in same}
        options |= {name: bool(getattr(loader, name)) for name in flags}
        return cls(dataset, loader.batch_size, shuffle=isinstance(sampler, RandomSampler), **where, **options)

    def __len__(self) -> int:
        """Return how many batches an epoch has."""
        full, left = divmod(len(self.dataset), self.batch_size)
        return full + (left > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Any]:
        """Go through the rest of the epoch, or the next one if nothing is left; what has been handed out counts as taken."""
        if self._outside and not is_outside(self._mesh):
            raise ScopeError(
                "a loader that was made outside of fs.run and used inside has one position for all devices. Make it inside, "
                "where each device has its own."
            )
        batches = self._rest(self.sample)
        if self.sample and not batches:
            self.set_epoch(self.epoch + 1)
            batches = self._rest(self.sample)
        self._tell_of_a_peek()
        self._loops, self._taken = self._loops + 1, 0
        loop, parts = self._loops, self._fetched([self._part(batch) for batch in batches])
        for left, (batch, part) in zip(range(len(batches))[::-1], zip(batches, parts, strict=True), strict=True):
            self.epoch, self.sample = (self.epoch, self.sample + len(batch)) if left else (self.epoch + 1, 0)
            self.samples, self._taken = len(self._own(batch)), self._taken + 1
            self.notice(self._mesh, self._over(), len(batch), part)
            yield part
            if left and loop != self._loops:
                raise LayoutError(
                    "a loader has one position, and another loop over it has begun since this one took its last batch: each "
                    "would have batches that the other misses. Make a loader for each, or begin a loop when one has ended."
                )
        self.notice(self._mesh, self._over(), None, None)  # a batch that comes now is not ours

    def _tell_of_a_peek(self) -> None:
        """Warn if the first batch of all was taken by itself: this loop goes on with the second."""
        if self._loops == self._taken == 1 and self.sample:
            warnings.warn(
                f"the first batch of epoch {self.epoch} was taken before this loop, which goes on with the second: looking at "
                f"one counts. loader.set_epoch({self.epoch}) begins the epoch anew.",
                stacklevel=3,
            )

    @property
    def sampler(self) -> Sampler:
        """Which samples of an epoch are this device's; its `set_epoch` is the loader's."""
        return Sampler(self)

    def own_parts(self) -> list[list[int]]:
        """Return which samples of each batch of the epoch are this device's, from the first batch on."""
        owns = [(batch, self._own(batch)) for batch in self._rest(0)]
        return [batch[own.start : own.stop] for batch, own in owns]

    def _rest(self, start: int) -> list[list[int]]:
        """Return the samples of each batch from that many samples on."""
        order = self._order()
        batches = [order[at : at + self.batch_size] for at in range(start, len(order), self.batch_size)]
        return [batch for batch in batches if len(batch) == self.batch_size or not self.drop_last]

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(len(self.dataset)))
        draw = torch.Generator().manual_seed((self.seed + self.epoch) % (1 << 63))
        return torch.randperm(len(self.dataset), generator=draw).tolist()

    def _fetched(self, parts: list[list[int]]) -> DataLoader[Any]:
        """Return what fetches samples; its workers may stay from one epoch to the next."""
        if not self.by_torch.persistent_workers:
            return DataLoader(self.dataset, batch_sampler=parts, **self._options)
        self._parts[:] = parts
        return self.by_torch

    def _part(self, batch: list[int]) -> list[int]:
        """Return this device's samples; a neighbour's, which counts for nothing, if there is none for it."""
        own = self._own(batch)
        return batch[own.start : own.stop] if own else [batch[min(own.start, len(batch) - 1)]]

    def _own(self, batch: list[int]) -> range:
        """Return the places of this device's samples."""
        axes = self._over()
        cut = Cut(axes, prod(self._mesh.shape[axis] for axis in axes), len(batch))
        return range(*cut.ranges(self._mesh, device_of(self._mesh), 1)[0])

    def _over(self) -> tuple[str, ...]:
        """Return the axes along which a batch is cut for the caller."""
        return () if is_outside(self._mesh) else self._axes

    def state_dict(self) -> dict[str, int]:
        """Return the position: it means the same on any mesh."""
        return {"epoch": self.epoch, "sample": self.sample, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from a position."""
        wrong = [f"{name} is missing" for name in get_type_hints(Position) if name not in state]
        wrong += misfits(Position, state, epoch=0, sample=0, seed=0).values()
        if not wrong and state["sample"] > len(self.dataset):
            wrong = [f"sample is {state['sample']}, but the dataset has {len(self.dataset)}"]
        if wrong:
            raise LayoutError(f"load_state_dict: {'; '.join(wrong)}.")
        self.epoch, self.sample, self.seed, self._taken = state["epoch"], state["sample"], state["seed"], 0

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch anew."""
        self.load_state_dict({"epoch": epoch, "sample": 0, "seed": self.seed})


def _is_replaced(loader: DataLoader[Any], name: str) -> bool:
    return getattr(type(loader), name) is not getattr(DataLoader, name)


def _complaints(dataset: Any, given: Mapping[str, Any]) -> list[str]:
    """Return all that is wrong with what a loader is given."""
    indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    wrong = [] if indexed else ["the dataset has no indices"]
    wrong += misfits(Given, given, seed=0, num_workers=0).values()
    wrong += [f"{name}= is decided here" for name in _DECIDED if given.get(name)]
    wrong += [f"torch's DataLoader has no option {name}" for name in given if name not in {"seed"} | _OPTIONS]
    idle = [f"{name}=" for name in ("prefetch_factor", "persistent_workers") if given.get(name)]
    if idle and not given.get("num_workers"):
        wrong.append(f"{', '.join(idle)} has no meaning without workers: num_workers=1")
    return wrong
