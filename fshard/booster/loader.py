"""`Loader`: a dataset in batches, of which each device gets its part.

A batch has `batch_size` samples on all devices together. Its samples, and their order, depend only on seed and epoch;
so training is the same on any number of devices, and a position, the number of samples taken, is valid on other
meshes. No sample is dropped or repeated: where the last batch is uneven, parts differ by one.

    10 samples, batch_size 4, 2 devices      device 0   [3 8] [1 9] [0]
                                             device 1   [5 2] [7 4] [6]

Outside of `fs.run`, where the caller runs all devices, a batch is global.

Other sources of samples are cut alike:

    sampler, batch_sampler    all devices draw the same indices of an epoch, by its seed
    IterableDataset           all devices read the same stream, and each keeps its samples of every batch
    batch_size=None           each item is a batch of its own: of n devices, each takes every n-th
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from fshard.booster.loss_check import LossCheck
from fshard.booster.plugins import Plugin
from fshard.errors import ScopeError
from fshard.mesh.layout import PyTree, flatten
from fshard.mesh.spmd.run import is_outside
from fshard.randomness import folded, keyed_random
from fshard.transforms.agreement import hash_of
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
        self.loop_models = WeakSet[Any]()  # those that are run by loops
        self.sync = True  # backwards reduce gradients
        self.loss_check = LossCheck()
        self.is_iterating = False
        self.order = (
            0  # a hash of the samples that samplers have chosen, which devices compare in each step
        )
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
        loader: its batches are those of all devices together.
        seed: with the epoch it decides the order of a shuffled loader, and what a sampler draws.
        state: records every batch; it has the mesh, and the axes that shard a batch.

    `epoch` and `sample` are the position. `samples` is the number of samples of the last batch on this device: 0 where
    it computes on a neighbour's with weight 0. Of a loader with batch_size=None, samples are its items.

    A sampler draws by torch's generators, seeded by `seed` and the epoch, or has a method `set_epoch`, as a stream may. Then
    a position is valid for it. It must end. A stream must be the same on all devices, without a part of its own for each.
    """

    def __init__(self, loader: DataLoader[Any], seed: int, state: DeviceState) -> None:
        if isinstance(loader.sampler, DistributedSampler):
            raise ValueError(
                "dataloader must have the samples of all devices, of which each takes its part; got a DistributedSampler. "
                "Leave it out, and give shuffle=True: the boosted loader shuffles by seed and epoch."
            )
        self.dataset: Any = loader.dataset
        self._is_stream = isinstance(loader.dataset, IterableDataset)
        self._has_own_batches = _has_own_batches(loader)
        self._own_sampler: Any = None if self._is_stream else _own_sampler(loader)
        self.shuffle = self._own_sampler is None and type(loader.sampler) is RandomSampler
        is_batched = loader.batch_sampler is not None
        self.batch_size = (loader.batch_size or 1) if is_batched else state.cut(0).parts
        self.drop_last, self.seed = bool(loader.drop_last), seed
        self.epoch = self.sample = self.samples = 0
        self._outside, self._state = is_outside(state.mesh), state
        self._chosen: tuple[tuple[int, int], list[Any]] | None = None  # with its seed and epoch
        self._local_batches: list[list[int]] = []  # of this device, replaced in each loop
        self._loop: _Loop | None = None  # in progress

        options: Any = {name: getattr(loader, name) for name in _SAME}
        self._collate = loader.collate_fn if is_batched else _Single(loader.collate_fn)
        if self._is_stream:
            options |= {"batch_size": self.batch_size, "drop_last": self.drop_last}
            options["collate_fn"] = _as_list  # the device collates its samples alone
        else:
            options |= {"batch_sampler": self._local_batches, "collate_fn": self._collate}
        self._by_torch = DataLoader(self.dataset, **options)

    def __len__(self) -> int:
        """Return the number of batches of the loop in progress, else of the next: of an epoch, or those that are left of it."""
        if self._loop is not None:
            return self._loop.length()
        return self._stream_length() if self._is_stream else len(self._batches())

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches from the position to the end of the epoch; of the next epoch if none is left."""
        state = self._state
        if self._outside and not is_outside(state.mesh):
            raise ScopeError(
                "a loader that was made outside of fs.run and used inside has one position for all devices. Make it inside, "
                "where each device has its own."
            )
        self._loop = loop = self._stream_loop() if self._is_stream else self._indexed_loop()
        try:
            for cut, shard, is_last in loop.parts:
                start, stop = cut.local_range(state.mesh)
                self.sample, self.samples = self.sample + cut.length, stop - start
                if is_last:
                    self.set_epoch(self.epoch + 1)
                state.add(cut)
                state.is_iterating = True
                yield shard
                if self._loop is not loop and not is_last:
                    raise ValueError(
                        "a loop over this loader was continued after another had begun. Boost a loader for each."
                    )
            state.is_iterating = False
        finally:
            if self._loop is loop:
                self._loop = None

    def peek(self) -> Any:
        """Return the batch at the position, without taking it."""
        if self._is_stream:
            cut, shard, _ = next(self._stream_parts())
            self._state.add(cut)
            return shard
        batch = self._batches()[0]
        self._state.add(self._state.cut(len(batch)))
        options: Any = {"collate_fn": self._collate, "generator": torch.Generator()}
        return next(iter(DataLoader(self.dataset, batch_sampler=[self._local(batch)], **options)))

    # -- datasets with an index --------------------------------------------------------------------------------------

    def _indexed_loop(self) -> _Loop:
        batches = self._batches()
        self._local_batches[:] = map(self._local, batches)
        return _Loop(self._indexed_parts(batches), lambda: len(batches))

    def _indexed_parts(self, batches: list[list[int]]) -> Iterator[_Part]:
        """Yield this device's parts of batches."""
        for number, (batch, shard) in enumerate(zip(batches, self._by_torch, strict=True), 1):
            yield self._state.cut(len(batch)), shard, number == len(batches)

    def _local(self, batch: list[int]) -> list[int]:
        """Return the samples of a batch that this device takes; a neighbour's, if it has none."""
        return batch[
            slice(*filled(self._state.cut(len(batch)).local_range(self._state.mesh), len(batch)))
        ]

    def _batches(self) -> list[list[int]]:
        """Return the samples of each batch from the position on; if none is left, of the next epoch."""
        batches = self._batches_of_epoch()
        if batches or not self.sample:
            return batches
        self.set_epoch(self.epoch + 1)
        return self._batches()

    def _batches_of_epoch(self) -> list[list[int]]:
        """Return the samples of each batch from the position to the end of the epoch."""
        if self._has_own_batches:
            batches, count = self._draw(), 0
            starts = list[int]()
            for batch in batches:
                starts.append(count)
                count += len(batch)
            pairs = zip(batches, starts, strict=True)
            return [batch for batch, start in pairs if start >= self.sample]
        if self._own_sampler is not None:
            order = self._draw()
        elif self.shuffle:
            draw = torch.Generator().manual_seed((self.seed + self.epoch) % (1 << 63))
            order = torch.randperm(len(self.dataset), generator=draw).tolist()
        else:
            order = list(range(len(self.dataset)))
        batches = [
            order[start : start + self.batch_size]
            for start in range(self.sample, len(order), self.batch_size)
        ]
        return [batch for batch in batches if len(batch) == self.batch_size or not self.drop_last]

    def _draw(self) -> list[Any]:
        """Return what the sampler chooses in the epoch, in its order: drawn once, by seed and epoch."""
        if self._chosen is not None and self._chosen[0] == (self.seed, self.epoch):
            return self._chosen[1]
        sources = _samplers_of(self._own_sampler)
        generators = [x for each in sources if (x := getattr(each, "generator", None)) is not None]
        states = [generator.get_state() for generator in generators]
        for source in sources:
            _set_epoch(source, self.epoch)
        for generator in generators:
            generator.manual_seed(folded(self.seed, generator.initial_seed(), self.epoch))
        with keyed_random(self.seed, self.epoch, "sampler"):
            chosen = list(self._own_sampler)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)  # with its seed, of which the next epoch's is made
        self._chosen = (self.seed, self.epoch), chosen
        self._state.order = hash_of((self._state.order, chosen))
        return chosen

    # -- streams -----------------------------------------------------------------------------------------------------

    def _stream_loop(self) -> _Loop:
        return _Loop(self._stream_parts(), self._stream_length)

    def _stream_parts(self) -> Iterator[_Part]:
        """Yield this device's parts of the batches of a stream from the position on; if none is left, of the next epoch."""
        _set_epoch(self.dataset, self.epoch)
        position, skipped, batch = self.sample, 0, None
        for following in self._by_torch:
            if skipped < position:
                skipped += len(following)
                continue
            if batch is not None:
                yield self._part(batch, is_last=False)
            batch = following
        if batch is not None:
            yield self._part(batch, is_last=True)
        elif position:
            self.set_epoch(self.epoch + 1)
            yield from self._stream_parts()

    def _part(self, batch: list[Any], *, is_last: bool) -> _Part:
        """Return this device's part of a batch of samples."""
        cut = self._state.cut(len(batch))
        start, stop = filled(cut.local_range(self._state.mesh), len(batch))
        return cut, self._collate(batch[start:stop]), is_last

    def _stream_length(self) -> int:
        """Return the number of batches from the position on; raise as torch does, if a stream has no length."""
        size = self.batch_size
        left = len(self.dataset) - self.sample
        if left <= 0:
            left = len(self.dataset)
        return left // size if self.drop_last else -(-left // size)

    # -- the position ------------------------------------------------------------------------------------------------

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


_Part = tuple[Cut, Any, bool]
"""How a batch is sharded, this device's part of it, and whether it is the last one of the epoch."""


class _Loop(NamedTuple):
    """A loop over a loader: the parts that it yields, and their number."""

    parts: Iterator[_Part]
    length: Callable[[], int]


def _has_own_batches(loader: DataLoader[Any]) -> bool:
    """Return True if a batch sampler was given to a loader."""
    if loader.batch_sampler is None:
        return False
    return type(loader.batch_sampler) is not BatchSampler or loader.batch_size is None


def _own_sampler(loader: DataLoader[Any]) -> Any:
    """Return the sampler that was given to a loader; None if it takes each sample once, in order or shuffled."""
    if _has_own_batches(loader):
        return loader.batch_sampler
    sampler: Any = loader.sampler
    if type(sampler) is SequentialSampler:
        return None
    if type(sampler) is not RandomSampler:
        return sampler
    chooses = sampler.replacement or vars(sampler)["_num_samples"] or sampler.generator
    return sampler if chooses else None


def _as_list(samples: Any) -> list[Any]:
    return [*samples]


class _Single(NamedTuple):
    """Collates a list of one item, as a loader without batches does."""

    convert: Callable[[Any], Any]

    def __call__(self, items: list[Any]) -> Any:
        (item,) = items
        return self.convert(item)


def _samplers_of(sampler: Any) -> list[Any]:
    """Return a sampler and those that it takes its samples from."""
    samplers = [sampler]
    while isinstance(inner := getattr(samplers[-1], "sampler", None), Sampler):
        samplers.append(inner)
    return samplers


def _set_epoch(source: Any, epoch: int) -> None:
    """Give the epoch to a sampler or a stream that has `set_epoch`."""
    if callable(getattr(source, "set_epoch", None)):
        source.set_epoch(epoch)
