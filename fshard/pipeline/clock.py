"""What waits for what, and a clock on which F, I and W take one tick, B two, and all else no time.

It says in which order things happen on different devices; `simulate` says how long they take.
"""

from __future__ import annotations

from collections import defaultdict

from fshard.errors import ScheduleError
from fshard.pipeline.schedule import Action, Kind, Schedule

TICKS = {Kind.F: 1, Kind.B: 2, Kind.I: 1, Kind.W: 1}
"""How long what is computed takes."""
Result = tuple[Kind, int, int | None]
"""What is there when an action has ended: its kind, stage and microbatch."""


def result(action: Action) -> Result:
    """Return what an action is waited for; a B also for its I."""
    return Kind.I if action.kind is Kind.B else action.kind, action.stage, action.microbatch


def needs(action: Action, stages: int) -> list[Result]:
    """Return what has to be there before an action begins.

    >>> [(str(kind), *where) for kind, *where in needs(Action.parse("1B7"), stages=3)]
    [('F', 1, 7), ('I', 2, 7)]
    """
    kind, stage, microbatch = action
    if kind is Kind.F:
        return [(Kind.F, stage - 1, microbatch)] if stage else []
    if kind is Kind.W:
        return [(Kind.I, stage, microbatch)]
    if kind is not Kind.I and kind is not Kind.B:
        return []
    own = (Kind.F, stage, microbatch)
    return [own, (Kind.I, stage + 1, microbatch)] if stage + 1 < stages else [own]


def clock(schedule: Schedule) -> list[list[int]]:
    """Return at which tick each action begins, row by row, if devices go on as soon as they can.

    >>> clock(Schedule.from_csv("0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1B1"))
    [[0, 1, 4, 7], [1, 2, 4, 5]]
    """
    begun: list[list[int]] = [[] for _ in schedule.rows]
    free = [0] * schedule.devices
    end: dict[Result, int] = {}
    waiting: defaultdict[Result, list[int]] = defaultdict(list)
    able = [*range(schedule.devices)]
    while able:
        device = able.pop()
        row, starts = schedule.rows[device], begun[device]
        while len(starts) < len(row):
            action = row[len(starts)]
            wanted = needs(action, schedule.stages)
            if missing := [each for each in wanted if each not in end]:
                waiting[missing[0]].append(device)
                break
            starts.append(max([free[device], *(end[each] for each in wanted)]))
            free[device] = end[result(action)] = starts[-1] + TICKS.get(action.kind, 0)
            able += waiting.pop(result(action), ())
    refuse_stuck(
        schedule.name,
        {d: row[len(at)] for d, (row, at) in enumerate(zip(schedule.rows, begun, strict=True)) if row[len(at) :]},
    )
    return begun


def refuse_stuck(name: str, stuck: dict[int, Action]) -> None:
    """Raise if there are devices that cannot go on."""
    if stuck:
        places = ", ".join(f"device {device} at {action}" for device, action in stuck.items())
        raise ScheduleError(f"{name}: these wait for what never comes: {places}.")
