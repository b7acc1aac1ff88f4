"""Muon at owners on gloo processes, against torch.optim.Muon on all-gathered gradients in every process.

    python benchmarks/matrices.py [rounds]

Gradients are shards, as ZeRO-2 leaves them; the time is that of `step`, with its communication. By hand, a process
all-gathers all gradients in one call and updates all matrices. One torch thread in each process; medians of interleaved
rounds; of the processes the slowest counts.
"""

from __future__ import annotations

import sys
from statistics import median

import torch
import torch.distributed as dist
from timing import Times, interleaved, paired, slowest

import fshard as fs
from fshard import P
from fshard.testing.processes import run_processes

WIDTH, LAYERS, RATE = 256, 8, 0.02
OWNERS, BY_HAND = "owners", "by hand"


def weights(seed: int) -> dict[str, torch.Tensor]:
    """Return the matrices of a few layers: fused queries, keys and values, and what follows them."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {
        f"{layer}.{name}": (rows, WIDTH)
        for layer in range(LAYERS)
        for name, rows in (("qkv", 3 * WIDTH), ("out", WIDTH))
    }
    return {name: torch.randn(shape, generator=draw) / 16 for name, shape in shapes.items()}


def timed(processes: int, rounds: int) -> Times:
    """Return the seconds of both steps in each round on the slowest process."""
    torch.set_num_threads(1)
    mesh = fs.make_mesh({"data": processes})
    opt = fs.partition_optimizer(fs.optim.muon(RATE), mesh=mesh, axis="data", stage=2)
    params = fs.shard_params(weights(0), P(), mesh=mesh)
    grads = fs.device_put(weights(1), {name: opt.gradients(x.layout) for name, x in params.items()})
    state, step = opt.init(params), fs.optim.step_of(opt)

    by_hand = [torch.nn.Parameter(x) for x in weights(0).values()]
    muon = torch.optim.Muon(by_hand, lr=RATE)
    own = torch.cat([x.shards[0] for x in grads.values()])
    sizes = [x.shards[0].numel() for x in grads.values()]

    def owners() -> None:
        nonlocal params, state
        params, state = step(grads, state, params)

    def gathered() -> None:
        rows = [torch.empty_like(own) for _ in range(processes)]
        dist.all_gather(rows, own)
        shards = zip(*[row.split(sizes) for row in rows], strict=True)
        for param, parts in zip(by_hand, shards, strict=True):
            param.grad = torch.cat(parts).view_as(param)
        muon.step()

    times = interleaved({OWNERS: owners, BY_HAND: gathered}, rounds, ready=dist.barrier)
    assert all(torch.equal(x.shards[0], y) for x, y in zip(params.values(), by_hand, strict=True))
    return slowest(times)


def main() -> None:
    """Print the table."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 21
    print(
        f"| Muon of {2 * LAYERS} matrices | owners, ms | by hand, ms | ratio |\n|---|---|---|---|"
    )
    for processes in (2, 4):
        times = run_processes(timed, processes, processes, rounds, timeout=580)[0]
        ratio = paired(times[OWNERS], times[BY_HAND])
        cells = " | ".join(f"{1e3 * median(times[name]):.0f}" for name in (OWNERS, BY_HAND))
        print(f"| {processes} processes | {cells} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
