"""Read rank and meeting point of this process from the launcher's environment variables, and join the others.

Every launcher has its own names (`LAUNCHERS`), and the first one whose variables are set counts. torchrun's have
priority: they are complete, and scripts set them. Then the innermost launcher: `mpirun` inside a SLURM job starts its
daemons with srun, and the processes inherit srun's variables, which number the daemons. Where MPI and a SLURM step agree
(`srun --mpi=pmi2`), SLURM's are used: they include the hosts.

    torchrun    complete
    MPI         on one machine; on several MASTER_ADDR must be exported, since MPI gives no address
    SLURM       only in a step, which srun starts; the processes meet on its first host
"""

from __future__ import annotations

import os
import re
import warnings
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from threading import Thread
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from fshard.errors import MeshError
from fshard.mesh.runtimes.interface import VARIABLE, choose_interface

Variables = Mapping[str, str]
PORTS = range(10240, 29952)
"""Range of default ports: below the ephemeral ports of operating systems."""


@dataclass(frozen=True)
class ProcessInfo:
    """Rank, world size and meeting point of this process.

    Args:
        rank: its number.
        world: the number of processes.
        local_rank: its number on this machine.
        address: the host of process 0, where all meet.
        port: the port that process 0 listens on.
        by: the launcher.
    """

    rank: int
    world: int
    local_rank: int
    address: str
    port: int
    by: str

    @property
    def is_one_of_several(self) -> bool:
        """True if several processes were requested; `srun --pty jupyter` starts one and has these variables as well."""
        return self.world > 1 or self.by == "torchrun"


class Names(NamedTuple):
    """The variables of a launcher. Of several names for one value the first that is set counts."""

    rank: str
    world: Sequence[str]
    local_rank: Sequence[str]
    local_world: Sequence[str] = ()
    job: Sequence[str] = ()
    """Variables that are equal in all processes of a world, and differ between worlds."""


LAUNCHERS = {
    "torchrun": Names("RANK", ["WORLD_SIZE"], ["LOCAL_RANK"], ["LOCAL_WORLD_SIZE"]),
    "Open MPI": Names(
        "OMPI_COMM_WORLD_RANK",
        ["OMPI_COMM_WORLD_SIZE"],
        ["OMPI_COMM_WORLD_LOCAL_RANK"],
        ["OMPI_COMM_WORLD_LOCAL_SIZE"],
        ["OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"],
    ),
    "MPI": Names(  # hydra: MPICH's, MVAPICH's and Intel's; Cray's
        "PMI_RANK",
        ["PMI_SIZE"],
        ["MPI_LOCALRANKID", "PMI_LOCAL_RANK"],
        ["MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"],
        ["I_MPI_HYDRA_UUID"],
    ),
    "SLURM": Names(
        "SLURM_PROCID",
        ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
        ["SLURM_LOCALID"],
        job=["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEPID"],
    ),
}
"""Launchers, by priority."""


# -- this process ---------------------------------------------------------------------------------------------------


def process_info() -> ProcessInfo | None:
    """Return the rank of this process among several; None without a launcher."""
    found = read_variables(os.environ, os.getppid())
    return found if found is not None and found.is_one_of_several else None


def launched() -> bool:
    """Return True if this process is one of several: by torchrun, SLURM, MPI, `fs.launch` or torch's process group."""
    return _in_a_group() or (dist.is_available() and process_info() is not None)


def process_index() -> int:
    """Return this process's rank among the processes started together; 0 without a launcher.

    >>> process_index()
    0
    """
    if _in_a_group():
        return dist.get_rank()
    found = process_info()
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
    found = process_info()
    return default if found is None else found.world


def _in_a_group() -> bool:
    return dist.is_available() and dist.is_initialized()


# -- the variables --------------------------------------------------------------------------------------------------


def read_variables(variables: Variables, parent: int = 0) -> ProcessInfo | None:
    """Return the rank of this process, or None without a launcher. Raise a MeshError if the variables are incomplete.

    Args:
        variables: the environment.
        parent: the parent process, which the processes of one launcher may have in common.

    >>> read_variables({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu7", "MASTER_PORT": "2222"})
    ProcessInfo(rank=1, world=2, local_rank=1, address='gpu7', port=2222, by='torchrun')
    """
    half_set: list[str] = []
    for by, names in LAUNCHERS.items():
        world_name = _first_set(names.world, variables)
        has_rank = bool(variables.get(names.rank))
        if (by == "SLURM" and not _is_in_step(variables)) or (by == "MPI" and _agrees_with_step(variables)):
            continue
        if has_rank and world_name:
            return _read(by, names, world_name, variables, parent)
        if has_rank or world_name:
            there, missing = (names.rank, " or ".join(names.world)) if has_rank else (world_name, names.rank)
            half_set.append(f"{there} is set, but {missing} is not")
    if half_set:
        raise _error(half_set)
    return None


def _read(by: str, names: Names, world_name: str, variables: Variables, parent: int) -> ProcessInfo:
    world = _number(world_name, variables, 1)
    rank = _number(names.rank, variables, 0, world)
    on_one_machine = _is_on_one_machine(by, names, world, variables)
    local_name = _first_set((*names.local_rank, "LOCAL_RANK"), variables)
    local_rank = _number(local_name, variables, 0, world) if local_name else rank if on_one_machine else 0
    address = variables.get("MASTER_ADDR", "")
    if not address and by != "torchrun" and on_one_machine:
        address = "127.0.0.1"
    elif not address and by == "SLURM":
        address = first_host(_hosts_of_step(variables))
    port = 0
    if variables.get("MASTER_PORT"):
        port = _number("MASTER_PORT", variables, 1, 65536)
    elif by != "torchrun":
        port = _port([variables.get(name, "") for name in names.job], parent if on_one_machine else 0)
    if not address or not port:
        missing = ["MASTER_ADDR"] * (not address) + ["MASTER_PORT"] * (not port)
        why = "" if by == "torchrun" else f" ({by} gives no meeting point for processes of several machines)"
        raise _error([f"it was started by {by}; missing: {', '.join(missing)}{why}"])
    return ProcessInfo(rank, world, local_rank, address, port, by)


def _first_set(names: Sequence[str], variables: Variables) -> str | None:
    """Return the first of these names that is set."""
    return next((name for name in names if variables.get(name)), None)


def _number(name: str, variables: Variables, least: int, end: int = 1 << 31) -> int:
    text = variables[name].strip()
    if text.isascii() and text.isdecimal() and least <= int(text) < end:
        return int(text)
    raise _error([f"{name}={text} is no integer from {least} to {end - 1}"])


def _error(wrong: list[str]) -> MeshError:
    return MeshError(
        f"The environment does not give the rank of this process: {'; '.join(wrong)}. Start all of them with "
        "torchrun, srun or mpirun, or unset these variables; devices in this process: "
        'make_mesh(..., runtime="virtual").'
    )


def _is_on_one_machine(by: str, names: Names, world: int, variables: Variables) -> bool:
    if by == "SLURM":
        return not {",", "["} & {*_hosts_of_step(variables)}
    local_world = _first_set((*names.local_world, "LOCAL_WORLD_SIZE"), variables)
    if local_world:
        return _number(local_world, variables, 1) == world
    return variables.get("MASTER_ADDR", "localhost") in ("127.0.0.1", "localhost", "::1")


def _port(job: Sequence[str], parent: int) -> int:
    """Derive a port from values that are equal in all processes of this world only; 0 if there are none."""
    common = " ".join(job) if any(job) else str(parent or "")
    return PORTS[zlib.crc32(common.encode()) % len(PORTS)] if common else 0


_SLURM_INTERNAL = 0xFFFFFFF0
"""Steps from this number on are SLURM's own: batch scripts, shells of salloc."""


def _is_in_step(variables: Variables) -> bool:
    """Return True if srun has started this process.

    A batch script and the shell of salloc run once, whatever SLURM_NTASKS is.
    """
    number = variables.get("SLURM_STEP_ID") or variables.get("SLURM_STEPID") or ""
    return number.isascii() and number.isdecimal() and int(number) < _SLURM_INTERNAL


def _hosts_of_step(variables: Variables) -> str:
    name = _first_set(("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"), variables)
    return variables[name] if name else ""


def _agrees_with_step(variables: Variables) -> bool:
    """Return True if a SLURM step numbers the processes as MPI does."""
    both = ("PMI_RANK", "SLURM_PROCID"), ("PMI_SIZE", "SLURM_STEP_NUM_TASKS")
    return _is_in_step(variables) and all(variables.get(mpi) == variables.get(slurm) for mpi, slurm in both)


def first_host(text: str) -> str:
    """Return the first host of SLURM's list.

    >>> first_host("gpu[01-03,07],login1"), first_host("r[1-2]n[8-9].x")
    ('gpu01', 'r1n8.x')
    """
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", text).split(",")[0]


# -- meeting --------------------------------------------------------------------------------------------------------

_meetings = count()


def meet_all(device_type: str, limit: timedelta) -> None:
    """Form torch's default group of all processes."""
    here = read_variables(os.environ, os.getppid())
    if here is None:
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        raise MeshError(
            "A process mesh needs processes: the environment variables that torchrun, srun or mpirun set are not there; "
            f"missing: {', '.join(missing)}. Start with `torchrun --nproc-per-node 8 file.py` or `fshard run --processes 8 "
            'file.py`, call fs.launch, or take devices in this process: make_mesh(..., runtime="virtual").'
        )
    if device_type == "cuda":
        torch.cuda.set_device(here.local_rank % torch.cuda.device_count())
    host = f"[{here.address}]" if ":" in here.address else here.address
    try:
        store, rank, world = _meet(f"tcp://{host}:{here.port}", here.rank, here.world, limit)
        store.set_timeout(limit)
        choose_interface(here.address, here.port)
        backend = _backend(device_type, PrefixStore(f"meeting {next(_meetings)}", store), world, here)
        default = PrefixStore("default_pg", store)
        gpu = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
        backend = "cpu:gloo,cuda:nccl" if backend == "nccl" else backend  # gloo is for tensors in host memory
        dist.init_process_group(backend, store=default, rank=rank, world_size=world, timeout=limit, device_id=gpu)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise MeshError(
            f"Process {here.rank} of {here.world}, started by {here.by}, did not meet the others at {here.address}, port "
            f"{here.port}: {str(error).splitlines()[0]} All must be started together; if another program has the port, "
            "export another MASTER_PORT, and if that is not the host of process 0, MASTER_ADDR."
        ) from error
    except RuntimeError as error:
        if "connectFullMesh" not in str(error):
            raise
        raise MeshError(
            f"Process {here.rank} of {here.world} met the others at {here.address}, but gloo could not connect all of them. "
            f"Export {VARIABLE}, the name of a network interface that the other machines can reach, on each machine; now it "
            f"is {os.environ.get(VARIABLE) or 'not set'}."
        ) from error


def _meet(url: str, rank: int, world: int, limit: timedelta) -> tuple[Any, int, int]:
    """Connect to the store, in a thread: torch waits without a limit for the greeting of the program at the port."""
    meeting: Future[Any] = Future()

    def connect() -> None:
        try:
            meeting.set_result(next(iter(rendezvous(url, rank, world, timeout=limit))))
        except BaseException as error:
            meeting.set_exception(error)

    Thread(target=connect, daemon=True).start()
    try:
        return meeting.result(limit.total_seconds())
    except TimeoutError:
        raise dist.DistNetworkError(f"No store answered there within {limit.total_seconds():g} s.") from None


def time_limit(seconds: float | None) -> timedelta:
    """Return the time limit of collectives between processes: `seconds`, or FSHARD_TIMEOUT; `inf` is none (30 days)."""
    value = os.environ.get("FSHARD_TIMEOUT", "600") if seconds is None else seconds
    with suppress(TypeError, ValueError):
        if (limit := float(value)) > 0:
            return timedelta(seconds=min(limit, 30 * 86400))
    name = "FSHARD_TIMEOUT" if seconds is None else "timeout"
    raise MeshError(f"{name} must be a positive number of seconds, or inf for no limit; got {value!r}.")


def _backend(device_type: str, store: Any, world: int, here: ProcessInfo) -> str:
    """Return NCCL if every process has a GPU to itself; it refuses to share one.

    FSHARD_BACKEND names another backend of torch.distributed, for tests and experiments.
    """
    if backend := os.environ.get("FSHARD_BACKEND"):
        return backend
    if device_type != "cuda" or not dist.is_nccl_available():
        return "gloo"
    gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    if each_its_own(gpu, store, world):
        return "nccl"
    warnings.warn(
        f"Several processes share a GPU, so they communicate over gloo, through host memory. Process {here.rank} has local "
        f"rank {here.local_rank} and GPU {torch.cuda.current_device()}. If that is not meant, export LOCAL_RANK.",
        stacklevel=4,
    )
    return "gloo"


def each_its_own(gpu: str, store: Any, world: int) -> bool:
    """Return True if no two processes of a world have the same GPU. All processes call it, and get the same answer.

    Counting GPUs would not do: SLURM may show each process only its own, as number 0.
    """
    if store.add(f"gpu {gpu}", 1) > 1:  # another process has it
        store.add("shared", 1)
    if store.add("counted", 1) == world:
        store.set("all counted", "1")
    store.wait(["all counted"])
    return store.add("shared", 0) == 0
