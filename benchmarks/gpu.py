"""What `train_step` costs on one device: against the plain torch loop, on a GPT in bf16 with fused AdamW.

    python benchmarks/gpu.py                              350 M parameters, on a GPU
    python benchmarks/gpu.py --device cpu --size tiny     the same program on a CPU, to see that it runs
    python benchmarks/gpu.py masters --rounds 5           one precision: bf16, masters

Every variant trains the same model on the same data; what is written beside the loss function is

    plain      loss.backward(); optimizer.step(); optimizer.zero_grad()
    autocast   the same, under torch.autocast
    fshard k   params, state, metrics = step(params, state, batch), in stage k of ZeRO on a mesh of one device; the
               metrics are more than the others have: the norm of all gradients, and whether they are finite

in two precisions:

    bf16       parameters, gradients and AdamW's state are bf16
    masters    all these are float32, and only the computation is bf16: plain casts each parameter where it is used

each with the loss function as it is, and compiled by torch.compile.  In every round each variant makes a few steps, in
a new random order, and the device is waited for only after them: no loop waits for it in between.  Medians count, and
only their ratios mean something.  Peak memory is measured before, with one variant at a time on the device.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from models import BATCHES, RATE, SEED, Batch, Gpt, Model, Params, Step
from rich.console import Console
from rich.table import Table
from timing import interleaved, over
from torch import Tensor
from torch.optim import AdamW

import fshard as fs
from fshard import P

SIZES = {
    "350m": Gpt(width=1024, heads=16, depth=24, vocabulary=50304, length=1024, sequences=8),
    "tiny": Gpt(width=64, heads=4, depth=2, vocabulary=256, length=32, sequences=2),
}
STEPS, TOLERANCE = 4, 2e-2
DTYPES = {"bf16": torch.bfloat16, "masters": torch.float32}
MIB = 1 << 20

Loss = Callable[[Params, Batch], Tensor]


@dataclass(frozen=True)
class Task:
    """What is trained: where, in which precision, and whether compiled."""

    model: Model
    device: str
    precision: str
    compiled: bool

    def init(self) -> Params:
        """Return the parameters at rest."""
        drawn = self.model.init(SEED)
        return {name: x.to(self.device, DTYPES[self.precision]) for name, x in drawn.items()}

    def batches(self) -> list[Batch]:
        """Return the data."""
        return [{name: x.to(self.device) for name, x in self.model.batch(index, 0).items()} for index in range(BATCHES)]

    def loss(self, loss: Loss) -> Loss:
        """Compile a loss function if `compile` is set."""
        return torch.compile(loss) if self.compiled else loss


# -- the variants --------------------------------------------------------------------------------------------------


def loop(task: Task, loss_fn: Loss) -> Step:
    """The usual training step."""
    params, data, run = task.init(), task.batches(), task.loss(loss_fn)
    optimizer = AdamW([leaf.requires_grad_() for leaf in params.values()], lr=RATE, fused=True)

    def step(index: int) -> Tensor:
        loss = run(params, data[index])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def plain(task: Task) -> Step:
    def in_bf16(params: Params, batch: Batch) -> Tensor:
        return task.model.loss({name: x.bfloat16() for name, x in params.items()}, batch)

    return loop(task, in_bf16)


def autocast(task: Task) -> Step:
    def under_autocast(params: Params, batch: Batch) -> Tensor:
        with torch.autocast(task.device, torch.bfloat16):
            return task.model.loss(params, batch)

    return loop(task, under_autocast)


def fshard(stage: int, task: Task) -> Step:
    """What a user of ours writes."""
    mesh = fs.make_mesh({"data": 1}, device=task.device)
    params = fs.shard_params(task.init(), fs.fsdp("data") if stage == 3 else P(), mesh=mesh)
    opt = fs.partition_optimizer(fs.optim.adamw(RATE), mesh=mesh, axis="data", stage=stage)
    state, data = opt.init(params), fs.device_put(task.batches(), fs.Layout(mesh, P("data")))
    loss_fn = fs.with_unsharded_params(task.loss(task.model.loss), keep=True) if task.compiled else task.model.loss
    precision = "bf16" if task.precision == "masters" else None
    train = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), donate=True, precision=precision)

    def step(index: int) -> Tensor:
        nonlocal params, state
        params, state, metrics = train(params, state, data[index])
        return metrics["loss"]

    return step


VARIANTS = {
    "bf16": {"plain": plain, "fshard 0": partial(fshard, 0), "fshard 3": partial(fshard, 3)},
    "masters": {"plain": plain, "autocast": autocast, "fshard 0": partial(fshard, 0), "fshard 3": partial(fshard, 3)},
}


# -- time and bytes ------------------------------------------------------------------------------------------------


def wait(device: str) -> None:
    """Wait until the device has done all it was given."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def peak(task: Task, make: Callable[[Task], Step]) -> float | None:
    """Return the most memory that a step needs beyond what was there before, in MiB; None on a CPU."""
    if task.device == "cpu":
        return None  # see zero.py, which measures it in processes of their own
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(task.device)
    step = over(BATCHES, make(task))
    step()  # makes the optimizer's state, and compiles
    torch.cuda.reset_peak_memory_stats(task.device)
    for _ in range(BATCHES):
        step()
    return (torch.cuda.max_memory_allocated(task.device) - before) / MIB


def measure(console: Console, task: Task, rounds: int) -> None:
    """Print how long a step takes and what memory it needs, against the plain loop, and whether all train the same."""
    variants = VARIANTS[task.precision]
    peaks = {name: peak(task, make) for name, make in variants.items()}
    losses: dict[str, list[Tensor]] = {name: [] for name in variants}

    def steps_of(name: str, make: Callable[[Task], Step]) -> Callable[[], None]:
        step = over(BATCHES, make(task))

        def several() -> None:
            losses[name] = [step() for _ in range(STEPS)]
            wait(task.device)

        return several

    calls = {name: steps_of(name, make) for name, make in variants.items()}
    times = interleaved(calls, rounds, between=gc.collect, ready=lambda: wait(task.device))
    middle = {name: statistics.median(row) / STEPS for name, row in times.items()}
    last = {name: torch.stack(row).float().mean().item() for name, row in losses.items()}
    title = f"{task.precision}, {'compiled' if task.compiled else 'not compiled'}: {rounds} rounds on {task.device}"
    table = Table("variant", "ms", "x plain", "peak MiB", "x plain", "loss", title=title)
    for name in variants:
        memory, own = peaks[name], peaks["plain"]
        shown = ("", "") if memory is None or own is None else (f"{memory:.0f}", f"{memory / own:.2f}")
        ratio = f"{middle[name] / middle['plain']:.3f}"
        table.add_row(name, f"{middle[name] * 1e3:.2f}", ratio, *shown, f"{last[name]:.4f}")
    console.print(table)
    wrong = [name for name, loss in last.items() if not abs(loss - last["plain"]) <= TOLERANCE * abs(last["plain"])]
    if wrong:
        raise AssertionError(f"{', '.join(wrong)} did not train what the plain loop did: {last}")


def compiles(device: str) -> bool:
    """Whether torch.compile finds a compiler for the device."""
    try:
        return bool(torch.compile(lambda x: x.sin() + 1)(torch.zeros(2, device=device)).sum() == 2)
    except RuntimeError:  # torch's errors of compiling are
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=[*VARIANTS])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--size", choices=SIZES, default="350m")
    parser.add_argument("--rounds", type=int, default=10)
    chosen = parser.parse_args()
    if unknown := set(chosen.parts) - set(VARIANTS):
        parser.error(f"{', '.join(sorted(unknown))}: none of {', '.join(VARIANTS)}")
    if chosen.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"no GPU is here for --device {chosen.device}; --device cpu --size tiny shows that it runs")
    console = Console(width=120)
    ways = [False, True] if compiles(chosen.device) else [False]
    if len(ways) == 1:
        console.print("left out: torch.compile (it finds no compiler)")
    model = SIZES[chosen.size].model()
    for precision in chosen.parts:
        for compiled in ways:
            torch.compiler.reset()
            measure(console, Task(model, chosen.device, precision, compiled), chosen.rounds)


if __name__ == "__main__":
    main()
