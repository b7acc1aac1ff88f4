r"""Add communication to a schedule: messages between stages, and UNSHARD, RESHARD, REDUCE_GRAD.

For messages the schedule is simulated, F, I and W in one tick and B in two. When a value is
computed, both its send and its receive are inserted:

    tick       0    1    2    3    4    5    6    7
    device 0   F0   F1             B0   --        B1   --
                 \    \           /              /
    device 1        F0   B0   --   F1   B1   --

    row 0      0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
    row 1      1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1

So all messages are sorted by one time, and even blocking sends cannot deadlock: the first of the
remaining messages can always be sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from fshard.pipeline.schedule.actions import COMPUTE, MESSAGES, UNITS, Action, Kind
from fshard.pipeline.schedule.schedule import Schedule
from fshard.pipeline.schedule.simulate import simulate
from fshard.pipeline.schedule.trace import Number

_SENDS = {Kind.F: Kind.SEND_F, Kind.B: Kind.SEND_B, Kind.I: Kind.SEND_B}


class _Entry(NamedTuple):
    """An action of a device; sorted by time, messages before computation, and number."""

    time: Number
    is_computation: bool
    number: int  # of the computation, row after row, that is the action or that a message carries
    device: int
    action: Action


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
    entries: list[_Entry] = []
    for number, event in enumerate(chain(*simulate(schedule).events)):
        action = event.action
        entries.append(_Entry(event.start, True, number, event.device, action))
        if action.kind not in _SENDS:
            continue

        send = Action(_SENDS[action.kind], action.stage, action.microbatch)
        receive = send.partner
        if schedule.crosses(action.stage, receive.stage - action.stage):
            receiver = schedule.placement[receive.stage]
            entries.append(_Entry(event.end, False, number, event.device, send))
            entries.append(_Entry(event.end, False, number, receiver, receive))

    rows: list[list[Action]] = [[] for _ in schedule.rows]
    # Plain tuples as keys, which `sorted` compares faster than entries.
    for entry in sorted(entries, key=lambda entry: entry[:3]):
        rows[entry.device].append(entry.action)
    return schedule.with_rows(rows)


def with_units(schedule: Schedule, live: int = 2) -> Schedule:
    """Add UNSHARD and RESHARD of stages' weights around their use, and REDUCE_GRAD after the last.

    Existing ones are replaced.

    Args:
        schedule: with or without messages.
        live: number of stages that a device has unsharded at a time: the current one and the next
            ones, so with 2 one is unsharded while another computes.

    >>> schedule = Schedule.from_csv("0F0,1F0,1B0,0B0", name="bfs")
    >>> print(with_units(schedule, live=1).to_text())
    bfs: 1 microbatches, stages on devices 0 0
    0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 1B0 1REDUCE_GRAD 1RESHARD 0UNSHARD 0B0 0REDUCE_GRAD 0RESHARD
    """
    if live < 1:
        raise ValueError(
            f"live must be at least 1, since a stage computes with unsharded weights; got {live}."
        )
    rows = [_row_with_units(row, live) for row in schedule.without(UNITS).rows]
    return schedule.with_rows(rows)


def _row_with_units(row: Sequence[Action], live: int) -> Iterator[Action]:
    last_backward: dict[int, int] = {}  # of each stage, the index of its last B or W
    for index, action in enumerate(row):
        if action.kind in {Kind.B, Kind.W}:
            last_backward[action.stage] = index

    unsharded: list[int] = []
    next_stages = _next_stages(row, live)
    for index, action in enumerate(row):
        wanted = next_stages[index]
        for stage in unsharded:
            if stage not in wanted:
                yield Action(Kind.RESHARD, stage)
        for stage in wanted:
            if stage not in unsharded:
                yield Action(Kind.UNSHARD, stage)
        yield action
        unsharded = wanted
        if last_backward.get(action.stage) == index:
            yield Action(Kind.REDUCE, action.stage)
    for stage in unsharded:
        yield Action(Kind.RESHARD, stage)


def _next_stages(row: Sequence[Action], count: int) -> list[list[int]]:
    """Return for each action the first stages that compute from it on: the next one first."""
    next_stages: list[list[int]] = []
    stages: list[int] = []  # all, sorted by their next computation
    for action in reversed(row):
        if action.kind in COMPUTE:
            later = [stage for stage in stages if stage != action.stage]
            stages = [action.stage, *later]
        next_stages.append(stages[:count])
    next_stages.reverse()
    return next_stages
