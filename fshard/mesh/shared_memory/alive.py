"""Look whether a process of this machine is alive, by its number and its start, which /proc shows.

/proc/PID/stat    1234 (python) S 1 ... 4194560 ... 567890 ...
                   pid  name    state   flags        start, in ticks since the machine's
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from fshard.mesh.shared_memory.meet import machine_id

_STATE, _FLAGS, _START = 0, 6, 19
"""Columns behind the name of a process, which may have spaces and brackets."""
_EXITING = 0x4
"""The flag of a process that ends. Its sockets close while its state is still "running"."""
_ENDED = "ZX"
"""States of a process that has ended, and that its parent has not waited for."""


class ProcessId(NamedTuple):
    """A process, distinct from a later one with its number.

    Args:
        machine: where it runs, 0 if that is unknown: see `machine_id`.
        pid: its number there.
        start: when it started, in ticks since the machine did.
    """

    machine: int
    pid: int
    start: int

    @property
    def has_ended(self) -> bool:
        """True if the process, which must be of this machine, runs no more."""
        columns = _columns(self.pid)
        if not columns:
            return True
        is_ending = columns[_STATE] in _ENDED or int(columns[_FLAGS]) & _EXITING
        return bool(is_ending) or int(columns[_START]) != self.start


def this_process() -> ProcessId:
    """Return the calling process; its machine is 0 if there is no /proc."""
    columns = _columns(os.getpid())
    if not columns:
        return ProcessId(0, os.getpid(), 0)
    return ProcessId(machine_id(), os.getpid(), int(columns[_START]))


def _columns(pid: int) -> list[str]:
    """Return what /proc shows of a process, from its state on; [] if it has none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (OSError, ValueError):
        return []
    return text.rpartition(")")[2].split()
