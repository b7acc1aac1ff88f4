"""What SLURM's variables say: its lists of hosts, its counts of tasks, and which steps are somebody's own processes."""

from __future__ import annotations

import re
from collections.abc import Mapping

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
    """Return whether srun has started this process.

    A batch script, and the shell of salloc, run once, whatever SLURM_NTASKS says of what srun may start from there.
    """
    numbers = [variables[name] for name in STEP if name in variables]
    return bool(numbers) and numbers[0].isdecimal() and int(numbers[0]) < RESERVED


def tasks_here(variables: Mapping[str, str]) -> int | None:
    """Return how many tasks of the step run on this node, if SLURM says so."""
    try:
        counts = tasks_on_nodes(variables["SLURM_STEP_TASKS_PER_NODE"])
        return counts[0 if len(counts) == 1 else int(variables["SLURM_NODEID"])]
    except (KeyError, ValueError, IndexError):
        return None


def hosts_of_step(variables: Mapping[str, str]) -> list[str]:
    """Return the step's hosts."""
    names = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    return next((hosts(variables[name]) for name in names if variables.get(name)), [])
