"""Checks of numeric arguments: one error names all that are outside of their intervals.

validate("adam", within("[0, inf)", lr=lr, eps=eps), within("[0, 1)", pair=True, betas=betas))
"""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

from torch import Tensor

from fshard.errors import OptimizerError


def validate(who: str, *errors: list[str]) -> None:
    """Raise if there are errors.

    >>> validate("sgd", within("[0, inf)", lr=-1.0, momentum=0.9), within("[0, 1)", pair=True, betas=(0.9, 2.0)))
    Traceback (most recent call last):
    fshard.errors.OptimizerError: sgd: lr must be in [0, inf); got -1.0. betas must be in [0, 1); got (0.9, 2.0).
    """
    if found := [error for some in errors for error in some]:
        raise OptimizerError(f"{who}: {'. '.join(found)}.")


def within(
    interval: str, /, *, pair: bool = False, integer: bool = False, **numbers: Any
) -> list[str]:
    """Return an error for each number outside of an interval.

    Raise TypeError for arguments that are no numbers.

    Tensors and functions (schedules) are not checked.

    Args:
        interval: such as "[0, 1)": from 0 to 1, without 1.
        pair: each argument is two numbers.
        integer: each is an integer.
        numbers: the arguments by name.

    >>> within("[0, 1)", momentum=0.9, dampening=1.0)
    ['dampening must be in [0, 1); got 1.0']
    """
    low, high = map(float, interval[1:-1].split(","))
    kind = "two numbers" if pair else "an integer" if integer else "a number"
    errors: list[str] = []
    for name, given in numbers.items():
        each: tuple[Any, ...] = (
            tuple(given) if pair and isinstance(given, tuple | list) else (given,)
        )  # pyright: ignore[reportUnknownArgumentType]
        fixed = [x for x in each if not callable(x) and not isinstance(x, Tensor)]
        if len(each) != 1 + pair or not all(
            isinstance(x, Integral if integer else Real) for x in fixed
        ):
            raise TypeError(f"{name} must be {kind}; got {given!r}.")
        above = all(low < x or (low == x and interval[0] == "[") for x in fixed)
        below = all(x < high or (x == high and interval[-1] == "]") for x in fixed)
        if not (above and below):
            errors.append(f"{name} must be in {interval}; got {given!r}")
    return errors
