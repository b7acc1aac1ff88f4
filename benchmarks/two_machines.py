"""The time of a training step on two machines with a slow link between them: ours, torch's DDP and fully_shard.

    python benchmarks/two_machines.py --rounds 5                    20 ms and 100 Mbit/s each way
    python benchmarks/two_machines.py --delay 0.001 --rate 1e9      another link
    python benchmarks/two_machines.py --only ddp "fshard 0"         variants whose names begin like that

The machines are two network namespaces with two processes each, so it needs root on Linux. Ours uses shared memory within
a machine and gloo between, torch gloo. The link is this program: it forwards the packets of a TUN interface in each
namespace, each after the delay, and no faster than the rate. (`tc` would need netem, which is not in every kernel.)

All variants train an MLP with AdamW, in turn in one run; the slowest process counts. Shown are medians over the rounds.
Ours must have the bits of four virtual devices in the end, and the others the same loss. Hybrid shards parameters within
a machine and replicates them between.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import os
import pickle
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from select import select
from threading import Event, Thread
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from models import BATCHES, RATE, SEED, Batch, Mlp, Model, Step
from peers import ddp, fsdp, repeated
from rich.console import Console
from rich.table import Table
from timing import interleaved, over, paired, slowest
from torch import Tensor

import fshard as fs
from fshard import P

HOSTS = {"machine0": "10.213.9.1", "machine1": "10.213.9.2"}
"""The namespaces and their addresses."""
PACKET = 9000
"""Bytes of a packet at most (a jumbo frame): fewer packets cost the forwarder less of the processors."""
N, WARM_UP, TOLERANCE = 4, 2, 1e-3
MODEL = Mlp(narrow=256, wide=2048).model()

# -- the link ------------------------------------------------------------------------------------------------------


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"ip {' '.join(words)}: {done.stderr.strip()}")


def _tun(name: str) -> int:
    """Make a TUN interface and return its file, whose reads and writes are packets."""
    file, set_interface, tun_without_header = (
        os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK),
        0x400454CA,
        0x1001,
    )
    fcntl.ioctl(file, set_interface, struct.pack("16sH22x", name.encode(), tun_without_header))
    return file


@contextlib.contextmanager
def linked_machines(delay: float, rate: float) -> Generator[list[str]]:
    """Two network namespaces, with a link of this delay in seconds and rate in bits per second each way."""
    ended, files = Event(), [_tun(f"link{index}") for index in range(2)]
    link = Thread(target=forward, args=(files, delay, rate, ended))
    try:
        for index, (name, address) in enumerate(HOSTS.items()):
            _ip("netns", "add", name)
            _ip("link", "set", f"link{index}", "netns", name, "mtu", str(PACKET))
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", f"link{index}")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", f"link{index}", "up")
        link.start()
        yield [*HOSTS]
    finally:
        ended.set()
        if link.is_alive():
            link.join()
        for file, name in zip(files, HOSTS, strict=True):
            os.close(file)
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def forward(files: list[int], delay: float, rate: float, ended: Event) -> None:
    """Write each packet of a file to the other one: `delay` after its last bit was sent, at `rate`."""
    queues: dict[int, deque[tuple[float, bytes]]] = {file: deque() for file in files}
    sent = dict.fromkeys(files, 0.0)  # when the last bit of the last packet was sent
    others = dict(zip(files, reversed(files), strict=True))
    while not ended.is_set():
        due = min(
            (queue[0][0] for queue in queues.values() if queue), default=time.perf_counter() + 0.1
        )
        for file in select(files, [], [], max(0.0, due - time.perf_counter()))[0]:
            packet = os.read(file, PACKET)
            sent[file] = max(sent[file], time.perf_counter()) + 8 * len(packet) / rate
            queues[file].append((sent[file] + delay, packet))
        for file, queue in queues.items():
            while queue and queue[0][0] <= time.perf_counter():
                os.write(others[file], queue.popleft()[1])


# -- the variants --------------------------------------------------------------------------------------------------


def trained(stage: int, mesh: fs.Mesh) -> tuple[Any, Any, Any]:
    """Return the step, the parameters and the optimizer's state that a user of ours has; `mesh` may be virtual."""
    params = fs.shard_params(MODEL.init(SEED), fs.fsdp("data") if stage == 3 else P(), mesh=mesh)
    opt = fs.partition_optimizer(fs.optim.adamw(RATE), mesh=mesh, axis="data", stage=stage)
    train = fs.train_step(MODEL.loss, opt, mesh=mesh, batch=P(mesh.axis_names), donate=True)
    return train, params, opt.init(params)


def fshard(stage: int, model: Model, data: list[Batch], mesh: fs.Mesh) -> Step:
    return repeated(*trained(stage, mesh), data, mesh)


class Variant(NamedTuple):
    """A program to time: its step, its mesh, the variant to compare with, and the ZeRO stage of ours."""

    make: Callable[[Model, list[Batch], fs.Mesh], Step]
    axes: dict[str, int]
    peer: str = ""
    stage: int = 0


FLAT, HYBRID = {"data": N}, {"host": 2, "data": 2}
VARIANTS = {
    "ddp": Variant(ddp, FLAT),
    "fshard 0": Variant(partial(fshard, 0), FLAT, "ddp", 0),
    "fully_shard": Variant(partial(fsdp, True), FLAT),
    "fshard 3": Variant(partial(fshard, 3), FLAT, "fully_shard", 3),
    "fully_shard hybrid": Variant(partial(fsdp, True), HYBRID),
    "fshard 3 hybrid": Variant(partial(fshard, 3), HYBRID, "fully_shard hybrid", 3),
}


def virtual_losses(variant: Variant, count: int) -> list[float]:
    """Return the losses of the same training on four virtual devices."""
    train, params, state = trained(variant.stage, fs.make_mesh(variant.axes))
    shards = [[MODEL.batch(index, process) for process in range(N)] for index in range(BATCHES)]
    batches = [
        {name: torch.cat([shard[name] for shard in batch]) for name in batch[0]} for batch in shards
    ]
    losses: list[float] = []
    for index in range(count):
        params, state, metrics = train(params, state, batches[index % BATCHES])
        losses.append(float(metrics["loss"]))
    return losses


# -- time ----------------------------------------------------------------------------------------------------------


class Result(NamedTuple):
    """The seconds of a step in each round, and the loss of each step."""

    times: list[float]
    losses: list[float]


def timed_process(names: list[str], rounds: int) -> dict[str, Result]:
    """Run in every process: all variants in turn, round after round; all processes begin each step together."""
    meshes = {name: fs.make_mesh(VARIANTS[name].axes, device="cpu") for name in names}
    data = [MODEL.batch(index, dist.get_rank()) for index in range(BATCHES)]
    steps = {name: over(BATCHES, VARIANTS[name].make(MODEL, data, meshes[name])) for name in names}
    losses: dict[str, list[Tensor]] = {name: [] for name in names}
    calls = {name: lambda name=name: losses[name].append(steps[name]()) for name in names}
    times = slowest(
        interleaved(calls, rounds, warm_up=WARM_UP, between=gc.collect, ready=dist.barrier)
    )
    results: dict[str, Result] = {}
    for name in names:
        means = torch.stack(losses[name]).double()
        dist.all_reduce(means)
        results[name] = Result(times[name], (means / N).tolist())
    return results


def timed(names: list[str], rounds: int, delay: float, rate: float) -> dict[str, Result]:
    """Return the results of the four processes on the two machines."""
    variables = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    variables |= {
        "WORLD_SIZE": str(N),
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_PORT": "29502",
        "OMP_NUM_THREADS": "1",
    }
    variables |= {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # the machines have no names
    with linked_machines(delay, rate) as hosts, tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "results")
        script = [
            sys.executable,
            __file__,
            "--rounds",
            str(rounds),
            "--only",
            *names,
            "--process",
            str(file),
        ]
        variables["MASTER_ADDR"] = HOSTS[hosts[0]]
        processes = [
            subprocess.Popen(
                ["ip", "netns", "exec", hosts[rank // 2], *script],
                env={**variables, "RANK": str(rank), "LOCAL_RANK": str(rank % 2)},
            )
            for rank in range(N)
        ]
        if any([process.wait() for process in processes]):
            sys.exit("a process has failed: see its error above")
        return pickle.loads(file.read_bytes())


def check(results: dict[str, Result]) -> None:
    """Raise unless ours has the bits of virtual devices, and the others the same losses."""
    torch.set_num_threads(1)
    for name, (_, losses) in results.items():
        expected = virtual_losses(VARIANTS[name], len(losses))
        tolerance = 0.0 if VARIANTS[name].peer else TOLERANCE
        if any(
            abs(loss / other - 1) > tolerance for loss, other in zip(losses, expected, strict=True)
        ):
            raise AssertionError(
                f"{name} must train what virtual devices train: {losses}, not {expected}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--delay", type=float, default=0.02, help="of a packet on the link, in seconds"
    )
    parser.add_argument(
        "--rate", type=float, default=100e6, help="of the link each way, in bits per second"
    )
    parser.add_argument(
        "--only", nargs="+", default=[""], help="variants whose names begin like one of these"
    )
    parser.add_argument("--process", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    names = [name for name in VARIANTS if name.startswith(tuple(chosen.only))]
    if chosen.process:
        results = timed_process(names, chosen.rounds)
        if dist.get_rank() == 0:
            chosen.process.write_bytes(pickle.dumps(results))
        return
    if sys.platform != "linux" or os.geteuid():
        parser.error("network namespaces are made by root, on Linux")
    results = timed(names, chosen.rounds, chosen.delay, chosen.rate)
    check(results)
    size = sum(leaf.nbytes for leaf in MODEL.init(SEED).values())
    link = f"{chosen.delay * 1e3:g} ms and {chosen.rate / 1e6:g} Mbit/s each way"
    title = f"2 machines of 2 processes, {link}, {size / 1e6:.1f} MB of parameters, {chosen.rounds} rounds"
    table = Table(
        "variant", "ms", "x peer", "peer", "bits of 4 virtual devices", "loss", title=title
    )
    for name, result in results.items():
        peer = VARIANTS[name].peer
        ratio = f"{paired(result.times, results[peer].times):.2f}" if peer in results else ""
        row = (
            f"{statistics.median(result.times) * 1e3:.0f}",
            ratio,
            peer,
            "yes" if peer else "",
            f"{result.losses[-1]:.6f}",
        )
        table.add_row(name, *row)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
