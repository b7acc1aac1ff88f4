"""Messages that are on their way over a backend whose works do not know when they are done, unless somebody waits: gloo.

A helper waits for them, for many at a time, so that their memory can go.  No work is waited for twice: that would be for ever.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from threading import Event
from typing import TYPE_CHECKING

from fshard.mesh.runtimes.helper import Helper

if TYPE_CHECKING:
    from fshard.mesh.runtimes.link import Work

MANY = 16
"""How many messages are given to the helper at a time."""
LONG = timedelta(days=30)
"""A message may wait for its receiver as long as it likes."""


class Message:
    """A message that has been sent."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.carried: Event | None = None
        self.done = False

    def is_completed(self) -> bool:
        """Return whether it is known to have left."""
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

    def __init__(self, messages: list[Message]) -> None:
        self.messages = messages

    def drive(self) -> None:
        """Wait for one after the other."""
        for message in self.messages:
            with suppress(RuntimeError):  # of a receiver that is no more
                message.work.wait(LONG)
            message.done = True


class Departing:
    """The messages of a link."""

    def __init__(self) -> None:
        self._helper = Helper()
        self._latest: list[Message] = []

    def add(self, work: Work) -> Message:
        """Return a message that learns when it has left, once there are many."""
        message = Message(work)
        self._latest.append(message)
        if len(self._latest) == MANY:
            given, self._latest = self._latest, []
            ended = self._helper.carry_on(Many(given))
            for one in given:
                one.carried = ended
        return message
