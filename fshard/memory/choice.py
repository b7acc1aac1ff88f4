"""Choose the groups that leave the devices' memory, so that no event of a step passes a limit.

A step is a cycle of events: uses of units, then the update. A group that leaves is absent in some
events, and moving or recomputing it takes time:

    event             0      1      2      3      4      5      6
    unit 0           use   leaves   ·      ·      ·   returns  use        absent in 2, 3, 4

`choose` is a covering problem, which is NP-hard. The option with the least cost for each byte that
is still missing is taken again and again, then those that turn out to be superfluous are dropped.
Of a few options all choices are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any, NamedTuple

from torch import Tensor

SLACK = 1.15
"""The factor by which a chosen price may exceed the last known least.

Prices of thousands change with every choice, so few of those in the heap are up to date."""

FEW = 12
"""Options up to which all choices are compared."""


class Option(NamedTuple):
    """A memory that a group may be in.

    Args:
        group: what leaves.
        memory: where it is then, or "recomputed".
        absent: the bytes that each event then has less.
        cost: the seconds it takes.
    """

    group: Any
    memory: Any
    absent: Tensor
    cost: float


class NotEnoughError(ValueError):
    """An event needs more than the limit, even if all groups leave that can."""


def choose(options: Sequence[Option], beyond: Tensor) -> list[Option]:
    """Return at most one option of each group, of about the least cost.

    Args:
        options: of all groups.
        beyond: the bytes by which each event passes the limit if none leaves.

    >>> import torch
    >>> options = [
    ...     Option("a", "host", torch.tensor([0, 4, 4]), 1.0),
    ...     Option("b", "host", torch.tensor([0, 4, 0]), 0.5),
    ... ]
    >>> [x.group for x in choose(options, torch.tensor([0, 3, 0]))]
    ['b']
    >>> [x.group for x in choose(options, torch.tensor([0, 3, 1]))]
    ['a']
    """
    try:
        chosen = by_price(options, beyond)
    except NotEnoughError:
        # A cheap option of a group may be in the way of one that frees more.
        largest: dict[Any, Option] = {}
        for option in sorted(options, key=lambda option: int(option.absent.sum())):
            largest[option.group] = option
        chosen = by_price([*largest.values()], beyond)
    best = without_superfluous(chosen, beyond)
    if len(options) > FEW:
        return best
    return _searched(options, beyond, [], best)


def by_price(options: Sequence[Option], beyond: Tensor) -> list[Option]:
    """Choose options until no event passes the limit, each of about the least price.

    Prices in the heap are those of earlier choices. They only rise, as fewer bytes are missing, so
    the least price is known once an option's price is no higher than the next one in the heap.
    """
    chosen: list[Option] = []
    chosen_groups: set[Any] = set()
    prices = [(_price(option, beyond), index) for index, option in enumerate(options)]
    heapify(prices)
    while beyond.max() > 0:
        if not prices:
            raise NotEnoughError
        _, index = heappop(prices)
        option = options[index]
        price = _price(option, beyond)
        if price == inf or option.group in chosen_groups:
            continue
        if prices and price > SLACK * prices[0][0]:
            heappush(prices, (price, index))
            continue
        chosen.append(option)
        chosen_groups.add(option.group)
        beyond = beyond - option.absent
    return chosen


def _price(option: Option, beyond: Tensor) -> float:
    """Return the cost of an option for each byte by which it brings events closer to the limit."""
    missing = int(beyond.clamp(min=0).minimum(option.absent).sum())
    return option.cost / missing if missing else inf


def without_superfluous(chosen: Sequence[Option], beyond: Tensor) -> list[Option]:
    """Leave out options without which no event passes the limit, the dearest first."""
    remaining = beyond - sum([option.absent for option in chosen])
    needed = list(chosen)
    for option in sorted(chosen, key=lambda option: -option.cost):
        remaining_without = remaining + option.absent
        if remaining_without.max() <= 0:
            remaining = remaining_without
            needed = [other for other in needed if other is not option]
    return needed


def _searched(
    options: Sequence[Option], beyond: Tensor, chosen: Sequence[Option], best: list[Option]
) -> list[Option]:
    """Return the cheapest of all choices that include the chosen options, or the best one so far.

    Args:
        options: that may be added.
        beyond: the bytes by which each event passes the limit with the chosen options.
    """
    if _cost(chosen) >= _cost(best):
        return best
    if beyond.max() <= 0:
        return [*chosen]

    # One of the options that help the worst event must be chosen. Each is tried: with it, and
    # without those that were tried before.
    event = int(beyond.argmax())
    candidates = list(options)
    for option in options:
        if option.absent[event] <= 0:
            continue
        others = [other for other in candidates if other.group != option.group]
        best = _searched(others, beyond - option.absent, [*chosen, option], best)
        candidates = [other for other in candidates if other is not option]
    return best


def _cost(options: Sequence[Option]) -> float:
    """Return the cost of options; of equal ones the fewer cost less."""
    return sum([option.cost for option in options]) * (1 + 1e-9 * len(options))
