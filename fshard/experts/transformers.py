"""Layers of experts in a model, which send tokens along an axis: those of transformers by its own experts interface."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fshard.errors import ModuleError
from fshard.experts.dispatch import moe, of_this_mesh
from fshard.experts.grouped import grouped_matmul
from fshard.experts.module import MoE
from fshard.experts.routing import Routing
from fshard.mesh.layout import P, as_axes


def expert_rules(model: nn.Module, axis: str | None) -> dict[str, P]:
    """Let a model send tokens to the devices of their experts along an axis; return the rules of its leaves.

    Args:
        model: of transformers, such as Mixtral, Qwen3-MoE, DeepSeek-V3 or gpt-oss, whose configuration names the experts'
            function from now on; or with layers of `fs.nn.MoE(axis=axis)`. Outside of a mesh it computes as before.
        axis: that shards the experts, and the batch: `local=axis` in a step. None: each device has all experts; unlike
            transformers' functions, this one runs on shapes alone too, as `split_stages` does.

    The rules shard what the experts have by its first dim, and replicate all else; for ZeRO-3: `fs.fsdp(axes, within=rules)`.

        rules = fs.experts.expert_rules(model, "expert")
        apply, params, buffers = fs.functionalize(model)
        params = fs.shard_params(params, rules, mesh=mesh)
    """
    layers = shard_experts(model, as_axes(axis or ()))
    return {name: spec for leaves in layers.values() for name, spec in leaves.items()} | {"**": P()}


def shard_experts(
    model: nn.Module, axis: tuple[str, ...], replicated: tuple[str, ...] = ()
) -> dict[str, dict[str, P]]:
    """Let the layers of experts use one axis or none, and replicated axes: see `moe`.

    Return the paths of these layers, and the specs of their experts' leaves. The experts of `fs.nn.MoE` are sharded along its
    own axis, if it is this one. Without an axis there may be no layers.
    """
    layers, refused = dict[str, dict[str, P]](), list[str]()
    for path, module in model.named_modules():
        shown: Any = module
        if isinstance(module, MoE):
            module.replicated = replicated
            if axes := (*(axis if as_axes(module.axis or ()) == axis else ()), *replicated):
                layers[path] = {
                    f"{path}.experts.{name}".lstrip("."): P(axes) for name in module.experts
                }
        elif hasattr(module, "_is_expert_parallel"):
            if not shown.has_gate or shown.has_post_expert_norm:
                refused.append(path)
                continue
            shown.config._experts_implementation = _registered(axis, replicated)
            if axes := (*axis, *replicated):
                layers[path] = {f"{path}.{name}": P(axes) for name, _ in module.named_parameters()}
    if refused and axis:
        raise ModuleError(
            f"experts must be gated and without a norm after each; got others in {', '.join(refused)}. Call fs.experts.moe in "
            "their forward."
        )
    if axis and not layers:
        raise ModuleError(
            f"{type(model).__name__} must have layers of experts, of a class that transformers decorates with "
            f'use_experts_implementation, or fs.nn.MoE(axis="{axis[0]}"); got none. Call fs.experts.moe in the '
            "forward of a layer of your own."
        )
    return layers


def _registered(axis: tuple[str, ...], replicated: tuple[str, ...]) -> str:
    """Return the name of an experts' function of transformers, for some axes."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # pyright: ignore[reportMissingImports]

    name = "_".join(["fshard", *axis, "and", *replicated])
    ALL_EXPERTS_FUNCTIONS.register(name, partial(_forward, axis=axis, replicated=replicated))
    return name


def _forward(
    module: Any,
    hidden_states: Tensor,
    experts: Tensor,
    weights: Tensor,
    *,
    axis: tuple[str, ...],
    replicated: tuple[str, ...],
) -> Tensor:
    """Return the results of a layer's experts: the forward that transformers calls."""
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    scores = (
        weights.detach().new_zeros(1, 1).expand(len(tokens), module.num_experts)
    )  # only their number is used
    axes: Any = {
        "axis": next(iter(of_this_mesh(axis)), None),
        "replicated": of_this_mesh(replicated),
    }
    y, _ = moe(tokens, Routing(experts, weights, scores), partial(_experts, module), **axes)
    return y.to(hidden_states.dtype).view(hidden_states.shape)


def _experts(module: Any, rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Apply this device's experts to their rows."""
    inner = module._apply_gate(_linear(module, "gate_up_proj", rows, counts))
    return _linear(module, "down_proj", inner, counts)


def _linear(module: Any, name: str, rows: Tensor, counts: Sequence[int]) -> Tensor:
    weight = getattr(module, name)
    y = grouped_matmul(rows, weight if module.is_transposed else weight.transpose(1, 2), counts)
    if not module.has_bias:
        return y
    numbers = torch.tensor(counts, device=rows.device)
    return y + getattr(module, f"{name}_bias").repeat_interleave(numbers, 0, output_size=len(rows))
