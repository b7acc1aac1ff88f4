"""A model's tensors and its optimizer in the layouts of a plugin, which has its mesh: see `Plugin.on_mesh`."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from fshard.booster.plugins import Plugin
from fshard.mesh.layout import Layout, PyTree
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.reshard.device_put import device_put
from fshard.optim.contract import Optimizer, Update
from fshard.optim.leaves import Leaf, Leaves, trainable
from fshard.optim.partition import Partitioned, partition_optimizer
from fshard.optim.scaling import loss_scaled
from fshard.optim.torch_instances import OptimizerSource
from fshard.transforms.module.functionalize import module_function, refuse_hooks
from fshard.transforms.module.lazy import draw, fill, reserved
from fshard.transforms.module.replica import give_up_memory
from fshard.transforms.shard_params import apply_rules
from fshard.transforms.stages.plan import has_stages, place_stages


def shard_model(
    plugin: Plugin, model: nn.Module, source: OptimizerSource, *, in_place: bool = False
) -> tuple[Any, PyTree, PyTree]:
    """Return a model as a function, its sharded parameters, and its buffers; each a list for stages, which run as they are.

    Lazy layers are built one at a time. A model that runs `in_place` gives up its memory.
    """
    mesh, run, stages = plugin.default_mesh(), None, plugin.stages_of(model)
    if plugin.in_stages():
        for stage in stages:
            refuse_hooks(stage)
        run, options = tuple(stages), plugin.gradient_options()
        where: Any = {name: options[name] for name in ("mesh", "schedule", "axis")}
        trained = [source.trained(dict(stage.named_parameters())) for stage in stages]
        params = place_stages(trained, plugin.rules(mesh), **where, put=reserved)
        buffers = place_stages([dict(stage.named_buffers()) for stage in stages], **where, put=reserved)
        trees = [tree for own in zip(has_stages(**where), params, buffers, strict=True) if own[0] for tree in own[1:]]
    else:
        synchronised = plugin.axes(mesh) if plugin.sync_batchnorm else None
        how: Any = {"buffers": plugin.buffers, "sync_batchnorm": synchronised}
        run, own, buffers = module_function(model, **how, in_place=in_place)
        params = apply_rules(source.trained(own), plugin.rules(mesh), mesh, put=reserved)
        buffers = {name: reserved(x, Layout(mesh)) if x.is_meta else x for name, x in buffers.items()}
        trees = [params, buffers] if mesh.runtime != "abstract" else []
    tensors: dict[str, Any] = {name: x for tree in trees for name, x in tree.items()}
    draw(model, plugin.seed, tensors, lambda name, made: fill(tensors[name], made))
    if in_place:
        give_up_memory([model, *stages], torch.device(mesh.device_type))
    return run, params, buffers


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
        is_unused = grad is None and isinstance(x, Sharded) and trainable(x)
        return device_put(torch.zeros(x.shape, dtype=x.dtype), opt.gradients(x.layout)) if is_unused else grad

    def after(update: Update) -> Update:
        def run(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
            at = Leaves.of(params)
            return update(at.mapped(filled, at.beside(grads, "grads")), state, params)

        return run

    return opt._replace(update=after(opt.update), step=None if opt.step is None else after(opt.step))
