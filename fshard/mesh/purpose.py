"""What a collective is called for: values, tangents (in forward mode) or cotangents (in a backward).

Where only some devices differentiate, they make calls that the others do not make, and those would be met by whatever
the others call next: a wrong sum, without a word.  So what a call is for is part of what devices have to agree on.

>>> with serving("tangents"):
...     purpose()
'tangents'
>>> purpose()
'values'
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Literal, get_args

Purpose = Literal["values", "tangents", "cotangents"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
UNEVEN = (
    " One is for {}, the other for {}: what some devices of a group differentiate, all have to. Where there is nothing to "
    "differentiate, let the argument depend on what is: add 0 * x."
)


class _Now(threading.local):
    purpose: Purpose = "values"


_now = _Now()


def purpose() -> Purpose:
    """Return what the calling thread's collectives are for."""
    return _now.purpose


@contextmanager
def serving(purpose: Purpose) -> Generator[None]:
    """Say what collectives are for, for a while."""
    before, _now.purpose = _now.purpose, purpose
    try:
        yield
    finally:
        _now.purpose = before


def named(what: str, purpose: Purpose) -> str:
    """Return a collective's name with what it is for, if that is not plain values.

    >>> named("psum", "values"), named("psum", "tangents")
    ('psum', 'psum for tangents')
    """
    return what if purpose == "values" else f"{what} for {purpose}"


def uneven(mine: Purpose, others: Purpose) -> str:
    """Return what to say of two calls that are for different things, nothing if they are not."""
    return "" if mine == others else UNEVEN.format(mine, others)
