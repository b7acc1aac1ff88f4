"""The threads of virtual devices, of which one runs at a time; they are kept idle between runs.

A thread sleeps on a lock of its own, its *baton*, both between runs and while its device waits for
others; so starting a run costs one wake-up per thread. A raw lock is the fastest of Python's ways
to wake a thread: see docs/decisions/001. Only the thread that runs wakes another one, after an
error too: see Note [Baton and random states].

An interrupt (Ctrl-C) stops a run at the next collective of the device that runs. If there is none
within a second, the threads are left behind, and unwind when that device gets there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextvars import Context, copy_context

MAX_IDLE = 4
"""Maximal number of idle `DeviceThreads`, for nested runs and runs of several Python threads."""


class Stopped(BaseException):
    """Unwinds a thread whose run was ended; internal."""


class DeviceThreads:
    """Threads that do `work(i)` once in each run, thread `i` from its first `wake(i)` on.

    The last one calls `finish`.

    >>> threads, done = DeviceThreads(), []
    >>> def work(i):
    ...     done.append(i)
    ...     threads.wake(1) if i == 0 else threads.finish()
    >>> threads.run(["a", "b"], work, stop=lambda: None, keep=False)
    >>> done
    [0, 1]
    """

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._batons: list[threading.Lock] = []
        self._work: Callable[[int], None] | None = None
        self._context = Context()
        self._finished = _new_baton()  # the baton of the thread that called `run`
        self._is_ending = False
        self.reusable = True  # False once a run has left modes in a thread

    @classmethod
    def idle(cls) -> DeviceThreads:
        """Return threads whose last run is over, or new ones."""
        try:
            return _idle.pop()
        except IndexError:
            return cls()

    def wake(self, device: int) -> None:
        """Wake a thread: it begins its work or continues where it sleeps."""
        self._batons[device].release()

    def sleep(self, device: int) -> None:
        """Sleep until the calling thread, that of `device`, is woken."""
        self._batons[device].acquire()

    def finish(self) -> None:
        """End the run: every thread has done its work."""
        self._finished.release()

    def run(
        self,
        names: list[str],
        work: Callable[[int], None],
        *,
        stop: Callable[[], None],
        keep: bool = True,
    ) -> None:
        """Wake the first thread, and wait until as many as there are names have done their work.

        Args:
            names: of the threads, one for each device.
            work: called with the number of each device.
            stop: called if the wait is interrupted: then the threads unwind, for one more second.
            keep: let the threads wait for the next run; else they end.
        """
        self._work = work
        self._context = copy_context()
        try:
            self._start_threads(names)
        except BaseException:  # the system gives no more threads
            self._end_threads()
            raise
        try:
            self.wake(0)
            # In turns, since a Ctrl-C just before sleeping does not end the sleep.
            while not self._finished.acquire(timeout=0.5):
                pass
        except BaseException as error:
            self._is_ending = True
            stop()
            if not self._finished.acquire(timeout=1):
                error.add_note("A device still runs. It ends at its next collective.")
                raise
            self._end_threads()
            raise
        if keep and self.reusable and len(_idle) < MAX_IDLE:
            _idle.append(self)
        else:
            self._end_threads()

    def _start_threads(self, names: list[str]) -> None:
        """Name the threads, and start those that are missing."""
        for thread, name in zip(self._threads, names, strict=False):
            thread.name = name
        for device in range(len(self._threads), len(names)):
            self._batons.append(_new_baton())
            thread = threading.Thread(
                target=self._work_when_woken, args=(device,), name=names[device], daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _work_when_woken(self, device: int) -> None:
        while not self._is_ending:
            self.sleep(device)
            if self._work is not None:
                # A copy, since a context can be entered by one thread at a time.
                self._context.copy().run(self._work, device)

    def _end_threads(self) -> None:
        """End the threads, which sleep or have just been interrupted."""
        self._work = None
        self._is_ending = True
        for baton, thread in zip(self._batons, self._threads, strict=True):
            if thread.is_alive():
                baton.release()
                thread.join()


_idle: list[DeviceThreads] = []

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)  # the child has none of the threads


def _new_baton() -> threading.Lock:
    """Return a lock that is taken: who acquires it sleeps until another thread releases it."""
    lock = threading.Lock()
    lock.acquire()
    return lock
