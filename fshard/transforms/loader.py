"""`Loader`: a dataset in batches, of which each device has its part.

A batch has `batch_size` samples on all devices together.  Its samples, and their order, depend on the seed and the epoch
alone; so training is the same on any number of devices, and a position, the number of samples that have been taken, means
the same on another mesh.  No sample is left out or taken twice: where the last batch does not divide, parts differ by one.

    10 samples, batch_size 4, 2 devices      device 0   [3 8] [1 9] [0]
                                             device 1   [5 2] [7 4] [6]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from inspect import signature
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from fshard.errors import LayoutError
from fshard.mesh.mesh import Mesh
from fshard.mesh.spmd import device_of
from fshard.transforms.batch import Cut
from fshard.transforms.complaints import not_whole

Notice = Callable[[int | None, Any], None]
"""Of how many samples all devices have together, and this device's part of them; of None after the last batch."""
_OPTIONS = frozenset(signature(DataLoader.__init__).parameters)


class Loader:
    """A dataset's batches, as one device gets them.  Iterating goes on from the position, and then to the next epoch.

    `epoch` and `sample` are the position; each batch that comes tells `notice` how many samples all devices have of it.
    `samples` is how many of the batch that came last this device has: 0, where a neighbour's stands in for one of its own.
    """

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
        notice: Notice = lambda samples, part: None,
        **options: Any,
    ) -> None:
        count = 1
        for axis in axes:
            count *= mesh.shape[axis]
        wrong = (
            [] if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") else ["the dataset has no indices"]
        )
        wrong += not_whole(1, batch_size=batch_size)
        wrong += [f"{name}= is decided here" for name in ("sampler", "batch_sampler", "generator") if options.get(name)]
        wrong += [f"torch's DataLoader has no option {name}" for name in options if name not in _OPTIONS]
        if wrong:
            raise LayoutError(f"prepare_dataloader: {'; '.join(wrong)}.")
        self.dataset, self.batch_size, self.shuffle, self.seed, self.drop_last = (
            dataset,
            batch_size,
            shuffle,
            seed,
            drop_last,
        )
        self.notice, self.epoch, self.sample, self.samples = notice, 0, 0, 0
        self._mesh, self._axes, self._count, self._options = mesh, axes, count, options

    @classmethod
    def of(cls, loader: DataLoader[Any], **how: Any) -> Loader:
        """Return what stands for a loader of torch, whose batches are then those of all devices together."""
        plain = type(loader.sampler) in (RandomSampler, SequentialSampler)
        if not plain or loader.batch_size is None:
            raise LayoutError(
                f"boost: the dataloader draws by {type(loader.sampler).__name__}; which device gets what is not known then. "
                "Give booster.prepare_dataloader(dataset, batch_size=...), or iterate it yourself, a part on each device."
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
        same = (*same, "multiprocessing_context", "in_order")
        options = {name: getattr(loader, name) for name in same}
        shuffle = isinstance(loader.sampler, RandomSampler)
        return cls(loader.dataset, loader.batch_size, shuffle=shuffle, drop_last=loader.drop_last, **how, **options)

    def __len__(self) -> int:
        """Return how many batches an epoch has."""
        full, left = divmod(len(self.dataset), self.batch_size)
        return full + (left > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Any]:
        """Go through the rest of the epoch; what has been handed out counts as taken."""
        order = self._order()
        batches = [order[at : at + self.batch_size] for at in range(self.sample, len(order), self.batch_size)]
        if self.drop_last:
            batches = [batch for batch in batches if len(batch) == self.batch_size]
        own = DataLoader(self.dataset, batch_sampler=[self._part(batch) for batch in batches], **self._options)
        for left, (batch, part) in zip(range(len(batches))[::-1], zip(batches, own, strict=True), strict=True):
            self.epoch, self.sample = (self.epoch, self.sample + len(batch)) if left else (self.epoch + 1, 0)
            self.samples = len(self._own(batch))
            self.notice(len(batch), part)
            yield part
        self.notice(None, None)  # a batch that comes now is not ours

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(len(self.dataset)))
        draw = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(len(self.dataset), generator=draw).tolist()

    def _part(self, batch: list[int]) -> list[int]:
        """Return this device's samples; a neighbour's, which counts for nothing, if there is none for it."""
        own = self._own(batch)
        return batch[own.start : own.stop] if own else [batch[min(own.start, len(batch) - 1)]]

    def _own(self, batch: list[int]) -> range:
        """Return the places of this device's samples."""
        return range(*Cut(self._axes, self._count, len(batch)).ranges(self._mesh, device_of(self._mesh), 1)[0])

    def state_dict(self) -> dict[str, int]:
        """Return the position: it means the same on any mesh."""
        return {"epoch": self.epoch, "sample": self.sample, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from a position."""
        self.epoch, self.sample, self.seed = state["epoch"], state["sample"], state["seed"]

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch anew."""
        self.epoch, self.sample = epoch, 0
