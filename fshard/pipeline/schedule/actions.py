"""The actions of a schedule, as torch.distributed.pipelining writes them: stage, kind, microbatch.

device 0    0F0  0F1  0B0  0B1      0F1 is the forward of stage 0 on microbatch 1
device 1    1F0  1B0  1F1  1B1      1B0 is the backward of stage 1 on microbatch 0
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

from fshard.errors import ScheduleError


class Kind(StrEnum):
    """The kind of an action; the values are written in text and CSV."""

    F = "F"  # forward
    B = "B"  # full backward: I and W
    I = "I"  # noqa: E741  backward, the gradient of the stage's input
    W = "W"  # backward, the gradients of its weights
    SEND_F = "SEND_F"  # its output to the stage after it
    RECV_F = "RECV_F"  # its input from the stage before it
    SEND_B = "SEND_B"  # the gradient of its input to the stage before it
    RECV_B = "RECV_B"  # the gradient of its output from the stage after it
    UNSHARD = "UNSHARD"  # all-gather its weights
    RESHARD = "RESHARD"  # free the unsharded weights
    REDUCE = "REDUCE_GRAD"  # reduce-scatter the gradients of its weights

    # Actions are keys of dicts and members of sets, and the hash of an enum is a Python function.
    __hash__ = str.__hash__


COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
"""Actions that take a device's time."""
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
"""Messages to the device of a neighbouring stage."""
RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})
"""Messages from the device of a neighbouring stage."""
MESSAGES = SENDS | RECEIVES
"""Messages between the devices of two neighbouring stages."""
UNITS = frozenset({Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE})
"""Actions on a stage's weights, for all microbatches."""

# The kind at the other end of a message, and the distance to the stage there.
_PARTNERS = {
    Kind.SEND_F: (Kind.RECV_F, 1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, 1),
}

_ACTION = re.compile(rf"(\d+)({'|'.join(Kind)})(\d*)")


class Action(NamedTuple):
    """One action of a device.

    `2F0` is the forward of stage 2 on microbatch 0, `1UNSHARD` all-gathers the weights of stage 1.

    >>> Action.parse("2F0")
    Action(kind=<Kind.F: 'F'>, stage=2, microbatch=0)
    >>> print(Action.parse("2SEND_F0").partner)
    3RECV_F0
    """

    kind: Kind
    stage: int
    microbatch: int | None = None

    def __str__(self) -> str:
        microbatch = "" if self.microbatch is None else self.microbatch
        return f"{self.stage}{self.kind}{microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parse the result of `str`."""
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(
                f"An action must be a stage, one of {', '.join(Kind)}, and a microbatch; "
                f'got "{text}". Write 2F0.'
            )
        stage, kind, digits = match.groups()
        microbatch = int(digits) if digits else None
        return cls(Kind(kind), int(stage), microbatch)

    @property
    def partner(self) -> Action:
        """The receive of a send, and the send of a receive."""
        kind, distance = _PARTNERS[self.kind]
        return Action(kind, self.stage + distance, self.microbatch)
