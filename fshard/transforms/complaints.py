"""Checks of single arguments: each returns its complaint in a list, which is empty where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from numbers import Integral
from reprlib import repr as shown
from typing import Any

from fshard.errors import FshardError


def must_be(name: str, what: str, x: Any, ok: bool) -> list[str]:
    """Complain of an argument that is not what it must be.

    >>> must_be("unit", "a pattern", 3, isinstance(3, str))
    ['unit must be a pattern, got 3']
    """
    return [] if ok else [f"{name} must be {what}, got {shown(x)}"]


def one_of(name: str, x: Any, *legal: Any) -> list[str]:
    """Complain of an argument that is none of a few values.

    >>> one_of("precision", "fp8", "bf16", "fp16", None)
    ["precision must be 'bf16', 'fp16' or None, got 'fp8'"]
    """
    *others, last = map(repr, legal)
    return must_be(name, f"{', '.join(others)} or {last}", x, any(type(x) is type(one) and x == one for one in legal))


def integer(name: str, x: Any, least: int = 1) -> list[str]:
    """Complain of an argument that is no integer, or a smaller one.

    >>> integer("seed", -1, 0), integer("seed", True, 0), integer("seed", 3)
    (['seed must be an integer >= 0, got -1'], ['seed must be an integer >= 0, got True'], [])
    """
    ok = isinstance(x, Integral) and not isinstance(x, bool) and int(x) >= least
    return must_be(name, f"an integer >= {least}", x, ok)


def flag(name: str, x: Any) -> list[str]:
    """Complain of an argument that is neither True nor False."""
    return one_of(name, x, True, False)


def unknown(name: str, given: Mapping[str, Any], legal: Iterable[str]) -> list[str]:
    """Complain of keys that a mapping must not have, naming the legal ones.

    >>> unknown("options", {"buckt": 1}, ["bucket", "reduce"])
    ["options has no 'buckt'; legal: bucket, reduce"]
    """
    legal = [*legal]
    wrong = [repr(key) for key in given if key not in legal]
    return [f"{name} has no {', '.join(wrong)}; legal: {', '.join(legal)}"] if wrong else []


def refusal(call: Callable[[], Any]) -> list[str]:
    """Call a function; return the text of the error by which it refuses its arguments."""
    try:
        call()
    except FshardError as error:
        return [str(error).rstrip(".")]
    return []
