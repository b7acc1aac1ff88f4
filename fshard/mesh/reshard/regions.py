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
from itertools import chain
from math import prod

import numpy as np
import numpy.typing as npt

from fshard.mesh.layout.arithmetic import chunk

Sizes = tuple[tuple[str, int], ...]
"""Axes and their sizes, major to minor."""
Dims = tuple[tuple[str, ...], ...]
"""Axes that split each dim."""
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ShardState:
    """A normalized spec: axes of every dim, then of the flattened shard, unreduced axes, and coordinates."""

    dims: Dims
    unreduced: frozenset[str]
    flat: tuple[str, ...] | None
    at: tuple[tuple[str, int], ...] = ()

    @property
    def at_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis, _ in self.at)

    @property
    def cut(self) -> tuple[str, ...]:
        return (*chain.from_iterable(self.dims), *(self.flat or ()))

    @property
    def sharded(self) -> tuple[str, ...]:
        """The axes along which devices hold different shards, or some hold none."""
        return self.cut + self.at_axes

    @property
    def is_unsharded(self) -> bool:
        """True if every device that stores an element stores all of them."""
        return self.flat is None and not self.cut

    def elsewhere(self, ndim: int) -> tuple[int, ...]:
        """Return the shape of the empty shard of a device outside `at`."""
        return (0,) * (1 if self.flat is not None else max(ndim, 1))


def shard_length(state: ShardState, shape: Sequence[int], sizes: Sizes) -> int:
    """Return the elements of the longest shard."""
    parts = prod(size for axis, size in sizes if axis in (state.flat or ()))
    return chunk(prod(block_shape(state, shape, sizes)), parts)


def block_shape(state: ShardState, shape: Sequence[int], sizes: Sizes) -> tuple[int, ...]:
    """Return the lengths of the first device's shard, before it is flattened; those of others may be shorter."""
    parts = dict(sizes)
    pairs = zip(shape, state.dims, strict=True)
    return tuple([chunk(length, prod(parts[axis] for axis in axes)) for length, axes in pairs])


@lru_cache(maxsize=64)
def regions_of(state: ShardState, shape: tuple[int, ...], group: Sizes) -> Numbers:
    """Return the regions of all devices of a group."""
    blocks = _blocks(state, shape, group)
    regions = blocks[:, None]
    if state.flat is not None:
        start, stop = _ranges(state, blocks, group)
        lengths = blocks[..., 1] - blocks[..., 0]
        regions = np.empty((len(blocks), 2 ** len(shape) - 1, len(shape), 2), np.int64)
        for kind in np.unique(lengths, axis=0) if any(state.dims) else lengths[:1]:
            own = (lengths == kind).all(1)
            regions[own] = _boxes(start[own], stop[own], np.maximum(kind, 1).tolist())
        regions = _tidy(regions) + blocks[:, None, :, :1]
    for axis, place in state.at:
        regions = regions * (_number(group, (axis,)) == place)[:, None, None, None]
    return regions


@lru_cache(maxsize=64)
def memory_of(state: ShardState, shape: tuple[int, ...], group: Sizes) -> tuple[Numbers, Numbers]:
    """Return the strides of each device's shard, before it is flattened, and its offset there. (n, d), (n,)"""
    blocks = _blocks(state, shape, group)
    lengths = blocks[..., 1] - blocks[..., 0]
    apart = np.ones_like(lengths)
    apart[:, :-1] = lengths[:, :0:-1].cumprod(1)[:, ::-1]
    first = (blocks[..., 0] * apart).sum(-1)
    return apart, first if state.flat is None else first + _ranges(state, blocks, group)[0]


def _blocks(state: ShardState, shape: tuple[int, ...], group: Sizes) -> Numbers:
    """Return the range of each dim that each device's shard is taken from. (n, d, 2)"""
    sides: list[Numbers] = []
    for length, axes, each in zip(shape, state.dims, block_shape(state, shape, group), strict=True):
        start = _number(group, axes) * each
        sides.append(np.minimum(np.stack([start, start + each], -1), length))
    return np.stack(sides, 1)


def _ranges(state: ShardState, blocks: Numbers, group: Sizes) -> tuple[Numbers, Numbers]:
    """Return the range of its flattened block that each device stores."""
    sizes, total = dict(group), (blocks[..., 1] - blocks[..., 0]).prod(1)
    each = -(-total // prod(sizes[axis] for axis in state.flat or ()))
    start = _number(group, state.flat or ()) * each
    return np.minimum(start, total), np.minimum(start + each, total)


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


def alike(group: Sizes, axes: Sequence[str]) -> Numbers:
    """Return the devices in rows of equal coordinates along some axes. (groups, devices in each)"""
    number = _number(group, [axis for axis, _ in group if axis in axes])
    return np.argsort(number, kind="stable").reshape(-1, prod(size for axis, size in group if axis not in axes))
