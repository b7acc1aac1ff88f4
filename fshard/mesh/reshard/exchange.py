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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate
from math import prod
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from fshard.mesh.collectives.moves import Alone, Move, Wired, WireKind, plain
from fshard.mesh.layout.spec import CachedHash
from fshard.mesh.reshard.regions import (
    Numbers,
    ShardState,
    Sizes,
    alike,
    meet,
    memory_of,
    part,
    regions_of,
    shard_length,
    volume,
)


class Box(NamedTuple):
    """A box in the memory of one device: its offset, lengths and strides."""

    begin: int
    lengths: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.lengths)

    def of(self, rows: Tensor) -> Tensor:
        """Return the box of each row.  (rows, length) -> (rows, ...)"""
        begin = rows.storage_offset() + self.begin
        return rows.as_strided((len(rows), *self.lengths), (rows.shape[1], *self.strides), begin)


Boxes = tuple[Box, ...]


def _taken(rows: Tensor, boxes: Boxes) -> Tensor:
    """Concatenate boxes. (rows, length) -> (elements,)"""
    return torch.cat([box.of(rows).reshape(-1) for box in boxes]) if boxes else rows.new_empty(0)


def _fill(rows: Tensor, boxes: Boxes, values: Tensor) -> None:
    """Write concatenated elements into boxes."""
    for box, own in zip(boxes, values.split([len(rows) * box.size for box in boxes]), strict=True):
        place = box.of(rows)
        place.copy_(own.view(place.shape))


class Traffic(NamedTuple):
    """The boxes that one device sends to others, receives from them, and keeps: in its old shard and in its new one."""

    sends: Mapping[int, Boxes]
    gets: Mapping[int, Boxes]
    stays: tuple[Boxes, Boxes]


@dataclass(frozen=True)
class Supply:
    """Two layouts of one tensor on a group of devices: which elements each device must be sent."""

    before: ShardState
    after: ShardState
    shape: tuple[int, ...]
    group: Sizes

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
        return max(shard_length(state, self.shape, self.group) for state in (self.before, self.after))

    def elements(self) -> Numbers:
        """Return the number of elements that each device sends."""
        return _supplied(self)

    def kept(self, x: Tensor, index: int) -> Tensor:
        """Return the elements of a device's shard that are in its new one, flat; a view if they are contiguous."""
        rows, (boxes, _) = plain(x).reshape(1, -1), _traffic(self, index).stays
        return boxes[0].of(rows).reshape(-1) if len(boxes) == 1 else _taken(rows, boxes)

    def sizes(self, index: int) -> tuple[int, int]:
        """Return the number of elements of a device's shard, before and after."""
        return int(volume(self.held[index])), int(volume(self.wanted[index]))


@dataclass(frozen=True)
class Parts(CachedHash, Wired):
    """Send each device the elements of its new shards that it lacks, for one or more tensors."""

    leaves: tuple[Supply, ...]
    name = "all_to_all"
    wire: ClassVar[WireKind] = "parts"

    __hash__ = CachedHash.__hash__

    @cached_property
    def _traffic(self) -> dict[int, Traffic]:
        return {}

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
        rows = [
            sum(volume(one) for one in regions)
            for regions in zip(*((x.held, x.wanted) for x in self.leaves), strict=True)
        ]
        return max(1, *(int(np.max(row)) for row in rows))

    @cached_property
    def _elements(self) -> Numbers:
        return np.sum([leaf.elements() for leaf in self.leaves], axis=0)

    def sent(self, size: int, index: int | None, n: int) -> Fraction:
        most = self._elements.max() if index is None else self._elements[index]
        return Fraction(size, self.length) * int(most)

    def traffic(self, index: int) -> Traffic:
        """Return the boxes that the device at `index` sends and receives, in its rows."""
        if index not in self._traffic:
            self._traffic[index] = self._joined(index)
        return self._traffic[index]

    def _joined(self, index: int) -> Traffic:
        sends, gets = dict[int, list[Box]](), dict[int, list[Box]]()
        kept: tuple[list[Box], list[Box]] = [], []
        held = wanted = 0
        for leaf in self.leaves:
            own = _traffic(leaf, index)
            for table, found, start in (sends, own.sends, held), (gets, own.gets, wanted):
                for other, boxes in found.items():
                    table.setdefault(other, []).extend(_shifted(boxes, start))
            kept[0].extend(_shifted(own.stays[0], held))
            kept[1].extend(_shifted(own.stays[1], wanted))
            before, after = leaf.sizes(index)
            held, wanted = held + before, wanted + after
        sent, got = ({other: tuple(boxes) for other, boxes in table.items()} for table in (sends, gets))
        return Traffic(sent, got, (tuple(kept[0]), tuple(kept[1])))

    def joined(self, xs: Sequence[Tensor]) -> Tensor:
        """Concatenate the shards of one device into a row."""
        flat = torch.cat([x.reshape(-1) for x in xs]) if len(xs) > 1 else xs[0].reshape(-1)
        return flat if flat.numel() == self.length else pad(flat, (0, self.length - flat.numel()))

    def split(self, row: Tensor, index: int) -> list[Tensor]:
        """Return the new shards of one device, flat, from its row."""
        sizes = [leaf.sizes(index)[1] for leaf in self.leaves]
        if sizes == [row.numel()]:
            return [row]
        # copied: a view would keep the row alive, and unaligned matmuls round differently
        return [row[end - size : end].clone() for end, size in zip(accumulate(sizes), sizes, strict=True)]

    def parcels(self, x: Tensor, index: int) -> dict[int, Tensor]:
        """Return the tensors that a device sends to others. `x` may be several rows, concatenated."""
        rows = x.view(-1, self.length)
        return {to: _taken(rows, boxes) for to, boxes in self.traffic(index).sends.items()}

    def expected(self, x: Tensor, index: int) -> dict[int, int]:
        """Return the number of elements that a device receives from others."""
        rows = x.numel() // self.length
        return {source: rows * sum(box.size for box in boxes) for source, boxes in self.traffic(index).gets.items()}

    def unpacked(self, x: Tensor, index: int, arrived: Mapping[int, Tensor]) -> Tensor:
        """Return the new rows of a device, from its old ones and what has arrived from others."""
        rows = x.view(-1, self.length)
        _, gets, (before, after) = self.traffic(index)
        result = torch.zeros_like(rows)
        _fill(result, after, _taken(rows, before))
        for other, boxes in gets.items():
            _fill(result, boxes, arrived[other])
        return result.view(x.shape)

    def meaning(self, xs: list[Tensor]) -> list[Tensor]:
        xs = [plain(x).contiguous() for x in xs]
        sent = [self.parcels(x, index) for index, x in enumerate(xs)]
        return [
            self.unpacked(x, index, {source: sent[source][index] for source in self.traffic(index).gets})
            for index, x in enumerate(xs)
        ]


@dataclass(frozen=True)
class KeptRange(Alone):
    """Slice the new shard of one tensor from the old one, where every device has all of its elements."""

    supply: Supply
    name = "keep"

    @cached_property
    def parts(self) -> Parts:
        return Parts((self.supply,))

    def local(self, x: Tensor, index: int, n: int) -> Tensor:
        return self.parts.unpacked(plain(x).contiguous(), index, {})

    def transposed(self) -> Move:
        return self.parts.transposed()


def _shifted(boxes: Boxes, start: int) -> Iterator[Box]:
    return (box._replace(begin=box.begin + start) for box in boxes)


@lru_cache(maxsize=1024)
def _supplied(leaf: Supply) -> Numbers:
    """Return the number of elements that each device sends: the missing ones, divided among the replicas of each."""
    held, wanted = leaf.held, leaf.wanted
    rows = alike(leaf.group, leaf.before.sharded)
    times = prod(size for axis, size in leaf.group if axis in {*leaf.before.sharded} - {*leaf.after.sharded})
    counts = volume(held[rows[:, 0]]) * times - volume(meet(held, wanted))[rows].sum(1)
    ends = np.arange(rows.shape[1] + 1) * counts[:, None] // rows.shape[1]
    result = np.empty(len(held), np.int64)
    result[rows] = np.diff(ends)
    return result


class Requests(NamedTuple):
    """The requests of devices for a range, and its holders, which share the requests equally."""

    holders: Numbers
    regions: Numbers
    ends: Numbers

    def among(self, wants: int, holder: int) -> list[Numbers]:
        """Return the ranges that this holder sends to one device."""
        n, total, before = len(self.holders), int(self.ends[-1]), int(self.ends[wants - 1]) if wants else 0
        return part(self.regions[wants], holder * total // n - before, (holder + 1) * total // n - before)


@lru_cache(maxsize=1024)
def _requests(leaf: Supply, shard: int) -> Requests:
    held, wanted = leaf.held, leaf.wanted
    holders = alike(leaf.group, leaf.before.sharded)[shard]
    regions = meet(held[holders[0]], wanted)
    regions[holders] = 0  # replicas lack the same elements
    return Requests(holders, regions, volume(regions).cumsum())


@lru_cache(maxsize=4096)
def _traffic(leaf: Supply, index: int) -> Traffic:
    held, wanted = leaf.held, leaf.wanted
    rows = alike(leaf.group, leaf.before.sharded)
    ((own, number),) = np.argwhere(rows == index)
    requests = _requests(leaf, int(own))
    sends = {int(to): requests.among(int(to), int(number)) for to in np.flatnonzero(volume(requests.regions))}
    gets: dict[int, list[Numbers]] = {}
    for shard in np.flatnonzero(volume(meet(held[rows[:, 0]], wanted[index]))):
        requests = _requests(leaf, int(shard))
        if volume(requests.regions[index]):
            gets |= {int(holder): requests.among(index, number) for number, holder in enumerate(requests.holders)}
    stays = part(meet(held[index], wanted[index]))
    return Traffic(
        {to: _boxes(leaf, leaf.before, regions, index) for to, regions in sends.items() if regions},
        {source: _boxes(leaf, leaf.after, regions, index) for source, regions in gets.items() if regions},
        (_boxes(leaf, leaf.before, stays, index), _boxes(leaf, leaf.after, stays, index)),
    )


def _boxes(leaf: Supply, state: ShardState, regions: list[Numbers], index: int) -> Boxes:
    """Return where boxes of global indices are in the memory of one device."""
    strides, first = memory_of(state, leaf.shape, leaf.group)
    return tuple(
        Box(
            int((box[:, 0] * strides[index]).sum() - first[index]),
            tuple((box[:, 1] - box[:, 0]).tolist()),
            tuple(strides[index].tolist()),
        )
        for box in regions
    )
