"""Examine one process: its machine, its links, and every collective; all processes call it together."""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fshard as fs
from fshard.doctor.check import Trial, check_collectives, options_of
from fshard.memory.disk import file_of
from fshard.memory.transfers import Link
from fshard.memory.transfers import start as begin
from fshard.mesh.layout import Memory, Mesh
from fshard.mesh.layout.kinds import empty_in
from fshard.mesh.runtimes.process import ProcessWorld
from fshard.testing.oracles import ORACLES

TIMEOUT = 120.0
"""Seconds after which a collective that does not end is taken for a failure."""
SIZES = {1 << 10: 100, 1 << 20: 20, 1 << 24: 5}
"""Bytes per process, and repetitions."""
WARM_UP = 3
MOVED, MOVES = 1 << 26, 3
"""Bytes of a transfer between memories, and repetitions."""


@dataclass(frozen=True)
class Machine:
    """The machine of a process: names, versions and sizes."""

    host: str
    system: str
    python: str
    torch: str
    fshard: str
    backends: tuple[str, ...]
    processors: int  # that this process may use
    threads: int  # that torch uses for one operation
    memory: int  # bytes
    gpus: tuple[str, ...]

    @property
    def versions(self) -> tuple[str, str, str]:
        """The versions that must be equal in all processes."""
        return (self.python, self.torch, self.fshard)


@dataclass(frozen=True)
class Speed:
    """Time of one collective or transfer: the bytes that each process held before and sent, and the seconds."""

    collective: str
    held: int
    sent: int
    seconds: float


@dataclass(frozen=True)
class Findings:
    """The findings of one process; `by` is the launcher, `transport` how bytes are sent to the other processes."""

    rank: int
    by: str
    device: str
    transport: str
    machine: Machine
    speeds: tuple[Speed, ...]
    trials: tuple[Trial, ...]


def examine(device: str | None, by: str) -> Findings:
    """Examine this process, measure and check every collective with the other processes."""
    count = fs.mesh.process_count()
    mesh = fs.make_mesh({"all": count}, runtime="process", device=device, timeout=TIMEOUT)
    trials = tuple(check_collectives(mesh))
    speeds = (*(measure(mesh) if count > 1 else ()), *transfer_speeds(mesh.device_type))
    return Findings(
        fs.mesh.process_index(), by, mesh.device_type, transport(mesh), machine(), speeds, trials
    )


def machine() -> Machine:
    """Describe the machine of this process."""
    has = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
    }
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return Machine(
        host=socket.gethostname(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        torch=torch.__version__,
        fshard=version("fshard"),
        backends=tuple(name for name, there in has.items() if there),
        processors=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if hasattr(os, "sysconf")
        else 0,
        gpus=tuple(torch.cuda.get_device_name(number) for number in gpus),
    )


def transport(mesh: Mesh) -> str:
    """Return how the bytes of collectives are sent from this process to the others of a mesh."""
    world = ProcessWorld.of(mesh)
    if mesh.size == 1:
        return "none: one process"
    if world.is_near(mesh):
        return "direct memory reading"
    if world.backend == "gloo" and any(
        world.are_near((rank,)) for rank in range(mesh.size) if rank != world.rank
    ):
        return "direct memory reading on each machine and gloo between machines"
    return world.backend


def measure(mesh: fs.Mesh) -> list[Speed]:
    """Measure on a mesh of one axis, in all its processes."""
    (axis,), n = mesh.axis_names, mesh.size
    speeds = list[Speed]()
    for name in ("psum", "all_gather", "psum_scatter", "ppermute"):
        options = options_of(name, n)
        call = partial(getattr(fs, name), axis=axis, **options)
        for held, times in SIZES.items():
            size = max(n, held // 4 // n * n) * 4  # every process has a shard of equal size
            seconds = fs.run(_timed, call, size // 4, times, mesh.device_type, axis, mesh=mesh)
            speeds.append(
                Speed(name, held, int(ORACLES[name].sent(size, 0, n, **options)), max(seconds))
            )
    return speeds


def _timed(
    call: Callable[[Tensor], Any], elements: int, times: int, device: str, axis: str
) -> float:
    x = torch.ones(elements, device=device)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    durations: list[float] = []
    for number in range(WARM_UP + times):
        fs.psum(torch.ones((), device=device), axis)  # begin together
        wait()
        start = time.perf_counter()
        call(x)
        wait()
        durations += [time.perf_counter() - start] * (number >= WARM_UP)
    return median(durations)


def transfer_speeds(device: str) -> list[Speed]:
    """Measure transfers between the host and a GPU, and between the host and the folder FSHARD_DISK, where they are."""
    links: dict[str, tuple[Memory, Memory]] = {}
    if device == "cuda":
        links |= {"host to GPU": ("host", "device"), "GPU to host": ("device", "host")}
    if os.environ.get("FSHARD_DISK"):
        links |= {"host to disk": ("host", "disk"), "disk to host": ("disk", "host")}
    return [Speed(name, MOVED, MOVED, _moved(device, *link)) for name, link in links.items()]


def _moved(device: str, source: Memory, target: Memory) -> float:
    """Return the seconds of a transfer; of a disk, without the copies of its files in memory."""
    x, y = (empty_in(memory, (MOVED,), torch.uint8, device).fill_(1) for memory in (source, target))
    durations: list[float] = []
    for _ in range(1 + MOVES):
        for file in filter(None, map(file_of, (x, y))):
            os.fsync(file.descriptor)
            os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        begin(x, y, Link(source, target, "process")).wait()
        if device == "cuda":
            torch.cuda.synchronize()
        if (file := file_of(y)) is not None:
            os.fsync(file.descriptor)
        durations.append(time.perf_counter() - start)
    return median(durations[1:])
