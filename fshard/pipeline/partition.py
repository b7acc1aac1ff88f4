"""Cutting a row of costs into contiguous parts whose largest sum is as small as can be.

    3 1 4 1 5 9 2 6   into 3   ->   3 1 4 1 5 | 9 | 2 6         no cut has a largest sum below 14

First the bound is found.  Fill parts from the left as long as they stay within a bound, beginning with one that cannot be
beaten; if that takes too many parts, any better filling has to let some part take in the cost at which it was closed, so the
next bound is the least of these sums.  Then, among all cuts within the bound, the most even one is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

Cost = float


def partition(costs: Sequence[Cost], parts: int) -> list[int]:
    """Return how many costs go into each part, at least one.

    >>> partition([3, 1, 4, 1, 5, 9, 2, 6], 3)
    [5, 1, 2]
    >>> partition([1] * 7, 3)
    [3, 2, 2]
    """
    sums = [0, *accumulate(costs)]
    bound = max(after - before for before, after in pairwise(sums))
    while (raised := _fill(sums, parts, bound)) is not None:
        bound = raised
    return _most_even(sums, parts, bound)


def _fill(sums: Sequence[Cost], parts: int, bound: Cost) -> Cost | None:
    """Return None if so many parts within a bound are enough, else the next bound that may be."""
    begin, closed = 0, list[Cost]()
    for end in range(1, len(sums)):
        if sums[end] - sums[begin] > bound:
            closed.append(sums[end] - sums[begin])
            begin = end - 1
    return min(closed) if len(closed) >= parts else None


def _most_even(sums: Sequence[Cost], parts: int, bound: Cost) -> list[int]:
    """Return the parts within a bound whose squares have the least sum; earlier parts take more costs, if that is equal."""
    count = len(sums) - 1
    best: dict[int, tuple[Cost, list[int]]] = {0: (0, [])}  # of the first so many costs, in as many parts as are made
    for part in range(1, parts + 1):
        before, best = best, {}
        for end in range(part, count - parts + part + 1):
            for begin in range(end - 1, part - 2, -1):
                own = sums[end] - sums[begin]
                if own > bound:
                    break
                if begin in before and (end not in best or before[begin][0] + own * own < best[end][0]):
                    best[end] = before[begin][0] + own * own, [*before[begin][1], end - begin]
    return best[count][1]
