"""Small collectives of one machine: each is one exchange of rows inline, and which rows are sent where is data.

index 1 of 3        sends          gets              of which it makes
gather, reduce      x to 0, 2      rows 0, 2         all rows, or their sum
exchange, scatter   row i to i     rows 0, 2         all rows, or their sum
permute, broadcast  x to some      x of one          x
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fshard.mesh.collectives.moves import Broadcast, Permute, Wired, combining
from fshard.mesh.layout.arithmetic import Combine, combined
from fshard.mesh.runtimes.link import CALL, CallInfo, Wire
from fshard.mesh.shared_memory.neighbours import INLINE, Need, Neighbour, Neighbours, mismatch
from fshard.mesh.shared_memory.rings import INSIDE

SUM_IN_RING = 16 << 10
"""Bytes of a row from which on rows are summed in the ring's memory; for fewer the preparation would cost more."""


class RowPlan(NamedTuple):
    """The rows that one process sends and gets: (index of the other, row of x), (index of the other, row of the result).

    `keeps` is the row of x that becomes a row of the result.
    """

    sends: Sequence[tuple[int, int]]
    gets: Sequence[tuple[int, int]]
    keeps: tuple[int, int] | None
    rows: int = 1

    def shape(self, length: int) -> tuple[int, ...]:
        """Return the shape of the result, of rows of this length."""
        return (length,) if self.rows == 1 else (self.rows, length)


@lru_cache(maxsize=1024)
def row_plan(move: Wired, index: int, n: int) -> RowPlan:
    """Return the rows that the process at an index sends and gets in a move."""
    others = [(index + step) % n for step in range(1, n)]
    to_each = [(other, other) for other in others]
    if isinstance(move, Permute):
        sends = [(to, 0) for source, to in move.pairs if source == index != to]
        gets = [(source, 0) for source, to in move.pairs if to == index != source]
        return RowPlan(sends, gets, (0, 0) if (index, index) in move.pairs else None)
    if isinstance(move, Broadcast):
        if index == move.source:
            return RowPlan([(other, 0) for other in others], [], (0, 0))
        return RowPlan([], [(move.source, 0)], None)
    if move.wire in ("scatter", "exchange"):
        return RowPlan(to_each, to_each, (index, index), n)
    return RowPlan([(other, 0) for other in others], to_each, (0, index), n)


def row_bytes(move: Wired, x: Tensor, n: int) -> int:
    """Return the bytes of a row that is sent, of a move on a buffer."""
    return x.nbytes // n if move.wire in ("scatter", "exchange") else x.nbytes


def is_small(move: Wired, x: Tensor, n: int) -> bool:
    """Return True if the rows of a move on this buffer are best sent inline."""
    size = row_bytes(move, x, n)
    return move.wire != "parts" and (size * (n - 1) if move.wire == "reduce" else size) <= INLINE


class SmallCollective:
    """An exchange of rows of one size, which can be made any number of times."""

    __slots__ = (
        "_call",
        "_combine",
        "_dtype",
        "_gets",
        "_keeps",
        "_length",
        "_neighbours",
        "_sends",
        "_shape",
        "_size",
    )

    def __init__(
        self, move: Wired, x: Tensor, index: int, neighbours: Neighbours, peers: Mapping[int, Neighbour], call: CallInfo
    ) -> None:
        n = len(peers) + 1
        plan, size = row_plan(move, index, n), row_bytes(move, x, n)
        self._neighbours, self._call, self._dtype = neighbours, call, x.dtype
        self._size, self._length = size, size // x.element_size()
        self._sends = [(peers[to], row * size) for to, row in plan.sends]
        self._gets = [(peers[source], row * size) for source, row in plan.gets]
        self._keeps = None if plan.keeps is None else (plan.keeps[0] * size, plan.keeps[1] * size)
        self._shape = plan.shape(self._length)
        self._combine = combining(move) if move.wire in ("reduce", "scatter") else None

    def wire(self, key: int, x: Tensor) -> Wire:
        """Send, wait, and get."""
        size, stamp, base = self._size, self._call.stamp, x.data_ptr()
        for peer, at in self._sends:
            if not peer.offer(key, INSIDE, size, stamp, base + at):
                self._neighbours.press(peer, (key, INSIDE, size, stamp, base + at))
        needs: list[Need] = [(peer, key) for peer, _ in self._gets]
        yield needs
        if self._combine is not None and size >= SUM_IN_RING:
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
        """Sum rows in the ring's memory."""
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
        if (stamp ^ self._call.stamp) & CALL or size != self._size or address != INSIDE:
            raise mismatch(self._call, peer, stamp)
        return place
