"""A layer of experts against the same by hand, between processes of one machine.

    python benchmarks/experts.py                    4 processes, an expert axis of 4 (about a minute)
    python benchmarks/experts.py --processes 2

Both route 2 of 8 experts to each token, evenly, and take a forward and a backward. By hand: torch's all_to_all_single with
split sizes, an autograd Function around it, and one exchange of counts.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from timing import interleaved, paired, slowest
from torch import Tensor

import fshard as fs
from fshard.experts import Routing, moe, swiglu
from fshard.testing.processes import run_processes

TOKENS, WIDTH, HIDDEN, EXPERTS, TOP_K = 512, 128, 256, 8, 2


class Exchange(torch.autograd.Function):
    """Rows to other processes; backward: the same with the sizes swapped."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.sizes = received, sent
        result = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(result, rows.contiguous(), received, sent)
        return result

    @staticmethod
    def backward(ctx: Any, *gs: Tensor) -> tuple[Tensor, None, None]:
        return Exchange.apply(gs[0], *ctx.sizes), None, None  # type: ignore[return-value]


def by_hand(x: Tensor, routing: Routing, weights: dict[str, Tensor], n: int) -> Tensor:
    """Return the layer's result as users write it."""
    flat, each = routing.experts.reshape(-1), EXPERTS // n
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=EXPERTS)
    table = torch.empty(n, each, dtype=torch.int64)
    dist.all_to_all_single(table, counts.view(n, each))
    sent, received = counts.view(n, each).sum(1).tolist(), table.sum(1).tolist()
    rows = Exchange.apply(x[order // TOP_K], sent, received)
    experts = torch.arange(each).repeat(n).repeat_interleave(table.reshape(-1))
    by_expert = experts.argsort(stable=True)
    results = swiglu(weights, rows[by_expert], table.sum(0).tolist())
    back = Exchange.apply(
        torch.empty_like(results).index_copy(0, by_expert, results), received, sent
    )
    return torch.zeros_like(x).index_add(
        0, order // TOP_K, back * routing.weights.reshape(-1)[order, None]
    )


def in_process(rounds: int) -> dict[str, list[float]]:
    """Return the times of both in one process, after a comparison of gradients."""
    torch.set_num_threads(1)
    n = int(os.environ["WORLD_SIZE"])
    mesh, draw = fs.make_mesh({"expert": n}), torch.Generator().manual_seed(fs.mesh.process_index())
    x = torch.randn(TOKENS, WIDTH, generator=draw).requires_grad_()
    first = torch.arange(TOKENS) % EXPERTS
    experts = torch.stack([first, (first + EXPERTS // 2) % EXPERTS], 1)
    routing = Routing(
        experts, torch.rand(TOKENS, TOP_K, generator=draw), torch.zeros(TOKENS, EXPERTS)
    )
    shapes = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    weights = {
        name: (torch.randn(EXPERTS // n, *shape, generator=draw) / 16).requires_grad_()
        for name, shape in shapes.items()
    }
    leaves = [x, *weights.values()]

    def gradients(layer: Callable[[], Tensor]) -> list[Tensor]:
        return [*torch.autograd.grad(layer().square().mean(), leaves)]

    def ours() -> list[Tensor]:
        return gradients(lambda: moe(x, routing, weights, axis="expert")[0])

    calls: dict[str, Callable[[], Any]] = {
        "ours": lambda: fs.run(ours, mesh=mesh)[0],
        "by hand": lambda: gradients(lambda: by_hand(x, routing, weights, n)),
    }
    for a, b in zip(*(call() for call in calls.values()), strict=True):
        torch.testing.assert_close(a, b)
    return slowest(interleaved(calls, rounds, ready=dist.barrier))


def main() -> None:
    """Print the ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    times, *_ = run_processes(in_process, args.processes, args.rounds, timeout=600)
    ratio = paired(times["ours"], times["by hand"])
    print(
        f"{args.processes} processes: ours {1e3 * median(times['ours']):.1f} ms, by hand "
        f"{1e3 * median(times['by hand']):.1f} ms, ratio {ratio:.2f} (bar 1.05)"
    )


if __name__ == "__main__":
    main()
