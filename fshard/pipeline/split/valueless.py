"""A module's forward without values, up to where values have arrived from another device.

    before    tokens ──> embedding ──> positions ──> mask ──> blocks[0] ──> blocks[1] ──│
                         no values     values        values   no values     no values   │ values: the received arguments
    after                                                                   blocks[2] ──> norm ──> ...

Weights of other stages are meta tensors, and so are all results that depend on them. Integer tensors are computed as
usual. Once values have arrived, an operation on a meta tensor and another one raises. Arrays are tensors with values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fshard.mesh.layout import map_leaves
from fshard.mesh.layout.sharded import Sharded, flatten_shards
from fshard.mesh.spmd.scope import here

_tensor: Any = Tensor
_DEVICE = _tensor.device.__get__
_META = torch.device("meta")


@dataclass(frozen=True)
class Described:
    """Shape and dtype of a tensor whose values are not needed."""

    shape: torch.Size
    dtype: torch.dtype

    @staticmethod
    def of(x: Any) -> Any:
        """Describe a tensor or an array; return anything else."""
        return Described(torch.Size(x.shape), x.dtype) if isinstance(x, Tensor | Sharded) else x

    def __repr__(self) -> str:
        return f"{str(self.dtype)[6:]}{[*self.shape]}"


def as_meta(x: Any) -> Any:
    """Return a meta tensor like a tensor, an array or a description; return anything else."""
    if isinstance(x, Tensor | Sharded | Described):
        return x if is_valueless(x) else torch.empty(x.shape, dtype=x.dtype, device=_META)
    return x


def described_as_meta(x: Any) -> Any:
    """Return a meta tensor for a description; return anything else."""
    return as_meta(x) if isinstance(x, Described) else x


def is_valueless(x: object) -> bool:
    """Return True for a tensor without values."""
    return isinstance(x, Tensor) and x.is_meta


def has_values() -> bool:
    """Return False on an abstract mesh, where no tensor has values, of this stage or another."""
    scope = here()
    return scope is None or scope.mesh.runtime != "abstract"


class ValuelessMode(TorchFunctionMode):
    """Propagates meta tensors until values have `arrived`; from then on raises where the two meet.

    Args:
        device: that meta tensors claim to be on.
        observe: called with all tensors of an operation, and its result.

    `values` are those that have arrived, by the id of the meta tensor that they replace, which is kept alive.
    """

    def __init__(
        self,
        device: torch.device,
        observe: Callable[[Sequence[Tensor], Any], object] = lambda xs, result: None,
    ) -> None:
        super().__init__()
        self._device, self._observe, self.arrived = device, observe, False
        self.values: dict[int, tuple[object, Any]] = {}

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if self.arrived and self.values:
            args, named = map_leaves(lambda x: self.values.get(id(x), (x, x))[1], (args, named))
        tensors = [x for x in flatten_shards((args, named))[0] if isinstance(x, Tensor)]
        valueless = [x for x in tensors if x.is_meta]
        if valueless and func == _DEVICE:
            return self._device
        if valueless and not self.arrived:
            args, named = map_leaves(
                lambda x: _META if isinstance(x, torch.device) else as_meta(x), (args, named)
            )
            named |= {"device": _META} if "device" in named else {}
            args = tuple([_META if func == Tensor.to and isinstance(x, str) else x for x in args])
        elif 0 < len(valueless) < len(tensors) and has_values():
            shapes = " and ".join(str(Described.of(x)) for x in valueless)
            raise MissingValueError(
                f"{getattr(func, '__name__', func)} must be given values; got {shapes} without. A value that a later stage "
                "uses must be an argument or a result of a block, or computed from integers, and not from its weights."
            )
        try:
            result = func(*args, **named)
        except TypeError as error:
            if not (args and isinstance(args[0], Sharded)):
                raise
            raise MissingValueError(
                f"{getattr(func, '__name__', func)} must be given a tensor; got {args[0]!r}, which skips blocks. With sharded "
                "layers pass it from block to block as an argument."
            ) from error
        self._observe(tensors, result)
        return result


class MissingValueError(ValueError):
    """A value is needed that is on another device."""
