"""What is wrong with numbers and words that were given, as parts of one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from reprlib import repr as shown
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fshard.errors import FshardError


def not_known(names: Sequence[str], **given: Any) -> list[str]:
    """Return a complaint of each dict's names that are none of these, and of what is no dict.

    >>> not_known(("bucket", "reduce"), options={"buckt": 1})
    ["options has 'buckt'; it may have bucket, reduce"]
    """
    wrong: list[str] = [f"{name}= is a dict, not {x!r}" for name, x in given.items() if not isinstance(x, dict)]
    pairs = [(name, key) for name, x in given.items() if not wrong for key in x if key not in names]
    return wrong + [f"{name} has {key!r}; it may have {', '.join(names)}" for name, key in pairs]


def misfits(kind: type, given: Mapping[str, Any], **least: int) -> dict[str, str]:
    """Return a complaint, by its name, of each value that is not what a class has annotated; names of another are let be.

    Whole numbers are `least` of their name and more, or 1.

    >>> class Plan:
    ...     seed: int
    ...     unused: Literal["skip", "zero"] | None
    ...     quiet: bool
    >>> [*misfits(Plan, {"seed": -1, "unused": "none", "quiet": False}, seed=0).values()]
    ['seed is a whole number from 0 on, not -1', 'unused is "skip", "zero" or None, not \\'none\\'']
    """
    wrong: dict[str, str] = {}
    for name, hint in get_type_hints(kind).items():
        parts = [*_parts(hint)]
        if name in given and not any(_fits(given[name], part, least.get(name, 1)) for part in parts):
            *others, last = [_told(part, least.get(name, 1)) for part in parts]
            told = f"{', '.join(others)} or {last}" if others else last
            wrong[name] = f"{name} is {told}, not {shown(given[name])}"
    return wrong


def _parts(hint: Any) -> Iterator[Any]:
    """Yield what any of a union, or of choices, is."""
    if get_origin(hint) in (Union, UnionType):
        for part in get_args(hint):
            yield from _parts(part)
    elif get_origin(hint) is Literal:
        yield from get_args(hint)
    else:
        yield hint


def _fits(x: Any, part: Any, least: int) -> bool:
    kind = get_origin(part) or part
    if kind is Any or part in (None, NoneType):
        return kind is Any or x is None
    if not isinstance(kind, type):
        return type(x) is type(part) and x == part
    if kind is bool or isinstance(x, bool):
        return kind is type(x)
    if kind is int:
        return isinstance(x, Integral) and int(x) >= least
    return isinstance(x, Real if kind is float else kind)


def _told(part: Any, least: int) -> str:
    kind = get_origin(part) or part
    if part in (None, NoneType):
        return "None"
    if not isinstance(kind, type):
        return json.dumps(part) if isinstance(part, str) else repr(part)
    named = {
        bool: "True or False",
        int: f"a whole number from {least} on",
        float: "a number",
        str: "a string",
        Sequence: "a list",
    }
    return named.get(kind, f"a {kind.__name__}")


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


def complaints_of(asked: Callable[[Any], Any], given: Any) -> list[str]:
    """Return what is wrong with something, as it says itself if it is asked."""
    try:
        found = asked(given)
    except FshardError as error:
        return [str(error).rstrip(".")]
    twice = isinstance(found, tuple) and len({*found}) < len(found)
    return [f"an axis is named twice in {found}"] if twice else []
