"""One process of `pool.Processes`: its start, its loop, its reports.

The parent has a `Worker`: the process, a pipe to it, and either the file of its stderr or the pipes
through which its output is displayed. The process takes tasks from the pipe, answers each with a
`WorkerReport`, and ends when the pipe is closed, or with its parent.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing as mp
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any, BinaryIO, cast

import numpy as np
import torch
import torch.distributed as dist

from fshard.errors import LostProcessError, MeshError
from fshard.launching.ends import End, in_words
from fshard.launching.shown import STREAMS, Shown
from fshard.launching.travel import by_value
from fshard.mesh.runtimes import process
from fshard.mesh.runtimes.transport import LOST

GRACE = 5.0
"""Seconds for the other processes to end after a failure."""


@dataclass(frozen=True)
class Worker:
    """One process, as the parent sees it.

    Its stderr, or its stacks alone, are written to a file without a name, which is read if it
    fails.
    """

    rank: int
    process: BaseProcess
    connection: Connection
    stderr: BinaryIO
    shown: tuple[Shown, ...] = ()

    def output(self, start: int) -> str:
        """Return what the process has written to its file since `start`."""
        return os.pread(self.stderr.fileno(), 1 << 30, start).decode(errors="replace").strip()


@dataclass(frozen=True)
class WorkerReport(End):
    """The outcome of `fn` in one process: a result, or an error and a code that is not 0."""

    result: Any = None
    error: BaseException | None = None
    trace: str = ""
    joined: bool = False

    @property
    def followed(self) -> bool:
        """True if it only lost the connection to a peer, as a consequence of another failure."""
        if isinstance(self.error, LostProcessError):
            return True
        if not isinstance(self.error, RuntimeError | MeshError):
            return False
        text = str(self.error)
        return any(lost in text for lost in LOST)

    def summary(self) -> str:
        """Return its error and traceback; one line if it is a consequence of another one."""
        if self.followed:
            return f"{type(self.error).__name__}: {self.error}".splitlines()[0]
        return "\n".join([self.trace.rstrip(), *getattr(self.error, "__notes__", [])]).strip()


_OUR_FRAMES = f'  File "{__file__}"'
"""From here on outwards a stack is the same in every process."""


def read(worker: Worker, n: int) -> WorkerReport | None:
    """Return the report of a process, or of its death; None if there is none yet."""
    is_alive = worker.process.is_alive()  # first: a report before the process died is still read
    with contextlib.suppress(EOFError, OSError):
        if worker.connection.poll():
            return pickle.loads(worker.connection.recv_bytes())
        if is_alive:
            return None

    worker.process.join(GRACE)
    code = worker.process.exitcode or 0
    error = RuntimeError(f"process {worker.rank} of {n} {in_words(code)}, before it had finished.")
    # Even with exit code 0 it has not returned from `fn`.
    return WorkerReport(worker.rank, time.monotonic(), code or 1, error=error)


def stacks_of(workers: list[Worker], starts: list[int]) -> str:
    """Let processes write their stacks, and return these.

    `starts` has the length of each process's file before the call.
    """
    if not hasattr(faulthandler, "register"):
        return ""
    for worker in workers:
        if worker.process.pid is not None:
            # It may have ended meanwhile, which is reported elsewhere.
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.process.pid, signal.SIGUSR1)
    time.sleep(1)  # while they write

    texts: list[str] = []
    for worker in workers:
        stack, _, _ = worker.output(starts[worker.rank]).partition(_OUR_FRAMES)
        texts.append(f"process {worker.rank} wrote to stderr, and is at:\n{stack.rstrip()}")
    return "\n".join(texts)


# -- starting a process ----------------------------------------------------------------------------


def start(
    rank: int,
    variables: dict[str, str],
    *,
    fresh: bool,
    shown: bool,
    preload: Sequence[str] = (),
) -> Worker:
    """Start process `rank` with more environment variables; for the options see `Processes`."""
    context = _context(fresh, preload)
    parent_end, child_end = context.Pipe()
    stderr = cast("BinaryIO", tempfile.TemporaryFile())  # noqa: SIM115, the worker closes it
    # As a connection, since multiprocessing passes these on.
    child_ends = [Connection(os.dup(stderr.fileno()), readable=False)]
    shows: list[Shown] = []
    if shown:
        for stream in STREAMS:
            reader, writer = context.Pipe(duplex=False)
            shows.append(Shown(reader, stream))
            child_ends.append(writer)

    server: Any = forkserver._forkserver  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    address = server._forkserver_address or ""
    environment = {**os.environ, **variables}
    process = context.Process(
        target=_serve_tasks,
        args=(rank, child_end, environment, child_ends, address),
        daemon=not shown,  # a daemon may have no child processes
        name=f"process {rank}",
    )
    with _no_main() if shown else contextlib.nullcontext():
        process.start()
    # The parent's copies: with them open, no pipe would end with the process.
    for end in (child_end, *child_ends):
        end.close()
    return Worker(rank, process, parent_end, stderr, tuple(shows))


@contextlib.contextmanager
def _no_main() -> Generator[None]:
    """Let multiprocessing find a `__main__` without a file.

    It would run the script once more in every process.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _context(is_spawned: bool, preload: Sequence[str] = ()) -> ForkServerContext | SpawnContext:
    """Return how processes start: as new interpreters, or as forks of one that has imported torch.

    That one imports more modules if no process has been forked before.

    That one has done nothing else, since a fork of a process with threads may hang. Only on Linux:
    a fork is not safe even then on macOS, and unknown on Windows.
    """
    if is_spawned or sys.platform != "linux":
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["__main__", __name__, *preload])
    forkserver.ensure_running()
    return context


# -- in the process --------------------------------------------------------------------------------


def _serve_tasks(
    rank: int,
    connection: Connection,
    environment: dict[str, str],
    outputs: list[Connection],
    server_address: str,
) -> None:
    """Be process `rank`: take tasks until the parent closes the connection."""
    # A fork has the variables and random states of the process that forks.
    os.environ.clear()
    os.environ.update(environment)
    torch.default_generator.seed()
    np.random.seed()
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"].split(",")[0]))
    _redirect(*outputs)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    threading.Thread(target=_die_with_parent, args=(server_address,), daemon=True).start()

    is_shown = len(outputs) > 1
    pickled = by_value if is_shown else pickle.dumps
    connection.send_bytes(pickle.dumps(WorkerReport(rank, time.monotonic())))
    with contextlib.suppress(EOFError, OSError):
        while True:
            port, task, is_last = pickle.loads(connection.recv_bytes())
            if os.environ.get("MASTER_PORT") != str(port):  # another process has failed or left
                process.leave(waiting=False)
                os.environ["MASTER_PORT"] = str(port)
            if not _run_task(rank, task, connection, pickled, is_last=is_last):
                process.leave(waiting=False)
    process.leave()


def _run_task(
    rank: int,
    task: bytes,
    connection: Connection,
    pickled: Callable[[Any], bytes],
    *,
    is_last: bool,
) -> bool:
    """Run one task and report; return True on success. Leave the group before if it is the last."""
    is_done = False
    try:
        fn, args, kwargs = pickle.loads(task)
        result = fn(*args, **kwargs)
        joined = dist.is_initialized()
        if is_last or not joined:
            process.leave()  # raises if the groups of a call that hangs were aborted
        report = pickled(WorkerReport(rank, time.monotonic(), result=result, joined=joined))
        is_done = True
    except BaseException as error:
        report = pickled(_failed_report(rank, error, pickled))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # it may be closed
            stream.flush()
    connection.send_bytes(report)
    return is_done


def _failed_report(
    rank: int, error: BaseException, pickled: Callable[[Any], bytes]
) -> WorkerReport:
    """Return the report of an error, with its traceback below this module as text."""
    traceback_of_fn = error.__traceback__.tb_next if error.__traceback__ is not None else None
    texts = traceback.TracebackException(type(error), error, traceback_of_fn)
    texts.__notes__ = []  # the error itself has them
    trace = "".join(texts.format())
    portable = _portable(error, pickled)
    return WorkerReport(rank, time.monotonic(), 1, error=portable, trace=trace)


def _portable(error: BaseException, pickled: Callable[[Any], bytes]) -> BaseException:
    """Return the error, or an equivalent RuntimeError if it cannot be pickled."""
    with contextlib.suppress(Exception):
        if type(pickle.loads(pickled(error))) is type(error):
            return error
    replacement = RuntimeError(f"{type(error).__name__}: {error}")
    replacement.__notes__ = [*getattr(error, "__notes__", [])]
    return replacement


def _redirect(stderr: Connection, *pipes: Connection) -> None:
    """Write stdout and stderr to pipes, if any, else stderr to a file.

    Stacks are written to the file, whatever `fn` does to stderr.
    """
    file = os.dup(stderr.fileno())
    if not pipes:
        os.dup2(file, 2)
    for number, (pipe, stream) in enumerate(zip(pipes, STREAMS, strict=False), start=1):
        os.dup2(pipe.fileno(), number)  # for output that is not from Python, too
        pipe.close()
        text_stream = os.fdopen(
            number,
            "w",
            buffering=1,
            encoding="utf-8",
            errors="backslashreplace",
            closefd=False,
        )
        setattr(sys, stream, text_stream)
    faulthandler.enable(file)
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, file, all_threads=False)


def _die_with_parent(server_address: str) -> None:
    """End with the parent, and remove the socket of its process that forks."""
    parent = mp.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        # There may be none, or the parent or another process was faster.
        with contextlib.suppress(OSError):
            os.unlink(server_address)
            os.rmdir(os.path.dirname(server_address))
        os._exit(1)
