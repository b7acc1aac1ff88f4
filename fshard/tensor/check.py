"""Check a plan: loss and gradients of the planned model, on virtual devices, against the model itself in float64."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from math import gcd
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fshard.errors import LayoutError
from fshard.mesh.layout import P, flatten, flatten_with_paths, unflatten
from fshard.mesh.layout.make import make_mesh
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.reshard.device_put import unshard
from fshard.transforms.shard_params import shard_params
from fshard.transforms.value_and_grad import value_and_grad

if TYPE_CHECKING:
    from fshard.tensor.plan import Plan

TOLERANCE = 1e-5
"""Of errors; models may compute norms in float32."""


def check_plan(plan: Plan, model: nn.Module, sample: Any) -> float:
    """Return the largest error of a parameter, relative to its largest gradient; raise with all that are wrong.

    Gradients below a millionth of the model's largest one count as that: those of biases of keys are 0 but for rounding.
    """
    shared = gcd(*(layer.shared for layer in plan.layers.values()))
    size = next((n for n in range(2, shared + 1) if shared % n == 0), 1)
    mesh = make_mesh(dict.fromkeys(plan.axes, size), runtime="virtual")
    apply, params, buffers = plan.functionalize(copy.deepcopy(model).eval().double())

    def loss_fn(params: Any, sample: Any) -> Tensor:
        args, kwargs = arguments(sample)
        output, _ = apply(params, buffers, *args, **kwargs)
        leaves, _ = flatten(dict(output) if isinstance(output, Mapping) else output, sharded_is_leaf=True)
        values = [x for x in leaves if isinstance(x, Tensor | Sharded) and x.is_floating_point()]
        return plan.full(sum((x * x).mean() for x in values))

    leaves, structure = flatten(sample)
    sample = unflatten(structure, [_widened(x) for x in leaves])
    plain, params_structure = flatten(params)
    given = unflatten(params_structure, [x.detach() for x in plain])
    wanted, value = torch.func.grad_and_value(loss_fn)(given, sample)
    gradient = value_and_grad(loss_fn, mesh=mesh, batch=P(), local=plan.axes)
    loss, found = gradient(shard_params(params, plan.rules, mesh=mesh), sample)
    paths, ours, _ = flatten_with_paths({"loss": loss, "gradients": unshard(found)})
    theirs, _ = flatten({"loss": value, "gradients": wanted})
    least = 1e-6 * max(float(y.abs().max()) for y in theirs)
    errors = [float((x - y).abs().max()) / max(float(y.abs().max()), least) for x, y in zip(ours, theirs, strict=True)]
    wrong = [f"{path} by {error:.1e}" for path, error in zip(paths, errors, strict=True) if not error < TOLERANCE]
    if wrong:
        raise LayoutError(f"the plan must compute what the model does; of {mesh}, these differ: {'; '.join(wrong)}.")
    return max(errors)


def arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments: of a mapping, a tuple, or one value."""
    if isinstance(sample, Mapping):
        return (), dict(sample)
    return (sample if isinstance(sample, tuple) else (sample,)), {}


def _widened(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
