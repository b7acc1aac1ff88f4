"""Attention over a sequence sharded on two gloo processes, against torch's attention on one.

    python benchmarks/tensor.py [rounds]

Causal attention, forward and backward: 4096 tokens, 8 heads of 64, float32, one torch thread in each process. Times are
medians of interleaved rounds; of two processes the slower counts. The processor time of a process is printed too: on a
machine that runs other programs only that is meaningful.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from timing import Times, interleaved, slowest
from torch.nn import functional as F

import fshard as fs
from fshard.testing.processes import run_processes

TOKENS, HEADS, DIM = 4096, 8, 64
ONE = "one process"


def step(attend: Callable[..., torch.Tensor], xs: list[torch.Tensor]) -> None:
    """Run a forward and a backward."""
    out = attend(*xs)
    torch.autograd.grad(out, xs, torch.ones_like(out))


def timed(rounds: int) -> tuple[Times, Times]:
    """Return the seconds of each algorithm in each round on the slower process: by the clock, and of the processor."""
    torch.set_num_threads(1)
    mesh, index = fs.make_mesh({"seq": 2}), dist.get_rank()
    draw = torch.Generator().manual_seed(0)
    full = [torch.randn(1, HEADS, TOKENS, DIM, generator=draw) for _ in range(3)]
    processor: Times = {}

    def on_mesh(how: Any) -> Callable[[], Any]:
        order = (lambda x: fs.tensor.zigzag(x, 2, 2)) if how == "zigzag" else (lambda x: x)
        own = [order(x).chunk(2, 2)[index].clone().requires_grad_() for x in full]
        attend = lambda *xs: fs.tensor.attention(*xs, "seq", how, causal=True)  # noqa: E731
        return lambda: fs.run(lambda: step(attend, own), mesh=mesh)

    def alone() -> None:
        if index == 0:
            step(
                lambda *xs: F.scaled_dot_product_attention(*xs, is_causal=True),
                [x.requires_grad_() for x in full],
            )

    def counted(name: str, call: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> None:
            began = time.process_time()
            call()
            processor.setdefault(name, []).append(time.process_time() - began)

        return run

    calls = {ONE: alone} | {
        how: on_mesh(how) for how in ("zigzag", "ring", "gather", "ulysses", "rsa")
    }
    times = interleaved(
        {name: counted(name, call) for name, call in calls.items()}, rounds, ready=dist.barrier
    )
    return slowest(times), slowest({name: processor[name][2:] for name in calls})


def main() -> None:
    """Print the table."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 21
    times, processor = run_processes(timed, 2, rounds, timeout=580)[0]
    print(
        f"| causal attention, {TOKENS} tokens, 2 processes | ms | times one process | processor ms | times one process |"
    )
    print("|---|---|---|---|---|")
    for name in times:
        cells = [
            cell
            for rows in (times, processor)
            for cell in (
                f"{1e3 * median(rows[name]):.0f}",
                f"{median(rows[name]) / median(rows[ONE]):.2f}",
            )
        ]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
