"""Which of several processes this one is, as whoever started them says in environment variables.

Every launcher has names of its own (`LAUNCHERS`).  torchrun's come first: they hold all that is needed, and scripts set
them by hand.  Then comes the innermost launcher: `mpirun` inside a SLURM job starts its helpers with srun, and the processes
inherit srun's variables, which number the helpers.  Where MPI and a step of SLURM say the same (`srun --mpi=pmi2`), SLURM is
asked, which knows the hosts.

    torchrun    all is said
    SLURM       only in a step, which srun starts; the processes meet on its first host
    MPI         on one machine; for several MASTER_ADDR has to be exported, as MPI tells nobody's address
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fshard.errors import MeshError
from fshard.mesh.runtimes import slurm

Variables = Mapping[str, str]
LOOPBACK = "127.0.0.1"
PORTS = range(10240, 29952)
"""Where a port is taken from that nobody has named: below those that systems hand out by themselves."""


@dataclass(frozen=True)
class Place:
    """Which process this is.

    Args:
        rank: its number.
        world: how many there are.
        local_rank: its number on this machine.
        local_world: how many there are on this machine.
        address: the host of process 0, where all meet.
        port: where it listens.
        by: who has started them.
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
        """Whether somebody asked for processes: `srun --pty jupyter` starts one as well, and does not mean that."""
        return self.world > 1 or self.by == "torchrun"


class Names(NamedTuple):
    """Where a launcher says what.  Several names stand for the same: the first that is set counts."""

    rank: tuple[str, ...]
    world: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world: tuple[str, ...]
    job: tuple[str, ...] = ()
    """What is equal in all processes, and another one in other worlds."""


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
"""Who may have started this process, in the order in which they are believed."""
_BATCH = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")


def placed(variables: Variables, parent: int | None = None) -> Place | None:
    """Return which of several processes this is, or None if nobody has said anything.

    Args:
        variables: the environment.
        parent: the process that started this one: what it started may know each other by that.

    Raises a MeshError that lists all that is wrong with the variables.

    >>> placed({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu7", "MASTER_PORT": "2222"})
    Place(rank=1, world=2, local_rank=1, local_world=2, address='gpu7', port=2222, by='torchrun')
    """
    speaking = {by: names for by, names in LAUNCHERS.items() if _speaks(by, names, variables)}
    whole = [by for by, names in speaking.items() if _set(names.rank, variables) and _set(names.world, variables)]
    if not speaking:
        return None
    if not whole:
        raise _refused([_half(names, variables) for names in speaking.values()])
    by = whole[0]
    if by != "torchrun" and whole[-1] == "SLURM" and _said(by, variables) == _said("SLURM", variables):
        by = "SLURM"
    return _Reading(by, variables, parent).place()


def _set(names: tuple[str, ...], variables: Variables) -> str | None:
    """Return the first of these names that is set."""
    return next((name for name in names if variables.get(name)), None)


def _said(by: str, variables: Variables) -> list[str]:
    names = LAUNCHERS[by]
    return [variables[_set(each, variables) or ""] for each in (names.rank, names.world)]


def _speaks(by: str, names: Names, variables: Variables) -> bool:
    return _set(names.rank + names.world, variables) is not None and (by != "SLURM" or slurm.in_a_step(variables))


def _half(names: Names, variables: Variables) -> str:
    there = _set(names.rank + names.world, variables)
    return f"{there} is set, but {' or '.join(names.world if there in names.rank else names.rank)} is not"


def _refused(wrong: list[str]) -> MeshError:
    return MeshError(
        f"The environment does not say which of several processes this is: {'; '.join(wrong)}. Start all of them with "
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
        """Return the place."""
        world = self._number(self.names.world, 1)
        rank = self._number(self.names.rank, 0, world)
        for name, known in (("RANK", rank), ("WORLD_SIZE", world)) if self.by != "torchrun" else ():
            given = self._number((name,), 0)
            if None not in (given, known) and given != known:
                self.wrong.append(f"{name}={given}, but {self.by} says {known}")
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
        wanted = f"no whole number from {least} on" if end is None else f"none of {least} to {end - 1}"
        self.wrong.append(f"{name}={text} is {wanted}")
        return None

    def _here(self, rank: int, world: int, address: str) -> tuple[int, int]:
        """Return which process of this machine this is, and of how many.  Nothing said: one process a machine."""
        count = slurm.tasks_here(self.variables) if self.by == "SLURM" else None
        local_world = count or self._number((*self.names.local_world, "LOCAL_WORLD_SIZE"), 1, world + 1)
        local_rank = self._number((*self.names.local_rank, "LOCAL_RANK"), 0, local_world or world)
        if local_world is None and local_rank is None and address not in (LOOPBACK, "localhost", "::1"):
            return 0, 1
        local_world = local_world or world
        return rank % local_world if local_rank is None else local_rank, local_world

    def _address(self, together: bool) -> str:
        if self.by != "torchrun" and together:
            return LOOPBACK
        found = slurm.hosts_of_step(self.variables) if self.by == "SLURM" else []
        if not found:
            self.missing.append("MASTER_ADDR")
        return found[0] if found else ""

    def _port(self, together: bool) -> int:
        """Derive the port from what is equal in all processes of this world, and in no other."""
        if self.by == "SLURM":
            common = [self.variables.get(name, "") for name in (*self.names.job, *slurm.STEP)]
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
        return (
            f" ({self.by} does not say where processes of several machines meet: MASTER_ADDR is the host of process 0)"
        )
