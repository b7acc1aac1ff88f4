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

    >>> steps = within("[0, inf)", lr=-1.0, momentum=0.9)
    >>> validate("sgd", steps, within("[0, 1)", pair=True, betas=(0.9, 2.0)))
    Traceback (most recent call last):
    fshard.errors.OptimizerError: sgd: lr must be in [0, inf); got -1.0. betas must be in [0, 1); ...
    """
    all_errors: list[str] = []
    for some_errors in errors:
        all_errors += some_errors
    if all_errors:
        raise OptimizerError(f"{who}: {'. '.join(all_errors)}.")


def within(
    interval: str, /, *, pair: bool = False, integer: bool = False, **numbers: Any
) -> list[str]:
    """Return an error for each number outside of an interval.

    Raises TypeError for arguments that are no numbers. Tensors and functions (schedules) are not
    checked.

    Args:
        interval: such as "[0, 1)": from 0 to 1, without 1.
        pair: each argument is two numbers.
        integer: each is an integer.
        numbers: the arguments by name.

    >>> within("[0, 1)", momentum=0.9, dampening=1.0)
    ['dampening must be in [0, 1); got 1.0']
    """
    low, high = map(float, interval[1:-1].split(","))
    errors: list[str] = []
    for name, argument in numbers.items():
        numbers_of_argument: tuple[Any, ...] = (argument,)
        if pair and isinstance(argument, tuple | list):
            numbers_of_argument = tuple(argument)  # pyright: ignore[reportUnknownArgumentType]
        for x in _validated(name, argument, numbers_of_argument, pair=pair, integer=integer):
            is_above = low < x or (low == x and interval[0] == "[")
            is_below = x < high or (x == high and interval[-1] == "]")
            if not (is_above and is_below):
                errors.append(f"{name} must be in {interval}; got {argument!r}")
                break
    return errors


def _validated(
    name: str, argument: Any, numbers: tuple[Any, ...], *, pair: bool, integer: bool
) -> list[Any]:
    """Return the numbers of an argument that are fixed; raise unless they are as many as needed."""
    fixed = [x for x in numbers if not callable(x) and not isinstance(x, Tensor)]
    number_type = Integral if integer else Real
    count = 2 if pair else 1
    if len(numbers) != count or not all(isinstance(x, number_type) for x in fixed):
        kind = "an integer" if integer else "a number"
        if pair:
            kind = "two numbers"
        raise TypeError(f"{name} must be {kind}; got {argument!r}.")
    return fixed
