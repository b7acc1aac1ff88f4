"""Modules and operations of a planned model that run on unsharded tensors.

Arrays cannot run an operation without a rule, nor a `torch.autograd.Function`, whose backward they
do not call. `follow` finds these. The innermost module around one gets unsharded inputs and
parameters on every device, and its result is replicated. If that is the model itself, the operation
alone runs so.
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
    """Run a module's forward on unsharded inputs and parameters; return replicated arrays."""
    # In a planned module, parameters and buffers that are no tensors are arrays, or parts of one.
    slots: list[tuple[dict[str, Any], str, Any]] = []
    for submodule in module.modules():
        for kind in ("_parameters", "_buffers"):
            entries = vars(submodule)[kind]
            for key, x in entries.items():
                if not isinstance(x, Tensor):
                    slots.append((entries, key, x))
    try:
        for entries, key, x in slots:
            entries[key] = _unsharded(x)
        return _on_unsharded(mesh, forward, args, kwargs)
    finally:
        for entries, key, x in slots:
            entries[key] = x


def run_operation(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run an operation without a rule on unsharded tensors; return replicated arrays."""
    meshes = [x.mesh for x in arrays_in(args, kwargs) if isinstance(x, Sharded)]
    return _on_unsharded(meshes[0], func, args, kwargs)


def _on_unsharded(mesh: Mesh, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function with unsharded tensors in place of arrays; return arrays for its tensors."""
    args, kwargs = map_leaves(_unsharded, (args, kwargs))
    return map_leaves(partial(_replicated, mesh), func(*args, **kwargs))


def _unsharded(x: Any) -> Any:
    x = concatenated(x)
    if not isinstance(x, Sharded):
        return x
    return constrain(x, P()).local


def _replicated(mesh: Mesh, y: Any) -> Any:
    """Return a tensor that all devices have computed as an array.

    Its gradient is the mean of the devices' cotangents.
    """
    if not isinstance(y, Tensor):
        return y
    if mesh.is_varying:
        y = enter_loss(y, mesh)
    return Sharded(tuple(y.shape), Layout(mesh), (y,))
