"""The gradient function within a transform of `torch.func`, as in `jvp(fs.grad(loss_fn, ...), ...)`.

The engine takes its gradient from detached shards, of which a transform sees nothing. Here the mean loss is one
differentiable program, whose gradient torch.func takes: more memory and communication, and any further derivative.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fshard.mesh.collectives.api import psum, pvary
from fshard.mesh.collectives.autograd import Tensors
from fshard.mesh.layout import Layout, Mesh, PyTree, flatten, paths_of, unflatten
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.reshard.device_put import reshard, unshard
from fshard.mesh.spmd.outer_autograd import run_mapped
from fshard.mesh.spmd.scope import loss_scope, require
from fshard.optim.leaves import like, trainable, without_static
from fshard.transforms.array_checks import validate_mesh
from fshard.transforms.batch import placed
from fshard.transforms.options import StepOptions
from fshard.transforms.patterns import chosen
from fshard.transforms.reproducible.randomness import drawn_key, keyed_random
from fshard.transforms.slices import one_loss, weight_of


def differentiable_gradient(
    options: StepOptions,
    mesh: Mesh,
    specs: PyTree,
    params: PyTree,
    batch: PyTree,
) -> tuple[Tensor, PyTree]:
    """Return the mean loss and its gradient, as functions of the parameters that can be differentiated again."""
    params, restore = without_static(params)
    leaves, structure = flatten(params)
    validate_mesh(leaves, structure, mesh)
    parts, key, dtype = placed(batch, specs, mesh), drawn_key(), options.compute
    fixed = chosen(options.frozen, [*paths_of(structure)], "frozen")
    trained = [place for place, x in enumerate(leaves) if trainable(x) and not fixed[place]]

    slices = [parts.slices(place, 1)[0] for place in range(len(parts.devices))]
    tensors = [place for place, x in enumerate(slices[0].leaves) if isinstance(x, Tensor)]

    def on_device(device: int, xs: Tensors) -> Tensors:
        """Return the mean loss of all devices, each of which takes its part of the batch."""
        place = parts.devices.index(device) if len(parts.devices) > 1 else 0
        part, own = slices[place], [*slices[place].leaves]
        for index, x in zip(tensors, xs[len(leaves) :], strict=True):
            own[index] = x
        samples = parts.tree(own, dtype)
        varying = [pvary(x if dtype is None else x.to(dtype), mesh.axis_names) for x in xs[: len(leaves)]]
        number = require("a loss function").group(parts.axes, "value_and_grad").index if parts.axes else 0
        with keyed_random(key, 0, number), loss_scope(mesh.axis_names):
            loss = one_loss(options, options.loss_fn(restore(unflatten(structure, varying)), samples), part)
        weight = weight_of(float(part.rows) if options.weight is None else options.weight(samples)).to(loss.device)
        total = psum(weight, mesh.axis_names)
        return (psum(loss * weight, mesh.axis_names) / total,)

    def mean_loss(chosen: list[Tensors]) -> tuple[Tensor, Tensor]:
        given = [*leaves]
        for place, shards in zip(trained, chosen, strict=True):
            given[place] = like(leaves[place], shards)
        columns = [reshard(x, Layout(mesh)).shards for x in given]
        columns += [tuple(part.leaves[place] for part in slices) for place in tensors]
        (losses,) = run_mapped(mesh, on_device, columns, mapped=mesh.axis_names)
        loss = unshard(Sharded((), Layout(mesh), losses))
        return loss, loss.detach()

    found, loss = torch.func.grad(mean_loss, has_aux=True)([leaves[place].shards for place in trained])
    grads: list[Any] = [None] * len(leaves)
    for place, shards in zip(trained, found, strict=True):
        grads[place] = reshard(like(leaves[place], shards), options.gradients(leaves[place].layout))
    return loss, unflatten(structure, grads)
