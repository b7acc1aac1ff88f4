"""Kill devices at chosen moments of a program: `kill`, and `moments`, which lists them.

    with fs.testing.moments() as reached:
        train()
    for device, row in reached.items():
        for moment in row:
            with fs.testing.kill(device, at=moment):
                ...

The phases are those of `fshard.mesh.spmd.moments`.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter, defaultdict
from collections.abc import Generator
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from typing import Any

from fshard.errors import ScopeError
from fshard.mesh.layout.mesh import Runtime
from fshard.mesh.spmd.moments import PHASES, Killed, Phase, dead, deaths, listeners
from fshard.mesh.spmd.scope import here

Moment = tuple[Phase, int]
"""A phase, and how often the device has reached it before."""


def kill(*devices: int, at: Phase | Moment) -> AbstractContextManager[None]:
    """Kill devices at a moment of the block: when the first of them reaches a phase for the n-th time.

    A virtual device ends there: its thread unwinds and runs no more of the program. On each other
    device the next collective or message of a mesh that has the dead one raises `LostProcessError`,
    and so does every later run on such a mesh until the end of the block. Where the caller runs all
    devices in one thread, as in the update of a step outside of `fs.run`, it is raised there.

    On a process mesh the process of a device kills itself by SIGKILL at its own n-th moment, in all
    processes that enter the block: nothing is cleaned up there, and the block does not end. So one
    program tests both; but several devices die each at its own moment, if it still gets there.

    Raises an AssertionError if the block ends without an error before the moment: so an error of
    the block is not hidden, such as the loss by a nested kill, whose moment was the first. A context
    is used once.

    Args:
        devices: their numbers in the world. Several die together. Nested blocks kill independently.
        at: a phase, or (phase, n) with n from 0: "forward", "gather", "backward", "reduce",
            "agree", "update", "copy", "save" or "collective", which counts all collectives and
            messages. `moments` lists those that a program reaches.

    >>> import torch, fshard as fs
    >>> mesh = fs.make_mesh({"data": 3})
    >>> def main():
    ...     return fs.psum(torch.ones(1), "data")
    >>> with kill(1, at="collective"):
    ...     try:
    ...         fs.run(main, mesh=mesh)
    ...     except fs.errors.LostProcessError as error:
    ...         error.lost
    (1,)
    """
    return _Kill(devices, _validated_moment(devices, at))


class _Kill(ContextDecorator):
    """A block in which devices die at a moment: see `kill`."""

    def __init__(self, devices: tuple[int, ...], moment: Moment) -> None:
        self.devices = devices
        self.moment = moment
        self.is_used = False
        self.is_done = False
        self.is_elsewhere = False  # another process has the devices
        self.counts = Counter[int]()
        self.deaths_before = 0

    def _recreate_cm(self) -> _Kill:
        return type(self)(self.devices, self.moment)

    def __enter__(self) -> None:
        _require_outside("kill")
        if self.is_used:
            raise RuntimeError(
                "kill: a context must be entered once, as its devices die once; this one has been. "
                "Call kill again for each block."
            )
        self.is_used = True
        self.deaths_before = len(deaths)
        listeners.append(self._listen)

    def _listen(self, name: Phase, number: int, runtime: Runtime) -> None:
        """Kill the device that has reached a phase, if it is the moment."""
        if number not in self.devices:
            self.is_elsewhere |= runtime == "process"
            return
        phase, n = self.moment
        if name != phase:
            return
        count = self.counts[number]
        self.counts[number] += 1
        if self.is_done or count != n:
            return
        if runtime == "process":
            os.kill(os.getpid(), signal.SIGKILL)
        self.is_done = True
        dead.update(dict.fromkeys(self.devices, f'("{phase}", {n})'))
        deaths.extend(self.devices)
        raise Killed

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.is_done:
            _join_saves()
        listeners.remove(self._listen)
        for device in self.devices:
            dead.pop(device, None)
        if kind is not None or self.is_done or self.is_elsewhere:
            return
        phase, n = self.moment
        others = deaths[self.deaths_before :]
        died = f" Devices {others} died before." if others else ""
        raise AssertionError(
            f'kill: a device of {self.devices} must reach ("{phase}", {n}) in the block; they '
            f'reached "{phase}" {max(self.counts.values(), default=0)} times.{died} '
            "fs.testing.moments lists moments."
        )


@contextmanager
def moments() -> Generator[dict[int, list[Moment]]]:
    """Record the moments that each device reaches in the block, by its number in the world.

    On a process mesh they are those of this process.

    >>> import torch, fshard as fs
    >>> def main():
    ...     return fs.psum(torch.ones(1), "data")
    >>> with moments() as reached:
    ...     sums = fs.run(main, mesh=fs.make_mesh({"data": 2}))
    >>> dict(reached)
    {0: [('collective', 0)], 1: [('collective', 0)]}
    """
    _require_outside("moments")
    reached = defaultdict[int, list[Moment]](list)
    counts = Counter[tuple[int, Phase]]()

    def listen(phase: Phase, number: int, runtime: Runtime) -> None:
        reached[number].append((phase, counts[number, phase]))
        counts[number, phase] += 1

    listeners.append(listen)
    try:
        yield reached
    finally:
        listeners.remove(listen)


def _join_saves() -> None:
    """Wait for saves in the background, which end by the death before it is undone."""
    for thread in threading.enumerate():
        if thread.name == "fshard checkpoint":
            thread.join()


def _require_outside(caller: str) -> None:
    """Raise in the function of a run on virtual devices."""
    scope = here()
    if scope is not None and scope.mesh.runtime == "virtual":
        raise ScopeError(
            f"{caller}: the block must be around fs.run, not in its function, which all devices "
            "run. Move it outside."
        )


def _validated_moment(devices: tuple[Any, ...], at: Any) -> Any:
    """Return a `Moment`; raise unless devices can die at that moment."""
    moment = (at, 0) if isinstance(at, str) else at
    is_pair = isinstance(moment, tuple) and len(moment) == 2
    if not is_pair or moment[0] not in PHASES:
        names = ", ".join([f'"{name}"' for name in PHASES])
        raise ValueError(
            f"kill: at must be a phase, or (phase, n), with a phase of {names}; got {at!r}."
        )
    phase, n = moment
    if type(n) is not int or n < 0:
        raise ValueError(
            f"kill: at must be (phase, n) with an integer n of at least 0; got {at!r}."
        )
    are_numbers = all([type(device) is int and device >= 0 for device in devices])
    if not devices or not are_numbers:
        got = ", ".join([repr(device) for device in devices]) or "none"
        raise ValueError(
            f"kill: devices must be integers >= 0, their numbers in the world; got {got}. "
            'Write each as an argument: kill(0, 2, at="update").'
        )
    return phase, n
