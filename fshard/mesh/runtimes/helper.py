"""A helper: a thread that carries on what was started, where nothing else does while its process waits for another thing.

A sum in several rounds goes on only when somebody waits for its first.  Were it the one who waits for the handle, then
two processes that wait for their handles in different orders would wait for each other.  So whatever is still under way
when a process begins something else is given to the helper of its link, which takes one after the other, in the order
in which they were started: that is the same on all processes.
"""

from __future__ import annotations

from queue import SimpleQueue
from threading import Event, Thread
from typing import Protocol

import torch


class Drivable(Protocol):
    """What a helper can carry on."""

    def drive(self) -> None:
        """Run to the end; errors are kept for whoever waits."""
        ...


class Helper:
    """Carries on what it is given, in order.  Its thread begins with the first."""

    def __init__(self) -> None:
        self._given: SimpleQueue[tuple[Drivable, Event, bool]] = SimpleQueue()
        self._thread: Thread | None = None

    def carry_on(self, running: Drivable) -> Event:
        """Carry this on; return what is set when it has ended."""
        if self._thread is None:
            self._thread = Thread(target=self._work, name="fshard-helper", daemon=True)
            self._thread.start()
        ended = Event()
        self._given.put((running, ended, torch.is_inference_mode_enabled()))
        return ended

    def _work(self) -> None:
        while True:
            running, ended, inference = self._given.get()
            with torch.inference_mode(inference):
                running.drive()
            del running
            ended.set()
