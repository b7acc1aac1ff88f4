"""Elastic runs: what copies of each step cost, and how soon the others go on after a process is killed.

    python benchmarks/elastic.py                                 everything
    python benchmarks/elastic.py copies --processes 4 --rounds 15
    python benchmarks/elastic.py recovery --kills 10 --load 20     beside 20 busy processes
    python benchmarks/elastic.py --gloo                            over gloo, not by direct links

copies: ZeRO-2 and ZeRO-3 of the models of models.py, AdamW.  Three variants of each train in turn, in every round in a new
random order, four steps at a time: alone, with `run.save` after each step, and after every fourth.  The slowest process
counts.  Shown are medians over the rounds of the time of a step, and of its ratio to the step alone in the same round.
Beside it is the ratio of the bytes that a device sends, which the ratio of times is near where only bytes cost.

recovery: processes train a small model, the parent kills one with SIGKILL at a random moment.  Shown are the seconds from
there to the end of the next step that each of the others has finished, of the slowest one.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import pickle
import random
import signal
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from models import BATCHES, RATE, SEED, WORKLOADS, Batch, Mlp, Model
from rich.console import Console
from rich.table import Table
from timing import interleaved, paired, slowest
from torch.distributed import TCPStore

import fshard as fs
from fshard import P

MODELS = {**WORKLOADS, "small": Mlp(narrow=32, wide=64, depth=2, rows=4).model()}
WIDTH, LAYERS = 64, 4
SPACINGS = {"alone": 0, "every 1": 1, "every 4": 4}
"""After how many steps each variant saves; 0: never."""
STEPS = 4
"""Steps of a variant in each round: one saves in any four."""
WARM_UP = 3

# -- processes -----------------------------------------------------------------------------------------------------


@contextmanager
def processes(
    n: int, main: Callable[..., None], *args: Any, environment: dict[str, str]
) -> Generator[list[Any]]:
    """Start processes as a launcher does, and kill in the end what is left of them."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    started: list[Any] = []
    for rank in range(n):
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(n),
            "LOCAL_WORLD_SIZE": str(n),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1",
        }
        process = context.Process(
            target=with_variables, args=({**variables, **environment}, main, *args), daemon=True
        )
        process.start()
        started.append(process)
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.join()


def with_variables(variables: dict[str, str], main: Callable[..., None], *args: Any) -> None:
    """Be a process: call its function with variables of the environment."""
    os.environ.update(variables)
    torch.set_num_threads(1)
    main(*args)


def make_mesh(devices: Any) -> fs.Mesh:
    return fs.make_mesh({"data": len(devices)}, devices=devices)


# -- copies --------------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """The measurements of one variant: seconds of each round, and bytes that a device sends in a step."""

    times: list[float]
    sent: float
    copied: float


def trained(
    run: Any, stage: int, model: Model, data: list[Batch], spacing: int, numbers: Iterator[int]
) -> Callable[[], None]:
    """Return a function that makes a few steps, of which some are saved under the next numbers."""
    mesh = run.mesh
    params = fs.shard_params(model.init(SEED), fs.fsdp("data") if stage == 3 else P(), mesh=mesh)
    opt = fs.partition_optimizer(fs.optim.adamw(RATE), mesh=mesh, axis="data", stage=stage)
    step = fs.train_step(model.loss, opt, mesh=mesh, batch=P("data"), donate=True)
    layout = fs.Layout(mesh, P("data"))
    batches = [{name: fs.from_local(x, layout) for name, x in batch.items()} for batch in data]
    kept: dict[str, Any] = {"params": params, "state": opt.init(params), "steps": 0}

    def steps() -> None:
        for _ in range(STEPS):
            batch = batches[kept["steps"] % BATCHES]
            kept["params"], kept["state"], _ = step(kept["params"], kept["state"], batch)
            kept["steps"] += 1
            if spacing and kept["steps"] % spacing == 0:
                run.save(next(numbers), kept)

    return steps


def copies_process(workload: str, stage: int, rounds: int, path: Path) -> None:
    """Run in every process: all variants in turn; the first device writes what was found."""

    @fs.elastic(make_mesh)
    def compare(run: Any) -> None:
        model = MODELS[workload]
        data = [model.batch(index, dist.get_rank()) for index in range(BATCHES)]
        numbers = count(1)
        calls: dict[str, Callable[[], None]] = {}
        for name, spacing in SPACINGS.items():
            calls[name] = trained(run, stage, model, data, spacing, numbers)
        times = slowest(
            interleaved(calls, rounds, warm_up=WARM_UP, between=gc.collect, ready=dist.barrier)
        )
        found: dict[str, Found] = {}
        for name, call in calls.items():
            with fs.ledger() as comm:
                call()
            copied = float(comm.bytes(collective="copy"))
            sent = float(comm.bytes()) - copied
            found[name] = Found([x / STEPS for x in times[name]], sent / STEPS, copied / STEPS)
        if dist.get_rank() == 0:
            path.write_bytes(pickle.dumps(found))

    compare()


def times_of_copies(
    workload: str, stage: int, n: int, rounds: int, variables: dict[str, str]
) -> dict[str, Found]:
    """Run all variants in processes; return what was found of each."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found")
        args = (workload, stage, rounds, path)
        with processes(n, copies_process, *args, environment=variables) as started:
            for process in started:
                process.join()
                if process.exitcode:
                    raise RuntimeError(f"a process ended with code {process.exitcode}")
        return pickle.loads(path.read_bytes())


def copies(
    console: Console, workload: str, stage: int, n: int, rounds: int, variables: dict[str, str]
) -> None:
    """Print the time of a step with copies beside that of the step alone."""
    found = times_of_copies(workload, stage, n, rounds, variables)
    title = f"copies: {workload}, ZeRO-{stage}, {n} processes, {rounds} rounds"
    table = Table("variant", "ms", "x alone", "x bytes alone", "MB sent", "MB copied", title=title)
    alone = found["alone"]
    for name, one in found.items():
        table.add_row(
            name,
            f"{1e3 * median(one.times):.2f}",
            f"{paired(one.times, alone.times):.3f}",
            f"{(one.sent + one.copied) / alone.sent:.3f}",
            f"{one.sent / 1e6:.2f}",
            f"{one.copied / 1e6:.2f}",
        )
    console.print(table)


# -- recovery ------------------------------------------------------------------------------------------------------


def loss_of(params: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the mean square of the output of an MLP."""
    for layer in range(LAYERS):
        x = torch.relu(x @ params[f"w{layer}"])
    return x.square().mean()


def recovery_process(log: Path) -> None:
    """Run in every process: train until killed, and log each finished step."""

    @fs.elastic(make_mesh)
    def train(run: Any) -> None:
        torch.manual_seed(SEED)
        params = {f"w{layer}": torch.randn(WIDTH, WIDTH) / 8 for layer in range(LAYERS)}
        params = fs.shard_params(params, fs.fsdp("data"), mesh=run.mesh)
        opt = fs.partition_optimizer(fs.optim.adamw(RATE), mesh=run.mesh, axis="data", stage=3)
        step = fs.train_step(loss_of, opt, mesh=run.mesh, batch=P("data"), donate=True)
        kept: dict[str, Any] = {"params": params, "state": opt.init(params), "steps": 0}
        if run.latest is not None:
            kept = run.restore(kept)
        batch = torch.randn(60, WIDTH)
        while True:
            kept["params"], kept["state"], metrics = step(kept["params"], kept["state"], batch)
            float(metrics["loss"])
            row = {"devices": run.mesh.size, "at": time.monotonic(), "step": kept["steps"]}
            with (log / f"{os.environ['RANK']}.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            kept["steps"] += 1
            run.save(kept["steps"], kept)

    train()


def finished(log: Path, rank: int, devices: int) -> list[dict[str, Any]]:
    """Return the steps that a process has finished on a number of devices."""
    path = log / f"{rank}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return [row for row in rows if row["devices"] == devices]


def wait_for(log: Path, ranks: list[int], devices: int, count: int, seconds: float) -> None:
    """Wait until processes have finished some steps on a number of devices."""
    deadline = time.monotonic() + seconds
    while not all(len(finished(log, rank, devices)) >= count for rank in ranks):
        if time.monotonic() > deadline:
            raise RuntimeError(f"after {seconds:.0f} s, no step of {devices} devices is finished")
        time.sleep(0.02)


def seconds_to_next_step(n: int, turn: int, variables: dict[str, str], busy: int) -> float:
    """Kill one of the processes of a run; return the seconds until all others have made a step."""
    draw = random.Random(turn)
    with (
        tempfile.TemporaryDirectory() as folder,
        processes(n, recovery_process, Path(folder), environment=variables) as started,
    ):
        log = Path(folder)
        wait_for(log, [*range(n)], n, 5, 120)
        with load(busy):
            time.sleep(draw.uniform(0.5, 1.0))
            victim = draw.randrange(n)
            others = [rank for rank in range(n) if rank != victim]
            killed = time.monotonic()
            os.kill(started[victim].pid, signal.SIGKILL)
            wait_for(log, others, n - 1, 1, 120)
        return max(finished(log, rank, n - 1)[0]["at"] for rank in others) - killed


@contextmanager
def load(count: int) -> Generator[None]:
    """Keep processors busy with some processes."""
    context = multiprocessing.get_context("spawn")
    spinning = [context.Process(target=spin, daemon=True) for _ in range(count)]
    for process in spinning:
        process.start()
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.join()


def spin() -> None:
    while True:
        pass


def recovery(console: Console, n: int, kills: int, busy: int, variables: dict[str, str]) -> None:
    """Print the seconds from the death of a process to the next step of the others."""
    links = "gloo" if variables else "direct links"
    title = f"recovery: {n} processes, {kills} kills, {links}, load {busy}"
    times = [seconds_to_next_step(n, turn, variables, busy) for turn in range(kills)]
    table = Table("seconds", "least", "median", "most", title=title)
    table.add_row(
        "to the next step", f"{min(times):.2f}", f"{median(times):.2f}", f"{max(times):.2f}"
    )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ["copies", "recovery"]
    parser.add_argument("parts", nargs="*", default=parts)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--load", type=int, default=0, help="busy processes beside a recovery")
    parser.add_argument("--workloads", nargs="+", default=[*WORKLOADS], choices=[*MODELS])
    parser.add_argument("--gloo", action="store_true", help="over gloo, not by direct links")
    chosen = parser.parse_args()
    if unknown := set(chosen.parts) - set(parts):
        parser.error(f"{', '.join(sorted(unknown))}: none of {', '.join(parts)}")

    console = Console(width=120)
    variables = {"FSHARD_DIRECT": "0"} if chosen.gloo else {}
    if "copies" in chosen.parts:
        for workload in chosen.workloads:
            for stage in (2, 3):
                copies(console, workload, stage, chosen.processes, chosen.rounds, variables)
    if "recovery" in chosen.parts:
        recovery(console, chosen.processes, chosen.kills, chosen.load, variables)


if __name__ == "__main__":
    main()
