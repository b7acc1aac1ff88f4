"""Weights from one mesh to another, against torch: full_tensor() of DTensors, broadcast over gloo, and slices.

    python benchmarks/between.py                           200 MB, disjoint and overlapping meshes (bar: 0.33)
    python benchmarks/between.py disjoint --rounds 9       one of them
    python benchmarks/between.py --gloo                    ours over gloo too, as between machines
    python benchmarks/between.py plan                      235 billion parameters on 128 abstract devices (bar: 10 s)

A trainer on processes 0 to 3 has the parameters in ZeRO-3, an engine on two processes in tensor parallelism: on 4 and 5
(disjoint), or on 0 and 1 (overlapping). Torch's users gather each DTensor, broadcast it to the engine's processes, and slice
it there. Calls are made in turn, round after round; of all processes the slowest counts, and CPU seconds are those of all.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from timing import interleaved, paired, slowest
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fshard as fs
from fshard import P
from fshard.mesh.layout.sharded import Sharded
from fshard.testing.processes import run_processes

MB = 1 << 20
TRAINER = 4
ENGINES = {"disjoint": (4, 5), "overlapping": (0, 1)}
"""The processes of the engine."""
Params = dict[str, Tensor]


def weights(size: int) -> Params:
    """Return the parameters of a model of this many bytes: eight blocks and an embedding."""
    width = 16 * max(1, int((size / 4 / 112) ** 0.5) // 16)
    draw = torch.Generator().manual_seed(0)
    params: Params = {"embed": torch.randn(16 * width, width, generator=draw)}
    for block in range(8):
        params[f"{block}.qkv"] = torch.randn(3 * width, width, generator=draw)
        params[f"{block}.proj"] = torch.randn(width, width, generator=draw)
        params[f"{block}.up"] = torch.randn(4 * width, width, generator=draw)
        params[f"{block}.down"] = torch.randn(width, 4 * width, generator=draw)
    return params


def engine_dim(name: str) -> int:
    """Return the dim that the engine shards: columns of what reads features, else rows."""
    return 1 if name.endswith(("proj", "down")) else 0


# -- processes -----------------------------------------------------------------------------------------------------


def ours(full: Params, engine: tuple[int, ...]) -> Callable[[], Params | None]:
    """Return a call that moves the parameters, and returns this process's shards of the engine."""
    trainer_mesh = fs.make_mesh({"data": TRAINER}, devices=range(TRAINER))
    engine_mesh = fs.make_mesh({"model": 2}, devices=engine)
    params = fs.device_put(full, fs.Layout(trainer_mesh, P.flat("data")))
    layouts: dict[str, fs.Layout] = {}
    for name in full:
        spec = P(None, "model") if engine_dim(name) else P("model")
        layouts[name] = fs.Layout(engine_mesh, spec)

    def move() -> Params | None:
        moved: dict[str, Sharded] = fs.reshard(params, layouts)
        if not engine_mesh.is_member:
            return None
        return {name: x.local for name, x in moved.items()}

    return move


def torchs(full: Params, engine: tuple[int, ...]) -> Callable[[], Params | None]:
    """Return the same of torch."""
    rank = dist.get_rank()
    mesh = DeviceMesh("cpu", torch.arange(TRAINER))
    params: dict[str, DTensor] = {}
    if rank < TRAINER:
        params = {name: distribute_tensor(x, mesh, [Shard(0)]) for name, x in full.items()}
    is_disjoint = engine[0] >= TRAINER
    group = dist.new_group([0, *engine] if is_disjoint else [*engine])

    def move() -> Params | None:
        shards: Params = {}
        for name, like in full.items():
            x = params[name].full_tensor() if rank < TRAINER else torch.empty_like(like)
            if is_disjoint and (rank == 0 or rank in engine):
                dist.broadcast(x, 0, group=group)
            if rank in engine:
                shards[name] = x.chunk(2, engine_dim(name))[engine.index(rank)].contiguous()
        return shards or None

    return move


def timed(size: int, engine: tuple[int, ...], rounds: int) -> tuple[Any, Any]:
    """Return the seconds of each call in each round, and this process's CPU seconds of all."""
    torch.set_num_threads(1)
    full = weights(size)
    calls = {"ours": ours(full, engine), "torch": torchs(full, engine)}
    results = {name: call() for name, call in calls.items()}
    compare(results["ours"], results["torch"])
    del results

    seconds = dict.fromkeys(calls, 0.0)

    def counted(name: str) -> Callable[[], None]:
        def call() -> None:
            began = time.process_time()
            calls[name]()
            seconds[name] += time.process_time() - began

        return call

    times = interleaved({name: counted(name) for name in calls}, rounds, ready=dist.barrier)
    total = torch.tensor([*seconds.values()], dtype=torch.float64) / (rounds + 2)
    dist.all_reduce(total)
    return slowest(times), dict(zip(calls, total.tolist(), strict=True))


def compare(actual: Params | None, expected: Params | None) -> None:
    """Raise unless both have the same shards."""
    if actual is None or expected is None:
        assert actual is None and expected is None
        return
    for name, x in expected.items():
        assert torch.equal(actual[name], x), f"{name} has other values"


def processes(console: Console, names: list[str], size: int, rounds: int, *, gloo: bool) -> None:
    table = Table(
        "engine", "link", "ours, ms", "torch, ms", "ratio", "ours, CPU s", "torch, CPU s",
        title=f"{size / MB:.0f} MB from ZeRO-3 on 4 processes to tensor parallelism on 2 (bar: 0.33)",
    )  # fmt: skip
    links = {"shared memory": {}}
    if gloo:
        links["gloo"] = {"FSHARD_DIRECT": "0"}
    for name in names:
        engine = ENGINES[name]
        count = max(TRAINER, max(engine) + 1)
        for link, environment in links.items():
            times, seconds = run_processes(
                timed, count, size, engine, rounds, environment=environment, timeout=600
            )[0]
            table.add_row(
                name, link, f"{median(times['ours']) * 1e3:.0f}", f"{median(times['torch']) * 1e3:.0f}",
                f"{paired(times['ours'], times['torch']):.2f}",
                f"{seconds['ours']:.2f}", f"{seconds['torch']:.2f}",
            )  # fmt: skip
    console.print(table)


# -- the plan of a large model -------------------------------------------------------------------------------------


def mixture_shapes(layers: int = 94, experts: int = 128) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a mixture of experts of 235 billion parameters, one leaf for each expert's weight."""
    hidden, heads, kv_heads, head, wide = 4096, 64, 4, 128, 1536
    shapes: dict[str, tuple[int, ...]] = {"embed": (151936, hidden), "head": (151936, hidden)}
    for layer in range(layers):
        shapes[f"{layer}.q"] = (heads * head, hidden)
        shapes[f"{layer}.k"] = (kv_heads * head, hidden)
        shapes[f"{layer}.v"] = (kv_heads * head, hidden)
        shapes[f"{layer}.o"] = (hidden, heads * head)
        shapes[f"{layer}.norm1"] = (hidden,)
        shapes[f"{layer}.norm2"] = (hidden,)
        shapes[f"{layer}.router"] = (experts, hidden)
        for expert in range(experts):
            shapes[f"{layer}.{expert}.gate"] = (wide, hidden)
            shapes[f"{layer}.{expert}.up"] = (wide, hidden)
            shapes[f"{layer}.{expert}.down"] = (hidden, wide)
    return shapes


def spec_of(name: str, *, is_flat: bool) -> P:
    """Return the spec of a leaf along "model", with its shards flat over "data" or replicated."""
    flat = "data" if is_flat else None
    kind = name.rpartition(".")[2]
    if kind in ("o", "down"):
        return P(None, "model", flat=flat)
    if kind in ("norm1", "norm2", "router"):
        return P(flat=flat)
    return P("model", flat=flat)


def plan(console: Console, layers: int) -> None:
    trainer = fs.make_mesh({"data": 16, "model": 8}, devices=range(128), runtime="abstract")
    engine = fs.make_mesh({"replica": 16, "model": 8}, devices=range(128, 256), runtime="abstract")
    params: dict[str, Sharded] = {}
    layouts: dict[str, fs.Layout] = {}
    for name, shape in mixture_shapes(layers).items():
        layout = fs.Layout(trainer, spec_of(name, is_flat=True))
        shard = torch.empty(layout.local_shape(shape), dtype=torch.bfloat16, device="meta")
        params[name] = Sharded(shape, layout, (shard,))
        layouts[name] = fs.Layout(engine, spec_of(name, is_flat=False))

    began = time.process_time()
    with fs.ledger() as comm:
        fs.reshard(params, layouts)
    seconds = time.process_time() - began
    count = sum([_numel(x.shape) for x in params.values()])
    sent = sum(comm.links.values())
    console.print(
        f"{count / 1e9:.0f} billion parameters in {len(params)} leaves, {sent / 1e12:.2f} TB over "
        f"{len(comm.links)} links: planned in {seconds:.1f} s (bar: 10)"
    )


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=f"of {', '.join([*ENGINES, 'plan'])}")
    parser.add_argument("--size", type=float, default=200, help="of the parameters, in MB")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=94, help="of the model that is planned")
    parser.add_argument("--gloo", action="store_true", help="time ours over gloo too")
    arguments = parser.parse_args()
    console = Console()
    parts: list[str] = arguments.parts or [*ENGINES]
    unknown = {*parts} - {*ENGINES, "plan"}
    if unknown:
        parser.error(f"there is no part {', '.join(sorted(unknown))}")
    names = [name for name in parts if name in ENGINES]
    if names:
        processes(console, names, int(arguments.size * MB), arguments.rounds, gloo=arguments.gloo)
    if "plan" in parts:
        plan(console, arguments.layers)


if __name__ == "__main__":
    main()
