"""A model's tensors and its optimizer in the layouts of a plugin, which has its mesh: see `Plugin.on_mesh`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from fshard.booster.plugins import Plugin
from fshard.mesh.layout import PyTree
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.spmd.run import local_devices
from fshard.optim.contract import Optimizer, Update
from fshard.optim.leaves import Leaf, Leaves, trainable
from fshard.optim.partition import Partitioned, partition_optimizer
from fshard.optim.scaling import loss_scaled
from fshard.optim.torch_instances import OptimizerSource
from fshard.transforms.module.functionalize import Apply, functionalize, functionalize_in_place, refuse_hooks
from fshard.transforms.module.lazy import draw, fill, reserved
from fshard.transforms.shard_params import apply_rules
from fshard.transforms.stages.plan import has_stages, place_stages


def shard_model(
    plugin: Plugin, model: nn.Module, source: OptimizerSource, *, in_place: bool = False
) -> tuple[Apply, PyTree, PyTree]:
    """Return a model as a function, its sharded parameters, and its buffers; lazy layers are built one at a time."""
    mesh = plugin.default_mesh()
    make = functionalize_in_place if in_place else functionalize
    synchronised = plugin.axes(mesh) if plugin.sync_batchnorm else None
    apply, params, buffers = make(model, buffers=plugin.buffers, sync_batchnorm=synchronised)
    sharded = apply_rules(source.trained(params), plugin.rules(mesh), mesh, put=reserved)

    def take(name: str, made: Tensor) -> None:
        if name in sharded:
            fill(sharded[name], made)
        else:
            buffers[name] = made.to(torch.device(mesh.device_type))

    lazy = {name for name, x in {**params, **buffers}.items() if x.is_meta}
    draw(model, plugin.seed, lazy if mesh.runtime != "abstract" else (), take)
    return apply, sharded, buffers


def shard_stages_of(
    plugin: Plugin, model: nn.Module, stages: Sequence[nn.Module], source: OptimizerSource
) -> tuple[Sequence[PyTree], Sequence[PyTree]]:
    """Return the sharded parameters and buffers of a model's stages, each on the devices that have the stage."""
    for stage in stages:
        refuse_hooks(stage)
    mesh, options = plugin.default_mesh(), plugin.gradient_options()
    where: dict[str, Any] = {"mesh": mesh, "schedule": options["schedule"], "axis": options["axis"]}
    trained = [source.trained(dict(stage.named_parameters())) for stage in stages]
    params = place_stages(trained, plugin.rules(mesh), **where, put=reserved)
    buffers = place_stages([dict(stage.named_buffers()) for stage in stages], **where, put=reserved)
    sharded: dict[str, Sharded] = {}
    for is_here, own, rest in zip(has_stages(**where), params, buffers, strict=True):
        sharded |= {**own, **rest} if is_here else {}
    draw(model, plugin.seed, sharded, lambda name, made: fill(sharded[name], made))
    return params, buffers


def partitioned(plugin: Plugin, source: OptimizerSource) -> Callable[[], Partitioned]:
    """Return a function that shards an optimizer's state and work, with its current options."""
    mesh = plugin.default_mesh()
    zero_axes = plugin.zero_axes(mesh)  # none: nothing is sharded
    where: Any = {"mesh": mesh, "axis": zero_axes or mesh.axis_names, "stage": plugin.zero() if zero_axes else 0}

    @lru_cache(maxsize=1)
    def partition(opt: Optimizer) -> Partitioned:
        opt = loss_scaled(opt) if plugin.precision == "fp16" and opt.loss_scale is None else opt
        found = partition_optimizer(opt, **where)
        return found if plugin.unused == "skip" else _with_zeros(found)

    return lambda: partition(source.now())


def _with_zeros(opt: Partitioned) -> Partitioned:
    """Return an optimizer that takes zeros for gradients that are None."""

    def filled(x: Leaf, grad: Leaf) -> Leaf:
        if grad is not None or not isinstance(x, Sharded) or not trainable(x):
            return grad
        layout, near = opt.gradients(x.layout), x.shards[0]
        shapes = [layout.local_shape(x.shape, device) for device in local_devices(x.mesh)]
        return Sharded(x.shape, layout, tuple(near.new_zeros(shape) for shape in shapes))

    def after(update: Update) -> Update:
        def run(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
            at = Leaves.of(params)
            return update(at.mapped(filled, at.beside(grads, "grads")), state, params)

        return run

    return opt._replace(update=after(opt.update), step=None if opt.step is None else after(opt.step))
