"""Tensors that autograd saves of a stage; those that the second half of a backward does not need are freed after the first."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

Result = TypeVar("Result")
_watching: ContextVar[Saved | None] = ContextVar("watching", default=None)


class _Holder:
    """A tensor saved by autograd and its version then; or the function that recomputes it."""

    __slots__ = ("again", "tensor", "version")

    def __init__(self, x: Tensor | None, again: Callable[[], None] | None = None) -> None:
        self.again = again
        self.hold(x)

    def hold(self, x: Tensor | None) -> None:
        """Hold a tensor."""
        self.tensor = x
        self.version = None if x is None or x.is_inference() else x._version


class Saved:
    """The tensors that autograd saves in a forward; those that W does not need are freed after I.

    >>> import torch
    >>> x, saved = torch.zeros(1, requires_grad=True), Saved()
    >>> with saved.watching():
    ...     y = x.exp()
    >>> torch.autograd.grad(y, x)
    (tensor([1.]),)
    """

    def __init__(self) -> None:
        self._read: list[_Holder] = []
        self._keeping = False

    @contextmanager
    def watching(self) -> Generator[None]:
        """Record the tensors saved in the block."""
        token = _watching.set(self)
        try:
            with saved_tensors_hooks(_Holder, self.unpack):
                yield
        except RuntimeError as error:
            if "support saved tensor hooks" in str(error):
                error.add_note(
                    "The saved tensors of a stage whose backward has two halves, I and W, are recorded, which torch.func's "
                    "grad, vjp and jacrev do not support. Run it by a schedule with full backwards, such as 1f1b."
                )
            raise
        finally:
            _watching.reset(token)

    def unpack(self, holder: _Holder) -> Tensor:
        """Give a tensor back to autograd."""
        if holder.again is not None:
            holder.again()
        x = holder.tensor
        assert x is not None, "a saved tensor of a stage was read after it was freed"
        if holder.version is not None and x._version != holder.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
                f"{x.dtype}, shape {tuple(x.shape)}, is at version {x._version}; expected version {holder.version} instead."
            )
        if not self._keeping:
            self._read.append(holder)
        return x

    def instead(self, run: Callable[[], Result], again: Callable[[], object]) -> Result:
        """Run a function without keeping its saved tensors: reading one runs it `again`, which saves all.

        >>> import torch
        >>> x, saved = torch.zeros(1, requires_grad=True), Saved()
        >>> with saved.watching():
        ...     y = saved.instead(lambda: x.exp(), lambda: print("again", x.exp()))
        >>> torch.autograd.grad(y, x)
        again tensor([1.], grad_fn=<ExpBackward0>)
        (tensor([1.]),)
        """
        empty: list[_Holder] = []

        def fill() -> None:
            holders = iter(empty)

            def hold(x: Tensor) -> None:
                next(holders).hold(x.detach())

            for holder in empty:
                holder.again = None
            with torch.enable_grad(), saved_tensors_hooks(hold, _nothing):
                again()

        def note(x: Tensor) -> _Holder:
            empty.append(_Holder(None, fill))
            return empty[-1]

        with saved_tensors_hooks(note, self.unpack):
            return run()

    def let_go(self, *, keeping: bool = False) -> None:
        """Free the tensors that were read; from now on keep all others, read or not."""
        for holder in self._read:
            holder.tensor = None
        self._read.clear()
        self._keeping = keeping


def watching_now() -> Saved | None:
    """Return the active holder of saved tensors, if it belongs to a backward in two halves."""
    return _watching.get()


def _nothing(_: None) -> Tensor:
    raise AssertionError("what is run again is not gone back through")
