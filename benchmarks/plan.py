"""Compare the times that `fs.plan.cost` predicts with measured ones: twelve layouts of one GPT, in two processes.

    python benchmarks/plan.py               calibrate, predict, measure (about two minutes)
    python benchmarks/plan.py --rounds 9
    python benchmarks/plan.py --search      seconds and memory of two searches

Prints each layout with both times, and Kendall's tau of the two orders.
"""

from __future__ import annotations

import argparse
import resource
from collections.abc import Callable
from itertools import combinations
from statistics import median
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from timing import interleaved, slowest
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import P
from fshard.testing.processes import run_processes

LAYERS, WIDTH, HEADS, TOKENS, ROWS, WORDS = 4, 256, 4, 128, 16, 512
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {"stage": 0},
    "data, recomputed": {"stage": 0, "recomputed": True},
    "data, 8 microbatches": {"stage": 0, "accumulate": 8},
    "data, recomputed, 8 microbatches": {"stage": 0, "recomputed": True, "accumulate": 8},
    "zero 2, 4 microbatches": {"stage": 2, "accumulate": 4},
    "zero 3": {"stage": 3},
    "zero 3, 4 microbatches": {"stage": 3, "accumulate": 4},
    "zero 3, 8 microbatches": {"stage": 3, "accumulate": 8},
    "zero 3, recomputed": {"stage": 3, "recomputed": True},
    "zero 3, recomputed, 8 microbatches": {"stage": 3, "recomputed": True, "accumulate": 8},
    "tensor": {"axis": "model"},
    "tensor, recomputed": {"axis": "model", "recomputed": True},
}


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (
            layer(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A small GPT, whose blocks may be recomputed."""

    def __init__(self, recomputed: bool) -> None:
        super().__init__()
        self.recomputed = recomputed
        self.words, self.blocks = (
            nn.Embedding(WORDS, WIDTH),
            nn.ModuleList(Block() for _ in range(LAYERS)),
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputed else block(x)
        return self.head(x)


def program(
    *, stage: int = 0, axis: str = "data", recomputed: bool = False, **options: Any
) -> tuple[Callable[..., Any], list[Any]]:
    """Return a training step, and its arguments."""
    torch.manual_seed(0)
    mesh, model, ids = (
        fs.make_mesh({axis: 2}),
        GPT(recomputed),
        torch.randint(0, WORDS, (ROWS, TOKENS)),
    )
    plan = (
        fs.tensor_parallel(model, axis=axis, sample=ids[:2], check=False)
        if axis == "model"
        else None
    )
    apply, params, buffers = fs.functionalize(model, plan=plan)
    rules = (
        plan.rules if plan is not None else fs.fsdp(axis, unit="blocks[*]") if stage == 3 else P()
    )

    def loss_fn(params: Any, ids: Tensor) -> Tensor:
        logits, _ = apply(params, buffers, ids)
        if plan is not None:
            return plan.cross_entropy(logits, ids)
        return functional.cross_entropy(logits.flatten(0, 1), ids.flatten())

    opt = fs.optim.adamw(1e-4)
    options |= {
        "mesh": mesh,
        "donate": True,
        "batch": P(() if plan else axis),
        "local": plan.axes if plan else (),
    }
    if plan is None:
        opt = fs.partition_optimizer(opt, mesh=mesh, axis=axis, stage=stage)
    params = fs.shard_params(params, rules, mesh=mesh)
    return fs.train_step(loss_fn, opt, **options), [params, opt.init(params), ids]


def repeated(step: Callable[..., Any], arguments: list[Any]) -> Callable[[], None]:
    """Return a call that continues the training."""

    def run() -> None:
        *arguments[:2], _ = step(*arguments)

    return run


def in_process(rounds: int) -> tuple[Any, dict[str, tuple[float, float]]]:
    """Return the machine, and the predicted and the measured seconds of each layout."""
    torch.set_num_threads(1)
    machine = fs.plan.calibrate(fs.make_mesh({"all": 2}))
    programs = {name: program(**layout) for name, layout in LAYOUTS.items()}
    predicted = {
        name: fs.plan.cost(step, *trees, cluster=machine).seconds
        for name, (step, trees) in programs.items()
    }
    calls = {name: repeated(*pair) for name, pair in programs.items()}
    measured = slowest(interleaved(calls, rounds))
    return machine, {name: (predicted[name], median(measured[name])) for name in LAYOUTS}


def tau(pairs: list[tuple[float, float]]) -> float:
    """Return Kendall's tau: the part of pairs that both orders order alike, less the part of others."""
    signs = [1 if (a[0] - b[0]) * (a[1] - b[1]) > 0 else -1 for a, b in combinations(pairs, 2)]
    return sum(signs) / len(signs)


def search() -> None:
    """Print the seconds of searches, the first of which imports parts of torch, and the memory of the process."""
    llama = {"vocab": 128256, "sequence": 8192}, {"devices": 16_384, "global_batch": 2048}
    small = {"vocab": 32000, "sequence": 4096}, {"devices": 8, "global_batch": 64}
    models = {
        "7B, 8 devices": (fs.plan.Transformer(32, 4096, 11008, 32, 32, **small[0]), small[1]),
        "405B, 16,384 devices": (
            fs.plan.Transformer(126, 16384, 53248, 128, 8, **llama[0]),
            llama[1],
        ),
    }
    optimizer, cluster = (
        fs.optim.with_master_weights(fs.optim.adamw(3e-4)),
        fs.plan.cluster("h100", node=8),
    )
    for name, (model, options) in models.items():
        seconds = list[float]()
        for _ in range(4):
            begin = perf_counter()
            fs.plan.search(model, cluster=cluster, optimizer=optimizer, **options)
            seconds.append(perf_counter() - begin)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        print(
            f"{name}: first {seconds[0]:.1f} s, then {median(seconds[1:]):.1f} s, {memory:.2f} GB"
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--search", action="store_true")
    options = parser.parse_args()
    if options.search:
        search()
        return
    (machine, rows), *_ = run_processes(in_process, 2, options.rounds, timeout=900)
    table = Table("layout", "predicted ms", "measured ms", "ratio", title="2 processes")
    for name, (predicted, measured) in sorted(rows.items(), key=lambda row: row[1][1]):
        table.add_row(
            name, f"{1e3 * predicted:.1f}", f"{1e3 * measured:.1f}", f"{predicted / measured:.2f}"
        )
    Console().print(machine)
    Console().print(table)
    Console().print(f"Kendall's tau {tau(list(rows.values())):.2f} (bar 0.8); each within 20 %")


if __name__ == "__main__":
    main()
