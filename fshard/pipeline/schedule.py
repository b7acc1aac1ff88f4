"""A schedule is a value: which device has which stage of a model, and what each device does, in order.

device 0   F0 of stage 0, F0 of stage 0, ...
device 1   ...
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What a device does with a stage; the values are what is written in text and CSV."""

    F = "F"  # forward
    B = "B"  # backward: I and W at once
    I = "I"  # noqa: E741  backward, the gradient of the stage's input
    W = "W"  # backward, the gradients of its weights
    SEND_F = "SEND_F"  # its output to the stage after it
    RECV_F = "RECV_F"  # its input from the stage before it
    SEND_B = "SEND_B"  # the gradient of its input to the stage before it
    RECV_B = "RECV_B"  # the gradient of its output from the stage after it
    GATHER = "UNSHARD"  # its weights, from all devices that hold a part
    FREE = "RESHARD"  # the gathered weights again
    REDUCE = "REDUCE_GRAD"  # the gradients of its weights, to all devices that hold a part


class Action(NamedTuple):
    """One thing that a device does: `2F0` is the forward of stage 2 on microbatch 0, `1UNSHARD` gathers stage 1."""

    kind: Kind
    stage: int
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """Where each stage lies, and what each device does, in order.

    Args:
        name: how it is called.
        placement: the device of each stage.
        microbatches: how many the batch is cut into.
        rows: the actions of each device.
    """

    name: str
    placement: tuple[int, ...]
    microbatches: int
    rows: tuple[tuple[Action, ...], ...]

    @property
    def stages(self) -> int:
        """How many stages the model is cut into."""
        return len(self.placement)

    @property
    def devices(self) -> int:
        """How many devices take part."""
        return len(self.rows)
