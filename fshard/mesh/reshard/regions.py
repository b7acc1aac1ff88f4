"""Compute which elements each device of a group stores, for all devices at once.

A region is the set of elements that one device stores, as a few boxes of global indices. A shard of
dims is one box. A range of the flattened tensor is part of a row, full rows, and part of a row.
Here P.flat("a") splits a tensor of shape (3, 4) over 2 devices, row by row:

    [0 0 0 0]      device 0, elements 0 to 6     boxes [0:1, 0:4] and [1:2, 0:2]
    [0 0 1 1]      device 1, elements 6 to 12    boxes [1:2, 2:4] and [2:3, 0:4]
    [1 1 1 1]

The regions of all devices are one array, so intersections for 65,536 devices take one operation.
Every region of an array has as many boxes as the largest one; those that are not needed are empty.

Legend: n devices, k boxes in a region, d dims; `regions` are (n, k, d, 2), the last dim is
(start, stop).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fshard.mesh.layout import P
from fshard.mesh.layout.arithmetic import chunk

Sizes = tuple[tuple[str, int], ...]
"""Axes and their sizes, major to minor."""
Numbers = npt.NDArray[np.int64]


@lru_cache(maxsize=64)
def regions_of(spec: P, shape: tuple[int, ...], group: Sizes) -> Numbers:
    """Return the regions of all devices of a group, whose axes are those of the spec.

    >>> regions_of(P("a"), (4, 6), (("a", 2),)).tolist()
    [[[[0, 2], [0, 6]]], [[[2, 4], [0, 6]]]]
    """
    sizes = dict(group)

    # The block of a device is its shard of dims, before that is flattened.
    sides: list[Numbers] = []
    for length, axes in zip(shape, spec.dims(len(shape)), strict=True):
        side_length = chunk(length, prod([sizes[axis] for axis in axes]))
        start = _indices_along(group, axes) * side_length
        stop = start + side_length
        side = np.stack([start, stop], -1)
        sides.append(np.minimum(side, length))
    blocks = np.stack(sides, 1)  # (n, d, 2)

    if spec.flat_axes is None:
        regions = blocks[:, None]
    else:
        parts = prod([sizes[axis] for axis in spec.flat_axes])
        regions = _flat_regions(blocks, parts, _indices_along(group, spec.flat_axes))

    # A device at other coordinates stores nothing: all of its boxes are [0:0, ...].
    for axes, index in spec.at:
        is_there = _indices_along(group, axes) == index
        regions = regions * is_there[:, None, None, None]
    return regions


def _flat_regions(blocks: Numbers, parts: int, index: Numbers) -> Numbers:
    """Flatten the block of each device, and return its range number `index` of `parts`.

    blocks (n, d, 2), index (n,) -> regions (n, k, d, 2)
    """
    lengths = blocks[..., 1] - blocks[..., 0]  # (n, d)
    total = lengths.prod(1)
    range_length = _divide_up(total, parts)
    start = np.minimum(index * range_length, total)
    stop = np.minimum(start + range_length, total)

    # A block at the end of an uneven dim is shorter, so a few shapes of blocks occur.
    dims = blocks.shape[1]
    regions = np.empty((len(blocks), 2**dims - 1, dims, 2), np.int64)
    for block_shape in np.unique(lengths, axis=0):
        is_shape = (lengths == block_shape).all(1)
        # The range of an empty block is empty: any shape without a 0, to divide by, will do.
        divisible_shape = np.maximum(block_shape, 1).tolist()
        boxes = _boxes_of_ranges(start[is_shape], stop[is_shape], divisible_shape)
        regions[is_shape] = boxes

    # Most of the 2^d - 1 boxes are empty, and an intersection pairs each with each. So the others
    # are moved to the front, and what is empty on all devices is cut off. One box stays, since
    # `intersect` cannot reshape arrays without elements.
    is_needed = np.all(regions[..., 1] > regions[..., 0], axis=-1)  # (n, k)
    regions = regions * is_needed[..., None, None]  # an empty box can have a negative length
    order = np.argsort(~is_needed, axis=1, kind="stable")
    regions = np.take_along_axis(regions, order[..., None, None], 1)
    most_boxes = max(1, int(is_needed.sum(1).max()))

    origins = blocks[:, None, :, :1]
    return regions[:, :most_boxes] + origins


def _indices_along(group: Sizes, axes: Sequence[str]) -> Numbers:
    """Return the index of every device of a group along some axes, major to minor.  -> (n,)"""
    sizes = dict(group)
    grid = np.indices([*sizes.values()])  # (axes, size of each axis ...)
    coordinates = dict(zip(sizes, grid.reshape(len(sizes), -1), strict=True))

    index = np.zeros(prod(sizes.values()), np.int64)
    for axis in axes:
        index = index * sizes[axis] + coordinates[axis]
    return index


# Note [Boxes of a range]
# The rows of a tensor, along dim 0, have e elements each: e = prod(shape[1:]). Of a range
# start:stop of the flattened tensor,
#
#     head   is in row start // e: from start to the end of the row, or to stop if that is before
#     rows   are full: from row ceil(start / e) to row stop // e
#     tail   is in row stop // e: from its begin to stop
#
# The head is empty where start begins a row. The tail is empty where stop begins a row, or where
# the head has the entire range: ceil(start / e) > stop // e, two elements of one row.
# Head and tail are ranges of a tensor with one dim less. Its boxes, b(d - 1) each, make
# b(d) = 2 b(d - 1) + 1 = 2^d - 1 boxes. For 5:22 of shape (2, 3, 4), with e = 12:
#
#     head   5:12 of row 0, shape (3, 4)      boxes [0:1, 1:2, 1:4] and [0:1, 2:3, 0:4]
#     rows   1:1                              none
#     tail   0:10 of row 1, shape (3, 4)      boxes [1:2, 0:2, 0:4] and [1:2, 2:3, 0:2]
#
# The boxes are in the order of their elements.


def _boxes_of_ranges(start: Numbers, stop: Numbers, shape: Sequence[int]) -> Numbers:
    """Convert ranges of a flattened tensor to boxes: see Note [Boxes of a range].

    start (n,), stop (n,) -> boxes (n, 2^d - 1, d, 2). The rows of a box that is not needed may be
    2:1, a negative length. No other side is negative, so its volume is at most 0.
    """
    if len(shape) == 1:
        return np.stack([start, stop], -1)[:, None, None]

    row_size = prod(shape[1:])
    first_row = start // row_size
    first_full_row = _divide_up(start, row_size)
    last_row = stop // row_size

    head_start = start - first_row * row_size
    head_stop = np.minimum(stop - first_row * row_size, row_size)
    head_stop = np.where(head_start > 0, head_stop, 0)
    head = _boxes_of_ranges(head_start, head_stop, shape[1:])

    rows = np.zeros((len(start), 1, len(shape), 2), np.int64)
    rows[:, 0, 0, 0] = first_full_row
    rows[:, 0, 0, 1] = last_row
    rows[:, 0, 1:, 1] = shape[1:]

    is_in_one_row = first_full_row > last_row
    tail_stop = np.where(is_in_one_row, 0, stop - last_row * row_size)
    tail = _boxes_of_ranges(np.zeros_like(stop), tail_stop, shape[1:])

    return np.concatenate([_in_row(first_row, head), rows, _in_row(last_row, tail)], 1)


def _in_row(row: Numbers, boxes: Numbers) -> Numbers:
    """Return boxes of one row as boxes of the tensor.  (n,), (n, k, d - 1, 2) -> (n, k, d, 2)"""
    side = np.stack([row, row + 1], -1)[:, None, None]
    sides = np.broadcast_to(side, (*boxes.shape[:2], 1, 2))
    return np.concatenate([sides, boxes], 2)


def _divide_up(numbers: Numbers, divisor: int) -> Numbers:
    """Return quotients, rounded up."""
    return -(-numbers // divisor)


class ZigzagDim(NamedTuple):
    """A dim that some devices store in zigzag order: device i of n has chunks i and 2n-1-i, of 2n.

    Axes before the one in zigzag order split the dim into blocks, each with 2n chunks of its own.
    Axes after it split the two chunks of a device, one after the other. 16 elements, along axes a,
    b and c of two devices each with b in zigzag order:

        a = 0    b = 0: [0 1] [6 7]      b = 1: [2 3] [4 5]          c = 0 [0 1], c = 1 [6 7]
        a = 1    b = 0: [8 9] [14 15]    b = 1: [10 11] [12 13]

    Args:
        dim: its number.
        devices: along the axis in zigzag order.
        chunk: the number of elements of a chunk.
    """

    dim: int
    devices: int
    chunk: int

    def regions(self, regions: Numbers) -> Numbers:
        """Return regions in the order of storage as those of the tensor.  (n, k, d, 2) -> (n, 2k, d, 2)

        >>> dim = ZigzagDim(dim=0, devices=2, chunk=2)
        >>> dim.regions(regions_of(P("a"), (8,), (("a", 2),))).tolist()
        [[[[0, 2]], [[6, 8]]], [[[2, 4]], [[4, 6]]]]
        """
        start = regions[..., self.dim, 0]
        stop = regions[..., self.dim, 1]
        pair = start // (2 * self.chunk)
        block, device = np.divmod(pair, self.devices)

        # A shard is in the two chunks of one device.
        halves: list[Numbers] = []
        for half, number in enumerate([device, 2 * self.devices - 1 - device]):
            stored_begin = (2 * pair + half) * self.chunk
            begin = (2 * self.devices * block + number) * self.chunk
            first = np.clip(start - stored_begin, 0, self.chunk)
            last = np.clip(stop - stored_begin, 0, self.chunk)
            half_regions = regions.copy()
            half_regions[..., self.dim, 0] = begin + first
            half_regions[..., self.dim, 1] = begin + last
            halves.append(half_regions)
        return np.concatenate(halves, 1)

    def stored(self, index: int) -> int:
        """Return where an index of the tensor is in the order of storage.

        >>> [ZigzagDim(dim=0, devices=2, chunk=2).stored(index) for index in range(8)]
        [0, 1, 4, 5, 6, 7, 2, 3]
        """
        number, offset = divmod(index, self.chunk)
        block, chunk = divmod(number, 2 * self.devices)
        is_second = chunk >= self.devices
        device = 2 * self.devices - 1 - chunk if is_second else chunk
        pair = block * self.devices + device
        return (2 * pair + is_second) * self.chunk + offset


def intersect(a: Numbers, b: Numbers) -> Numbers:
    """Return the intersections of regions.  (..., k, d, 2), (..., l, d, 2) -> (..., k*l, d, 2)"""
    start = np.maximum(a[..., :, None, :, 0], b[..., None, :, :, 0])
    stop = np.minimum(a[..., :, None, :, 1], b[..., None, :, :, 1])
    stop = np.maximum(start, stop)  # no negative lengths
    boxes = np.stack([start, stop], -1)  # (..., k, l, d, 2)
    return boxes.reshape(*boxes.shape[:-4], -1, *boxes.shape[-2:])


def volume(regions: Numbers) -> Numbers:
    """Return the number of elements of each region.  (..., k, d, 2) -> (...)"""
    lengths = regions[..., 1] - regions[..., 0]
    return lengths.prod(-1).sum(-1)


def slice_region(region: Numbers, start: int, stop: int) -> list[Numbers]:
    """Return the boxes of elements `start` to `stop` of a region, counted box by box.

    (k, d, 2) -> (d, 2) each. Bounds beyond the region's elements, and negative ones, are clipped.
    """
    boxes: list[Numbers] = []
    for box in nonempty_boxes(region):
        lengths = (box[:, 1] - box[:, 0]).tolist()
        size = prod(lengths)
        first = max(start, 0)
        last = min(stop, size)
        if first == 0 and last == size:
            boxes.append(box)
        elif first < last:
            origin = box[:, :1]
            (inner_boxes,) = _boxes_of_ranges(np.array([first]), np.array([last]), lengths)
            boxes.extend([origin + inner_box for inner_box in nonempty_boxes(inner_boxes)])

        # From here on they count from the first element of the next box.
        start -= size
        stop -= size
    return boxes


def nonempty_boxes(boxes: Numbers) -> Numbers:
    """Return the boxes that have elements.  (k, d, 2) -> (j, d, 2)"""
    return boxes[volume(boxes[:, None]) > 0]


def replicas(group: Sizes, axes: Sequence[str]) -> Numbers:
    """Return the devices in rows of equal coordinates along some axes.  -> (rows, replicas)

    Of 2 x 3 devices, [[0 1 2] [3 4 5]], those with equal coordinates along the second axis:

    >>> replicas((("a", 2), ("b", 3)), ("b",)).tolist()
    [[0, 3], [1, 4], [2, 5]]
    """
    row_axes = [axis for axis, _ in group if axis in axes]
    row_of_device = _indices_along(group, row_axes)
    count = prod([size for axis, size in group if axis not in axes])
    devices = np.argsort(row_of_device, kind="stable")
    return devices.reshape(-1, count)
