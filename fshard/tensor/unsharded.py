"""Modules of a planned model that run on unsharded tensors, since arrays cannot run them.

An operation without a rule, or a `torch.autograd.Function`, whose backward arrays do not call, is found by the plan. The
innermost module around it gets unsharded inputs and parameters on every device, and its result is replicated. Dims along
which chunks of the input give chunks of the result and of its gradient, as for an activation, stay sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import Function

from fshard.array.communicate import operation_site
from fshard.array.dispatch import constrain
from fshard.errors import LayoutError
from fshard.mesh.collectives.moves import Pvary
from fshard.mesh.collectives.on_shards import apply_move
from fshard.mesh.layout import Layout, P, flatten, map_leaves, unflatten
from fshard.mesh.layout.sharded import Sharded
from fshard.tensor.joined import concatenated

_apply: Any = Function.apply
APPLY = _apply.__func__.__code__


class UnshardedModule(NamedTuple):
    """Why a module runs on unsharded tensors, and the dims of its input that stay sharded; None before a run."""

    why: str
    dims: Set[int] | None = None


def validate_no_function(frame: Any) -> None:
    """Raise if a `torch.autograd.Function` computes on arrays in one of the frames from this one outwards."""
    while frame is not None:
        if frame.f_code is APPLY:
            title = frame.f_locals["cls"].__name__
            raise LayoutError(f"{title} is a torch.autograd.Function, whose backward arrays do not call.")
        frame = frame.f_back


def run_unsharded(part: nn.Module, forward: Callable[..., Any], dims: Set[int], args: Any, kwargs: Any) -> Any:
    """Run a module's forward on unsharded inputs and parameters, and return its tensors as replicated arrays."""
    leaves, structure = flatten((args, kwargs), sharded_is_leaf=True, none_is_leaf=True)
    array = next((x for x in map(concatenated, leaves) if isinstance(x, Sharded)), None)
    if array is None:
        return forward(*args, **kwargs)
    mesh, site = array.mesh, operation_site(type(part).__name__)
    spec = P(*(axes if dim in dims else () for dim, axes in enumerate(array.spec.dims(array.ndim))))
    axes = tuple([axis for axis in mesh.axis_names if axis not in spec.axes])

    def unshard(x: Any) -> Any:
        x = concatenated(x)
        return constrain(x, spec).local if isinstance(x, Sharded) else x

    def replicate(y: Any) -> Any:
        if not isinstance(y, Tensor):
            return y
        shape = array.shape if dims else tuple(y.shape)
        if axes and y.requires_grad:  # the module's backward gets the mean of all devices' cotangents, not its own
            y = y.view_as(y)
            y.register_hook(lambda g: g / prod(mesh.shape[axis] for axis in axes))
            (y,) = apply_move(mesh, Pvary(), axes, (y,), site)
        return Sharded(shape, Layout(mesh, spec), (y,))

    slots: list[Any] = [(each._parameters, *item) for each in part.modules() for item in each._parameters.items()]
    try:
        for entries, key, x in slots:
            entries[key] = unshard(x)
        args, kwargs = unflatten(structure, [*map(unshard, leaves)])
        return map_leaves(replicate, forward(*args, **kwargs))
    finally:
        for entries, key, x in slots:
            entries[key] = x


def separable_dims(function: Callable[[Tensor], Any], x: Tensor) -> Set[int]:
    """Return the dims along which chunks of x give chunks of the result and of the gradient, by trying them."""
    x = torch.randn_like(x, device="cpu") if x.is_meta else x
    g = torch.randn_like(x)

    @torch.enable_grad()
    def run(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        leaf = x.detach().requires_grad_()
        y = function(leaf.clone())
        return y, *torch.autograd.grad(y, leaf, g)

    def is_separable(dim: int) -> bool:
        chunks = zip(*(one.split([1, x.shape[dim] - 1], dim) for one in (x, g)), strict=True)  # uneven: blocks are cut
        results = zip(run(x, g), *(run(*chunk) for chunk in chunks), strict=True)
        return all(torch.allclose(torch.cat(parts, dim), full, equal_nan=True) for full, *parts in results)

    return {dim for dim in range(x.ndim) if x.shape[dim] > 1 and is_separable(dim)}
