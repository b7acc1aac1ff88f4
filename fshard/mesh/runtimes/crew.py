"""The threads of virtual devices, kept idle between runs.

A thread sleeps on its own lock, its *baton*, both between runs and while its device waits for others; so starting a
run costs one wake-up per thread. Threads whose run failed or was interrupted exit, as do those of `fs.run`.

An interrupt (Ctrl-C) ends the threads, and `run` waits for them. A thread in native code, such as a large matmul or a
download, cannot be interrupted. A second interrupt stops the waiting: `run` returns immediately, and the thread
unwinds when it is back in Python.

Python raises an interrupt in the main thread between any two bytecodes, also inside `Thread.start` or `Event.wait`,
which then leave a lock in an undefined state. So the main thread only calls C functions here: they start the threads
that start and end all others, and wait for a plain lock.
"""

from __future__ import annotations

import _thread
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from contextvars import Context, copy_context

MOST_IDLE = 4
"""Maximal number of idle crews, for nested runs and runs of several Python threads."""


class Stopped(BaseException):
    """Unwinds a thread whose run was ended; internal."""


class Crew:
    """Threads that do `work(i)` once in each run, thread `i` from its first `wake(i)` on.

    >>> crew, done = Crew(), []
    >>> def work(i):
    ...     done.append(i)
    ...     if i == 0:
    ...         crew.wake(1)
    >>> crew.run(["a", "b"], work, stop=lambda: None, busy=lambda i: True, keep=False)
    >>> done
    [0, 1]
    """

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._batons: list[threading.Lock] = []
        self._work: Callable[[int], None] = lambda place: None
        self._context = Context()
        self._gone: set[int] = set()
        self._size = 0
        self._door = threading.Lock()  # locked to leave a run, and to interrupt a thread that has not left
        self._started, self._ended, self._over = threading.Lock(), _closed(), _closed()
        self._trouble: RuntimeError | None = None
        self._spoiled = self._dismissed = False

    @classmethod
    def idle(cls) -> Crew:
        """Return a crew whose last run is over, or a new one."""
        try:
            return _idle.pop()
        except IndexError:
            return cls()

    def wake(self, place: int) -> None:
        """Wake thread `place`: it begins its work or continues where it sleeps."""
        self._batons[place].release()

    def sleep(self, place: int) -> None:
        """Sleep until the calling thread, `place`, is woken."""
        self._batons[place].acquire()

    def retire(self) -> None:
        """Have the threads end with this run."""
        self._spoiled = True

    def wake_all(self) -> None:
        """Wake every thread of the run, to unwind; it is the last one of these threads."""
        self.retire()
        for baton in self._batons[: self._size]:
            _open(baton)

    def run(
        self,
        names: list[str],
        work: Callable[[int], None],
        *,
        stop: Callable[[], None],
        busy: Callable[[int], bool],
        keep: bool = True,
    ) -> None:
        """Wake the first thread, and wait until as many as there are names have done their work.

        If that is interrupted, or the system gives no more threads: call `stop`, which wakes those that sleep, raise
        `Stopped` in those that are `busy`, and wait for them.  If that is interrupted too, return without them.
        With `keep`, the threads wait for the next run; else they end.
        """
        try:
            self._work, self._context, self._size, self._gone = work, copy_context(), len(names), set()
            missing = names[len(self._threads) :]
            for thread, name in zip(self._threads, names, strict=False):
                thread.name = name
            if missing:
                self._enlist(missing)  # no interrupt before this call
            else:
                self.wake(0)
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
        if keep and not self._spoiled and len(_idle) < MOST_IDLE:
            _idle.append(self)
        else:
            self._dismiss()
            for thread in self._living():
                thread.join()

    def _enlist(self, names: list[str]) -> None:
        self._started = _closed()
        try:
            _thread.start_new_thread(self._start, (names,))
        except RuntimeError:
            self._started.release()
            raise

    def _start(self, names: list[str]) -> None:
        """Start a thread for each name, then wake the first of the run."""
        try:
            for place, name in enumerate(names, len(self._threads)):
                self._batons.append(_closed())
                self._threads.append(threading.Thread(target=self._live, args=(place,), name=name, daemon=True))
                self._threads[-1].start()
        except RuntimeError as error:  # the system gives no more threads
            self._trouble = error
            self._ended.release()
        else:
            self.wake(0)
        finally:
            self._started.release()

    def _live(self, place: int) -> None:
        try:
            while True:
                self.sleep(place)
                if self._dismissed:
                    return
                try:
                    self._context.copy().run(self._work, place)
                finally:
                    self._leave(place)
        except Stopped:  # interrupted after the work was done
            self._leave(place)

    def _leave(self, place: int) -> None:
        """Leave the run: no interrupt is sent after this. A pending one is raised in here; a second call then
        completes.
        """
        with self._door:
            if place not in self._gone:
                self._gone.add(place)
                if len(self._gone) == self._size:
                    self._ended.release()

    def _dismiss(self) -> None:
        """End the threads that sleep between runs, and the others after their run."""
        self._dismissed = True
        for baton in self._batons:
            _open(baton)

    def _see_off(self) -> None:
        """Wait until all threads have ended, or return without those that have not."""
        try:
            _wait_for(self._over)
        except BaseException as error:
            if names := [thread.name for thread in self._living()]:
                error.add_note(
                    f"Still at work outside Python, and let go: {', '.join(names)}. Nothing of it reaches what is called later."
                )
            raise

    def _end(self, stop: Callable[[], None], busy: Callable[[int], bool]) -> None:
        _wait_for(self._started)
        stop()
        self._dismiss()
        with _unraisable_stopped_ignored():
            while self._living():
                for place, thread in enumerate(self._threads[: self._size]):
                    with self._door:
                        if place not in self._gone and busy(place):
                            _raise_in(thread, Stopped)
                until = time.monotonic() + 1.0  # again, in case the first was swallowed by a destructor
                while self._living() and time.monotonic() < until:
                    time.sleep(0.001)
        self._over.release()

    def _living(self) -> list[threading.Thread]:
        """Return the threads that still run, by Python's list of them: `is_alive` may be wrong after an interrupt."""
        alive = {*threading.enumerate()}
        return [thread for thread in self._threads if thread.ident is not None and thread in alive]


_idle: list[Crew] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)  # the child has no threads


def _raise_in(thread: threading.Thread, error: type[BaseException]) -> None:
    """Raise an error in a thread as soon as it runs Python code.

    None, which takes one back, is never sent: Python 3.11 then loops for ever wherever a tracer is set.
    """
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(error))


@contextmanager
def _unraisable_stopped_ignored() -> Generator[None]:
    """Ignore a `Stopped` raised where Python cannot unwind: in a destructor or a callback of the garbage collector."""
    report = sys.unraisablehook

    def report_others(lost: sys.UnraisableHookArgs, /) -> None:
        if not issubclass(lost.exc_type, Stopped):
            report(lost)

    sys.unraisablehook = report_others
    try:
        yield
    finally:
        if sys.unraisablehook is report_others:  # else another hook was installed on top of it
            sys.unraisablehook = report


def _closed() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


def _open(lock: threading.Lock) -> None:
    with suppress(RuntimeError):  # it is open already
        lock.release()


def _wait_for(lock: threading.Lock) -> None:
    """Wait until a lock is opened, and close it."""
    while not lock.acquire(timeout=0.5):  # with a timeout: a Ctrl-C just before sleeping wakes no one
        pass
