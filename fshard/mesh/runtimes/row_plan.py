"""The rows that a process sends and receives in a collective that only moves rows, as data.

Index 1 of 3:

    move                 sends          receives         which becomes
    gather               x to 0, 2      rows 0, 2        all rows
    exchange             row i to i     rows 0, 2        all rows
    permute, broadcast   x to some      x of one         x
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from fshard.mesh.collectives.moves import Broadcast, Permute, Wired


class RowPlan(NamedTuple):
    """The rows that one process sends and receives.

    Args:
        sends: pairs (index of the receiver, row of x).
        gets: pairs (index of the sender, row of the result).
        keeps: the row of x that becomes a row of the result without being sent, and that row.
        rows: the number of rows of the result.
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
    """Return the rows that the process at an index sends and receives in a move.

    Each process begins with the next one: so all send to different ones at a time.
    """
    if isinstance(move, Permute):
        return _permute_plan(move, index)

    peers = [(index + step) % n for step in range(1, n)]
    first_row_to_each = [(peer, 0) for peer in peers]
    if isinstance(move, Broadcast):
        if index == move.source:
            return RowPlan(first_row_to_each, [], (0, 0))
        return RowPlan([], [(move.source, 0)], None)

    row_of_each = [(peer, peer) for peer in peers]
    if move.wire == "exchange":
        return RowPlan(row_of_each, row_of_each, (index, index), n)
    assert move.wire == "gather"
    return RowPlan(first_row_to_each, row_of_each, (0, index), n)


def _permute_plan(move: Permute, index: int) -> RowPlan:
    sends: list[tuple[int, int]] = []
    gets: list[tuple[int, int]] = []
    for source, target in move.pairs:
        if source == index != target:
            sends.append((target, 0))
        if target == index != source:
            gets.append((source, 0))
    keeps = (0, 0) if (index, index) in move.pairs else None
    return RowPlan(sends, gets, keeps)
