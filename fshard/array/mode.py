"""`ArrayMode`: how operations on arrays behave in the calling code.

It is a fact of a thread: torch calls the operations, as `x + y`, and takes no argument for it.
`operate` reads it once and gives it to all that it calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from fshard.ambient import setting
from fshard.mesh.layout import Mesh
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
        explicit_axes: along them implicit communication raises: see `explicit`.
        has_equal_tensors: plain tensors that meet arrays are equal on all devices, as those that a
            sharded module makes. Else only 0-d ones are.
        plan: of the module that runs.
        observer: of the module that is followed.
    """

    explicit_axes: tuple[str, ...] | Literal["all"] = ()
    has_equal_tensors: bool = False
    plan: OperationPlan | None = None
    observer: OperationObserver | None = None

    @property
    def is_planned(self) -> bool:
        """True in the forward of a module that a plan runs, or is being made for."""
        return self.plan is not None or self.observer is not None

    def forbids(self, mesh: Mesh, axes: Sequence[str]) -> bool:
        """Return True if implicit communication along some axes of a mesh raises."""
        if self.explicit_axes == "all":
            return bool(axes)
        # A name that is misspelt would forbid nothing.
        mesh.check_axes(self.explicit_axes, "fs.array.explicit")
        return not {*axes}.isdisjoint(self.explicit_axes)

    @property
    def explicit_call(self) -> str:
        """The call of `explicit` that made this mode, for errors."""
        axes = () if self.explicit_axes == "all" else self.explicit_axes
        names = ", ".join(f'"{axis}"' for axis in axes)
        return f"fs.array.explicit({names})"


_array_mode: ContextVar[ArrayMode] = ContextVar("array mode", default=ArrayMode())  # noqa: B039  # it is frozen
array_mode = _array_mode.get
"""Return how operations on arrays behave in the calling code."""


def explicit(*axes: str) -> AbstractContextManager[None]:
    """Raise where an operation would communicate along some axes; without axes, along any.

    Along them communicate by `fs.reshard` or `fs.array.constrain` alone. Layouts of results are
    those outside of the block. Blocks within each other add their axes.

    Args:
        axes: names of axes of the mesh.

    >>> import fshard as fs
    >>> mesh = fs.make_mesh({"data": 2, "model": 2})
    >>> x = fs.array.ones(4, 4, layout=fs.Layout(mesh, fs.P("data", "model")))
    >>> with fs.array.explicit("model"):
    ...     total = x.sum(0).relu()  # a sum over "data"
    ...     x.sum(1).relu()
    Traceback (most recent call last):
    fshard.errors.LayoutError: relu needs communication (f32[4@data]{U:model}), which
    fs.array.explicit("model") forbids. ...
    """
    for axis in axes:
        if not isinstance(axis, str):
            raise TypeError(
                f'fs.array.explicit: axes must be names, as in explicit("model"); got {axis!r}.'
            )
    outer = array_mode().explicit_axes
    if not axes or outer == "all":
        return _with(replace(array_mode(), explicit_axes="all"))
    return _with(replace(array_mode(), explicit_axes=tuple(dict.fromkeys((*outer, *axes)))))


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
