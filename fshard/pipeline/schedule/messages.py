r"""Insert sends and receives into a schedule, and remove them.

A clock runs, on which F, I and W take one tick and B two. When a value is computed, both its send and its receive are
inserted:

    tick       0    1    2    3    4    5    6    7
    device 0   F0   F1             B0   --        B1   --          0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
                 \    \           /              /
    device 1        F0   B0   --   F1   B1   --                    1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1

So all messages have one order, and even blocking sends cannot deadlock: the first of the remaining messages can always
be sent.
"""

from __future__ import annotations

from fshard.errors import ScheduleError
from fshard.pipeline.schedule.program import crosses, wire
from fshard.pipeline.schedule.schedule import MESSAGES, Action, Kind, Schedule

_TICKS = {Kind.F: 1, Kind.B: 2, Kind.I: 1, Kind.W: 1}
"""Durations of computation, in ticks."""
_SENT = {Kind.F: Kind.SEND_F, Kind.B: Kind.SEND_B, Kind.I: Kind.SEND_B}


def with_messages(schedule: Schedule) -> Schedule:
    """Add the sends and receives that a schedule of forwards and backwards needs.

    Stages on one device need none. Existing messages are replaced.

    >>> schedule = Schedule.from_csv("0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1B1", name="1f1b")
    >>> print(with_messages(schedule).to_text())
    1f1b: 2 microbatches, stages on devices 0 1
    0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
    1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1
    """
    schedule = without_messages(schedule)
    program = wire(schedule)
    order, stuck = program.walk()
    if stuck:
        places = ", ".join(f"device {at} at {program.actions[each.action]}" for at, each in sorted(stuck.items()))
        raise ScheduleError(f"{schedule.name}: these wait for actions that never run: {places}.")
    free, end = [0] * schedule.devices, [0] * len(order)
    events: list[tuple[int, int, int, int, Action]] = []  # when, messages first, in the order of the rows
    for number in order:
        device, action = program.device[number], program.actions[number]
        start = max([free[device], *(end[need] for need in program.needs[number])])
        free[device] = end[number] = start + _TICKS.get(action.kind, 0)
        events.append((start, 1, number, device, action))
        if action.kind in _SENT:
            send = Action(_SENT[action.kind], action.stage, action.microbatch)
            if crosses(schedule, action.stage, send.partner.stage - action.stage):
                events.append((end[number], 0, number, device, send))
                events.append((end[number], 0, number, schedule.placement[send.partner.stage], send.partner))
    rows: list[list[Action]] = [[] for _ in schedule.rows]
    for *_, device, action in sorted(events, key=lambda event: event[:3]):
        rows[device].append(action)
    return schedule.with_rows(rows)


def without_messages(schedule: Schedule) -> Schedule:
    """Take the sends and receives out of a schedule.

    >>> schedule = Schedule.from_csv("0F0,0B0\\n1F0,1B0", name="1f1b")
    >>> without_messages(with_messages(schedule)) == schedule
    True
    """
    return schedule.with_rows([action for action in row if action.kind not in MESSAGES] for row in schedule.rows)
