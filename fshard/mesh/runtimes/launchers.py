"""Join the other processes of this program, as the launcher's environment variables describe them.

The first launcher in `LAUNCHERS` whose variables are set counts. torchrun's have priority: they are
complete, and scripts set them. MPI precedes SLURM: `mpirun` inside a SLURM job starts its daemons
with srun, and the processes inherit srun's variables, which number the daemons.

    torchrun    complete
    MPI         127.0.0.1 on one machine; on several MASTER_ADDR and MASTER_PORT must be exported,
                or SLURM gives them
    SLURM       only in a step, which srun starts; the processes meet on its first host
"""

from __future__ import annotations

import os
import re
import time
import warnings
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count
from threading import Thread
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from fshard.errors import MeshError
from fshard.mesh.runtimes.interface import VARIABLE, choose_connections, choose_interface

Variables = Mapping[str, str]
Store = TypeVar("Store")
PORTS = range(10240, 29952)
"""Range of default ports: below the ephemeral ports of operating systems."""
_REPORT_LIMIT = 1.0
"""Seconds to reach the launcher of this machine, whose store is there before its processes."""


@dataclass(frozen=True)
class ProcessInfo:
    """Rank, world size and meeting point of this process.

    `local_rank` is the number of this process on its machine. All processes meet at `address` and
    `port`, where process 0 listens.
    """

    rank: int
    world: int
    local_rank: int
    address: str
    port: int
    launcher: str

    @property
    def is_one_of_several(self) -> bool:
        """True if several processes were requested.

        `srun --pty jupyter` starts one and has these variables as well.
        """
        return self.world > 1 or self.launcher == "torchrun"


class LauncherVariables(NamedTuple):
    """The names of a launcher's variables."""

    rank: str
    world: str
    local_rank: str
    local_world: str


LAUNCHERS = {
    "torchrun": LauncherVariables("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Open MPI": LauncherVariables(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    # MPICH's, Intel's
    "MPI": LauncherVariables("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "SLURM": LauncherVariables("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
}
"""Launchers, by priority."""

JOB = ("PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID")
"""Variables that are equal in all processes of a world, and differ between worlds."""


# -- this process ----------------------------------------------------------------------------------


def process_info() -> ProcessInfo | None:
    """Return the rank of this process among several; None without a launcher."""
    info = read_variables(os.environ, os.getppid())
    if info is None or not info.is_one_of_several:
        return None
    return info


def launched() -> bool:
    """Return True if this process is one of several.

    They were started by torchrun, SLURM, MPI or `fs.launch`, or have a process group of torch.
    """
    return _has_group() or (dist.is_available() and process_info() is not None)


def process_index() -> int:
    """Return this process's rank among the processes started together; 0 without a launcher.

    >>> process_index()
    0
    """
    if _has_group():
        return dist.get_rank()
    info = process_info()
    return 0 if info is None else info.rank


def process_count(default: int = 1) -> int:
    """Return the number of processes started together; `default` without a launcher.

    For programs that use all processes under torchrun, SLURM or MPI, and virtual devices elsewhere:

    >>> import fshard as fs
    >>> fs.make_mesh({"data": fs.mesh.process_count(default=8)})
    Mesh(data=8; 8 devices, virtual, cpu)
    """
    if _has_group():
        return dist.get_world_size()
    info = process_info()
    return default if info is None else info.world


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


# -- the variables ---------------------------------------------------------------------------------


def read_variables(variables: Variables, parent: int = 0) -> ProcessInfo | None:
    """Return the rank of this process, or None without a launcher.

    Raise a MeshError if the variables are incomplete.

    Args:
        variables: the environment.
        parent: the parent process, which all processes of one launcher on one machine share.

    >>> variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    >>> read_variables({**variables, "MASTER_ADDR": "gpu7", "MASTER_PORT": "2222"})
    ProcessInfo(rank=1, world=2, local_rank=1, address='gpu7', port=2222, launcher='torchrun')
    """
    half_set = ""
    for launcher, names in LAUNCHERS.items():
        if launcher == "SLURM" and not _is_in_step(variables):
            continue
        present = [name for name in (names.rank, names.world) if variables.get(name)]
        if len(present) == 2:
            return _read_launcher(launcher, names, variables, parent)
        if present and not half_set:
            missing = names.world if present == [names.rank] else names.rank
            half_set = f"{present[0]} is set, but {missing} is not"
    if half_set:
        raise _environment_error(half_set)
    return None


def _read_launcher(
    launcher: str, names: LauncherVariables, variables: Variables, parent: int
) -> ProcessInfo:
    world = _read_number(names.world, variables, 1)
    rank = _read_number(names.rank, variables, 0, world)
    hosts = variables.get("SLURM_STEP_NODELIST", "") if _is_in_step(variables) else ""
    address = variables.get("MASTER_ADDR", "")
    port = variables.get("MASTER_PORT", "")
    is_on_one_machine = _is_on_one_machine(names, variables, world, hosts, address)

    # On several machines the local rank does not follow from the rank: 0, if no variable has it.
    local_rank = rank if is_on_one_machine else 0
    for name in (names.local_rank, "LOCAL_RANK", "SLURM_LOCALID"):
        if variables.get(name):
            local_rank = _read_number(name, variables, 0, world)
            break

    # torchrun sets both, so one that is missing is an error.
    if launcher != "torchrun" and not address:
        address = "127.0.0.1" if is_on_one_machine else first_host(hosts)
    if launcher != "torchrun" and not port:
        # The processes of several machines have different parents.
        has_one_parent = launcher == "MPI" and is_on_one_machine
        port = _derived_port(variables, parent if has_one_parent else 0)

    missing: list[str] = []
    if not address:
        missing.append("MASTER_ADDR")
    if not port:
        missing.append("MASTER_PORT")
    if missing:
        raise _environment_error(f"it was started by {launcher}; missing: {', '.join(missing)}")
    port_number = _read_number("MASTER_PORT", {"MASTER_PORT": port}, 1, 65536)
    return ProcessInfo(rank, world, local_rank, address, port_number, launcher)


def _is_on_one_machine(
    names: LauncherVariables, variables: Variables, world: int, hosts: str, address: str
) -> bool:
    """Return True if all processes are on this machine.

    Decided by the number of processes here, else SLURM's list of hosts, else the meeting point.
    """
    if variables.get(names.local_world):
        return _read_number(names.local_world, variables, 1) == world
    if hosts:
        return "," not in hosts and "[" not in hosts
    return address in ("", "127.0.0.1", "localhost", "::1")


def _derived_port(variables: Variables, parent: int) -> str:
    """Derive a port from values that are equal in all processes of this world, and in no others.

    Return "" if there are none.
    """
    common = " ".join([variables.get(name, "") for name in JOB]).strip()
    if parent:
        common = str(parent)
    if not common:
        return ""
    return str(PORTS[zlib.crc32(common.encode()) % len(PORTS)])


def _read_number(name: str, variables: Variables, least: int, end: int = 1 << 31) -> int:
    text = variables[name].strip()
    if text.isascii() and text.isdecimal() and least <= int(text) < end:
        return int(text)
    raise _environment_error(f"{name}={text} is no integer from {least} to {end - 1}")


def _environment_error(problem: str) -> MeshError:
    return MeshError(
        f"The environment does not give the rank of this process: {problem}. Start all processes "
        "with torchrun, srun or mpirun, or unset these variables; devices in this process: "
        'make_mesh(..., runtime="virtual").'
    )


_SLURM_INTERNAL = 0xFFFFFFF0
"""Steps from this number on are SLURM's own: batch scripts, shells of salloc."""


def _is_in_step(variables: Variables) -> bool:
    """Return True if srun has started this process.

    A batch script and the shell of salloc run once, whatever SLURM_NTASKS is.
    """
    number = variables.get("SLURM_STEP_ID", "")
    return number.isascii() and number.isdecimal() and int(number) < _SLURM_INTERNAL


def first_host(text: str) -> str:
    """Return the first host of SLURM's list.

    >>> first_host("gpu[01-03,07],login1"), first_host("r[1-2]n[8-9].x")
    ('gpu01', 'r1n8.x')
    """
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", text).split(",")[0]


# -- meeting ---------------------------------------------------------------------------------------

_meetings = count()
"""Numbers of meetings: a store has the keys of an earlier world that used it."""


def meet_all(device_type: str, limit: timedelta) -> None:
    """Form torch's default group of all processes."""
    info = read_variables(os.environ, os.getppid())
    if info is None:
        raise _missing_variables_error()
    if device_type == "cuda":
        torch.cuda.set_device(info.local_rank % torch.cuda.device_count())
    try:
        _join_group(device_type, info, limit)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise MeshError(
            f"Process {info.rank} of {info.world}, started by {info.launcher}, did not meet the "
            f"others at {info.address}, port {info.port}: {str(error).splitlines()[0]} All must be "
            "started together; if another program has the port, export another MASTER_PORT, and if "
            "that is not the host of process 0, MASTER_ADDR."
        ) from error
    except RuntimeError as error:
        if "connectFullMesh" not in str(error):
            raise
        interface = os.environ.get(VARIABLE) or "not set"
        raise MeshError(
            f"Process {info.rank} of {info.world} met the others at {info.address}, but gloo could "
            f"not connect all of them. Export {VARIABLE}, the name of a network interface that the "
            f"other machines can reach, on each machine; now it is {interface}."
        ) from error


def _missing_variables_error() -> MeshError:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    return MeshError(
        "A process mesh needs processes: the environment variables that torchrun, srun or mpirun "
        f"set are not there; missing: {', '.join(missing)}. Start with "
        "`torchrun --nproc-per-node 8 file.py` or `fshard run --processes 8 file.py`, call "
        'fs.launch, or take devices in this process: make_mesh(..., runtime="virtual").'
    )


def meet_again(device_type: str, info: ProcessInfo, store: Any, limit: timedelta) -> None:
    """Form torch's default group of processes that have left another one, over a new store.

    The time limit is that of their connection; it can be changed later.
    """
    if device_type == "cuda":
        torch.cuda.set_device(info.local_rank % torch.cuda.device_count())
    # One of them may end while the others find out whether each has a GPU to itself.
    store.set_timeout(limit)
    # torch counts a group that could not be formed, and names the next one by the count.
    dist.distributed_c10d._world.group_count = 0  # pyright: ignore[reportPrivateUsage]
    _form_group(device_type, info, store, "again", limit)


def _join_group(device_type: str, info: ProcessInfo, limit: timedelta) -> None:
    host = f"[{info.address}]" if ":" in info.address else info.address
    url = f"tcp://{host}:{info.port}"
    store, rank, world = _connect_store(url, info.rank, info.world, limit)
    store.set_timeout(limit)
    meeting = f"meeting {next(_meetings)}"
    _form_group(device_type, replace(info, rank=rank, world=world), store, meeting, limit)


def _form_group(
    device_type: str, info: ProcessInfo, store: Any, meeting: str, limit: timedelta
) -> None:
    """Form torch's default group of the processes that meet in a store."""
    choose_interface(info.address, info.port)
    choose_connections(info.world)
    backend = _choose_backend(device_type, PrefixStore(meeting, store), info)

    gpu = None
    if backend == "nccl":
        gpu = torch.device("cuda", torch.cuda.current_device())
        backend = "cpu:gloo,cuda:nccl"  # gloo is for tensors in host memory
    dist.init_process_group(
        backend,
        store=PrefixStore("default_pg", store),
        rank=info.rank,
        world_size=info.world,
        timeout=limit,
        device_id=gpu,
    )


def _connect_store(url: str, rank: int, world: int, limit: timedelta) -> tuple[Any, int, int]:
    """Connect to the store."""
    return store_within(lambda: next(iter(rendezvous(url, rank, world, timeout=limit))), limit)


_LOOK = 0.02
"""Seconds between two looks of a process that connects to a store."""


def store_within(
    connect: Callable[[], Store], limit: timedelta, raise_if_lost: Callable[[], None] = lambda: None
) -> Store:
    """Connect to a store, within a time limit.

    In a thread: torch waits without a limit for the greeting of the program at the port.
    Meanwhile `raise_if_lost` is called, which raises if there will be none.
    """
    meeting: Future[Store] = Future()

    def run() -> None:
        try:
            meeting.set_result(connect())
        except BaseException as error:
            meeting.set_exception(error)

    Thread(target=run, daemon=True).start()
    deadline = time.monotonic() + limit.total_seconds()
    while not meeting.done() and time.monotonic() < deadline:
        raise_if_lost()
        wait([meeting], _LOOK)
    if meeting.done():
        return meeting.result()
    # By its text, as by that of torch's own errors, a caller sees that a limit was exceeded.
    seconds = f"{limit.total_seconds():g} s"
    raise dist.DistNetworkError(f"Timed out: no store answered there within {seconds}.")


def failure_key(rank: int) -> str:
    """Return the key of a launcher's store for the time at which a process has failed."""
    return f"fshard/failed/{rank}"


def report_failure() -> None:
    """Write the time to the store of the launcher, if it has one: this process is going to end.

    The others may finish before the interpreter has ended, but they do so in place of this process.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    info = read_variables(os.environ, os.getppid())
    assert info is not None  # the launcher has set all variables
    with suppress(RuntimeError):  # the launcher has ended
        store = TCPStore(
            info.address, info.port, is_master=False, timeout=timedelta(seconds=_REPORT_LIMIT)
        )
        store.set(failure_key(info.rank), str(time.monotonic()))


def time_limit(seconds: float | None) -> timedelta:
    """Return the time limit of collectives between processes.

    It is `seconds`, or FSHARD_TIMEOUT; `inf` is none (30 days).
    """
    value = os.environ.get("FSHARD_TIMEOUT", "600") if seconds is None else seconds
    with suppress(TypeError, ValueError):
        limit = float(value)
        if limit > 0:
            return timedelta(seconds=min(limit, 30 * 86400))
    name = "FSHARD_TIMEOUT" if seconds is None else "timeout"
    raise MeshError(
        f"{name} must be a positive number of seconds, or inf for no limit; got {value!r}."
    )


def _choose_backend(device_type: str, store: Any, info: ProcessInfo) -> str:
    """Return NCCL if every process has a GPU to itself; it refuses to share one.

    FSHARD_BACKEND names another backend of torch.distributed, for tests and experiments.
    """
    named_backend = os.environ.get("FSHARD_BACKEND")
    if named_backend:
        return named_backend
    if device_type != "cuda" or not dist.is_nccl_available():
        return "gloo"

    device = torch.cuda.current_device()
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    if each_its_own(gpu, store, info.world):
        return "nccl"
    warnings.warn(
        "Several processes share a GPU, so they communicate over gloo, through host memory. "
        f"Process {info.rank} has local rank {info.local_rank} and GPU {device}. If that is not "
        "meant, export LOCAL_RANK.",
        stacklevel=6,
    )
    return "gloo"


def each_its_own(gpu: str, store: Any, world: int) -> bool:
    """Return True if no two processes of a world have the same GPU.

    All processes call it, and get the same answer. Counting GPUs would not do: SLURM may show each
    process only its own, as number 0.
    """
    if store.add(f"gpu {gpu}", 1) > 1:  # another process has it
        store.add("shared", 1)
    if store.add("counted", 1) == world:
        store.set("all counted", "1")
    store.wait(["all counted"])
    return store.add("shared", 0) == 0
