r"""What waits for what, and sends and receives: put into a schedule, and taken out of it again.

Let a clock run, on which F, I and W take one tick and B two.  A message goes when what is sent is done, both its send and its
receive:

    tick       0    1    2    3    4    5    6    7
    device 0   F0   F1             B0   --        B1   --          0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
                 \    \           /              /
    device 1        F0   B0   --   F1   B1   --                    1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1

So there is one order of all messages, and nobody waits for ever even if a send blocks until it is received: the first message
of all that are left can always go.
"""

from __future__ import annotations

from collections import defaultdict

from fshard.errors import ScheduleError
from fshard.pipeline.schedule import MESSAGES, Action, Kind, Schedule

_TICKS = {Kind.F: 1, Kind.B: 2, Kind.I: 1, Kind.W: 1}
"""How long what is computed takes."""
_SENT = {Kind.F: Kind.SEND_F, Kind.B: Kind.SEND_B, Kind.I: Kind.SEND_B}
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


def _clock(schedule: Schedule) -> list[list[int]]:
    """Return at which tick each action begins, row by row, if devices go on as soon as they can.

    >>> _clock(Schedule.from_csv("0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1B1"))
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
            free[device] = end[result(action)] = starts[-1] + _TICKS.get(action.kind, 0)
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


def with_messages(schedule: Schedule) -> Schedule:
    """Add the sends and receives that a schedule of forwards and backwards needs.

    Stages that lie on one device need none.  Messages that are there are put in anew.

    >>> schedule = Schedule.from_csv("0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1B1", name="1f1b")
    >>> print(with_messages(schedule).to_text())
    1f1b: 2 microbatches, stages on devices 0 1
    0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
    1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1
    """
    schedule = without_messages(schedule)
    begun = _clock(schedule)
    events: list[tuple[int, int, int, Action]] = []  # when, messages first, on which device
    for device, row in enumerate(schedule.rows):
        for action, start in zip(row, begun[device], strict=True):
            events.append((start, 1, device, action))
            if action.kind in _SENT:
                send = Action(_SENT[action.kind], action.stage, action.microbatch)
                peer = send.partner.stage
                if 0 <= peer < schedule.stages and schedule.placement[peer] != device:
                    end = start + _TICKS[action.kind]
                    events += [(end, 0, device, send), (end, 0, schedule.placement[peer], send.partner)]
    rows: list[list[Action]] = [[] for _ in schedule.rows]
    for _, _, device, action in sorted(events, key=lambda event: event[:2]):
        rows[device].append(action)
    return schedule.with_rows(rows)


def without_messages(schedule: Schedule) -> Schedule:
    """Take the sends and receives out of a schedule.

    >>> schedule = Schedule.from_csv("0F0,0B0\\n1F0,1B0", name="1f1b")
    >>> without_messages(with_messages(schedule)) == schedule
    True
    """
    return schedule.with_rows([action for action in row if action.kind not in MESSAGES] for row in schedule.rows)
