"""fshard's words, and the names of other libraries that mean them. The tables of `docs/migrating.md` have all of these."""

_WORDS = {
    "fs.DDPPlugin()": ("TorchDDPPlugin", "DistributedDataParallel"),
    "fs.ZeroPlugin(stage=1 or 2)": ("LowLevelZeroPlugin",),
    "fs.FSDPPlugin()": ("TorchFSDPPlugin",),
    'fs.FSDPPlugin(unit="blocks[*]")': ("fully_shard",),
    'offload="host"': ("cpu_offload", "offload_policy", "CPUOffloadPolicy"),
    "tensor=2, sample=batch": ("tp_size",),
    "pipeline=2": ("pp_size",),
    "sequence=2": ("sp_size",),
    "microbatches=4": ("num_microbatches", "microbatch_size"),
    "booster.clip_grad_norm(optimizer, max_norm)": ("max_norm",),
    "fs.parallel(dict(pipeline=2, ...))": ("a Python file",),
    "fs.lazy(GPT, config)": ("LazyInitContext",),
    'fs.export(path, params, to="hf", shard_size=)': ("shard", "size_per_shard"),
    "fs.optim.adamw": ("HybridAdam", "FusedAdam", "CPUAdam"),
    "fs.optim.schedules.warmup_cosine": ("CosineAnnealingWarmupLR",),
    "fs.use_mesh(mesh)": ("set_mesh",),
    'fs.make_mesh(..., runtime="abstract")': ("AbstractMesh", "eval_shape"),
    'fs.P("data", None)': ("PartitionSpec",),
    "fs.Layout(mesh, spec)": ("NamedSharding",),
    'fs.Layout(mesh, spec, "host")': ("memory_kind", "with_memory_kind"),
    "fs.array.constrain(x, P(...))": ("with_sharding_constraint", "out_sharding"),
    "fs.array.explicit()": ("AxisType",),
    'fs.pvary(params, "data")': ("pcast", "reduced"),
    "fs.shard_map": ("smap",),
    "fs.all_to_all": ("ragged_all_to_all",),
    "fs.ledger()": ("roofline",),
    "fs.psum, fs.psum_scatter": ("all_reduce", "reduce_scatter"),
    "fs.device_put(x, fs.Layout(mesh, spec))": ("distribute_tensor",),
    "fs.make_mesh": ("init_device_mesh", "launch_from_torch"),
    "the loader that `boost` returns": ("DistributedSampler",),
}
NAMES = {name: word for word, names in _WORDS.items() for name in names}


def hint(name: str) -> str:
    """Return fshard's word for a name of another library, as the end of an error; "" if there is none."""
    return f" Use {NAMES[name]}." if name in NAMES else ""
