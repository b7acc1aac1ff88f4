"""Which device writes which elements, and where in its file: computed alike by all, so that saving sends nothing.

The devices that hold equal shards (replicas) divide the bytes of these: all shards that are replicated over the same axes
form one row of bytes, which is split evenly between the replicas.

    P("data") on data=2, model=2, arrays a and b         row of data=0: a0 a0 a0 b0     model=0 writes a0 a0, model=1 a0 b0
                                                         row of data=1: a1 a1 a1 b1     likewise

In a file larger dtypes come first, so that every element is aligned. This is part of the format: golden files in the
tests freeze it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from fshard.checkpoint.copying import Block, Span, overlap
from fshard.mesh.layout import Layout, Mesh
from fshard.mesh.layout.arithmetic import chunk, flat_range, ravel, unravel
from fshard.mesh.reshard.regions import Numbers


class ArrayEntry(NamedTuple):
    """An array in a checkpoint: its layout, and where it begins in a fused one, of which it is a part."""

    name: str
    path: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    offset: tuple[int, ...]
    full_shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def data_name(self) -> str:
        """The name in a data file."""
        return (
            self.name
            if self.shape == self.full_shape
            else f"{self.name}@{','.join(map(str, self.offset))}"
        )

    @property
    def replicas(self) -> int:
        """The number of devices that have each shard."""
        return prod(self.layout.mesh.shape[axis] for axis in self.layout.replicated_axes)

    def shard_number(self, device: int) -> int:
        """Return a number that is equal for the devices of one shard."""
        mesh, replicated = self.layout.mesh, self.layout.replicated_axes
        return _along(mesh, device, [axis for axis in mesh.axis_names if axis not in replicated])


@lru_cache(maxsize=4096)
def span_of(layout: Layout, shape: tuple[int, ...], device: int) -> Span:
    """Return the block that the shard of a device is taken from, and the range of it that is stored.

    >>> from fshard.mesh.layout import P
    >>> span_of(Layout(Mesh((("data", 2),), "abstract", "meta"), P.flat("data")), (2, 3), 1)
    Span(block=((0, 2), (0, 3)), start=3, stop=6)
    """
    block = layout.block(shape, device) or ((0, 1),)
    if not layout.has_any(device):
        return Span(block, 0, 0)
    return Span(block, *layout.ranges(shape, device)[0]) if layout.spec.is_flat else _full(block)


class Column(NamedTuple):
    """The ranges that one device writes: of each array one of its flattened block, at a byte after the header of its file.

    `begins` is the byte of each shard in the row of bytes that the replicas divide, `totals` the length of that row,
    `firsts` the start of each shard.
    """

    starts: list[int]
    stops: list[int]
    bytes_before: list[int]
    begins: list[int]
    totals: list[int]
    firsts: list[int]


class Division:
    """Which range of each array each device writes."""

    def __init__(self, arrays: Sequence[ArrayEntry]) -> None:
        self.arrays = arrays
        self.column = cache(self._column)  # of a device
        kinds: dict[tuple[Layout, int], list[int]] = defaultdict(list)
        groups: dict[tuple[Mesh, tuple[str, ...]], list[int]] = defaultdict(list)
        for number, entry in enumerate(arrays):
            kinds[entry.layout, len(entry.shape)].append(number)
            groups[entry.layout.mesh, entry.layout.replicated_axes].append(number)
        self._kinds = [
            (
                layout,
                np.array(numbers),
                np.array([arrays[number].shape or (1,) for number in numbers], np.int64),
            )
            for (layout, _), numbers in kinds.items()
        ]
        self._groups = [(mesh, axes, np.array(numbers)) for (mesh, axes), numbers in groups.items()]
        self._sizes = np.array([entry.itemsize for entry in arrays], np.int64)
        self.order = np.argsort(
            -self._sizes, kind="stable"
        )  # of the arrays in files: larger dtypes first

    def _column(self, device: int) -> Column:
        """Return the ranges that a device writes."""
        firsts, lasts = (np.zeros(len(self.arrays), np.int64) for _ in range(2))
        for layout, numbers, shapes in self._kinds:
            firsts[numbers], lasts[numbers] = _ranges(layout, shapes, device)
        starts, stops, begins, totals = firsts.copy(), lasts.copy(), firsts * 0, firsts * 0
        for mesh, axes, numbers in self._groups:
            size, count = self._sizes[numbers], lasts[numbers] - firsts[numbers]
            begin = np.cumsum(count * size) - count * size
            total, replicas = int((count * size).sum()), prod(mesh.shape[axis] for axis in axes)
            begins[numbers], totals[numbers] = begin, total
            rank = _along(mesh, device, axes)
            for bounds, index in ((starts, rank), (stops, rank + 1)):
                bounds[numbers] = firsts[numbers] + np.clip(
                    -((begin - total * index // replicas) // size), 0, count
                )
        written = ((stops - starts) * self._sizes)[self.order]
        bytes_before = np.empty_like(written)
        bytes_before[self.order] = np.cumsum(written) - written
        return Column(
            *(numbers.tolist() for numbers in (starts, stops, bytes_before, begins, totals, firsts))
        )

    def ranges(self, number: int, wanted: Span) -> Iterator[tuple[int, int, Span]]:
        """Yield the parts of an array that have elements of a span: the device, the byte of the first, and its range."""
        entry = self.arrays[number]
        mesh, axes, size = entry.layout.mesh, entry.layout.replicated_axes, entry.itemsize
        replicas = entry.replicas
        for first, block in _shards(entry, wanted):
            column = self.column(first)
            start, stop = overlap(_full(block), wanted)
            if start == stop:
                continue
            begin, total = (
                column.begins[number] - column.firsts[number] * size,
                column.totals[number],
            )
            ranks = [
                ((begin + element * size + 1) * replicas - 1) // total
                for element in (start, stop - 1)
            ]
            for rank in range(max(ranks[0], 0), min(ranks[1], replicas - 1) + 1):
                device = first + _number(mesh, axes, rank)
                column = self.column(device)
                written = Span(block, column.starts[number], column.stops[number])
                low, high = (
                    overlap(written.clip(start, stop), wanted)
                    if written.start < written.stop
                    else (0, 0)
                )
                if low < high:
                    yield (
                        device,
                        column.bytes_before[number] + (low - written.start) * size,
                        Span(block, low, high),
                    )


def _ranges(layout: Layout, shapes: Numbers, device: int) -> tuple[Numbers, Numbers]:
    """Return the ranges of their flattened blocks that a device stores of arrays of one layout. (n, d) -> (n,), (n,)"""
    total = np.ones(len(shapes), np.int64)
    for dim, axes in enumerate(layout.spec.dims(shapes.shape[1])):
        each = -(-shapes[:, dim] // prod(layout.mesh.shape[axis] for axis in axes))
        start = np.minimum(each * _along(layout.mesh, device, axes), shapes[:, dim])
        total *= np.minimum(start + each, shapes[:, dim]) - start
    total *= layout.has_any(device)
    each = -(-total // layout.flat_parts)
    start = np.minimum(each * _along(layout.mesh, device, layout.spec.flat_axes or ()), total)
    return start, np.minimum(start + each, total)


def _shards(entry: ArrayEntry, wanted: Span) -> Iterator[tuple[int, Block]]:
    """Yield the first device of each shard that may have elements of a span, and its block, in the indices of `wanted`."""
    layout, shape, offset = entry.layout, entry.shape or (1,), entry.offset or (0,)
    mesh, chunks = layout.mesh, list[list[tuple[int, tuple[int, int]]]]()
    for length, axes, origin, (start, stop) in zip(
        shape, layout.spec.dims(len(shape)), offset, wanted.block, strict=True
    ):
        parts = prod(mesh.shape[axis] for axis in axes)
        indices = _chunk_indices(length, parts, max(start - origin, 0), min(stop - origin, length))
        ranges = [
            (_number(mesh, axes, index), flat_range(length, parts, index)) for index in indices
        ]
        chunks.append(
            [(device, (start + origin, stop + origin)) for device, (start, stop) in ranges]
        )
    base = mesh.index(layout.place)
    for row in product(*chunks):
        block = tuple([bounds for _, bounds in row])
        first, full = base + sum(device for device, _ in row), _full(block)
        for index in _chunk_indices(full.stop, layout.flat_parts, *overlap(full, wanted)):
            yield first + _number(mesh, layout.spec.flat_axes or (), index), block


def _chunk_indices(length: int, parts: int, start: int, stop: int) -> range:
    """Return the indices of the flat ranges that a range of elements meets."""
    each = max(chunk(length, parts), 1)
    return range(start // each, -(-stop // each)) if start < stop else range(0)


def _full(block: Block) -> Span:
    return Span(block, 0, prod(stop - start for start, stop in block))


def _along(mesh: Mesh, device: int, axes: Sequence[str]) -> int:
    """Return the index of a device along some axes."""
    coordinates = mesh.coordinates(device) if axes else {}
    return ravel([coordinates[axis] for axis in axes], [mesh.shape[axis] for axis in axes])


@lru_cache(maxsize=4096)
def _number(mesh: Mesh, axes: tuple[str, ...], index: int) -> int:
    """Return the number of the device at an index along some axes, and at 0 along the others."""
    return (
        mesh.index(
            dict(zip(axes, unravel(index, [mesh.shape[axis] for axis in axes]), strict=True))
        )
        if axes
        else 0
    )
