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
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from fshard.mesh.layout import Layout
from fshard.mesh.layout.mesh import Mesh
from fshard.mesh.reshard.plan import state_of
from fshard.mesh.reshard.regions import Numbers, blocks_of, number_of, ranges_of

Block = tuple[tuple[int, int], ...]
"""A range of each dim."""


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


@lru_cache(maxsize=4096)
def shards_of(layout: Layout, shape: tuple[int, ...]) -> tuple[Numbers, Numbers]:
    """Return, for all devices, the block that its shard is taken from, and the range of it that is stored. (n, d, 2), (n, 2)

    >>> from fshard.mesh.layout import P
    >>> shards_of(Layout(Mesh((("data", 2),), "abstract", "meta"), P.flat("data")), (2, 3))[1].tolist()
    [[0, 3], [3, 6]]
    """
    axes, shape = layout.mesh.axes, shape or (1,)
    state = state_of(layout.spec, len(shape), axes)
    group = tuple((axis, size) for axis, size in axes if size > 1) or axes[:1]
    blocks = blocks_of(state, shape, group)
    ranges = np.stack(ranges_of(state, blocks, group), -1)
    for axis, place in state.at:
        ranges = ranges * (number_of(group, (axis,)) == place)[:, None]
    return blocks, ranges


class Division:
    """The ranges of all arrays that each device writes.

    `starts` and `stops` are indices in the flattened block of a device's shard, `places` bytes after the header of its
    file; each is (arrays, devices). `order` is that of the arrays in a file.
    """

    def __init__(self, arrays: Sequence[ArrayEntry], devices: int) -> None:
        count = len(arrays)
        self.arrays, self.devices = arrays, devices
        self.starts = np.empty((count, devices), np.int64)
        self.stops = np.empty((count, devices), np.int64)
        each = np.array([one.itemsize for one in arrays], np.int64).reshape(count, 1)
        groups: dict[Any, list[int]] = defaultdict(list)
        for index, one in enumerate(arrays):
            ranges = shards_of(one.layout, one.shape)[1]
            self.starts[index], self.stops[index] = ranges.T
            groups[one.layout.mesh, one.layout.replicated_axes].append(index)
        for (mesh, axes), members in groups.items():
            self._divide(mesh, axes, np.array(members), each)
        self.order = np.argsort(-each[:, 0], kind="stable")
        written = ((self.stops - self.starts) * each)[self.order]
        self.places = np.empty_like(self.starts)
        self.places[self.order] = np.cumsum(written, 0) - written
        self.sizes = written.sum(0)

    def _divide(self, mesh: Mesh, axes: tuple[str, ...], members: Numbers, each: Numbers) -> None:
        """Divide the shards of arrays that are replicated over some axes between their replicas."""
        replicas = prod(mesh.shape[axis] for axis in axes)
        if replicas == 1:
            return
        real = tuple((axis, size) for axis, size in mesh.axes if size > 1)
        rank = number_of(real, [axis for axis in axes if mesh.shape[axis] > 1])
        first, size = self.starts[members], each[members]
        count = self.stops[members] - first
        begins = np.cumsum(count * size, 0) - count * size
        total = (count * size).sum(0)
        for target, part in ((self.starts, rank), (self.stops, rank + 1)):
            cut = total * part // replicas
            target[members] = first + np.clip(-((begins - cut) // size), 0, count)
