"""Training on GPUs: fshard against torch's own loops, in one process for each card.

    python benchmarks/gpu.py --smoke                                 on a new machine first: two minutes, see gpu_smoke.py
    torchrun --nproc-per-node 8 benchmarks/gpu.py --json out.json    everything, on 1 to 8 cards
    python benchmarks/gpu.py bf16 --only plain "fshard 3"            one part, some variants, on one card
    torchrun --nproc-per-node 2 benchmarks/gpu.py --device cpu --size tiny --rounds 1     the same program without a card

    bf16, masters    a GPT and fused AdamW; all in bf16, or float32 masters of which bf16 copies compute
    features         what recomputation, offload, loss scaling, ... cost beside stage 3
    memory           parameters and state on the host, against CPUOffloadPolicy; `--size 7b` on one card: --only "fshard, host"
    reproducible     what the mode costs: the deterministic kernels of CUDA are chosen for this part
    wires            bus bandwidth of collectives, against plain torch.distributed
    pipeline         against torch.distributed.pipelining
    checkpoints      bytes a second, and how long a save in the background stops training, against DCP

All variants of a table train one model on the same data; buckets are 25 MiB and one unit is prefetched, as torch's
defaults are. In every round each makes a few steps, in a new random order; the slowest process counts; medians are shown.

    ms               from CUDA events around the steps; `host` is the time until the last call returned
    exposed          communication during which no other kernel runs, from a profile of one step
    launches, syncs  kernels of that step, and calls of the host that wait for the device
    peak, first      most memory in a step, and in the first one; `retries` of the allocator should be 0
    counted          most memory of a step by fs.memory.limit: peak should be at most 5 % more
    loss 0, 1, ..    of the last steps: equal within 2 %, and to the bit for reproducible steps
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import runners
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import BATCHES, RATE, SEED, Batch, Gpt, Model, Params, Step, Unit
from peers import ddp, ddp_zero, fsdp
from rich.console import Console
from rich.table import Table
from timing import interleaved, over, paired, slowest
from torch import Tensor
from torch.autograd import DeviceType
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import AdamW
from torch.profiler import ProfilerActivity, profile

import fshard as fs
from fshard import P
from fshard.mesh.layout import Memory
from fshard.mesh.spmd.deterministic import missing_cuda_settings

SIZES = {
    "350m": Gpt(width=1024, heads=16, depth=24, vocabulary=50304, length=1024, sequences=8),
    "7b": Gpt(width=4096, heads=32, depth=32, vocabulary=32000, length=2048, sequences=1),
    "tiny": Gpt(width=16, heads=2, depth=2, vocabulary=64, length=16, sequences=2),
}
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Dense bf16 operations a second, by a part of the device's name."""
SYNCS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
STEPS, TOLERANCE, MIB = 4, 2e-2, 1 << 20
Interval = tuple[float, float]
Row = dict[str, float]
Rows = dict[str, Row]


@dataclass(frozen=True)
class Task:
    """The model, its data and the devices of a run."""

    gpt: Gpt
    mesh: fs.Mesh
    precision: str
    compiled: bool = False

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return torch.device(
            self.mesh.device_type,
            torch.cuda.current_device() if self.mesh.device_type == "cuda" else None,
        )

    @property
    def name(self) -> str:
        """The name of the device, short if its peak is known."""
        name = torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu"
        return next((short for short in PEAK_FLOPS if short in name), name)

    def wait(self) -> None:
        """Wait until the device has done all it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def model(self, wrap: Callable[[Unit], Unit] = lambda unit: unit) -> Model:
        """Return the model with parameters on the device in their dtype, and each unit wrapped."""
        model, dtype = (
            self.gpt.model(),
            torch.bfloat16 if self.precision == "bf16" else torch.float32,
        )

        def init(seed: int) -> Params:
            return {name: x.to(self.device, dtype) for name, x in model.init(seed).items()}

        return model._replace(
            units={name: wrap(unit) for name, unit in model.units.items()}, init=init
        )

    def data(self) -> list[Batch]:
        """Return the batches of this process."""
        batches = [self.gpt.model().batch(index, dist.get_rank()) for index in range(BATCHES)]
        return [{name: x.to(self.device) for name, x in batch.items()} for batch in batches]

    def flops(self) -> float:
        """Return the operations of one device's step: 6 for each weight and token, and causal attention."""
        gpt, tokens = self.gpt, self.gpt.sequences * self.gpt.length
        shapes = {name: x.shape for name, x in gpt.model().init(SEED).items() if x.ndim == 2}
        weights = sum(
            shape.numel() for name, shape in shapes.items() if not name.startswith("embed")
        )
        return 6.0 * tokens * (weights + gpt.depth * gpt.width * gpt.length)


# -- the variants --------------------------------------------------------------------------------------------------


def in_bf16(unit: Unit) -> Unit:
    """Cast parameters where they are used, which changes nothing if they are bf16 already."""
    return lambda params, x, batch: unit(
        {name: leaf.bfloat16() for name, leaf in params.items()}, x, batch
    )


def autocast(unit: Unit) -> Unit:
    def run(params: Params, x: Tensor, batch: Batch) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return unit(params, x, batch)

    return run


def plain(task: Task, wrap: Callable[[Unit], Unit] = in_bf16) -> Step:
    """The usual loop on this process's data alone."""
    model, data = task.model(wrap), task.data()
    params, run = model.init(SEED), torch.compile(model.loss) if task.compiled else model.loss
    optimizer = AdamW([leaf.requires_grad_() for leaf in params.values()], lr=RATE, fused=True)

    def step(index: int) -> Tensor:
        loss = run(params, data[index])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def by_torch(make: Callable[[Model, list[Batch], fs.Mesh], Step], task: Task) -> Step:
    return make(task.model(in_bf16), task.data(), task.mesh)


def by_fully_shard(task: Task, offload: OffloadPolicy | None = None) -> Step:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    return fsdp(True, task.model(), task.data(), task.mesh, policy, offload)


def fshard(
    stage: int,
    task: Task,
    wrap: Callable[[Unit], Unit] = lambda unit: unit,
    optimizer: Callable[[fs.optim.Optimizer], fs.optim.Optimizer] = lambda opt: opt,
    memory: Memory = "device",
    offload: Mapping[str, Any] = {},
    **options: Any,
) -> Step:
    """What a user of ours writes."""
    mesh, model = task.mesh, task.model(wrap)
    params = fs.shard_params(
        model.init(SEED), fs.fsdp("data") if stage == 3 else P(), mesh=mesh, memory=memory
    )
    opt = fs.partition_optimizer(
        optimizer(fs.optim.adamw(RATE)), mesh=mesh, axis="data", stage=stage, **offload
    )
    state, layout = opt.init(params), fs.Layout(mesh, P("data"))
    data = [{name: fs.from_local(x, layout) for name, x in batch.items()} for batch in task.data()]
    loss_fn = (
        fs.with_unsharded_params(torch.compile(model.loss), keep=True)
        if task.compiled
        else model.loss
    )
    options = {
        "precision": "bf16" if task.precision == "masters" else None,
    } | options
    if options.get("reproducible"):
        options["slices"] = 2 * mesh.size
    train = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), donate=True, **options)

    def step(index: int) -> Tensor:
        nonlocal params, state
        params, state, metrics = train(params, state, data[index])
        return metrics["loss"]

    return step


Variants = dict[str, Callable[[Task], Step]]
PEERS: Variants = {
    "plain": plain,
    "ddp": partial(by_torch, ddp),
    "ddp + zero optimizer": partial(by_torch, ddp_zero),
    "fully_shard": by_fully_shard,
    **{f"fshard {stage}": partial(fshard, stage) for stage in range(4)},
}
TABLES: dict[str, Variants] = {
    "bf16": PEERS,
    "masters": {"autocast": partial(plain, wrap=autocast), **PEERS},
    "features": {
        "fshard 3": partial(fshard, 3),
        "remat": partial(fshard, 3, wrap=fs.remat),
        "offload": partial(fshard, 3, wrap=partial(fs.remat, policy=fs.nn.offload("dots"))),
        "fp16": partial(fshard, 3, optimizer=fs.optim.loss_scaled, precision="fp16"),
        "clip": partial(
            fshard, 3, optimizer=partial(fs.optim.chain, fs.optim.clip_by_global_norm(1.0))
        ),
        "accumulate 2": partial(fshard, 3, accumulate=2),
    },
    "memory": {
        "fully_shard": by_fully_shard,
        "fully_shard, CPU offload": partial(
            by_fully_shard, offload=CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        ),
        "fshard 3": partial(fshard, 3),
        "fshard, state on the host": partial(fshard, 3, offload={"state_memory": "host"}),
        "fshard, host": partial(
            fshard, 3, memory="host", offload={"state_memory": "host", "update_on": "host"}
        ),
    },
    "reproducible": {
        "fshard 3": partial(fshard, 3),
        "reproducible 0": partial(fshard, 0, reproducible=True),
        "reproducible 3": partial(fshard, 3, reproducible=True),
    },
}
ALONE = ("plain", "autocast")
"""They train on this process's data only: with several processes they have other losses."""


# -- measuring -----------------------------------------------------------------------------------------------------


def memory_of(task: Task, step: Callable[[], Any], *, counts: bool) -> Row:
    """Return the peak of the first step and of the next ones, counted too, what is reserved, and the allocator's retries."""
    row: Row = {}
    if counts:
        with fs.memory.limit() as used:
            step()
        row = {"counted MiB": used.peak() / MIB, "host MiB": used.peak("host") / MIB}
    if task.device.type == "cpu":
        return row  # see zero.py, which measures it in processes of their own
    for name, times in (("first MiB", 1), ("peak MiB", BATCHES)):
        torch.cuda.reset_peak_memory_stats()
        for _ in range(times):
            step()
        row[name] = torch.cuda.max_memory_allocated() / MIB
    stats = torch.cuda.memory_stats()
    return row | {
        "reserved MiB": stats["reserved_bytes.all.peak"] / MIB,
        "retries": stats["num_alloc_retries"],
    }


def profile_of(task: Task, step: Callable[[], Any]) -> Row:
    """Return launches, waits of the host and the times of communication, of a step that is not the first."""
    is_cuda = task.device.type == "cuda"
    step()
    task.wait()
    with profile(
        activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * is_cuda], acc_events=True
    ) as run:
        step()
        task.wait()
    events: Any = run.events()
    kernels = [one for one in events if one.device_type == DeviceType.CUDA]
    sent, computed = (
        [
            (one.time_range.start, one.time_range.end)
            for one in kernels
            if ("nccl" in one.name) == is_sent
        ]
        for is_sent in (True, False)
    )
    syncs = sum(one.name in SYNCS for one in events) - is_cuda  # the last one is that of `wait`
    return {
        "launches": len(kernels),
        "syncs": syncs,
        "sent ms": union(sent) / 1e3,
        "exposed ms": exposed(sent, computed) / 1e3,
    }


def exposed(sent: list[Interval], computed: list[Interval]) -> float:
    """Return the time in which anything is sent and nothing computed."""
    return union([*sent, *computed]) - union(computed)


def union(intervals: list[Interval]) -> float:
    """Return the length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def timed(
    task: Task,
    step: Callable[[], Tensor],
    host: list[float],
    device: list[float],
    losses: list[Tensor],
) -> None:
    """Make some steps; note the seconds of each until the last call returned, and until the device was done."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * (task.device.type == "cuda"))]
    began = time.perf_counter()
    for event in events[:1]:
        event.record()
    losses[:] = [step() for _ in range(STEPS)]
    host.append((time.perf_counter() - began) / STEPS)
    for event in events[1:]:
        event.record()
    task.wait()
    total = events[0].elapsed_time(events[1]) / 1e3 if events else time.perf_counter() - began
    device.append(total / STEPS)


def steps(variants: Variants, task: Task, rounds: int) -> Rows:
    """Measure the memory of one variant at a time, then the times of all in turn; compare what they train."""
    rows: Rows = {}
    for name, make in variants.items():
        gc.collect()
        step = over(BATCHES, make(task))
        rows[name] = memory_of(task, step, counts="fshard" in name) | profile_of(task, step)
        del step
    host, device = ({name: list[float]() for name in variants} for _ in range(2))
    losses = {name: list[Tensor]() for name in variants}
    calls = {
        name: partial(
            timed, task, over(BATCHES, make(task)), host[name], device[name], losses[name]
        )
        for name, make in variants.items()
    }
    interleaved(calls, rounds, between=gc.collect, ready=dist.barrier)
    curves = torch.stack([torch.stack(curve).float() for curve in losses.values()])
    dist.all_reduce(curves)
    host, device = slowest(host, task.device), slowest(device, task.device)
    tokens, flops, first = (
        task.gpt.sequences * task.gpt.length * task.mesh.size,
        task.flops(),
        next(iter(device.values())),
    )
    for (name, row), curve in zip(rows.items(), (curves / task.mesh.size).tolist(), strict=True):
        seconds = median(device[name][-rounds:])
        times = {
            "ms": seconds * 1e3,
            "host ms": median(host[name][-rounds:]) * 1e3,
            "tokens/s": tokens / seconds,
        }
        times["x first"] = paired(device[name][-rounds:], first[-rounds:])
        if task.name in PEAK_FLOPS:
            times["MFU %"] = 100 * flops / seconds / PEAK_FLOPS[task.name]
        rows[name] = times | row | {f"loss {index}": loss for index, loss in enumerate(curve)}
    compare({name: row for name, row in rows.items() if task.mesh.size == 1 or name not in ALONE})
    return rows


def compare(rows: Rows) -> None:
    """Raise unless all have trained one model, and reproducible steps give the same bits."""
    curves = {name: [row[f"loss {index}"] for index in range(STEPS)] for name, row in rows.items()}
    middle = [median(losses) for losses in zip(*curves.values(), strict=True)]
    unlike = [
        name
        for name, losses in curves.items()
        if not all(
            abs(loss - mean) <= TOLERANCE * abs(mean)
            for loss, mean in zip(losses, middle, strict=True)
        )
    ]
    bits = {tuple(losses) for name, losses in curves.items() if name.startswith("reproducible")}
    if unlike or len(bits) > 1:
        raise AssertionError(
            f"{', '.join(unlike) or 'reproducible steps'} did not train what the others did: {curves}"
        )


# -- the other parts -----------------------------------------------------------------------------------------------


def wires(task: Task, rounds: int) -> Rows:
    """Return the bus bandwidth of each collective in GB/s."""
    n, rows = task.mesh.size, Rows()
    gather, scatter = (  # torch 2.13 has new names
        getattr(dist, name, None) or getattr(dist, old)
        for name, old in (
            ("all_gather_single", "all_gather_into_tensor"),
            ("reduce_scatter_single", "reduce_scatter_tensor"),
        )
    )

    def several(call: Callable[[], Any]) -> None:
        for _ in range(STEPS):
            call()
        task.wait()

    for size in (MIB, 16 * MIB, 256 * MIB) if task.device.type == "cuda" else (64 << 10,):
        x = torch.ones(size // 4 // n * n, device=task.device)
        large, small = x.new_empty(n * x.numel()), x.new_empty(x.numel() // n)
        pairs: dict[str, tuple[float, Callable[..., Any], Callable[[], Any]]] = {
            "psum": (2, fs.psum, partial(dist.all_reduce, x.clone())),
            "all_gather": (n, fs.all_gather, partial(gather, large, x)),
            "psum_scatter": (1, fs.psum_scatter, partial(scatter, small, x)),
            "all_to_all": (1, fs.all_to_all, partial(dist.all_to_all_single, x.clone(), x)),
        }
        for name, (factor, ours, theirs) in pairs.items():
            sent = STEPS * factor * (n - 1) / n * x.nbytes / 1e9
            collective = partial(ours, x, "data")
            calls = {
                "ours": partial(fs.run, several, collective, mesh=task.mesh),
                "torch": partial(several, theirs),
            }
            times = slowest(interleaved(calls, rounds, ready=dist.barrier), task.device)
            rows[f"{name}, {size >> 10} KiB"] = {
                who: sent / median(row) for who, row in times.items()
            }
    return rows


def pipeline(task: Task, rounds: int) -> Rows:
    """Return the milliseconds of each schedule's step."""
    gpt, n, rows = task.gpt, task.mesh.size, Rows()
    mesh = fs.make_mesh({"pipe": n}, device=task.device.type)
    model = Gpt(gpt.width, gpt.heads, 2 * n, vocabulary=8, length=gpt.length).model()
    stages = runners.Task(model, 2, microbatches=4 * n, rows=2, length=gpt.length, width=gpt.width)

    def to_end(step: Callable[[], Any]) -> None:
        step()
        task.wait()

    for name in runners.SCHEDULES:
        pipe = runners.Pipeline(stages, name, n, task.device)
        made = {"ours": runners.fshard(pipe, mesh), "torch": runners.torchs(pipe, mesh)}
        calls = {who: partial(to_end, step) for who, (step, _) in made.items()}
        times = slowest(interleaved(calls, rounds, ready=dist.barrier), task.device)
        torch.testing.assert_close(made["ours"][1](), made["torch"][1](), rtol=1e-3, atol=1e-4)
        rows[name] = {who: 1e3 * median(row) for who, row in times.items()}
    return rows


def checkpoints(task: Task, rounds: int) -> Rows:
    """Return the milliseconds of a save, and of a call that saves in the background."""
    folders: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    root, full, devices = folders[0], task.model().init(SEED), fs.mesh.to_device_mesh(task.mesh)
    ours = fs.shard_params(full, fs.fsdp("data"), mesh=task.mesh)
    theirs = {name: distribute_tensor(x, devices, [Shard(0)]) for name, x in full.items()}
    folder, numbers, pending = fs.Checkpoints(f"{root}/ours", keep=1), count(), list[Any]()

    def ready() -> None:
        folder.wait()
        while pending:
            pending.pop().result()
        dist.barrier()

    calls: dict[str, Callable[[], Any]] = {
        "save, ours": lambda: folder.save(next(numbers), ours),
        "save, torch": lambda: dcp.save(theirs, checkpoint_id=f"{root}/{next(numbers)}"),
        "call, ours": lambda: folder.save(next(numbers), ours, wait=False),
        "call, torch": lambda: pending.append(
            dcp.async_save(theirs, checkpoint_id=f"{root}/{next(numbers)}")
        ),
    }
    times = slowest(interleaved(calls, rounds, ready=ready), task.device)
    ready()
    shutil.rmtree(root, ignore_errors=True)
    size = sum(x.nbytes for x in full.values())
    milliseconds = {name: 1e3 * median(row) for name, row in times.items()}
    return {
        f"{call} of {size >> 20} MiB, ms": {
            who: milliseconds[f"{call}, {who}"] for who in ("ours", "torch")
        }
        for call in ("save", "call")
    }


PARTS: dict[str, Callable[[Task, int], Rows]] = {
    "wires": wires,
    "pipeline": pipeline,
    "checkpoints": checkpoints,
}
ALL = [
    "bf16",
    "masters",
    "features",
    "memory",
    *PARTS,
    "reproducible",
]  # the last, since its settings stay

# -- the program ---------------------------------------------------------------------------------------------------


def join(device: str) -> fs.Mesh:
    """Join the processes of torchrun, or begin a world of this process alone."""
    if "RANK" not in os.environ:
        os.environ |= {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29611",
        }
    if device == "cuda":
        os.environ.setdefault(
            "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
        )  # cuBLAS reads it when it starts
        torch.backends.cuda.enable_math_sdp(
            False
        )  # attention is flash, or memory-efficient in float32
        torch.backends.cuda.enable_cudnn_sdp(False)
    return fs.make_mesh({"data": int(os.environ["WORLD_SIZE"])}, device=device)


def choose_deterministic_kernels(device: str) -> None:
    """Make the settings that reproducible mode requires of a program on CUDA; they stay."""
    for line in missing_cuda_settings() if device == "cuda" else ():
        exec(line)


def machine(device: str) -> dict[str, str]:
    """Return versions, and the names, clocks, temperatures and watts of the cards."""
    found = {
        "torch": torch.__version__,
        "fshard": fs.__version__,
        "processes": str(dist.get_world_size()),
    }
    if device == "cuda":
        query = "--query-gpu=name,driver_version,clocks.sm,temperature.gpu,power.draw"
        line = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        )
        found |= {
            "cards": line.stdout.strip(),
            "NCCL": str(torch.cuda.nccl.version()),
            "backend": dist.get_backend(),
        }
    return found


def show(console: Console, title: str, rows: Rows) -> None:
    """Print rows as a table; columns that only some have are empty in others."""
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    table = Table("", *columns, title=title)
    for name, row in rows.items():
        table.add_row(name, *(f"{row[column]:.4g}" if column in row else "" for column in columns))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=ALL)
    parser.add_argument("--smoke", action="store_true", help="only see that everything runs")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--size", choices=SIZES, default="350m")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", nargs="+", default=[], help="variants of these names")
    parser.add_argument(
        "--compile", action="store_true", help="compile the loss functions of plain and fshard"
    )
    parser.add_argument("--json", help="a file for all numbers")
    chosen = parser.parse_args()
    if unknown := set(chosen.parts) - {*ALL}:
        parser.error(f"{', '.join(sorted(unknown))}: none of {', '.join(ALL)}")
    if chosen.device != "cpu" and not torch.cuda.is_available():
        parser.error(
            f"no GPU is here for --device {chosen.device}; --device cpu --size tiny shows that it runs"
        )
    mesh = join(chosen.device)
    console = Console(width=200, quiet=dist.get_rank() > 0)
    results: dict[str, Any] = {
        "machine": machine(chosen.device),
        "size": chosen.size,
        "rounds": chosen.rounds,
    }
    console.print(results["machine"])
    if chosen.smoke:
        from gpu_smoke import smoke

        raise SystemExit(smoke(console, mesh))
    for part in chosen.parts:
        task = Task(
            SIZES[chosen.size],
            mesh,
            "bf16" if part in ("bf16", "memory") else "masters",
            chosen.compile,
        )
        measure = PARTS.get(part)
        if part == "reproducible":
            choose_deterministic_kernels(chosen.device)
        if measure is None:
            names = chosen.only or TABLES[part]
            measure = partial(
                steps, {name: make for name, make in TABLES[part].items() if name in names}
            )
        elif mesh.size == 1 and part != "checkpoints":
            continue  # nothing is sent
        results[part] = measure(task, chosen.rounds)
        show(console, f"{part}: {chosen.rounds} rounds on {mesh.size} x {task.name}", results[part])
    results["machine afterwards"] = machine(chosen.device)
    if chosen.json and dist.get_rank() == 0:
        Path(chosen.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
