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
from contextlib import contextmanager

from fshard.errors import ScopeError
from fshard.mesh.layout.mesh import Runtime
from fshard.mesh.spmd.moments import PHASES, Killed, Phase, dead, deaths, listeners
from fshard.mesh.spmd.scope import here

Moment = tuple[Phase, int]
"""A phase, and how often the device has reached it before."""


@contextmanager
def kill(*devices: int, at: Phase | Moment) -> Generator[None]:
    """Kill devices at a moment of the block: when the first of them reaches a phase for the n-th time.

    A virtual device ends there: its thread unwinds and runs no more of the program. On each other
    device the next collective or message of a mesh that has the dead one raises `LostProcessError`,
    and so does every later run on such a mesh until the end of the block. Where the caller runs all
    devices in one thread, as in the update of a step outside of `fs.run`, it is raised there.

    On a process mesh the process of a device kills itself by SIGKILL at its own n-th moment, in all
    processes that enter the block: nothing is cleaned up there, and the block does not end. So one
    program tests both; but several devices die each at its own moment, if it still gets there.

    Raises an AssertionError at the end of the block if the moment has not been reached.

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
    phase, n = at if isinstance(at, tuple) else (at, 0)
    _validate(devices, phase, n)
    counts = Counter[int]()
    is_done = False
    is_elsewhere = False  # another process has the devices

    def listen(name: Phase, number: int, runtime: Runtime) -> None:
        nonlocal is_done, is_elsewhere
        if number not in devices:
            is_elsewhere |= runtime == "process"
            return
        if name != phase:
            return
        count = counts[number]
        counts[number] += 1
        if is_done or count != n:
            return
        if runtime == "process":
            os.kill(os.getpid(), signal.SIGKILL)
        is_done = True
        dead.update(dict.fromkeys(devices, f'("{phase}", {n})'))
        deaths.extend(devices)
        raise Killed

    listeners.append(listen)
    try:
        yield
    finally:
        if is_done:
            _join_saves()
        listeners.remove(listen)
        for device in devices:
            dead.pop(device, None)
    if not is_done and not is_elsewhere:
        raise AssertionError(
            f'kill: a device of {devices} must reach ("{phase}", {n}) in the block; they reached '
            f'"{phase}" {max(counts.values(), default=0)} times. fs.testing.moments lists moments.'
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


def _validate(devices: tuple[int, ...], phase: object, n: object) -> None:
    """Raise unless devices can die at the n-th time of a phase."""
    if phase not in PHASES:
        names = ", ".join([f'"{name}"' for name in PHASES])
        raise ValueError(f"kill: at must be a phase of {names}; got {phase!r}.")
    if not isinstance(n, int) or n < 0:
        raise ValueError(f"kill: at must be (phase, n) with n of at least 0; got n={n!r}.")
    if not devices:
        raise ValueError("kill: devices must be numbers in the world; got none.")
    scope = here()
    if scope is not None and scope.mesh.runtime == "virtual":
        raise ScopeError(
            "kill: the block must be around fs.run, not in its function, which all devices run. "
            "Move it outside."
        )
