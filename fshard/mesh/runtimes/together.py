"""Rank and number of processes started together."""

from __future__ import annotations

import os

import torch.distributed as dist

from fshard.mesh.runtimes.place import Place, placed


def place() -> Place | None:
    """Return the rank of this process; None without a launcher."""
    found = placed(os.environ, os.getppid())
    return found if found is not None and found.meant else None


def launched() -> bool:
    """Return True if this process is one of several: by torchrun, SLURM, MPI, `fs.launch` or torch's process group."""
    return _in_a_group() or (dist.is_available() and place() is not None)


def process_index() -> int:
    """Return this process's rank among the processes started together; 0 without a launcher.

    >>> process_index()
    0
    """
    if _in_a_group():
        return dist.get_rank()
    found = place()
    return 0 if found is None else found.rank


def process_count(default: int = 1) -> int:
    """Return the number of processes started together; `default` without a launcher.

    For programs that use all processes under torchrun, SLURM or MPI, and virtual devices elsewhere:

    >>> import fshard as fs
    >>> fs.make_mesh({"data": fs.mesh.process_count(default=8)})
    Mesh(data=8; virtual, cpu)
    """
    if _in_a_group():
        return dist.get_world_size()
    found = place()
    return default if found is None else found.world


def _in_a_group() -> bool:
    return dist.is_available() and dist.is_initialized()
