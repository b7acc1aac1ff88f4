"""A wire in progress: started, advanced by any waiting thread, and waited for.

All wires in progress are in one list, in the order of starting. A waiting thread advances all of them, or gives them
to the helpers of their links, so handles may be waited for in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Event, Lock
from typing import Any, NoReturn

from torch import Tensor

from fshard.errors import CollectiveTimeoutError, FshardError, LostProcessError
from fshard.mesh.runtimes.link import Link, What, Wire

LOST = ("onnection closed", "onnection reset", "onnection refused", "roken pipe", "Socket closed")
"""Error texts of backends for a lost peer."""


class Running:
    """A started wire. Its buffers are local variables of the generator, until it ends.

    Until then it is in `under_way`: others may be reading its buffers, and a thread that waits for another wire
    advances this one too, so handles may be waited for in any order.
    """

    __slots__ = (
        "_turn",
        "_ended",
        "_error",
        "_link",
        "_meet",
        "_needs",
        "_result",
        "_timeout",
        "_under_way",
        "_what",
        "_wire",
    )

    def __init__(
        self,
        link: Link,
        wire: Wire,
        timeout: timedelta,
        what: What,
        under_way: UnderWay,
        meet: Callable[[], None] | None = None,
    ) -> None:
        self._link, self._wire, self._timeout, self._what, self._under_way = link, wire, timeout, what, under_way
        self._meet = meet  # makes sure, before the result is waited for, that all make the same call
        self._needs: Sequence[Any] = ()
        self._result: Tensor | None = None
        self._error: BaseException | None = None
        self._ended: Event | None = None
        self._turn = Lock()  # the thread that advances the wire owns it
        hand_over(under_way)
        under_way[self] = None
        with self._turn:
            self._step()
        if meet is None:  # else wait until all processes are known to make the same calls
            go_on(under_way)  # others may wait for this process, which may not wait for anything soon

    def hand_over(self) -> None:
        """Give it to its link's helper, if that has one; unless a thread waits for it already."""
        helper = self._link.helper(self._what)
        if helper is not None and self._turn.acquire(blocking=False):
            try:
                self._ended = self._ended or helper.carry_on(self)
            finally:
                self._turn.release()

    def drive(self) -> None:
        """Run it to its end; an error is raised where it is waited for."""
        with self._turn, suppress(BaseException):
            self._run()

    def _step(self) -> None:
        """Let the wire go on to where it waits next, or to its end."""
        try:
            with self._link.lock:
                self._needs = next(self._wire)
        except StopIteration as stopped:
            self._result = stopped.value
            self._under_way.pop(self, None)
        except BaseException as error:
            self._fail(error)

    def _give_up(self, error: BaseException) -> NoReturn:
        """Raise; and end the wire, unless a helper is in it, whose error will come from the group."""
        if self._error is None and self._result is None and self._turn.acquire(blocking=False):
            try:
                self._fail(error)
            finally:
                self._turn.release()
        raise error

    def _fail(self, error: BaseException) -> NoReturn:
        self._under_way.pop(self, None)
        self._wire.close()
        try:
            fail(error, self._link, self._timeout, self._what)
        except BaseException as raised:
            self._error = raised  # a second waiter gets the same error
            raise

    def try_step(self) -> bool:
        """Advance if what it waits for is complete; return True if so. Errors are raised in the thread that waits for
        this wire.
        """
        if not self._turn.acquire(blocking=False):
            return False
        try:
            if self._result is not None or self._error is not None or not self._link.ready(self._needs):
                return False
            with suppress(Exception):
                self._step()
            return True
        finally:
            self._turn.release()

    def _others_go_on(self) -> bool:
        return len(self._under_way) > 1 and go_on(self._under_way, self)

    def wait(self) -> Tensor:
        """Run it to its end, or wait for the thread that does."""
        hand_over(self._under_way, self)
        if self._meet is not None:
            try:
                self._meet()
            except BaseException as error:
                self._give_up(error)
            self._meet = None
        with self._turn:
            if self._ended is None:
                return self._run()
        self._ended.wait()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def _run(self) -> Tensor:
        while self._result is None:
            if self._error is not None:
                raise self._error
            try:
                self._link.wait(self._needs, self._timeout, self._others_go_on)
            except BaseException as error:
                self._fail(error)
            if self._result is None:
                self._step()
        return self._result


class Awaited:
    """A message to receive. Other threads have nothing to advance, since it needs no work before it is waited for."""

    __slots__ = ("_coming", "_link", "_timeout", "_under_way", "_what")

    def __init__(
        self, link: Link, make: Callable[[], Tensor], source: int, timeout: timedelta, what: What, under_way: UnderWay
    ) -> None:
        self._link, self._timeout, self._what, self._under_way = link, timeout, what, under_way
        hand_over(under_way)
        try:
            self._coming = link.receive(make, source, what)
        except BaseException as error:
            fail(error, link, timeout, what)

    def wait(self) -> Tensor:
        """Wait for it, and return the buffer that was made for it."""
        hand_over(self._under_way)
        try:
            self._link.wait(self._coming.needs, self._timeout, self._others_go_on)
            with self._link.lock:
                return self._coming.take()
        except BaseException as error:
            fail(error, self._link, self._timeout, self._what)

    def _others_go_on(self) -> bool:
        return len(self._under_way) > 0 and go_on(self._under_way)


UnderWay = dict[Running, None]
"""The operations that were started and have not ended, in order."""


def hand_over(under_way: UnderWay, but: Running | None = None) -> None:
    """Give wires in progress to helpers, where they need one: before another one starts or is waited for."""
    for running in [*under_way]:
        if running is not but:
            running.hand_over()


def go_on(under_way: UnderWay, but: Running | None = None) -> bool:
    """Advance the wires that can; return True if one did."""
    return sum(running.try_step() for running in [*under_way] if running is not but) > 0


def fail(error: BaseException, link: Link, timeout: timedelta, what: What) -> NoReturn:
    """Mark a link as broken, and raise with a description of the operation."""
    link.broken(error)
    if isinstance(error, RuntimeError) and not isinstance(error, FshardError):
        explain(error, timeout, what)
    raise error


def explain(error: RuntimeError, timeout: timedelta, what: What) -> NoReturn:
    """Convert a time-out or a lost peer into an error that describes the operation."""
    text = str(error)
    if "imed out" in text or "imeout" in text:
        raise CollectiveTimeoutError(
            f"{what} did not end within {timeout.total_seconds():g} s: another process of the group has not made "
            f"the same call. Run with FSHARD_CHECK=1 to see where each process is. ({text.splitlines()[0]})"
        ) from error
    if any(word in text for word in LOST):
        raise LostProcessError(
            f"{what} cannot end: another process of the group has failed or ended. Its own error is the one to look "
            f"for. ({text.splitlines()[0]})"
        ) from error
    error.add_note(f"in {what}")
    raise error
