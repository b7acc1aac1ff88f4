"""Which tensors leave a device's memory in which gaps between their uses, so that a step stays below a limit.

A step is a cycle of events: uses of units, then the update. A tensor that is not used for a while may be elsewhere
meanwhile. It is copied away while the event after its use runs, and back while the one before its next use runs:

    event        0      1      2      3      4      5      6
    unit 0      use   leaves   ·      ·      ·   returns  use        Gap(begin=0, end=6), absent in 2, 3, 4

`choose_gaps` is offline caching with sizes and costs, which is NP-hard. Farthest next use first is a good order for
equal tensors (Belady), the least cost for each byte that is still missing for unequal ones. Both are computed, gaps that
turn out to be superfluous are dropped, and the cheaper plan is returned. Of a few gaps all plans are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

SLACK = 1.15
"""The factor by which a chosen price may exceed the last known least: prices of thousands of gaps change with every choice."""

FEW = 12
"""Gaps up to which all plans are compared."""


class Gap(NamedTuple):
    """The time between two uses of a tensor of `size` bytes, as numbers of events; `end` is at most a step after `begin`.

    `cost` is the price of an absence in seconds: of transfers, or of recomputation.
    """

    name: Any
    size: int
    begin: int
    end: int
    cost: float

    @property
    def absence(self) -> range:
        """The events in which the tensor need not be there."""
        return range(self.begin + 2, self.end - 1)


def choose_gaps(gaps: Sequence[Gap], needs: Sequence[int], limit: int) -> list[Gap]:
    """Return the gaps in which tensors leave, of about the least cost.

    Args:
        gaps: of the tensors that may leave.
        needs: the bytes at each event if none leaves.
        limit: that no event may pass.

    >>> gaps = [Gap("a", 4, 0, 5, 1.0), Gap("b", 4, 1, 4, 1.0)]
    >>> choose_gaps(gaps, [4, 8, 8, 8, 8, 4], 8), choose_gaps(gaps, [4, 8, 9, 8, 8, 4], 8)
    ([], [Gap(name='a', size=4, begin=0, end=5, cost=1.0)])
    """
    if bytes_beyond(gaps, needs, limit).max() > 0:
        event = int(bytes_beyond(gaps, needs, limit).argmax())
        raise NotEnoughError(event, limit + int(bytes_beyond(gaps, needs, limit)[event]))
    plans = [_without_superfluous(plan(gaps, needs, limit), needs, limit) for plan in (_by_next_use, _by_cost)]
    best = min(plans, key=_cost)
    return best if len(gaps) > FEW else _searched(bytes_beyond((), needs, limit), gaps, [], best)


class NotEnoughError(ValueError):
    """An event needs more than the limit, even if all leaves that can."""

    def __init__(self, event: int, need: int) -> None:
        super().__init__(f"event {event} needs {need:,} bytes")
        self.event, self.need = event, need


def bytes_beyond(chosen: Sequence[Gap], needs: Sequence[int], limit: int) -> Tensor:
    """Return by how many bytes each event passes the limit if tensors leave in these gaps."""
    beyond = torch.tensor(needs, dtype=torch.int64) - limit
    for gap in chosen:
        _leave(beyond, gap)
    return beyond


def _leave(beyond: Tensor, gap: Gap, sign: int = -1) -> None:
    for part in _parts(gap, len(beyond)):
        beyond[part] += sign * gap.size


def _parts(gap: Gap, events: int) -> Iterator[slice]:
    """Yield the events of an absence, in two parts if it lasts into the next step."""
    start, stop = gap.absence.start, gap.absence.stop
    if start < min(stop, events):
        yield slice(start, min(stop, events))
    if max(start, events) < stop:
        yield slice(max(start, events) - events, stop - events)


def _by_next_use(gaps: Sequence[Gap], needs: Sequence[int], limit: int) -> list[Gap]:
    """Go through the events; where one passes the limit, the tensor with the farthest next use leaves."""
    beyond, chosen, events = bytes_beyond((), needs, limit), list[Gap](), len(needs)
    turns = [(gap.absence.start - turn, gap.end - turn, gap) for gap in gaps for turn in (0, events)]
    begins = sorted([turn for turn in turns if len(turn[2].absence) and turn[0] < events], reverse=True)
    absent = list[tuple[int, float, Gap]]()  # a heap of those that may be absent: the farthest next use first
    left = set[Gap]()
    for event in range(events):
        while begins and begins[-1][0] <= event:
            _, end, gap = begins.pop()
            heappush(absent, (-end, gap.cost, gap))
        while beyond[event] > 0:
            _, _, gap = heappop(absent)
            if gap not in left:
                left.add(gap)
                chosen.append(gap)
                _leave(beyond, gap)
    return chosen


def _by_cost(gaps: Sequence[Gap], needs: Sequence[int], limit: int) -> list[Gap]:
    """Choose again and again a gap with about the least cost for each byte by which events still pass the limit."""
    beyond, chosen = bytes_beyond((), needs, limit), list[Gap]()
    prices = [(_price(gap, beyond), gap) for gap in gaps]
    heapify(prices)
    is_beyond = bool(beyond.max() > 0)
    while is_beyond:
        _, gap = heappop(prices)
        price = _price(gap, beyond)  # it only rises
        if prices and price > SLACK * prices[0][0]:
            heappush(prices, (price, gap))
        else:
            chosen.append(gap)
            _leave(beyond, gap)
            is_beyond = bool(beyond.max() > 0)
    return chosen


def _price(gap: Gap, beyond: Tensor) -> float:
    """Return the cost of a gap for each byte by which it brings events closer to the limit."""
    missing = sum([int(beyond[part].clamp(0, gap.size).sum()) for part in _parts(gap, len(beyond))])
    return gap.cost / missing if missing else inf


def _searched(beyond: Tensor, gaps: Sequence[Gap], chosen: list[Gap], best: list[Gap]) -> list[Gap]:
    """Return the cheapest of all plans with these gaps besides the chosen ones, or the best one so far."""
    if _cost(chosen) >= _cost(best):
        return best
    if beyond.max() <= 0:
        return chosen
    event, events = int(beyond.argmax()), len(beyond)
    there = [gap for gap in gaps if event in gap.absence or event + events in gap.absence]
    others = [gap for gap in gaps if gap not in there]
    for index, gap in enumerate(there):  # plans with this gap, and without those before
        less = beyond.clone()
        _leave(less, gap)
        best = _searched(less, [*others, *there[index + 1 :]], [*chosen, gap], best)
    return best


def _cost(gaps: Sequence[Gap]) -> float:
    return sum([gap.cost for gap in gaps])


def _without_superfluous(chosen: Sequence[Gap], needs: Sequence[int], limit: int) -> list[Gap]:
    """Leave out gaps without which no event passes the limit, the dearest first."""
    beyond, kept = bytes_beyond(chosen, needs, limit), {*chosen}
    for gap in sorted(chosen, key=lambda gap: -gap.cost):
        if all(bool((beyond[part] + gap.size <= 0).all()) for part in _parts(gap, len(beyond))):
            kept.discard(gap)
            _leave(beyond, gap, 1)
    return [gap for gap in chosen if gap in kept]
