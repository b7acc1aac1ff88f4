"""The time of a training step: fshard's ZeRO stages, torch's data parallelism, and hand-written floors.

    python benchmarks/zero.py                                   everything
    python benchmarks/zero.py compute --rounds 15 --processes 2    one part: compute, communication, memory
    python benchmarks/zero.py communication --only ddp "floor 0"    variants whose names begin like that
    python benchmarks/zero.py --gloo                            ours over gloo, as torch's, not by direct links
    python benchmarks/zero.py --only fully_shard "deepspeed 3"      it replaces torch's functions, so it runs only if named

All variants (floors.py, peers.py) train the same model (models.py) on the same data with AdamW, in turn in one run: in
every round each makes one step, in a new random order.  The slowest process counts.  Shown are medians over the rounds, of
times and of the ratios of two times of one round: the pace of the machine changes from one second to the next, by up to
two, and only such ratios mean something.  All losses must agree in the end: a variant that trains something else is a bug.

fshard uses direct links (processes of one machine read each other's memory), torch gloo over loopback.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from floors import floor_0, floor_2, floor_3, local
from models import BATCHES, RATE, SEED, WORKLOADS, Batch, Model, Step
from peers import ddp, ddp_zero, deepspeed, fsdp, jax_devices, repeated
from rich.console import Console
from rich.table import Table
from timing import interleaved, over, paired, slowest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fshard as fs
from fshard import P
from fshard.testing.processes import run_processes

WARM_UP, TOLERANCE = 3, 1e-3
MIB = 1 << 20

# -- the variants --------------------------------------------------------------------------------------------------


def fshard(
    stage: int, options: dict[str, Any], model: Model, data: list[Batch], mesh: fs.Mesh
) -> Step:
    """What a user writes."""
    rules = fs.fsdp("data") if stage == 3 else P()
    params = fs.shard_params(model.init(SEED), rules, mesh=mesh)
    opt = fs.partition_optimizer(fs.optim.adamw(RATE), mesh=mesh, axis="data", stage=stage)
    train = fs.train_step(model.loss, opt, mesh=mesh, batch=P("data"), donate=True, **options)
    return repeated(train, params, opt.init(params), data, mesh)


class Held(NamedTuple):
    """The bytes a process holds per parameter, by ZeRO's formula: some full, some divided among all."""

    full: int
    divided: int

    def bytes(self, n: int) -> float:
        """Return them for n processes."""
        return self.full + self.divided / n


# parameter, gradient and AdamW's two moments, in float32
REPLICATED, STAGE_1, STAGE_2, STAGE_3 = Held(16, 0), Held(8, 8), Held(4, 12), Held(0, 16)


@dataclass(frozen=True)
class Variant:
    """How it is made, what ZeRO's formula gives it, and what it is held to."""

    make: Callable[[Model, list[Batch], fs.Mesh], Step]
    held: Held
    peer: str | None = None
    floor: str | None = None
    needs: str | None = None  # a package
    alone: bool = False  # it trains on one process's data only, so its loss is another
    meddles: bool = (
        False  # it patches torch for the entire process, so all others would be measured with it
    )


KEEP: dict[str, Any] = {"reshard_after_forward": False}
VARIANTS = {
    "no communication": Variant(local, REPLICATED, alone=True),
    "ddp": Variant(ddp, REPLICATED),
    "ddp + zero optimizer": Variant(ddp_zero, STAGE_1),
    "fully_shard": Variant(partial(fsdp, True), STAGE_3),
    "fully_shard keep": Variant(partial(fsdp, False), STAGE_2),
    "floor 0": Variant(floor_0, REPLICATED, "ddp"),
    "floor 2": Variant(floor_2, STAGE_2, "ddp + zero optimizer"),
    "floor 3": Variant(partial(floor_3, True), STAGE_3, "fully_shard"),
    "floor 3 keep": Variant(partial(floor_3, False), STAGE_2, "fully_shard keep"),
    "fshard 0": Variant(partial(fshard, 0, {}), REPLICATED, "ddp", "floor 0"),
    "fshard 1": Variant(partial(fshard, 1, {}), STAGE_1, "ddp + zero optimizer", "floor 2"),
    "fshard 2": Variant(partial(fshard, 2, {}), STAGE_2, "ddp + zero optimizer", "floor 2"),
    "fshard 3": Variant(partial(fshard, 3, {}), STAGE_3, "fully_shard", "floor 3"),
    "fshard 3 keep": Variant(partial(fshard, 3, KEEP), STAGE_2, "fully_shard keep", "floor 3 keep"),
    "deepspeed 1": Variant(
        partial(deepspeed, 1), STAGE_1, "ddp + zero optimizer", needs="deepspeed"
    ),
    "deepspeed 2": Variant(
        partial(deepspeed, 2), STAGE_2, "ddp + zero optimizer", needs="deepspeed"
    ),
    "deepspeed 3": Variant(
        partial(deepspeed, 3), STAGE_3, "fully_shard", needs="deepspeed", meddles=True
    ),
    "jax replicated": Variant(partial(jax_devices, False), REPLICATED, "ddp", needs="jax"),
    "jax sharded": Variant(partial(jax_devices, True), STAGE_3, "fully_shard", needs="jax"),
}


def chosen_of(console: Console, only: list[str]) -> list[str]:
    """Return the names of the variants to run, and print which are missing."""
    names = [
        name
        for name, one in VARIANTS.items()
        if (name.startswith(tuple(only)) if only else not one.meddles)
    ]
    needed = {VARIANTS[name].needs for name in names} - {None}
    missing = {needs for needs in needed if importlib.util.find_spec(str(needs)) is None}
    for needs in sorted(map(str, missing)):
        which = ", ".join(name for name in names if VARIANTS[name].needs == needs)
        console.print(f"left out: {which} ({needs} is not installed)")
    return [name for name in names if VARIANTS[name].needs not in missing]


# -- time and bytes ------------------------------------------------------------------------------------------------


class Wire(TorchDispatchMode):
    """Counts what torch's own collectives send from each process, by the textbook, as fs.ledger does for ours."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n, self.bytes = n, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.bytes += self._sent(func.__name__, args)
        return func(*args, **(kwargs or {}))

    def _sent(self, name: str, args: Any) -> float:
        size = max(
            (_size(arg) for arg in args[:2]), default=0
        )  # of the full tensor, argument or result
        if name.startswith("barrier"):
            return 0
        return size * (2 if name.startswith("allreduce") else 1) * (self.n - 1) / self.n


def _size(arg: Any) -> int:
    if isinstance(arg, list | tuple):
        return sum(map(_size, arg))
    return arg.nbytes if isinstance(arg, Tensor) else 0


class Found(NamedTuple):
    """What was measured of one variant."""

    times: list[float]
    loss: float
    sent: float


def mesh_and_data(model: Model) -> tuple[fs.Mesh, list[Batch]]:
    mesh = fs.make_mesh({"data": int(os.environ["WORLD_SIZE"])}, device="cpu")
    return mesh, [model.batch(index, dist.get_rank()) for index in range(BATCHES)]


def timed_process(workload: str, names: list[str], rounds: int) -> dict[str, Found]:
    """Run in every process: all variants in turn, round after round; all processes begin each step together."""
    model = WORKLOADS[workload]
    mesh, data = mesh_and_data(model)
    steps = {name: over(BATCHES, VARIANTS[name].make(model, data, mesh)) for name in names}
    times = slowest(
        interleaved(steps, rounds, warm_up=WARM_UP, between=gc.collect, ready=dist.barrier)
    )
    found: dict[str, Found] = {}
    for name, step in steps.items():
        with Wire(mesh.size) as wire, fs.ledger() as comm:
            loss = float(step())
        losses: list[Any] = [None] * mesh.size
        dist.all_gather_object(losses, loss)
        known = [one for one in losses if one == one]  # not NaN: JAX has but one for all
        found[name] = Found(times[name], statistics.mean(known), float(comm.bytes()) or wire.bytes)
    return found


def timed(
    console: Console,
    workload: str,
    n: int,
    rounds: int,
    names: list[str],
    variables: dict[str, str],
) -> None:
    """Print how long a step takes, against a peer and a floor, and whether all train the same."""
    found = run_processes(
        timed_process, n, workload, names, rounds, environment=variables, timeout=3600
    )[0]
    middle = {name: statistics.median(one.times) for name, one in found.items()}

    def ratio(name: str, other: str | None) -> str:
        return f"{paired(found[name].times, found[other].times):.2f}" if other in found else ""

    links = "gloo" if variables else "direct links"
    title = f"{workload}: {n} processes, {rounds} rounds, ours by {links}"
    table = Table(
        "variant", "ms", "x ddp", "x peer", "peer", "x floor", "MB sent", "loss", title=title
    )
    for name, one in found.items():
        variant = VARIANTS[name]
        sent = f"{one.sent / 1e6:.1f}" if variant.needs != "jax" else ""
        table.add_row(
            name,
            f"{middle[name] * 1e3:.1f}",
            ratio(name, "ddp"),
            ratio(name, variant.peer),
            (variant.peer or "") if variant.peer in middle else "",
            ratio(name, variant.floor),
            sent,
            f"{one.loss:.6f}{' (own data)' if variant.alone else ''}",
        )
    console.print(table)
    losses = {name: one.loss for name, one in found.items() if not VARIANTS[name].alone}
    expected = statistics.median(losses.values()) if losses else 0.0
    wrong = [
        name
        for name, loss in losses.items()
        if not abs(loss - expected) <= TOLERANCE * abs(expected)
    ]
    if wrong:
        raise AssertionError(
            f"{workload}: {', '.join(wrong)} did not train what the others did: {losses}"
        )


# -- memory --------------------------------------------------------------------------------------------------------


def memory_process(workload: str, name: str) -> int:
    """Run in every process: return the peak of resident memory in a step, in bytes more than before the model."""
    model = WORKLOADS[workload]
    mesh, data = mesh_and_data(model)
    fs.run(lambda: fs.psum(torch.ones(1), "data"), mesh=mesh)
    gc.collect()
    before = _resident("VmRSS")
    step = over(BATCHES, VARIANTS[name].make(model, data, mesh))
    step()  # makes the optimizer's state
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    for _ in range(BATCHES - 1):
        step()
    return _resident("VmHWM") - before


def _resident(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) * 1024


def memory(console: Console, n: int, names: list[str], variables: dict[str, str]) -> None:
    """Print the peak memory of each variant, in processes of its own, against ZeRO's formula."""
    # The C library must return memory, else the peak is that of its caches; it reads this setting at the start of a process.
    os.environ.update(MALLOC_MMAP_THRESHOLD_=str(MIB), MALLOC_ARENA_MAX="2")
    for workload, model in WORKLOADS.items():
        count = sum(leaf.numel() for leaf in model.init(SEED).values())
        console.print(
            f"{workload}: {count / 1e6:.1f} M parameters, peak MiB per process, {n} processes"
        )
        table = Table("variant", "peak", "formula", "beyond it")
        for name in names:
            if VARIANTS[name].needs == "jax":
                continue  # all its devices are in one process
            peaks = run_processes(
                memory_process, n, workload, name, environment=variables, timeout=600, fresh=True
            )
            peak, formula = max(peaks) / MIB, VARIANTS[name].held.bytes(n) * count / MIB
            table.add_row(name, f"{peak:.0f}", f"{formula:.0f}", f"{peak - formula:+.0f}")
        console.print(table)
    for variable in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_ARENA_MAX"):
        del os.environ[variable]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = [*WORKLOADS, "memory"]
    parser.add_argument("parts", nargs="*", default=parts)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--only", nargs="+", default=[], help="variants whose names begin like one of these"
    )
    parser.add_argument(
        "--gloo", action="store_true", help="ours over gloo too, not by direct links"
    )
    chosen = parser.parse_args()
    if unknown := set(chosen.parts) - set(parts):
        parser.error(f"{', '.join(sorted(unknown))}: none of {', '.join(parts)}")
    console = Console(width=120)
    names = chosen_of(console, chosen.only)
    variables = {"FSHARD_DIRECT": "0"} if chosen.gloo else {}
    for each in chosen.parts:
        if each == "memory":
            memory(console, chosen.processes, names, variables)
        else:
            timed(console, each, chosen.processes, chosen.rounds, names, variables)


if __name__ == "__main__":
    main()
