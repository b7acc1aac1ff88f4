"""A helper thread that advances started collectives while their process waits for something else.

A sum in several rounds advances only while a thread waits for it. If only the waiter of its handle did so, two
processes that wait for their handles in different orders would deadlock. So when a process begins another operation,
whatever is in progress is given to the helper of its link, which runs it in the order of starting: that order is equal
on all processes.

The helper also waits for sent messages of gloo, whose works do not report completion unless waited for, so that their
memory is freed. No work is waited for twice: that would block forever.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, Protocol
from weakref import finalize

import torch


class Work(Protocol):
    """The handle that torch.distributed returns for an asynchronous operation."""

    def wait(self, timeout: timedelta) -> Any:
        """Block until it is done."""
        ...

    def is_completed(self) -> bool:
        """Return True if it has finished."""
        ...


class Drivable(Protocol):
    """An operation of several rounds that a helper can finish."""

    def drive(self) -> None:
        """Run to the end; errors are stored for the waiter."""
        ...


Given = SimpleQueue[tuple[Drivable, Event, bool] | None]


class Helper:
    """Runs wires in order, in a thread that starts with the first and ends with the last reference to the helper."""

    def __init__(self) -> None:
        self._given: Given = SimpleQueue()
        self._begun = False

    def carry_on(self, running: Drivable) -> Event:
        """Queue a wire; return an event that is set when it has ended."""
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


MANY = 16
"""Messages given to the helper at a time."""
LONG = timedelta(days=30)
"""A message may wait for its receiver as long as it likes."""


class SentMessage:
    """A message that has been sent."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.carried: Event | None = None
        self.done = False

    def is_completed(self) -> bool:
        """Return True if it has certainly been sent."""
        return self.done

    def wait(self, timeout: timedelta) -> None:
        """Wait until it has left."""
        if self.carried is not None:
            self.carried.wait(timeout.total_seconds())
        else:
            self.work.wait(timeout)
            self.done = True


class Many:
    """Messages that a helper waits for."""

    def __init__(self, messages: list[SentMessage]) -> None:
        self.messages = messages

    def drive(self) -> None:
        """Wait for the messages in order."""
        for message in self.messages:
            with suppress(RuntimeError):  # of a receiver that is no more
                message.work.wait(LONG)
            message.done = True


class Departing:
    """The messages of a link."""

    def __init__(self) -> None:
        self._helper = Helper()
        self._latest: list[SentMessage] = []

    def add(self, work: Work) -> SentMessage:
        """Return a message that learns when it has left, once there are many."""
        message = SentMessage(work)
        self._latest.append(message)
        if len(self._latest) == MANY:
            given, self._latest = self._latest, []
            ended = self._helper.carry_on(Many(given))
            for one in given:
                one.carried = ended
        return message
