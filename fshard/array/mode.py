"""`ArrayMode`: how operations on arrays behave in the calling code.

It is a fact of a thread: torch calls the operations, as `x + y`, and takes no argument for it.
`operate` reads it once and gives it to all that it calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol

from fshard.ambient import setting
from fshard.mesh.layout.sharded import Sharded


class UnshardedOperations(Protocol):
    """Runs operations on unsharded tensors that arrays cannot run."""

    def runs_unsharded(self, name: str, error: Exception) -> bool:
        """Return True if an operation that has raised runs on unsharded tensors."""
        ...

    def run_operation(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on unsharded tensors."""
        ...


class OperationPlan(UnshardedOperations, Protocol):
    """Decides how operations run in a planned module: see `fshard.tensor.layer_plans`."""

    @property
    def reduces_at_once(self) -> bool:
        """True if a partial sum is reduced by the operation that makes it."""
        ...


class OperationObserver(UnshardedOperations, Protocol):
    """Is called with each operation of a module that is followed: see `fshard.tensor.follow`."""

    def __call__(
        self, call: Any, arrays: Sequence[Sharded], args: Any, results: Sequence[Sharded]
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class ArrayMode:
    """The behaviour of operations on arrays.

    Args:
        is_explicit: implicit communication raises: see `explicit`.
        has_equal_tensors: plain tensors that meet arrays are equal on all devices, as those that a
            sharded module makes. Else only 0-d ones are.
        plan: of the module that runs.
        observer: of the module that is followed.
    """

    is_explicit: bool = False
    has_equal_tensors: bool = False
    plan: OperationPlan | None = None
    observer: OperationObserver | None = None

    @property
    def is_planned(self) -> bool:
        """True in the forward of a module that a plan runs, or is being made for."""
        return self.plan is not None or self.observer is not None


_array_mode: ContextVar[ArrayMode] = ContextVar("array mode", default=ArrayMode())  # noqa: B039  # it is frozen
array_mode = _array_mode.get
"""Return how operations on arrays behave in the calling code."""


def explicit() -> AbstractContextManager[None]:
    """Raise where an operation would communicate.

    Communicate by `fs.reshard` or `fs.array.constrain` alone.
    """
    return _with(replace(array_mode(), is_explicit=True))


def equal_tensors() -> AbstractContextManager[None]:
    """Take plain tensors that meet arrays for equal on all devices: they count as replicated.

    The forward of a module of `shard_module` does so. Other methods that make tensors need it, such
    as `generate` of transformers.

    >>> import torch, fshard as fs
    >>> x = fs.array.ones(4, layout=fs.Layout(fs.make_mesh({"data": 2}), fs.P("data")))
    >>> with fs.array.equal_tensors():
    ...     y = x + torch.arange(4)
    >>> fs.unshard(y)
    tensor([1., 2., 3., 4.])
    """
    return _with(replace(array_mode(), has_equal_tensors=True))


def running(plan: OperationPlan) -> AbstractContextManager[None]:
    """Run operations by a plan: plain tensors are equal on all devices."""
    return _with(replace(array_mode(), has_equal_tensors=True, plan=plan))


def observed_by(observer: OperationObserver) -> AbstractContextManager[None]:
    """Call an observer with each operation."""
    return _with(replace(array_mode(), observer=observer))


def _with(mode: ArrayMode) -> AbstractContextManager[None]:
    return setting(_array_mode, mode)
