r"""Learning rates as functions of the count of steps, from 0: plain floats in, plain floats out.

Where torch.optim.lr_scheduler has the same schedule, the numbers are equal; these are closed
formulas, so a resumed run continues identically from any count.

    warmup_cosine     linear              one_cycle           step
        _                                    _
       / \            \                     / \               ---.
      /   \            \                   /   \                 '---.
     /     '-           '----             /     '-.                  '---
"""

from __future__ import annotations

from collections.abc import Callable
from math import cos, pi

from fshard.optim.arguments import validate, within

Schedule = Callable[[int], float]
"""From the count of steps taken before this one to the learning rate of this one."""
Rate = float | Schedule
"""A learning rate, or a schedule of them."""


def rate_at(rate: Rate, count: int) -> float:
    """Return the rate of the step after `count` others."""
    return rate(count) if callable(rate) else rate


def linear(start: float, end: float, steps: int) -> Schedule:
    """Interpolate linearly: start + (end - start) count / steps, then `end`.

    >>> rate = linear(1.0, 0.0, 4)
    >>> [rate(count) for count in (0, 1, 4, 9)]
    [1.0, 0.75, 0.0, 0.0]
    """
    validate(
        "schedules.linear",
        within("(-inf, inf)", start=start, end=end),
        within("[1, inf)", steps=steps),
    )
    return polynomial(start, end, steps, power=1.0)


def polynomial(start: float, end: float, steps: int, *, power: float = 2.0) -> Schedule:
    """Fall as a power: end + (start - end) (1 - count / steps)^power, then `end`.

    >>> rate = polynomial(1.0, 0.0, 4, power=2.0)
    >>> [rate(count) for count in (0, 2, 4)]
    [1.0, 0.25, 0.0]
    """
    validate(
        "schedules.polynomial",
        within("(-inf, inf)", start=start, end=end),
        within("[1, inf)", steps=steps),
        within("[0, inf)", power=power),
    )

    def rate(count: int) -> float:
        remaining = 1.0 - min(count, steps) / steps
        return end + (start - end) * remaining**power

    return rate


def cosine(start: float, end: float, steps: int) -> Schedule:
    """Fall along a cosine: end + (start - end) (1 + cos(pi count / steps)) / 2, then `end`.

    >>> [round(cosine(1.0, 0.0, 4)(count), 4) for count in (0, 1, 2, 4, 9)]
    [1.0, 0.8536, 0.5, 0.0, 0.0]
    """
    validate(
        "schedules.cosine",
        within("(-inf, inf)", start=start, end=end),
        within("[1, inf)", steps=steps),
    )

    def rate(count: int) -> float:
        angle = pi * min(count, steps) / steps
        return end + (start - end) * (1.0 + cos(angle)) / 2.0

    return rate


def warmup_cosine(peak: float, *, warmup: int, steps: int, end: float = 0.0) -> Schedule:
    """Rise by peak count / warmup, then fall along a cosine from `peak` to `end` at `steps`.

    >>> rate = warmup_cosine(1.0, warmup=2, steps=6)
    >>> [round(rate(count), 4) for count in range(7)]
    [0.0, 0.5, 1.0, 0.8536, 0.5, 0.1464, 0.0]
    """
    errors = within("[1, inf)", steps=steps)
    longest = "inf)" if errors else f"{steps}]"  # a warmup must not be longer than a valid length
    rise_errors = within(f"[0, {longest}", warmup=warmup)
    number_errors = within("(-inf, inf)", peak=peak, end=end)
    validate("schedules.warmup_cosine", number_errors, rise_errors, errors)
    fall = cosine(peak, end, max(steps - warmup, 1))

    def rate(count: int) -> float:
        if count < warmup:
            return peak * count / warmup
        return fall(count - warmup)

    return rate


def step(start: float, *, every: int, factor: float = 0.1) -> Schedule:
    """Fall in steps: start factor^floor(count / every).

    >>> [step(8.0, every=2, factor=0.5)(count) for count in range(5)]
    [8.0, 8.0, 4.0, 4.0, 2.0]
    """
    validate(
        "schedules.step",
        within("(-inf, inf)", start=start, factor=factor),
        within("[1, inf)", every=every),
    )
    return lambda count: start * factor ** (count // every)


def one_cycle(
    peak: float,
    *,
    steps: int,
    rise: float = 0.3,
    start_divisor: float = 25.0,
    end_divisor: float = 1e4,
) -> Schedule:
    """Rise along a cosine from peak / start_divisor in the fraction `rise` of the steps.

    Fall to start / end_divisor.

    >>> rate = one_cycle(1.0, steps=10)
    >>> [round(rate(count), 4) for count in (0, 2, 9)]
    [0.04, 1.0, 0.0]
    """
    divisors = within("(0, inf)", start_divisor=start_divisor, end_divisor=end_divisor)
    validate(
        "schedules.one_cycle",
        within("(-inf, inf)", peak=peak),
        within("[1, inf)", steps=steps),
        within("[0, 1]", rise=rise),
        divisors,
    )
    start = peak / start_divisor
    top = rise * steps - 1.0
    last = steps - 1.0

    def rate(count: int) -> float:
        if count <= top:
            return _cosine_between(start, peak, _fraction(count, top))
        return _cosine_between(peak, start / end_divisor, _fraction(count - top, last - top))

    return rate


def _cosine_between(begin: float, end: float, fraction: float) -> float:
    """Interpolate along half a period of a cosine."""
    return end + (begin - end) * (1.0 + cos(pi * fraction)) / 2.0


def _fraction(done: float, full: float) -> float:
    """Return the completed fraction of an interval; 1 for an empty one."""
    return min(done / full, 1.0) if full else 1.0


def inverse_sqrt(peak: float, *, warmup: int) -> Schedule:
    """Rise, then decay with the root: peak min(count / warmup, sqrt(warmup / count)).

    >>> [inverse_sqrt(1.0, warmup=4)(count) for count in (0, 2, 4, 16)]
    [0.0, 0.5, 1.0, 0.5]
    """
    validate(
        "schedules.inverse_sqrt",
        within("(-inf, inf)", peak=peak),
        within("[0, inf)", warmup=warmup),
    )
    warmup = max(warmup, 1)

    def rate(count: int) -> float:
        rise = count / warmup
        decay = (warmup / max(count, 1)) ** 0.5
        return peak * min(rise, decay)

    return rate
