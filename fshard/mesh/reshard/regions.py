"""Compute which device stores which elements, for all devices of a group; exchanges are planned from it.

A region is a few boxes of global indices: a range of the flattened tensor is part of a row, full rows, and part of
another. Elements 4 to 8 of (4, 6) are [0, 4:6] and [1, 0:2]. The regions of all devices are one array, so
intersections for 65,536 devices take one operation.

Legend: n devices, k boxes in a region, d dims; `regions` are (n, k, d, 2), the last dim is (start, stop).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import numpy as np
import numpy.typing as npt

from fshard.mesh.layout import P
from fshard.mesh.layout.arithmetic import chunk

Sizes = tuple[tuple[str, int], ...]
"""Axes and their sizes, major to minor."""
Numbers = npt.NDArray[np.int64]


@lru_cache(maxsize=64)
def regions_of(spec: P, shape: tuple[int, ...], group: Sizes) -> Numbers:
    """Return the regions of all devices of a group, whose axes are those of the spec."""
    sizes = dict(group)
    sides: list[Numbers] = []
    for length, axes in zip(shape, spec.dims(len(shape)), strict=True):
        each = chunk(length, prod(sizes[axis] for axis in axes))
        start = _indices_along(group, axes) * each
        sides.append(np.minimum(np.stack([start, start + each], -1), length))
    blocks = np.stack(sides, 1)  # (n, d, 2)
    regions = blocks[:, None]
    if spec.flat_axes is not None:
        regions = _flat_regions(
            blocks,
            prod(sizes[axis] for axis in spec.flat_axes),
            _indices_along(group, spec.flat_axes),
        )
    for axes, index in spec.at:
        regions = regions * (_indices_along(group, axes) == index)[:, None, None, None]
    return regions


def _flat_regions(blocks: Numbers, parts: int, index: Numbers) -> Numbers:
    """Return the part at `index` of each flattened block."""
    lengths = blocks[..., 1] - blocks[..., 0]
    total = lengths.prod(1)
    each = -(-total // parts)
    start, stop = np.minimum(index * each, total), np.minimum(index * each + each, total)
    regions = np.empty((len(blocks), 2 ** blocks.shape[1] - 1, blocks.shape[1], 2), np.int64)
    for block_shape in np.unique(lengths, axis=0):
        is_shape = (lengths == block_shape).all(1)
        regions[is_shape] = _boxes_of_ranges(
            start[is_shape], stop[is_shape], np.maximum(block_shape, 1).tolist()
        )
    # The boxes that hold anything come first; those that no device needs are left out.
    is_full = np.all(regions[..., 1] > regions[..., 0], axis=-1)  # (n, k)
    order = np.argsort(~is_full, axis=1, kind="stable")
    boxes = np.take_along_axis(regions * is_full[..., None, None], order[..., None, None], 1)
    return boxes[:, : max(1, int(is_full.sum(1).max(initial=0)))] + blocks[:, None, :, :1]


def _indices_along(group: Sizes, axes: Sequence[str]) -> Numbers:
    """Return the index of every device of a group along some axes. (n,)"""
    sizes = dict(group)
    coordinates = dict(
        zip(sizes, np.indices([*sizes.values()]).reshape(len(sizes), -1), strict=True)
    )
    index = np.zeros(prod(sizes.values()), np.int64)
    for axis in axes:
        index = index * sizes[axis] + coordinates[axis]
    return index


def _boxes_of_ranges(start: Numbers, stop: Numbers, shape: Sequence[int]) -> Numbers:
    """Convert ranges of a flattened tensor to boxes: part of a row, full rows, part of another row."""
    if len(shape) == 1:
        return np.stack([start, stop], -1)[:, None, None]
    each = prod(shape[1:])
    row, top, bottom = start // each, -(-start // each), stop // each
    head = _boxes_of_ranges(
        start - row * each,
        np.where(start % each, np.minimum(stop - row * each, each), 0),
        shape[1:],
    )
    tail = _boxes_of_ranges(np.zeros_like(stop), np.where(top > bottom, 0, stop % each), shape[1:])
    rows = [
        np.stack([top, bottom], -1),
        *(np.stack([0 * top, 0 * top + length], -1) for length in shape[1:]),
    ]

    def in_row(row: Numbers, boxes: Numbers) -> Numbers:
        side = np.broadcast_to(
            np.stack([row, row + 1], -1)[:, None, None], (*boxes.shape[:2], 1, 2)
        )
        return np.concatenate([side, boxes], 2)

    return np.concatenate([in_row(row, head), np.stack(rows, 1)[:, None], in_row(bottom, tail)], 1)


def intersect(a: Numbers, b: Numbers) -> Numbers:
    """Return the intersections of regions.  (..., k, d, 2), (..., l, d, 2) -> (..., k*l, d, 2)"""
    start = np.maximum(a[..., :, None, :, 0], b[..., None, :, :, 0])
    stop = np.minimum(a[..., :, None, :, 1], b[..., None, :, :, 1])
    both = np.stack([start, np.maximum(start, stop)], -1)
    return both.reshape(*both.shape[:-4], -1, *both.shape[-2:])


def volume(regions: Numbers) -> Numbers:
    """Return the number of elements of regions. (..., k, d, 2) -> (...)"""
    return (regions[..., 1] - regions[..., 0]).prod(-1).sum(-1)


def elements(region: Numbers, start: int, stop: int) -> list[Numbers]:
    """Return the boxes of a region, from one of its elements to another, without empty ones.  (k, d, 2) -> (d, 2) each"""
    boxes: list[Numbers] = []
    for box in region[volume(region[:, None]) > 0]:
        lengths = (box[:, 1] - box[:, 0]).tolist()
        size = prod(lengths)
        first, last = max(start, 0), min(stop, size)
        if (first, last) == (0, size):
            boxes.append(box)
        elif first < last:
            parts = _boxes_of_ranges(np.array([first]), np.array([last]), lengths)[0]
            boxes += [box[:, :1] + sub_box for sub_box in parts[volume(parts[:, None]) > 0]]
        start, stop = start - size, stop - size
    return boxes


def replicas(group: Sizes, axes: Sequence[str]) -> Numbers:
    """Return the devices in rows of equal coordinates along some axes. (rows, devices in each)"""
    index = _indices_along(group, [axis for axis, _ in group if axis in axes])
    return np.argsort(index, kind="stable").reshape(
        -1, prod(size for axis, size in group if axis not in axes)
    )
