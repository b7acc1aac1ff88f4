"""A plugin from DeepSpeed's configuration, the dict or JSON file of `deepspeed.initialize(config=)`.

What a plugin can express becomes its option. What else changes the training is named in one
warning, with fshard's way to write it. What changes speed alone has no effect here. Everything else
raises.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from fshard.booster.plugins import DDPPlugin, FSDPPlugin, ZeroPlugin
from fshard.transforms.options import one_of, unknown

Table = Mapping[str, Any]

SECTIONS = ("zero_optimization", "fp16", "bf16")
"""The keys of DeepSpeed's configuration that become options of a plugin."""

ADVICE = {
    "train_batch_size": "batch_size={value} of the loader, which is that of all devices",
    "train_micro_batch_size_per_gpu": (
        "batch_size of the loader: {value} times the number of devices"
    ),
    "gradient_accumulation_steps": (
        "booster.no_sync() around all of {value} backwards but the last"
    ),
    "gradient_clipping": "booster.clip_grad_norm(optimizer, {value}) before a step",
    "optimizer": "an optimizer of torch.optim for booster.boost",
    "scheduler": "a scheduler of torch, or a rate of fs.optim.schedules",
    "activation_checkpointing": "fs.remat of the blocks",
}
"""The counterparts of what no plugin can express."""

IDLE_VALUES: Table = {"gradient_accumulation_steps": 1, "gradient_clipping": 0}
"""Values of these keys that need no advice."""

SPEED_ONLY = frozenset({
    "steps_per_print", "wall_clock_breakdown", "dump_state", "flops_profiler", "tensorboard", "wandb", "csv_monitor",
    "comms_logger", "autotuning", "memory_breakdown", "aio", "zero_allow_untrusted_optimizer",
    "zero_force_ds_cpu_optimizer", "checkpoint",
})  # fmt: skip
"""Keys that do not change what is trained."""

ZERO_SPEED_ONLY = frozenset({
    "allgather_partitions", "allgather_bucket_size", "overlap_comm", "reduce_scatter", "contiguous_gradients",
    "sub_group_size", "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold", "stage3_gather_16bit_weights_on_model_save", "round_robin_gradients",
    "ignore_unused_parameters", "load_from_fp32_weights", "elastic_checkpoint", "memory_efficient_linear",
})  # fmt: skip
"""Keys of `zero_optimization` that do not change what is trained."""

MEMORIES = {"none": None, "cpu": "host", "nvme": "disk"}
"""Kinds of memory by DeepSpeed's names of devices."""


def is_deepspeed(config: Table) -> bool:
    """Return True if a configuration has a key that DeepSpeed's alone has."""
    return not config.keys().isdisjoint({*SECTIONS, *ADVICE})


def plugin_of_deepspeed(config: Table, **plugin_options: Any) -> Any:
    """Return the plugin of DeepSpeed's configuration; one error names all that has no counterpart.

    >>> zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    >>> config = {"zero_optimization": zero, "bf16": {"enabled": True}}
    >>> plugin = plugin_of_deepspeed(config)
    >>> plugin.stage, plugin.offload, plugin.precision
    (2, 'host', 'bf16')
    """
    config = _without_auto(config)
    zero = _without_auto(config.get("zero_optimization", {}))
    errors = unknown("DeepSpeed's configuration", config, [*SECTIONS, *ADVICE, *SPEED_ONLY])
    errors += _zero_errors(zero)
    if errors:
        raise ValueError(f"parallel: {'; '.join(errors)}. Leave out what has no counterpart.")

    stage = zero.get("stage", 0)
    state, params = _memory(zero, "offload_optimizer"), _memory(zero, "offload_param")
    advice = _advice(config)
    if stage == 3 and state is not None and params is None:
        advice.append(
            "offload_optimizer without offload_param: GeminiPlugin; FSDPPlugin has both on the host"
        )
    if advice:
        warnings.warn(
            "DeepSpeed's configuration has what no plugin expresses. Write for "
            f"{'; for '.join(advice)}.",
            stacklevel=3,
        )

    options = {**_precision(config), **_bucket(zero), **plugin_options}
    if stage == 0:
        return DDPPlugin(**options)
    if stage == 3:
        return FSDPPlugin(offload=params or state or False, **options)
    return ZeroPlugin(stage=stage, offload=state, **options)


def _advice(config: Table) -> list[str]:
    """List the keys that no plugin expresses, each with fshard's way to write it."""
    advice = list[str]()
    for key, value in config.items():
        is_idle = value == IDLE_VALUES.get(key)
        if key in ADVICE and not is_idle:
            advice.append(f"{key}: {ADVICE[key].format(value=value)}")
    if _has_own_scale(config.get("fp16", {})):
        advice.append("the loss scale of fp16: fs.optim.loss_scaled(opt, ...) for booster.boost")
    return advice


def _without_auto(table: Table) -> dict[str, Any]:
    """Leave out the values that the trainer of transformers fills in."""
    return {key: x for key, x in table.items() if x != "auto" and x is not None}


def _zero_errors(zero: Table) -> list[str]:
    """List what is invalid, or has no counterpart, in the section of ZeRO."""
    legal = ["stage", "offload_optimizer", "offload_param", "cpu_offload", "reduce_bucket_size"]
    errors = unknown("zero_optimization", zero, [*legal, *ZERO_SPEED_ONLY])
    errors += one_of("the stage of zero_optimization", zero.get("stage", 0), 0, 1, 2, 3)
    for name in ("offload_optimizer", "offload_param"):
        device = zero.get(name, {}).get("device", "none")
        errors += one_of(f"the device of {name}", device, *MEMORIES)
    if zero.get("stage", 0) != 3 and "offload_param" in zero:
        errors.append("offload_param must have stage 3")
    return errors


def _memory(zero: Table, name: str) -> Any:
    """Return the kind of memory of one part of the state."""
    if name == "offload_optimizer" and zero.get("cpu_offload"):
        return "host"
    return MEMORIES[zero.get(name, {}).get("device", "none")]


def _precision(config: Table) -> dict[str, Any]:
    """Return the option for the dtype of computation."""
    enabled = list[str]()
    for name in ("fp16", "bf16"):
        section = _without_auto(config.get(name, {}))
        if section.get("enabled"):
            enabled.append(name)
    if len(enabled) > 1:
        raise ValueError("parallel: fp16 or bf16 must be enabled, not both. Choose one.")
    return {"precision": enabled[0]} if enabled else {}


def _bucket(zero: Table) -> dict[str, Any]:
    """Return the option for the size of a bucket, of which DeepSpeed counts elements, here of 32 bits."""
    if "reduce_bucket_size" not in zero:
        return {}
    return {"options": {"bucket": 4 * int(zero["reduce_bucket_size"])}}


def _has_own_scale(fp16: Table) -> bool:
    """Return True if constants of the loss scale are given."""
    fields = {
        "loss_scale",
        "initial_scale_power",
        "loss_scale_window",
        "hysteresis",
        "min_loss_scale",
    }
    section = _without_auto(fp16)
    has_constants = any([section.get(key) for key in fields])
    return bool(fp16.get("enabled")) and has_constants
