"""A crew: threads that begin together, and are all gone when `run` comes back, unless somebody is too impatient.

An interrupt (Ctrl-C) ends the threads, and `run` waits until they have ended.  What a thread does outside Python, a large
product or a download, cannot be ended: only waited for.  A second interrupt stops the waiting.  The thread is then let go:
it does nothing more in Python than to unwind, as soon as it comes back there.  So to come back at once wins over that no
thread outlives its call.

Python raises an interrupt in the main thread between any two of its instructions, also in the middle of `Thread.start` or
`Event.wait`: these then leave a lock that is held by nobody, or is not held by its owner.  So the main thread does nothing
here that can be torn: it calls functions of C, which start the threads that start and end all others, and wait for a plain
lock.
"""

from __future__ import annotations

import _thread
import ctypes
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import copy_context


class Stopped(BaseException):
    """Unwinds a thread whose work is not wanted any more; never seen outside."""


class Crew:
    """Threads with these names, of which thread `i` does `work(i)`.

    >>> done = []
    >>> crew = Crew(["a", "b"], done.append)
    >>> crew.run(begin=lambda: None, stop=lambda: None, busy=lambda i: True)
    >>> sorted(done)
    [0, 1]
    """

    def __init__(self, names: Sequence[str], work: Callable[[int], None]) -> None:
        self._work = work
        self._threads = [
            threading.Thread(target=copy_context().run, args=(self._live, place), name=name, daemon=True)
            for place, name in enumerate(names)
        ]
        self._gone: set[int] = set()
        self._door = threading.Lock()  # through which a thread leaves, unless it is just being interrupted
        self._started, self._ended, self._over = _closed(), _closed(), _closed()
        self._trouble: RuntimeError | None = None

    def run(self, *, begin: Callable[[], None], stop: Callable[[], None], busy: Callable[[int], bool]) -> None:
        """Start all threads, call `begin`, and wait until all have ended.

        If that is interrupted, or there are no more threads to be had: call `stop`, which wakes those that sleep, raise
        `Stopped` in those that are `busy`, and wait for them.  If that is interrupted too: let go those that still run.
        """
        try:
            try:  # an interrupt comes at the earliest when this has been called
                _thread.start_new_thread(self._start, (begin,))
            except RuntimeError:
                self._started.release()
                raise
            _wait_for(self._ended)
            if self._trouble is not None:
                raise self._trouble
        except BaseException:
            try:  # and the next one here
                _thread.start_new_thread(self._end, (stop, busy))
            except RuntimeError:
                self._end(stop, busy)
            self._see_off()
            raise
        for thread in self._living():
            thread.join()

    def _start(self, begin: Callable[[], None]) -> None:
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError as error:  # the system gives no more threads
            self._trouble = error
            self._ended.release()
        else:
            begin()
        finally:
            self._started.release()

    def _live(self, place: int) -> None:
        try:
            try:
                self._work(place)
            finally:
                self._leave(place)
        except Stopped:  # it came when the work was done
            self._leave(place)

    def _leave(self, place: int) -> None:
        """Go where no interrupt is sent any more: one that is under way comes in here, and a second call ends it."""
        with self._door:
            if place not in self._gone:
                self._gone.add(place)
                if len(self._gone) == len(self._threads):
                    self._ended.release()

    def _see_off(self) -> None:
        """Wait until all have been ended, or let go those that have not."""
        try:
            _wait_for(self._over)
        except BaseException as error:
            if names := [thread.name for thread in self._living()]:
                error.add_note(
                    f"Still at work outside Python, and let go: {', '.join(names)}. Nothing of it reaches what is called later."
                )
            raise

    def _end(self, stop: Callable[[], None], busy: Callable[[int], bool]) -> None:
        stop()
        _wait_for(self._started)
        with _losses_unsaid():
            while self._living():
                for place, thread in enumerate(self._threads):
                    with self._door:
                        if place not in self._gone and busy(place):
                            _raise_in(thread, Stopped)
                until = time.monotonic() + 1.0  # then again, if the first was lost in a destructor, say
                while self._living() and time.monotonic() < until:
                    time.sleep(0.001)
        self._over.release()

    def _living(self) -> list[threading.Thread]:
        """Return the threads that still run, by Python's list of them: `is_alive` may be wrong after an interrupt."""
        alive = {*threading.enumerate()}
        return [thread for thread in self._threads if thread.ident is not None and thread in alive]


def _raise_in(thread: threading.Thread, error: type[BaseException]) -> None:
    """Raise an error in a thread as soon as it runs Python code.

    None, which takes one back, is never sent: Python 3.11 then goes round in a circle wherever a tracer is set.
    """
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(error))


@contextmanager
def _losses_unsaid() -> Generator[None]:
    """Have Python say nothing of a `Stopped` that came where it cannot unwind: in a destructor or a callback of `gc`."""
    say = sys.unraisablehook

    def say_others(lost: sys.UnraisableHookArgs, /) -> None:
        if not issubclass(lost.exc_type, Stopped):
            say(lost)

    sys.unraisablehook = say_others
    try:
        yield
    finally:
        if sys.unraisablehook is say_others:  # else somebody put another before it
            sys.unraisablehook = say


def _closed() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


def _wait_for(lock: threading.Lock) -> None:
    """Wait until a lock is open, and leave it so."""
    while not lock.acquire(timeout=0.5):  # not for ever: a Ctrl-C in the moment before going to sleep wakes nobody
        pass
    lock.release()
