"""What is wrong with numbers and words that were given, as parts of one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from fshard.errors import FshardError


def not_whole(least: int, **given: Any) -> list[str]:
    """Return a complaint of each that is no whole number from `least` on.

    >>> not_whole(1, r=0, slices=8, seed=True)
    ['r is a whole number from 1 on, not 0', 'seed is a whole number from 1 on, not True']
    """
    wrong = {k: x for k, x in given.items() if not isinstance(x, int) or isinstance(x, bool) or x < least}
    return [f"{name} is a whole number from {least} on, not {x!r}" for name, x in wrong.items()]


def not_known(names: Sequence[str], **given: Any) -> list[str]:
    """Return a complaint of each dict's names that are none of these, and of what is no dict.

    >>> not_known(("bucket", "reduce"), options={"buckt": 1})
    ["options has 'buckt'; it may have bucket, reduce"]
    """
    wrong: list[str] = [f"{name}= is a dict, not {x!r}" for name, x in given.items() if not isinstance(x, dict)]
    pairs = [(name, key) for name, x in given.items() if not wrong for key in x if key not in names]
    return wrong + [f"{name} has {key!r}; it may have {', '.join(names)}" for name, key in pairs]


def not_flags(given: Any) -> list[str]:
    """Return a complaint of each attribute of a dataclass that is to be True or False, and is not."""
    named = ((one.name, getattr(given, one.name)) for one in fields(given) if one.type == "bool")
    return [f"{name} is True or False, not {x!r}" for name, x in named if not isinstance(x, bool)]


def changed(given: object, names: Sequence[str]) -> str:
    """Return which of an object's attributes are not those of its class, as arguments are written.

    >>> class Plan:
    ...     slices, seed = 8, 0
    >>> plan = Plan()
    >>> plan.seed = 3
    >>> changed(plan, ("slices", "seed"))
    'seed='
    """
    usual = [(name, getattr(given, name), getattr(type(given), name)) for name in names]
    return ", ".join(f"{name}=" for name, x, default in usual if type(x) is not type(default) or x != default)


def not_among(choices: Sequence[Any], **given: Any) -> list[str]:
    """Return a complaint of each that is none of the choices.

    >>> not_among(("skip", "zero"), unused="none")
    ['unused is "skip" or "zero", not \\'none\\'']
    """
    *others, last = [json.dumps(x) if isinstance(x, str) else repr(x) for x in choices]
    wrong = {k: x for k, x in given.items() if isinstance(x, bool) or x not in choices}
    return [f"{name} is {', '.join(others)} or {last}, not {x!r}" for name, x in wrong.items()]


def complaints_of(asked: Callable[[Any], Any], given: Any) -> list[str]:
    """Return what is wrong with something, as it says itself if it is asked."""
    try:
        found = asked(given)
    except FshardError as error:
        return [str(error).rstrip(".")]
    twice = isinstance(found, tuple) and len({*found}) < len(found)
    return [f"an axis is named twice in {found}"] if twice else []
