"""Files in shared memory that processes which were killed have left."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

FILES = Path("/dev/shm")
"""The folder of the files by which processes of a machine decide together."""


def left_over_files(folder: Path = FILES) -> str:
    """Return how many files have no owner, with the command that removes them; "" if none.

    Names have no process, so a file counts if it was last written before the start of the first
    process of this user that has torch and still runs: its owner has ended.
    """
    oldest = int(_oldest_start_with_torch())  # in seconds, as in the command
    names: list[str] = []
    for path in sorted(folder.glob("fshard-*")):
        with suppress(OSError):  # its owner has removed it meanwhile
            state = path.stat()
            if state.st_uid == os.getuid() and state.st_mtime < oldest:
                names.append(path.name)
    if not names:
        return ""
    return (
        f"{len(names)} files in {folder} are of processes that have ended, such as {names[0]}. "
        "Unless another container uses this folder, remove them: "
        f"find {folder} -maxdepth 1 -name 'fshard-*' -uid {os.getuid()} "
        f"-not -newermt @{oldest} -delete"
    )


def _oldest_start_with_torch() -> float:
    """Return the time at which the first of the processes with torch has started."""
    boot = _boot_time()
    ticks_per_second = os.sysconf("SC_CLK_TCK")
    starts: list[float] = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is of another user
            if "libtorch" in (process / "maps").read_text():
                # The name, in brackets, may have spaces; the start is field 22.
                _, _, text = (process / "stat").read_text().rpartition(")")
                fields_from_third = text.split()
                ticks = float(fields_from_third[22 - 3])  # since the boot
                starts.append(boot + ticks / ticks_per_second)
    return min(starts, default=0.0)


def _boot_time() -> float:
    """Return the time at which this machine has started."""
    for line in Path("/proc/stat").read_text().splitlines():
        if line.startswith("btime "):
            return float(line.split()[1])
    return 0.0
