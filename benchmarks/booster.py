"""What torch's loop costs on the Booster: beside its functional step, and beside torch's own parallelism.

    python benchmarks/booster.py                              both workloads, and pipelines
    python benchmarks/booster.py compute --rounds 15          one of them: compute, communication, stages
    python benchmarks/booster.py compute --only ddp "zero 1"   plugins; ratios with bounds of 95 runs of 100

All train the same model on the same data, in turn in one run, in a new random order in each round; shown are medians of
times, and of the ratios of two times of one round.  See zero.py, which has the models and the peers.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import BATCHES, RATE, SEED, WORKLOADS, Batch, Model, Module, Step, UnitModule
from peers import ddp, ddp_zero, fsdp
from rich.console import Console
from rich.table import Table
from runners import COMPUTE, SCHEDULES, Blocks, Pipeline, torchs_of
from timing import interleaved, likely, over, paired, slowest
from torch import Tensor

import fshard as fs
from fshard.testing.processes import run_processes

PLUGINS: dict[str, Any] = {
    "ddp": fs.DDPPlugin,
    "zero 1": partial(fs.ZeroPlugin, stage=1),
    "zero 2": partial(fs.ZeroPlugin, stage=2),
    "fsdp": fs.FSDPPlugin,
}
PEERS: dict[str, tuple[str, Any]] = {
    "ddp": ("torch ddp", ddp),
    "zero 1": ("torch ddp + zero optimizer", ddp_zero),
    "zero 2": ("torch ddp + zero optimizer", ddp_zero),
    "fsdp": ("torch fully_shard", partial(fsdp, True)),
}


def optimizer(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=RATE, fused=True)


def loop(plugin: Any, model: Model, data: list[Batch], mesh: fs.Mesh) -> Step:
    """The loop that torch's users write."""
    module = Module(model, SEED)
    booster = fs.Booster(plugin=plugin(mesh=mesh))
    boosted, opt, *_ = booster.boost(module, optimizer(module))

    def step(index: int) -> Tensor:
        loss = boosted(data[index])
        booster.backward(loss, opt)
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return step


def functional(plugin: Any, model: Model, data: list[Batch], mesh: fs.Mesh) -> Step:
    """The same by the functional step."""
    module = Module(model, SEED)
    booster = fs.Booster(plugin=plugin(mesh=mesh))
    state = booster.init(module, optimizer(module), lambda loss, _: loss)
    layout = fs.Layout(mesh, fs.P("data"))
    batches = [{name: fs.from_local(x, layout) for name, x in batch.items()} for batch in data]

    def step(index: int) -> Tensor:
        nonlocal state
        state, metrics = booster.step(state, (batches[index], batches[index]["inputs"]))
        return metrics["loss"]

    return step


def measured(
    workload: str, rounds: int, plugins: list[str]
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Run in every process."""
    model = WORKLOADS[workload]
    mesh = fs.make_mesh({"data": int(os.environ["WORLD_SIZE"])}, device="cpu")
    data = [model.batch(index, dist.get_rank()) for index in range(BATCHES)]
    makes = {f"{name}: loop": partial(loop, PLUGINS[name]) for name in plugins}
    makes |= {f"{name}: functional": partial(functional, PLUGINS[name]) for name in plugins}
    makes |= dict(PEERS[name] for name in plugins)
    steps = {name: over(BATCHES, make(model, data, mesh)) for name, make in makes.items()}
    times = slowest(interleaved(steps, rounds, warm_up=3, between=gc.collect, ready=dist.barrier))
    losses: dict[str, float] = {}
    for name, step in steps.items():
        loss = step().double().reshape(1)
        dist.all_reduce(loss)
        losses[name] = loss.item() / mesh.size
    return times, losses


# -- stages -----------------------------------------------------------------------------------------------------------

KINDS = ("loop", "functional", "torch")


def row_of_blocks(pipeline: Pipeline) -> torch.nn.Sequential:
    """All blocks of all stages, which the plugin cuts as torch's stages are cut."""
    stages = range(pipeline.schedule.stages)
    return torch.nn.Sequential(
        *(Blocks([UnitModule(pipeline.unit, one)]) for k in stages for one in pipeline.params(k))
    )


def staged(pipeline: Pipeline) -> fs.Booster:
    microbatches = pipeline.task.microbatches
    return fs.Booster(
        fs.HybridParallelPlugin(
            pipeline=pipeline.n, microbatches=microbatches, schedule=pipeline.name
        )
    )


def staged_loop(pipeline: Pipeline) -> tuple[Callable[[], Any], Callable[[], list[Tensor]]]:
    """Return a step of the loop with stages, and what gives the parameters of this process's stages."""
    booster, model = staged(pipeline), row_of_blocks(pipeline)
    boosted, opt, *_ = booster.boost(model, optimizer(model))
    batch = pipeline.task.data()

    def step() -> None:
        booster.execute_pipeline(iter([batch]), boosted, F.mse_loss, opt)
        opt.step()
        opt.zero_grad()

    def learnt() -> list[Tensor]:
        found = dict(boosted.unwrap().named_parameters())
        return [found[name] for name in owned(pipeline, list(found))]

    return step, learnt


def staged_functional(pipeline: Pipeline) -> tuple[Callable[[], Any], Callable[[], list[Tensor]]]:
    """Return the same of the functional step."""
    booster, model = staged(pipeline), row_of_blocks(pipeline)
    state = booster.init(model, optimizer(model), F.mse_loss)
    batch = pipeline.task.data()

    def step() -> None:
        nonlocal state
        state, _ = booster.step(state, batch)

    def learnt() -> list[Tensor]:
        found = {name: x for tree in fs.unshard(state.params) for name, x in tree.items()}
        return [found[name] for name in owned(pipeline, list(found))]

    return step, learnt


def owned(pipeline: Pipeline, names: list[str]) -> list[str]:
    """Return the names of parameters of this process's stages, of blocks in a row."""
    blocks = [
        stage * pipeline.blocks + place
        for stage in pipeline.own
        for place in range(pipeline.blocks)
    ]
    return [name for block in blocks for name in names if name.startswith(f"{block}.")]


def staged_torch(pipeline: Pipeline) -> tuple[Callable[[], Any], Callable[[], list[Tensor]]]:
    """Return the same of torch.distributed.pipelining."""
    modules = pipeline.modules()
    run, _ = torchs_of(pipeline, modules)  # which sets gradients to None first
    params = [x for module in modules.values() for x in module.parameters()]
    opt = torch.optim.AdamW(params, lr=RATE, fused=True)

    def step() -> None:
        run()
        opt.step()

    return step, lambda: params


def measured_stages(n: int, rounds: int) -> dict[str, list[float]]:
    """Run in every process."""
    fs.make_mesh({"pipe": n}, device="cpu")
    made = {
        f"{name}: {kind}": make(Pipeline(COMPUTE, name, n))
        for name in SCHEDULES
        for kind, make in zip(KINDS, (staged_loop, staged_functional, staged_torch), strict=True)
    }
    steps = {name: step for name, (step, _) in made.items()}
    times = slowest(interleaved(steps, rounds, warm_up=3, between=gc.collect, ready=dist.barrier))
    for name in SCHEDULES:
        found = [made[f"{name}: {kind}"][1]() for kind in KINDS]
        for own in found[:2]:
            torch.testing.assert_close(own, found[2], rtol=1e-3, atol=1e-3)
    return times


def stages(console: Console, n: int, rounds: int) -> None:
    """Print what pipelines cost under the hybrid plugin, with the optimizer's step, beside torch's."""
    times = run_processes(measured_stages, n, n, rounds, timeout=3600)[0]
    table = Table(
        "schedule",
        "loop, ms",
        "x functional",
        "x torch's",
        title=f"stages: {n} processes, {rounds} rounds",
    )
    for name in SCHEDULES:
        own, *others = (times[f"{name}: {kind}"] for kind in KINDS)
        table.add_row(
            name, f"{statistics.median(own) * 1e3:.1f}", *(compared(own, other) for other in others)
        )
    console.print(table)


def compared(own: list[float], other: list[float]) -> str:
    """Return how many times as long one takes as the other, and between what that is likely to be."""
    low, high = likely(own, other)
    return f"{paired(own, other):.3f} ({low:.3f}-{high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", default=[*WORKLOADS, "stages"])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--only", nargs="+", choices=[*PLUGINS], default=[*PLUGINS], help="plugins; not of stages"
    )
    chosen = parser.parse_args()
    console = Console(width=120)
    for workload in chosen.workloads:
        if workload == "stages":
            stages(console, chosen.processes, chosen.rounds)
            continue
        times, losses = run_processes(
            measured, chosen.processes, workload, chosen.rounds, chosen.only, timeout=3600
        )[0]
        table = Table("plugin", "loop, ms", "x functional", "x torch's", "torch's", "loss")
        table.title = f"{workload}: {chosen.processes} processes, {chosen.rounds} rounds"
        for name in chosen.only:
            own, peer = times[f"{name}: loop"], PEERS[name][0]
            ratios = [compared(own, times[other]) for other in (f"{name}: functional", peer)]
            table.add_row(
                name,
                f"{statistics.median(own) * 1e3:.1f}",
                *ratios,
                peer,
                f"{losses[f'{name}: loop']:.6f}",
            )
        console.print(table)
        middle = statistics.median(losses.values())
        wrong = [
            name for name, loss in losses.items() if not abs(loss - middle) <= 1e-3 * abs(middle)
        ]
        if wrong:
            raise AssertionError(
                f"{workload}: {', '.join(wrong)} did not train what the others did: {losses}"
            )


if __name__ == "__main__":
    main()
