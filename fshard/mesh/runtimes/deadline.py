"""The end of calls that cannot end, on NCCL: the host waits for none there, so that none could raise."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from threading import Event
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from fshard.errors import CollectiveTimeoutError, LostProcessError

if TYPE_CHECKING:
    from fshard.mesh.runtimes.operations import Operations


def end_hangs(operations: Operations, stream: Any, store: Any, stopped: Event) -> None:
    """Mark the compute stream every second, until stopped.

    If it does not reach a mark within nine tenths of the time limit (then NCCL's watchdog would end the process), or
    another process has failed, write the calls since the mark before to stderr, and abort the groups: kernels that wait
    for other processes end, and the next call raises.
    """
    limit, error = 0.9 * operations.timeout.total_seconds(), None
    since, marked, mark = 0.0, time.monotonic(), stream.record_event()
    with suppress(dist.DistError):  # the process with the store has ended
        while error is None and not stopped.wait(min(1.0, limit / 20)):
            if store.check(["failure"]):
                error = LostProcessError(store.get("failure").decode())
            elif mark.query():
                since, marked, mark = marked, time.monotonic(), stream.record_event()
            elif time.monotonic() - marked > limit:
                error = CollectiveTimeoutError(f"A call did not end within {limit:g} s.")
    if error is not None:
        calls = [f"\n  {call}" for began, call in [*operations.recent] if began >= since]
        sys.stderr.write(f"fshard: {error} Calls that may not have ended:{''.join(calls)}\n")
        operations.error = error
        groups: Any = dist.distributed_c10d
        groups._abort_process_group()
