"""The time of a training step on a slow link: compressed gradients, local steps, and torch's communication hooks.

    python benchmarks/comm.py                                everything
    python benchmarks/comm.py loopback --rounds 15           one link: loopback, slow
    python benchmarks/comm.py slow --only ddp "power_sgd"    variants whose names begin like that

Two processes train the MLP of models.py, 68 MB of gradients, with AdamW, both sides over gloo. All variants make a step in
turn in every round, in a new random order; the slowest process counts. Shown are medians over the rounds, of times and of
the ratios of two times of one round. A step of diloco is a 25th of 25 steps. Torch's hooks are as their users run them:
`powerSGD_hook` has error feedback by default, so ours has it too.

The slow link has 100 Mbit/s each way and a delay of 1 ms: `tc` in a network namespace, as far as the system permits it. The
title of the table says what is missing; without `tc` both sides sleep the textbook time of the bytes that they send.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from models import BATCHES, RATE, SEED, WORKLOADS, Batch, Model, Step
from peers import data_parallel, ddp, loop, repeated
from rich.console import Console
from rich.table import Table
from timing import interleaved, over, paired, slowest
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    powerSGD_hook,
    quantization_hooks,
)
from torch.optim import AdamW

import fshard as fs
from fshard import P, comm
from fshard.testing.processes import run_processes

N, WARM_UP, EVERY = 2, 3, 25
RATE_OF_LINK, DELAY = 100e6, 1e-3
"""Of the slow link: bits per second each way, and seconds."""
MODEL = WORKLOADS["communication"]

# -- the variants --------------------------------------------------------------------------------------------------


def hooked(
    hook: Any, state: Callable[[], Any], model: Model, data: list[Batch], mesh: fs.Mesh
) -> Step:
    """Torch's data parallelism with one of its communication hooks.

    Hooks that wait for a second collective block a thread of gloo for each bucket, and deadlock with its two threads. So
    all gradients are one bucket.
    """
    module: Any = data_parallel(model, bucket_cap_mb=1000)
    module.register_comm_hook(state(), hook)
    return loop(module, AdamW(module.parameters(), lr=RATE, fused=True), data)


class StackedFutures:
    """The all_gather that torch's quantization hook expects: its future holds all results as a tensor."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_gather(self, *args: Any, **options: Any) -> Any:
        future = dist.all_gather(*args, **options).get_future()  # pyright: ignore[reportOptionalMemberAccess]
        return SimpleNamespace(
            get_future=lambda: future.then(lambda done: [torch.stack(done.value())])
        )


quantization_hooks.dist = StackedFutures()  # pyright: ignore[reportAttributeAccessIssue, reportPrivateImportUsage]


def fshard(
    compress: comm.Compressor | None,
    options: dict[str, Any],
    model: Model,
    data: list[Batch],
    mesh: fs.Mesh,
) -> Step:
    """The step of a user of ours."""
    opt = fs.partition_optimizer(
        fs.optim.adamw(RATE),
        mesh=mesh,
        axis="data",
        stage=0,
        compress=compress and {"data": compress},
    )
    train = fs.train_step(model.loss, opt, mesh=mesh, batch=P("data"), donate=True, **options)
    params = fs.shard_params(model.init(SEED), P(), mesh=mesh)
    return repeated(train, params, opt.init(params), data, mesh)


def diloco(model: Model, data: list[Batch], mesh: fs.Mesh) -> Step:
    """Local steps of a replica on each process; each call makes `EVERY`, of which the last reduces."""
    mesh = fs.make_mesh({"data": mesh.size, "replica": 1}, device="cpu")
    opt = fs.partition_optimizer(
        fs.optim.adamw(RATE), mesh=mesh["replica"], axis="replica", stage=0
    )
    inner = fs.train_step(model.loss, opt, mesh=mesh["replica"], batch=P("replica"), donate=True)
    outer = fs.optim.sgd(0.7, momentum=0.9, nesterov=True)
    train = comm.diloco(inner, outer, every=EVERY, mesh=mesh, axis="data")
    step = repeated(
        train, *train.init(fs.shard_params(model.init(SEED), P(), mesh=mesh)), data, mesh
    )
    return lambda index: [step((index + turn) % BATCHES) for turn in range(EVERY)][-1]


class Bar(NamedTuple):
    """The highest ratio to the time of a baseline."""

    ratio: float
    baseline: str = "ddp"


class Variant(NamedTuple):
    """A way to train, the numbers of 32 bits that it sends in a step, its bars, and the steps that a call makes."""

    make: Callable[[Model, list[Batch], fs.Mesh], Step]
    numbers: float
    loopback: Bar | None = None
    slow: Bar | None = None
    steps: int = 1


def variants() -> dict[str, Variant]:
    shapes = [x.shape for x in MODEL.init(SEED).values()]
    size = sum(map(prod, shapes))
    thin = sum(
        4 * sum(shape) if len(shape) == 2 else shape[0] for shape in shapes
    )  # factors of rank 4, and vectors
    scale = 1 / 256  # for each block
    power_sgd = partial(
        powerSGD_hook.PowerSGDState, None, matrix_approximation_rank=4, start_powerSGD_iter=2
    )
    hooks = {
        "powerSGD_hook": (powerSGD_hook.powerSGD_hook, power_sgd, thin),
        "fp16_compress_hook": (default_hooks.fp16_compress_hook, lambda: None, size / 2),
        "perchannel_hook": (
            quantization_hooks.quantization_perchannel_hook,
            lambda: None,
            size * (1 / 4 + 2 / 512),
        ),
    }
    feedback, fp16 = (
        comm.error_feedback,
        Bar(1.05, "fp16_compress_hook"),
    )  # torch's bf16 hook needs NCCL
    ours: dict[
        str, tuple[comm.Compressor | None, dict[str, Any], float, Bar | None, Bar | None]
    ] = {
        "no compress=": (None, {}, size, None, None),
        "reduce=fp16": (None, {"reduce": torch.float16}, size / 2, fp16, None),
        "reduce=bf16": (None, {"reduce": torch.bfloat16}, size / 2, fp16, None),
        "power_sgd(4)": (
            feedback(comm.power_sgd(4)),
            {},
            thin,
            Bar(1.00, "powerSGD_hook"),
            Bar(0.10),
        ),
        "quantized(8)": (
            comm.quantized(8),
            {},
            size * (1 / 4 + scale),
            Bar(0.50, "perchannel_hook"),
            Bar(0.40),
        ),
        "sign": (feedback(comm.sign()), {}, size * (1 / 32 + scale), None, Bar(0.15)),
        "top_k(0.01)": (feedback(comm.top_k(0.01)), {}, size * 0.02, None, Bar(0.15)),
    }
    return {
        "ddp": Variant(ddp, size),
        **{
            name: Variant(partial(hooked, hook, state), count)
            for name, (hook, state, count) in hooks.items()
        },
        **{name: Variant(partial(fshard, *row[:2]), *row[2:]) for name, row in ours.items()},
        f"diloco({EVERY})": Variant(diloco, size / EVERY, None, Bar(0.10), EVERY),
    }


# -- time ----------------------------------------------------------------------------------------------------------


class Result(NamedTuple):
    """The seconds of a step in each round, and the loss in the end."""

    times: list[float]
    loss: float


def timed_process(names: list[str], rounds: int, sleeps: bool) -> dict[str, Result]:
    """Run in every process: all variants in turn, round after round; all processes begin each step together."""
    mesh = fs.make_mesh({"data": int(os.environ["WORLD_SIZE"])}, device="cpu")
    data = [MODEL.batch(index, dist.get_rank()) for index in range(BATCHES)]
    chosen = {name: variant for name, variant in variants().items() if name in names}
    steps = {
        name: over(BATCHES, variant.make(MODEL, data, mesh)) for name, variant in chosen.items()
    }

    def slowed(name: str) -> Tensor:
        loss = steps[name]()
        sent = 8 * chosen[name].numbers * 4 * 2 * (mesh.size - 1) / mesh.size
        time.sleep(
            chosen[name].steps * sent / RATE_OF_LINK + 2 * DELAY if sleeps else 0
        )  # a reduction: there and back
        return loss

    calls = {name: partial(slowed, name) for name in steps}
    times = slowest(
        interleaved(calls, rounds, warm_up=WARM_UP, between=gc.collect, ready=dist.barrier)
    )
    return {
        name: Result([seconds / chosen[name].steps for seconds in times[name]], float(step()))
        for name, step in steps.items()
    }


def timed(console: Console, link: str, rounds: int, names: list[str], title: str) -> None:
    """Print the time of a step of each variant, and its ratio to the baseline of its bar."""
    environment = {"FSHARD_DIRECT": "0"}  # ours over gloo too
    results = run_processes(
        timed_process, N, names, rounds, "textbook" in title, environment=environment, timeout=7200
    )[0]
    table = Table(
        "variant", "ms", "MB sent", "x ddp", "bar", "x baseline", "baseline", "loss", title=title
    )
    for name, variant in variants().items():
        if name not in results:
            continue
        bar: Bar | None = getattr(variant, link)
        ratios = {
            base: f"{paired(results[name].times, results[base].times):.3f}" for base in results
        }
        baseline = bar.baseline if bar and bar.baseline in results else "ddp"
        table.add_row(
            name,
            f"{statistics.median(results[name].times) * 1e3:.1f}",
            f"{variant.numbers * 4e-6 * 2 * (N - 1) / N:.2f}",
            ratios.get("ddp", ""),
            f"{bar.ratio:.2f}" if bar else "",
            ratios.get(baseline, "") if bar else "",
            baseline if bar else "",
            f"{results[name].loss:.4f}",
        )
    console.print(table)


# -- the slow link -------------------------------------------------------------------------------------------------


def slow(arguments: list[str]) -> None:
    """Run this program on a slow link: in a network namespace whose loopback carries both ways, so at twice the rate."""
    rate = f"rate {2 * RATE_OF_LINK / 1e6:.0f}mbit"
    queues = {
        "tc": f"netem {rate} delay {DELAY * 1e3:g}ms",
        "tc, no delay (this kernel has no netem)": f"tbf {rate} burst 256kb latency 1s",
        "both sides sleep the textbook time (tc is not permitted)": "",
    }
    for title, queue in queues.items():
        link = f'ip link set lo up && tc qdisc add dev lo root {queue} && exec "$@"'
        prefix = ["unshare", "-rn", "sh", "-c", link, "sh"] if queue else []
        if (
            not queue
            or subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0
        ):
            script = [
                sys.executable,
                __file__,
                "here",
                "--title",
                f"100 Mbit/s + 1 ms: {title}",
                *arguments,
            ]
            variables = {"GLOO_SOCKET_IFNAME": "lo"} if queue else {}
            subprocess.run([*prefix, *script], env=os.environ | variables, check=True)
            return


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "links", nargs="*", default=["loopback", "slow"], help="loopback, slow; here: the slow one"
    )
    parser.add_argument("--rounds", type=int, default=0, help="15 on loopback, else 5")
    parser.add_argument(
        "--only", nargs="+", default=[], help="variants whose names begin like one of these"
    )
    parser.add_argument("--title", default="")
    chosen = parser.parse_args()
    if unknown := {*chosen.links} - {"loopback", "slow", "here"}:
        parser.error(f"{', '.join(sorted(unknown))}: none of loopback, slow")
    names = [name for name in variants() if not chosen.only or name.startswith(tuple(chosen.only))]
    if "loopback" in chosen.links:
        timed(
            Console(width=120),
            "loopback",
            chosen.rounds or 15,
            names,
            f"loopback: {N} processes over gloo",
        )
    if "here" in chosen.links:
        timed(Console(width=120), "slow", chosen.rounds or 5, names, chosen.title)
    if "slow" in chosen.links:
        only = ["--only", *chosen.only] if chosen.only else []
        slow(["--rounds", str(chosen.rounds), *only])


if __name__ == "__main__":
    main()
