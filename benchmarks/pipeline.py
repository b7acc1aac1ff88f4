"""What a pipelined step costs: fshard's interpreter, torch.distributed.pipelining, and what the schedule itself allows.

    python benchmarks/pipeline.py                                  everything, with 2 and 4 processes
    python benchmarks/pipeline.py compute --rounds 31 --processes 2   some parts: compute, latency, memory, interpreter
    python benchmarks/pipeline.py latency --gloo                   ours over gloo, as torch's, not by direct links

Both run the same blocks (runners.py, models.py) by schedules of the same name, in turn in one run: in every round each makes
one step, in a new random order.  The slowest process counts.  Shown are medians over the rounds, of times and of the ratios
of two times of one round: see zero.py.  All gradients must agree in the end.

The bound: `simulate` of our schedule where F, I and W take the time of a block in the same round, by autograd alone, without
messages; at least all work divided by the cores of the machine, since four processes share two.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from runners import COMPUTE, LATENCY, SCHEDULES, Pipeline, bound, fshard, torchs
from timing import Times, interleaved, paired, slowest

import fshard as fs
from fshard.testing.processes import run_processes

MIB = 1 << 20
TASKS = {"compute": COMPUTE, "latency": LATENCY}
BARS = {"compute": "1.0", "latency": "0.7"}
RUNNERS = {"ours": fshard, "torch": torchs}
ROUNDS = {("compute", 2): 15, ("compute", 4): 9, ("latency", 2): 61, ("latency", 4): 41}

# -- time ----------------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """What was measured: of each runner and schedule, of each schedule's bound, and how many processors there are."""

    times: Times
    bounds: Times
    cores: int


def timed_process(name: str, n: int, rounds: int) -> Found:
    """Run in every process: all runners and schedules in turn, round after round; all processes begin each step together."""
    mesh = fs.make_mesh({"pipe": n}, device="cpu")
    pipelines = [Pipeline(TASKS[name], schedule, n) for schedule in SCHEDULES]
    made = {
        f"{who} {one.name}": make(one, mesh) for one in pipelines for who, make in RUNNERS.items()
    }
    cores, bounds = len(os.sched_getaffinity(0)), list[list[float]]()

    def between() -> None:
        gc.collect()
        bounds.append(bound(pipelines, cores))

    steps = {who: step for who, (step, _) in made.items()}
    times = slowest(interleaved(steps, rounds, warm_up=3, between=between, ready=dist.barrier))
    for one in pipelines:
        ours, theirs = (made[f"{who} {one.name}"][1]() for who in RUNNERS)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    columns = zip(*bounds[3:], strict=True)
    return Found(times, dict(zip(SCHEDULES, map(list, columns), strict=True)), cores)


def timed(console: Console, name: str, n: int, rounds: int, variables: dict[str, str]) -> None:
    """Print how long a step takes, against torch's and against the bound."""
    found = run_processes(timed_process, n, name, n, rounds, environment=variables, timeout=3600)[0]
    links = "gloo" if variables else "direct links"
    title = f"{name}: {n} processes on {found.cores} cores, {rounds} rounds, ours by {links}"
    table = Table(
        "schedule", "ours ms", "torch ms", "bound ms", f"x torch (bar {BARS[name]})", title=title
    )
    for column in ("x bound (bar 1.05)" if name == "compute" else "x bound", "torch x bound"):
        table.add_column(column)
    for schedule, best in found.bounds.items():
        ours, theirs = (found.times[f"{who} {schedule}"] for who in RUNNERS)
        milliseconds = [f"{median(row) * 1e3:.1f}" for row in (ours, theirs, best)]
        ratios = [f"{paired(*pair):.2f}" for pair in ((ours, theirs), (ours, best), (theirs, best))]
        table.add_row(schedule, *milliseconds, *ratios)
    console.print(table)


# -- memory --------------------------------------------------------------------------------------------------------


def memory_process(who: str, schedule: str, n: int) -> int:
    """Run in every process: return the peak of resident memory in a step, in bytes more than before the model."""
    mesh = fs.make_mesh({"pipe": n}, device="cpu")
    dist.barrier()
    gc.collect()
    before = _resident("VmRSS")
    step, _ = RUNNERS[who](Pipeline(TASKS["compute"], schedule, n), mesh)
    step()  # whatever is made once
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    for _ in range(3):
        step()
    return _resident("VmHWM") - before


def _resident(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) * 1024


def memory(console: Console, n: int, variables: dict[str, str]) -> None:
    """Print the peak memory of each runner and schedule, in processes of its own."""
    # The C library must return memory, else the peak is that of its caches; it reads this setting at the start of a process.
    os.environ.update(MALLOC_MMAP_THRESHOLD_=str(64 << 10), MALLOC_ARENA_MAX="2")
    table = Table(
        "schedule",
        "ours",
        "torch",
        "bar",
        title=f"peak MiB of each process, {n} processes, compute",
    )
    for schedule in SCHEDULES:
        rows = {
            who: run_processes(
                memory_process, n, who, schedule, n, environment=variables, fresh=True
            )
            for who in RUNNERS
        }
        shown = {
            who: " ".join(f"{peak / MIB:.0f}" for peak in peaks) for who, peaks in rows.items()
        }
        table.add_row(schedule, shown["ours"], shown["torch"], "no higher")
    console.print(table)
    for variable in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_ARENA_MAX"):
        del os.environ[variable]


# -- the interpreter alone -----------------------------------------------------------------------------------------


def interpreter_process(n: int, runtime: str, rounds: int) -> dict[str, float]:
    """Return the microseconds of an action, by schedule, of stages that do nothing: on one device, so without messages."""
    mesh = fs.make_mesh({"pipe": n}, runtime=runtime, device="cpu")
    found: dict[str, float] = {}
    for name, count in {"gpipe": 1, "1f1b": 1, "bfs": 4, "zbv": 2}.items():
        microbatches, stages = 32, n * count
        schedule = fs.pipeline_schedule(name, stages=stages, microbatches=microbatches)
        if n == 1 and name == "bfs":
            schedule = fs.pipeline_schedule(
                name, stages=stages, microbatches=microbatches, devices=1
            )
        step = fs.pipeline.pipelined([nothing] * stages, schedule, nothing_to_minimise, mesh=mesh)
        batch = [torch.zeros(1)] * microbatches
        params = [torch.ones(1)] * stages
        times: list[float] = []
        for _ in range(rounds):
            began = time.perf_counter()
            step(params, batch)
            times.append(time.perf_counter() - began)
        found[name] = median(times) / sum(map(len, schedule.rows)) * n * 1e6
    return found


def nothing(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x + w


def nothing_to_minimise(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y.sum()


def interpreter(console: Console, rounds: int) -> None:
    """Print what the interpreter itself costs."""
    rows = {
        "one device, no messages, virtual": interpreter_process(1, "virtual", rounds),
        "one process, no messages": run_processes(interpreter_process, 1, 1, "process", rounds)[0],
    }
    table = Table(
        "us for an action (bar 100)", *next(iter(rows.values())), title="stages that only add"
    )
    for name, row in rows.items():
        table.add_row(name, *(f"{value:.0f}" for value in row.values()))
    console.print(table)


PARTS = [*TASKS, "memory", "interpreter"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=PARTS)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, help="of each part that is timed")
    parser.add_argument(
        "--gloo", action="store_true", help="ours over gloo too, not by direct links"
    )
    chosen = parser.parse_args()
    if unknown := set(chosen.parts) - set(PARTS):
        parser.error(f"{', '.join(sorted(unknown))}: none of {', '.join(PARTS)}")
    console = Console(width=120)
    variables = {"FSHARD_DIRECT": "0"} if chosen.gloo else {}
    for each in chosen.parts:
        if each == "interpreter":
            interpreter(console, chosen.rounds or 21)
        for n in chosen.processes if each != "interpreter" else ():
            if each == "memory":
                memory(console, n, variables)
            else:
                timed(console, each, n, chosen.rounds or ROUNDS.get((each, n), 15), variables)


if __name__ == "__main__":
    main()
