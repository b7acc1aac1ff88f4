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
from fshard.randomness import drawn_key, keyed_random
from fshard.transforms.array_checks import validate_mesh
from fshard.transforms.batch import shard_batch
from fshard.transforms.options import StepOptions
from fshard.transforms.patterns import chosen
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
    sharded_batch, key, dtype = shard_batch(batch, specs, mesh), drawn_key(), options.compute
    fixed = chosen(options.frozen, [*paths_of(structure)], "frozen")
    trained = [index for index, x in enumerate(leaves) if trainable(x) and not fixed[index]]

    slices = [sharded_batch.slices(index, 1)[0] for index in range(len(sharded_batch.devices))]
    tensors = [index for index, x in enumerate(slices[0].leaves) if isinstance(x, Tensor)]

    def on_device(device: int, xs: Tensors) -> Tensors:
        """Return the mean loss of all devices, each of which takes its part of the batch."""
        device_index = sharded_batch.devices.index(device) if len(sharded_batch.devices) > 1 else 0
        shard, batch_leaves = slices[device_index], [*slices[device_index].leaves]
        for index, x in zip(tensors, xs[len(leaves) :], strict=True):
            batch_leaves[index] = x
        samples = sharded_batch.tree(batch_leaves, dtype)
        varying = [
            pvary(x if dtype is None else x.to(dtype), mesh.axis_names) for x in xs[: len(leaves)]
        ]
        axes = sharded_batch.axes
        number = require("a loss function").group(axes, "value_and_grad").index if axes else 0
        with keyed_random(key, 0, number), loss_scope(mesh.axis_names):
            loss = one_loss(
                options, options.loss_fn(restore(unflatten(structure, varying)), samples), shard
            )
        weight = weight_of(
            float(shard.rows) if options.weight is None else options.weight(samples)
        ).to(loss.device)
        total = psum(weight, mesh.axis_names)
        return (psum(loss * weight, mesh.axis_names) / total,)

    def mean_loss(chosen: list[Tensors]) -> tuple[Tensor, Tensor]:
        xs = [*leaves]
        for index, shards in zip(trained, chosen, strict=True):
            xs[index] = like(leaves[index], shards)
        columns = [reshard(x, Layout(mesh)).shards for x in xs]
        columns += [tuple(shard.leaves[index] for shard in slices) for index in tensors]
        (losses,) = run_mapped(mesh, on_device, columns, mapped=mesh.axis_names)
        loss = unshard(Sharded((), Layout(mesh), losses))
        return loss, loss.detach()

    gradients, loss = torch.func.grad(mean_loss, has_aux=True)(
        [leaves[index].shards for index in trained]
    )
    grads: list[Any] = [None] * len(leaves)
    for index, shards in zip(trained, gradients, strict=True):
        grads[index] = reshard(like(leaves[index], shards), options.gradients(leaves[index].layout))
    return loss, unflatten(structure, grads)
