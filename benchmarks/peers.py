"""The same training by others: torch's own data parallelism, DeepSpeed, JAX."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from models import BETAS, DECAY, EPSILON, RATE, SEED, Batch, Model, Module, Step
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import fshard as fs
from fshard import P


def loop(module: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> Step:
    """The usual training step."""

    def step(index: int) -> Tensor:
        loss = module(data[index])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def repeated(train: Any, params: Any, state: Any, data: list[Batch], mesh: fs.Mesh) -> Step:
    """Return fshard's step of an index, which keeps parameters and state."""
    layout = fs.Layout(mesh, P(mesh.axis_names))
    batches = [{name: fs.from_local(x, layout) for name, x in batch.items()} for batch in data]

    def step(index: int) -> Tensor:
        nonlocal params, state
        params, state, metrics = train(params, state, batches[index])
        return metrics["loss"]

    return step


def ddp(model: Model, data: list[Batch], mesh: fs.Mesh) -> Step:
    module = data_parallel(model)
    return loop(module, AdamW(module.parameters(), lr=RATE, fused=True), data)


def ddp_zero(model: Model, data: list[Batch], mesh: fs.Mesh) -> Step:
    from torch.distributed.optim import (
        ZeroRedundancyOptimizer,
    )  # whose import warns of torch.jit.script

    module = data_parallel(model)
    optimizer = ZeroRedundancyOptimizer(
        module.parameters(), AdamW, parameters_as_bucket_view=True, lr=RATE, fused=True
    )
    return loop(module, optimizer, data)


def data_parallel(model: Model, **options: Any) -> nn.Module:
    return DistributedDataParallel(
        Module(model, SEED), gradient_as_bucket_view=True, static_graph=True, **options
    )


def fsdp(
    reshard: bool,
    model: Model,
    data: list[Batch],
    mesh: fs.Mesh,
    policy: MixedPrecisionPolicy | None = None,
    offload: OffloadPolicy | None = None,
) -> Step:
    module, policies = (
        Module(model, SEED),
        (policy or MixedPrecisionPolicy(), offload or OffloadPolicy()),
    )
    options: dict[str, Any] = dict(zip(("mp_policy", "offload_policy"), policies, strict=True))
    options |= {"mesh": fs.mesh.to_device_mesh(mesh), "reshard_after_forward": reshard}
    for name, unit in zip(model.units, module.units, strict=True):
        if name.startswith("blocks."):
            fully_shard(unit, **options)
    fully_shard(module, **options)
    return loop(module, AdamW(module.parameters(), lr=RATE, fused=True), data)


def deepspeed(stage: int, model: Model, data: list[Batch], mesh: fs.Mesh) -> Step:
    """DeepSpeed over the same gloo group, with torch's fused AdamW."""
    import deepspeed as ds

    module = Module(model, SEED)
    config = {
        "train_micro_batch_size_per_gpu": len(data[0]["inputs"]),
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # else 1.0
    }
    optimizer = AdamW(module.parameters(), lr=RATE, fused=True)
    engine, *_ = ds.initialize(
        model=module, optimizer=optimizer, config=config, dist_init_required=False
    )

    def step(index: int) -> Tensor:
        loss = engine(data[index])
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def jax_devices(sharded: bool, model: Model, data: list[Batch], mesh: fs.Mesh) -> Step:
    """JAX with a host device for each process, all in process 0 (the others wait): data parallel, or sharded at rest."""
    n = mesh.size
    if dist.get_rank() > 0:
        return lambda index: torch.full((), torch.nan)
    flags = f"--xla_force_host_platform_device_count={n} --xla_cpu_multi_thread_eigen=false"
    os.environ.update(JAX_PLATFORMS="cpu", XLA_FLAGS=flags)
    import jax
    import jax.numpy as jnp

    devices = jax.sharding.Mesh(jax.devices(), ("data",))

    def put(x: Tensor, axis: str | None) -> Any:
        even = axis is not None and x.shape[0] % n == 0
        spec = jax.sharding.PartitionSpec(axis) if even else jax.sharding.PartitionSpec()
        return jax.device_put(x.numpy(), jax.sharding.NamedSharding(devices, spec))

    batches = [[model.batch(index, process) for process in range(n)] for index in range(len(data))]
    batches = [
        {name: put(torch.cat([one[name] for one in parts]), "data") for name in parts[0]}
        for parts in batches
    ]  # all processes' parts, one after the other
    params = {name: put(x, "data" if sharded else None) for name, x in model.init(SEED).items()}
    first, second = jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params)
    layouts = jax.tree.map(lambda x: x.sharding, (params, first, second))

    def train(params: Any, first: Any, second: Any, count: Any, batch: Any) -> Any:
        value, gradient = jax.value_and_grad(model.loss_in_jax)(params, batch)
        first = jax.tree.map(lambda m, g: BETAS[0] * m + (1 - BETAS[0]) * g, first, gradient)
        second = jax.tree.map(lambda v, g: BETAS[1] * v + (1 - BETAS[1]) * g * g, second, gradient)

        def move(p: Any, m: Any, v: Any) -> Any:
            root = jnp.sqrt(v / (1 - BETAS[1] ** count)) + EPSILON
            return p * (1 - RATE * DECAY) - RATE / (1 - BETAS[0] ** count) * m / root

        moved = jax.tree.map(move, params, first, second)
        return *jax.lax.with_sharding_constraint((moved, first, second), layouts), value

    compiled = jax.jit(train, donate_argnums=(0, 1, 2))
    state, count = (params, first, second), 0

    def step(index: int) -> Tensor:
        nonlocal state, count
        count += 1
        *state, value = jax.block_until_ready(compiled(*state, float(count), batches[index]))
        return torch.tensor(float(value))

    return step
