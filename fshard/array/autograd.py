"""Gradients, attributes and conversions of global arrays: functions that are no operations on values.

Autograd records the operations of each shard and the collectives between them, so a backward of an array is one of its
shards. The gradient of an array has its layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fshard.array.communicate import cotangents, own_gradient, state
from fshard.array.dispatch import DIRECT, name_of
from fshard.errors import LayoutError
from fshard.mesh.layout.sharded import Sharded, typeof
from fshard.mesh.reshard.device_put import unshard
from fshard.mesh.spmd.run import is_outside


def direct(names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a function to `DIRECT` under some names."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        DIRECT.update(dict.fromkeys(names.split(), function))
        return function

    return add


@direct("requires_grad_")
def _requires_grad(x: Sharded, requires_grad: bool = True) -> Sharded:
    if len({id(shard) for shard in x.shards}) < len(x.shards):
        x.shards = tuple(shard.detach() for shard in x.shards)  # a leaf for every device
    for shard in x.shards:
        shard.requires_grad_(requires_grad)
    return x


@direct(".grad")
def _attribute_grad(x: Sharded, *value: Any) -> Any:
    if value:
        for number, shard in enumerate(x.shards):
            shard.grad = None if value[0] is None else value[0].shards[number]
        return None
    gradients = [shard.grad for shard in x.shards]
    found = [g for g in gradients if g is not None]
    return own_gradient(found, x) if len(found) == len(gradients) else None


def _listed(xs: Any) -> list[Any]:
    return [xs] if isinstance(xs, Sharded | Tensor) else list(xs)


def _roots(outputs: Any, grads: Any) -> tuple[list[Tensor], list[Any]]:
    """Return the shards of outputs and their cotangents."""
    ys, tensors, gs = _listed(outputs), list[Tensor](), list[Any]()
    given = [None] * len(ys) if grads is None else _listed(grads)
    for y, g in zip(ys, given, strict=True):
        if isinstance(y, Sharded):
            if g is None and y.shape and y.shape.count(1) < len(y.shape):
                raise RuntimeError(f"grad can be implicitly created only for scalar outputs; got {typeof(y)}.")
            tensors += y.shards
            gs += cotangents(g, y)
        else:
            tensors.append(y)
            gs.append(g)
    return tensors, gs


@direct("backward")
def _backward(
    outputs: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
    **kwargs: Any,
) -> None:
    tensors, gs = _roots(outputs, kwargs.get("gradient", grad_tensors))
    leaves = None if inputs is None else [s for x in _listed(inputs) for s in getattr(x, "shards", (x,))]
    torch.autograd.backward(tensors, gs, retain_graph=retain_graph, create_graph=create_graph, inputs=leaves)


@direct("grad")
def _gradients(outputs: Any, inputs: Any, grad_outputs: Any = None, **kwargs: Any) -> tuple[Any, ...]:
    tensors, gs = _roots(outputs, grad_outputs)
    xs = _listed(inputs)
    counts = [len(x.shards) if isinstance(x, Sharded) else 1 for x in xs]
    leaves = [s for x in xs for s in (x.shards if isinstance(x, Sharded) else (x,))]
    found, result = iter(torch.autograd.grad(tensors, leaves, gs, **kwargs)), list[Any]()
    for x, count in zip(xs, counts, strict=True):
        own = [next(found) for _ in range(count)]
        one = own[0] if not isinstance(x, Sharded) else None if any(g is None for g in own) else own_gradient(own, x)
        result.append(one)
    return tuple(result)


# Attributes.


def _from_meta(name: str) -> None:
    attribute: Any = getattr(Tensor, name)

    def on_meta(x: Any, *args: Any, **kwargs: Any) -> Any:
        meta = torch.empty(x.shape, dtype=x.dtype, device="meta")
        return attribute(meta, *args, **kwargs) if callable(attribute) else getattr(meta, name)

    DIRECT[name if callable(attribute) else f".{name}"] = on_meta


for _name in (
    "size dim numel nelement ndimension element_size is_floating_point is_complex is_signed itemsize nbytes "
    "stride is_contiguous is_sparse is_nested is_quantized layout is_conj is_neg"
).split():
    _from_meta(_name)


def _from_shard(name: str) -> None:
    attribute: Any = getattr(Tensor, name)
    if callable(attribute):
        DIRECT[name] = lambda x: attribute(x.shards[0])
    else:
        DIRECT[f".{name}"] = lambda x: getattr(x.shards[0], name)


for _name in "requires_grad is_leaf grad_fn device is_cuda is_cpu is_meta is_inference retains_grad get_device".split():
    _from_shard(_name)


# Values.


def _value(x: Sharded) -> Tensor:
    axes = x.spec.axes
    if state.explicit and any(x.mesh.shape[axis] > 1 for axis in axes):
        raise LayoutError(
            f"the value of {typeof(x)} needs communication, which fs.array.explicit() forbids. Use fs.unshard(x)."
        )
    if x.mesh.runtime == "abstract":
        raise LayoutError(f"the value of {typeof(x)} is needed, but on an abstract mesh arrays have none.")
    with torch.no_grad():
        return unshard(x).detach()


for _name in "item tolist __bool__ __float__ __int__ __index__ __complex__ __contains__".split():
    _method: Any = getattr(Tensor, _name)
    DIRECT[name_of(_method)] = lambda x, *args, _method=_method: _method(_value(x), *args)


@direct("array numpy")
def _as_numpy(x: Sharded, dtype: Any = None, **kwargs: Any) -> Any:
    return np.asarray(_value(x.detach() if dtype is not None or not x.requires_grad else x).numpy(), dtype=dtype)


@direct("equal")
def _equal(x: Sharded, y: Sharded) -> bool:
    return x.shape == y.shape and bool(torch.eq(x, y).all())  # pyright: ignore[reportArgumentType, reportCallIssue]


@direct("allclose")
def _allclose(x: Sharded, y: Sharded, *args: Any, **kwargs: Any) -> bool:
    return bool(torch.isclose(x, y, *args, **kwargs).all())  # pyright: ignore[reportArgumentType]


@direct("retain_grad")
def _retain_grad(x: Sharded) -> None:
    for shard in x.shards:
        shard.retain_grad()


MAX_SHOWN = 1000
"""Elements of the largest array that is printed with its values."""


@direct(".str")
def _as_text(x: Sharded) -> str:
    """Show the values of a small array, where that needs no communication between processes."""
    small = is_outside(x.mesh) and math.prod(x.shape) <= MAX_SHOWN and all(isinstance(one, Tensor) for one in x.shards)
    return f"{x!r}\n{_value(x)}" if small and not state.explicit else repr(x)
