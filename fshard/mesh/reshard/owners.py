"""Exchange full tensors at their owners for flat ranges on all devices, in one call for any number of tensors.

To collect, a device sends every owner its ranges of that owner's tensors; to distribute, the reverse. Nothing else is
sent and nothing is padded.

    0 owns a and b, 1 owns c          for owner 0   for owner 1           result
    device 0 stores flat ranges       [a0 b0]       [c0]          =>      a and b
    device 1 stores the others        [a1 b1]       [c1]                  c
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from fshard.mesh.collectives.autograd import Bound, apply, recorded, transformed
from fshard.mesh.collectives.moves import Move, Pick
from fshard.mesh.layout.arithmetic import Range, chunk, flat_range
from fshard.mesh.reshard.exchange import Parts, Traffic, View, Views
from fshard.mesh.reshard.regions import Numbers

MoveOn = Callable[[Move], Bound]
"""Binds a move to the group of the owners."""
AT_ONCE = 1 << 24
"""Approximate bytes per exchange; larger ones run in several rounds to bound memory."""


class Owned(NamedTuple):
    """One device's shard of a tensor (its range, or all of it), the global shape, and the owner's index."""

    x: Tensor
    shape: tuple[int, ...]
    owner: int

    @property
    def size(self) -> int:
        return prod(self.shape)


def keep(x: Tensor, owner: int, elsewhere: tuple[int, ...], on: MoveOn) -> Tensor:
    """Keep a tensor, equal on all devices, on its owner alone, and an empty one elsewhere.  Nothing is sent."""
    bound = on(Pick(owner))
    if transformed() or recorded((x,)):  # the transpose sends the owner's cotangent to all
        (x,) = apply(bound, (x,))
    return x if bound.group.index == owner else nothing(x, elsewhere)


def nothing(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the empty shard of a device that is not the owner."""
    return x.reshape(-1)[:0].reshape(shape).clone()  # a view would keep x alive


@dataclass(frozen=True)
class Handover(Parts):
    """Put the flat ranges of some tensors together at their owners; or give them out again.

    `leaves` are the size and the owner of each tensor.  A device lays its ranges out side by side, an owner its tensors.
    """

    leaves: tuple[tuple[int, int], ...]
    n: int
    out: bool = False
    name = "all_to_all"

    @property
    def length(self) -> int:
        owners = {owner for _, owner in self.leaves}
        full = [sum(size for size, owner in self.leaves if owner == one) for one in owners]
        return max(sum(chunk(size, self.n) for size, _ in self.leaves), *full, 1)

    def transposed(self) -> Move:
        return replace(self, out=not self.out)

    def elements(self) -> Numbers:
        count = np.zeros(self.n, np.int64)
        for size, owner in self.leaves:
            bounds = np.minimum(np.arange(self.n + 1) * chunk(size, self.n), size)
            each = np.diff(bounds)
            if self.out:
                count[owner] += size - each[owner]
            else:
                count += np.where(np.arange(self.n) == owner, 0, each)
        return count

    def ranges(self, index: int) -> list[View]:
        """Return the offsets of each tensor's range on a device."""
        return _side_by_side([stop - start for start, stop in self._bounds(index)])

    def full_views(self, index: int) -> list[View]:
        """Return the offset of each tensor on a device that may own it."""
        return _side_by_side([size if owner == index else 0 for size, owner in self.leaves])

    def traffic(self, index: int) -> Traffic:
        return _traffic(self, index)

    def _bounds(self, index: int) -> list[Range]:
        return [flat_range(size, self.n, index) for size, _ in self.leaves]

    def between(self, index: int, owner: int) -> tuple[Views, Views]:
        """Return the ranges of an owner's tensors that a device holds: within its shard, and within the tensors."""
        mine = [place for place, (_, one) in enumerate(self.leaves) if one == owner]
        ranges, full_views, bounds = self.ranges(index), self.full_views(owner), self._bounds(index)
        some = [place for place in mine if ranges[place][1] != (0,)]
        within = [(full_views[place][0] + bounds[place][0], ranges[place][1]) for place in some]
        return Views(tuple(ranges[place] for place in some), (1,)), Views(tuple(within), (1,))


@lru_cache(maxsize=1024)
def _traffic(move: Handover, index: int) -> Traffic:
    others = [other for other in range(move.n) if other != index]
    ranges = {owner: move.between(index, owner)[0] for owner in others}
    full_views = {source: move.between(source, index)[1] for source in others}
    sends, gets = (full_views, ranges) if move.out else (ranges, full_views)
    range_, full = move.between(index, index)

    def some(parts: dict[int, Views]) -> dict[int, Views]:
        return {other: views for other, views in parts.items() if views.boxes}

    return Traffic(some(sends), some(gets), (full, range_) if move.out else (range_, full))


def _side_by_side(lengths: Sequence[int]) -> list[View]:
    """Return the offsets of consecutive ranges of these lengths."""
    return [(end - length, (length,)) for end, length in zip(accumulate(lengths), lengths, strict=True)]


def hand_over(some: Sequence[Owned], on: MoveOn, *, out: bool) -> list[Tensor]:
    """Put flat ranges together at their owners, or give each device its ranges; in turns, so that little memory is held."""
    group, filled_up = on(Pick(0)).group, dict[int, int]()
    turns: dict[int, list[int]] = {}
    for place, one in enumerate(some):
        before = filled_up.get(one.owner, 0)
        filled_up[one.owner] = before + one.size
        turns.setdefault(before * one.x.element_size() // AT_ONCE if one.size else 0, []).append(place)
    results: dict[int, Tensor] = {}
    for turn in sorted(turns):
        places = turns[turn]
        move = Handover(tuple((some[place].size, some[place].owner) for place in places), group.size, out)
        results |= zip(places, _exchanged([some[place] for place in places], on(move), move), strict=True)
    return [results[place] for place in range(len(some))]


def _exchanged(some: Sequence[Owned], bound: Bound, move: Handover) -> list[Tensor]:
    index = bound.group.index
    packed = filled(torch.cat([one.x.reshape(-1) for one in some]), move.length)
    (received,) = apply(bound, (packed,))
    views = move.ranges(index) if move.out else move.full_views(index)
    parts = [_copied(received[start : start + length]) for start, (length,) in views]
    if move.out:
        return parts
    shapes = [one.shape if one.owner == index else (0,) * max(len(one.shape), 1) for one in some]
    return [x.reshape(shape) for x, shape in zip(parts, shapes, strict=True)]


def _copied(x: Tensor) -> Tensor:
    """Flatten into new memory: a view would keep all rows alive, and unaligned matmuls round differently."""
    return x.clone(memory_format=torch.contiguous_format).view(-1)


def filled(x: Tensor, length: int) -> Tensor:
    """Flatten, and fill up with zeros to a length."""
    flat = x if x.ndim == 1 else x.reshape(-1)
    return flat if flat.numel() == length else pad(flat, (0, length - flat.numel()))
