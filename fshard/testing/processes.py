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
import pickle
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from fshard.testing.worker import GRACE, Report, Worker, read, stacks_of, start

Result = TypeVar("Result")

START = 180.0
"""Seconds that processes have to start: importing torch takes its time on a busy machine."""


def run_processes(
    fn: Callable[..., Result],
    n: int,
    *args: Any,
    backend: str = "gloo",
    environment: Mapping[str, str] | None = None,
    timeout: float = 60.0,
    fresh: bool = False,
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
        fresh: start each process as a new interpreter, with a hash seed of its own, as torchrun does. It takes
            seconds; otherwise, on Linux, they are forked from one process that has imported torch.
        kwargs: handed to `fn` in every process.

    Raises what the first process to fail raised, with its traceback and what became of the others as notes; a
    RuntimeError if a process died, or if the time is over.  No process outlives the call.

        def total():
            return fs.run(lambda: fs.psum(torch.ones(2), "data"), mesh=fs.make_mesh({"data": 2}))[0]

        assert [x.tolist() for x in run_processes(total, 2)] == [[2, 2], [2, 2]]
    """
    _refuse_typed(fn)
    with Processes(n, backend=backend, environment=environment, timeout=timeout, fresh=fresh) as pool:
        return pool.run_last(fn, *args, **kwargs)


class Processes:
    """Processes that stay, and run one function after the other: a call costs about a millisecond.

    The processes keep the groups that they have joined.  After a failure they leave them, and join anew, by a new
    store, in the next call; processes that hang or have died are replaced.

    Args:
        n: how many.
        backend: "gloo" or "nccl".
        environment: more variables for the processes.
        timeout: seconds that one call may take.
        fresh: start each process as a new interpreter: see `run_processes`.

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
        timeout: float = 60.0,
        fresh: bool = False,
    ) -> None:
        if n < 1 or backend not in ("gloo", "nccl"):
            raise ValueError(
                f'Processes({n}, backend={backend!r}): at least one process, over "gloo" or "nccl", is needed.'
            )
        self.n, self.timeout, self._fresh = n, timeout, fresh
        self._hidden = {"CUDA_VISIBLE_DEVICES": ""} if backend == "gloo" else {}
        self._environment = dict(environment or {})
        self._workers: list[Worker] = []
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
                self._workers.append(start(rank, self._variables(rank), fresh=self._fresh))
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

    def _collect(self, deadline: float) -> dict[int, Report]:
        """Wait for a report of every process; once one has failed, for the others' only a little longer."""
        pending = {worker.rank: worker for worker in self._workers}
        reports: dict[int, Report] = {}
        self._idle = 0
        while pending and (left := deadline - time.monotonic()) > 0:
            workers = list(pending.values())
            wait([*(worker.connection for worker in workers), *(worker.process.sentinel for worker in workers)], left)
            for worker in workers:
                report = read(worker, self.n)
                if report is not None:
                    del pending[worker.rank]
                    reports[worker.rank] = report
                    self._idle += worker.process.is_alive()
                    if report.error is not None:
                        deadline = min(deadline, time.monotonic() + GRACE)
        return reports

    def _failure(self, what: str, reports: dict[int, Report], silent: list[Worker], starts: list[int]) -> BaseException:
        """Return the error to raise, with all that is known of the others as notes."""
        stacks = stacks_of(silent, starts)
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


def _refuse_typed(fn: Callable[..., Any]) -> None:
    """Raise if a function stands in no file, where other processes would have to look for it."""
    main = getattr(sys.modules["__main__"], "__file__", "what was typed in")
    if getattr(fn, "__module__", None) == "__main__" and not Path(main).is_file():
        raise pickle.PicklingError(
            f"{_name(fn)} stands in {main}, where other processes do not find it. Write it into a file."
        )
