"""The end of calls that cannot end, on NCCL: the host waits for none there, so that none could raise.

A thread marks the compute stream every second. If the stream does not reach a mark within nine tenths of the time limit
(then NCCL's own watchdog would end the process), or another process has failed, it writes the calls since the mark
before to stderr, and aborts the groups: kernels that wait for other processes end, and the next call raises.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from fshard.errors import CollectiveTimeoutError, FshardError, LostProcessError
from fshard.mesh.runtimes.watch import open_store

if TYPE_CHECKING:
    from fshard.mesh.runtimes.operations import Operations


class Deadline:
    """The thread that ends the calls of a process."""

    def __init__(self, operations: Operations, stream: Any) -> None:
        self._operations, self._stream = operations, stream
        self._limit = 0.9 * operations.timeout.total_seconds()
        self._store, self._stopped = open_store(), Event()
        Thread(target=self._run, name="fshard-deadline", daemon=True).start()

    def stop(self, failure: str | None = None) -> None:
        """End the thread; with a failure, the first of all processes, end the calls of the others."""
        self._stopped.set()
        if failure is not None:
            with suppress(dist.DistError):  # the process with the store has failed
                self._store.compare_set("failure", "", failure)

    def _run(self) -> None:
        since, marked, mark = 0.0, time.monotonic(), self._stream.record_event()
        error: FshardError | None = None
        while error is None and not self._stopped.wait(min(1.0, self._limit / 20)):
            if mark.query():
                since, marked, mark = marked, time.monotonic(), self._stream.record_event()
            elif time.monotonic() - marked > self._limit:
                error = CollectiveTimeoutError(f"A call did not end within {self._limit:g} s.")
            with suppress(dist.DistError):
                if self._store.check(["failure"]):
                    error = LostProcessError(self._store.get("failure").decode())
        if error is not None:
            self._end(error, since)

    def _end(self, error: FshardError, since: float) -> None:
        calls = [f"\n  {call}" for began, call in [*self._operations.recent] if began >= since]
        error.add_note(f"Calls that may not have ended:{''.join(calls)}")
        sys.stderr.write(f"fshard: {error} {error.__notes__[0]}\n")
        self._operations.error = error
        groups: Any = dist.distributed_c10d
        groups._abort_process_group()
