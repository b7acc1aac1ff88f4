"""Fill idle times with weight gradients, which makes a bubble small.

A device runs a W where it would be idle, and where it has reached its limit of activations: an F begins to hold them,
a W frees them.

    device 0   F0 F1 F2 F3 .  .  .  I0 W0 F4 I1 W1 I2 W2 I3 W3 I4 W4        F, I and W take one tick each
    device 3   .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 W2 W3 W4        limit of four: W0 precedes F4
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, islice

from fshard.errors import ScheduleError
from fshard.pipeline.schedule.actions import Action, Kind
from fshard.pipeline.schedule.dependencies import inputs_of
from fshard.pipeline.schedule.schedule import Schedule

Rule = Callable[[deque[Action], int], Iterator[Action]]
"""The actions that an idle device may advance, given its remaining row and the activations below its limit."""


def with_weights(schedule: Schedule, limit: int, early: tuple[Rule, ...] = ()) -> Schedule:
    """Add a W for each I: where its device would be idle, at the latest before it would exceed the limit.

    Args:
        schedule: forwards and gradients of inputs.
        limit: of activations per device, if there is an order that respects it.
        early: what an otherwise idle device runs ahead of its turn: any of `forwards`, `gradients` and `swapped`.

    >>> print(with_weights(Schedule.from_csv("0F0,0F1,0I0,0I1\\n1F0,1I0,1F1,1I1"), limit=2).to_csv())
    0F0,0F1,0I0,0W0,0I1,0W1
    1F0,1I0,1F1,1I1,1W0,1W1
    <BLANKLINE>
    """
    rows: list[list[Action]] = [[] for _ in schedule.rows]
    remaining = [deque(row) for row in schedule.rows]
    weights = [deque[Action]() for _ in schedule.rows]  # the W of each I that has run
    held = [0] * schedule.devices
    ends = ((Kind.F, -1), (Kind.I, schedule.stages))  # before the first stage, and after the last
    done = {Action(kind, stage, m) for kind, stage in ends for m in range(schedule.microbatches)}

    def can_run(action: Action) -> bool:
        return done.issuperset(inputs_of(schedule, action))

    def next_action(device: int) -> Action | None:
        """Return the action that a device begins in this tick."""
        row, free = remaining[device], limit - held[device]
        if (
            row
            and can_run(row[0])
            and (row[0].kind is not Kind.F or free > 0 or not weights[device])
        ):
            return row[0]
        if weights[device]:
            return weights[device][0]
        return next(filter(can_run, chain.from_iterable(rule(row, free) for rule in early)), None)

    while any(remaining) or any(weights):
        started = {
            device: action for device in range(schedule.devices) if (action := next_action(device))
        }
        if not started:
            devices = ", ".join(
                f"device {device} at {row[0]}" for device, row in enumerate(remaining) if row
            )
            raise ScheduleError(
                f"{schedule.name}: these wait for actions that never run: {devices}."
            )
        for device, action in started.items():
            rows[device].append(action)
            done.add(action)
            held[device] += {Kind.F: 1, Kind.W: -1}.get(action.kind, 0)
            (weights if action.kind is Kind.W else remaining)[device].remove(action)
            if action.kind is Kind.I:
                weights[device].append(action._replace(kind=Kind.W))
    return schedule.with_rows(rows)


def forwards(row: deque[Action], free: int) -> Iterator[Action]:
    """Yield the forwards that fit now, and leave space for all that was to run before them."""
    held = 0
    for action in row:
        if held >= free:
            return
        if action.kind is Kind.F:
            yield action
        held += 1 if action.kind is Kind.F else -1


def gradients(row: deque[Action], _: int) -> Iterator[Action]:
    """Yield the action after the next, if it is a gradient: it holds no activations."""
    return (action for action in islice(row, 1, 2) if action.kind is not Kind.F)


def swapped(row: deque[Action], free: int) -> Iterator[Action]:
    """Yield the second of two gradients: unlike one that overtakes a forward, it leaves time for messages.

    >>> rows = [deque(map(Action.parse, row.split())) for row in ("0F2 3I1", "0I0 3I1")]
    >>> [[str(action) for action in rule(row, 0)] for rule in (gradients, swapped) for row in rows]
    [['3I1'], ['3I1'], [], ['3I1']]
    """
    return gradients(row, free) if row and row[0].kind is not Kind.F else iter(())
