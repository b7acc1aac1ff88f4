"""The threads of virtual devices, of which one runs at a time; they are kept idle between runs.

A thread sleeps on its own lock, its *baton*, both between runs and while its device waits for others; so starting a
run costs one wake-up per thread. Threads whose run failed or was interrupted exit, as do those of `fs.run`.

The threads of a run share one processor, since reference counts would move between the caches of two. The caller sets
it while they sleep: a thread that moves itself takes 0.1 ms. As batch work, a woken thread does not preempt the one that
woke it and that still has Python's lock.

An interrupt (Ctrl-C) raises `Stopped` in the threads, and `run` waits for them. A thread in native code, such as a
large matmul or a download, cannot be interrupted: a second interrupt ends the waiting, and the thread unwinds when it
is back in Python.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from contextvars import Context, copy_context

MAX_IDLE = 4
"""Maximal number of idle `DeviceThreads`, for nested runs and runs of several Python threads."""


class Stopped(BaseException):
    """Unwinds a thread whose run was ended; internal."""


class DeviceThreads:
    """Threads that do `work(i)` once in each run, thread `i` from its first `wake(i)` on.

    >>> threads, done = DeviceThreads(), []
    >>> def work(i):
    ...     done.append(i)
    ...     if i == 0:
    ...         threads.wake(1)
    >>> threads.run(["a", "b"], work, stop=lambda: None, is_busy=lambda i: True, keep=False)
    >>> done
    [0, 1]
    """

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._batons: list[threading.Lock] = []
        self._work: Callable[[int], None] = lambda place: None
        self._context = Context()
        self._processors: set[int] = set()
        self._working: set[int] = set()
        self._lock = threading.Lock()  # held to leave a run, and to interrupt a thread that has not left
        self._all_left = _locked()
        self._reusable, self._ending = True, False

    @classmethod
    def idle(cls) -> DeviceThreads:
        """Return threads whose last run is over, or new ones."""
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
        """End the threads with this run."""
        self._reusable = False

    def end(self) -> None:
        """Wake every thread, to unwind and to exit."""
        self._ending = True
        for baton in self._batons:
            with suppress(RuntimeError):  # its thread is awake
                baton.release()

    def run(
        self,
        names: list[str],
        work: Callable[[int], None],
        *,
        processors: Iterable[int] = (),
        stop: Callable[[], None],
        is_busy: Callable[[int], bool],
        keep: bool = True,
    ) -> None:
        """Wake the first thread, and wait until as many as there are names have done their work, on these processors.

        If that is interrupted, or the system gives no more threads: call `stop`, wake those that sleep, raise `Stopped`
        in those that are busy, and wait for them. With `keep`, the threads wait for the next run; else they end.
        """
        self._work, self._context, self._working = work, copy_context(), set(range(len(names)))
        try:
            self._prepare(names, set(processors))
            self.wake(0)
            while not self._all_left.acquire(timeout=0.5):  # a Ctrl-C just before sleeping does not end the sleep
                pass
        except BaseException:
            self._interrupt(stop, is_busy)
            raise
        if keep and self._reusable and not self._ending and len(_idle) < MAX_IDLE:
            _idle.append(self)
        else:
            self.end()
            for thread in self._living():
                thread.join()

    def _prepare(self, names: list[str], processors: set[int]) -> None:
        """Name the threads, start those that are missing, and have all of them on these processors."""
        if processors != self._processors:
            self._processors = processors
            for thread in self._living():
                _move(thread.native_id, processors)
        for thread, name in zip(self._threads, names, strict=False):
            thread.name = name
        for place in range(len(self._threads), len(names)):
            self._batons.append(_locked())
            self._threads.append(threading.Thread(target=self._live, args=(place,), name=names[place], daemon=True))
            self._threads[-1].start()

    def _live(self, place: int) -> None:
        if self._processors:
            _thread.processors_before = os.sched_getaffinity(0)
            _move(0, self._processors)
        with suppress(Stopped):  # interrupted after the work was done
            while True:
                self.sleep(place)
                if self._ending:
                    break
                try:
                    self._context.copy().run(self._work, place)
                finally:
                    self._leave(place)
        self._leave(place)

    def _leave(self, place: int) -> None:
        """Leave the run: no interrupt is sent after this. A pending one is raised in here; a second call completes."""
        with self._lock:
            if place in self._working:
                self._working.remove(place)
                if not self._working:
                    self._all_left.release()

    def _interrupt(self, stop: Callable[[], None], is_busy: Callable[[int], bool]) -> None:
        """Unwind and end all threads; a second interrupt leaves behind those that have not ended."""
        stop()
        self.end()
        try:
            while self._living():
                for place, thread in enumerate(self._threads):
                    with self._lock:
                        if place in self._working and is_busy(place):
                            _raise_in(thread, Stopped)
                until = time.monotonic() + 1.0  # again, in case the first was swallowed by a destructor
                while self._living() and time.monotonic() < until:
                    time.sleep(0.001)
        except KeyboardInterrupt as error:
            names = [thread.name for thread in self._living()]
            error.add_note(f"Still running outside Python: {', '.join(names)}. They end when they are back in Python.")
            raise

    def _living(self) -> list[threading.Thread]:
        """Return the threads that still run, by Python's list of them: `is_alive` may be wrong after an interrupt."""
        alive = {*threading.enumerate()}
        return [thread for thread in self._threads if thread.ident is not None and thread in alive]


class _ThreadInfo(threading.local):
    processors_before: set[int] | None = None


_thread = _ThreadInfo()
_idle: list[DeviceThreads] = []


def _move(native_id: int | None, processors: set[int]) -> None:
    """Run a thread of this process on these processors, as batch work; 0 is the calling thread."""
    if native_id is not None and processors:
        with suppress(OSError):  # the system forbids it
            os.sched_setaffinity(native_id, processors)
            os.sched_setscheduler(native_id, os.SCHED_BATCH, os.sched_param(0))


def _after_fork() -> None:
    """Forget threads that the child process does not have, and return its processors to it."""
    _idle.clear()
    if _thread.processors_before is not None:
        os.sched_setaffinity(0, _thread.processors_before)
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _raise_in(thread: threading.Thread, error: type[BaseException]) -> None:
    """Raise an error in a thread as soon as it runs Python code.

    None, which takes one back, is never sent: Python 3.11 then loops for ever wherever a tracer is set.
    """
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(error))


def _locked() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock
