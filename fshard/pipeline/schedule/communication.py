r"""Add communication to a schedule: messages between stages, and UNSHARD, RESHARD and REDUCE_GRAD of their weights.

The schedule is simulated, F, I and W in one tick and B in two. When a value is computed, both its send and its receive
are inserted:

    tick       0    1    2    3    4    5    6    7
    device 0   F0   F1             B0   --        B1   --          0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
                 \    \           /              /
    device 1        F0   B0   --   F1   B1   --                    1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1

So all messages have one order, and even blocking sends cannot deadlock: the first of the remaining messages can always
be sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from fshard.pipeline.schedule.actions import COMPUTE, MESSAGES, UNITS, Action, Kind
from fshard.pipeline.schedule.schedule import Schedule
from fshard.pipeline.schedule.simulate import simulate
from fshard.pipeline.schedule.trace import Number

_SENDS = {Kind.F: Kind.SEND_F, Kind.B: Kind.SEND_B, Kind.I: Kind.SEND_B}


def with_messages(schedule: Schedule) -> Schedule:
    """Add the sends and receives that a schedule of forwards and backwards needs.

    Stages on one device need none. Existing messages are replaced.

    >>> schedule = Schedule.from_csv("0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1B1", name="1f1b")
    >>> print(with_messages(schedule).to_text())
    1f1b: 2 microbatches, stages on devices 0 1
    0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
    1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1
    """
    schedule = schedule.without(MESSAGES)
    timed: list[
        tuple[Number, int, int, int, Action]
    ] = []  # when, messages first, in the order of the rows
    for number, event in enumerate(chain(*simulate(schedule).events)):
        device, action = event.device, event.action
        timed.append((event.start, 1, number, device, action))
        if action.kind in _SENDS:
            send = Action(_SENDS[action.kind], action.stage, action.microbatch)
            if schedule.crosses(action.stage, send.partner.stage - action.stage):
                timed.append((event.end, 0, number, device, send))
                timed.append(
                    (event.end, 0, number, schedule.placement[send.partner.stage], send.partner)
                )
    rows: list[list[Action]] = [[] for _ in schedule.rows]
    for *_, device, action in sorted(timed, key=lambda entry: entry[:3]):
        rows[device].append(action)
    return schedule.with_rows(rows)


def with_units(schedule: Schedule, live: int = 2) -> Schedule:
    """Add UNSHARD and RESHARD of stages' weights around their use, and REDUCE_GRAD after the last one.

    Existing ones are replaced.

    Args:
        schedule: with or without messages.
        live: number of stages that a device has unsharded at a time: the current one and the next ones, so with 2 one is
            unsharded while another computes.

    >>> schedule = Schedule.from_csv("0F0,0F1,1F0,1F1,1B0,1B1,0B0,0B1", name="bfs")
    >>> print(with_units(schedule, live=1).to_csv())
    0UNSHARD,0F0,0F1,0RESHARD,1UNSHARD,1F0,1F1,1B0,1B1,1REDUCE_GRAD,1RESHARD,0UNSHARD,0B0,0B1,0REDUCE_GRAD,0RESHARD
    <BLANKLINE>
    """
    if live < 1:
        raise ValueError(
            f"live must be at least 1, since a stage computes with unsharded weights; got {live}."
        )
    return schedule.with_rows(_row_with_units(row, live) for row in schedule.without(UNITS).rows)


def _row_with_units(row: Sequence[Action], limit: int) -> Iterator[Action]:
    last = {
        action.stage: number for number, action in enumerate(row) if action.kind in {Kind.B, Kind.W}
    }
    following = list[int]()
    stages_ahead = list[
        list[int]
    ]()  # of each action, the last one first: the first stages that compute from it on
    for action in reversed(row):
        if action.kind in COMPUTE:
            following = [action.stage, *(stage for stage in following if stage != action.stage)]
        stages_ahead.append(following[:limit])
    unsharded: list[int] = []
    for number, (action, wanted) in enumerate(zip(row, reversed(stages_ahead), strict=True)):
        yield from (Action(Kind.RESHARD, stage) for stage in unsharded if stage not in wanted)
        yield from (Action(Kind.UNSHARD, stage) for stage in wanted if stage not in unsharded)
        yield action
        unsharded = wanted
        if last.get(action.stage) == number:
            yield Action(Kind.REDUCE, action.stage)
    yield from (Action(Kind.RESHARD, stage) for stage in unsharded)
