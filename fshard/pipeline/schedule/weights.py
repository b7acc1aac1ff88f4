"""Fill idle times with weight gradients: what makes a bubble small.

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
from fshard.pipeline.schedule.schedule import Action, Kind, Schedule

Result = tuple[Kind, int, int | None]
"""The result of an action: its kind, stage and microbatch."""
Early = Callable[[deque[Action], int], Iterator[Action]]
"""The actions that a device may advance, given its remaining row and its free activations."""


def with_weights(schedule: Schedule, room: int, early: tuple[Early, ...] = ()) -> Schedule:
    """Add a W for each I: where its device would be idle, at the latest before it would exceed `room` activations.

    Args:
        schedule: forwards and gradients of inputs.
        room: limit of activations per device, if there is an order that respects it.
        early: what an otherwise idle device runs ahead of its turn: one of `forwards`, `gradients` and `swapped`.

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

    def able(action: Action) -> bool:
        return there.issuperset(_needs(action, schedule.stages))

    def turn(device: int) -> Action | None:
        """Return the actions that a device begins in this tick."""
        ahead, weights, space = left[device], owed[device], room - held[device]
        if ahead and able(ahead[0]) and (ahead[0].kind is not Kind.F or space > 0 or not weights):
            return ahead[0]
        if weights:
            return weights[0]
        return next(filter(able, chain.from_iterable(rule(ahead, space) for rule in early)), None)

    while any(left) or any(owed):
        begun = {device: action for device in range(schedule.devices) if (action := turn(device))}
        if not begun:
            places = ", ".join(f"device {device} at {ahead[0]}" for device, ahead in enumerate(left) if ahead)
            raise ScheduleError(f"{schedule.name}: these wait for actions that never run: {places}.")
        for device, action in begun.items():
            rows[device].append(action)
            there.add(_result(action))
            held[device] += {Kind.F: 1, Kind.W: -1}.get(action.kind, 0)
            (owed if action.kind is Kind.W else left)[device].remove(action)
            if action.kind is Kind.I:
                owed[device].append(Action(Kind.W, action.stage, action.microbatch))
    return schedule.with_rows(rows)


def forwards(row: deque[Action], space: int) -> Iterator[Action]:
    """Yield the forwards that fit now, and leave space for all that was to run before them."""
    held = 0
    for action in row:
        if held >= space:
            return
        if action.kind is Kind.F:
            yield action
        held += 1 if action.kind is Kind.F else -1


def gradients(row: deque[Action], _: int) -> Iterator[Action]:
    """Yield the action after the next, if it is a gradient: it holds no activations."""
    return (action for action in islice(row, 1, 2) if action.kind is not Kind.F)


def swapped(row: deque[Action], space: int) -> Iterator[Action]:
    """Yield the second of two gradients: unlike one that overtakes a forward, it leaves time for messages.

    >>> rows = [deque(map(Action.parse, row.split())) for row in ("0F2 3I1", "0I0 3I1")]
    >>> [[str(action) for action in rule(row, 0)] for rule in (gradients, swapped) for row in rows]
    [['3I1'], ['3I1'], [], ['3I1']]
    """
    return gradients(row, space) if row and row[0].kind is not Kind.F else iter(())


def _result(action: Action) -> Result:
    """Return the result of an action that others need; for a B, that of its I."""
    return Kind.I if action.kind is Kind.B else action.kind, action.stage, action.microbatch


def _needs(action: Action, stages: int) -> list[Result]:
    """Return the results that an action waits for.

    >>> [(str(kind), *where) for kind, *where in _needs(Action.parse("1B7"), stages=3)]
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
