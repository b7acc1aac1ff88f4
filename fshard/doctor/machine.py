"""What a process runs on, and which way it exchanges bytes with the others."""

from __future__ import annotations

import os
import platform
import socket
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist

from fshard.mesh.mesh import Mesh
from fshard.mesh.runtimes.process import ProcessWorld


@dataclass(frozen=True)
class Machine:
    """What a process runs on."""

    host: str
    system: str
    python: str
    torch: str
    fshard: str
    backends: tuple[str, ...]
    """Those of gloo, nccl and mpi that this torch has."""
    processors: int
    """Those that this process may use."""
    threads: int
    """Those that torch uses for one operation."""
    memory: int
    """Bytes."""
    gpus: tuple[str, ...]

    @property
    def versions(self) -> tuple[str, str, str]:
        """What has to be equal in all processes."""
        return (self.python, self.torch, self.fshard)


def machine() -> Machine:
    """Look around."""
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


def way(mesh: Mesh) -> str:
    """Return how the bytes of collectives get from this process to the others of a mesh."""
    world = ProcessWorld.of(mesh)
    if mesh.size == 1:
        return "nothing, being alone"
    if world.is_near(mesh):
        return "direct memory reading"
    if world.backend == "gloo" and any(world.near((rank,)) for rank in range(mesh.size) if rank != world.rank):
        return "direct memory reading on each machine and gloo between machines"
    return world.backend


def why_not_direct() -> str:
    """Say why processes of one machine do not read each other's memory."""
    if os.environ.get("FSHARD_DIRECT", "1") == "0":
        return "FSHARD_DIRECT=0 asks for gloo"
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return f"reading memory needs Linux on x86-64, and this is {platform.system()} on {platform.machine()}"
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if scope.exists() and scope.read_text().strip() not in ("0", "1"):
        return f"{scope} is {scope.read_text().strip()}, which lets nobody read: 1 or 0 would"
    return (
        "they may not read each other's memory: another user, another container, or one that forbids process_vm_readv"
    )
