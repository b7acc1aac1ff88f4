"""Weight gradients where nothing waits for them: what makes a bubble small.

Nobody but the optimizer needs a W.  So a device does one where it would only wait, and where it may hold no more
activations: a forward begins to hold them, a W lets them go.

    device 0   F0 F1 F2 F3 .  .  .  .  I0 W0 F4 I1 W1 ...        F, I and W take one tick each
    device 3   .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 ...        at most four held: W0 makes room for F4
"""

from __future__ import annotations

from collections import deque

from fshard.pipeline.clock import Result, needs, refuse_stuck, result
from fshard.pipeline.schedule import Action, Kind, Schedule


def with_weights(schedule: Schedule, room: int) -> Schedule:
    """Add a W for each I: where its device would wait, at the latest before it would hold more than `room` activations.

    A device goes on where there is no room if it has no W left to do.

    >>> print(with_weights(Schedule.from_csv("0F0,0F1,0I0,0I1\\n1F0,1I0,1F1,1I1"), room=2).to_csv())
    0F0,0F1,0I0,0W0,0I1,0W1
    1F0,1I0,1F1,1I1,1W0,1W1
    <BLANKLINE>
    """
    rows: list[list[Action]] = [[] for _ in schedule.rows]
    left = [deque(row) for row in schedule.rows]
    owed = [deque[Action]() for _ in schedule.rows]
    held = [0] * schedule.devices
    there: set[Result] = set()
    while any(left) or any(owed):
        begun: list[Action] = []  # in this tick
        for device, row in enumerate(rows):
            able = left[device] and there.issuperset(needs(left[device][0], schedule.stages))
            full = able and left[device][0].kind is Kind.F and held[device] >= room
            if able and not (full and owed[device]):
                begun.append(left[device].popleft())
                held[device] += begun[-1].kind is Kind.F
            elif owed[device]:
                begun.append(owed[device].popleft())
                held[device] -= 1
            else:
                continue
            row.append(begun[-1])
        if not begun:
            refuse_stuck(schedule.name, {device: row[0] for device, row in enumerate(left) if row})
        for action in begun:
            there.add(result(action))
            if action.kind is Kind.I:
                owed[schedule.placement[action.stage]].append(Action(Kind.W, action.stage, action.microbatch))
    return schedule.with_rows(rows)
