"""The processes of an elastic run, over its generations: who is there, who is lost, who joins.

A generation is a world of processes. It ends when one of them is lost, or when new ones are taken
up. Then all that are left leave the world, without waiting for anyone, and form the next one:

    each process of generation 1     leaves its world, and has come
                                     waits until each other one has come, has ended, or is too late
    the first to see that            decides on generation 2: those that have come, then new ones
    the first process of 2           serves a store, in which all of them meet
    each process of 2                is ready; when all are, they connect

Decisions are records in files, of which the first counts: see `RunFolder`. If a process ends before
all are connected, generation 2 is given up by all, and they decide on generation 3.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread
from typing import Any, Literal

import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from fshard.errors import FshardError, LostProcessError, MeshError
from fshard.mesh.runtimes import process
from fshard.mesh.runtimes.interface import reachable_address
from fshard.mesh.runtimes.launchers import (
    ProcessInfo,
    read_variables,
    report_failure,
    store_within,
    time_limit,
)
from fshard.mesh.runtimes.watch import default_store
from fshard.mesh.shared_memory.alive import ProcessId, this_process
from fshard.mesh.shared_memory.meet import all_gather
from fshard.recovery.run_folder import IN_MEMORY, Generation, RunFolder

_PAUSE = 0.002
"""Seconds between two looks of a process that the others wait for."""
_IDLE_PAUSE = 0.02
"""The same of a process that waits for work."""
_BEAT = 1.0
"""Seconds between two signs of life for other machines."""
_SILENT = 10 * _BEAT
"""Seconds after which a joiner of another machine that gives no sign is not taken up."""
_CONNECT = 3.0
"""Seconds that processes may take to connect once all are ready: see Note [Two deaths at once]."""
_SEEN_LATER = 1.0
"""Seconds after an error within which a death that caused it is seen."""


# Note [Two deaths at once]
# A process may end while the others form the next generation. All that they wait for in files, they
# wait for with an eye on each other, so they give up at once. But gloo waits for a process that was
# ready, and ended before it was connected, until a limit of time. So connecting has its own limit.
# If no process has ended then, the machine is busy: the next attempt, which is the next generation,
# has twice the time.


class Members:
    """The processes of one generation of an elastic run, seen from one of them.

    Args:
        run_folder: the records of the run.
        number: of this process.
        generation: it, and the processes in it.
        device_type: of its world.
        local_rank: the number of this process on its machine.
        limit: the time to wait for a process that is alive.
    """

    def __init__(
        self,
        run_folder: RunFolder,
        number: int,
        generation: Generation,
        device_type: str,
        local_rank: int,
        limit: timedelta,
    ) -> None:
        self.number = number
        self.numbers = generation.numbers
        self.generation = generation.index
        self._folder = run_folder
        self._processes = generation
        self._device_type = device_type
        self._local_rank = local_rank
        self._limit = limit
        # One that this process serves ends with the last reference to it.
        self._store: Any = None
        if generation.index == 0:
            self._store = default_store()
        self._beats = _Beats(run_folder, number, generation, limit)

    # -- meeting -----------------------------------------------------------------------------------

    @staticmethod
    def meet(folder: Path | None, device_type: str, timeout: float | None) -> Members | None:
        """Join the run in a folder, or begin a run with the processes started together.

        A process that joins waits until the others take it up. Return None if the run has ended
        before that.

        Args:
            folder: a directory that all processes see; None for one of this machine's memory, in
                which no process can join.
            device_type: "cpu" or "cuda".
            timeout: seconds that a process waits for another one that is alive; `inf` for no limit.
                Default: the environment variable FSHARD_TIMEOUT, or 600.
        """
        limit = time_limit(timeout)
        # Else torch ends this process when NCCL has lost another one; torchrun sets that as well.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        _remove_abandoned()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            run_folder = RunFolder.current(folder)
            if run_folder is not None and _is_live(run_folder):
                return _join_run(run_folder, device_type, limit)
        return _begin_run(folder, device_type, timeout, limit)

    @staticmethod
    def runs_in(folder: Path) -> bool:
        """Return True if a run is in progress in a folder."""
        run_folder = RunFolder.current(folder)
        return run_folder is not None and _is_live(run_folder)

    # -- the generation ----------------------------------------------------------------------------

    def has_joiners(self) -> bool:
        """Return True if a process waits to be taken up."""
        return bool(self._joiners())

    def has_lost(self) -> bool:
        """Return True if a process of this generation has ended, or gone on to the next one."""
        return bool(self._lost(self.numbers))

    def has_dead(self) -> bool:
        """Return True if a process of this generation is lost, and not by an error of its own.

        An error that all processes raise is no loss, though one of them has left before another.
        """
        dead = {number for number in self.numbers if not self._is_alive(number)}
        with suppress(FileNotFoundError):  # the run has ended
            dead |= self._folder.gone().intersection(self.numbers)
            dead -= self._folder.marked("failed", self.generation)
        return bool(dead - {self.number})

    def find_loss(self) -> str:
        """Return what is known of a loss, or "", as once the run has ended in order."""
        lost = self._lost(self.numbers)
        # In this order: the run has ended for all before one of them ends.
        if not lost or not self._folder.is_open:
            return ""
        return f"Process {min(lost)} of the run has ended, or has left it."

    def regroup(self) -> Members:
        """Leave the world without waiting, and return the next generation.

        Call it after an error that a lost process has caused, or to take up new processes. Raise a
        LostProcessError if the others have continued without this process.
        """
        process.leave(waiting=False, keeps_store=True)
        return self._agreed().formed()

    def formed(self) -> Members:
        """Form the world of this generation, or of a later one if a process is lost meanwhile."""
        current = self
        connect_limit = _CONNECT
        while not current._form(connect_limit):
            current = current._agreed()
            connect_limit *= 2
        return current

    def wait_for_change(self, busy: Iterable[int]) -> Literal["regroup", "ended"]:
        """Wait, as a process without work, until the others regroup, or the run has ended.

        Args:
            busy: the numbers of the processes that work.
        """
        numbers = {*busy}
        while self._folder.is_open:
            if self._lost(numbers):
                return "regroup"
            time.sleep(_IDLE_PAUSE)
        self._end()
        return "ended"

    def finish(self, busy: Iterable[int] | None = None) -> None:
        """End the run, once all processes that work have called this; nothing is left of it.

        Raise a LostProcessError if one of them is lost before it has: then regroup.

        Args:
            busy: the numbers of the processes that work; all by default.
        """
        numbers = {*self.numbers} if busy is None else {*busy}
        deadline = time.monotonic() + self._limit.total_seconds()
        try:
            self._folder.mark("done", self.generation, self.number)
        except FileNotFoundError:
            raise self._left_behind() from None
        with suppress(FileNotFoundError):  # another process has ended the run
            while True:
                # In this order: one that has ended does not become done later.
                lost = self._lost(numbers)
                missing = numbers - self._folder.marked("done", self.generation)
                if not missing:
                    break

                is_too_late = time.monotonic() > deadline
                lost_before_done = missing if is_too_late else lost & missing
                if lost_before_done:
                    raise LostProcessError(
                        f"Process {min(lost_before_done)} of the run was lost before it had "
                        "finished."
                    )
                time.sleep(_PAUSE)
        self._end()

    def leave(self) -> None:
        """Leave the run, because of an error here: the others go on without this process."""
        self._beats.stop()
        report_failure()
        with suppress(FileNotFoundError):
            self._folder.mark("failed", self.generation, self.number)
            self._folder.mark_gone(self.number)
            gone = self._folder.gone()
            others = {*self.numbers} - gone
            if not any(self._is_alive(number) for number in others):
                self._folder.close()
        process.leave(waiting=False, keeps_store=True)

    def _end(self) -> None:
        self._beats.stop()
        self._folder.close()

    # -- who is there ------------------------------------------------------------------------------

    def _joiners(self) -> dict[str, ProcessId]:
        """Return the processes that wait to be taken up, by token."""
        joiners: dict[str, ProcessId] = {}
        for token, request in self._folder.joiners(self._processes.tokens.values()).items():
            if request.process.machine == self._here:
                is_alive = not request.process.has_ended
            else:
                silence = self._folder.last_beat(self.number) - request.heard
                is_alive = silence < _SILENT * 1e9
            if is_alive:
                joiners[token] = request.process
            else:
                self._folder.withdraw(token)
        return joiners

    def _lost(self, numbers: Iterable[int]) -> set[int]:
        """Return those of some processes that have ended, left, or gone on."""
        lost: set[int] = set()
        for number in numbers:
            if number != self.number and not self._is_alive(number):
                lost.add(number)
        with suppress(FileNotFoundError):  # the run has ended
            lost |= self._folder.gone().intersection(numbers)
            lost |= self._folder.marked("come", self.generation + 1).intersection(numbers)
        return lost - {self.number}

    def _is_alive(self, number: int) -> bool:
        """Return True if a process runs, as far as this machine knows."""
        member = self._processes.processes[number]
        if member.machine != self._here:
            return self._beats.is_heard(number)
        if not member.has_ended:
            return True
        if not self._processes.is_on_one_machine:
            with suppress(FileNotFoundError):
                self._folder.mark_gone(number)  # other machines cannot see it
        return False

    @property
    def _here(self) -> int:
        """The machine of this process."""
        return self._processes.processes[self.number].machine

    # -- the next generation -----------------------------------------------------------------------

    def _agreed(self) -> Members:
        """Decide on the next generation with those that are left; return it, not yet formed."""
        try:
            generation = self._decided()
        except FileNotFoundError:
            raise self._left_behind() from None
        if self.number not in generation.numbers:
            raise self._left_behind()
        return self._of(generation)

    def _decided(self) -> Generation:
        """Return the decision on the next generation, once the others have come or are lost."""
        index = self.generation + 1
        self._folder.mark("come", index, self.number)
        deadline = time.monotonic() + self._limit.total_seconds()
        while True:
            generation = self._folder.generation(index)
            if generation is not None:
                return generation  # another process has decided

            present, awaited = self._present_and_awaited(index)
            is_too_late = time.monotonic() > deadline
            if not awaited or is_too_late:
                # Several may do so at once: all get the decision that was written first.
                return self._folder.decide(self._next_generation(present))
            time.sleep(_PAUSE)

    def _present_and_awaited(self, index: int) -> tuple[list[int], list[int]]:
        """Return those that have come to decide on a generation, and those that still may."""
        come = self._folder.marked("come", index)
        gone = self._folder.gone()
        present: list[int] = []
        awaited: list[int] = []
        for number in self.numbers:
            if number == self.number:
                present.append(number)
                continue
            if number in gone or not self._is_alive(number):
                continue
            if number in come:
                present.append(number)
            else:
                awaited.append(number)
        return present, awaited

    def _of(self, generation: Generation) -> Members:
        """Return the next generation, seen from this process."""
        self._beats.stop()
        return Members(
            self._folder,
            self.number,
            generation,
            self._device_type,
            self._local_rank,
            self._limit,
        )

    def _next_generation(self, present: Iterable[int]) -> Generation:
        """Return the generation of these processes and of those that wait to be taken up."""
        processes = {number: self._processes.processes[number] for number in present}
        next_number = self._processes.next_number
        tokens: dict[int, str] = {}
        for token, joiner in self._joiners().items():
            processes[next_number] = joiner
            tokens[next_number] = token
            next_number += 1
        return Generation(self.generation + 1, processes, next_number, tokens)

    def _left_behind(self) -> LostProcessError:
        return LostProcessError(
            f"Process {self.number} of the run was not heard of within the limit of "
            f"{self._limit.total_seconds():g} s, and the others went on without it. If it was not "
            "stopped but slow, give a longer timeout=."
        )

    def _form(self, connect_limit: float) -> bool:
        """Form the world of this generation; return False if a process was lost meanwhile."""
        try:
            self._connect(min(connect_limit, self._limit.total_seconds()))
        except (_LostMeanwhileError, FileNotFoundError):
            return False
        except (RuntimeError, OSError) as error:
            # A connection fails at once where its other end dies, whose end is seen a little later.
            deadline = time.monotonic() + _SEEN_LATER
            while not self.has_lost() and time.monotonic() < deadline:
                time.sleep(_PAUSE)
            # Only the text shows that a limit was exceeded: see Note [Two deaths at once].
            is_late = "imed out" in str(error) or "imeout" in str(error)
            if not self.has_lost() and not is_late:
                raise
            return False
        return True

    def _connect(self, limit: float) -> None:
        """Join the world of this generation."""
        rank = self.numbers.index(self.number)
        if rank == 0:
            address, port = self._serve_store()
        else:
            address, port = self._wait_for(lambda: self._folder.store(self.generation))
            self._store = self._client(address, port, timedelta(seconds=limit))

        self._folder.mark("ready", self.generation, self.number)
        everyone = {*self.numbers}
        self._wait_for(lambda: self._folder.marked("ready", self.generation) >= everyone)

        size = len(self.numbers)
        process.join_again(
            self._device_type,
            ProcessInfo(rank, size, self._local_rank, address, port, "an elastic run"),
            self._store,
            self._limit,
            timedelta(seconds=limit),
            self._raise_if_lost,
        )
        self._store.set_timeout(self._limit)
        process.watch_losses(self.find_loss)

    def _serve_store(self) -> tuple[str, int]:
        """Serve the store of this generation, at a free port; return its address."""
        address = "127.0.0.1" if self._processes.is_on_one_machine else reachable_address()
        server = socket.create_server((address, 0))
        port = server.getsockname()[1]
        self._store = TCPStore(
            address, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
        )
        self._folder.publish_store(self.generation, address, port)
        return address, port

    def _client(self, address: str, port: int, limit: timedelta) -> TCPStore:
        """Connect to the store of this generation."""
        return store_within(
            lambda: TCPStore(address, port, is_master=False, timeout=limit),
            limit,
            self._raise_if_lost,
        )

    def _wait_for(self, condition: Callable[[], Any]) -> Any:
        """Wait for a condition of files; return what is true of it."""
        deadline = time.monotonic() + self._limit.total_seconds()
        while True:
            result = condition()
            if result:
                return result
            self._raise_if_lost()
            if time.monotonic() > deadline:
                raise _LostMeanwhileError
            time.sleep(_PAUSE)

    def _raise_if_lost(self) -> None:
        if self.has_lost():
            raise _LostMeanwhileError


class _LostMeanwhileError(FshardError):
    """A process was lost before its generation was formed."""


class _Beats:
    """Signs of life for other machines, and those of processes there; none if there is one machine.

    A thread touches a file every second. The clocks of machines differ, so a process is heard when
    its file is seen to have changed, by the clock here.
    """

    def __init__(
        self, run_folder: RunFolder, number: int, generation: Generation, limit: timedelta
    ) -> None:
        self._folder = run_folder
        self._limit = limit.total_seconds()
        self._stopped = Event()
        self._heard: dict[int, tuple[int, float]] = {}
        if not generation.is_on_one_machine:
            thread = Thread(
                target=_beat,
                args=(run_folder, number, self._stopped),
                name="fshard-beat",
                daemon=True,
            )
            thread.start()

    def is_heard(self, number: int) -> bool:
        """Return True if a process has given a sign of life within the limit."""
        beat = self._folder.last_beat(number)
        now = time.monotonic()
        last_beat, since = self._heard.get(number, (-1, now))
        if beat != last_beat:
            self._heard[number] = (beat, now)
            return True
        return now - since < self._limit

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()


def _beat(run_folder: RunFolder, number: int, stopped: Event) -> None:
    while not stopped.is_set():
        with suppress(OSError):
            if run_folder.is_open:
                run_folder.beat(number)
        stopped.wait(_BEAT)


# -- beginning -------------------------------------------------------------------------------------


def _begin_run(
    folder: Path | None, device_type: str, timeout: float | None, limit: timedelta
) -> Members:
    """Begin a run with the processes started together; its first generation is their world."""
    world = process.join(device_type, timeout)
    token = secrets.randbits(62)
    rows = all_gather([*this_process(), token])
    processes = {rank: ProcessId(*row[:3]) for rank, row in enumerate(rows)}
    generation = Generation(0, processes, len(rows), {})
    _check_machines(generation, folder)

    first_token = f"{rows[0][3]:016x}"
    run_folder = RunFolder.at(IN_MEMORY if folder is None else folder, first_token)
    is_announced = True
    if world.rank == 0:
        run_folder.open()
        run_folder.decide(generation)
        if folder is not None:
            is_announced = _announce(run_folder, folder)
    all_gather([0])  # now process 0 has done that
    verdicts = all_gather([is_announced, run_folder.generation(0) == generation])
    error = _error_of_begin(folder, verdicts)
    if error:
        if world.rank == 0:
            run_folder.close()
        raise MeshError(error)

    members = Members(run_folder, world.rank, generation, world.device_type, _local_rank(), limit)
    process.watch_losses(members.find_loss)
    return members


def _check_machines(generation: Generation, folder: Path | None) -> None:
    """Raise, on all processes, unless each can know whether the others are alive."""
    machines = {member.machine for member in generation.processes.values()}
    if 0 in machines:
        raise MeshError(
            "Elastic runs need /proc, which Linux has, to see that a process has ended."
        )
    if len(machines) > 1 and folder is None:
        raise MeshError(
            f"An elastic run on {len(machines)} machines must be given a folder that all of them "
            "see, in which the processes that are left meet; got None."
        )


def _announce(run_folder: RunFolder, folder: Path) -> bool:
    """Let joiners find a run in its folder; return False if there is another one."""
    if run_folder.announce(folder):
        return True
    other = RunFolder.current(folder)
    if other is None or _is_live(other):
        return False
    other.close()
    return run_folder.announce(folder)


def _error_of_begin(folder: Path | None, verdicts: list[list[int]]) -> str:
    """Return why a run cannot begin, or "".

    Args:
        folder: where it would be.
        verdicts: of each process: whether the run is announced, and whether its record is seen.
    """
    for rank, (is_announced, is_seen) in enumerate(verdicts):
        if not is_announced:
            return (
                f"folder must be of one elastic run at a time; another one has begun in {folder}. "
                "Start these processes again to join it, or give another folder."
            )
        if not is_seen:
            return (
                f"folder must be a directory that all processes see; process {rank} does not see "
                f"in {folder or IN_MEMORY} what process 0 has written there. Give a folder of a "
                "file system that all machines share."
            )
    return ""


def _local_rank() -> int:
    """Return the number of this process on its machine."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.current_device()
    info = read_variables(os.environ, os.getppid())
    if info is not None:
        return info.local_rank
    return int(os.environ.get("LOCAL_RANK", "0"))


# -- joining ---------------------------------------------------------------------------------------


def _join_run(run_folder: RunFolder, device_type: str, limit: timedelta) -> Members | None:
    """Wait until the others take this process up; return None if the run has ended before that."""
    own = this_process()
    try:
        token = run_folder.request(own)
        next_beat = 0.0
        newest = run_folder.newest()
        while newest is not None:
            following = run_folder.generation(newest.index + 1)
            if following is not None:
                if token in following.tokens.values():
                    run_folder.withdraw(token)
                    return _taken_up(run_folder, following, token, device_type, limit)
                newest = following
                continue

            if time.monotonic() > next_beat:
                next_beat = time.monotonic() + _BEAT
                run_folder.touch_request(token)
                if not _has_process(newest):
                    run_folder.withdraw(token)
                    raise LostProcessError(
                        "All processes of the run have ended before they took this one up."
                    )
            time.sleep(_IDLE_PAUSE)
    except FileNotFoundError:
        return None
    return None


def _taken_up(
    run_folder: RunFolder,
    generation: Generation,
    token: str,
    device_type: str,
    limit: timedelta,
) -> Members:
    """Return the generation that has taken this process up, once its world is formed."""
    number = next(key for key, value in generation.tokens.items() if value == token)
    members = Members(run_folder, number, generation, device_type, _local_rank(), limit)
    return members.formed()


def _has_process(generation: Generation) -> bool:
    """Return True if a process of a generation may be alive."""
    here = this_process().machine
    for member in generation.processes.values():
        if member.machine != here or not member.has_ended:
            return True
    return False


def _is_live(run_folder: RunFolder) -> bool:
    """Return True if a process of a run may be alive."""
    newest = run_folder.newest() if run_folder.is_open else None
    return newest is not None and _has_process(newest)


def _remove_abandoned() -> None:
    """Remove the folders of runs of this machine all of whose processes were killed."""
    here = this_process().machine
    for run_folder in RunFolder.in_memory():
        with suppress(OSError, ValueError):  # it has just begun or ended, or is of another user
            newest = run_folder.newest()
            is_ours = newest is not None and newest.processes[newest.numbers[0]].machine == here
            if is_ours and not _is_live(run_folder):
                run_folder.close()
