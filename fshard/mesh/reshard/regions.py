"""Compute which device stores which elements, for all devices of a group; exchanges are planned from it.

A region is a few boxes of global indices: a range of the flattened tensor is part of a row, full rows, and part of
another. Elements 4 to 8 of (4, 6) are [0, 4:6] and [1, 0:2]. The regions of all devices are one array, so
intersections for 65,536 devices take one operation.

Legend: n devices, k boxes in a region, d dims; `regions` are (n, k, d, 2), the last dim is (start, stop).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
import numpy.typing as npt

from fshard.mesh.layout.arithmetic import chunk, strides

Sizes = tuple[tuple[str, int], ...]
"""Axes and their sizes, major to minor."""
Dims = tuple[tuple[str, ...], ...]
"""Axes that split each dim."""
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ElementLayout:
    """The layout of elements: dims split evenly, or the flat tensor, on the devices at some coordinates."""

    shape: tuple[int, ...]
    dims: Dims | None
    flat: tuple[str, ...] | None
    at: tuple[tuple[str, int], ...]
    parts: tuple[int, ...]
    """Number of shards of each dim, or of the flat tensor."""

    @property
    def axes(self) -> frozenset[str]:
        cut = self.flat if self.dims is None else [axis for dim in self.dims for axis in dim]
        return frozenset((*(cut or ()), *(axis for axis, _ in self.at)))

    @property
    def length(self) -> int:
        return chunk(prod(self.shape), prod(self.parts))

    def regions(self, group: Sizes) -> Numbers:
        if self.dims is None:
            regions = _tidy(_boxes(*self._ranges(group), self.shape))
        else:
            each = [length // parts for length, parts in zip(self.shape, self.parts, strict=True)]
            starts = [_number(group, axes) * one for axes, one in zip(self.dims, each, strict=True)]
            sides = [np.stack([start, start + one], -1) for start, one in zip(starts, each, strict=True)]
            regions = np.stack(sides, 1)[:, None]
        for axis, place in self.at:
            regions = regions * (_number(group, (axis,)) == place)[:, None, None, None]
        return regions

    def _ranges(self, group: Sizes) -> tuple[Numbers, Numbers]:
        total = prod(self.shape)
        start = _number(group, self.flat or ()) * self.length
        return np.minimum(start, total), np.minimum(start + self.length, total)

    def memory(self, group: Sizes) -> tuple[tuple[int, ...], Numbers]:
        """Return the strides of shards: dense for boxes, global for flat ranges."""
        if self.dims is None:
            return strides(self.shape), self._ranges(group)[0]
        apart = strides([length // parts for length, parts in zip(self.shape, self.parts, strict=True)])
        return apart, (self.regions(group)[:, 0, :, 0] * apart).sum(-1)


def _number(group: Sizes, axes: Sequence[str]) -> Numbers:
    """Return the index of every device of a group along some axes. (n,)"""
    sizes = dict(group)
    places = dict(zip(sizes, np.indices([*sizes.values()]).reshape(len(sizes), -1), strict=True))
    number = np.zeros(prod(sizes.values()), np.int64)
    for axis in axes:
        number = number * sizes[axis] + places[axis]
    return number


def _boxes(start: Numbers, stop: Numbers, shape: Sequence[int]) -> Numbers:
    """Convert ranges of a flattened tensor to boxes: part of a row, full rows, part of another row."""
    if len(shape) == 1:
        return np.stack([start, stop], -1)[:, None, None]
    each = prod(shape[1:])
    row, top, bottom = start // each, -(-start // each), stop // each
    head = _boxes(start - row * each, np.where(start % each, np.minimum(stop - row * each, each), 0), shape[1:])
    tail = _boxes(np.zeros_like(stop), np.where(top > bottom, 0, stop % each), shape[1:])
    rows = [np.stack([top, bottom], -1), *(np.stack([0 * top, 0 * top + length], -1) for length in shape[1:])]

    def at(row: Numbers, boxes: Numbers) -> Numbers:
        place = np.broadcast_to(np.stack([row, row + 1], -1)[:, None, None], (*boxes.shape[:2], 1, 2))
        return np.concatenate([place, boxes], 2)

    return np.concatenate([at(row, head), np.stack(rows, 1)[:, None], at(bottom, tail)], 1)


def _tidy(regions: Numbers) -> Numbers:
    """Put the boxes that hold anything first, and leave out those that no device needs."""
    full = np.all(regions[..., 1] > regions[..., 0], axis=-1)  # (n, k)
    order = np.argsort(~full, axis=1, kind="stable")
    some = np.take_along_axis(regions * full[..., None, None], order[..., None, None], 1)
    return some[:, : max(1, int(full.sum(1).max(initial=0)))]


def meet(some: Numbers, others: Numbers) -> Numbers:
    """Return the intersections of regions.  (..., k, d, 2), (..., l, d, 2) -> (..., k*l, d, 2)"""
    start = np.maximum(some[..., :, None, :, 0], others[..., None, :, :, 0])
    stop = np.minimum(some[..., :, None, :, 1], others[..., None, :, :, 1])
    both = np.stack([start, np.maximum(start, stop)], -1)
    return both.reshape(*both.shape[:-4], -1, *both.shape[-2:])


def volume(regions: Numbers) -> Numbers:
    """Return the number of elements of regions. (..., k, d, 2) -> (...)"""
    return (regions[..., 1] - regions[..., 0]).prod(-1).sum(-1)


def part(region: Numbers, start: int = 0, stop: int | None = None) -> list[Numbers]:
    """Return the boxes of a region, from one of its elements to another, without empty ones.  (k, d, 2) -> (d, 2) each"""
    found: list[Numbers] = []
    for box in region[volume(region[:, None]) > 0]:
        lengths = (box[:, 1] - box[:, 0]).tolist()
        size = prod(lengths)
        first, last = max(start, 0), size if stop is None else min(stop, size)
        if (first, last) == (0, size):
            found.append(box)
        elif first < last:
            boxes = _boxes(np.array([first]), np.array([last]), lengths)[0]
            found += [box[:, :1] + one for one in boxes[volume(boxes[:, None]) > 0]]
        start, stop = start - size, None if stop is None else stop - size
    return found


def alike(group: Sizes, axes: frozenset[str]) -> Numbers:
    """Return the devices in rows of equal coordinates along some axes. (groups, devices in each)"""
    number = _number(group, [axis for axis, _ in group if axis in axes])
    return np.argsort(number, kind="stable").reshape(-1, prod(size for axis, size in group if axis not in axes))


@lru_cache(maxsize=64)
def regions_of(cut: ElementLayout, group: Sizes) -> Numbers:
    """Return the regions of all devices of a group, computed once."""
    return cut.regions(group)


@lru_cache(maxsize=64)
def memory_of(cut: ElementLayout, group: Sizes) -> tuple[tuple[int, ...], Numbers]:
    """Return the memory offsets of shards for all devices of a group; cached."""
    return cut.memory(group)
