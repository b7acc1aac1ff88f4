"""Examine one process: its machine, its links, and every collective.

All processes call it together.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
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
from fshard.doctor.check import Trial, check_collectives, plain_options
from fshard.doctor.left_over import left_over_files
from fshard.memory.disk import file_of
from fshard.memory.transfers import Link
from fshard.memory.transfers import start as start_transfer
from fshard.mesh.layout import Memory, Mesh
from fshard.mesh.layout.kinds import empty_in
from fshard.mesh.runtimes.process import ProcessWorld
from fshard.testing.oracles import ORACLES

TIMEOUT = 120.0
"""Seconds after which a collective that does not end is taken for a failure."""
SIZES = {1 << 10: 100, 1 << 20: 20, 1 << 24: 5}
"""Bytes per process, and repetitions."""
WARM_UP = 3
MOVED = 1 << 26
"""Bytes of a transfer between memories."""
MOVES = 3
"""Repetitions of a transfer."""


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
    left_over: str  # files of processes that have ended, and how to remove them, or ""

    @property
    def versions(self) -> tuple[str, str, str]:
        """The versions that must be equal in all processes."""
        return (self.python, self.torch, self.fshard)


@dataclass(frozen=True)
class Speed:
    """Time of one collective or transfer.

    Args:
        collective: the name of the collective or transfer.
        held: bytes that each process held before.
        sent: bytes that each process sent.
        seconds: of one call.
    """

    collective: str
    held: int
    sent: int
    seconds: float


@dataclass(frozen=True)
class Findings:
    """The findings of one process.

    `by` is the launcher, `transport` how bytes are sent to the other processes.
    """

    rank: int
    by: str
    device: str
    transport: str
    machine: Machine
    speeds: tuple[Speed, ...]
    trials: tuple[Trial, ...]


def examine(device: str | None, by: str) -> Findings:
    """Examine this process; measure and check every collective with the other processes."""
    count = fs.mesh.process_count()
    mesh = fs.make_mesh({"all": count}, runtime="process", device=device, timeout=TIMEOUT)
    trials = tuple(check_collectives(mesh))
    speeds = measure(mesh) if count > 1 else []
    speeds += transfer_speeds(mesh.device_type)
    return Findings(
        rank=fs.mesh.process_index(),
        by=by,
        device=mesh.device_type,
        transport=transport(mesh),
        machine=machine(),
        speeds=tuple(speeds),
        trials=trials,
    )


def machine() -> Machine:
    """Describe the machine of this process."""
    is_available = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
    }
    backends = tuple([name for name, available in is_available.items() if available])

    gpus: list[str] = []
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            gpus.append(torch.cuda.get_device_name(number))

    # Not all systems have these functions.
    processors = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        processors = len(os.sched_getaffinity(0))
    memory = 0
    if hasattr(os, "sysconf"):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(
        host=socket.gethostname(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        torch=torch.__version__,
        fshard=version("fshard"),
        backends=backends,
        processors=processors,
        threads=torch.get_num_threads(),
        memory=memory,
        gpus=tuple(gpus),
        left_over=left_over_files() if sys.platform == "linux" else "",
    )


def transport(mesh: Mesh) -> str:
    """Return how the bytes of collectives are sent from this process to the others of a mesh."""
    world = ProcessWorld.of(mesh)
    if mesh.size == 1:
        return "none: one process"
    if world.is_near(mesh):
        return "direct memory reading"
    peers = [rank for rank in range(mesh.size) if rank != world.rank]
    if world.backend == "gloo" and any(world.are_near((rank,)) for rank in peers):
        return "direct memory reading on each machine and gloo between machines"
    return world.backend


def measure(mesh: fs.Mesh) -> list[Speed]:
    """Measure on a mesh of one axis, in all its processes."""
    (axis,) = mesh.axis_names
    n = mesh.size
    speeds: list[Speed] = []
    for name in ("psum", "all_gather", "psum_scatter", "ppermute"):
        options = plain_options(name, n)
        call = partial(getattr(fs, name), axis=axis, **options)
        for held, times in SIZES.items():
            rows = max(1, held // 4 // n)
            elements = rows * n  # every process has a shard of equal size
            seconds = fs.run(_timed, call, elements, times, mesh.device_type, axis, mesh=mesh)
            sent = ORACLES[name].sent(4 * elements, 0, n, **options)
            speeds.append(Speed(name, held, int(sent), max(seconds)))
    return speeds


def _timed(
    call: Callable[[Tensor], Any], elements: int, times: int, device: str, axis: str
) -> float:
    """Return the median seconds of a call."""
    x = torch.ones(elements, device=device)
    durations: list[float] = []
    for _ in range(WARM_UP + times):
        fs.psum(torch.ones((), device=device), axis)  # begin together
        _synchronize(device)
        begin = time.perf_counter()
        call(x)
        _synchronize(device)
        durations.append(time.perf_counter() - begin)
    return median(durations[WARM_UP:])


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def transfer_speeds(device: str) -> list[Speed]:
    """Measure transfers between the host and a GPU, and a disk if FSHARD_DISK names its folder."""
    links: dict[str, tuple[Memory, Memory]] = {}
    if device == "cuda":
        links["host to GPU"] = ("host", "device")
        links["GPU to host"] = ("device", "host")
    if os.environ.get("FSHARD_DISK"):
        links["host to disk"] = ("host", "disk")
        links["disk to host"] = ("disk", "host")
    speeds: list[Speed] = []
    for name, (source, target) in links.items():
        speeds.append(Speed(name, MOVED, MOVED, _transfer_seconds(device, source, target)))
    return speeds


def _transfer_seconds(device: str, source: Memory, target: Memory) -> float:
    """Return the median seconds of a transfer."""
    x = empty_in(source, (MOVED,), torch.uint8, device).fill_(1)
    y = empty_in(target, (MOVED,), torch.uint8, device).fill_(1)
    durations: list[float] = []
    for _ in range(1 + MOVES):
        for tensor in (x, y):
            _drop_cached_pages(tensor)
        begin = time.perf_counter()
        start_transfer([x], [y], Link(source, target, "process")).wait()
        _synchronize(device)
        file = file_of(y)
        if file is not None:
            os.fsync(file.descriptor)
        durations.append(time.perf_counter() - begin)
    return median(durations[1:])


def _drop_cached_pages(x: Tensor) -> None:
    """Remove the copy in memory of a tensor's file, if it has one: else no byte would be read."""
    file = file_of(x)
    if file is not None:
        os.fsync(file.descriptor)
        os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
