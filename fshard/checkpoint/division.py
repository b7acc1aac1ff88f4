"""Which device writes which elements, and where in its file.

All devices compute this alike, so that saving sends nothing. It is part of the format: golden files
in the tests freeze it.

The devices that hold equal shards (replicas) divide the bytes of these: all shards that are
replicated over the same axes form one row of bytes, which is split evenly between the replicas.
Here are arrays a and b, of 3 elements and 1 in each shard, with P("data") on data=2, model=2:

    data=0    a0 a0 a0 b0      model=0 writes a0 a0, model=1 writes a0 b0
    data=1    a1 a1 a1 b1      likewise

In a file larger dtypes come first, so that every element is aligned.
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
from fshard.mesh.layout.arithmetic import Range, chunk, flat_range, ravel, unravel
from fshard.mesh.reshard.regions import Numbers


class ArrayEntry(NamedTuple):
    """An array in a checkpoint: its layout, and its offset in the fused array it is part of."""

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
        if self.shape == self.full_shape:
            return self.name
        return f"{self.name}@{','.join(map(str, self.offset))}"

    @property
    def replicas(self) -> int:
        """The number of devices that have each shard."""
        return _size(self.layout.mesh, self.layout.replicated_axes)

    def shard_number(self, device: int) -> int:
        """Return a number that is equal for the devices of one shard."""
        mesh = self.layout.mesh
        replicated_axes = self.layout.replicated_axes
        sharded_axes = [axis for axis in mesh.axis_names if axis not in replicated_axes]
        return _along(mesh, device, sharded_axes)


@lru_cache(maxsize=4096)
def span_of(layout: Layout, shape: tuple[int, ...], device: int) -> Span:
    """Return the block that the shard of a device is taken from, and the range that is stored.

    >>> from fshard.mesh.layout import P
    >>> span_of(Layout(Mesh((("data", 2),), "abstract", "meta"), P.flat("data")), (2, 3), 1)
    Span(block=((0, 2), (0, 3)), start=3, stop=6)
    """
    block = layout.block(shape, device) or ((0, 1),)
    if not layout.has_any(device):
        return Span(block, 0, 0)
    if not layout.spec.is_flat:
        return _full(block)
    start, stop = layout.ranges(shape, device)[0]
    return Span(block, start, stop)


# Note [Bytes that replicas divide]
# Of a row of `total` bytes, replica r of n writes the bytes from total * r // n to
# total * (r + 1) // n. An element belongs to the replica that its first byte belongs to. So a
# replica begins with the first element whose byte is not below its own first byte, and the byte b
# belongs to the last replica r with
#
#     total * r // n <= b    which is    total * r < (b + 1) * n
#                            and         r = ((b + 1) * n - 1) // total
#
# The row of the example above has elements of 4 bytes, 16 in all, and 2 replicas: the third a0
# begins at byte 8, so it belongs to (9 * 2 - 1) // 16 = 1.


class Column(NamedTuple):
    """The ranges that one device writes: of each array one, of the flattened block of its shard.

    Args:
        starts: the first element of each range.
        stops: one past the last.
        bytes_before: the byte of each range after the header of the device's file.
        begins: the byte of each shard in its row: see Note [Bytes that replicas divide].
        totals: the length of that row.
        firsts: the first element of each shard.
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

        # Arrays of one layout and rank, and arrays whose shards form one row, are computed at once.
        kinds: dict[tuple[Layout, int], list[int]] = defaultdict(list)
        rows: dict[tuple[Mesh, tuple[str, ...]], list[int]] = defaultdict(list)
        for number, entry in enumerate(arrays):
            kinds[entry.layout, len(entry.shape)].append(number)
            rows[entry.layout.mesh, entry.layout.replicated_axes].append(number)

        self._kinds: list[tuple[Layout, Numbers, Numbers]] = []
        for (layout, _), numbers in kinds.items():
            shapes = [arrays[number].shape or (1,) for number in numbers]
            self._kinds.append((layout, np.array(numbers), np.array(shapes, np.int64)))
        self._rows = [(mesh, axes, np.array(numbers)) for (mesh, axes), numbers in rows.items()]

        self._sizes = np.array([entry.itemsize for entry in arrays], np.int64)
        # of the arrays in files: larger dtypes first
        self.order = np.argsort(-self._sizes, kind="stable")

    def _column(self, device: int) -> Column:
        """Return the ranges that a device writes."""
        firsts = np.zeros(len(self.arrays), np.int64)
        lasts = np.zeros_like(firsts)
        for layout, numbers, shapes in self._kinds:
            firsts[numbers], lasts[numbers] = _ranges(layout, shapes, device)

        starts = firsts.copy()
        stops = lasts.copy()
        begins = np.zeros_like(firsts)
        totals = np.zeros_like(firsts)
        for mesh, axes, numbers in self._rows:
            first = firsts[numbers]
            count = lasts[numbers] - first
            size = self._sizes[numbers]
            ends = np.cumsum(count * size)
            begin = ends - count * size
            total = int(ends[-1])
            begins[numbers] = begin
            totals[numbers] = total

            replicas = _size(mesh, axes)
            replica = _along(mesh, device, axes)
            first_byte = total * replica // replicas
            last_byte = total * (replica + 1) // replicas
            starts[numbers] = first + np.clip(_ceil(first_byte - begin, size), 0, count)
            stops[numbers] = first + np.clip(_ceil(last_byte - begin, size), 0, count)

        written = ((stops - starts) * self._sizes)[self.order]
        bytes_before = np.empty_like(written)
        bytes_before[self.order] = np.cumsum(written) - written
        columns = starts, stops, bytes_before, begins, totals, firsts
        return Column(*[numbers.tolist() for numbers in columns])

    def ranges(self, number: int, wanted: Span) -> Iterator[tuple[int, int, Span]]:
        """Yield where the elements of a span of an array are: device, byte of the first, range."""
        entry = self.arrays[number]
        mesh = entry.layout.mesh
        replicated_axes = entry.layout.replicated_axes
        size = entry.itemsize
        for first_device, block in _shards(entry, wanted):
            start, stop = overlap(_full(block), wanted)
            if start == stop:
                continue
            for replica in self._writers(number, first_device, start, stop):
                device = first_device + _number(mesh, replicated_axes, replica)
                column = self.column(device)
                written = Span(block, column.starts[number], column.stops[number])
                if written.start >= written.stop:
                    continue
                # Two boxes of the span may have elements of others between them, so a replica
                # between those of the first and last element may have none.
                low, high = overlap(written.clip(start, stop), wanted)
                if low < high:
                    byte = column.bytes_before[number] + (low - written.start) * size
                    yield device, byte, Span(block, low, high)

    def _writers(self, number: int, first_device: int, start: int, stop: int) -> range:
        """Return the replicas that write elements of a range of the block of a shard.

        The range may begin before the shard and end after it, since a flat shard is a part of its
        block.
        """
        entry = self.arrays[number]
        replicas = entry.replicas
        column = self.column(first_device)
        total = column.totals[number]
        block_begin = column.begins[number] - column.firsts[number] * entry.itemsize
        first_byte = block_begin + start * entry.itemsize
        last_byte = block_begin + (stop - 1) * entry.itemsize
        first_replica = ((first_byte + 1) * replicas - 1) // total
        last_replica = ((last_byte + 1) * replicas - 1) // total
        return range(max(first_replica, 0), min(last_replica, replicas - 1) + 1)


def _ranges(layout: Layout, shapes: Numbers, device: int) -> tuple[Numbers, Numbers]:
    """Return the ranges of their flattened blocks that a device stores of arrays of one layout.

    They are those of `span_of`, of many arrays at once. (n, d) -> (n,), (n,)
    """
    total = np.ones(len(shapes), np.int64)
    for dim, axes in enumerate(layout.spec.dims(shapes.shape[1])):
        start, stop = _chunk(
            shapes[:, dim], _size(layout.mesh, axes), _along(layout.mesh, device, axes)
        )
        total *= stop - start
    total *= layout.has_any(device)
    flat_axes = layout.spec.flat_axes or ()
    return _chunk(total, layout.flat_parts, _along(layout.mesh, device, flat_axes))


def _chunk(lengths: Numbers, parts: int, index: int) -> tuple[Numbers, Numbers]:
    """Return the flat ranges of part `index`: `flat_range` of many lengths."""
    each = _ceil(lengths, parts)
    start = np.minimum(each * index, lengths)
    return start, np.minimum(start + each, lengths)


def _shards(entry: ArrayEntry, wanted: Span) -> Iterator[tuple[int, Block]]:
    """Yield the first device of each shard that may have elements of a span, and its block.

    Blocks are in the indices of `wanted`: those of the fused array, if there is one.
    """
    layout = entry.layout
    mesh = layout.mesh
    shape = entry.shape or (1,)
    dims = zip(shape, layout.spec.dims(len(shape)), entry.offset or (0,), wanted.block, strict=True)
    # Of each dim, the chunks that meet the span: the range of each, and its number of devices on
    # from the first. These add up, since a mesh numbers its devices by strides.
    chunks: list[list[tuple[int, Range]]] = []
    for length, axes, origin, (start, stop) in dims:
        parts = _size(mesh, axes)
        indices = _chunk_indices(length, parts, max(start - origin, 0), min(stop - origin, length))
        dim_chunks: list[tuple[int, Range]] = []
        for index in indices:
            first, last = flat_range(length, parts, index)
            dim_chunks.append((_number(mesh, axes, index), (first + origin, last + origin)))
        chunks.append(dim_chunks)

    base = mesh.index(layout.place)
    flat_axes = layout.spec.flat_axes or ()
    for block_chunks in product(*chunks):
        block = tuple([bounds for _, bounds in block_chunks])
        block_device = base + sum([device for device, _ in block_chunks])
        full = _full(block)
        start, stop = overlap(full, wanted)
        for index in _chunk_indices(full.stop, layout.flat_parts, start, stop):
            yield block_device + _number(mesh, flat_axes, index), block


def _chunk_indices(length: int, parts: int, start: int, stop: int) -> range:
    """Return the indices of the flat ranges that a range of elements meets."""
    if start >= stop:
        return range(0)
    each = max(chunk(length, parts), 1)
    return range(start // each, -(-stop // each))


def _full(block: Block) -> Span:
    return Span(block, 0, prod([stop - start for start, stop in block]))


def _size(mesh: Mesh, axes: Sequence[str]) -> int:
    """Return the number of devices along some axes."""
    return prod([mesh.shape[axis] for axis in axes])


def _along(mesh: Mesh, device: int, axes: Sequence[str]) -> int:
    """Return the index of a device along some axes."""
    if not axes:
        return 0
    coordinates = mesh.coordinates(device)
    return ravel([coordinates[axis] for axis in axes], [mesh.shape[axis] for axis in axes])


@lru_cache(maxsize=4096)
def _number(mesh: Mesh, axes: tuple[str, ...], index: int) -> int:
    """Return the number of the device at an index along some axes, and at 0 along the others."""
    if not axes:
        return 0
    coordinates = unravel(index, [mesh.shape[axis] for axis in axes])
    return mesh.index(dict(zip(axes, coordinates, strict=True)))


def _ceil(numbers: Numbers, divisors: Numbers | int) -> Numbers:
    """Return the quotients, rounded up."""
    return -(-numbers // divisors)
