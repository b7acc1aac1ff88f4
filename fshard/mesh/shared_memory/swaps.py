"""Small collectives among neighbours: each is one swap of rows, and which rows go where is data.

index 1 of 3        sends          gets              of which it makes
gather, reduce      x to 0, 2      rows 0, 2         all rows, or their sum
exchange, scatter   row i to i     rows 0, 2         all rows, or their sum
permute, broadcast  x to some      x of one          x
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fshard.mesh.collectives.moves import Broadcast, Permute, Wired, combining
from fshard.mesh.layout.arithmetic import Combine, combined
from fshard.mesh.runtimes.link import Stamped, Wire
from fshard.mesh.shared_memory.neighbours import Need, Neighbour, Neighbours, differs
from fshard.mesh.shared_memory.rings import INSIDE

LARGE = 16 << 10
"""Bytes of a row from which on rows are summed in their own memory."""


@dataclass(frozen=True)
class Swap:
    """The rows that one process sends and receives: (index of the other, row of x), (index of the other, row of the
    result).
    """

    sends: Sequence[tuple[int, int]]
    gets: Sequence[tuple[int, int]]
    keeps: tuple[int, int] | None
    """The row of x that becomes a row of the result."""
    cut: int
    """Number of rows of x."""
    rows: int
    """Number of rows of the result."""
    summed: bool = False


@lru_cache(maxsize=1024)
def swap_of(move: Wired, index: int, n: int) -> Swap:
    """Return the steps of the process at `index` of `n` in a move with small rows."""
    others = [(index + step) % n for step in range(1, n)]
    everybodys = [(other, other) for other in others]
    if isinstance(move, Permute):
        sends = [(to, 0) for source, to in move.pairs if source == index != to]
        gets = [(source, 0) for source, to in move.pairs if to == index != source]
        return Swap(sends, gets, (0, 0) if (index, index) in move.pairs else None, 1, 1)
    if isinstance(move, Broadcast):
        if index == move.source:
            return Swap([(other, 0) for other in others], [], (0, 0), 1, 1)
        return Swap([], [(move.source, 0)], None, 1, 1)
    if move.wire in ("scatter", "exchange"):
        return Swap(everybodys, everybodys, (index, index), n, n, move.wire == "scatter")
    return Swap([(other, 0) for other in others], everybodys, (0, index), 1, n, move.wire == "reduce")


class Swapping:
    """A swap of rows of one size among neighbours, which can be made any number of times."""

    __slots__ = (
        "_combine",
        "_dtype",
        "_gets",
        "_keeps",
        "_length",
        "_neighbours",
        "_sends",
        "_shape",
        "_size",
        "_what",
    )

    def __init__(
        self, move: Wired, swap: Swap, x: Tensor, neighbours: Neighbours, peers: dict[int, Neighbour], what: Stamped
    ) -> None:
        self._neighbours, self._what, self._dtype = neighbours, what, x.dtype
        self._length, self._size = x.numel() // swap.cut, x.nbytes // swap.cut
        self._sends = [(peers[to], row * self._size) for to, row in swap.sends]
        self._gets = [(peers[source], row * self._size) for source, row in swap.gets]
        self._keeps = None if swap.keeps is None else (swap.keeps[0] * self._size, swap.keeps[1] * self._size)
        self._shape = (self._length,) if swap.rows == 1 else (swap.rows, self._length)
        self._combine = combining(move) if swap.summed else None

    def wire(self, key: int, x: Tensor) -> Wire:
        """Send, wait, and get."""
        size, stamp, base = self._size, self._what.stamp, x.data_ptr()
        for peer, at in self._sends:
            if not peer.offer(key, INSIDE, size, stamp, base + at):
                self._neighbours.press(peer, (key, INSIDE, size, stamp, base + at))
        needs: list[Need] = [(peer, key) for peer, _ in self._gets]
        yield needs
        if self._combine is not None and size >= LARGE:
            return self._sum(key, x, self._combine)
        result = torch.empty(self._shape, dtype=self._dtype, device="cpu")
        into = result.data_ptr()
        if self._keeps is not None:
            ctypes.memmove(into + self._keeps[1], base + self._keeps[0], size)
        elif not needs:
            result.zero_()
        for peer, at in self._gets:
            ctypes.memmove(into + at, self._taken(peer, key), size)
        if self._combine is None:
            return result
        return combined(list(result), self._combine, None, torch.empty(self._length, dtype=self._dtype, device="cpu"))

    def _sum(self, key: int, x: Tensor, combine: Combine) -> Tensor:
        """Sum rows in their own memory; for few bytes the preparation would cost more."""
        own, rows = None, dict[int, Tensor]()
        if self._keeps is not None:
            own = rows[self._keeps[1]] = x.reshape(-1, self._length)[self._keeps[0] // self._size]
        for peer, at in self._gets:
            place = self._taken(peer, key)
            buffer = bytearray(place) if isinstance(place, bytes) else (ctypes.c_char * self._size).from_address(place)
            rows[at] = torch.frombuffer(buffer, dtype=self._dtype)
        total = torch.empty(self._length, dtype=self._dtype, device="cpu")
        return combined([rows[at] for at in sorted(rows)], combine, own, total)

    def _taken(self, peer: Neighbour, key: int) -> int | bytes:
        """Return the address of the row of a process, or its bytes."""
        address, size, stamp, place = peer.inbox.pop(key)
        if stamp != self._what.stamp or size != self._size or address != INSIDE:
            raise differs(self._what, peer, stamp)
        return place
