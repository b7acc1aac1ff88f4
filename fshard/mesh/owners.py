"""Between owners, who hold tensors whole, and flat ranges of the same tensors: one exchange for any number of them.

Each owner's tensors stand side by side in its row, which is as long as the fullest row.  To collect ranges, a device lays
out for every owner the ranges that it holds of that owner's tensors, and all rows change hands at once; handing out is
the same the other way.  So owners with equally much to hold send and receive equally much, and nothing is padded.

    0 owns a and b, 1 owns c          for owner 0   for owner 1           device 0 then holds
    device 0 holds flat ranges        [a0 b0]       [c0 . ]      =>       [a0 b0]
    device 1 holds the others         [a1 b1]       [c1 . ]               [a1 b1]     that is, a and b
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fshard.mesh.arithmetic import chunk, flat_range
from fshard.mesh.differentiate import Bound, apply, recorded, transformed
from fshard.mesh.moves import AllToAll, Move, Pick

MoveOn = Callable[[Move], Bound]
"""What binds a move to the group that the owners are members of."""
AT_ONCE = 1 << 24
"""Bytes that an exchange sends at once, about: more go in turns, so that little memory is held for them."""


class Owned(NamedTuple):
    """One device's part of a tensor: its range or its whole, the shape of the whole, and the place of the owner."""

    x: Tensor
    shape: tuple[int, ...]
    owner: int

    @property
    def size(self) -> int:
        """The elements of the whole."""
        return prod(self.shape)

    def whole(self, mine: bool, x: Tensor) -> Tensor:
        """Return the whole, or where it is not mine the empty piece."""
        if mine:
            return x.reshape(self.shape)
        return x.reshape(-1)[:0].reshape((0,) * max(len(self.shape), 1)).clone()  # a view would keep x alive


def keep(one: Owned, on: MoveOn) -> Tensor:
    """Keep a tensor, equal on all devices, whole or empty, on its owner alone.  Nothing is sent."""
    bound = on(Pick(one.owner))
    mine = bound.group.index == one.owner and one.x.numel() == one.size
    if transformed() or recorded((one.x,)):  # the transpose sends the owner's cotangent to all
        return one.whole(mine, apply(bound, (one.x,))[0])
    return one.whole(mine, one.x)


def collect(some: Sequence[Owned], on: MoveOn) -> list[Tensor]:
    """Put the flat ranges of tensors together at their owners."""
    return _in_turns(_collect, some, on(AllToAll(0, 0)))


def hand_out(some: Sequence[Owned], on: MoveOn) -> list[Tensor]:
    """Give every device its flat ranges of what owners hold."""
    return _in_turns(_hand_out, some, on(AllToAll(0, 0)))


def _in_turns(
    exchange: Callable[[Sequence[Owned], Bound], list[Tensor]], some: Sequence[Owned], bound: Bound
) -> list[Tensor]:
    """Exchange what stands in the first columns of all rows, then in the next ones."""
    columns = max(1, AT_ONCE // (bound.group.size * some[0].x.element_size()))
    turns: dict[int, list[int]] = {}
    for place, start in enumerate(_side_by_side(some, bound.group.size)[0]):
        turns.setdefault(start // columns if some[place].size else 0, []).append(place)
    results: dict[int, Tensor] = {}
    for turn in sorted(turns):
        places = turns[turn]
        results |= zip(places, exchange([some[place] for place in places], bound), strict=True)
    return [results[place] for place in range(len(some))]


def _collect(some: Sequence[Owned], bound: Bound) -> list[Tensor]:
    n, index = bound.group.size, bound.group.index
    starts, length = _side_by_side(some, n)

    def row(owner: int) -> Tensor:
        ranges = [filled(one.x, chunk(one.size, n)) for one in some if one.owner == owner]
        return filled(torch.cat(ranges) if ranges else some[0].x.new_empty(0), length)

    received = apply(bound, (torch.cat(list(map(row, range(n)))),))[0].view(n, length)  # from each device a row
    return [
        one.whole(True, _copied(received[:, start : start + chunk(one.size, n)])[: one.size])
        if one.owner == index
        else one.whole(False, received)
        for one, start in zip(some, starts, strict=True)
    ]


def _hand_out(some: Sequence[Owned], bound: Bound) -> list[Tensor]:
    n, index = bound.group.size, bound.group.index
    starts, length = _side_by_side(some, n)

    def column(one: Owned) -> Tensor:
        size = chunk(one.size, n) if one.owner == index else 0
        return filled(one.x, n * size).view(n, size)  # a row for each device

    columns = [column(one) for one in some]
    spare = columns[0].new_zeros(n, length - sum(own.shape[1] for own in columns))
    received = apply(bound, (torch.cat([*columns, spare], 1).reshape(-1),))[0].view(n, length)
    return [
        _copied(received[one.owner, start : start + stop - first])
        for one, start, (first, stop) in zip(
            some, starts, [flat_range(one.size, n, index) for one in some], strict=True
        )
    ]


def _side_by_side(some: Sequence[Owned], n: int) -> tuple[list[int], int]:
    """Put ranges side by side in the rows of their owners; return where each begins, and how long the longest row is."""
    ends, starts = [0] * n, list[int]()
    for one in some:
        starts.append(ends[one.owner])
        ends[one.owner] += chunk(one.size, n)
    return starts, max(ends)


def _copied(x: Tensor) -> Tensor:
    """Flatten into memory of its own: a view would keep all rows alive, and products on odd addresses round differently."""
    return x.clone(memory_format=torch.contiguous_format).view(-1)


def filled(x: Tensor, length: int) -> Tensor:
    """Flatten, and fill up with zeros to a length."""
    flat = x if x.ndim == 1 else x.reshape(-1)
    return flat if flat.numel() == length else pad(flat, (0, length - flat.numel()))
