"""Gradients, attributes and conversions of arrays: functions that are no operations on values.

Autograd records the operations of each shard and the collectives between them, so a backward of an
array is one of its shards. The gradient of an array has its layout:

    x       f32[8@data, 4]      y = (x * x).sum()      f32[]{U:data}
    y.backward()                a cotangent of 1 for each shard of y, and one backward of all shards
    x.grad  f32[8@data, 4]      the gradients of the shards of x
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from fshard.ambient import backward_in_caller
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
from fshard.mesh.spmd.run import is_outside


def direct(names: str) -> Callable[[Callable[..., Any]], None]:
    """Return the function that adds another to `DIRECT` under some names."""

    def add(function: Callable[..., Any]) -> None:
        for name in names.split():
            DIRECT[name] = function

    return add


# Gradients of an array.


@direct("requires_grad_")
def _requires_grad(x: Sharded, requires_grad: bool = True) -> Sharded:
    shard_ids = {id(shard) for shard in x.shards}
    if len(shard_ids) < len(x.shards):
        # Replicas that are one tensor become a leaf for each device.
        x.shards = tuple(shard.detach() for shard in x.shards)
    for shard in x.shards:
        shard.requires_grad_(requires_grad)
    return x


@direct(".grad")
def _attribute_grad(x: Sharded, *value: Any) -> Any:
    """Return the gradient of an array; with a value, set it."""
    if not value:
        return as_gradient([shard.grad for shard in x.shards], x)
    (gradient,) = value
    if gradient is None:
        for shard in x.shards:
            shard.grad = None
        return None
    if not isinstance(gradient, Sharded):
        _raise_no_array(x, gradient)
    gradient = with_spec(gradient, x.spec.replace(unreduced=None), "grad")
    for shard, shard_gradient in zip(x.shards, gradient.shards, strict=True):
        shard.grad = shard_gradient
    return None


def _raise_no_array(x: Sharded, gradient: Any) -> NoReturn:
    """Raise for a gradient that is no array.

    Shards of another type, such as a step's parameters, raise their own error.
    """
    for shard in x.shards:
        if type(shard) is not Tensor:
            shard.grad = gradient
    raise LayoutError(
        f"grad must be an array or None; got {type(gradient).__name__}. Write x.grad = "
        "fs.device_put(gradient, x.layout)."
    )


def as_gradient(gradients: Sequence[Any], x: Any) -> Any:
    """Return the gradients of an array's shards as an array.

    The gradient of an unreduced array is replicated.
    """
    if not isinstance(x, Sharded):
        return gradients[0]
    if any(gradient is None for gradient in gradients):
        return None
    if x.mesh.is_varying:
        return _gradient_in_loss(gradients, x) if in_loss() else gradient_of_parts(x, gradients)

    shards = tuple(gradients)
    unreduced = x.spec.unreduced
    if unreduced and recorded(shards):
        # A second backward must know that these gradients are equal.
        shards = apply_move(x.mesh, Same(), unreduced, shards, operation_site("grad"))
    return Sharded(x.shape, x.layout.with_spec(x.spec.replace(unreduced=None)), shards)


def _gradient_in_loss(parts: Sequence[Tensor], x: Sharded) -> Sharded:
    """Return the gradient of an array of a loss function as an array: the mean of the parts."""
    replicated = tuple([axis for axis in x.mesh.axis_names if axis not in x.spec.axes])
    summands = x.layout.with_spec(x.spec.replace(unreduced=replicated))
    shares = tuple([part / x.mesh.size for part in parts])
    total = Sharded(x.shape, summands, shares)
    return with_spec(total, x.spec.replace(unreduced=None), "grad")


# Backwards.


@direct("backward")
def _backward(
    outputs: Any, grad_tensors: Any = None, *args: Any, inputs: Any = None, **kwargs: Any
) -> None:
    cotangents = kwargs.pop("gradient", grad_tensors)
    tensors, shard_cotangents = _roots(outputs, cotangents)
    leaves = None if inputs is None else _all_shards(_listed(inputs))
    with backward_in_caller():
        torch.autograd.backward(tensors, shard_cotangents, *args, inputs=leaves, **kwargs)


@direct("grad")
def _gradients(
    outputs: Any, inputs: Any, grad_outputs: Any = None, **kwargs: Any
) -> tuple[Any, ...]:
    tensors, shard_cotangents = _roots(outputs, grad_outputs)
    xs = _listed(inputs)
    leaves = _all_shards(xs)
    with backward_in_caller():
        gradients = iter(torch.autograd.grad(tensors, leaves, shard_cotangents, **kwargs))

    results: list[Any] = []
    for x in xs:
        shard_gradients = [next(gradients) for _ in _shards(x)]
        results.append(as_gradient(shard_gradients, x))
    return tuple(results)


def _roots(outputs: Any, cotangents: Any) -> tuple[list[Tensor], list[Any]]:
    """Return the shards of outputs and their cotangents."""
    ys = [leave_loss(y) for y in _listed(outputs)]
    given = [None] * len(ys) if cotangents is None else _listed(cotangents)
    shard_cotangents: list[Any] = []
    for y, cotangent in zip(ys, given, strict=True):
        if isinstance(y, Sharded):
            shard_cotangents += _as_cotangent(cotangent, y)
        else:
            shard_cotangents.append(cotangent)
    return _all_shards(ys), shard_cotangents


def _as_cotangent(cotangent: Any, y: Sharded) -> Tensors:
    """Return the cotangent of an array as the cotangents of its shards."""
    count = number_of_shards(y) if y.mesh.is_varying else 1  # see `mesh/reshard/varying.py`
    if cotangent is None and math.prod(y.shape) == 1:
        return tuple(torch.full_like(shard, count) for shard in y.shards)
    if count > 1 and isinstance(cotangent, Sharded):
        cotangent = cotangent * count
    if isinstance(cotangent, Sharded):
        is_like_y = cotangent.shape == y.shape and cotangent.mesh == y.mesh
        if is_like_y:
            return cotangent_shards(cotangent, y.spec)
    raise RuntimeError(
        "grad can be implicitly created only for scalar outputs, and must be an array like "
        f"{y!r}; got {cotangent!r}."
    )


def cotangent_shards(cotangent: Sharded, spec: P) -> Tensors:
    """Return the cotangent of an array of this spec as the cotangents of its shards."""
    replicated = spec.replace(unreduced=None)
    to = plan_transfer(cotangent.shape, cotangent.layout, replicated, spec.unreduced)
    return transfer(cotangent, to, "grad")


def _listed(xs: Any) -> list[Any]:
    return [xs] if isinstance(xs, Sharded | Tensor) else list(xs)


def _shards(x: Any) -> Tensors:
    if not isinstance(x, Sharded):
        return (x,)
    x.check_view()
    return x.shards


def _all_shards(xs: Sequence[Any]) -> list[Tensor]:
    shards: list[Tensor] = []
    for x in xs:
        shards += _shards(x)
    return shards


@direct("register_hook")
def _register_hook(x: Sharded, hook: Callable[[Sharded], None]) -> Any:
    """Call a function with the gradient of an array when a backward has it on all devices.

    The function may not change it.
    """
    if not x.requires_grad:
        raise RuntimeError("a hook needs an array that requires grad. Call requires_grad_().")

    def call_with_array(gradients: Sequence[Any]) -> None:
        if hook(as_gradient(gradients, x)) is not None:
            raise LayoutError(
                "a hook of an array must return None. Change x.grad after the backward instead."
            )

    return torch.autograd.graph.register_multi_grad_hook(x.shards, call_with_array)


@direct("retain_grad")
def _retain_grad(x: Sharded) -> None:
    for shard in x.shards:
        shard.retain_grad()


# Attributes.

_OF_ARRAY = """size dim numel nelement ndimension element_size is_floating_point is_complex
is_signed itemsize nbytes stride is_contiguous is_sparse is_nested is_quantized layout is_conj
is_neg"""
"""Attributes that are those of a tensor of the global shape."""

_OF_SHARD = """requires_grad is_leaf grad_fn device is_cuda is_cpu is_meta is_inference retains_grad
get_device"""
"""Attributes that are those of each shard."""


def _attribute_of_array(attribute: Any, name: str, x: Sharded, *args: Any, **kwargs: Any) -> Any:
    like = torch.empty(x.shape, dtype=x.dtype, device="meta")
    return attribute(like, *args, **kwargs) if callable(attribute) else getattr(like, name)


def _attribute_of_shard(attribute: Any, name: str, x: Sharded, *args: Any, **kwargs: Any) -> Any:
    shard = x.shards[0]
    return attribute(shard, *args, **kwargs) if callable(attribute) else getattr(shard, name)


def _add_attributes(names: str, read: Callable[..., Any]) -> None:
    """Add methods, and properties, whose names begin with a dot."""
    for name in names.split():
        attribute: Any = getattr(Tensor, name)
        key = name if callable(attribute) else f".{name}"
        DIRECT[key] = partial(read, attribute, name)


_add_attributes(_OF_ARRAY, _attribute_of_array)
_add_attributes(_OF_SHARD, _attribute_of_shard)


# Values.


def _value(x: Sharded) -> Tensor:
    """Return the full tensor, without its gradient."""
    mode = array_mode()
    shared_axes = [axis for axis in x.spec.axes if x.mesh.shape[axis] > 1]
    if mode.explicit_axes and mode.forbids(x.mesh, shared_axes):
        raise LayoutError(
            f"the value of {typeof(x)} needs communication, which {mode.explicit_call} forbids. "
            "Use fs.unshard(x)."
        )
    if not x.is_local:
        raise LayoutError(
            f"the value of {typeof(x)} is needed, but this process is none of {x.mesh.grid}. Read "
            "it where mesh.is_member, or get it by fs.broadcast_to(fs.unshard(x), source=mesh)."
        )
    if x.mesh.runtime == "abstract":
        raise LayoutError(
            f"the value of {typeof(x)} is needed, but on an abstract mesh arrays have none."
        )
    with torch.no_grad():
        if x.mesh.zigzag:  # which `unshard` does not take
            x = with_spec(x, P(), "value", is_explicit=True)
        return unshard(x).detach()


def _call_with_value(method: Any, x: Sharded, *args: Any, **kwargs: Any) -> Any:
    return method(_value(x), *args, **kwargs)


_OF_VALUE = """item tolist __bool__ __float__ __int__ __index__ __complex__ __contains__ __dlpack__
__dlpack_device__"""
for _name in _OF_VALUE.split():
    _method: Any = getattr(Tensor, _name)
    DIRECT[name_of(_method)] = partial(_call_with_value, _method)


@direct("array numpy")
def _as_numpy(x: Sharded, dtype: Any = None, **_: Any) -> Any:
    return np.asarray(_value(x).numpy(), dtype=dtype)


@direct("equal")
def _is_equal(x: Any, y: Any) -> bool:
    return x.shape == y.shape and not bool(torch.ne(x, y).sum())


@direct("allclose")
def _is_close(x: Any, y: Any, *args: Any, **kwargs: Any) -> bool:
    is_far = ~torch.isclose(x, y, *args, **kwargs)
    return not bool(is_far.sum())


# Texts.

MAX_SHOWN = 1000
"""Elements of the largest array that is printed with its values."""


@direct("format")
def _formatted(x: Sharded, form: str) -> str:
    is_number = bool(form) and not x.shape
    return format(x.item() if is_number else str(x), form)


@direct(".str")
def _as_text(x: Sharded) -> str:
    """Show the values of a small array, where that needs no communication between processes."""
    is_small = math.prod(x.shape) <= MAX_SHOWN
    has_tensors = all(isinstance(shard, Tensor) for shard in x.shards)
    if not is_small or not has_tensors or not is_outside(x.mesh) or array_mode().explicit_axes:
        return repr(x)
    return f"{x!r}\n{_value(x)}"
