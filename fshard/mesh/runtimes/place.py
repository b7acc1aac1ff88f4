"""Read the rank of this process, and how the world meets, from the launcher's environment variables.

Every launcher has its own names (`LAUNCHERS`). torchrun's have priority: they are complete, and scripts set them. Then
the innermost launcher: `mpirun` inside a SLURM job starts its daemons with srun, and the processes inherit srun's
variables, which number the daemons. Where MPI and a SLURM step agree (`srun --mpi=pmi2`), SLURM's are used: they
include the hosts.

    torchrun    complete
    SLURM       only in a step, which srun starts; the processes meet on its first host
    MPI         on one machine; on several MASTER_ADDR must be exported, since MPI gives no address
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from fshard.errors import MeshError

Variables = Mapping[str, str]
LOOPBACK = "127.0.0.1"
PORTS = range(10240, 29952)
"""Range of default ports: below the ephemeral ports of operating systems."""


@dataclass(frozen=True)
class Place:
    """Rank, world size and meeting point of this process.

    Args:
        rank: its number.
        world: the number of processes.
        local_rank: its number on this machine.
        local_world: the number of processes on this machine.
        address: the host of process 0, where all meet.
        port: the port that process 0 listens on.
        by: the launcher.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    address: str
    port: int
    by: str

    @property
    def meant(self) -> bool:
        """True if several processes were requested; `srun --pty jupyter` starts one and has these variables as well."""
        return self.world > 1 or self.by == "torchrun"


class Names(NamedTuple):
    """The variables of a launcher. Of several names for one value the first that is set counts."""

    rank: tuple[str, ...]
    world: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world: tuple[str, ...]
    job: tuple[str, ...] = ()
    """Variables that are equal in all processes of a world, and differ between worlds."""


LAUNCHERS = {
    "torchrun": Names(("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)),
    "Open MPI": Names(
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        ("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"),
    ),
    "MVAPICH": Names(
        ("MV2_COMM_WORLD_RANK",),
        ("MV2_COMM_WORLD_SIZE",),
        ("MV2_COMM_WORLD_LOCAL_RANK",),
        ("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    "MPI": Names(  # hydra: MPICH's and Intel's; Cray's
        ("PMI_RANK",),
        ("PMI_SIZE",),
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        ("I_MPI_HYDRA_UUID",),
    ),
    "SLURM": Names(
        ("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_LOCALID",), (), ("SLURM_JOB_ID",)
    ),
}
"""Launchers, by priority."""
_BATCH = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")


def placed(variables: Variables, parent: int | None = None) -> Place | None:
    """Return the rank of this process, or None without a launcher.

    Args:
        variables: the environment.
        parent: the parent process: processes of one launcher may recognise each other by it.

    Raises a MeshError that lists all invalid variables.

    >>> placed({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu7", "MASTER_PORT": "2222"})
    Place(rank=1, world=2, local_rank=1, local_world=2, address='gpu7', port=2222, by='torchrun')
    """
    speaking = {by: names for by, names in LAUNCHERS.items() if _speaks(by, names, variables)}
    complete = [by for by, names in speaking.items() if _set(names.rank, variables) and _set(names.world, variables)]
    if not speaking:
        return None
    if not complete:
        raise _refused([_half(names, variables) for names in speaking.values()])
    by = complete[0]
    if by != "torchrun" and complete[-1] == "SLURM" and _values(by, variables) == _values("SLURM", variables):
        by = "SLURM"
    return _Reading(by, variables, parent).place()


def _set(names: tuple[str, ...], variables: Variables) -> str | None:
    """Return the first of these names that is set."""
    return next((name for name in names if variables.get(name)), None)


def _values(by: str, variables: Variables) -> list[str]:
    names = LAUNCHERS[by]
    return [variables[_set(each, variables) or ""] for each in (names.rank, names.world)]


def _speaks(by: str, names: Names, variables: Variables) -> bool:
    return _set(names.rank + names.world, variables) is not None and (by != "SLURM" or in_a_step(variables))


def _half(names: Names, variables: Variables) -> str:
    there = _set(names.rank + names.world, variables)
    return f"{there} is set, but {' or '.join(names.world if there in names.rank else names.rank)} is not"


def _refused(wrong: list[str]) -> MeshError:
    return MeshError(
        f"The environment does not give the rank of this process: {'; '.join(wrong)}. Start all of them with "
        "torchrun, srun or mpirun, or unset these variables; devices in this process: "
        'make_mesh(..., runtime="virtual").'
    )


class _Reading:
    """Reads the variables of one launcher, and notes all that is wrong."""

    def __init__(self, by: str, variables: Variables, parent: int | None) -> None:
        self.by, self.names, self.variables, self.parent = by, LAUNCHERS[by], variables, parent
        self.wrong: list[str] = []
        self.missing: list[str] = []

    def place(self) -> Place:
        """Return the rank."""
        world = self._number(self.names.world, 1)
        rank = self._number(self.names.rank, 0, world)
        for name, known in (("RANK", rank), ("WORLD_SIZE", world)) if self.by != "torchrun" else ():
            given = self._number((name,), 0)
            if None not in (given, known) and given != known:
                self.wrong.append(f"{name}={given}, but {self.by} has {known}")
        rank, world = rank or 0, world or 1
        address = self.variables.get("MASTER_ADDR", "")
        local_rank, local_world = self._here(rank, world, address)
        together = local_world == world
        address = address or self._address(together)
        port = self._number(("MASTER_PORT",), 1, 65536) or self._port(together)
        if self.missing:
            self.wrong.append(f"missing: {', '.join(self.missing)}" + self._why())
        if self.wrong:
            raise _refused([f"it was started by {self.by}", *self.wrong])
        return Place(rank, world, local_rank, local_world, address, port, self.by)

    def _number(self, names: tuple[str, ...], least: int, end: int | None = None) -> int | None:
        name = _set(names, self.variables)
        if name is None:
            return None
        text = self.variables[name].strip()
        if text.isascii() and text.isdecimal() and least <= int(text) and (end is None or int(text) < end):
            return int(text)
        wanted = f"no integer from {least} on" if end is None else f"none of {least} to {end - 1}"
        self.wrong.append(f"{name}={text} is {wanted}")
        return None

    def _here(self, rank: int, world: int, address: str) -> tuple[int, int]:
        """Return local rank and local world size; default: one process per machine."""
        count = tasks_here(self.variables) if self.by == "SLURM" else None
        local_world = count or self._number((*self.names.local_world, "LOCAL_WORLD_SIZE"), 1, world + 1)
        local_rank = self._number((*self.names.local_rank, "LOCAL_RANK"), 0, local_world or world)
        if local_world is None and local_rank is None and address not in (LOOPBACK, "localhost", "::1"):
            return 0, 1
        local_world = local_world or world
        return rank % local_world if local_rank is None else local_rank, local_world

    def _address(self, together: bool) -> str:
        if self.by != "torchrun" and together:
            return LOOPBACK
        found = hosts_of_step(self.variables) if self.by == "SLURM" else []
        if not found:
            self.missing.append("MASTER_ADDR")
        return found[0] if found else ""

    def _port(self, together: bool) -> int:
        """Derive a port from values that are equal in all processes of this world only."""
        if self.by == "SLURM":
            common = [self.variables.get(name, "") for name in (*self.names.job, *STEP)]
        else:
            run, batch = (_set(names, self.variables) for names in (self.names.job, _BATCH))
            common = [self.variables[run]] if run else [str(self.parent)] if together and self.parent else []
            common = common or ([self.variables[batch]] if batch else [])
        if self.by == "torchrun" or not common:
            self.missing += ["MASTER_PORT"] * ("MASTER_PORT" not in self.variables)
            return 0
        return PORTS[zlib.crc32(" ".join(common).encode()) % len(PORTS)]

    def _why(self) -> str:
        if self.by == "torchrun":
            return ""
        return f" ({self.by} gives no meeting point for processes of several machines: MASTER_ADDR is the host of process 0)"


STEP = ("SLURM_STEP_ID", "SLURM_STEPID")
RESERVED = 0xFFFFFFF0
"""Steps from this number on are SLURM's own: batch scripts, shells of salloc."""


def hosts(text: str) -> list[str]:
    """Write out a list of hosts.

    >>> hosts("gpu[01-03,07],login1")
    ['gpu01', 'gpu02', 'gpu03', 'gpu07', 'login1']
    >>> hosts("r[1-2]n[8-9].x")
    ['r1n8.x', 'r1n9.x', 'r2n8.x', 'r2n9.x']
    """
    return [name for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text) for name in _written_out(item)]


def _written_out(item: str) -> list[str]:
    before, bracket, rest = item.partition("[")
    if not bracket:
        return [item]
    inside, _, after = rest.partition("]")
    ends = _written_out(after)
    return [before + number + end for number in _numbers(inside) for end in ends]


def _numbers(text: str) -> list[str]:
    found: list[str] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        a_range = first.isdecimal() and last.isdecimal()
        found += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)] if a_range else [part]
    return found


def tasks_on_nodes(text: str) -> list[int]:
    """Write out the tasks of each node.

    >>> tasks_on_nodes("4(x2),3")
    [4, 4, 3]
    """
    counts: list[int] = []
    for part in text.split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return counts


def in_a_step(variables: Mapping[str, str]) -> bool:
    """Return True if srun has started this process.

    A batch script and the shell of salloc run once, whatever SLURM_NTASKS is.
    """
    numbers = [variables[name] for name in STEP if name in variables]
    return bool(numbers) and numbers[0].isdecimal() and int(numbers[0]) < RESERVED


def tasks_here(variables: Mapping[str, str]) -> int | None:
    """Return the number of tasks of the step on this node, if SLURM gives it."""
    try:
        counts = tasks_on_nodes(variables["SLURM_STEP_TASKS_PER_NODE"])
        return counts[0 if len(counts) == 1 else int(variables["SLURM_NODEID"])]
    except (KeyError, ValueError, IndexError):
        return None


def hosts_of_step(variables: Mapping[str, str]) -> list[str]:
    """Return the step's hosts."""
    names = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    return next((hosts(variables[name]) for name in names if variables.get(name)), [])


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
    """Return True if no two processes of a world have the same GPU. All processes call it, and get the same answer.

    Counting GPUs would not do: SLURM may show each process only its own, as number 0.
    """
    if store.add(f"gpu {gpu}", 1) > 1:  # another process has it
        store.add("shared", 1)
    if store.add("counted", 1) == world:
        store.set("all counted", "1")
    store.wait(["all counted"])
    return store.add("shared", 0) == 0
