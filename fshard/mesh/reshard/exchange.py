"""Exchanges that send each device exactly the elements it lacks, where no collective of equal rows is minimal.

Devices store shards of one layout and need shards of another. An element that a device has is kept; others are sent by
a device that has them, and replicas divide the requests among themselves. No element is received twice.

    P.flat("b") -> P.flat("b", "a"), 7 elements on 2 x 3 devices, a = 0 above, a = 1 below

    stores   [0 1 2] [3 4 5] [6]    needs    [0 1] [4 5] []      receives       nothing          nothing    nothing
             [0 1 2] [3 4 5] [6]             [2 3] [6]   []                     3 from (0, 1)    6 from (1, 2)

Any number of tensors share one exchange. A device concatenates its shards of them, padded to the length of the longest
such row; the padding has no defined value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property, lru_cache
from math import prod
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from fshard.mesh.collectives.moves import Alone, Move, PartsMove, plain
from fshard.mesh.layout import P
from fshard.mesh.layout.arithmetic import strides, unravel
from fshard.mesh.layout.spec import CachedHash
from fshard.mesh.reshard.regions import (
    Numbers,
    Sizes,
    elements,
    intersect,
    regions_of,
    replicas,
    volume,
)


class Box(NamedTuple):
    """A box in the memory of one shard: its offset, lengths and strides."""

    begin: int
    lengths: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.lengths)

    def of(self, rows: Tensor) -> Tensor:
        """Return the box of each row.  (rows, length) -> (rows, ...)"""
        begin = rows.storage_offset() + self.begin
        return rows.as_strided((len(rows), *self.lengths), (rows.stride(0), *self.strides), begin)


class Traffic(NamedTuple):
    """The boxes that one device sends to others, receives from them, and keeps: (in its old shard, in its new one)."""

    sends: Mapping[int, list[Box]]
    gets: Mapping[int, list[Box]]
    keeps: list[tuple[Box, Box]]


@dataclass(frozen=True)
class Supply(CachedHash):
    """Two layouts of one tensor on a group of devices: which elements each device must be sent."""

    before: P
    after: P
    shape: tuple[int, ...]
    group: Sizes

    __hash__ = CachedHash.__hash__

    def transposed(self) -> Supply:
        return Supply(self.after, self.before, self.shape, self.group)

    @property
    def held(self) -> Numbers:
        """The regions of all devices before."""
        return regions_of(self.before, self.shape, self.group)

    @property
    def wanted(self) -> Numbers:
        """The regions of all devices after."""
        return regions_of(self.after, self.shape, self.group)

    @property
    def length(self) -> int:
        """The elements of the longest shard, before or after."""
        return int(max(volume(self.held).max(), volume(self.wanted).max()))

    @cached_property
    def sent(self) -> Numbers:
        """The number of elements that each device sends: the missing ones, divided among the replicas of each."""
        held, rows = self.held, replicas(self.group, self.before.sharded_axes)
        needed_by = {*self.before.sharded_axes} - {*self.after.sharded_axes}
        times = prod(size for axis, size in self.group if axis in needed_by)
        counts = volume(held[rows[:, 0]]) * times - volume(intersect(held, self.wanted))[rows].sum(
            1
        )
        result = np.empty(len(held), np.int64)
        result[rows] = np.diff(np.arange(rows.shape[1] + 1) * counts[:, None] // rows.shape[1])
        return result

    def traffic(self, index: int) -> Traffic:
        """Return the boxes that a device sends, receives and keeps."""
        held, wanted = self.held[index], self.wanted[index]
        rows = replicas(self.group, self.before.sharded_axes)
        ((row, replica),) = np.argwhere(rows == index)
        requests = _requests_for_row(self, int(row))
        sends = {
            int(to): requests.served(int(to), int(replica))
            for to in np.flatnonzero(volume(requests.regions))
        }
        gets: dict[int, list[Numbers]] = {}
        for row in np.flatnonzero(volume(intersect(self.held[rows[:, 0]], wanted))):
            requests = _requests_for_row(self, int(row))
            if volume(requests.regions[index]):
                gets |= {
                    int(source): requests.served(index, number)
                    for number, source in enumerate(rows[row])
                }
        keeps = elements(intersect(held, wanted), 0, int(volume(held)))
        return Traffic(
            {
                to: self._local_boxes(self.before, boxes, index)
                for to, boxes in sends.items()
                if boxes
            },
            {
                source: self._local_boxes(self.after, boxes, index)
                for source, boxes in gets.items()
                if boxes
            },
            [
                *zip(
                    self._local_boxes(self.before, keeps, index),
                    self._local_boxes(self.after, keeps, index),
                    strict=True,
                )
            ],
        )

    def _local_boxes(self, spec: P, boxes: list[Numbers], index: int) -> list[Box]:
        """Return where boxes of global indices are in a device's shard."""
        sizes = dict(self.group)
        coordinates = dict(zip(sizes, unravel(index, [*sizes.values()]), strict=True))
        block = spec.block(self.shape, sizes, coordinates)
        steps = strides([stop - start for start, stop in block])
        first = sum(start * step for (start, _), step in zip(block, steps, strict=True))
        if spec.is_flat:
            first += spec.ranges(self.shape, sizes, coordinates)[0][0]
        return [
            Box(int(box[:, 0] @ steps) - first, tuple((box[:, 1] - box[:, 0]).tolist()), steps)
            for box in boxes
        ]


class Requests(NamedTuple):
    """The elements of one shard that each device lacks, and their running total; replicas serve equal parts of it."""

    replicas: int
    regions: Numbers
    ends: Numbers

    def served(self, device: int, replica: int) -> list[Numbers]:
        """Return the boxes that a replica sends to a device."""
        total, begin = int(self.ends[-1]), int(self.ends[device - 1]) if device else 0
        start, stop = (number * total // self.replicas - begin for number in (replica, replica + 1))
        return elements(self.regions[device], start, stop)


@lru_cache(maxsize=1024)
def _requests_for_row(supply: Supply, row: int) -> Requests:
    devices = replicas(supply.group, supply.before.sharded_axes)[row]
    regions = intersect(supply.held[devices[0]], supply.wanted)
    regions[devices] = 0  # replicas lack the same elements
    return Requests(len(devices), regions, volume(regions).cumsum())


@dataclass(frozen=True)
class Parts(CachedHash, PartsMove):
    """Send each device the elements of its new shards that it lacks, for one or more tensors."""

    leaves: tuple[Supply, ...]

    __hash__ = CachedHash.__hash__

    @cached_property
    def traffic(self) -> Callable[[int], list[Traffic]]:
        """From a device to the boxes of each tensor that it sends, receives and keeps."""
        return cache(lambda index: [leaf.traffic(index) for leaf in self.leaves])

    @cached_property
    def sizes(self) -> Callable[[int], list[tuple[int, int]]]:
        """From a device to the number of elements of its old and new shard of each tensor."""
        pairs = [(leaf.held, leaf.wanted) for leaf in self.leaves]
        return cache(
            lambda index: [
                (int(volume(held[index])), int(volume(wanted[index]))) for held, wanted in pairs
            ]
        )

    @cached_property
    def _transposed(self) -> Parts:
        return Parts(tuple(leaf.transposed() for leaf in self.leaves))

    def transposed(self) -> Parts:
        return self._transposed

    @cached_property
    def length(self) -> int:
        """The length of a row: that of the longest one that any device has, before or after."""
        if len(self.leaves) == 1:
            return max(self.leaves[0].length, 1)
        before, after = (
            sum(volume(leaf.held) for leaf in self.leaves),
            sum(volume(leaf.wanted) for leaf in self.leaves),
        )
        return max(1, int(np.max(before)), int(np.max(after)))

    @cached_property
    def _sent(self) -> Numbers:
        return np.sum([leaf.sent for leaf in self.leaves], axis=0)

    def sent(self, size: int, index: int | None, n: int) -> Fraction:
        count = self._sent.max() if index is None else self._sent[index]
        return Fraction(size, self.length) * int(count)

    def joined(self, xs: Sequence[Tensor]) -> Tensor:
        """Concatenate the shards of one device into a row."""
        flat = torch.cat([x.reshape(-1) for x in xs]) if len(xs) > 1 else xs[0].reshape(-1)
        return flat if flat.numel() == self.length else pad(flat, (0, self.length - flat.numel()))

    def split(self, row: Tensor, index: int) -> list[Tensor]:
        """Return the new shards of one device, flat, from its row."""
        if len(self.leaves) == 1 and self.sizes(index)[0][1] == row.numel():
            return [row]
        # copied: a view would keep the row alive, and unaligned matmuls round differently
        return [shard[0].clone() for shard in self._shards_in_rows(row[None], index, 1)]

    def _shards_in_rows(
        self, rows: Tensor, index: int, is_after: Literal[0, 1]
    ) -> Sequence[Tensor]:
        """Return the old or the new shard of each tensor in the rows of a device.  (rows, length) -> (rows, size) each"""
        sizes = [pair[is_after] for pair in self.sizes(index)]
        return rows.split([*sizes, rows.shape[1] - sum(sizes)], 1)[:-1]

    def parcels(self, x: Tensor, index: int) -> dict[int, Tensor]:
        parts: dict[int, list[Tensor]] = {}
        shards = self._shards_in_rows(x.view(-1, self.length), index, 0)
        for shard, traffic in zip(shards, self.traffic(index), strict=True):
            for to, boxes in traffic.sends.items():
                parts.setdefault(to, []).extend([box.of(shard).reshape(-1) for box in boxes])
        return {to: torch.cat(parcel) for to, parcel in parts.items()}

    def expected(self, x: Tensor, index: int) -> dict[int, int]:
        rows, sizes = x.numel() // self.length, Counter[int]()
        for traffic in self.traffic(index):
            for source, boxes in traffic.gets.items():
                sizes[source] += rows * sum([box.size for box in boxes])
        return sizes

    def unpacked(self, x: Tensor, index: int, arrived: Mapping[int, Tensor]) -> Tensor:
        rows = x.view(-1, self.length)
        result = torch.zeros_like(rows)
        begins = dict.fromkeys(arrived, 0)
        shards = self._shards_in_rows(rows, index, 0), self._shards_in_rows(result, index, 1)
        for before, after, traffic in zip(*shards, self.traffic(index), strict=True):
            for source, target in traffic.keeps:
                target.of(after).copy_(source.of(before))
            for source, boxes in traffic.gets.items():
                for box in boxes:
                    target, begin = box.of(after), begins[source]
                    begins[source] += target.numel()
                    target.copy_(arrived[source][begin : begins[source]].view(target.shape))
        return result.view(x.shape)


@dataclass(frozen=True)
class KeptRange(Alone):
    """Slice the new shard of one tensor from the old one, where every device has all of its elements."""

    parts: Parts
    name = "keep"

    def local(self, x: Tensor, index: int, n: int) -> Tensor:
        return self.parts.unpacked(plain(x).contiguous(), index, {})

    def transposed(self) -> Move:
        return self.parts.transposed()

    def new_shard(self, x: Tensor, index: int) -> Tensor:
        """Return the new shard, flat, from a device's old one; a view if it is contiguous there."""
        boxes = [
            box.of(plain(x).reshape(1, -1)).reshape(-1)
            for box, _ in self.parts.traffic(index)[0].keeps
        ]
        return boxes[0] if len(boxes) == 1 else torch.cat([x.new_empty(0), *boxes])
