"""The moments of a step: devices name the phases that they reach, to functions that listen.

    forward       the loss function, or a stage, runs on one slice of the batch
    gather        the all-gather of a unit's parameters starts
    backward      autograd runs down from the loss of a slice, or through a stage
    reduce        the reduction of a bucket of gradients starts
    agree         numbers are summed over devices: losses, metrics, and what must be equal
    update        the optimizer gets the gradients
    copy          a share of the state is copied to a neighbour
    save          a share of a checkpoint is to be written, is written, is to be committed
    collective    any collective or message starts, those of other phases too

`fs.testing.kill` listens, on all threads, and ends a device there. Values are none of it: these an
audit takes, of its own step, by a `ValueRecorder` (`fshard.mesh.layout.counting`). Without a
listener a moment costs one look at an empty list, and no call:

    if listeners:
        reach("forward")                # as the device that the code runs as
        reach_on(mesh, "update")        # in code that runs for all devices of the caller
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, get_args

from fshard.mesh.spmd.scope import here

if TYPE_CHECKING:
    from fshard.mesh.layout.mesh import Runtime

Phase = Literal[
    "forward", "gather", "backward", "reduce", "agree", "update", "copy", "save", "collective"
]
PHASES: tuple[Phase, ...] = get_args(Phase)


class Killed(BaseException):
    """Unwinds the thread of a virtual device that is killed; internal."""


listeners: list[Callable[[Phase, int, Runtime], None]] = []
"""Called with the phase that a device reaches, its number in the world, and the runtime.

They are those of all threads, as the threads of autograd have no context of their own. They may
raise `Killed`.
"""

dead: dict[int, str] = {}
"""The virtual devices that were killed, by their numbers in the world, and the moments of death.

A run on a mesh that has one raises. Who numbers the survivors again empties it.
"""

deaths: list[int] = []
"""The numbers of all that were ever killed, in order: a save in the background may wait for one."""


def reach(phase: Phase) -> None:
    """Notify the listeners that the calling device has reached a phase."""
    scope = here()
    if scope is not None:
        reach_as(scope.number, phase, scope.mesh.runtime)


def reach_as(number: int, phase: Phase, runtime: Runtime) -> None:
    """Notify the listeners that the device with a number in the world has reached a phase."""
    if runtime == "abstract":
        return
    if runtime == "virtual" and number in dead:
        raise Killed
    for listen in tuple(listeners):
        listen(phase, number, runtime)
