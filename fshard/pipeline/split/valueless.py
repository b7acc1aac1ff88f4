"""A module's forward without values, up to where values have arrived from another device.

    before    tokens ──> embedding ──> positions ──> mask ──> blocks[0] ──> blocks[1] ──│
                         no values     values        values   no values     no values   │ values: the received arguments
    after                                                                   blocks[2] ──> norm ──> ...

Weights of other stages are meta tensors, and so are all results that depend on them. Integer tensors are computed as
usual. A tensor into which a meta tensor is written has lost its values: it counts as a meta tensor from then on. Once
values have arrived, an operation on a meta tensor and another one raises. Arrays are tensors with values.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from fshard.mesh.layout import map_leaves
from fshard.mesh.layout.sharded import Sharded, flatten_shards
from fshard.mesh.spmd.scope import here

_tensor: Any = Tensor
_DEVICE = _tensor.device.__get__
_REQUIRES_GRAD = _tensor.requires_grad.__get__
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
        observe: called with each operation's name, all of its tensors, and its result.

    `values` are those that have arrived, by the id of the meta tensor that they replace, which is kept alive.
    """

    def __init__(
        self,
        device: torch.device,
        observe: Callable[[str, Sequence[Tensor], Any], object] = lambda name, xs, result: None,
    ) -> None:
        super().__init__()
        self._device, self._observe, self.arrived = device, observe, False
        self.values: dict[int, tuple[object, Any]] = {}
        self.inputs: dict[int, Any] = {}  # of the module, by their ids
        self._overwritten: dict[int, Tensor] = {}  # by storage, which is kept alive

    def lacks_values(self, x: object) -> bool:
        """Return True for a meta tensor, and for one into which a meta tensor was written."""
        if not isinstance(x, Tensor) or x.is_meta:
            return is_valueless(x)
        return bool(self._overwritten) and _storage_of(x) in self._overwritten

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if self.arrived and func == Tensor.register_hook and id(args[0]) in self.values:
            raise MissingValueError(
                "register_hook must be called before the next block, in the stage that computes the tensor; here it would get "
                "a part of the gradient."
            )
        if self.arrived and self.values:
            args, named = map_leaves(lambda x: self.values.get(id(x), (x, x))[1], (args, named))
        tensors = [x for x in flatten_shards((args, named))[0] if isinstance(x, Tensor)]
        valueless = [x for x in tensors if self.lacks_values(x)]
        if not valueless or (self.arrived and not has_values()):
            result = self._call(func, args, named)
        elif func == _DEVICE:
            return self._device
        elif func == _REQUIRES_GRAD:
            return self._requires_grad(args[0])
        elif func == Tensor.register_hook and not self.arrived:
            return RemovableHandle(OrderedDict())  # the stage that computes the tensor has the hook
        elif not self.arrived:
            result = self._call_without_values(func, args, named)
        elif len(valueless) < len(tensors) or not all(x.is_meta for x in valueless):
            shapes = " and ".join(str(Described.of(x)) for x in valueless)
            raise MissingValueError(
                f"{_name_of(func)} must be given values; got {shapes} without, of another stage. {WAY_OUT}"
            )
        else:
            result = self._call(func, args, named)
        self._observe(_name_of(func), tensors, result)
        return result

    def _requires_grad(self, x: Tensor) -> bool:
        """Return True where a gradient was received with a value, or where trained weights may have been used."""
        if id(x) in self.values:
            return getattr(self.values[id(x)][1], "requires_grad", False)
        is_differentiable = x.is_floating_point() or x.is_complex()
        is_computed = id(x) not in self.inputs
        return x.requires_grad or (is_differentiable and is_computed and torch.is_grad_enabled())

    def _call_without_values(
        self, func: Any, args: tuple[Any, ...], named: Mapping[str, Any]
    ) -> Any:
        """Call an operation with meta tensors in place of all others; record those that it writes to."""
        replaced: list[tuple[Tensor, Tensor]] = []

        def to_meta(x: Any) -> Any:
            if isinstance(x, torch.device):
                return _META
            meta = as_meta(x)
            if isinstance(x, Tensor) and meta is not x:
                replaced.append((x, meta))
            return meta

        args, options = map_leaves(to_meta, (args, {**named}))
        if "device" in options:
            options["device"] = _META
        if func == Tensor.to:
            args = tuple([_META if isinstance(x, str) else x for x in args])
        result = self._call(func, args, options)
        for x, meta in replaced:
            if meta._version > 0:
                self._overwritten[_storage_of(x)] = x
        return result

    def _call(self, func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        try:
            return func(*args, **named)
        except TypeError as error:
            if not (args and isinstance(args[0], Sharded)):
                raise
            raise MissingValueError(
                f"{_name_of(func)} must be given a tensor; got {args[0]!r}, which skips blocks. With sharded layers pass it "
                "from block to block as an argument."
            ) from error


def _name_of(func: Any) -> str:
    return getattr(func, "__name__", str(func))


def _storage_of(x: Tensor) -> int:
    storage: Any = x.untyped_storage()
    return storage._cdata


WAY_OUT = (
    "Stages send what the forward computes around its blocks, as it does with the sample: not weights, nor attributes of "
    "blocks. Return the value from a block, or collect what is written into a tensor in a list, and torch.stack it."
)


class StageError(ValueError):
    """A module's forward cannot run in stages."""


class MissingValueError(StageError):
    """A value is needed that is on another device."""
