"""Modules and operations of a planned model that run on unsharded tensors, since arrays cannot run them.

An operation without a rule, or a `torch.autograd.Function`, whose backward arrays do not call, is found by the plan. The
innermost module around it gets unsharded inputs and parameters on every device, and its result is replicated. If that is
the model itself, the operation alone runs so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from fshard.array.dispatch import constrain
from fshard.array.rules import arrays_in
from fshard.mesh.layout import Layout, Mesh, P, map_leaves
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.reshard.varying import enter_loss
from fshard.tensor.joined import concatenated


def run_unsharded(
    mesh: Mesh, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Run a module's forward on unsharded inputs and parameters, and return its tensors as replicated arrays."""
    kinds = [vars(each)[kind] for each in module.modules() for kind in ("_parameters", "_buffers")]
    slots = [
        (entries, *item)
        for entries in kinds
        for item in entries.items()
        if not isinstance(item[1], Tensor)
    ]
    try:
        for entries, key, x in slots:
            entries[key] = _unsharded(x)
        args, kwargs = map_leaves(_unsharded, (args, kwargs))
        return map_leaves(partial(_replicated, mesh), forward(*args, **kwargs))
    finally:
        for entries, key, x in slots:
            entries[key] = x


def run_operation(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run an operation without a rule on unsharded tensors, and return its tensors as replicated arrays."""
    mesh = next(x.mesh for x in arrays_in(args, kwargs) if isinstance(x, Sharded))
    args, kwargs = map_leaves(_unsharded, (args, kwargs))
    return map_leaves(partial(_replicated, mesh), func(*args, **kwargs))


def _unsharded(x: Any) -> Any:
    x = concatenated(x)
    return constrain(x, P()).local if isinstance(x, Sharded) else x


def _replicated(mesh: Mesh, y: Any) -> Any:
    """Return a tensor that all devices have computed as an array. Its gradient is the mean of the devices' parts."""
    if not isinstance(y, Tensor):
        return y
    if mesh.is_varying:
        y = enter_loss(y, mesh)
    return Sharded(tuple(y.shape), Layout(mesh), (y,))
