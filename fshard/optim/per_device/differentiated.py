"""An update of one device's tensors within a transform of torch.func.

All devices run it as one differentiable program: inputs and results are arrays, and each device's
results depend on its own shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fshard.errors import OptimizerError
from fshard.memory.state import Update
from fshard.mesh.collectives.api import pvary, replicated
from fshard.mesh.collectives.autograd import Tensors
from fshard.mesh.collectives.moves import Purpose
from fshard.mesh.layout import Layout, Mesh, P, PyTree, Structure, flatten, unflatten
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.reshard.device_put import full_values, spread
from fshard.mesh.spmd.call_plan import unnamed
from fshard.mesh.spmd.outer_autograd import run_mapped
from fshard.mesh.spmd.scope import Group, loss_scope
from fshard.optim.leaves import like, shards_of

_ARRAYS = (Sharded, Tensor)


def differentiable_on_devices(
    run: Callable[..., tuple[PyTree, PyTree]],
    update: Update,
    trees: tuple[PyTree, PyTree, PyTree],
) -> tuple[PyTree, PyTree]:
    """Run an update on each device so that transforms see it; return arrays.

    Args:
        run: runs an update on trees of arrays: run(update, grads, state, params).
        update: of one device's tensors.
        trees: gradients, state and parameters.
    """
    grads, state, params = trees
    mesh = next((x.mesh for x in flatten(params)[0] if isinstance(x, Sharded)), None)
    if mesh is None:
        return run(update, grads, state, params)

    def update_alone(*local_trees: PyTree) -> tuple[PyTree, PyTree]:
        with loss_scope(mesh.axis_names, _refuse_collective):
            return update(*local_trees)

    return _mapped_over_devices(partial(run, update_alone), mesh, trees)


def _refuse_collective(call: str, group: Group, purpose: Purpose) -> None:
    """Raise: the derivative of a collective depends on which values of an update are replicated."""
    if call not in ("fs.pvary", "fs.axis_size", "fs.axis_index"):
        raise OptimizerError(
            "an update of shards within a transform of torch.func must not communicate; got "
            f"{call}. Compute the number before, such as fs.optim.global_norm(grads) of the "
            "arrays, "
            "and scale the gradients that the update gets."
        )


def _mapped_over_devices(function: Callable[..., PyTree], mesh: Mesh, trees: PyTree) -> PyTree:
    """Run a function of trees of arrays on each device, with its own shards; return arrays.

    Plain tensors are global values. All devices return the same tree of arrays and plain tensors.
    Inside, every value is varying: a number that meets shards has the sum of all devices'
    gradients. So replicated inputs become varying, and of results that are replicated one device's
    cotangent counts.
    """
    leaves, structure = flatten(trees, none_is_leaf=True)
    inputs = [index for index, x in enumerate(leaves) if isinstance(x, _ARRAYS)]
    arrays: list[Sharded] = []
    for index in inputs:
        x = leaves[index]
        arrays.append(x if isinstance(x, Sharded) else spread(x, Layout(mesh)))
    results: list[tuple[list[Any], Structure]] = []  # of any device: equal but for the values

    def on_device(device: int, xs: Tensors) -> Tensors:
        values, anchor = _varying_inputs(leaves, inputs, arrays, xs, mesh)
        output = function(*unflatten(structure, values))
        outputs, output_structure = flatten(output, none_is_leaf=True)
        results.append((outputs, output_structure))
        return _anchored_outputs(outputs, anchor, mesh)

    columns = iter(run_mapped(mesh, on_device, [x.shards for x in arrays]))
    outputs, output_structure = results[-1]
    for index, x in enumerate(outputs):
        if isinstance(x, Sharded):
            outputs[index] = like(x, next(columns))
        elif isinstance(x, Tensor):
            output = Sharded(tuple(x.shape), Layout(mesh), next(columns))
            outputs[index] = full_values(output)
    return unflatten(output_structure, outputs)


def _varying_inputs(
    leaves: Sequence[Any],
    inputs: Sequence[int],
    arrays: Sequence[Sharded],
    xs: Tensors,
    mesh: Mesh,
) -> tuple[list[Any], Tensor | float]:
    """Return a device's leaves, replicated ones made varying, and the anchor: a zero.

    The anchor depends on each of the inputs that became varying.
    """
    values: list[Any] = [*leaves]
    anchor: Tensor | float = 0.0
    for index, array, x in zip(inputs, arrays, xs, strict=True):
        axes = unnamed(mesh.axis_names, array.spec)
        if axes and (x.is_floating_point() or x.is_complex()):
            x, zero = pvary([x, x.new_zeros(())], axes)
            anchor = anchor + zero.real.double()
        values[index] = like(leaves[index], [x])
    return values, anchor


def _anchored_outputs(outputs: Sequence[Any], anchor: Tensor | float, mesh: Mesh) -> Tensors:
    """Return the tensors of a device's results, replicated where they are.

    The backward of `pvary` is a collective. An output plus the anchor leads back to all inputs, so
    that every device calls it, whatever its outputs depend on.
    """
    shards: list[Tensor] = []
    for leaf in outputs:
        if not isinstance(leaf, _ARRAYS):
            continue
        spec = leaf.spec if isinstance(leaf, Sharded) else P()
        for x in shards_of(leaf):
            if x.is_floating_point() or x.is_complex():
                x = x + torch.as_tensor(anchor).to(x.dtype)
                axes = unnamed(mesh.axis_names, spec)
                x = replicated(x, axes) if axes else x
            shards.append(x)
    return tuple(shards)
