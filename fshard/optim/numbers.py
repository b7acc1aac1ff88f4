"""What numbers make sense as arguments: each check says of some, by name, which do not, and `refuse` names all at once.

A schedule or a tensor in a number's place is not looked at; of a tuple every number is, and None in it stands for no number.

    refuse("adamw", at_least(0, lr=lr, eps=eps), below(1, betas=betas))
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from numbers import Real
from typing import Any

from torch import Tensor

from fshard.errors import OptimizerError


def refuse(who: str, *complaints: list[str]) -> None:
    """Raise if there are complaints.

    >>> refuse("sgd", at_least(0, lr=-1.0, momentum=0.9), below(1, betas=(0.9, 2.0)))
    Traceback (most recent call last):
    fshard.errors.OptimizerError: sgd: lr=-1.0 has to be at least 0; betas=(0.9, 2.0) has to be below 1.
    """
    found = [complaint for some in complaints for complaint in some]
    if found:
        raise OptimizerError(f"{who}: {'; '.join(found)}.")


def at_least(least: float, **numbers: Any) -> list[str]:
    """Complain of numbers that are less, or infinite."""
    return _complaints(numbers, lambda x: x >= least, f"be at least {least}") or finite(**numbers)


def above(limit: float, **numbers: Any) -> list[str]:
    """Complain of numbers that are not greater."""
    return _complaints(numbers, lambda x: x > limit, f"be above {limit}")


def below(limit: float, **numbers: Any) -> list[str]:
    """Complain of numbers that are not less."""
    return _complaints(numbers, lambda x: x < limit, f"be below {limit}")


def within(low: float, high: float, **numbers: Any) -> list[str]:
    """Complain of numbers outside; the ends are inside."""
    return _complaints(numbers, lambda x: low <= x <= high, f"lie between {low} and {high}")


def finite(**numbers: Any) -> list[str]:
    """Complain of what is infinite, or no number."""
    return _complaints(numbers, isfinite, "be finite")


def pair(**numbers: Any) -> list[str]:
    """Complain of what are not two numbers."""
    return [
        f"{name}={x!r} has to be two numbers"
        for name, x in numbers.items()
        if not isinstance(x, tuple | list) or len(x) != 2
    ]


def count_from(least: int, **numbers: Any) -> list[str]:
    """Complain of what is no whole number, or is less."""
    return _complaints(
        numbers, lambda x: hasattr(x, "__index__") and x >= least, f"be a whole number and at least {least}"
    )


def _complaints(numbers: dict[str, Any], good: Callable[[Any], bool], wish: str) -> list[str]:
    def fits(x: Any) -> bool:
        return callable(x) or isinstance(x, Tensor) or (isinstance(x, Real) and good(x))

    return [
        f"{name}={x!r} has to {wish}"
        for name, x in numbers.items()
        if not (all(one is None or fits(one) for one in x) if isinstance(x, tuple | list) else fits(x))  # pyright: ignore[reportUnknownVariableType]
    ]
