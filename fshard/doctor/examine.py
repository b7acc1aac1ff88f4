"""Examine one process: its machine, its links, and every collective; all processes call it together."""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fshard as fs
from fshard.doctor.check import Trial, check_collectives
from fshard.mesh.layout import Mesh
from fshard.mesh.runtimes.process import ProcessWorld
from fshard.testing.oracles import ORACLES

TIMEOUT = 120.0
"""Seconds after which a collective that does not end is taken for a failure."""
SIZES = {1 << 10: 100, 1 << 20: 20, 1 << 24: 5}
"""Bytes per process, and repetitions."""
WARM_UP = 3


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
    """Time of one collective: the bytes that each process held before and sent, and the seconds."""

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
    speeds = tuple(measure(mesh)) if count > 1 else ()
    return Findings(fs.mesh.process_index(), by, mesh.device_type, transport(mesh), machine(), speeds, trials)


def machine() -> Machine:
    """Describe the machine of this process."""
    has = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return Machine(
        host=socket.gethostname(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        torch=torch.__version__,
        fshard=version("fshard"),
        backends=tuple(name for name, there in has.items() if there),
        processors=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0,
        gpus=tuple(torch.cuda.get_device_name(number) for number in gpus),
    )


def transport(mesh: Mesh) -> str:
    """Return how the bytes of collectives are sent from this process to the others of a mesh."""
    world = ProcessWorld.of(mesh)
    if mesh.size == 1:
        return "none: one process"
    if world.is_near(mesh):
        return "direct memory reading"
    if world.backend == "gloo" and any(world.near((rank,)) for rank in range(mesh.size) if rank != world.rank):
        return "direct memory reading on each machine and gloo between machines"
    return world.backend


def measure(mesh: fs.Mesh) -> list[Speed]:
    """Measure on a mesh of one axis, in all its processes."""
    (axis,), n = mesh.axis_names, mesh.size
    ring = [(i, (i + 1) % n) for i in range(n)]
    calls: dict[str, tuple[Callable[[Tensor], Any], dict[str, Any]]] = {
        "psum": (lambda x: fs.psum(x, axis), {}),
        "all_gather": (lambda x: fs.all_gather(x, axis), {}),
        "psum_scatter": (lambda x: fs.psum_scatter(x, axis), {}),
        "ppermute": (lambda x: fs.ppermute(x, axis, ring), {"perm": ring}),
    }
    found: list[Speed] = []
    for name, (call, options) in calls.items():
        for held, times in SIZES.items():
            size = max(n, held // 4 // n * n) * 4  # every process has a shard of equal size
            sent = int(ORACLES[name].sent(size, 0, n, **options))
            seconds = fs.run(_timed, call, size // 4, times, mesh.device_type, axis, mesh=mesh)
            found.append(Speed(name, held, sent, max(seconds)))
    return found


def _timed(call: Callable[[Tensor], Any], elements: int, times: int, device: str, axis: str) -> float:
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
