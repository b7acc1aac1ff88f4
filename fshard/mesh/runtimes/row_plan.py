"""The rows that a process sends and gets in a collective that only moves rows, as data.

index 1 of 3        sends          gets              of which it makes
gather              x to 0, 2      rows 0, 2         all rows
exchange            row i to i     rows 0, 2         all rows
permute, broadcast  x to some      x of one          x
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from fshard.mesh.collectives.moves import Broadcast, Permute, Wired


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
    peers = [(index + step) % n for step in range(1, n)]
    to_each = [(peer, peer) for peer in peers]
    if isinstance(move, Permute):
        sends = [(to, 0) for source, to in move.pairs if source == index != to]
        gets = [(source, 0) for source, to in move.pairs if to == index != source]
        return RowPlan(sends, gets, (0, 0) if (index, index) in move.pairs else None)
    if isinstance(move, Broadcast):
        if index == move.source:
            return RowPlan([(peer, 0) for peer in peers], [], (0, 0))
        return RowPlan([], [(move.source, 0)], None)
    if move.wire in ("scatter", "exchange"):
        return RowPlan(to_each, to_each, (index, index), n)
    return RowPlan([(peer, 0) for peer in peers], to_each, (0, index), n)
