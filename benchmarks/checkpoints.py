"""Checkpoints against torch.distributed.checkpoint (DCP), on two gloo processes.

    python benchmarks/checkpoints.py speed [rounds] [folder ...]     save and restore of 400 MB: a GPT and its state in ZeRO-3
    python benchmarks/checkpoints.py step [rounds]                   training steps beside a save in the background
    python benchmarks/checkpoints.py limits [rounds]                 the same beside its parts, and a bare write of the bytes
    python benchmarks/checkpoints.py digests [rounds]                a save with and without digests
    python benchmarks/checkpoints.py leaves [rounds]                 100,000 leaves of 1 KB, one process
    python benchmarks/checkpoints.py plan                            1,000 leaves on 4,096 abstract devices
    python benchmarks/checkpoints.py memory                          memory beside the arrays

Both write with fsync, and read from the page cache. Ours restores in place, as DCP does. Medians of interleaved rounds, of two
processes the slower.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from timing import interleaved, paired, slowest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional as F

import fshard as fs
from fshard import P
from fshard.checkpoint import files
from fshard.checkpoint.division import ArrayEntry, span_of
from fshard.checkpoint.index import Index, sealed
from fshard.checkpoint.snapshot import snapshot_of
from fshard.checkpoint.source import SavedFolder, Target
from fshard.mesh.layout.sharded import flatten_shards
from fshard.testing.processes import run_processes

KINDS = ("params", "exp_avg", "exp_avg_sq")


def weights() -> dict[str, torch.Tensor]:
    """Return the parameters of a GPT of 34 million parameters."""
    width, draw, found = 512, torch.Generator().manual_seed(0), dict[str, torch.Tensor]()

    def add(name: str, *shape: int) -> None:
        found[name] = torch.randn(shape, generator=draw)

    add("wte", 16000, width)
    for block in range(8):
        for name, shape in {
            "qkv": (3 * width, width),
            "proj": (width, width),
            "up": (4 * width, width),
            "down": (width, 4 * width),
        }.items():
            add(f"h.{block}.{name}.weight", *shape)
            add(f"h.{block}.{name}.bias", shape[0])
        for name in ("ln_1", "ln_2"):
            add(f"h.{block}.{name}.weight", width)
            add(f"h.{block}.{name}.bias", width)
    return found


def speed(rounds: int, base: str) -> dict[str, list[float]]:
    """Return the seconds of each call."""
    torch.set_num_threads(1)
    mesh, torch_mesh = fs.make_mesh({"data": 2}), init_device_mesh("cpu", (2,))
    full, rank = weights(), dist.get_rank()
    stages = fs.make_mesh({"pipe": 2})
    names = [*full]
    first = {name: place < len(names) // 2 for place, name in enumerate(names)}
    layouts = {
        "same": {name: fs.Layout(mesh, P.flat("data")) for name in names},
        "replicated": {name: fs.Layout(mesh, P()) for name in names},
        "stages": {
            name: fs.Layout(stages, P(at={"pipe": 0 if first[name] else 1})) for name in names
        },
    }

    def ours(kind: str) -> Any:
        return {one: fs.device_put(full, layouts[kind]) for one in KINDS}

    def theirs(placement: Any) -> Any:
        return {
            one: {name: distribute_tensor(x, torch_mesh, [placement]) for name, x in full.items()}
            for one in KINDS
        }

    def own_stage() -> Any:
        return {
            one: {name: x.clone() for name, x in full.items() if first[name] == (rank == 0)}
            for one in KINDS
        }

    def alone() -> Any:
        return (
            {one: {name: x.clone() for name, x in full.items()} for one in KINDS}
            if rank == 0
            else {}
        )

    mine, dcps = ours("same"), theirs(Shard(0))
    folders = {name: Path(base, f"fshard-{name}") for name in ("ours", "dcp", "to-ours", "to-dcp")}

    def emptied() -> None:
        dist.barrier()
        if rank == 0:
            for name in ("to-ours", "to-dcp"):
                shutil.rmtree(folders[name], ignore_errors=True)
        dist.barrier()

    fs.save(folders["ours"], mine)
    dcp.save(dcps, checkpoint_id=folders["dcp"])
    targets = {kind: ours(kind) for kind in layouts}
    torch_targets = {
        "same": theirs(Shard(0)),
        "replicated": theirs(Replicate()),
        "stages": own_stage(),
    }
    single = alone()

    def only_first(call: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: call() if rank == 0 else None

    calls: dict[str, Callable[[], Any]] = {
        "save, ours": lambda: fs.save(folders["to-ours"], mine),
        "save, dcp": lambda: dcp.save(dcps, checkpoint_id=folders["to-dcp"]),
        "2 -> 1, ours": only_first(lambda: fs.restore(folders["ours"], single)),
        "2 -> 1, dcp": only_first(
            lambda: dcp.load(single, checkpoint_id=folders["dcp"], no_dist=True)
        ),
    }
    for kind in layouts:
        calls[f"{kind}, ours"] = lambda kind=kind: fs.restore(folders["ours"], targets[kind])
        calls[f"{kind}, dcp"] = lambda kind=kind: dcp.load(
            torch_targets[kind], checkpoint_id=folders["dcp"]
        )
    times = slowest(interleaved(calls, rounds, warm_up=1, ready=emptied))
    dist.barrier()
    if rank == 0:
        for folder in folders.values():
            shutil.rmtree(folder, ignore_errors=True)
    return times


class Block(nn.Module):
    """A block of a GPT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend, then apply the MLP."""
        q, k, v = (
            y.unflatten(-1, (8, -1)).transpose(1, 2) for y in self.qkv(self.ln_1(x)).chunk(3, -1)
        )
        x = x + self.proj(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


def trained(mesh: fs.Mesh) -> tuple[Callable[[Any], Any], dict[str, Any]]:
    """Return a step of training in ZeRO-3, and the state of a GPT of 34 million parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(16000, 512), *(Block(512) for _ in range(8)), nn.Linear(512, 256)
    )
    apply, params, buffers = fs.functionalize(model)
    params, opt = fs.shard_params(params, fs.fsdp("data"), mesh=mesh), fs.optim.adamw(1e-4)

    def loss_fn(params: Any, batch: Any) -> torch.Tensor:
        y, _ = apply(params, buffers, batch)
        return F.cross_entropy(y.flatten(0, 1), batch.flatten() % 256)

    step_fn = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), donate=True)
    batch = torch.randint(16000, (8, 64), generator=torch.Generator().manual_seed(1))

    def step(run: Any) -> Any:
        params, state, _ = step_fn(run["params"], run["state"], batch)
        return {"params": params, "state": state}

    return step, {"params": params, "state": opt.init(params)}


def background(rounds: int, base: str) -> dict[str, list[float]]:
    """Return the seconds of three steps, without a save and with one before them, and of a save that is waited for."""
    torch.set_num_threads(1)
    step, run = trained(fs.make_mesh({"data": 2}))
    folder = fs.Checkpoints(Path(base, "fshard-steps"), keep=1)
    number = count()

    def three(save: bool) -> Callable[[], None]:
        def call() -> None:
            nonlocal run
            if save:
                folder.save(next(number), run, wait=False)
            for _ in range(3):
                run = step(run)

        return call

    def ready() -> None:
        folder.wait()
        dist.barrier()

    calls = {
        "steps": three(save=False),
        "save, steps": three(save=True),
        "save": lambda: folder.save(next(number), run),
    }
    times = slowest(interleaved(calls, rounds, warm_up=1, ready=ready))
    ready()
    if dist.get_rank() == 0:
        shutil.rmtree(folder.path)
    return times


@torch.no_grad()
def limits(rounds: int, base: str) -> dict[str, list[float]]:
    """Return the seconds of three steps, alone and after each part of a save in the background, and of a save."""
    torch.set_num_threads(1)
    step, run = trained(fs.make_mesh({"data": 2}))
    folder, number, staging = (
        fs.Checkpoints(Path(base, "fshard-limits"), keep=1),
        count(),
        dict[int, torch.Tensor](),
    )
    path, writing = Path(base, f"fshard-bare-{dist.get_rank()}"), list[threading.Thread]()

    def write(shares: Any) -> None:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for one in (one for ranges in shares.values() for one in ranges):
            data = files.bytes_of(one.values)
            while data:
                data = data[os.write(file, data[: files.BLOCK]) :]
        os.fsync(file)
        os.close(file)

    def bare() -> None:
        writing.append(
            threading.Thread(target=write, args=(snapshot_of(run).staged(staging).shares,))
        )
        writing[-1].start()

    def then_steps(begin: Callable[[], Any]) -> Callable[[], None]:
        def call() -> None:
            nonlocal run
            begin()
            with torch.enable_grad():
                for _ in range(3):
                    run = step(run)

        return call

    def ready() -> None:
        folder.wait()
        while writing:
            writing.pop().join()
        dist.barrier()

    calls: dict[str, Callable[[], Any]] = {
        "steps": then_steps(lambda: None),
        "names": then_steps(lambda: snapshot_of(run)),
        "names, copy": then_steps(lambda: snapshot_of(run).staged(staging)),
        "names, copy, bare write": then_steps(bare),
        "save(wait=False)": then_steps(lambda: folder.save(next(number), run, wait=False)),
        "save": lambda: folder.save(next(number), run),
    }
    times = slowest(interleaved(calls, rounds, warm_up=1, ready=ready))
    ready()
    path.unlink()
    if dist.get_rank() == 0:
        shutil.rmtree(folder.path)
    return times


class NoDigest:
    """A hash that looks at no bytes."""

    def update(self, data: Any) -> None: ...

    def reset(self) -> None: ...

    def hexdigest(self) -> str:
        """Return a digest of the usual length."""
        return "0" * 16


def digests(rounds: int, base: str) -> dict[str, list[float]]:
    """Return the seconds of a save of 400 MB with and without digests of the data."""
    torch.set_num_threads(1)
    layout, path = (
        fs.Layout(fs.make_mesh({"data": 2}), P.flat("data")),
        Path(base, "fshard-digests"),
    )
    mine = {one: fs.device_put(weights(), layout) for one in KINDS}
    real: Any = files.xxhash.xxh3_64

    def saving(kind: Any) -> Callable[[], None]:
        def call() -> None:
            files.xxhash.xxh3_64 = kind
            fs.save(path, mine)
            files.xxhash.xxh3_64 = real

        return call

    def ready() -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
        dist.barrier()

    times = slowest(
        interleaved(
            {"with": saving(real), "without": saving(NoDigest)}, rounds, warm_up=1, ready=ready
        )
    )
    ready()
    return times


def memory(base: str) -> dict[str, float]:
    """Return the MiB that a process takes beside its arrays."""
    torch.set_num_threads(1)
    _, run = trained(fs.make_mesh({"data": 2}))
    folder = fs.Checkpoints(Path(base, "fshard-memory"), keep=1)
    own = sum(x.nbytes for x in flatten_shards(run)[0]) >> 20
    taken = {"the own shards": float(own)}
    for name, call in {
        "save": lambda: folder.save(1, run),
        "save, wait=False": lambda: (folder.save(2, run, wait=False), folder.wait()),
        "restore": lambda: folder.restore(run),
    }.items():
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = resident("VmRSS")
        call()
        taken[name] = (resident("VmHWM") - before) / 1024
        dist.barrier()
    return taken


def resident(what: str) -> int:
    """Return a line of /proc/self/status, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what))


def leaves(rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each call, of 100,000 leaves."""
    tree = {f"layer.{number}.w": torch.full((256,), float(number)) for number in range(100_000)}
    copy = {name: torch.zeros_like(x) for name, x in tree.items()}
    base = Path(tempfile.mkdtemp())
    fs.save(base / "ours", tree)
    dcp.save(tree, checkpoint_id=base / "dcp", no_dist=True)
    calls: dict[str, Callable[[], Any]] = {
        "save, ours": lambda: fs.save(base / "to-ours", tree),
        "save, dcp": lambda: dcp.save(tree, checkpoint_id=base / "to-dcp", no_dist=True),
        "restore, ours": lambda: fs.restore(base / "ours", copy),
        "restore, dcp": lambda: dcp.load(copy, checkpoint_id=base / "dcp", no_dist=True),
    }
    times = interleaved(calls, rounds, warm_up=0)
    shutil.rmtree(base)
    return times


def planned() -> None:
    """Print the size of an index of 4,096 devices, and how long one of them takes to plan what it reads."""
    mesh = fs.make_mesh({"data": 512, "model": 8}, runtime="abstract")
    specs = [P.flat("data"), P(None, "model", flat="data"), P("model"), P()]
    arrays = list[ArrayEntry]()
    for number in range(1000):
        shape, layout = (1024 + number, 512), fs.Layout(mesh, specs[number % len(specs)])
        name = f"layers.{number}.w"
        arrays.append(
            ArrayEntry(name, ("params", name), shape, torch.float32, layout, (0, 0), shape)
        )
    index = Index(mesh.size, arrays, {}, [])
    print(f"index: {len(sealed(index.text)) / 1e6:.2f} MB")
    half = fs.make_mesh({"data": 256, "model": 16}, runtime="abstract")
    for device in (0, 2000):
        began = time.perf_counter()
        source = SavedFolder(Path(), Index(mesh.size, arrays, {}, []))
        room = torch.empty(0)
        wanted = [
            Target(
                one.name,
                span_of(fs.Layout(half, P(None, "model", flat="data")), one.shape, device),
                room,
            )
            for one in arrays
        ]
        count = sum(map(len, source.ranges(wanted).values()))
        print(f"device {device}: {count} reads planned in {time.perf_counter() - began:.2f} s")


def table(times: dict[str, list[float]]) -> None:
    """Print medians, and ratios to DCP."""
    print("| call | ours, ms | DCP, ms | ratio |")
    print("|---|---|---|---|")
    for name in dict.fromkeys(name.rpartition(", ")[0] for name in times):
        one, other = times[f"{name}, ours"], times[f"{name}, dcp"]
        print(
            f"| {name} | {1e3 * median(one):.0f} | {1e3 * median(other):.0f} | {paired(one, other):.2f} |"
        )


def list_longer(base: str, times: dict[str, list[float]]) -> None:
    """Print by how much three steps are longer than alone, in shares of a save."""
    save = median(times.pop("save"))
    print(
        f"{base}: 3 steps {median(times['steps']):.2f} s, a save {save:.2f} s; longer, in shares of a save:"
    )
    for name, one in times.items():
        print(
            f"{name}: {median(b - a for a, b in zip(times['steps'], one, strict=True)) / save:.0%}"
        )


def list_digests(base: str, times: dict[str, list[float]]) -> None:
    """Print the share of digests."""
    share = median((a - b) / a for a, b in zip(times["with"], times["without"], strict=True))
    print(f"{base}: a save {1e3 * median(times['with']):.0f} ms, digests {share:.0%} of it")


LISTS = {
    "step": (background, list_longer),
    "limits": (limits, list_longer),
    "digests": (digests, list_digests),
}


def main() -> None:
    """Run a benchmark."""
    what, *rest = sys.argv[1:] or ["speed"]
    rounds = int(rest[0]) if rest else 9
    if what == "speed":
        for base in rest[1:] or [tempfile.gettempdir(), "/dev/shm"]:
            print(f"\nin {base}")
            table(run_processes(speed, 2, rounds, base, timeout=580)[0])
    elif what in LISTS:
        call, show = LISTS[what]
        for base in [tempfile.gettempdir(), "/dev/shm"]:
            show(base, run_processes(call, 2, rounds, base, timeout=580)[0])
    elif what == "memory":
        for name, size in run_processes(memory, 2, tempfile.gettempdir(), timeout=580)[0].items():
            print(f"{name}: {size:.0f} MiB")
    elif what == "leaves":
        table(leaves(rounds))
    elif what == "plan":
        planned()


if __name__ == "__main__":
    main()
