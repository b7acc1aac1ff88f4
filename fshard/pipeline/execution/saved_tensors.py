"""Tensors that autograd saves of a stage; those that the second half of a backward does not need are freed after the first."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class _Holder:
    """A tensor saved by autograd, and its version then."""

    __slots__ = ("tensor", "version")

    def __init__(self, x: Tensor) -> None:
        self.tensor: Tensor | None = x
        self.version = None if x.is_inference() else x._version


class SavedActivations:
    """The tensors that autograd saves in a forward; those that W does not need are freed after I.

    >>> import torch
    >>> x, saved = torch.zeros(1, requires_grad=True), SavedActivations()
    >>> with saved.recording():
    ...     y = x.exp()
    >>> torch.autograd.grad(y, x)
    (tensor([1.]),)
    """

    def __init__(self) -> None:
        self._read: list[_Holder] = []
        self._keep = False

    @contextmanager
    def recording(self) -> Generator[None]:
        """Record the tensors saved in the block."""
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

    def unpack(self, holder: _Holder) -> Tensor:
        """Return a tensor to autograd."""
        x = holder.tensor
        assert x is not None, "a saved tensor of a stage was read after it was freed"
        if holder.version is not None and x._version != holder.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
                f"{x.dtype}, shape {tuple(x.shape)}, is at version {x._version}; expected version {holder.version} instead."
            )
        if not self._keep:
            self._read.append(holder)
        return x

    def free_read(self, *, keep: bool = False) -> None:
        """Free the tensors that were read; with `keep`, those that are read from now on are not freed."""
        for holder in self._read:
            holder.tensor = None
        self._read.clear()
        self._keep = keep
