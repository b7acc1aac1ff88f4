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
context, as a process would. Backwards run in the thread that calls them: see Note [Backwards run in
the calling thread].
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from typing import Any, Generic, TypeVar

import torch

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]

Value = TypeVar("Value")


# Note [Backwards run in the calling thread]
# Autograd runs the nodes of an accelerator in a thread of its own, where Python's thread-locals and
# context variables are empty: no fact would hold there, nor the regions of remat. With nodes on two
# devices there are two such threads, whose collectives would start in an order that differs between
# processes. So a block that sets a fact runs its backwards in the calling thread, those of user
# code too; the streams are the forward's anyway. The scope is such a fact: all code that runs as a
# device of a mesh does so, and in an audited step every message of a backward is recorded.
#
# Only a backward outside of all such blocks, such as that of a plain tensor under torchrun, may run
# in a thread of autograd. There every fact has its default in the caller too, but functions on that
# path take the scope of their forward.
def backward_in_caller() -> AbstractContextManager[None]:
    """Return a context whose backwards run in the calling thread, without setting a fact.

    See Note [Backwards run in the calling thread].
    """
    return torch.autograd.set_multithreading_enabled(False)


class setting(Generic[Value]):
    """Set a fact within the block; a class, since a generator costs three times as much."""

    __slots__ = ("_fact", "_has_backward_threads", "_token", "_value")
    _token: Token[Value]
    _has_backward_threads: bool

    def __init__(self, fact: ContextVar[Value], value: Value) -> None:
        self._fact = fact
        self._value = value

    def __enter__(self) -> None:
        self._token = self._fact.set(self._value)
        # As `backward_in_caller`, by the functions behind it: a step enters several blocks.
        self._has_backward_threads = _C._is_multithreading_enabled()
        _C._set_multithreading_enabled(False)

    def __exit__(self, *error: object) -> None:
        _C._set_multithreading_enabled(self._has_backward_threads)
        self._fact.reset(self._token)
