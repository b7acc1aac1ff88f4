"""Forward and backward of a tensor-parallel GPT (width 256, 6 blocks) on two gloo processes, against torch's DTensor.

    python benchmarks/layers.py [rounds]

    plan        fs.tensor_parallel of the module, in fs.value_and_grad
    functions   the same blocks with fs.tensor.column and fs.tensor.row
    DTensor     torch's parallelize_module, with its sequence parallelism too

64 tokens a sample, float32, one torch thread in each process; medians of interleaved rounds, the slower process counts.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from timing import Times, interleaved, paired, slowest
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

import fshard as fs
from fshard import P
from fshard.testing.processes import run_processes

WIDTH, HEADS, BLOCKS, TOKENS = 256, 8, 6, 64


class Block(nn.Module):
    """A block of a GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        """Attend by heads; written out, since DTensor has no fused attention on the CPU."""
        q, k, v = (x.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for x in (q, k, v))
        scores = (q @ k.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5).softmax(-1)
        return (scores @ v).transpose(1, 2).flatten(2)

    def forward(self, x: Any) -> Any:
        y = self.n1(x)
        x = x + self.out(self.attend(self.q(y), self.k(y), self.v(y)))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class GPT(nn.Module):
    """Blocks alone."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


def by_hand(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """Run the blocks with column- and row-parallel layers."""
    attend = Block.attend
    for number in range(BLOCKS):
        p = {
            name.split(".", 2)[2]: value
            for name, value in params.items()
            if name.startswith(f"blocks.{number}.")
        }
        y = F.layer_norm(x, (WIDTH,), p["n1.weight"], p["n1.bias"])
        weights, biases = (
            tuple(p[f"{name}.{kind}"] for name in "qkv") for kind in ("weight", "bias")
        )
        q, k, v = fs.tensor.column(y, weights, "model", biases)
        x = x + fs.tensor.row(attend(None, q, k, v), p["out.weight"], "model", p["out.bias"])  # pyright: ignore[reportArgumentType]
        y = F.layer_norm(x, (WIDTH,), p["n2.weight"], p["n2.bias"])
        y = F.gelu(fs.tensor.column(y, p["up.weight"], "model", p["up.bias"]))
        x = x + fs.tensor.row(y, p["down.weight"], "model", p["down.bias"])
    return x


def parallelized(model: nn.Module, *, sequence: bool) -> nn.Module:
    """Return a model that DTensor shards."""
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("model",))
    column, row = (
        ColwiseParallel(),
        RowwiseParallel(output_layouts=Shard(1) if sequence else Replicate()),
    )
    layers: dict[str, Any] = {**dict.fromkeys("qkv", column), "up": column, "out": row, "down": row}
    if sequence:
        layers |= {name: ColwiseParallel(input_layouts=Shard(1)) for name in ("q", "k", "v", "up")}
        layers |= {"n1": SequenceParallel(), "n2": SequenceParallel()}
    for block in model.blocks:  # pyright: ignore[reportGeneralTypeIssues, reportArgumentType]
        parallelize_module(block, mesh, layers)
    return model


def calls_of(batch: int) -> dict[str, Callable[[], Any]]:
    """Return a forward and backward of each program."""
    torch.manual_seed(0)
    model, x = GPT(), torch.randn(batch, TOKENS, WIDTH)
    mesh = fs.make_mesh({"data": 1, "model": 2})
    calls: dict[str, Callable[[], Any]] = {}
    for name, options in {
        "plan": {},
        "plan, megatron": {"sequence": "model", "sequence_mode": "megatron"},
    }.items():
        plan = fs.tensor_parallel(model, axis="model", sample=x, check=False, **options)
        apply, params, buffers = fs.functionalize(model, plan=plan)
        sharded = fs.shard_params(params, plan.rules, mesh=mesh)

        def loss_fn(
            params: Any, x: Tensor, plan: Any = plan, apply: Any = apply, buffers: Any = buffers
        ) -> Tensor:
            return plan.full(apply(params, buffers, x)[0].square().sum())

        step = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"), local="model")
        calls[name] = lambda step=step, sharded=sharded: step(sharded, x)
        if name == "plan":
            hand = fs.value_and_grad(
                lambda p, x: by_hand(p, x).square().sum(), mesh=mesh, batch=P("data"), local="model"
            )
            calls["functions"] = lambda sharded=sharded, hand=hand: hand(sharded, x)
    for name, sequence in (("DTensor", False), ("DTensor, sequence", True)):
        theirs = parallelized(copy.deepcopy(model), sequence=sequence)

        own = x.chunk(2, 1)[dist.get_rank()] if sequence else x

        def run(theirs: nn.Module = theirs, own: Tensor = own) -> None:
            theirs(own).square().sum().backward()
            theirs.zero_grad()

        calls[name] = run
    return calls


def timed(rounds: int) -> dict[int, Times]:
    """Return the seconds of each program in each round, for two batch sizes."""
    torch.set_num_threads(1)
    return {
        batch: slowest(interleaved(calls_of(batch), rounds, ready=dist.barrier)) for batch in (1, 8)
    }


def main() -> None:
    """Print the table."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 31
    found = run_processes(timed, 2, rounds, timeout=580)[0]
    print(
        "| GPT, forward and backward, 2 processes | batch | ms | of DTensor's | of functions |\n|---|---|---|---|---|"
    )
    for batch, times in found.items():
        for name, own in times.items():
            ratios = [f"{paired(own, times[other]):.2f}" for other in ("DTensor", "functions")]
            print(f"| {name} | {batch} | {1e3 * median(own):.1f} | {' | '.join(ratios)} |")


if __name__ == "__main__":
    main()
