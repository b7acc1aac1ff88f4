"""Running a function in real processes, as torchrun would: `run_processes`, and `Processes`, a pool that stays.

The parent keeps the store in which the processes find each other, as torchrun's agent does: no port is guessed, and
the store outlives every process.  A process that fails says so and leaves its group, which closes its connections;
peers that wait for it then fail too instead of hanging, and the pool can go on.  A process that says nothing more is
asked for its stack and ended.

    parent   store ---- run ---------------- reports in rank order, or the first error with all others as notes
                         |  task      ^ report
    process 0..n-1       +--> fn() ---+      (the group that fn joined is kept for the next run)
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing as mp
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from fshard.errors import LostProcessError
from fshard.mesh.runtimes import process
from fshard.mesh.runtimes.link import LOST

Result = TypeVar("Result")

GRACE = 2.0
"""Seconds that the other processes have to end by themselves once one has failed."""
START = 180.0
"""Seconds that processes have to start: importing torch takes its time on a busy machine."""


def run_processes(
    fn: Callable[..., Result],
    n: int,
    *args: Any,
    backend: str = "gloo",
    environment: Mapping[str, str] | None = None,
    timeout: float = 60.0,
    **kwargs: Any,
) -> list[Result]:
    """Run `fn(*args, **kwargs)` in `n` new processes, set up as torchrun would, and return what each returned.

    Args:
        fn: a function that can be pickled: one that stands at the top of a module.  `fs.make_mesh({"data": n})` in it
            is a process mesh.
        n: how many processes.
        args: handed to `fn` in every process.
        backend: "gloo" (on CPUs, whatever GPUs there are) or "nccl".
        environment: more variables for the processes, such as {"FSHARD_CHECK": "1"}.
        timeout: seconds that `fn` may take.
        kwargs: handed to `fn` in every process.

    Raises what the first process to fail raised, with its traceback and what became of the others as notes; a
    RuntimeError if a process died, or if the time is over.  No process outlives the call.

        def total():
            return fs.run(lambda: fs.psum(torch.ones(2), "data"), mesh=fs.make_mesh({"data": 2}))[0]

        assert [x.tolist() for x in run_processes(total, 2)] == [[2, 2], [2, 2]]
    """
    with Processes(n, backend=backend, environment=environment, timeout=timeout) as pool:
        return pool.run_last(fn, *args, **kwargs)


@dataclass(frozen=True)
class _Worker:
    """One process, as the parent sees it.  What it writes to stderr goes into a file, read only if it fails."""

    rank: int
    process: SpawnProcess
    connection: Connection
    stderr: Path

    def noise(self, start: int) -> str:
        """Return what it has written since `start`."""
        return self.stderr.read_bytes()[start:].decode(errors="replace").strip()


@dataclass(frozen=True)
class _Report:
    """What became of `fn` in one process: a result or an error, and when."""

    rank: int
    ended: float
    result: Any = None
    error: BaseException | None = None
    trace: str = ""
    joined: bool = False

    @property
    def followed(self) -> bool:
        """Whether it only lost the connection to a peer, which is what a failed one leaves behind."""
        told = isinstance(self.error, RuntimeError) and any(word in str(self.error) for word in LOST)
        return told or isinstance(self.error, LostProcessError)

    def account(self, first: _Report) -> str:
        """Say what it raised, in a line if that only follows from what another has raised or is the same."""
        if self.followed:
            return ":\n" + f"{type(self.error).__name__}: {self.error}".splitlines()[0]
        if self is not first and repr(self.error) == repr(first.error):
            return " in the same way"
        told = [self.trace.rstrip(), *(getattr(self.error, "__notes__", []) if self is not first else [])]
        return "".join(f":\n{text}" if place == 0 else f"\n{text}" for place, text in enumerate(told) if text)


_OUR_FRAMES = f'  File "{__file__}"'
"""From here on outwards a stack is the same in every process."""


class Processes:
    """Processes that stay, and run one function after the other: a call costs about a millisecond.

    The processes keep the groups that they have joined.  After a failure they leave them, and join anew, by a new
    store, in the next call; processes that hang or have died are replaced.

    Args:
        n: how many.
        backend: "gloo" or "nccl".
        environment: more variables for the processes.
        timeout: seconds that one call may take.

        with Processes(2) as pool:
            pool.run(function, 1)
            pool.run(function, 2)
    """

    def __init__(
        self, n: int, *, backend: str = "gloo", environment: Mapping[str, str] | None = None, timeout: float = 60.0
    ) -> None:
        if n < 1 or backend not in ("gloo", "nccl"):
            raise ValueError(
                f'Processes({n}, backend={backend!r}): at least one process, over "gloo" or "nccl", is needed.'
            )
        self.n, self.timeout = n, timeout
        self._hidden = {"CUDA_VISIBLE_DEVICES": ""} if backend == "gloo" else {}
        self._environment = dict(environment or {})
        self._workers: list[_Worker] = []
        self._stores: deque[TCPStore] = deque(maxlen=2)  # the one in use, and the one that processes still leave
        self._used = True
        self._idle = 0

    def __enter__(self) -> Processes:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, fn: Callable[..., Result], *args: Any, **kwargs: Any) -> list[Result]:
        """Run `fn(*args, **kwargs)` in every process; return the results in rank order, or raise as `run_processes`."""
        return self._run(fn, args, kwargs, last=False)

    def run_last(self, fn: Callable[..., Result], *args: Any, **kwargs: Any) -> list[Result]:
        """Run as `run` does, but let each process leave its groups as soon as it is done, as a script's end does.

        So a process that waits for one that has finished gets an error, not a time-out.
        """
        return self._run(fn, args, kwargs, last=True)

    def _run(
        self, fn: Callable[..., Result], args: tuple[Any, ...], kwargs: dict[str, Any], last: bool
    ) -> list[Result]:
        task = _pickled(fn, args, kwargs)
        self._start()
        port = self._meeting_place()
        starts = [worker.stderr.stat().st_size for worker in self._workers]
        self._idle = 0
        try:
            for worker in self._workers:
                with contextlib.suppress(OSError):  # it has died since the last call, which `_collect` will see
                    worker.connection.send_bytes(pickle.dumps((port, task, last)))
            reports = self._collect(time.monotonic() + self.timeout)
            silent = [worker for worker in self._workers if worker.rank not in reports]
            if silent or any(report.error is not None for report in reports.values()):
                raise self._failure(f"{_name(fn)} within {self.timeout:g} s", reports, silent, starts)
            self._used = last or not all(report.joined for report in reports.values())
        except BaseException:
            self._used = True
            if not self._intact():
                self._kill()
            raise
        return [reports[rank].result for rank in range(self.n)]

    def close(self) -> None:
        """Let the processes leave their groups and end."""
        for worker in self._workers:
            worker.connection.close()
        until = time.monotonic() + GRACE + 3
        for worker in self._workers:
            worker.process.join(max(0.0, until - time.monotonic()))
        self._kill()
        self._stores.clear()
        self._used = True

    # -- starting and ending --------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._workers:
            return
        try:
            for rank in range(self.n):
                self._workers.append(_spawn(rank, self._variables(rank)))
            ready = self._collect(time.monotonic() + START)
            missing = [worker for worker in self._workers if worker.rank not in ready or ready[worker.rank].error]
            if missing:
                raise self._failure(f"their start within {START:g} s", ready, missing, [0] * self.n)
        except BaseException:
            self._kill()
            raise

    def _meeting_place(self) -> int:
        """Return the port of the store, where a group can be made once: in a used store, old addresses lie about."""
        if self._used:
            self._stores.append(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        return self._stores[-1].port

    def _variables(self, rank: int) -> dict[str, str]:
        return {
            **self._hidden,
            **self._environment,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.n),
            "LOCAL_WORLD_SIZE": str(self.n),
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there already: process 0 is not to open another
        }

    def _intact(self) -> bool:
        """Return whether every process waits for its next task."""
        return self._idle == self.n and all(worker.process.is_alive() for worker in self._workers)

    def _kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.process.close()
            worker.connection.close()
            worker.stderr.unlink(missing_ok=True)
        self._workers = []

    # -- reports ----------------------------------------------------------------------------------------------------

    def _collect(self, deadline: float) -> dict[int, _Report]:
        """Wait for a report of every process; once one has failed, for the others' only a little longer."""
        pending = {worker.rank: worker for worker in self._workers}
        reports: dict[int, _Report] = {}
        self._idle = 0
        while pending and (left := deadline - time.monotonic()) > 0:
            workers = list(pending.values())
            wait([*(worker.connection for worker in workers), *(worker.process.sentinel for worker in workers)], left)
            for worker in workers:
                report = _read(worker, self.n)
                if report is not None:
                    del pending[worker.rank]
                    reports[worker.rank] = report
                    self._idle += worker.process.is_alive()
                    if report.error is not None:
                        deadline = min(deadline, time.monotonic() + GRACE)
        return reports

    def _failure(
        self, what: str, reports: dict[int, _Report], silent: list[_Worker], starts: list[int]
    ) -> BaseException:
        """Return the error to raise, with all that is known of the others as notes."""
        stacks = _stacks(silent, starts)
        unfinished = _ranks([worker.rank for worker in silent])
        failed = [report for report in reports.values() if report.error is not None]
        failed.sort(key=lambda report: (report.followed, report.ended))  # causes before consequences
        if not failed:
            late = RuntimeError(f"{unfinished} of {self.n} did not finish {what}.")
            late.add_note(stacks)
            return late
        error = failed[0].error or AssertionError("unreachable")
        rank = failed[0].rank
        error.add_note(f"in process {rank} of {self.n}{failed[0].account(failed[0])}")
        if noise := self._workers[rank].noise(starts[rank]):
            error.add_note(f"process {rank} wrote to stderr:\n{noise}")
        for report in failed[1:]:
            error.add_note(f"then process {report.rank} failed{report.account(failed[0])}")
        if silent:
            error.add_note(f"{unfinished} had not finished {GRACE:g} s later, and did not live on.\n{stacks}")
        return error


def _ranks(ranks: list[int]) -> str:
    return "process" + "es" * (len(ranks) > 1) + " " + ", ".join(map(str, ranks))


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", repr(fn))


def _pickled(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps((fn, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        error.add_note(
            f"{_name(fn)} and its arguments go to other processes: the function has to stand at the top of a module."
        )
        raise


def _read(worker: _Worker, n: int) -> _Report | None:
    """Return the report of a process, or of its death; None if there is none yet."""
    alive = worker.process.is_alive()  # asked first: what it sent before it died is still read
    with contextlib.suppress(EOFError, OSError):
        if worker.connection.poll():
            return pickle.loads(worker.connection.recv_bytes())
        if alive:
            return None
    worker.process.join(GRACE)
    code = worker.process.exitcode
    how = (
        f"was killed by {signal.Signals(-code).name}"
        if code is not None and code < 0
        else f"ended with exit code {code}"
    )
    return _Report(
        worker.rank,
        time.monotonic(),
        error=RuntimeError(f"process {worker.rank} of {n} {how}, before it had finished."),
    )


def _stacks(workers: list[_Worker], starts: list[int]) -> str:
    """Ask processes where they are."""
    if not hasattr(faulthandler, "register"):
        return ""
    before = [worker.stderr.stat().st_size for worker in workers]
    for worker in workers:
        if worker.process.pid is not None:
            os.kill(worker.process.pid, signal.SIGUSR1)
    until = time.monotonic() + 1
    while time.monotonic() < until and any(
        worker.stderr.stat().st_size == size for worker, size in zip(workers, before, strict=True)
    ):
        time.sleep(0.02)
    time.sleep(0.05)  # for the rest of what has begun to be written
    stacks = [(worker.rank, worker.noise(starts[worker.rank]).partition(_OUR_FRAMES)[0]) for worker in workers]
    return "\n".join(f"process {rank} wrote to stderr, and is at:\n{stack.rstrip()}" for rank, stack in stacks)


# -- in the process ---------------------------------------------------------------------------------------------


def _spawn(rank: int, variables: dict[str, str]) -> _Worker:
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    handle, stderr = tempfile.mkstemp(prefix="fshard-", suffix=".stderr")
    os.close(handle)
    child = context.Process(target=_live, args=(rank, theirs, variables, stderr), daemon=True, name=f"process {rank}")
    child.start()
    theirs.close()
    return _Worker(rank, child, ours, Path(stderr))


def _live(rank: int, connection: Connection, variables: dict[str, str], stderr: str) -> None:
    """Be process `rank`: take tasks until the parent closes the connection."""
    os.environ.update(variables)
    torch.set_num_threads(1)
    _redirect(stderr)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    threading.Thread(target=_die_with_parent, daemon=True).start()
    connection.send_bytes(pickle.dumps(_Report(rank, time.monotonic())))
    with contextlib.suppress(EOFError, OSError):
        while True:
            port, task, last = pickle.loads(connection.recv_bytes())
            if os.environ.get("MASTER_PORT") != str(port):  # somebody has failed or left
                _leave(waiting=False)
                os.environ["MASTER_PORT"] = str(port)
            well = _do(rank, task, connection)
            if last or not well:
                _leave(waiting=well)
    process.leave()


def _leave(*, waiting: bool) -> None:
    """Leave all groups and close their connections, so that peers that wait for us fail, too."""
    process.leave(waiting=waiting)
    gc.collect()  # a group is closed with the last reference to it


def _do(rank: int, task: bytes, connection: Connection) -> bool:
    """Do one task and report; return whether it went well."""
    try:
        fn, args, kwargs = pickle.loads(task)
        result = fn(*args, **kwargs)
        report = pickle.dumps(_Report(rank, time.monotonic(), result, joined=dist.is_initialized()))
    except BaseException as error:
        tail = error.__traceback__.tb_next if error.__traceback__ is not None else None
        told = traceback.TracebackException(type(error), error, tail)
        told.__notes__ = []  # they travel with the error
        trace = "".join(told.format())
        connection.send_bytes(pickle.dumps(_Report(rank, time.monotonic(), error=_portable(error), trace=trace)))
        return False
    connection.send_bytes(report)
    return True


def _portable(error: BaseException) -> BaseException:
    """Return the error without its traceback, or a RuntimeError that says the same if it cannot travel."""
    with contextlib.suppress(Exception):
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    instead = RuntimeError(f"{type(error).__name__}: {error}")
    instead.__notes__ = [*getattr(error, "__notes__", [])]
    return instead


def _redirect(stderr: str) -> None:
    """Write stderr to a file, and stacks too, whatever `fn` does to stderr."""
    file = os.open(stderr, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 2)
    faulthandler.enable(file)
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, file, all_threads=False)


def _die_with_parent() -> None:
    parent = mp.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
