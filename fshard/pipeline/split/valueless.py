"""A module's forward without values, up to where values have arrived from another device.

    code before a stage's blocks            result
    tokens ──> embedding                    no values: its weight is on another device
    tokens ──> positions ──> mask           values: computed from integers alone
    blocks[0] ──> blocks[1]                 no values
    ── the received arguments arrive ──
    blocks[2] ──> norm ──> ...              values

Weights of other stages are meta tensors, and so are all results that depend on them. Integer
tensors are computed as usual. A tensor into which a meta tensor is written has lost its values: it
counts as a meta tensor from then on. Once values have arrived, an operation on a meta tensor and
another one raises. Arrays are tensors with values.
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
from fshard.mesh.layout.counting import without_counters
from fshard.mesh.layout.sharded import Sharded, flatten_shards
from fshard.mesh.spmd.scope import here

# The functions that a torch function mode gets for `x.device` and `x.requires_grad`.
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
        if isinstance(x, Tensor | Sharded):
            return Described(torch.Size(x.shape), x.dtype)
        return x

    def __repr__(self) -> str:
        return f"{str(self.dtype)[6:]}{[*self.shape]}"


def as_meta(x: Any) -> Any:
    """Return a meta tensor like a tensor, an array or a description; return anything else."""
    is_like_tensor = isinstance(x, Tensor | Sharded | Described)
    if not is_like_tensor or is_valueless(x):
        return x
    return torch.empty(x.shape, dtype=x.dtype, device=_META)


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
    """Propagates meta tensors until values have `arrived`; then it raises where the two meet.

    `values` are those that have arrived, by the id of the meta tensor that they replace, and
    `inputs` those of the module, by their ids.

    Args:
        device: that meta tensors claim to be on.
        observe: called with each operation's name, all of its tensors, and its result.
    """

    def __init__(
        self,
        device: torch.device,
        observe: Callable[[str, Sequence[Tensor], Any], object] = lambda name, xs, result: None,
    ) -> None:
        super().__init__()
        self._device = device
        self._observe = observe
        self.arrived = False
        # With what they replace, which is kept alive: an id may be used again after it.
        self.values: dict[int, tuple[object, Any]] = {}
        self.inputs: dict[int, Any] = {}
        self._overwritten: dict[int, Tensor] = {}  # by storage, which is kept alive, likewise

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
        if self.arrived and self.values:
            if func == Tensor.register_hook and id(args[0]) in self.values:
                raise MissingValueError(
                    "register_hook must be called before the next block, in the stage that "
                    "computes the tensor; here it would get a part of the gradient."
                )
            args, named = map_leaves(self._arrived_value, (args, named))

        tensors = [x for x in flatten_shards((args, named))[0] if isinstance(x, Tensor)]
        valueless = [x for x in tensors if self.lacks_values(x)]
        if not valueless or (self.arrived and not has_values()):
            result = self._call(func, args, named)
        elif func == _DEVICE:
            return self._device
        elif func == _REQUIRES_GRAD:
            return self._requires_grad(args[0])
        elif not self.arrived:
            if func == Tensor.register_hook:
                # The stage that computes the tensor has the hook.
                return RemovableHandle(OrderedDict())
            result = self._call_without_values(func, args, named)
        else:
            self._validate_meeting(func, tensors, valueless)
            result = self._call(func, args, named)
        self._observe(_name_of(func), tensors, result)
        return result

    def _arrived_value(self, x: Any) -> Any:
        """Return the value that has arrived for a meta tensor; anything else as it is."""
        _, value = self.values.get(id(x), (x, x))
        return value

    def _validate_meeting(
        self, func: Any, tensors: Sequence[Tensor], valueless: Sequence[Tensor]
    ) -> None:
        """Raise if tensors with and without values meet after values have arrived.

        Meta tensors alone may be computed: another stage uses the result.
        """
        are_all_meta = len(valueless) == len(tensors) and all([x.is_meta for x in valueless])
        if not are_all_meta:
            shapes = " and ".join([str(Described.of(x)) for x in valueless])
            raise MissingValueError(
                f"{_name_of(func)} must be given values; got {shapes} without, of another stage. "
                f"{WAY_OUT}"
            )

    def _requires_grad(self, x: Tensor) -> bool:
        """Return whether a received value has a gradient, or else trained weights may be used."""
        if id(x) in self.values:
            return getattr(self._arrived_value(x), "requires_grad", False)
        is_differentiable = x.is_floating_point() or x.is_complex()
        is_computed = id(x) not in self.inputs
        return x.requires_grad or (is_differentiable and is_computed and torch.is_grad_enabled())

    def _call_without_values(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call an operation with meta tensors in place of all others; record which it writes to."""
        replaced: list[tuple[Tensor, Tensor]] = []

        def to_meta(x: Any) -> Any:
            if isinstance(x, torch.device):
                return _META
            meta = as_meta(x)
            if isinstance(x, Tensor) and meta is not x:
                replaced.append((x, meta))
            return meta

        args, options = map_leaves(to_meta, (args, {**kwargs}))
        # `to_meta` finds devices, but not the names of devices.
        if "device" in options:
            options["device"] = _META
        if func == Tensor.to:
            args = tuple([_META if isinstance(x, str) else x for x in args])
        with without_counters():  # these tensors have no memory
            result = self._call(func, args, options)
        for x, meta in replaced:
            if meta._version > 0:  # written to
                self._overwritten[_storage_of(x)] = x
        return result

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        try:
            return func(*args, **kwargs)
        except TypeError as error:
            is_of_array = args and isinstance(args[0], Sharded)
            if not is_of_array:
                raise
            raise MissingValueError(
                f"{_name_of(func)} must be given a tensor; got {args[0]!r}, which skips blocks. "
                "With sharded layers pass it from block to block as an argument."
            ) from error


def _name_of(func: Any) -> str:
    return getattr(func, "__name__", str(func))


def _storage_of(x: Tensor) -> int:
    storage: Any = x.untyped_storage()
    return storage._cdata


WAY_OUT = (
    "Stages send what the forward computes around its blocks, as it does with the sample: not "
    "weights, nor attributes of blocks. Return the value from a block, or collect what is written "
    "into a tensor in a list, and torch.stack it."
)


class StageError(ValueError):
    """A module's forward cannot run in stages."""


class MissingValueError(StageError):
    """A value is needed that is on another device."""
