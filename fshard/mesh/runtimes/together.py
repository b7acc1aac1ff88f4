"""Whether this process is one of several, and which."""

from __future__ import annotations

import os

import torch.distributed as dist

from fshard.mesh.runtimes.place import Place, placed


def place() -> Place | None:
    """Return which of several processes this one was started as; None if it was started by itself."""
    found = placed(os.environ, os.getppid())
    return found if found is not None and found.meant else None


def launched() -> bool:
    """Return whether this process is one of several: by torchrun, SLURM, MPI or `fs.launch`, or in torch's own group."""
    return _in_a_group() or (dist.is_available() and place() is not None)


def process_index() -> int:
    """Return which of the processes that were started together this is; 0 if it was started by itself.

    >>> process_index()
    0
    """
    if _in_a_group():
        return dist.get_rank()
    found = place()
    return 0 if found is None else found.rank


def process_count(default: int = 1) -> int:
    """Return how many processes were started together; `default` if this one was started by itself.

    So a program asks for a mesh of all processes under torchrun, SLURM or MPI, and of virtual devices elsewhere:

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
