"""Run functions in several processes, set up as by torchrun: `Processes`, a persistent pool.

The parent serves the store in which the processes find each other, as torchrun's agent does: no
port is guessed, and the store outlives every process. A process that fails reports it and leaves
its group, which closes its connections; peers that wait for it then fail too instead of hanging,
and the pool can be used again. A process that reports nothing writes its stack and is ended.

    parent   store ---- run ---------------- reports in rank order, or the first error, with notes
                         |  task      ^ report
    process 0..n-1       +--> fn() ---+      (the group that fn joined is kept for the next run)
"""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import inf
from multiprocessing.connection import wait
from typing import Any, TypeVar

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from fshard.launching.ends import first_failure, write_loss
from fshard.launching.meeting import serve_store, variables_of, variables_of_all
from fshard.launching.shown import Shown
from fshard.launching.travel import by_value
from fshard.launching.worker import GRACE, Worker, WorkerReport, read, stacks_of, start

Result = TypeVar("Result")

START = 180.0
"""Seconds that processes may take to start: on a busy machine importing torch takes long."""


class Processes:
    """Processes that persist, and run one function after another: a call costs about a millisecond.

    The processes keep the groups that they have joined. After a failure they leave them, and join
    again, by a new store, in the next call. Processes that hang or have died are replaced.

    Args:
        n: number of processes.
        backend: "gloo" (on CPUs, whatever GPUs there are) or "nccl".
        environment: more variables for the processes.
        timeout: seconds that one call may take, or None.
        fresh: start each process as a new interpreter, not as a fork of one with torch imported.
        shown: for `fs.launch`: display the output of the processes immediately, let them have child
            processes and not import the running script; with cloudpickle they take functions that
            cannot be imported. Otherwise only the output of a process that fails is reported.
        elastic: let the other processes go on when one dies or fails, and return the results of
            those that returned, in rank order. Each loss is one line on stderr. The call raises if
            none has returned, and in the other case of Note [Runs that lose processes].
        preload: modules to import once, before the processes are forked from one that has imported
            them. It has an effect if no other process has been forked so far.

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
        elastic: bool = False,
        preload: Sequence[str] = (),
    ) -> None:
        if n < 1 or backend not in ("gloo", "nccl"):
            raise ValueError(
                f'Processes({n}, backend={backend!r}): at least one process, over "gloo" or '
                '"nccl", is needed.'
            )
        self.n = n
        self.timeout = inf if timeout is None else timeout
        self._is_spawned = fresh
        self._is_shown = shown
        self._is_elastic = elastic
        self._preload = preload
        self._environment = variables_of_all(n, backend, environment or {})
        self._workers: list[Worker] = []
        # The store in use, and the one that processes still leave.
        self._stores: deque[TCPStore] = deque(maxlen=2)
        self._is_store_used = True  # a used store has old addresses, so the next call needs another
        self._idle = 0  # the processes that wait for their next task

    def __enter__(self) -> Processes:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, fn: Callable[..., Result], *args: Any, **kwargs: Any) -> list[Result]:
        """Run `fn(*args, **kwargs)` in every process; return the results in rank order.

        The exception of the first process to fail is raised, with its traceback and the state of
        the others as notes; a RuntimeError if a process died, or after the timeout.
        """
        return self._run(fn, args, kwargs, is_last=False)

    def run_last(self, fn: Callable[..., Result], *args: Any, **kwargs: Any) -> list[Result]:
        """Run as `run` does, but let each process leave its groups as soon as it is done.

        So a process that waits for one that has finished gets an error, not a time-out, as at the
        end of a script.
        """
        return self._run(fn, args, kwargs, is_last=True)

    def _run(
        self,
        fn: Callable[..., Result],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_last: bool,
    ) -> list[Result]:
        task = self._pickled(fn, args, kwargs)
        self._start()
        port = self._meeting_port()
        # Errors quote what a process has written since here.
        starts = [os.fstat(worker.stderr.fileno()).st_size for worker in self._workers]
        self._idle = 0
        try:
            for worker in self._workers:
                # It may have died since the last call, which `_collect` will see.
                with contextlib.suppress(OSError):
                    worker.connection.send_bytes(pickle.dumps((port, task, is_last)))
            reports = self._collect(time.monotonic() + self.timeout, keeps_on=self._is_elastic)

            silent = [worker for worker in self._workers if worker.rank not in reports]
            failed = [report for report in reports.values() if report.error is not None]
            blamed = self._blamed(failed, reports, silent)
            if silent or blamed:
                limit = f"{_name(fn)} within {self.timeout:g} s"
                raise self._failure(limit, blamed, silent, starts)
            for show in self._open_shows():
                show.drain()
            have_all_joined = all(report.joined for report in reports.values())
            self._is_store_used = is_last or not have_all_joined
            if failed:
                self.close()  # the next call needs as many as this one
        except BaseException:
            self._is_store_used = True
            are_alive = all(worker.process.is_alive() for worker in self._workers)
            is_each_idle = self._idle == self.n
            if self._is_elastic or not (is_each_idle and are_alive):
                self._kill()
            raise
        in_order = [reports[rank] for rank in range(self.n)]
        return [report.result for report in in_order if report.error is None]

    def _pickled(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bytes:
        dumps = by_value if self._is_shown else pickle.dumps
        try:
            return dumps((fn, args, kwargs))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            note = f"{_name(fn)} and its arguments go to other processes"
            if not self._is_shown:
                note += ": the function must be at the top level of a module"
            error.add_note(f"{note}.")
            raise

    def close(self) -> None:
        """Let the processes leave their groups and end."""
        for worker in self._workers:
            worker.connection.close()
        deadline = time.monotonic() + GRACE + 3
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
        self._kill()
        self._stores.clear()
        self._is_store_used = True

    # -- starting and ending -----------------------------------------------------------------------

    def _start(self) -> None:
        """Start the processes, unless they are running."""
        if self._workers:
            return
        try:
            for rank in range(self.n):
                variables = {**self._environment, **variables_of(rank)}
                worker = start(
                    rank,
                    variables,
                    fresh=self._is_spawned,
                    shown=self._is_shown,
                    preload=self._preload,
                )
                self._workers.append(worker)

            reports = self._collect(time.monotonic() + START)
            failed: list[Worker] = []
            for worker in self._workers:
                report = reports.get(worker.rank)
                if report is None or report.error is not None:
                    failed.append(worker)
            if failed:
                limit = f"their start within {START:g} s"
                errors = [report for report in reports.values() if report.error is not None]
                raise self._failure(limit, errors, failed, [0] * self.n)
        except BaseException:
            self._kill()
            raise

    def _meeting_port(self) -> int:
        """Return the port of the store in which the processes meet; it serves this machine only."""
        if self._is_store_used:
            self._stores.append(serve_store())
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

    # -- reports -----------------------------------------------------------------------------------

    def _open_shows(self) -> list[Shown]:
        """Return the streams of all processes that have not ended."""
        shows: list[Shown] = []
        for worker in self._workers:
            shows += [show for show in worker.shown if show.open]
        return shows

    def _collect(self, deadline: float, *, keeps_on: bool = False) -> dict[int, WorkerReport]:
        """Wait for a report of every process, and display their output meanwhile.

        After a failure, wait for the others only a little longer, or as long as before with
        `keeps_on`.
        """
        pending = {worker.rank: worker for worker in self._workers}
        reports: dict[int, WorkerReport] = {}
        self._idle = 0
        while pending and time.monotonic() < deadline:
            workers = list(pending.values())
            self._wait_for_any(workers, deadline)
            for worker in workers:
                report = read(worker, self.n)
                if report is None:
                    continue
                del pending[worker.rank]
                reports[worker.rank] = report
                if worker.process.is_alive():
                    self._idle += 1
                if report.error is None:
                    continue
                if keeps_on:
                    self._lose(worker, report, len(pending))
                else:
                    deadline = min(deadline, time.monotonic() + GRACE)
        return reports

    def _wait_for_any(self, workers: list[Worker], deadline: float) -> None:
        """Wait for a report, the end of a process, or output; display the output."""
        shows = self._open_shows()
        ends: list[Any] = [show.pipe for show in shows]
        for worker in workers:
            ends += [worker.connection, worker.process.sentinel]
        seconds = None if deadline == inf else max(0.0, deadline - time.monotonic())
        ready = wait(ends, seconds)
        for show in shows:
            if show.pipe in ready:
                show.pump()

    def _lose(self, worker: Worker, report: WorkerReport, running: int) -> None:
        """Go on without a process: write that, and let it end if it has not."""
        loss = str(report.error).removesuffix(".")  # how it died, unless it has a traceback
        if report.trace:
            failed = f"process {worker.rank} of {self.n} failed with this error"
            loss = f"{report.summary()}\n{failed}"
        write_loss(loss, running)
        worker.connection.close()

    def _blamed(
        self,
        failed: list[WorkerReport],
        reports: dict[int, WorkerReport],
        silent: list[Worker],
    ) -> list[WorkerReport]:
        """Return the reports of errors that make the call fail."""
        if not self._is_elastic:
            return failed
        if silent:
            return []  # the call fails since these have not finished, not by a loss
        first = first_failure([*reports.values()])
        if first is None:
            return []
        return [report for report in failed if report.ended >= first.ended]

    def _failure(
        self,
        limit: str,
        failed: list[WorkerReport],
        silent: list[Worker],
        starts: list[int],
    ) -> BaseException:
        """Return the error to raise, with the state of the others as notes.

        Args:
            limit: the task and the time that it had, in words.
            failed: reports of errors.
            silent: the processes that have not reported.
            starts: the length of what each process had written before the call.
        """
        stacks = stacks_of(silent, starts)
        plural = "es" if len(silent) > 1 else ""
        ranks = ", ".join([str(worker.rank) for worker in silent])
        unfinished = f"process{plural} {ranks}"

        failed = sorted(failed, key=_causes_first)
        if not failed:
            late = RuntimeError(f"{unfinished} of {self.n} did not finish {limit}.")
            late.add_note(stacks)
            return late

        first = failed[0]
        error = first.error
        assert error is not None
        if first.trace:
            error.add_note(f"in process {first.rank} of {self.n}:\n{first.trace.rstrip()}")
        output = self._workers[first.rank].output(starts[first.rank])
        if output:
            error.add_note(f"process {first.rank} wrote to stderr:\n{output}")
        for report in failed[1:]:
            error.add_note(f"then process {report.rank} failed:\n{report.summary()}")
        if silent:
            error.add_note(
                f"{unfinished} had not finished {GRACE:g} s later, and was ended.\n{stacks}"
            )
        return error


def _causes_first(report: WorkerReport) -> tuple[bool, float]:
    """Return the key by which causes are sorted before their consequences."""
    return report.followed, report.ended


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", repr(fn))
