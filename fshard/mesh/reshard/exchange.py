"""Exchanges that send each device exactly the elements it lacks, where no collective of equal rows is minimal.

Devices store shards of one layout and need shards of another. An element that a device has is kept; others are sent by
a device that has them, and replicas divide the requests among themselves. No element is received twice.

    P.flat("b") -> P.flat("b", "a"), 7 elements on 2 x 3 devices, a = 0 above, a = 1 below

    stores   [0 1 2] [3 4 5] [6]    needs    [0 1] [4 5] []      receives       nothing          nothing    nothing
             [0 1 2] [3 4 5] [6]             [2 3] [6]   []                     3 from (0, 1)    6 from (1, 2)

All tensors are padded to the length of the longest shard; the padding has no defined value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import prod
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fshard.mesh.collectives.moves import Alone, Move, Wired, WireKind, plain
from fshard.mesh.reshard.regions import ElementLayout, Numbers, Sizes, alike, meet, memory_of, part, regions_of, volume

View = tuple[int, tuple[int, ...]]
"""Where a box begins in memory, and its lengths."""


class Views(NamedTuple):
    """Boxes in the memory of one device."""

    boxes: tuple[View, ...]
    apart: tuple[int, ...]

    @property
    def size(self) -> int:
        return sum(prod(lengths) for _, lengths in self.boxes)

    def of(self, rows: Tensor) -> list[Tensor]:
        """Return the boxes of each row.  (rows, length) -> (rows, ...)"""
        return [
            rows.as_strided((len(rows), *lengths), (rows.shape[1], *self.apart), rows.storage_offset() + begin)
            for begin, lengths in self.boxes
        ]

    def taken(self, rows: Tensor) -> Tensor:
        """Concatenate the boxes. (rows, length) -> (elements,)"""
        return torch.cat([box.reshape(-1) for box in self.of(rows)]) if self.boxes else rows.new_empty(0)

    def fill(self, rows: Tensor, values: Tensor) -> None:
        """Write concatenated elements into the boxes."""
        boxes = self.of(rows)
        for box, own in zip(boxes, values.split([box.numel() for box in boxes]), strict=True):
            box.copy_(own.view(box.shape))


class Traffic(NamedTuple):
    """The ranges that one device sends to others, receives from them, and keeps: source and destination offsets."""

    sends: Mapping[int, Views]
    gets: Mapping[int, Views]
    stays: tuple[Views, Views]


class Parts(Wired, ABC):
    """The base of moves in which devices send each other parts of unequal sizes."""

    wire: ClassVar[WireKind] = "parts"

    @property
    @abstractmethod
    def length(self) -> int:
        """The elements that every device lays out, before and after."""

    @abstractmethod
    def traffic(self, index: int) -> Traffic:
        """Return the ranges that the device at `index` sends and receives."""

    @abstractmethod
    def elements(self) -> Numbers:
        """Return the number of elements that each device sends."""

    def parcels(self, x: Tensor, index: int) -> dict[int, Tensor]:
        """Return the tensors that a device sends to others. `x` may be several tensors, concatenated."""
        rows = x.view(-1, self.length)
        return {to: views.taken(rows) for to, views in self.traffic(index).sends.items()}

    def expected(self, x: Tensor, index: int) -> dict[int, int]:
        """Return the number of elements that a device receives from others."""
        rows = x.numel() // self.length
        return {source: rows * views.size for source, views in self.traffic(index).gets.items()}

    def unpacked(self, x: Tensor, index: int, arrived: Mapping[int, Tensor]) -> Tensor:
        rows = x.view(-1, self.length)
        _, gets, (source, place) = self.traffic(index)
        result = torch.zeros_like(rows)
        place.fill(result, source.taken(rows))
        for other, views in gets.items():
            views.fill(result, arrived[other])
        return result.view(x.shape)

    def meaning(self, xs: list[Tensor]) -> list[Tensor]:
        xs = [plain(x).contiguous() for x in xs]
        sent = [self.parcels(x, index) for index, x in enumerate(xs)]
        return [
            self.unpacked(x, index, {source: sent[source][index] for source in self.traffic(index).gets})
            for index, x in enumerate(xs)
        ]

    def sent(self, size: int, index: int, n: int) -> Fraction:
        return Fraction(size, self.length) * int(self.elements()[index])

    def busiest(self, size: int, n: int) -> Fraction:
        return Fraction(size, self.length) * int(self.elements().max())


@dataclass(frozen=True)
class Supply(Parts):
    """Send each device the elements of its new shard that it lacks."""

    before: ElementLayout
    after: ElementLayout
    group: Sizes
    name = "all_to_all"

    def transposed(self) -> Move:
        return Supply(self.after, self.before, self.group)

    @property
    def length(self) -> int:
        return max(self.before.length, self.after.length, 1)

    def elements(self) -> Numbers:
        return _supplied(self)

    def traffic(self, index: int) -> Traffic:
        return _traffic(self, index)


@dataclass(frozen=True)
class KeptRange(Alone):
    """Slice the new shard from the old one, where every device has all of it."""

    supply: Supply
    name = "keep"

    def local(self, x: Tensor, index: int, n: int) -> Tensor:
        return self.supply.unpacked(plain(x).contiguous(), index, {})

    def transposed(self) -> Move:
        return self.supply.transposed()

    @property
    def length(self) -> int:
        return self.supply.length


@lru_cache(maxsize=256)
def _supplied(move: Supply) -> Numbers:
    """Return the number of elements that each device sends: the missing ones, divided among the replicas of each."""
    held, wanted = regions_of(move.before, move.group), regions_of(move.after, move.group)
    rows = alike(move.group, move.before.axes)
    times = prod(size for axis, size in move.group if axis in move.before.axes - move.after.axes)
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
def _requests(move: Supply, shard: int) -> Requests:
    held, wanted = regions_of(move.before, move.group), regions_of(move.after, move.group)
    holders = alike(move.group, move.before.axes)[shard]
    regions = meet(held[holders[0]], wanted)
    regions[holders] = 0  # replicas lack the same elements
    return Requests(holders, regions, volume(regions).cumsum())


@lru_cache(maxsize=4096)
def _traffic(move: Supply, index: int) -> Traffic:
    held, wanted = regions_of(move.before, move.group), regions_of(move.after, move.group)
    rows = alike(move.group, move.before.axes)
    ((own, number),) = np.argwhere(rows == index)
    counts = _requests(move, int(own))
    sends = {int(to): counts.among(int(to), int(number)) for to in np.flatnonzero(volume(counts.regions))}
    gets: dict[int, list[Numbers]] = {}
    for shard in np.flatnonzero(volume(meet(held[rows[:, 0]], wanted[index]))):
        requests = _requests(move, int(shard))
        gets |= {int(holder): requests.among(index, number) for number, holder in enumerate(requests.holders)}
    stays = part(meet(held[index], wanted[index]))
    return Traffic(
        {to: _views(move, move.before, boxes, index) for to, boxes in sends.items() if boxes},
        {source: _views(move, move.after, boxes, index) for source, boxes in gets.items() if boxes},
        (_views(move, move.before, stays, index), _views(move, move.after, stays, index)),
    )


def _views(move: Supply, cut: ElementLayout, boxes: list[Numbers], index: int) -> Views:
    """Return the memory offsets of boxes of global indices on one device."""
    apart, first = memory_of(cut, move.group)
    places = [int((box[:, 0] * apart).sum() - first[index]) for box in boxes]
    lengths = [tuple((box[:, 1] - box[:, 0]).tolist()) for box in boxes]
    return Views(tuple(zip(places, lengths, strict=True)), apart)
