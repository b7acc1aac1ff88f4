"""Rows of actions from paths: the idea that most schedules share.

Every microbatch takes the same *path* through the stages and back, one period after the microbatch before it. A path
has *legs*: each visits all devices, with a number of ticks from one to the next.

    1f1b: one leg forward of 1 tick a device, one back of 2         a B takes two ticks

    device 0   F0       F1       F2 B0 --    B1 --    B2 --
    device 1      F0       F1 B0 -- F2 B1 --    B2 --
    device 2         F0 B0 -- F1 B1 -- F2 B2 --

Only the order on each device is kept. A shorter path has a lower peak of activations, a longer one a smaller bubble at
both ends (Qi et al., "Pipeline Parallelism with Controllable Memory").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from fshard.pipeline.schedule.actions import Action, Kind
from fshard.pipeline.schedule.schedule import Schedule

Placement = tuple[int, ...]
"""The device of each stage."""
Time = Callable[[int, int], Any]
"""The time of an action by its stage and microbatch: anything that can be sorted."""


def in_order_of_time(
    name: str, placement: Placement, microbatches: int, forward: Time, backward: Time, kind: Kind
) -> Schedule:
    """Order the forwards and backwards of each device by their times.

    >>> in_order_of_time("gpipe", (0, 1), 2, lambda stage, m: m, lambda stage, m: 2 + m, Kind.B).to_text().splitlines()[1:]
    ['0F0 0F1 0B0 0B1', '1F0 1F1 1B0 1B1']
    """
    rows: list[list[tuple[Any, Action]]] = [[] for _ in range(max(placement) + 1)]
    for stage, device in enumerate(placement):
        for m in range(microbatches):
            rows[device].append((forward(stage, m), Action(Kind.F, stage, m)))
            rows[device].append((backward(stage, m), Action(kind, stage, m)))
    return Schedule(
        name,
        placement,
        microbatches,
        tuple(tuple(action for _, action in sorted(row)) for row in rows),
    )


def along_path(
    name: str,
    placement: Placement,
    microbatches: int,
    legs: Sequence[int],
    pauses: Sequence[int] = (),
    backward: Kind = Kind.I,
) -> Schedule:
    """Schedule all microbatches on one path, a period apart.

    Args:
        name: of the schedule.
        placement: the device of each stage.
        microbatches: their number.
        legs: ticks from device to device, on each leg.
        pauses: idle ticks between two legs, beside the one for the action there.
        backward: the kind of backward: full (B), or of the inputs only (I), with W added by others.

    >>> print(along_path("1f1b", (0, 1), 3, legs=(1, 2), backward=Kind.B).to_csv())
    0F0,0F1,0B0,0F2,0B1,0B2
    1F0,1B0,1F1,1B1,1F2,1B2
    <BLANKLINE>
    """
    steps: list[int] = []
    for leg, pause in zip(legs, [*pauses, *[0] * (len(legs) - len(pauses))], strict=True):
        steps += [leg] * max(placement) + [1 + pause]
    ticks = [*accumulate(steps[:-1], initial=0)]
    period = 3 * len(legs) // 2  # a forward, two halves of a backward, for each stage of a device

    return in_order_of_time(
        name,
        placement,
        microbatches,
        lambda stage, m: ticks[stage] + period * m,
        lambda stage, m: ticks[-1 - stage] + period * m,
        backward,
    )
