"""A module's forward without values, up to where values have arrived from another device.

    before    tokens ──> embedding ──> positions ──> mask ──> blocks[0] ──> blocks[1] ──│
                         no values     values        values   no values     no values   │ values: the received arguments
    after                                                                   blocks[2] ──> norm ──> ...

Weights of other stages have shapes only, and so have all results that depend on them. Integer tensors are computed as
usual. Once values have arrived, an operation on a tensor without values raises and names the line.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable, Sequence
from traceback import extract_tb
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fshard.errors import LayoutError
from fshard.mesh.layout import PyTree, flatten, unflatten

_tensor: Any = Tensor
_DEVICE = _tensor.device.__get__
_NOWHERE = torch.device("meta")


class Like:
    """Shape and dtype of a tensor whose values are not needed."""

    def __init__(self, x: Tensor) -> None:
        self.of = x.shape, x.dtype

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Like) and self.of == other.of

    def __hash__(self) -> int:
        return hash(self.of)

    def __repr__(self) -> str:
        return f"{str(self.of[1])[6:]}{[*self.of[0]]}"

    def tensor(self) -> Tensor:
        """Return a tensor without memory."""
        shape, dtype = self.of
        return torch.empty(shape, dtype=dtype, device=_NOWHERE)


def without_values(tree: PyTree, which: Callable[[Tensor], bool] = lambda x: True) -> PyTree:
    """Replace tensors by their descriptions."""
    leaves, structure = flatten(tree, none_is_leaf=True)
    return unflatten(structure, [Like(x) if isinstance(x, Tensor) and which(x) else x for x in leaves])


def without_memory(tree: PyTree) -> PyTree:
    """Replace descriptions by tensors without memory."""
    leaves, structure = flatten(tree, none_is_leaf=True)
    return unflatten(structure, [x.tensor() if isinstance(x, Like) else x for x in leaves])


def is_valueless(x: object) -> bool:
    """Return True for a tensor without values."""
    return isinstance(x, Tensor) and x.is_meta


class Replay(TorchFunctionMode):
    """Propagates tensors without values until values have arrived; from then on raises where the two meet.

    Args:
        device: of tensors without values.
        note: called with all tensors of an operation.
    """

    def __init__(self, device: torch.device, note: Callable[[Sequence[Tensor]], object] = len) -> None:
        super().__init__()
        self._device, self._note, self.arrived = device, note, False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        tensors = _tensors([*args, *named.values()])
        self._note(tensors)
        lost = [x for x in tensors if x.is_meta]
        if lost and func == _DEVICE:
            return self._device
        if lost and not self.arrived:
            leaves, structure = flatten((args, named), none_is_leaf=True)
            args, named = unflatten(structure, [_nowhere(x) for x in leaves])
            named |= {"device": _NOWHERE} if "device" in named else {}
            args = tuple([_NOWHERE if func == Tensor.to and isinstance(x, str) else x for x in args])
        elif 0 < len(lost) < len(tensors):
            raise Lost(f"{getattr(func, '__name__', func)} is given {' and '.join(str(Like(x)) for x in lost)}")
        return func(*args, **named)


def _tensors(given: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for x in given:
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, tuple | list | dict):
            found += [leaf for leaf in flatten(x)[0] if isinstance(leaf, Tensor)]
    return found


def _nowhere(x: Any) -> Any:
    """Return the placeholder for an argument of an operation that is not computed."""
    if isinstance(x, Tensor):
        return x if is_valueless(x) else Like(x).tensor()
    return _NOWHERE if isinstance(x, torch.device) else x


class Lost(LayoutError):
    """A value is needed that is on another device."""


def lost_at(traceback: TracebackType | None) -> str:
    """Return the user's line that a traceback leads to."""
    own = [frame for frame in extract_tb(traceback) if not _is_ours(frame.filename)]
    if not own:
        return "its forward"
    frame = own[-1]
    text = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"`{text}` ({frame.filename.rpartition('/')[2]}:{frame.lineno})"


def _is_ours(filename: str) -> bool:
    return "/torch/" in filename or any(
        f"/fshard/{package}/" in filename for package in ("pipeline", "transforms", "booster")
    )
