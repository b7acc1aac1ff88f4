"""Gradients, attributes and conversions of arrays: functions that are no operations on values.

Autograd records the operations of each shard and the collectives between them, so a backward of an array is one of its
shards. The gradient of an array has its layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from fshard.array.communicate import (
    in_loss,
    operation_site,
    plan_transfer,
    transfer,
    with_spec,
)
from fshard.array.dispatch import DIRECT, name_of
from fshard.array.mode import array_mode
from fshard.errors import LayoutError
from fshard.mesh.collectives.autograd import Tensors, recorded
from fshard.mesh.collectives.moves import Same
from fshard.mesh.collectives.on_shards import apply_move
from fshard.mesh.layout import P
from fshard.mesh.layout.sharded import Sharded, typeof
from fshard.mesh.reshard.device_put import unshard
from fshard.mesh.reshard.varying import gradient_of_parts, leave_loss, number_of_shards
from fshard.mesh.spmd.run import backward_in_caller, is_outside


def direct(names: str) -> Callable[[Callable[..., Any]], None]:
    """Return the function that adds another to `DIRECT` under some names."""
    return lambda function: DIRECT.update(dict.fromkeys(names.split(), function))


@direct("requires_grad_")
def _requires_grad(x: Sharded, requires_grad: bool = True) -> Sharded:
    if len({id(shard) for shard in x.shards}) < len(x.shards):
        x.shards = tuple(shard.detach() for shard in x.shards)  # a leaf for every device
    for shard in x.shards:
        shard.requires_grad_(requires_grad)
    return x


@direct(".grad")
def _attribute_grad(x: Sharded, *value: Any) -> Any:
    if not value:
        return as_gradient([shard.grad for shard in x.shards], x)
    if not isinstance(value[0], Sharded | None):
        _raise_no_array(x, value[0])
    spec = x.spec.replace(unreduced=None)
    gradient = None if value[0] is None else with_spec(value[0], spec, "grad")
    for number, shard in enumerate(x.shards):
        shard.grad = None if gradient is None else gradient.shards[number]
    return None


def _raise_no_array(x: Sharded, gradient: Any) -> NoReturn:
    """Raise for a gradient that is no array; shards of another type, such as a step's parameters, raise their own error."""
    for shard in x.shards:
        if type(shard) is not Tensor:
            shard.grad = gradient
    raise LayoutError(
        f"grad must be an array or None; got {type(gradient).__name__}. Write x.grad = fs.device_put(gradient, x.layout)."
    )


def as_gradient(gradients: Sequence[Any], x: Any) -> Any:
    """Return the gradients of an array's shards as an array; that of an unreduced one is replicated."""
    if not isinstance(x, Sharded) or any(g is None for g in gradients):
        return None if isinstance(x, Sharded) else gradients[0]
    if x.mesh.is_varying and in_loss():
        return _gradient_in_loss(gradients, x)
    if x.mesh.is_varying:
        return gradient_of_parts(x, gradients)
    shards, unreduced = tuple(gradients), x.spec.unreduced
    if unreduced and recorded(shards):
        shards = apply_move(x.mesh, Same(), unreduced, shards, operation_site("grad"))
    return Sharded(x.shape, x.layout.with_spec(x.spec.replace(unreduced=None)), shards)


def _gradient_in_loss(parts: Sequence[Tensor], x: Sharded) -> Sharded:
    """Return the gradient of an array of a loss function as a value of it: the mean of the parts."""
    replicated = tuple([axis for axis in x.mesh.axis_names if axis not in x.spec.axes])
    summands = x.layout.with_spec(x.spec.replace(unreduced=replicated))
    shares = tuple([part / x.mesh.size for part in parts])
    total = Sharded(x.shape, summands, shares)
    return with_spec(total, x.spec.replace(unreduced=None), "grad")


def _as_cotangent(g: Any, y: Sharded) -> Tensors:
    """Return the cotangent of an array as the cotangents of its shards."""
    count = number_of_shards(y) if y.mesh.is_varying else 1  # see `mesh/reshard/varying.py`
    if g is None and math.prod(y.shape) == 1:
        return tuple(torch.full_like(shard, count) for shard in y.shards)
    if count > 1 and isinstance(g, Sharded):
        g = g * count
    if not isinstance(g, Sharded) or g.shape != y.shape or g.mesh != y.mesh:
        raise RuntimeError(
            f"grad can be implicitly created only for scalar outputs, and must be an array like {y!r}; got {g!r}."
        )
    return cotangent_shards(g, y.spec)


def cotangent_shards(g: Sharded, spec: P) -> Tensors:
    """Return the cotangent of an array of this spec as the cotangents of its shards."""
    to = plan_transfer(g.shape, g.layout, spec.replace(unreduced=None), spec.unreduced)
    return transfer(g, to, "grad")


def _listed(xs: Any) -> list[Any]:
    return [xs] if isinstance(xs, Sharded | Tensor) else list(xs)


def _shards(x: Any) -> Tensors:
    if isinstance(x, Sharded):
        x.check_view()
    return x.shards if isinstance(x, Sharded) else (x,)


def _roots(outputs: Any, grads: Any) -> tuple[list[Tensor], list[Any]]:
    """Return the shards of outputs and their cotangents."""
    ys = [leave_loss(y) for y in _listed(outputs)]
    pairs = list(zip(ys, [None] * len(ys) if grads is None else _listed(grads), strict=True))
    gs = [
        cotangent
        for y, g in pairs
        for cotangent in (_as_cotangent(g, y) if isinstance(y, Sharded) else (g,))
    ]
    return [shard for y in ys for shard in _shards(y)], gs


@direct("backward")
def _backward(
    outputs: Any, grad_tensors: Any = None, *args: Any, inputs: Any = None, **kwargs: Any
) -> None:
    tensors, gs = _roots(outputs, kwargs.pop("gradient", grad_tensors))
    leaves = None if inputs is None else [shard for x in _listed(inputs) for shard in _shards(x)]
    with backward_in_caller():
        torch.autograd.backward(tensors, gs, *args, inputs=leaves, **kwargs)


@direct("grad")
def _gradients(
    outputs: Any, inputs: Any, grad_outputs: Any = None, **kwargs: Any
) -> tuple[Any, ...]:
    (tensors, gs), xs = _roots(outputs, grad_outputs), _listed(inputs)
    with backward_in_caller():
        gradients = iter(
            torch.autograd.grad(tensors, [shard for x in xs for shard in _shards(x)], gs, **kwargs)
        )
    return tuple(as_gradient([next(gradients) for _ in _shards(x)], x) for x in xs)


@direct("register_hook")
def _register_hook(x: Sharded, hook: Callable[[Sharded], None]) -> Any:
    """Call a function with the gradient of an array when a backward has it on all devices. It may not change it."""
    if not x.requires_grad:
        raise RuntimeError("a hook needs an array that requires grad. Call requires_grad_().")

    def call(gradients: Sequence[Any]) -> None:
        if hook(as_gradient(gradients, x)) is not None:
            raise LayoutError(
                "a hook of an array must return None. Change x.grad after the backward instead."
            )

    return torch.autograd.graph.register_multi_grad_hook(x.shards, call)


@direct("retain_grad")
def _retain_grad(x: Sharded) -> None:
    for shard in x.shards:
        shard.retain_grad()


# Attributes and values.


def _attribute(
    attribute: Any, name: str, is_global: bool, x: Sharded, *args: Any, **kwargs: Any
) -> Any:
    """Return an attribute of the global tensor, or of a shard."""
    like = torch.empty(x.shape, dtype=x.dtype, device="meta") if is_global else x.shards[0]
    return attribute(like, *args, **kwargs) if callable(attribute) else getattr(like, name)


_GLOBAL = (
    "size dim numel nelement ndimension element_size is_floating_point is_complex is_signed itemsize nbytes stride "
    "is_contiguous is_sparse is_nested is_quantized layout is_conj is_neg"
)
_SHARD = "requires_grad is_leaf grad_fn device is_cuda is_cpu is_meta is_inference retains_grad get_device"
for _name in (*_GLOBAL.split(), *_SHARD.split()):
    _member: Any = getattr(Tensor, _name)
    DIRECT[_name if callable(_member) else f".{_name}"] = partial(
        _attribute, _member, _name, _name in _GLOBAL.split()
    )


def _value(x: Sharded) -> Tensor:
    if array_mode().is_explicit and any(x.mesh.shape[axis] > 1 for axis in x.spec.axes):
        raise LayoutError(
            f"the value of {typeof(x)} needs communication, which fs.array.explicit() forbids. Use fs.unshard(x)."
        )
    if x.mesh.runtime == "abstract":
        raise LayoutError(
            f"the value of {typeof(x)} is needed, but on an abstract mesh arrays have none."
        )
    with torch.no_grad():
        return unshard(
            with_spec(x, P(), "value", is_explicit=True) if x.mesh.zigzag else x
        ).detach()


_VALUES = "item tolist __bool__ __float__ __int__ __index__ __complex__ __contains__ __dlpack__ __dlpack_device__"
for _name in _VALUES.split():
    _method: Any = getattr(Tensor, _name)
    DIRECT[name_of(_method)] = lambda x, *args, _method=_method, **more: _method(
        _value(x), *args, **more
    )


direct("format")(lambda x, form: format((x.item() if form and not x.shape else str(x)), form))
direct("array numpy")(lambda x, dtype=None, **_: np.asarray(_value(x).numpy(), dtype=dtype))
direct("equal")(lambda x, y: x.shape == y.shape and not bool(torch.ne(x, y).sum()))
direct("allclose")(
    lambda x, y, *args, **kwargs: not bool((~torch.isclose(x, y, *args, **kwargs)).sum())
)
MAX_SHOWN = 1000
"""Elements of the largest array that is printed with its values."""


@direct(".str")
def _as_text(x: Sharded) -> str:
    """Show the values of a small array, where that needs no communication between processes."""
    small = (
        is_outside(x.mesh)
        and math.prod(x.shape) <= MAX_SHOWN
        and all(isinstance(shard, Tensor) for shard in x.shards)
    )
    return f"{x!r}\n{_value(x)}" if small and not array_mode().is_explicit else repr(x)
