"""How the processes of a world meet: where their places say, and over the backend that their GPUs allow."""

from __future__ import annotations

import os
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from fshard.errors import MeshError
from fshard.mesh.runtimes.place import Place, placed

_meetings = count()


def meet_all(device_type: str, limit: timedelta) -> None:
    """Form torch's default group of all processes."""
    here = _place()
    if device_type == "cuda":
        torch.cuda.set_device(here.local_rank % torch.cuda.device_count())
    host = f"[{here.address}]" if ":" in here.address else here.address
    try:
        meeting = rendezvous(f"tcp://{host}:{here.port}", here.rank, here.world, timeout=limit)
        store, rank, world = next(iter(meeting))
        store.set_timeout(limit)
        backend = _backend(device_type, PrefixStore(f"meeting {next(_meetings)}", store), world)
        default = PrefixStore("default_pg", store)
        dist.init_process_group(backend, store=default, rank=rank, world_size=world, timeout=limit)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise MeshError(
            f"Process {here.rank} of {here.world}, started by {here.by}, did not meet the others at {here.address}, port "
            f"{here.port}: {str(error).splitlines()[0]} All have to be started together; if another program has the port, "
            "export another MASTER_PORT, and if that is not the host of process 0, MASTER_ADDR."
        ) from error


def _place() -> Place:
    """Return which of several processes this is, even if there is but one."""
    found = placed(os.environ, os.getppid())
    if found is None:
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        raise MeshError(
            "A process mesh needs processes: the environment variables that torchrun, srun or mpirun set are not there; "
            f"missing: {', '.join(missing)}. Start with `torchrun --nproc-per-node 8 file.py` or `fshard run --processes 8 "
            'file.py`, call fs.launch, or take devices in this process: make_mesh(..., runtime="virtual").'
        )
    return found


def _backend(device_type: str, store: Any, world: int) -> str:
    """NCCL if every process has a GPU to itself; it refuses to share one."""
    if device_type != "cuda" or not dist.is_nccl_available():
        return "gloo"
    gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    return "nccl" if each_its_own(gpu, store, world) else "gloo"


def each_its_own(gpu: str, store: Any, world: int) -> bool:
    """Return whether no two processes of a world have the same GPU.  All ask at the same time, and get the same answer.

    Counting GPUs would not do: SLURM may show each process but its own, which is number 0 for all of them.
    """
    if store.add(f"gpu {gpu}", 1) > 1:  # somebody else has it
        store.add("shared", 1)
    if store.add("counted", 1) == world:
        store.set("all counted", "1")
    store.wait(["all counted"])
    return store.add("shared", 0) == 0
