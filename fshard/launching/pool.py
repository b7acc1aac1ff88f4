"""Run functions in several processes, set up as by torchrun: `Processes`, a persistent pool.

The parent serves the store in which the processes find each other, as torchrun's agent does: no port is guessed, and
the store outlives every process. A process that fails reports it and leaves its group, which closes its connections;
peers that wait for it then fail too instead of hanging, and the pool can be used again. A process that reports nothing
reports its stack and is ended.

    parent   store ---- run ---------------- reports in rank order, or the first error with all others as notes
                         |  task      ^ report
    process 0..n-1       +--> fn() ---+      (the group that fn joined is kept for the next run)
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from math import inf
from multiprocessing.connection import wait
from typing import Any, TypeVar

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from fshard.launching.shown import Shown
from fshard.launching.travel import by_value
from fshard.launching.worker import GRACE, Worker, WorkerReport, read, stacks_of, start

Result = TypeVar("Result")

START = 180.0
"""Seconds that processes may take to start: importing torch takes its time on a busy machine."""


class Processes:
    """Processes that persist, and run one function after another: a call costs about a millisecond.

    The processes keep the groups that they have joined. After a failure they leave them, and join again, by a new
    store, in the next call; processes that hang or have died are replaced.

    Args:
        n: number of processes.
        backend: "gloo" (on CPUs, whatever GPUs there are) or "nccl".
        environment: more variables for the processes.
        timeout: seconds that one call may take, or None.
        fresh: start each process as a new interpreter, not as a fork of one that has imported torch.
        shown: for `fs.launch`: display the output of the processes immediately, let them have child processes and not
            import the running script; with cloudpickle they take functions that cannot be imported. Otherwise only
            the output of a process that fails is reported.

        with Processes(2) as pool:
            pool.run(function, 1)
            pool.run(function, 2)
    """

    def __init__(
        self,
        n: int,
        *,
        backend: str = "gloo",
        environment: Mapping[str, str] | None = None,
        timeout: float | None = 60.0,
        fresh: bool = False,
        shown: bool = False,
    ) -> None:
        if n < 1 or backend not in ("gloo", "nccl"):
            raise ValueError(
                f'Processes({n}, backend={backend!r}): at least one process, over "gloo" or "nccl", is needed.'
            )
        self.n, self.timeout = n, inf if timeout is None else timeout
        self._is_spawned, self._shown = fresh, shown
        self._environment = {
            "OMP_NUM_THREADS": "1",
            **({"CUDA_VISIBLE_DEVICES": ""} if backend == "gloo" else {}),
            **(environment or {}),
            "WORLD_SIZE": str(n),
            "LOCAL_WORLD_SIZE": str(n),
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there already: process 0 is not to open another
        }
        self._workers: list[Worker] = []
        self._stores: deque[TCPStore] = deque(
            maxlen=2
        )  # the one in use, and the one that processes still leave
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
        try:
            task = (by_value if self._shown else pickle.dumps)((fn, args, kwargs))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            where = "" if self._shown else ": the function must be at the top level of a module"
            error.add_note(f"{_name(fn)} and its arguments go to other processes{where}.")
            raise
        self._start()
        port = self._meeting_place()
        starts = [os.fstat(worker.stderr.fileno()).st_size for worker in self._workers]
        self._idle = 0
        try:
            for worker in self._workers:
                with contextlib.suppress(
                    OSError
                ):  # it has died since the last call, which `_collect` will see
                    worker.connection.send_bytes(pickle.dumps((port, task, last)))
            reports = self._collect(time.monotonic() + self.timeout)
            silent = [worker for worker in self._workers if worker.rank not in reports]
            if silent or any(report.error is not None for report in reports.values()):
                raise self._failure(
                    f"{_name(fn)} within {self.timeout:g} s", reports, silent, starts
                )
            for show in self._shows():
                show.drain()
            self._used = last or not all(report.joined for report in reports.values())
        except BaseException:
            self._used = True
            if self._idle != self.n or not all(
                worker.process.is_alive() for worker in self._workers
            ):
                self._kill()  # unless every process waits for its next task
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
                variables = {**self._environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                self._workers.append(
                    start(rank, variables, fresh=self._is_spawned, shown=self._shown)
                )
            ready = self._collect(time.monotonic() + START)
            missing = [
                worker
                for worker in self._workers
                if worker.rank not in ready or ready[worker.rank].error
            ]
            if missing:
                raise self._failure(f"their start within {START:g} s", ready, missing, [0] * self.n)
        except BaseException:
            self._kill()
            raise

    def _shows(self) -> list[Shown]:
        return [show for worker in self._workers for show in worker.shown if show.open]

    def _meeting_place(self) -> int:
        """Return the port of a new store, for this machine only: a used one contains old addresses."""
        if self._used:
            server = socket.create_server(("127.0.0.1", 0))
            host, port = server.getsockname()
            store = TCPStore(
                host, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
            )
            self._stores.append(store)
        return self._stores[-1].port

    def _kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.process.close()
            worker.connection.close()
            for show in worker.shown:
                show.close()
            worker.stderr.close()
        self._workers = []

    # -- reports ----------------------------------------------------------------------------------------------------

    def _collect(self, deadline: float) -> dict[int, WorkerReport]:
        """Wait for a report of every process; after a failure, for the others' only a little longer."""
        pending = {worker.rank: worker for worker in self._workers}
        reports: dict[int, WorkerReport] = {}
        self._idle = 0
        while pending and (seconds := deadline - time.monotonic()) > 0:
            workers, shows = list(pending.values()), self._shows()
            ends = [
                end for worker in workers for end in (worker.connection, worker.process.sentinel)
            ]
            ready = wait(
                [*ends, *(show.pipe for show in shows)], None if seconds == inf else seconds
            )
            for show in shows:
                if show.pipe in ready:
                    show.pump()
            for worker in workers:
                report = read(worker, self.n)
                if report is not None:
                    del pending[worker.rank]
                    reports[worker.rank] = report
                    self._idle += worker.process.is_alive()
                    if report.error is not None:
                        deadline = min(deadline, time.monotonic() + GRACE)
        return reports

    def _failure(
        self,
        failure: str,
        reports: dict[int, WorkerReport],
        silent: list[Worker],
        starts: list[int],
    ) -> BaseException:
        """Return the error to raise, with the state of the others as notes."""
        stacks = stacks_of(silent, starts)
        unfinished = (
            f"process{'es' * (len(silent) > 1)} {', '.join(str(worker.rank) for worker in silent)}"
        )
        failed = [report for report in reports.values() if report.error is not None]
        failed.sort(
            key=lambda report: (report.followed, report.ended)
        )  # causes before consequences
        if not failed:
            late = RuntimeError(f"{unfinished} of {self.n} did not finish {failure}.")
            late.add_note(stacks)
            return late
        first, error = failed[0], failed[0].error or AssertionError("unreachable")
        if first.trace:
            error.add_note(f"in process {first.rank} of {self.n}:\n{first.trace.rstrip()}")
        if noise := self._workers[first.rank].noise(starts[first.rank]):
            error.add_note(f"process {first.rank} wrote to stderr:\n{noise}")
        for report in failed[1:]:
            error.add_note(f"then process {report.rank} failed:\n{report.summary()}")
        if silent:
            error.add_note(
                f"{unfinished} had not finished {GRACE:g} s later, and was ended.\n{stacks}"
            )
        return error


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", repr(fn))
