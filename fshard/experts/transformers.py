"""Models of transformers with experts: their layers send tokens along an axis, by transformers' own experts interface."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fshard.errors import ModuleError
from fshard.experts.dispatch import moe
from fshard.experts.grouped import grouped_matmul
from fshard.experts.routing import Routing
from fshard.mesh.layout import P
from fshard.mesh.spmd.scope import here


def expert_rules(model: nn.Module, axis: str) -> dict[str, P]:
    """Let a transformers model send tokens to the devices of their experts along an axis; return the rules of its leaves.

    Args:
        model: such as Mixtral, Qwen3-MoE, DeepSeek-V3 or gpt-oss; its configuration names the experts' function from now on.
            Outside of a mesh it computes as before.
        axis: that shards the experts, and the batch: `local=axis` in a step.

    The rules shard what the experts have by its first dim, and replicate all else; for ZeRO-3: `fs.fsdp(axes, within=rules)`.

        rules = fs.experts.expert_rules(model, "expert")
        apply, params, buffers = fs.functionalize(model)
        params = fs.shard_params(params, rules, mesh=mesh)
    """
    layers: dict[str, Any] = {
        name: module for name, module in model.named_modules() if hasattr(module, "_is_expert_parallel")
    }
    if not layers:
        raise ModuleError(
            f"expert_rules: {type(model).__name__} must have layers of experts, of a class that transformers decorates with "
            'use_experts_implementation, or fs.nn.MoE(axis="expert"); got none. For a layer of your own call fs.experts.moe in '
            "its forward."
        )
    if errors := [name for name, module in layers.items() if not module.has_gate or module.has_post_expert_norm]:
        raise ModuleError(
            f"expert_rules: experts must be gated and without a norm after each; got others in {', '.join(errors)}. Call "
            "fs.experts.moe in their forward."
        )
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # pyright: ignore[reportMissingImports]

    name = f"fshard_{axis}"
    ALL_EXPERTS_FUNCTIONS.register(name, partial(_forward, axis=axis))
    for module in layers.values():
        module.config._experts_implementation = name
    return {f"{path}.*": P(axis) for path in layers} | {"**": P()}


def _forward(module: Any, hidden_states: Tensor, experts: Tensor, weights: Tensor, *, axis: str) -> Tensor:
    """Return the results of a layer's experts: the forward that transformers calls."""
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    scores = weights.detach().new_zeros(1, 1).expand(len(tokens), module.num_experts)  # only their number is used
    y, _ = moe(tokens, Routing(experts, weights, scores), partial(_experts, module), axis=axis if here() else None)
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
