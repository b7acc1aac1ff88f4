"""The end of calls that cannot end, on NCCL: no thread of the host waits there, so that none could raise.

A thread reads from the store whether another process has failed, and marks the compute stream again and again. If a mark
or a call before it is not reached within nine tenths of the time limit, when NCCL's own watchdog has not yet ended the
process, it writes the calls since the mark before to stderr. It aborts all groups: kernels that wait for other processes
end, and the next call raises.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fshard.errors import CollectiveTimeoutError, FshardError, LostProcessError
from fshard.mesh.runtimes.watch import open_store

if TYPE_CHECKING:
    from fshard.mesh.runtimes.operations import Operations


def abort_groups() -> None:
    """End all groups without waiting for their calls, as `dist.destroy_process_group` would."""
    groups: Any = dist.distributed_c10d
    groups._abort_process_group()


class Deadline:
    """The thread that ends the calls of this process."""

    def __init__(self, operations: Operations, device_type: str) -> None:
        self._operations, self._limit = operations, 0.9 * operations.timeout.total_seconds()
        self._stream = torch.cuda.current_stream() if device_type == "cuda" else None
        self._store, self._stopped = open_store(), Event()
        Thread(target=self._run, name="fshard-deadline", daemon=True).start()

    def stop(self, failure: str | None = None) -> None:
        """End the thread; with a failure of this process, the calls of all others, unless another has failed before."""
        self._stopped.set()
        if failure is not None:
            with suppress(dist.DistError):
                self._store.compare_set("failure", "", failure)

    def _run(self) -> None:
        since = marked = time.monotonic()
        mark = self._mark()
        error: FshardError | None = None
        while error is None and not self._stopped.wait(min(1.0, self._limit / 20)):
            with suppress(dist.DistError):  # the process with the store may end first
                if self._store.check(["failure"]):
                    error = LostProcessError(self._store.get("failure").decode())
            if self._is_reached(mark, marked):
                since, marked, mark = marked, time.monotonic(), self._mark()
            elif error is None and time.monotonic() - marked > self._limit:
                error = CollectiveTimeoutError(f"a call did not end within {self._limit:g} s")
        if error is not None:
            calls = [f"\n  {call}" for call in [*self._operations.recent] if call.began >= since]
            error.add_note(f"Calls that may not have ended:{''.join(calls)}")
            sys.stderr.write(f"fshard: {error}. {error.__notes__[0]}\n")
            self._operations.error = error
            abort_groups()

    def _mark(self) -> Any:
        return None if self._stream is None else self._stream.record_event()

    def _is_reached(self, mark: Any, marked: float) -> bool:
        """Return True if the stream has reached a mark, and calls that began before it have ended."""
        operations = [x for x in [*self._operations.in_progress] if x.call.began <= marked and not x.call.is_send]
        return (mark is None or mark.query()) and all(x.has_arrived() for x in operations)
