"""One process of `pool.Processes`: its start, its loop, its reports.

The parent has a `Worker`: the process, a pipe to it, and either the file of its stderr or the pipes through which its
output is displayed. The process takes tasks from the pipe, answers each with a `WorkerReport`, and ends when the pipe
is closed, or with its parent.
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
from collections.abc import Callable, Generator
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
from fshard.launching.shown import STREAMS, Shown
from fshard.launching.travel import by_value
from fshard.mesh.runtimes import process
from fshard.mesh.runtimes.transport import LOST

GRACE = 5.0
"""Seconds for the other processes to end after a failure."""


@dataclass(frozen=True)
class Worker:
    """One process, as the parent sees it.  Its stderr, or its stacks alone, go into a nameless file, read if it fails."""

    rank: int
    process: BaseProcess
    connection: Connection
    stderr: BinaryIO
    shown: tuple[Shown, ...] = ()

    def noise(self, start: int) -> str:
        """Return the output of the process since `start`."""
        return os.pread(self.stderr.fileno(), 1 << 30, start).decode(errors="replace").strip()


@dataclass(frozen=True)
class WorkerReport:
    """The outcome of `fn` in one process: a result or an error, and when."""

    rank: int
    ended: float
    result: Any = None
    error: BaseException | None = None
    trace: str = ""
    joined: bool = False

    @property
    def followed(self) -> bool:
        """True if it only lost the connection to a peer, as a consequence of another failure."""
        texts = isinstance(self.error, RuntimeError | MeshError) and any(
            word in str(self.error) for word in LOST
        )
        return texts or isinstance(self.error, LostProcessError)

    def summary(self) -> str:
        """Return its error and traceback; one line if it is a consequence of another one."""
        if self.followed:
            return f"{type(self.error).__name__}: {self.error}".splitlines()[0]
        return "\n".join([self.trace.rstrip(), *getattr(self.error, "__notes__", [])]).strip()


_OUR_FRAMES = f'  File "{__file__}"'
"""From here on outwards a stack is the same in every process."""


def read(worker: Worker, n: int) -> WorkerReport | None:
    """Return the report of a process, or of its death; None if there is none yet."""
    alive = worker.process.is_alive()  # first: a report sent before the process died is still read
    with contextlib.suppress(EOFError, OSError):
        if worker.connection.poll():
            return pickle.loads(worker.connection.recv_bytes())
        if alive:
            return None
    worker.process.join(GRACE)
    code = worker.process.exitcode or 0
    reason = (
        f"was killed by {signal.Signals(-code).name}"
        if code < 0
        else f"ended with exit code {code}"
    )
    error = RuntimeError(f"process {worker.rank} of {n} {reason}, before it had finished.")
    return WorkerReport(worker.rank, time.monotonic(), error=error)


def stacks_of(workers: list[Worker], starts: list[int]) -> str:
    """Request stacks of processes."""
    if not hasattr(faulthandler, "register"):
        return ""
    for worker in workers:
        if worker.process.pid is not None:
            with contextlib.suppress(
                ProcessLookupError
            ):  # it has ended meanwhile, which is reported elsewhere
                os.kill(worker.process.pid, signal.SIGUSR1)
    time.sleep(1)  # while they write
    stacks = [
        (worker.rank, worker.noise(starts[worker.rank]).partition(_OUR_FRAMES)[0])
        for worker in workers
    ]
    return "\n".join(
        f"process {rank} wrote to stderr, and is at:\n{stack.rstrip()}" for rank, stack in stacks
    )


# -- in the process ---------------------------------------------------------------------------------------------


def start(rank: int, variables: dict[str, str], *, fresh: bool, shown: bool) -> Worker:
    """Start process `rank` with more environment variables; for the options see `Processes`."""
    context = _context(fresh)
    parent_end, child_end = context.Pipe()
    stderr = cast("BinaryIO", tempfile.TemporaryFile())  # noqa: SIM115, the worker closes it
    pipes = [context.Pipe(duplex=False) for _ in (STREAMS if shown else ())]
    log = Connection(
        os.dup(stderr.fileno()), readable=False
    )  # a descriptor that multiprocessing passes on
    ends = [log, *(write for _, write in pipes)]
    server: Any = forkserver._forkserver  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    setup = (rank, child_end, {**os.environ, **variables}, ends, server._forkserver_address or "")
    child = context.Process(
        target=_serve_tasks, args=setup, daemon=not shown, name=f"process {rank}"
    )
    with _no_main() if shown else contextlib.nullcontext():
        child.start()
    for end in (child_end, *ends):
        end.close()
    shows = tuple(Shown(read, stream) for (read, _), stream in zip(pipes, STREAMS, strict=False))
    return Worker(rank, child, parent_end, stderr, shows)


@contextlib.contextmanager
def _no_main() -> Generator[None]:
    """Let multiprocessing find a `__main__` that has no file: it would run the script once more in every process."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _context(is_spawned: bool) -> ForkServerContext | SpawnContext:
    """Return how processes start: new interpreters, or forks of one that has imported torch and done nothing else.

    Only on Linux: a fork is not safe even then on macOS, and unknown on Windows.
    """
    if is_spawned or sys.platform != "linux":
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["__main__", __name__])
    forkserver.ensure_running()
    return context


def _serve_tasks(
    rank: int,
    connection: Connection,
    environment: dict[str, str],
    outputs: list[Connection],
    socket: str,
) -> None:
    """Be process `rank`: take tasks until the parent closes the connection."""
    os.environ.clear()  # a copy has those that its model was started with
    os.environ.update(environment)
    torch.default_generator.seed()  # and it draws as it did
    np.random.seed()
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"].split(",")[0]))
    _redirect(*outputs)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    threading.Thread(target=_die_with_parent, args=(socket,), daemon=True).start()
    connection.send_bytes(pickle.dumps(WorkerReport(rank, time.monotonic())))
    with contextlib.suppress(EOFError, OSError):
        while True:
            port, task, last = pickle.loads(connection.recv_bytes())
            if os.environ.get("MASTER_PORT") != str(port):  # another process has failed or left
                process.leave(waiting=False)
                os.environ["MASTER_PORT"] = str(port)
            well = _do(rank, task, connection, by_value if outputs[1:] else pickle.dumps, last)
            if not well:
                process.leave(waiting=False)
    process.leave()


def _do(
    rank: int, task: bytes, connection: Connection, packed: Callable[[Any], bytes], last: bool
) -> bool:
    """Run one task and report, after leaving if it is the last; return True on success."""
    is_done = False
    try:
        fn, args, kwargs = pickle.loads(task)
        result, joined = fn(*args, **kwargs), dist.is_initialized()
        if last:
            process.leave()
        report = packed(WorkerReport(rank, time.monotonic(), result, joined=joined))
        is_done = True
    except BaseException as error:
        tail = error.__traceback__.tb_next if error.__traceback__ is not None else None
        texts = traceback.TracebackException(type(error), error, tail)
        texts.__notes__ = []  # they travel with the error
        trace = "".join(texts.format())
        report = packed(
            WorkerReport(rank, time.monotonic(), error=_portable(error, packed), trace=trace)
        )
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # it may be closed
            stream.flush()
    connection.send_bytes(report)
    return is_done


def _portable(error: BaseException, packed: Callable[[Any], bytes]) -> BaseException:
    """Return the error without its traceback, or an equivalent RuntimeError if it cannot be pickled."""
    with contextlib.suppress(Exception):
        if type(pickle.loads(packed(error))) is type(error):
            return error
    instead = RuntimeError(f"{type(error).__name__}: {error}")
    instead.__notes__ = [*getattr(error, "__notes__", [])]
    return instead


def _redirect(stderr: Connection, *outputs: Connection) -> None:
    """Write to these pipes, or stderr to a file; stacks go to the file, whatever `fn` does to stderr."""
    file = os.dup(stderr.fileno())
    if not outputs:
        os.dup2(file, 2)
    for number, (pipe, stream) in enumerate(
        zip(outputs, STREAMS, strict=False), start=1
    ):  # from Python or not
        os.dup2(pipe.fileno(), number)
        pipe.close()
        options: dict[str, Any] = {
            "encoding": "utf-8",
            "errors": "backslashreplace",
            "closefd": False,
        }
        setattr(sys, stream, os.fdopen(number, "w", buffering=1, **options))
    faulthandler.enable(file)
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, file, all_threads=False)


def _die_with_parent(socket: str) -> None:
    """End with the parent, and remove the socket of its process that forks."""
    parent = mp.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        with contextlib.suppress(
            OSError
        ):  # there is none, or the parent or another process was faster
            os.unlink(socket)
            os.rmdir(os.path.dirname(socket))
        os._exit(1)
