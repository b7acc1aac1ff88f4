"""Which groups leave the devices' memory, so that no event of a step needs more than a limit: the cheapest that do.

A step is a cycle of events: uses of units, then the update. A group that leaves is absent in some events, and moving or
recomputing it takes time:

    event             0      1      2      3      4      5      6
    unit 0           use   leaves   ·      ·      ·   returns  use        absent in 2, 3, 4

`choose` is a covering problem, which is NP-hard. The option with the least cost for each byte that is still missing is taken
again and again, then those that turn out to be superfluous are dropped. Of a few options all choices are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any, NamedTuple

from torch import Tensor

SLACK = 1.15
"""The factor by which a chosen price may exceed the last known least: prices of thousands change with every choice."""

FEW = 12
"""Options up to which all choices are compared."""


class Option(NamedTuple):
    """A group may be in some memory: `absent` are the bytes that each event then has less, `cost` the seconds it takes."""

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
    >>> options = [Option("a", "host", torch.tensor([0, 4, 4]), 1.0), Option("b", "host", torch.tensor([0, 4, 0]), 0.5)]
    >>> [x.group for x in choose(options, torch.tensor([0, 3, 0]))], [x.group for x in choose(options, torch.tensor([0, 3, 1]))]
    (['b'], ['a'])
    """
    try:
        chosen = by_price(options, beyond)
    except NotEnoughError:  # a cheap option of a group may be in the way of one that frees more
        largest = {x.group: x for x in sorted(options, key=lambda option: int(option.absent.sum()))}
        chosen = by_price([*largest.values()], beyond)
    best = without_superfluous(chosen, beyond)
    return best if len(options) > FEW else _searched(options, beyond, [], best)


def by_price(options: Sequence[Option], beyond: Tensor) -> list[Option]:
    """Choose again and again an option with about the least cost for each byte by which events still pass the limit."""
    chosen, prices = (
        list[Option](),
        [(_price(option, beyond), index) for index, option in enumerate(options)],
    )
    heapify(prices)
    while beyond.max() > 0:
        if not prices:
            raise NotEnoughError
        _, index = heappop(prices)
        option, price = options[index], _price(options[index], beyond)  # it only rises
        if price == inf or any(option.group == other.group for other in chosen):
            continue
        if prices and price > SLACK * prices[0][0]:
            heappush(prices, (price, index))
        else:
            chosen.append(option)
            beyond = beyond - option.absent
    return chosen


def _price(option: Option, beyond: Tensor) -> float:
    """Return the cost of an option for each byte by which it brings events closer to the limit."""
    missing = int(beyond.clamp(min=0).minimum(option.absent).sum())
    return option.cost / missing if missing else inf


def without_superfluous(chosen: Sequence[Option], beyond: Tensor) -> list[Option]:
    """Leave out options without which no event passes the limit, the dearest first."""
    rest = beyond - sum([option.absent for option in chosen])
    kept = list(chosen)
    for option in sorted(chosen, key=lambda option: -option.cost):
        if (rest + option.absent).max() <= 0:
            rest = rest + option.absent
            kept = [other for other in kept if other is not option]
    return kept


def _searched(
    options: Sequence[Option], beyond: Tensor, chosen: Sequence[Option], best: list[Option]
) -> list[Option]:
    """Return the cheapest of all choices with these options besides the chosen ones, or the best one so far."""
    if _cost(chosen) >= _cost(best):
        return best
    if beyond.max() <= 0:
        return [*chosen]
    event = int(beyond.argmax())
    helping = [option for option in options if option.absent[event] > 0]
    for index, option in enumerate(helping):  # choices with this option, and without those before
        rest = [
            x
            for x in options
            if x.group != option.group and all(x is not before for before in helping[:index])
        ]
        best = _searched(rest, beyond - option.absent, [*chosen, option], best)
    return best


def _cost(options: Sequence[Option]) -> float:
    """Return the cost of options; of equal ones the fewer cost less."""
    return sum([option.cost for option in options]) * (1 + 1e-9 * len(options))
