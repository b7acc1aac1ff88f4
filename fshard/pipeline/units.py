"""Weights that are gathered for their use: gather, free and reduce, put into a schedule and taken out of it again.

Where the weights of each stage lie in parts on the devices of a data axis (ZeRO-3), a device holds only a few of its stages
whole: those it works on next.  For two stages of one device, of which one is whole at a time:

    0UNSHARD 0F0 0F1 0RESHARD 2UNSHARD 2F0 2F1 2B0 2B1 2REDUCE_GRAD 2RESHARD 0UNSHARD 0B0 0B1 0REDUCE_GRAD 0RESHARD
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fshard.errors import ScheduleError
from fshard.pipeline.schedule import COMPUTE, UNITS, Action, Kind, Schedule


def with_units(schedule: Schedule, live: int = 2) -> Schedule:
    """Add gathering a stage's weights before they are used, freeing them, and reducing their gradients after the last one.

    What is there already is put in anew.

    Args:
        schedule: what is computed, with messages or without.
        live: how many stages a device holds whole at a time: the one it works on, and those it works on next, so that with 2
            one is gathered while it works on another.

    >>> schedule = Schedule.from_csv("0F0,0F1,1F0,1F1,1B0,1B1,0B0,0B1", name="bfs")
    >>> print(with_units(schedule, live=1).to_csv())
    0UNSHARD,0F0,0F1,0RESHARD,1UNSHARD,1F0,1F1,1B0,1B1,1REDUCE_GRAD,1RESHARD,0UNSHARD,0B0,0B1,0REDUCE_GRAD,0RESHARD
    <BLANKLINE>
    """
    if live < 1:
        raise ScheduleError(f"{schedule.name}: live={live} should be at least 1: a stage that is computed is whole.")
    return schedule.with_rows(_with_units(row, live) for row in without_units(schedule).rows)


def without_units(schedule: Schedule) -> Schedule:
    """Take what is done with weights out of a schedule."""
    return schedule.with_rows([action for action in row if action.kind not in UNITS] for row in schedule.rows)


def _with_units(row: Sequence[Action], live: int) -> Iterator[Action]:
    last = {action.stage: number for number, action in enumerate(row) if action.kind in {Kind.B, Kind.W}}
    whole: list[int] = []
    for number, (action, wanted) in enumerate(zip(row, _wanted(row, live), strict=True)):
        yield from (Action(Kind.FREE, stage) for stage in whole if stage not in wanted)
        yield from (Action(Kind.GATHER, stage) for stage in wanted if stage not in whole)
        yield action
        whole = wanted
        if last.get(action.stage) == number:
            yield Action(Kind.REDUCE, action.stage)
    yield from (Action(Kind.FREE, stage) for stage in whole)


def _wanted(row: Sequence[Action], live: int) -> list[list[int]]:
    """Return, for each action, the stages that are computed from it on: the first few, in order."""
    wanted: list[list[int]] = []
    following: list[int] = []
    for action in reversed(row):
        if action.kind in COMPUTE:
            following = [action.stage, *(stage for stage in following if stage != action.stage)]
        wanted.append(following[:live])
    return wanted[::-1]
