"""Measure the cost of memory kinds, between two processes of one machine.

    python benchmarks/memory.py                    state, then transfers (about two minutes)
    python benchmarks/memory.py state --rounds 9   one table

state       a ZeRO-2 step with AdamW whose state is elsewhere, of the step with all on the device
transfers   a ZeRO-3 gradient with parameters or activations on the host, transfers slowed to T, in parts of the time F
            of one with all on the device, in the same rounds: of max(F, T); and without prefetch, of F + T. T is of both
            directions, which one thread copies: parameters to the device, gradients from it. The bar is 1.15 max(F, T) and
            the transfers of one unit of the eight

FSHARD_DISK names the folder on disk; the default is the current one.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from timing import interleaved, slowest

import fshard as fs
from fshard import P
from fshard.memory.transfers import stress
from fshard.nn import checkpoint_name, save_names
from fshard.testing.processes import run_processes

LAYERS, WIDTH, ROWS = 8, 1024, 256
PLACES: dict[str, tuple[str, str]] = {
    "device, on device": ("device", "device"),
    "host, on host": ("host", "host"),
    "host, on device": ("host", "device"),
    "disk, on device": ("disk", "device"),
    "disk, on host": ("disk", "host"),
}
FACTORS = 0.5, 1, 2
BARS: dict[str, object] = {
    "host, on host": 1.05,
    "host, on device": 1.15,
    "disk, on device": 1.25,
    "disk, on host": 1.25,
}
for name in ("parameters", "activations"):
    BARS |= {
        f"{name}, T = {factor} F": round(1.15 + factor / LAYERS / max(1, factor), 2)
        for factor in FACTORS
    }
BARS |= {f"parameters, without prefetch, T = {factor} F": ">= 0.9" for factor in FACTORS}


def block(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return a layer, whose inner result has a name."""
    return x + checkpoint_name(torch.tanh(x @ w), "inner") @ w.T


def loss_fn(params: Any, x: torch.Tensor, policy: Any = None) -> torch.Tensor:
    """Return the loss of some layers, recomputed by a policy."""
    for w in params:
        x = (block if policy is None else fs.remat(block, policy))(w, x)
    return x.square().mean()


def parameters(rules: Any, mesh: fs.Mesh, memory: Any = "device") -> Any:
    """Return the weights of the layers."""
    weights = [
        torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(i)) / 64
        for i in range(LAYERS)
    ]
    return fs.shard_params(weights, rules, mesh=mesh, memory=memory)


def batch() -> torch.Tensor:
    """Return the batch of both processes."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(99))


def stepped(memory: Any, update_on: Any) -> Callable[[], object]:
    """Return a donated ZeRO-2 step of this process, with its state in a memory."""
    mesh, opt = fs.make_mesh({"data": 2}), fs.optim.adamw(1e-4)
    opt = fs.partition_optimizer(
        opt, mesh=mesh, axis="data", stage=2, state_memory=memory, update_on=update_on
    )
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), donate=True)
    params = parameters(P(), mesh)
    trees, x = (params, opt.init(params)), batch()

    def run() -> None:
        nonlocal trees
        *trees, _ = step(*trees, x)

    return run


def gradient(memory: Any = "device", policy: Any = None, **options: Any) -> Callable[[], object]:
    """Return a ZeRO-3 gradient of this process."""
    mesh, x = fs.make_mesh({"data": 2}), batch()
    params = parameters(fs.fsdp("data", unit="[*]"), mesh, memory)
    run = fs.value_and_grad(partial(loss_fn, policy=policy), mesh=mesh, batch=P("data"), **options)
    return lambda: run(params, x)


def state(rounds: int) -> dict[str, float]:
    """Return the time of each place of state, of that on the device."""
    torch.set_num_threads(1)
    times = slowest(interleaved({name: stepped(*place) for name, place in PLACES.items()}, rounds))
    return {name: median(row) / median(times["device, on device"]) for name, row in times.items()}


def transfers(rounds: int) -> dict[str, float]:
    """Return times with slowed transfers, of the longer of computation and transfers, or of their sum."""
    torch.set_num_threads(1)
    ratios = dict[str, float]()
    programs: dict[str, list[dict[str, Any]]] = {  # with all on the device, and not
        "parameters": [{}, {"memory": "host"}],
        "parameters, without prefetch": [{}, {"memory": "host", "prefetch": 0}],
        "activations": [{"policy": save_names("inner")}, {"policy": save_names(offload="inner")}],
    }
    for name, (resident, offloaded) in programs.items():
        base, run = gradient(**resident), gradient(**offloaded)
        with fs.ledger() as comm:
            run()
        size = comm.moved("host", "device") + comm.moved("device", "host")
        first = median(slowest(interleaved({"": base}, rounds))[""])
        calls = {"": base} | {
            str(factor): slowed(run, size / (factor * first)) for factor in FACTORS
        }
        times = {key: median(row) for key, row in slowest(interleaved(calls, rounds)).items()}
        for factor in FACTORS:
            parts = times[""], factor * first
            ratios[f"{name}, T = {factor} F"] = times[str(factor)] / (
                sum(parts) if "without" in name else max(parts)
            )
    return ratios


def slowed(run: Callable[[], object], rate: float) -> Callable[[], object]:
    """Return a call with transfers slowed to a rate."""

    def call() -> object:
        with stress(rate=rate):
            return run()

    return call


def in_process(name: str, rounds: int, folder: str) -> dict[str, float]:
    """Return the rows of a table in one process."""
    os.environ["FSHARD_DISK"] = folder
    return {"state": state, "transfers": transfers}[name](rounds)


TITLES = {
    "state": "state, of a step with all on the device",
    "transfers": "slowed transfers, of max(F, T); without prefetch of F + T",
}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "tables", nargs="*", default=[*TITLES], metavar="table", help=", ".join(TITLES)
    )
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    folder = os.environ.get("FSHARD_DISK", str(Path.cwd()))
    for name in args.tables:
        rows, *_ = run_processes(in_process, 2, name, args.rounds, folder, timeout=900)
        table = Table("", "ratio", "bar", title=f"2 processes: {TITLES[name]}")
        for row, ratio in rows.items():
            table.add_row(row, f"{ratio:.2f}", str(BARS.get(row, "")))
        Console().print(table)


if __name__ == "__main__":
    main()
