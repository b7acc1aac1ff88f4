"""fshard's words, and the names of other libraries that mean them.

The tables of `docs/migrating.md` have all of these.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

_WORDS = {
    "fs.DDPPlugin()": ("TorchDDPPlugin", "DistributedDataParallel"),
    "fs.ZeroPlugin(stage=1 or 2)": ("LowLevelZeroPlugin",),
    "fs.FSDPPlugin()": (
        "TorchFSDPPlugin",
        "FullyShardedDataParallel",
        "FullyShardedDataParallelPlugin",
    ),
    "fs.Booster(plugin)": ("Accelerator",),
    'fs.FSDPPlugin(unit="blocks[*]")': ("fully_shard", "auto_wrap_policy"),
    "fs.FSDPPlugin(reshard_after_forward=False)": ("sharding_strategy",),
    "mesh=mesh": ("device_mesh",),
    'precision="bf16"': ("mixed_precision", "mixed_precision_policy", "mp_policy", "bf16", "fp16"),
    'options={"bucket": bytes}': (
        "bucket_cap_mb",
        "reduce_bucket_size",
        "reduce_bucket_size_in_m",
        "zero_bucket_size_in_m",
    ),
    'options={"prefetch": 1}': (
        "backward_prefetch",
        "forward_prefetch",
        "stage3_prefetch_bucket_size",
    ),
    'unused="skip"': ("find_unused_parameters",),
    "fs.parallel(config)": ("zero_optimization", "hf_ds_config", "DeepSpeedPlugin"),
    "booster.no_sync()": ("gradient_accumulation_steps", "gradient_accumulation_plugin"),
    "fs.optim.loss_scaled": ("initial_scale", "growth_factor", "backoff_factor", "growth_interval"),
    'sequence_mode="megatron"': ("sequence_parallelism_mode",),
    "chunks=2": ("num_model_chunks",),
    'schedule="1f1b"': ("pp_style",),
    "experts=2": ("ep_size",),
    'offload="host"': ("cpu_offload", "offload_policy", "CPUOffloadPolicy"),
    "tensor=2, sample=batch": ("tp_size",),
    "pipeline=2": ("pp_size",),
    "sequence=2": ("sp_size", "enable_sequence_parallelism"),
    "microbatches=4": ("num_microbatches", "microbatch_size"),
    "booster.clip_grad_norm(optimizer, max_norm)": ("max_norm", "gradient_clipping"),
    "fs.parallel(dict(pipeline=2, ...))": ("a Python file",),
    "fs.Parallelism": ("ModelPlan",),
    "fs.lazy(GPT, config)": ("LazyInitContext", "param_init_fn"),
    'fs.export(path, params, to="hf", shard_size=)': ("shard", "size_per_shard"),
    "fs.optim.adamw": ("HybridAdam", "FusedAdam", "CPUAdam"),
    "fs.optim.schedules.warmup_cosine": ("CosineAnnealingWarmupLR",),
    "fs.use_mesh(mesh)": ("set_mesh",),
    'fs.make_mesh(..., runtime="abstract")': ("AbstractMesh", "eval_shape"),
    'fs.P("data", None)': ("PartitionSpec",),
    "fs.Layout(mesh, spec)": ("NamedSharding",),
    'fs.Layout(mesh, spec, "host")': ("memory_kind", "with_memory_kind"),
    "fs.array.constrain(x, P(...))": ("with_sharding_constraint", "out_sharding"),
    'fs.array.explicit("model")': ("AxisType",),
    'fs.pvary(params, "data")': ("pcast", "reduced"),
    "fs.shard_map": ("smap",),
    "fs.all_to_all": ("ragged_all_to_all",),
    "fs.plan.cost(...)": ("roofline",),
    "fs.psum, fs.psum_scatter": ("all_reduce", "reduce_scatter"),
    "fs.device_put(x, fs.Layout(mesh, spec))": ("distribute_tensor",),
    "fs.make_mesh": ("init_device_mesh", "launch_from_torch"),
    "the loader that `boost` returns": ("DistributedSampler",),
}

NAMES = {name: word for word, names in _WORDS.items() for name in names}
"""fshard's word by the name of another library."""


def hint(name: str) -> str:
    """Return the end of an error: fshard's word for a name of another library; "" if none."""
    return f" Use {NAMES[name]}." if name in NAMES else ""


Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def renamed_keywords(**names: str) -> Callable[[Decorated], Decorated]:
    """Let a function or a class raise for its old keywords, and name what to write instead.

    >>> @renamed_keywords(size="length")
    ... def zeros(length): ...
    >>> zeros(size=3)
    Traceback (most recent call last):
    TypeError: zeros: the keyword size= has another name. Write length.
    """

    def decorate(target: Any) -> Any:
        is_class = isinstance(target, type)
        function = target.__init__ if is_class else target

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            for old in names.keys() & kwargs.keys():
                raise TypeError(
                    f"{target.__name__}: the keyword {old}= has another name. Write {names[old]}."
                )
            return function(*args, **kwargs)

        if not is_class:
            return run
        target.__init__ = run
        return target

    return decorate
