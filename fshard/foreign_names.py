"""Names of other libraries, and fshard's word for each. The tables of `docs/migrating.md` have all of them."""

NAMES = {
    "LowLevelZeroPlugin": "fs.ZeroPlugin(stage=1)",
    "GeminiPlugin": "fs.FSDPPlugin()",
    "TorchFSDPPlugin": "fs.FSDPPlugin()",
    "TorchDDPPlugin": "fs.DDPPlugin()",
    "LazyInitContext": "fs.lazy(GPT, config)",
    "tp_size": "tensor=2, sample=batch",
    "pp_size": "pipeline=2",
    "sp_size": "sequence=2",
    "num_microbatches": "microbatches=4",
    "max_norm": "booster.clip_grad_norm(optimizer, max_norm)",
    "shard": 'fs.export(path, params, to="hf", shard_size=)',
    "size_per_shard": 'fs.export(path, params, to="hf", shard_size=)',
    "a Python file": "fs.parallel(dict(pipeline=2, ...))",
    "HybridAdam": "fs.optim.adamw",
    "CosineAnnealingWarmupLR": "fs.optim.schedules.warmup_cosine",
    "fully_shard": "fs.FSDPPlugin(unit=)",
    "DistributedDataParallel": "fs.DDPPlugin()",
    "NamedSharding": "fs.Layout(mesh, spec)",
    "PartitionSpec": "fs.P",
    "with_sharding_constraint": "fs.array.constrain(x, P(...))",
    "out_sharding": "fs.array.constrain(x, P(...))",
    "set_mesh": "fs.use_mesh(mesh)",
    "AxisType": "fs.array.explicit()",
    "pcast": 'fs.pvary(params, "data")',
    "reduced": 'fs.pvary(params, "data")',
    "smap": "fs.shard_map",
    "memory_kind": 'fs.Layout(mesh, spec, "host")',
    "ragged_all_to_all": "fs.all_to_all",
    "AbstractMesh": 'fs.make_mesh(..., runtime="abstract")',
    "eval_shape": 'fs.make_mesh(..., runtime="abstract")',
    "roofline": "fs.ledger()",
}


def hint(name: str) -> str:
    """Return fshard's word for a name of another library, as the end of an error; "" if there is none."""
    return f" Use {NAMES[name]}." if name in NAMES else ""
