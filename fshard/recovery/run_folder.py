"""The folder in which the processes of an elastic run meet: records in files, all written once.

FOLDER/fshard-run                   the name of the run's own folder, if the user gave FOLDER
FOLDER/fshard-run-TOKEN/            the run's own folder; it is removed when the run has ended
    generation-2                    who is in generation 2
    store-2                         where the store of generation 2 is
    come-2-0                        process 0 is there, to decide on generation 2
    ready-2-0                       process 0 is connected with the store of generation 2
    done-2-0                        process 0 has done its work, in generation 2
    gone-0                          process 0 has left the run, or another one saw it dead
    beat-0                          touched by process 0, if there are several machines
    joiners/TOKEN                   a process that waits to be taken up
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fshard.mesh.record import FileRecord
from fshard.mesh.shared_memory.alive import ProcessId

_RUN = "fshard-run"
IN_MEMORY = Path("/dev/shm")
"""The folder of runs on one machine."""


@dataclass(frozen=True)
class Generation:
    """The processes of a run between two changes.

    Args:
        index: 0 at first.
        processes: by their numbers, in the order of their ranks.
        next_number: of the next process that is taken up.
        tokens: by number, of those that were taken up in this generation.
    """

    index: int
    processes: dict[int, ProcessId]
    next_number: int
    tokens: dict[int, str]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the processes, by rank."""
        return tuple(self.processes)

    @property
    def is_on_one_machine(self) -> bool:
        """True if all processes are on one machine."""
        return len({process.machine for process in self.processes.values()}) == 1

    def to_text(self) -> str:
        """Return it as JSON."""
        rows = [[number, *process] for number, process in self.processes.items()]
        tokens = [*self.tokens.items()]
        return json.dumps([self.index, rows, self.next_number, tokens])

    @staticmethod
    def from_text(text: str) -> Generation:
        """Return the generation of a record."""
        index, rows, next_number, tokens = json.loads(text)
        processes: dict[int, ProcessId] = {}
        for number, *process in rows:
            processes[number] = ProcessId(*process)
        return Generation(index, processes, next_number, dict(tokens))


class Request(NamedTuple):
    """The request of a process to be taken up.

    Args:
        made: when, by the clock of its machine.
        process: the one that makes it.
        heard: when it has touched the request, by the clock of the file system.
    """

    made: float
    process: ProcessId
    heard: int


class RunFolder:
    """The records of one run.

    Every method but `close` raises a FileNotFoundError once the run has ended, or does nothing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._joiners = path / "joiners"

    # -- beginning and ending ----------------------------------------------------------------------

    @staticmethod
    def at(folder: Path, token: str) -> RunFolder:
        """Return the folder of the run with a token."""
        return RunFolder(folder / f"{_RUN}-{token}")

    @staticmethod
    def current(folder: Path) -> RunFolder | None:
        """Return the folder of the run in a folder of the user, if there is one."""
        token = FileRecord(folder / _RUN).current()
        return RunFolder.at(folder, token) if token else None

    @staticmethod
    def in_memory() -> list[RunFolder]:
        """Return the folders of all runs of this machine that were given no folder."""
        return [RunFolder(path) for path in IN_MEMORY.glob(f"{_RUN}-*")]

    def open(self) -> None:
        """Make the run's own folder."""
        self._joiners.mkdir(parents=True)

    def announce(self, folder: Path) -> bool:
        """Let joiners find the run in a folder; return False if there is another run."""
        token = self._path.name.removeprefix(f"{_RUN}-")
        return FileRecord(folder / _RUN).decide(token) == token

    @property
    def is_open(self) -> bool:
        """True until the run has ended."""
        return self._path.is_dir()

    def close(self) -> None:
        """End the run: remove all that it has left in files."""
        token = self._path.name.removeprefix(f"{_RUN}-")
        announced = FileRecord(self._path.with_name(_RUN))
        if announced.current() == token:
            announced.remove()
        # Renamed first, so that the run has ended for all processes at one moment.
        aside = self._path.with_name(f"{_RUN}-ended-{token}")
        with suppress(OSError):  # another process was faster
            self._path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)

    # -- generations -------------------------------------------------------------------------------

    def generation(self, index: int) -> Generation | None:
        """Return a generation, once it is decided on."""
        text = FileRecord(self._path / f"generation-{index}").current()
        return Generation.from_text(text) if text else None

    def newest(self) -> Generation | None:
        """Return the last generation that is decided on."""
        indices: list[int] = []
        for name in self._names():
            kind, _, index = name.partition("-")
            if kind == "generation" and index.isdecimal():  # no draft of a record
                indices.append(int(index))
        return self.generation(max(indices)) if indices else None

    def decide(self, generation: Generation) -> Generation:
        """Decide on a generation, unless that is done; return the one that counts."""
        record = FileRecord(self._path / f"generation-{generation.index}")
        return Generation.from_text(record.decide(generation.to_text()))

    def publish_store(self, index: int, address: str, port: int) -> None:
        """Publish where the store of a generation is."""
        FileRecord(self._path / f"store-{index}").decide(f"{address} {port}")

    def store(self, index: int) -> tuple[str, int] | None:
        """Return the address and port of the store of a generation, once it is there."""
        address, _, port = FileRecord(self._path / f"store-{index}").current().partition(" ")
        return (address, int(port)) if port else None

    # -- the processes of a generation -------------------------------------------------------------

    def mark(self, kind: str, index: int, number: int) -> None:
        """Record that a process has "come", is "ready" or "done", or has "failed" in a generation."""
        (self._path / f"{kind}-{index}-{number}").touch()

    def marked(self, kind: str, index: int) -> set[int]:
        """Return the numbers of the processes that are marked so in a generation."""
        prefix = f"{kind}-{index}-"
        names = [name for name in self._names() if name.startswith(prefix)]
        return {int(name.removeprefix(prefix)) for name in names}

    def mark_gone(self, number: int) -> None:
        """Record that a process has left the run, or is dead."""
        (self._path / f"gone-{number}").touch()

    def gone(self) -> set[int]:
        """Return the numbers of the processes that have left the run, or were seen dead."""
        names = [name for name in self._names() if name.startswith("gone-")]
        return {int(name.removeprefix("gone-")) for name in names}

    def beat(self, number: int) -> None:
        """Touch the file by which other machines hear a process."""
        (self._path / f"beat-{number}").touch()

    def last_beat(self, number: int) -> int:
        """Return when that file was touched, by the clock of its file system; 0 if never."""
        try:
            return (self._path / f"beat-{number}").stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    # -- joiners -----------------------------------------------------------------------------------

    def request(self, process: ProcessId) -> str:
        """Request to be taken up; return the token of the request."""
        token = secrets.token_hex(8)
        FileRecord(self._joiners / token).decide(json.dumps([time.time(), *process]))
        return token

    def withdraw(self, token: str) -> None:
        """Withdraw a request."""
        (self._joiners / token).unlink(missing_ok=True)

    def touch_request(self, token: str) -> None:
        """Show other machines that the process with a request is alive."""
        with suppress(FileNotFoundError):  # another process saw this one dead, or the run has ended
            os.utime(self._joiners / token)

    def joiners(self, taken: Iterable[str] = ()) -> dict[str, Request]:
        """Return the processes that wait to be taken up, by token, the oldest request first.

        Args:
            taken: the tokens of those that are taken up already.
        """
        try:
            tokens = {*os.listdir(self._joiners)} - {*taken}
        except FileNotFoundError:
            return {}
        if not tokens:
            return {}

        rows: list[tuple[str, Request]] = []
        for token in tokens:
            path = self._joiners / token
            if path.suffix:
                continue  # the draft of a record
            with suppress(FileNotFoundError):  # withdrawn
                made, *process = json.loads(path.read_text())
                request = Request(made, ProcessId(*process), path.stat().st_mtime_ns)
                rows.append((token, request))
        rows.sort(key=lambda row: row[1])
        return dict(rows)

    def _names(self) -> list[str]:
        return os.listdir(self._path)
