"""What autograd saves of gathered parameters: a note of where it lay, so that the memory can go.

forward     w = gathered  ─save─>  (unit, at, size, stride, offset)          w is let go
backward    the note is read: the unit is gathered again, and the same view of it taken
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from fshard.errors import LayoutError
from fshard.transforms.handle import Handle

if TYPE_CHECKING:
    from fshard.transforms.units import Unit

_VF: Any = torch
_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]


class _Note(NamedTuple):
    """Where a saved tensor lay in a unit."""

    unit: Unit
    at: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool


class _Memory(NamedTuple):
    """The memory of a leaf that has been gathered.  It may go, but as long as this is there, nothing else has its name."""

    unit: Unit
    at: int
    dtype: torch.dtype
    itself: StorageWeakRef


class Saved:
    """The memory of all units that have been gathered in a slice, and the hooks of autograd that ask whose a tensor's is.

    A unit's memory outlasts the unit being let go if an operation that takes many units holds it; `needed`: if any is let go.
    """

    def __init__(self, needed: bool) -> None:
        self._needed = needed
        self._known: dict[int, _Memory] = {}

    def know(self, unit: Unit) -> None:
        """Note the memory of a unit that has been gathered."""
        for at, x in enumerate(unit.values if self._needed else ()):
            self._known[_storage(x)] = _Memory(unit, at, x.dtype, StorageWeakRef(x.untyped_storage()))

    def clear(self) -> None:
        """End a slice."""
        self._known.clear()

    @contextmanager
    def watching(self) -> Generator[None]:
        """Keep notes in the place of what is saved in this context."""
        try:
            with saved_tensors_hooks(self._note, self._read) if self._needed else nullcontext():
                yield
        except RuntimeError as error:
            if self._needed and "support saved tensor hooks" in str(error):
                raise LayoutError(_NO_HOOKS) from error
            raise

    @contextmanager
    def unwatched(self) -> Generator[None]:
        """Let autograd save tensors as they are for a while."""
        if self._needed:
            _C._autograd._pop_saved_tensors_default_hooks()
        try:
            yield
        finally:
            if self._needed:
                _C._autograd._push_saved_tensors_default_hooks(self._note, self._read)

    def _note(self, x: Tensor) -> Any:
        if type(x) is Handle:
            return x
        found = self._known.get(_storage(x))
        if found is None or x.dtype != found.dtype:
            return x
        return _Note(found.unit, found.at, x.size(), x.stride(), int(x.storage_offset()), x.is_conj(), x.is_neg())

    def _read(self, note: Any) -> Tensor:
        if not isinstance(note, _Note):
            return note
        x = note.unit.again()[note.at].as_strided(note.size, note.stride, note.offset)
        x = x.conj() if note.conj else x
        return _VF._neg_view(x) if note.neg else x


def _storage(x: Tensor) -> int:
    """Return what tells a tensor's memory apart, as long as it lives."""
    return x.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


_NO_HOOKS = (
    "torch.func's grad, vjp, jacrev and hessian bear no saved-tensor hooks, by which parameters are gathered again for the "
    "backward. Mark the function that uses them, fs.gathered(fn, keep=True), or pass reshard_after_forward=False."
)
