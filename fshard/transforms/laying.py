"""A model's tensors in their layouts; those of lazy layers are made, one layer after the other, where they are needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fshard.mesh.mesh import Mesh
from fshard.mesh.sharded import Sharded
from fshard.mesh.tree import PyTree
from fshard.pipeline.schedule import Schedule
from fshard.transforms.functionalize import refuse_hooks
from fshard.transforms.lazy import draw, fill, reserved
from fshard.transforms.rules import Rules, lay
from fshard.transforms.stage_layouts import has_stages, lay_stages

Trained = Callable[[Mapping[str, Tensor]], PyTree]
"""Freezes some of the parameters that it is given by their names."""


def lay_model(
    model: nn.Module,
    params: Mapping[str, Tensor],
    buffers: dict[str, Tensor],
    rules: Rules,
    trained: Trained,
    *,
    mesh: Mesh,
    seed: int,
) -> PyTree:
    """Lay a model's parameters out by rules; put buffers of lazy layers into `buffers`."""
    laid = lay(trained(params), rules, mesh, put=reserved)
    if mesh.runtime == "abstract":
        return laid

    def take(name: str, made: Tensor) -> None:
        if name in laid:
            fill(laid[name], made)
        else:
            buffers[name] = made.to(torch.device(mesh.device_type))

    draw(model, seed, {name for name, x in {**params, **buffers}.items() if x.is_meta}, take)
    return laid


def lay_stage_tensors(
    model: nn.Module,
    stages: Sequence[nn.Module],
    rules: Rules,
    trained: Trained,
    *,
    mesh: Mesh,
    schedule: Schedule,
    axis: str,
    seed: int,
) -> tuple[Sequence[PyTree], Sequence[PyTree]]:
    """Lay the parameters and buffers of a model's stages out, each on the devices that have the stage."""
    for stage in stages:
        refuse_hooks(stage)
    where: dict[str, Any] = {"mesh": mesh, "schedule": schedule, "axis": axis}
    params = lay_stages([trained(dict(stage.named_parameters())) for stage in stages], rules, **where, put=reserved)
    buffers = lay_stages([dict(stage.named_buffers()) for stage in stages], **where, put=reserved)
    laid: dict[str, Sharded] = {}
    for here, own, rest in zip(has_stages(**where), params, buffers, strict=True):
        laid |= {**own, **rest} if here else {}
    draw(model, seed, laid, lambda name, made: fill(laid[name], made))
    return params, buffers
