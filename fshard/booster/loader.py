"""`Loader`: a dataset in batches, of which each device gets its part.

A batch has `batch_size` samples on all devices together. Its samples, and their order, depend only
on seed and epoch; so training is the same on any number of devices, and a position, the number of
samples taken, is valid on other meshes. No sample is repeated, and none is dropped unless the loader
has `drop_last`: where the last batch is uneven, parts differ by one.

    10 samples, batch_size 4, 2 devices      device 0   [3 8] [1 9] [0]
                                             device 1   [5 2] [7 4] [6]

Outside of `fs.run`, where the caller runs all devices, a batch is global.

Other sources of samples are cut alike:

    sampler, batch_sampler    all devices draw the same indices of an epoch, by its seed
    IterableDataset           all devices read the same stream, and each keeps its samples of every
                              batch
    batch_size=None           each item is a batch of its own: of n devices, each takes every n-th
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import ceil, prod
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
    """The state of a Booster on one device.

    The batches of its loaders decide what the device's part of a batch weighs:

    - A part that has as many rows as the device's part of a yielded batch: as that batch, the last
      one first.
    - Else, in a loop over a loader, or after one that did not run to its end (as that of
      `next(iter(loader))`): as the batch yielded last, whose samples may be along another dim.
    - Else it is of the caller's own batch: all devices weigh the same, as under DDP.
    """

    def __init__(self, plugin: Plugin) -> None:
        self.plugin = plugin = plugin.on_mesh()
        self.mesh = plugin.default_mesh()
        self.models = 0  # boosted or initialized so far
        self.loop_models = WeakSet[Any]()  # those that are run by loops
        self.sync = True  # backwards reduce gradients
        self.loss_check = LossCheck()
        self.is_iterating = False
        # A hash of the samples that samplers have chosen, which devices compare in each step.
        self.order = 0
        self._axes = () if plugin.in_stages() or is_outside(self.mesh) else plugin.axes()
        self._cuts: list[Cut] = []  # of the batches so far, the last first

    def cut(self, size: int) -> Cut:
        """Return how a batch of a size is sharded."""
        return Cut(self._axes, prod(self.mesh.shape[axis] for axis in self._axes), size)

    def add(self, cut: Cut) -> None:
        """Record a batch."""
        self._cuts = [cut, *[before for before in self._cuts if before != cut]]

    def part_of(self, tree: PyTree) -> BatchPart:
        """Return what a loop gives to its model as this device's part of a batch."""
        rows, cuts = self._rows_and_cuts(tree)
        if cuts:
            return BatchPart(tree, cuts[0])
        if self._cuts and (self.is_iterating or not rows):
            return BatchPart(tree, self._cuts[0])
        rows_of_device = max(rows[0], 1) if rows else 1
        parts = self.cut(0).parts
        return BatchPart(tree, self.cut(parts * rows_of_device))

    def as_part(self, batch: PyTree) -> PyTree:
        """Return a batch of a functional step as this device's part.

        It is one if a loader has yielded a batch of which the device has as many rows.
        """
        if not self._axes:
            return batch
        _, cuts = self._rows_and_cuts(batch)
        return BatchPart(batch, cuts[0]) if cuts else batch

    def _rows_and_cuts(self, tree: PyTree) -> tuple[list[int], list[Cut]]:
        """Return the number of rows of each tensor, and the batches of as many rows here."""
        rows = list[int]()
        for x in flatten(tree)[0]:
            count = rows_of(x)
            if count is not None:
                rows.append(count)
        return rows, [cut for cut in self._cuts if cut.rows(self.mesh) in rows]


_SAME = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "prefetch_factor",
    "multiprocessing_context",
    "in_order",
    "persistent_workers",
)
"""The options of torch's DataLoader that mean the same here."""


class _Part(NamedTuple):
    """This device's part of a batch.

    Args:
        cut: how the batch is sharded.
        samples: of this device, collated.
        is_last: True if the batch is the last one of the epoch.
    """

    cut: Cut
    samples: Any
    is_last: bool


class _Loop(NamedTuple):
    """A loop over a loader: the parts that it yields, and their number."""

    parts: Iterator[_Part]
    length: Callable[[], int]


class _Order(NamedTuple):
    """The choice of a sampler in an epoch, by its seed."""

    seed: int
    epoch: int
    chosen: list[Any]


class Loader:
    """The batches of a torch loader, as one device gets them.

    They are global where the caller runs all devices. Iterating continues from the position, then
    with the next epoch; every returned batch counts as taken.

    Args:
        loader: its batches are those of all devices together.
        seed: with the epoch it decides the order of a shuffled loader, and what a sampler draws.
        state: records every batch; it has the mesh, and the axes that shard a batch.

    `epoch` and `sample` are the position. `samples` is the number of samples of the last batch on
    this device: 0 where it computes on a neighbour's with weight 0. Of a loader with
    batch_size=None, samples are its items.

    A sampler draws by torch's generators, seeded by `seed` and the epoch, or has a method
    `set_epoch`, as a stream may. Then a position is valid for it. It must end. A stream must be the
    same on all devices, without a part of its own for each.
    """

    def __init__(self, loader: DataLoader[Any], seed: int, state: DeviceState) -> None:
        if isinstance(loader.sampler, DistributedSampler):
            raise ValueError(
                "dataloader must have the samples of all devices, of which each takes its part; "
                "got a DistributedSampler. Leave it out, and give shuffle=True: the boosted loader "
                "shuffles by seed and epoch."
            )
        self.dataset: Any = loader.dataset
        self._is_stream = isinstance(loader.dataset, IterableDataset)
        self._has_own_batches = _has_own_batches(loader)
        self._own_sampler: Any = None if self._is_stream else _own_sampler(loader)
        self.shuffle = self._own_sampler is None and type(loader.sampler) is RandomSampler
        is_batched = loader.batch_sampler is not None
        self.batch_size = (loader.batch_size or 1) if is_batched else state.cut(0).parts
        self.drop_last = bool(loader.drop_last)
        self.seed = seed
        self.epoch = self.sample = self.samples = 0
        self._outside = is_outside(state.mesh)
        self._state = state
        self._order: _Order | None = None
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
        """Return the number of batches of the loop in progress, else of the next.

        The next one has those of an epoch, or what is left of it.
        """
        if self._loop is not None:
            return self._loop.length()
        if self._is_stream:
            return self._stream_length(self.sample)
        return len(self._batches())

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches from the position to the end of the epoch.

        If none is left, they are those of the next epoch.
        """
        state = self._state
        if self._outside and not is_outside(state.mesh):
            raise ScopeError(
                "a loader that was made outside of fs.run and used inside has one position for all "
                "devices. Make it inside, where each device has its own."
            )
        self._loop = loop = self._stream_loop() if self._is_stream else self._indexed_loop()
        try:
            for cut, samples, is_last in loop.parts:
                # The position is that after the batch, before the loop's body runs: a checkpoint
                # that the body saves continues with the next one.
                start, stop = cut.local_range(state.mesh)
                self.sample += cut.length
                self.samples = stop - start
                if is_last:
                    self.set_epoch(self.epoch + 1)
                state.add(cut)
                state.is_iterating = True
                yield samples
                if self._loop is not loop and not is_last:
                    raise ValueError(
                        "a loop over this loader was continued after another had begun, or its "
                        "position was loaded. Boost a loader for each loop; leave a loop before "
                        "load_state_dict."
                    )
            state.is_iterating = False
        finally:
            if self._loop is loop:
                self._loop = None

    def peek(self) -> Any:
        """Return the batch at the position, without taking it."""
        if self._is_stream:
            part = next(self._stream_parts())
            self._state.add(part.cut)
            return part.samples
        batch = self._batches()[0]
        self._state.add(self._state.cut(len(batch)))
        options: Any = {"collate_fn": self._collate, "generator": torch.Generator()}
        return next(iter(DataLoader(self.dataset, batch_sampler=[self._local(batch)], **options)))

    # -- datasets with an index -------------------------------------------------------------------

    def _indexed_loop(self) -> _Loop:
        batches = self._batches()
        # In place: the sampler of torch's loader, which may have workers, is this list.
        self._local_batches[:] = [self._local(batch) for batch in batches]
        return _Loop(self._indexed_parts(batches), lambda: len(batches))

    def _indexed_parts(self, batches: list[list[int]]) -> Iterator[_Part]:
        """Yield this device's parts of batches."""
        for number, (batch, samples) in enumerate(zip(batches, self._by_torch, strict=True), 1):
            yield _Part(self._state.cut(len(batch)), samples, is_last=number == len(batches))

    def _local(self, batch: list[int]) -> list[int]:
        """Return the samples of a batch that this device takes; a neighbour's, if it has none."""
        start, stop = self._local_range(len(batch))
        return batch[start:stop]

    def _local_range(self, size: int) -> tuple[int, int]:
        """Return where this device's samples of a batch begin and end; never an empty range."""
        return filled(self._state.cut(size).local_range(self._state.mesh), size)

    def _batches(self) -> list[list[int]]:
        """Return the samples of each batch from the position on; of the next epoch if none is."""
        batches = self._batches_of_epoch()
        if batches or not self.sample:
            return batches
        self.set_epoch(self.epoch + 1)
        return self._batches()

    def _batches_of_epoch(self) -> list[list[int]]:
        """Return the samples of each batch from the position to the end of the epoch."""
        if self._has_own_batches:
            return self._own_batches()
        if self._own_sampler is not None:
            order = self._draw()
        elif self.shuffle:
            # Torch takes seeds below 2 ** 64, of which negative ones are a half.
            draw = torch.Generator().manual_seed((self.seed + self.epoch) % (1 << 63))
            order = torch.randperm(len(self.dataset), generator=draw).tolist()
        else:
            order = list(range(len(self.dataset)))

        batches = list[list[int]]()
        for start in range(self.sample, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            is_full = len(batch) == self.batch_size
            if is_full or not self.drop_last:
                batches.append(batch)
        return batches

    def _own_batches(self) -> list[list[int]]:
        """Return the batches of a batch sampler that begin at the position or after it."""
        batches = list[list[int]]()
        start = 0
        for batch in self._draw():
            if start >= self.sample:
                batches.append(batch)
            start += len(batch)
        return batches

    def _draw(self) -> list[Any]:
        """Return what the sampler chooses in the epoch, in order: drawn once, by seed and epoch."""
        order = self._order
        if order is not None and (order.seed, order.epoch) == (self.seed, self.epoch):
            return order.chosen

        sources = _samplers_of(self._own_sampler)
        generators = list[torch.Generator]()
        for source in sources:
            generator = getattr(source, "generator", None)
            if generator is not None:
                generators.append(generator)
        states = [generator.get_state() for generator in generators]
        for source in sources:
            _set_epoch(source, self.epoch)
        for generator in generators:
            generator.manual_seed(folded(self.seed, generator.initial_seed(), self.epoch))
        with keyed_random(self.seed, self.epoch, "sampler"):
            chosen = list(self._own_sampler)
        # The state has the generator's own seed, of which the next epoch's is made.
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)

        self._order = _Order(self.seed, self.epoch, chosen)
        self._state.order = hash_of((self._state.order, chosen))
        return chosen

    # -- streams ----------------------------------------------------------------------------------

    def _stream_loop(self) -> _Loop:
        begin = self.sample
        return _Loop(self._stream_parts(), lambda: self._stream_length(begin))

    def _stream_parts(self) -> Iterator[_Part]:
        """Yield this device's parts of the batches of a stream, from the position on.

        If none is left, they are those of the next epoch. A batch is yielded when the next one is
        there, or when there is none: only then it is known to be the last.
        """
        _set_epoch(self.dataset, self.epoch)
        position = self.sample
        skipped = 0
        batch = None
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
        start, stop = self._local_range(len(batch))
        samples = self._collate(batch[start:stop])
        return _Part(self._state.cut(len(batch)), samples, is_last)

    def _stream_length(self, begin: int) -> int:
        """Return the number of batches from a position on.

        A stream without a length raises as torch does.
        """
        remaining = len(self.dataset) - begin
        if remaining <= 0:
            remaining = len(self.dataset)  # the next epoch
        if self.drop_last:
            return remaining // self.batch_size
        return ceil(remaining / self.batch_size)

    # -- the position -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, int]:
        """Return the position: it means the same on any mesh."""
        return {"epoch": self.epoch, "sample": self.sample, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a position: a loop in progress is over."""
        self._loop = None
        self.epoch = state["epoch"]
        self.sample = state["sample"]
        self.seed = state["seed"]

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; the position in the present one stays: `sample = 0` restarts it."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.sample = 0


def _has_own_batches(loader: DataLoader[Any]) -> bool:
    """Return True if a batch sampler was given to a loader."""
    if loader.batch_sampler is None:
        return False
    return type(loader.batch_sampler) is not BatchSampler or loader.batch_size is None


def _own_sampler(loader: DataLoader[Any]) -> Any:
    """Return the sampler that was given to a loader.

    None if the loader takes each sample once, in order or shuffled by no generator of its own.
    """
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
