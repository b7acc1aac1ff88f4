"""Layers of experts in a model, which send tokens along an axis.

Those of transformers do so by its own experts interface: a configuration names the function that
computes the experts, and this module registers one for each choice of axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from fshard.errors import ModuleError
from fshard.experts.dispatch import moe, of_this_mesh
from fshard.experts.grouped import grouped_matmul, on_device
from fshard.experts.module import MoE
from fshard.experts.routing import Routing
from fshard.mesh.layout import P, as_axes


def expert_rules(model: nn.Module, axis: str | None) -> dict[str, P]:
    """Let a model send tokens to the devices of their experts along an axis.

    Return the rules of its leaves. They shard what the experts have by its first dim, and replicate
    all else; for ZeRO-3: `fs.fsdp(axes, within=rules)`.

        rules = fs.experts.expert_rules(model, "expert")
        apply, params, buffers = fs.functionalize(model)
        params = fs.shard_params(params, rules, mesh=mesh)

    Args:
        model: of transformers, such as Mixtral, Qwen3-MoE, DeepSeek-V3 or gpt-oss, whose
            configuration names the experts' function from now on; or with layers of
            `fs.nn.MoE(axis=axis)`. Outside of a mesh it computes as before.
        axis: that shards the experts, and the batch: `local=axis` in a step. None: each device has
            all experts; unlike transformers' functions, this one runs on shapes alone too, as
            `split_stages` does.
    """
    layers = shard_experts(model, as_axes(axis or ()))
    rules: dict[str, P] = {}
    for specs in layers.values():
        rules |= specs
    return rules | {"**": P()}


def shard_experts(
    model: nn.Module, axis: tuple[str, ...], replicated: tuple[str, ...] = ()
) -> dict[str, dict[str, P]]:
    """Let the layers of experts use one axis or none, and replicated axes: see `moe`.

    Return the paths of these layers, and the specs of their experts' leaves. The experts of
    `fs.nn.MoE` are sharded along its own axis, if it is this one. Without an axis there may be no
    layers.
    """
    layers: dict[str, dict[str, P]] = {}
    refused: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, MoE):
            module.replicated = replicated
            is_own_axis = as_axes(module.axis or ()) == axis
            axes = (*axis, *replicated) if is_own_axis else replicated
            names = [f"experts.{name}" for name in module.experts]
        elif _is_expert_layer(module):
            if not _has_known_parts(module):
                refused.append(path)
                continue
            config: Any = module.config
            config._experts_implementation = _registered(axis, replicated)
            axes = (*axis, *replicated)
            names = [name for name, _ in module.named_parameters()]
        else:
            continue
        if axes:
            prefix = f"{path}." if path else ""
            layers[path] = {f"{prefix}{name}": P(axes) for name in names}

    if refused and axis:
        raise ModuleError(
            "experts must be gated and without a norm after each; got others in "
            f"{', '.join(refused)}. Call fs.experts.moe in their forward."
        )
    if axis and not layers:
        raise ModuleError(
            f"{type(model).__name__} must have layers of experts, of a class that transformers "
            f'decorates with use_experts_implementation, or fs.nn.MoE(axis="{axis[0]}"); got none. '
            "Call fs.experts.moe in the forward of a layer of your own."
        )
    return layers


def _is_expert_layer(module: Any) -> bool:
    """Return True for a class that transformers decorates with use_experts_implementation."""
    return hasattr(module, "_is_expert_parallel")


def _has_known_parts(module: Any) -> bool:
    """Return True if `_forward` computes all that a layer of transformers does."""
    return module.has_gate and not module.has_post_expert_norm


# The function that transformers calls.


def _registered(axis: tuple[str, ...], replicated: tuple[str, ...]) -> str:
    """Return the name of an experts' function of transformers, for some axes."""
    from transformers.integrations.moe import (  # pyright: ignore[reportMissingImports]
        ALL_EXPERTS_FUNCTIONS,
    )

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
    # `moe` reads the number of experts from scores, not their values. This tensor has one element.
    scores = weights.detach().new_zeros(1, 1).expand(len(tokens), module.num_experts)
    routing = Routing(experts, weights, scores)
    axes = of_this_mesh(axis)
    expert_axis = axes[0] if axes else None
    y, _ = moe(
        tokens,
        routing,
        partial(_experts, module),
        axis=expert_axis,
        replicated=of_this_mesh(replicated),
    )
    return y.to(hidden_states.dtype).view(hidden_states.shape)


def _experts(module: Any, rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Apply this device's experts to their rows."""
    inner = module._apply_gate(_linear(module, "gate_up_proj", rows, counts))
    return _linear(module, "down_proj", inner, counts)


def _linear(module: Any, name: str, rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Multiply rows with the matrices of their experts, and add their biases."""
    weight = getattr(module, name)
    if not module.is_transposed:
        weight = weight.transpose(1, 2)
    y = grouped_matmul(rows, weight, counts)
    if not module.has_bias:
        return y
    bias = getattr(module, f"{name}_bias")
    numbers = on_device(counts, rows.device)
    return y + bias.repeat_interleave(numbers, 0, output_size=len(rows))
