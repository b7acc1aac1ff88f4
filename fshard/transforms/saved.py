"""What autograd saves of gathered parameters: a note of where it lay, so that the memory can go.

forward     w = gathered  ─save─>  (unit, at, size, stride, offset)          w is let go
backward    the note is read: the unit is gathered again, and the same view of it taken

Notes are taken by saved-tensor hooks, under which torch.func's grad, vjp and jacrev refuse to run.  A loss function that
calls one of these marks that part `fs.gathered(part, keep=True)`, or the step says `reshard_after_forward=False`.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from fshard.transforms.handle import Handle

if TYPE_CHECKING:
    from fshard.transforms.units import Unit

_VF: Any = torch
_hooks: Any = torch._C._autograd  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


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

    A unit's memory outlasts the unit being let go if an operation that takes many units holds it.

    Args:
        needed: whether any unit is let go.
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

    def watch(self) -> AbstractContextManager[Any]:
        """Return the context of a forward, in which notes are kept in the place of what autograd saves of units."""
        return saved_tensors_hooks(self._note, self._read) if self._needed else nullcontext()

    def _note(self, x: Tensor) -> Any:
        if type(x) is Handle:
            return x
        found = self._known.get(_storage(x))
        if found is None or x.dtype != found.dtype:
            return x.detach() if x.requires_grad else x  # an operation's own output would hold the operation, and stay
        return _Note(found.unit, found.at, x.size(), x.stride(), int(x.storage_offset()), x.is_conj(), x.is_neg())

    def _read(self, note: Any) -> Tensor:
        if not isinstance(note, _Note):
            return note
        x = note.unit.again()[note.at].as_strided(note.size, note.stride, note.offset)
        x = x.conj() if note.conj else x
        return _VF._neg_view(x) if note.neg else x


@contextmanager
def unwatched() -> Generator[None]:
    """Let autograd save tensors as they are for a while, whoever asks for something else."""
    before: list[Any] = []
    while (hooks := _hooks._top_saved_tensors_default_hooks(False)) is not None:
        before.append(hooks)
        _hooks._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for hooks in reversed(before):
            _hooks._push_saved_tensors_default_hooks(*hooks)


def _storage(x: Tensor) -> int:
    """Return what tells a tensor's memory apart, as long as it lives."""
    return x.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
