"""Tensors that autograd saves of a stage.

Of a split backward, those that W does not need are freed after I.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class _Holder:
    """A tensor saved by autograd, and its version at that time."""

    __slots__ = ("tensor", "version")

    def __init__(self, x: Tensor) -> None:
        self.tensor: Tensor | None = x
        self.version = None if x.is_inference() else x._version


class SavedActivations:
    """The tensors that autograd saves in a forward; those that W does not need are freed after I.

    Autograd's graph holds a `_Holder` in place of each tensor, so a tensor can be freed while the
    graph is kept for W.

    >>> import torch
    >>> x, saved = torch.zeros(1, requires_grad=True), SavedActivations()
    >>> with saved.recording():
    ...     y = x.exp()
    >>> torch.autograd.grad(y, x)
    (tensor([1.]),)
    """

    def __init__(self) -> None:
        self._read: list[_Holder] = []
        self._is_kept = False  # the tensors that are read now are kept for W

    @contextmanager
    def recording(self) -> Generator[None]:
        """Record the tensors saved in the block."""
        try:
            with saved_tensors_hooks(_Holder, self.unpack):
                yield
        except RuntimeError as error:
            if "support saved tensor hooks" in str(error):
                error.add_note(
                    "The saved tensors of a stage whose backward has two halves, I and W, are "
                    "recorded, which torch.func's grad, vjp and jacrev do not support. Run it by a "
                    "schedule with full backwards, such as 1f1b."
                )
            raise

    def unpack(self, holder: _Holder) -> Tensor:
        """Return a tensor to autograd."""
        x = holder.tensor
        assert x is not None, "a saved tensor of a stage was read after it was freed"
        # Autograd compares versions only of tensors that it saves without hooks.
        if holder.version is not None and x._version != holder.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a tensor of {x.dtype}, shape {tuple(x.shape)}, is at version "
                f"{x._version}; expected version {holder.version} instead."
            )
        if not self._is_kept:
            self._read.append(holder)
        return x

    def free_read(self, *, keep: bool = False) -> None:
        """Free the tensors that were read; with `keep`, those read from now on are not freed."""
        for holder in self._read:
            holder.tensor = None
        self._read.clear()
        self._is_kept = keep
