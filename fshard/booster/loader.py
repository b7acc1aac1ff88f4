"""`Loader`: a dataset in batches, of which each device gets its part.

A batch has `batch_size` samples on all devices together. Its samples, and their order, depend only on seed and epoch;
so training is the same on any number of devices, and a position, the number of samples taken, is valid on other
meshes. No sample is dropped or repeated: where the last batch is uneven, parts differ by one.

    10 samples, batch_size 4, 2 devices      device 0   [3 8] [1 9] [0]
                                             device 1   [5 2] [7 4] [6]

Outside of `fs.run`, where the caller runs all devices, a batch is global.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from fshard.booster.plugins import Plugin
from fshard.errors import ScopeError
from fshard.mesh.layout import PyTree, flatten
from fshard.mesh.spmd.run import is_outside
from fshard.transforms.batch import BatchPart, Cut, filled, rows_of


class DeviceState:
    """The state of a Booster on one device. The batches of its loaders decide what the device's part of a batch weighs.

    As many rows as the device's part of a yielded batch: that batch, the last one first.
    Else, within a loop over a loader: the batch yielded last, whose samples may be along another dim.
    Else: a batch of the caller's own, whose parts weigh the same on all devices, as under DDP.
    """

    def __init__(self, plugin: Plugin) -> None:
        self.plugin = plugin = plugin.on_mesh()
        self.mesh = plugin.default_mesh()
        self.models = 0  # boosted or initialized so far
        self.sync = True  # backwards reduce gradients
        self.is_iterating = False
        self._axes = () if plugin.in_stages() or is_outside(self.mesh) else plugin.axes()
        self._cuts: list[Cut] = []  # of the batches so far, the last first

    def cut(self, size: int) -> Cut:
        """Return how a batch of a size is sharded."""
        return Cut(self._axes, prod(self.mesh.shape[axis] for axis in self._axes), size)

    def add(self, cut: Cut) -> None:
        """Record a batch."""
        self._cuts = [cut, *(before for before in self._cuts if before != cut)]

    def part_of(self, tree: PyTree) -> BatchPart:
        """Return what a loop gives to its model as this device's part of a batch."""
        rows, cuts = self._rows_and_cuts(tree)
        last = self._cuts[:1] if self.is_iterating or not rows else []
        equal_parts = self.cut(self.cut(0).parts * max([1, *rows[:1]]))
        return BatchPart(tree, [*cuts, *last, equal_parts][0])

    def as_part(self, batch: PyTree) -> PyTree:
        """Return a batch of a functional step as this device's part, if a loader has yielded one of as many rows."""
        cuts = self._rows_and_cuts(batch)[1] if self._axes else []
        return BatchPart(batch, cuts[0]) if cuts else batch

    def _rows_and_cuts(self, tree: PyTree) -> tuple[list[int], list[Cut]]:
        """Return the number of rows of each tensor, and the recorded batches of which this device has as many."""
        rows = [count for x in flatten(tree)[0] if (count := rows_of(x)) is not None]
        return rows, [cut for cut in self._cuts if cut.rows(self.mesh) in rows]


_SAME = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor", "multiprocessing_context",
    "in_order", "persistent_workers",
)  # fmt: skip
"""The options of torch's DataLoader that mean the same here."""


class Loader:
    """The batches of a torch loader, as one device gets them; global ones where the caller runs all devices.

    Iterating continues from the position, then with the next epoch; every returned batch counts as taken.

    Args:
        loader: its batches are those of all devices together, in order or shuffled.
        seed: with the epoch it decides the order of a shuffled loader.
        state: records every batch; it has the mesh, and the axes that shard a batch.

    `epoch` and `sample` are the position. `samples` is the number of samples of the last batch on this device: 0 where
    it computes on a neighbour's with weight 0.
    """

    def __init__(self, loader: DataLoader[Any], seed: int, state: DeviceState) -> None:
        sampler: Any = loader.sampler
        self.shuffle = type(sampler) is RandomSampler
        chooses = self.shuffle and (
            sampler.replacement or sampler._num_samples or sampler.generator
        )
        plain = type(sampler) in (RandomSampler, SequentialSampler) and not chooses
        if not plain or loader.batch_size is None or loader.generator:
            reason = f"a generator, a batch_sampler or a sampler of its own ({type(sampler).__name__}). Leave these out"
            if isinstance(loader.dataset, IterableDataset):
                reason = "an IterableDataset. Give it a dataset with an index"
            raise ValueError(
                f"dataloader must take each sample once, in order or shuffled by a seed; got one with {reason}, or iterate it "
                "without boosting it, a part on each device."
            )
        self.dataset: Any = loader.dataset
        self.batch_size, self.drop_last, self.seed = loader.batch_size, bool(loader.drop_last), seed
        self.epoch = self.sample = self.samples = 0
        self._outside, self._state = is_outside(state.mesh), state
        self._local_batches: list[
            list[int]
        ] = []  # the samples of this device, replaced in each loop
        self._loop: list[list[int]] = []  # the batches of the loop in progress
        options: Any = {name: getattr(loader, name) for name in _SAME}
        self._by_torch = DataLoader(self.dataset, batch_sampler=self._local_batches, **options)

    def __len__(self) -> int:
        """Return the number of batches of the loop in progress, else of the next: of an epoch, or those that are left of it."""
        return len(self._loop or self._batches())

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches from the position to the end of the epoch; of the next epoch if none is left."""
        state = self._state
        if self._outside and not is_outside(state.mesh):
            raise ScopeError(
                "a loader that was made outside of fs.run and used inside has one position for all devices. Make it inside, "
                "where each device has its own."
            )
        self._loop = batches = self._batches()
        self._local_batches[:] = map(self._local, batches)
        try:
            for i, (batch, shard) in enumerate(zip(batches, self._by_torch, strict=True), 1):
                cut, is_last = state.cut(len(batch)), i == len(batches)
                start, stop = cut.local_range(state.mesh)
                self.sample, self.samples = self.sample + cut.length, stop - start
                if is_last:
                    self.set_epoch(self.epoch + 1)
                state.add(cut)
                state.is_iterating = True
                yield shard
                if self._loop is not batches and not is_last:
                    raise ValueError(
                        "a loop over this loader was continued after another had begun. Boost a loader for each."
                    )
            state.is_iterating = False
        finally:
            if self._loop is batches:
                self._loop = []

    def peek(self) -> Any:
        """Return the batch at the position, without taking it."""
        batch = self._batches()[0]
        self._state.add(self._state.cut(len(batch)))
        options: Any = {"collate_fn": self._by_torch.collate_fn, "generator": torch.Generator()}
        return next(iter(DataLoader(self.dataset, batch_sampler=[self._local(batch)], **options)))

    def _local(self, batch: list[int]) -> list[int]:
        """Return the samples of a batch that this device takes; a neighbour's, if it has none."""
        return batch[
            slice(*filled(self._state.cut(len(batch)).local_range(self._state.mesh), len(batch)))
        ]

    def _batches(self) -> list[list[int]]:
        """Return the samples of each batch from the position on; if none is left, of the next epoch."""
        order = list(range(len(self.dataset)))
        if self.shuffle:
            draw = torch.Generator().manual_seed((self.seed + self.epoch) % (1 << 63))
            order = torch.randperm(len(self.dataset), generator=draw).tolist()
        batches = [
            order[start : start + self.batch_size]
            for start in range(self.sample, len(order), self.batch_size)
        ]
        batches = [
            batch for batch in batches if len(batch) == self.batch_size or not self.drop_last
        ]
        if batches or not self.sample:
            return batches
        self.set_epoch(self.epoch + 1)
        return self._batches()

    def state_dict(self) -> dict[str, int]:
        """Return the position: it means the same on any mesh."""
        return {"epoch": self.epoch, "sample": self.sample, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a position."""
        self.epoch, self.sample, self.seed = state["epoch"], state["sample"], state["seed"]

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; the position in the present one stays: `sample = 0` restarts it."""
        if epoch != self.epoch:
            self.epoch, self.sample = epoch, 0
