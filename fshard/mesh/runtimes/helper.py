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
from weakref import finalize

import torch


class Drivable(Protocol):
    """What a helper can carry on."""

    def drive(self) -> None:
        """Run to the end; errors are kept for whoever waits."""
        ...


Given = SimpleQueue[tuple[Drivable, Event, bool] | None]


class Helper:
    """Carries on what it is given, in order.  Its thread begins with the first, and ends when nobody has the helper."""

    def __init__(self) -> None:
        self._given: Given = SimpleQueue()
        self._begun = False

    def carry_on(self, running: Drivable) -> Event:
        """Carry this on; return what is set when it has ended."""
        if not self._begun:
            self._begun = True
            Thread(target=_work, args=(self._given,), name="fshard-helper", daemon=True).start()
            finalize(self, self._given.put, None)
        ended = Event()
        self._given.put((running, ended, torch.is_inference_mode_enabled()))
        return ended


def _work(given: Given) -> None:
    while (task := given.get()) is not None:
        running, ended, inference = task
        with torch.inference_mode(inference):
            running.drive()
        del running, task
        ended.set()
