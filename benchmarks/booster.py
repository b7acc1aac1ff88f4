"""What torch's loop costs on the Booster: beside its functional step, and beside torch's own parallelism.

    python benchmarks/booster.py                              both workloads
    python benchmarks/booster.py compute --rounds 15          one of them

All train the same model on the same data, in turn in one run, in an order drawn anew for each round; shown are medians of
times, and of the ratios of two times of one round.  See zero.py, which has the models and the peers.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from models import BATCHES, RATE, SEED, WORKLOADS, Batch, Model, Module, Step
from peers import ddp, ddp_zero, fsdp
from rich.console import Console
from rich.table import Table
from timing import interleaved, over, paired, slowest
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


def measured(workload: str, rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Run in every process."""
    model = WORKLOADS[workload]
    mesh = fs.make_mesh({"data": int(os.environ["WORLD_SIZE"])}, device="cpu")
    data = [model.batch(index, dist.get_rank()) for index in range(BATCHES)]
    makes = {f"{name}: loop": partial(loop, plugin) for name, plugin in PLUGINS.items()}
    makes |= {f"{name}: functional": partial(functional, plugin) for name, plugin in PLUGINS.items()}
    makes |= dict(PEERS.values())
    steps = {name: over(BATCHES, make(model, data, mesh)) for name, make in makes.items()}
    times = slowest(interleaved(steps, rounds, warm_up=3, between=gc.collect, ready=dist.barrier))
    losses: dict[str, float] = {}
    for name, step in steps.items():
        loss = step().double().reshape(1)
        dist.all_reduce(loss)
        losses[name] = loss.item() / mesh.size
    return times, losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=[*WORKLOADS])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    chosen = parser.parse_args()
    console = Console(width=120)
    for workload in chosen.workloads:
        times, losses = run_processes(measured, chosen.processes, workload, chosen.rounds, timeout=3600)[0]
        table = Table("plugin", "loop, ms", "x functional", "x torch's", "torch's", "loss")
        table.title = f"{workload}: {chosen.processes} processes, {chosen.rounds} rounds"
        for name in PLUGINS:
            own, peer = times[f"{name}: loop"], PEERS[name][0]
            ratios = [f"{paired(own, times[other]):.2f}" for other in (f"{name}: functional", peer)]
            table.add_row(name, f"{statistics.median(own) * 1e3:.1f}", *ratios, peer, f"{losses[f'{name}: loop']:.6f}")
        console.print(table)
        middle = statistics.median(losses.values())
        wrong = [name for name, loss in losses.items() if not abs(loss - middle) <= 1e-3 * abs(middle)]
        if wrong:
            raise AssertionError(f"{workload}: {', '.join(wrong)} did not train what the others did: {losses}")


if __name__ == "__main__":
    main()
