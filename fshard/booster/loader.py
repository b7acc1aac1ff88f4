"""`Loader`: a dataset in batches, of which each device gets its part.

A batch has `batch_size` samples on all devices together. Its samples, and their order, depend only on seed and epoch;
so training is the same on any number of devices, and a position, the number of samples taken, is valid on other
meshes. No sample is dropped or repeated: where the last batch is uneven, parts differ by one.

    10 samples, batch_size 4, 2 devices      device 0   [3 8] [1 9] [0]
                                             device 1   [5 2] [7 4] [6]

Outside of `fs.run`, where the caller runs all devices, a batch is global.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from fshard.errors import LayoutError, ScopeError
from fshard.mesh.layout import Mesh
from fshard.mesh.spmd.run import device_of, is_outside
from fshard.transforms.batch import Cut
from fshard.transforms.options import flag, integer, must_be

Notice = Callable[[Mesh, tuple[str, ...], int | None, Any], None]
"""Called with a batch's sharding, its number of samples on all devices, and this device's part; None after the last."""
_SAME = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor", "multiprocessing_context",
    "in_order", "persistent_workers", "drop_last",
)  # fmt: skip
"""The options of torch's DataLoader that mean the same here."""


class Loader:
    """The batches of a dataset, as one device gets them; global ones where the caller runs all devices.

    Iterating continues from the position, then with the next epoch; every returned batch counts as taken.

    Args:
        dataset: anything with `__getitem__` and `__len__`.
        batch_size: number of samples of a batch on all devices together.
        mesh: the devices.
        axes: that shard a batch.
        shuffle: draw the order of each epoch by (seed, epoch).
        seed: see `shuffle`.
        drop_last: drop the last batch if it is smaller.
        notice: called with every batch.
        options: those of torch's DataLoader that do not choose samples: num_workers, collate_fn, pin_memory, ...

    `epoch` and `sample` are the position. `samples` is the number of samples of the last batch on this device: 0 where
    it computes on a neighbour's with weight 0.
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
        notice: Notice = lambda mesh, axes, samples, part: None,
        **options: Any,
    ) -> None:
        indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        wrong = must_be("dataset", "indexed, with a length", type(dataset).__name__, indexed)
        wrong += integer("batch_size", batch_size) + flag("shuffle", shuffle) + integer("seed", seed, 0)
        wrong += flag("drop_last", drop_last)
        chosen = [name for name in ("sampler", "batch_sampler", "generator") if options.pop(name, None) is not None]
        wrong += [f"{name}= must be left out: seed= decides the order, the same on any mesh" for name in chosen]
        self._own_batches = _Batches()
        try:
            self._by_torch = DataLoader(dataset, batch_sampler=self._own_batches, **options)
        except (TypeError, ValueError) as error:
            wrong.append(f"torch's DataLoader refused an option: {error}")
        if wrong:
            raise LayoutError(f"prepare_dataloader: {'; '.join(wrong)}.")
        self.dataset, self.batch_size, self.shuffle = dataset, batch_size, shuffle
        self.seed, self.drop_last, self.notice = seed, drop_last, notice
        self.epoch = self.sample = self.samples = 0
        self._mesh, self._axes, self._outside = mesh, axes, is_outside(mesh)

    @classmethod
    def of(cls, loader: DataLoader[Any], **where: Any) -> Loader:
        """Make a loader of one of torch's, whose batches are then those of all devices together."""
        sampler: Any = loader.sampler
        wrong = [
            text
            for text, found in {
                "an IterableDataset": isinstance(loader.dataset, IterableDataset),
                "a batch_sampler, or batch_size=None": loader.batch_size is None,
                f"the sampler {type(sampler).__name__}": type(sampler) not in (RandomSampler, SequentialSampler),
                "a sampler with replacement or num_samples": getattr(sampler, "replacement", False)
                or getattr(sampler, "_num_samples", None) is not None,
                "a generator": loader.generator is not None or getattr(sampler, "generator", None) is not None,
                f"{type(loader).__name__}.__iter__": type(loader).__iter__ is not DataLoader.__iter__,
            }.items()
            if found
        ]
        if wrong:
            raise LayoutError(
                f"boost: dataloader must take each sample once, in order or shuffled by the plugin's seed; got one with "
                f"{', '.join(wrong)}. Leave that out, or iterate it yourself, a part on each device."
            )
        options = {name: getattr(loader, name) for name in _SAME}
        options["drop_last"] = bool(options["drop_last"])
        return cls(
            loader.dataset, loader.batch_size or 1, shuffle=isinstance(sampler, RandomSampler), **where, **options
        )

    def __len__(self) -> int:
        """Return the number of batches per epoch."""
        full, left = divmod(len(self.dataset), self.batch_size)
        return full + (left > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches from the position to the end of the epoch; of the next epoch if none is left."""
        if self._outside and not is_outside(self._mesh):
            raise ScopeError(
                "a loader that was made outside of fs.run and used inside has one position for all devices. Make it inside, "
                "where each device has its own."
            )
        batches = self._batches()
        if self.sample and not batches:
            self.set_epoch(self.epoch + 1)
            batches = self._batches()
        axes = () if is_outside(self._mesh) else self._axes
        owns = [self._own(axes, len(batch)) for batch in batches]
        # a device without samples gets a neighbour's
        self._own_batches.lists = [
            batch[own.start : own.stop] or [batch[min(own.start, len(batch) - 1)]]
            for batch, own in zip(batches, owns, strict=True)
        ]
        self.notice(self._mesh, axes, None, None)
        last = len(batches) - 1
        for turn, part in enumerate(self._by_torch):
            size = len(batches[turn])
            self.epoch, self.sample = (self.epoch + 1, 0) if turn == last else (self.epoch, self.sample + size)
            self.samples = len(owns[turn])
            self.notice(self._mesh, axes, size, part)
            yield part
        self.notice(self._mesh, axes, None, None)

    def _batches(self) -> list[list[int]]:
        """Return the samples of each batch from the position on."""
        order = list(range(len(self.dataset)))
        if self.shuffle:
            draw = torch.Generator().manual_seed((self.seed + self.epoch) % (1 << 63))
            order = torch.randperm(len(self.dataset), generator=draw).tolist()
        batches = [order[at : at + self.batch_size] for at in range(self.sample, len(order), self.batch_size)]
        return [batch for batch in batches if len(batch) == self.batch_size or not self.drop_last]

    def _own(self, axes: tuple[str, ...], size: int) -> range:
        """Return which samples of a batch are this device's."""
        cut = Cut(axes, prod(self._mesh.shape[axis] for axis in axes), size)
        return range(*cut.ranges(self._mesh, device_of(self._mesh), 1)[0])

    def state_dict(self) -> dict[str, int]:
        """Return the position: it means the same on any mesh."""
        return {"epoch": self.epoch, "sample": self.sample, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from a position."""
        wrong = [text for name in ("epoch", "sample", "seed") for text in integer(name, state.get(name), 0)]
        if not wrong and state["sample"] > len(self.dataset):
            wrong = [f"sample must be at most {len(self.dataset)}, the samples of the dataset, got {state['sample']}"]
        if wrong:
            raise LayoutError(f"load_state_dict: {'; '.join(wrong)}.")
        self.epoch, self.sample, self.seed = state["epoch"], state["sample"], state["seed"]

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch anew."""
        self.load_state_dict({"epoch": epoch, "sample": 0, "seed": self.seed})


class _Batches:
    """The batch sampler of torch's DataLoader: the samples of this device, set anew for each pass."""

    def __init__(self) -> None:
        self.lists = list[list[int]]()

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.lists)

    def __len__(self) -> int:
        return len(self.lists)
