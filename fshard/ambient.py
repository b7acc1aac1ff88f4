"""`setting`: set a fact of the calling thread for a block.

What changes a function's result is an argument, or a field of a value that the function is given.
Five facts are not, since no argument reaches the code that needs them: user code runs between the
block that sets a fact and the call that reads it. Each is one typed value in a `ContextVar`, which
only the module of its concept reads and sets.

    scope             the device that the code runs as           mesh/spmd/scope.py
    representative    which device of an abstract mesh it is     mesh/runtimes/abstract.py
    run defaults      the mesh and the order of sums of runs     mesh/layout/mesh.py
    counting          what counts collectives and storages       mesh/layout/counting.py
    array mode        how operations on arrays behave            array/mode.py

A new thread has the defaults. The threads of virtual devices run in a copy of their caller's
context, as a process would.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import Generic, TypeVar

Value = TypeVar("Value")


class setting(Generic[Value]):
    """Set a fact within the block; a class, since a generator costs three times as much."""

    __slots__ = ("_fact", "_token", "_value")
    _token: Token[Value]

    def __init__(self, fact: ContextVar[Value], value: Value) -> None:
        self._fact = fact
        self._value = value

    def __enter__(self) -> None:
        self._token = self._fact.set(self._value)

    def __exit__(self, *error: object) -> None:
        self._fact.reset(self._token)
