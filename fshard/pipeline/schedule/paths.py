"""Rows of actions from paths: the idea that most schedules share.

Every microbatch takes the same *path* through the stages and back, one period after the microbatch
before it. A path has *legs*: each visits all devices, with a number of ticks from one to the next.

    1f1b: one leg forward of 1 tick a device, one back of 2         a B takes two ticks

    device 0   F0       F1       F2 B0 --    B1 --    B2 --
    device 1      F0       F1 B0 -- F2 B1 --    B2 --
    device 2         F0 B0 -- F1 B1 -- F2 B2 --

Times only sort the actions of each row, and are dropped. A shorter path has a lower peak of
activations, a longer one a smaller bubble at both ends (Qi et al., "Pipeline Parallelism with
Controllable Memory").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from fshard.pipeline.schedule.actions import Action, Kind
from fshard.pipeline.schedule.schedule import Schedule

Placement = tuple[int, ...]
"""The device of each stage."""
TimeFunction = Callable[[int, int], Any]
"""The time of an action by its stage and microbatch: anything that can be sorted."""


def schedule_by_time(
    name: str,
    placement: Placement,
    microbatches: int,
    forward: TimeFunction,
    backward: TimeFunction,
    kind: Kind,
) -> Schedule:
    """Return the schedule whose rows are the forwards and backwards of each device, sorted by time.

    >>> def forward(stage, m): return m
    >>> def backward(stage, m): return 2 + m
    >>> gpipe = schedule_by_time("gpipe", (0, 1), 2, forward, backward, Kind.B)
    >>> gpipe.to_text().splitlines()[1:]
    ['0F0 0F1 0B0 0B1', '1F0 1F1 1B0 1B1']
    """
    devices = max(placement) + 1
    timed: list[list[tuple[Any, Action]]] = [[] for _ in range(devices)]
    for stage, device in enumerate(placement):
        for m in range(microbatches):
            timed[device].append((forward(stage, m), Action(Kind.F, stage, m)))
            timed[device].append((backward(stage, m), Action(kind, stage, m)))

    rows: list[tuple[Action, ...]] = []
    for entries in timed:
        entries.sort()  # two actions at one time, as in v-half of three stages: by kind, then stage
        rows.append(tuple([action for _, action in entries]))
    return Schedule(name, placement, microbatches, tuple(rows))


def schedule_along_path(
    name: str,
    placement: Placement,
    microbatches: int,
    legs: Sequence[int],
    pauses: Sequence[int] = (),
    backward: Kind = Kind.I,
) -> Schedule:
    """Return the schedule of all microbatches on one path, a period apart.

    Args:
        name: of the schedule.
        placement: the device of each stage.
        microbatches: their number.
        legs: ticks from device to device, on each leg.
        pauses: idle ticks between two legs, beside the one for the action there.
        backward: the kind of backward: full (B), or of the inputs only (I), with W added by others.

    >>> path = schedule_along_path("1f1b", (0, 1), 3, legs=(1, 2), backward=Kind.B)
    >>> print(path.to_csv())
    0F0,0F1,0B0,0F2,0B1,0B2
    1F0,1B0,1F1,1B1,1F2,1B2
    <BLANKLINE>
    """
    ticks = _visit_ticks(max(placement) + 1, legs, pauses)
    # A device has a stage for every two legs, and three ticks of work for it: F, I and W. In a
    # shorter period the devices would fall behind the path.
    period = 3 * len(legs) // 2

    def forward_tick(stage: int, m: int) -> int:
        return ticks[stage] + period * m

    def backward_tick(stage: int, m: int) -> int:
        return ticks[-1 - stage] + period * m

    return schedule_by_time(name, placement, microbatches, forward_tick, backward_tick, backward)


def _visit_ticks(devices: int, legs: Sequence[int], pauses: Sequence[int]) -> list[int]:
    """Return the ticks at which microbatch 0 visits the devices along the path, first to last.

    >>> _visit_ticks(3, legs=(1, 2), pauses=())     # device 0, 1, 2, then 2, 1, 0: as drawn above
    [0, 1, 2, 3, 5, 7]
    """
    ticks: list[int] = []
    start = 0
    for leg, pause in zip_longest(legs, pauses, fillvalue=0):
        ticks += [start + leg * hop for hop in range(devices)]
        # The next leg begins on the device where this one ends, once the action there is done.
        start = ticks[-1] + 1 + pause
    return ticks
