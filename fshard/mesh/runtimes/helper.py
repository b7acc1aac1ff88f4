"""A helper thread that advances started operations while their process does something else.

A sum in several rounds advances only while a thread waits for it. If only the waiter of its handle did so, two
processes that wait for their handles in different orders would deadlock. So when a process begins another operation,
whatever is in progress is given to the helper of its link, which runs it in the order of starting: that order is equal
on all processes. The memory of sent messages is freed by a helper too.
"""

from __future__ import annotations

from queue import SimpleQueue
from threading import Event, Thread
from typing import Protocol
from weakref import finalize

import torch


class Runnable(Protocol):
    """An operation that a helper can finish."""

    def run_to_end(self) -> None:
        """Run it; an error is stored for its waiter."""
        ...


Tasks = SimpleQueue[tuple[Runnable, Event, bool] | None]


class Helper:
    """Runs operations in order, in a thread that starts with the first and ends with the last reference to the helper."""

    def __init__(self) -> None:
        self._tasks: Tasks = SimpleQueue()
        self._started = False

    def submit(self, operation: Runnable) -> Event:
        """Queue an operation; return an event that is set when it has ended."""
        if not self._started:
            self._started = True
            Thread(target=_work, args=(self._tasks,), name="fshard-helper", daemon=True).start()
            finalize(self, self._tasks.put, None)
        ended = Event()
        self._tasks.put((operation, ended, torch.is_inference_mode_enabled()))
        return ended


def _work(tasks: Tasks) -> None:
    while (task := tasks.get()) is not None:
        operation, ended, inference = task
        with torch.inference_mode(inference):
            operation.run_to_end()
        del operation, task
        ended.set()
