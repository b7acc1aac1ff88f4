"""Modules of a planned model that run on unsharded tensors, since arrays cannot run them.

An operation without a rule, or a `torch.autograd.Function`, whose backward arrays do not call, is found by the plan. The
innermost module around it gets unsharded inputs and parameters on every device, and its result is replicated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fshard.array.communicate import operation_site
from fshard.array.dispatch import constrain
from fshard.mesh.collectives.moves import Pvary
from fshard.mesh.collectives.on_shards import apply_move
from fshard.mesh.layout import Layout, Mesh, P, map_leaves
from fshard.mesh.layout.sharded import Sharded
from fshard.tensor.joined import concatenated


def run_unsharded(
    mesh: Mesh, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Run a module's forward on unsharded inputs and parameters, and return its tensors as replicated arrays."""
    site = operation_site(type(module).__name__)

    def unshard(x: Any) -> Any:
        x = concatenated(x)
        return constrain(x, P()).local if isinstance(x, Sharded) else x

    def replicate(y: Any) -> Any:
        if not isinstance(y, Tensor):
            return y
        if (
            y.requires_grad
        ):  # the module's backward gets the mean of all devices' cotangents, not its own
            y = y.view_as(y)
            y.register_hook(lambda g: g / mesh.size)
            (y,) = apply_move(mesh, Pvary(), mesh.axis_names, (y,), site)
        return Sharded(tuple(y.shape), Layout(mesh), (y,))

    kinds = [vars(each)[kind] for each in module.modules() for kind in ("_parameters", "_buffers")]
    slots = [
        (entries, *item)
        for entries in kinds
        for item in entries.items()
        if not isinstance(item[1], Tensor)
    ]
    try:
        for entries, key, x in slots:
            entries[key] = unshard(x)
        args, kwargs = map_leaves(unshard, (args, kwargs))
        return map_leaves(replicate, forward(*args, **kwargs))
    finally:
        for entries, key, x in slots:
            entries[key] = x
