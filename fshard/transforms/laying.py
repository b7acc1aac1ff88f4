"""A model's structure, and its tensors as they lie: those of lazy layers are made, one after the other, where they are needed.

model ── bare(model)          its structure, without memory
      ── whole(model)         its parameters laid by rules, and its buffers, which all devices have
      ── in_stages(model)     those of each stage on the devices that have it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fshard.mesh.mesh import Mesh
from fshard.mesh.sharded import Sharded
from fshard.mesh.tree import PyTree
from fshard.pipeline.schedule import Schedule
from fshard.transforms.functionalize import functionalize, refuse_hooks
from fshard.transforms.lazy import build_attributes, draw, fill, reserved
from fshard.transforms.rules import Rules, lay
from fshard.transforms.skeleton import skeleton
from fshard.transforms.stage_layouts import has_stages, lay_stages

Trained = Callable[[Mapping[str, Tensor]], PyTree]
"""Freezes some of the parameters that it is given by their names."""


def bare(model: nn.Module, *, mesh: Mesh, seed: int) -> nn.Module:
    """Return a model's structure: see `skeleton`."""
    near = _near(mesh)
    if near is not None:
        build_attributes(model, seed)
    return skeleton(model, near)


def whole(model: nn.Module, rules: Rules, trained: Trained, *, mesh: Mesh, seed: int) -> tuple[PyTree, PyTree]:
    """Return a model's parameters as they lie, and its buffers."""
    _, params, buffers = functionalize(model)
    laid, near = lay(trained(params), rules, mesh, put=reserved), _near(mesh)

    def take(name: str, made: Tensor) -> None:
        if name in laid:
            fill(laid[name], made)
        else:
            buffers[name] = made.to(near)

    if near is not None:
        draw(model, seed, {*laid, *buffers}, take)
    return laid, buffers


def in_stages(
    model: nn.Module,
    structure: nn.Module,
    stages: Sequence[nn.Module],
    rules: Rules,
    trained: Trained,
    *,
    mesh: Mesh,
    schedule: Schedule,
    axis: str,
    seed: int,
) -> tuple[list[nn.Module], Sequence[PyTree], Sequence[PyTree]]:
    """Return the structure of a model's stages, whose own is known, and their parameters and buffers as they lie."""
    for stage in stages:
        refuse_hooks(stage)
    where: dict[str, Any] = {"mesh": mesh, "schedule": schedule, "axis": axis}
    params = lay_stages([trained(dict(stage.named_parameters())) for stage in stages], rules, **where, put=reserved)
    buffers = lay_stages([dict(stage.named_buffers()) for stage in stages], **where, put=reserved)
    laid: dict[str, Sharded] = {}
    for here, own, rest in zip(has_stages(**where), params, buffers, strict=True):
        laid |= {**own, **rest} if here else {}
    draw(model, seed, laid, lambda name, made: fill(laid[name], made))
    return [skeleton(stage, _near(mesh)) for stage in stages], params, buffers


def _near(mesh: Mesh) -> torch.device | None:
    """Return where a device's tensors lie; None where none has memory."""
    return None if mesh.runtime == "abstract" else torch.device(mesh.device_type)
