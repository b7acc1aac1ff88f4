"""Fill idle times with weight gradients, which makes a bubble small.

A device runs a W where it would be idle, and where it has reached its limit of activations: an F
begins to hold them, a W frees them.

    device 0   F0 F1 F2 F3 .  .  .  I0 W0 F4 I1 W1 I2 W2 I3 W3 I4 W4     each takes one tick
    device 3   .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 W2 W3 W4     limit 4: W0 precedes F4
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from fshard.errors import ScheduleError
from fshard.pipeline.schedule.actions import Action, Kind
from fshard.pipeline.schedule.dependencies import inputs_of
from fshard.pipeline.schedule.schedule import Schedule

Rule = Callable[[deque[Action], int], Iterator[Action]]
"""The actions that an idle device may run ahead of its row.

Called with the remaining row, and the number of activations below the limit of the device.
"""


@dataclass
class _Device:
    """A device at one tick: its row so far, and what remains to be added to it."""

    remaining: deque[Action]
    limit: int
    row: list[Action] = field(default_factory=list[Action])
    weights: deque[Action] = field(default_factory=deque[Action])  # the W of each I that has run
    held: int = 0  # activations

    def next_action(
        self, can_run: Callable[[Action], bool], rules: Sequence[Rule]
    ) -> Action | None:
        """Return the action that the device begins in this tick."""
        free = self.limit - self.held
        if self.remaining:
            action = self.remaining[0]
            # At the limit an F waits for a W, if there is one to wait for.
            has_space = action.kind is not Kind.F or free > 0 or not self.weights
            if has_space and can_run(action):
                return action

        if self.weights:
            return self.weights[0]

        for rule in rules:
            for action in rule(self.remaining, free):
                if can_run(action):
                    return action
        return None

    def run(self, action: Action) -> None:
        """Append an action to the row."""
        self.row.append(action)
        if action.kind is Kind.W:
            self.weights.remove(action)
            self.held -= 1
            return

        self.remaining.remove(action)
        if action.kind is Kind.F:
            self.held += 1
        elif action.kind is Kind.I:
            self.weights.append(action._replace(kind=Kind.W))


def with_weights(schedule: Schedule, limit: int, rules: Sequence[Rule] = ()) -> Schedule:
    """Add a W for each I: where a device would be idle, at the latest before it exceeds its limit.

    Args:
        schedule: forwards and gradients of inputs.
        limit: of activations per device, exceeded only if the rows leave no other way.
        rules: which actions an otherwise idle device runs ahead of its row: any of
            `advance_forwards`, `advance_gradient` and `swap_gradients`.

    >>> rows = Schedule.from_csv("0F0,0F1,0I0,0I1\\n1F0,1I0,1F1,1I1")
    >>> print(with_weights(rows, limit=2).to_csv())
    0F0,0F1,0I0,0W0,0I1,0W1
    1F0,1I0,1F1,1I1,1W0,1W1
    <BLANKLINE>
    """
    devices = [_Device(deque(row), limit) for row in schedule.rows]
    # The inputs of the first stage and the gradients after the last one are there from the start.
    done: set[Action] = set()
    for m in range(schedule.microbatches):
        done.add(Action(Kind.F, -1, m))
        done.add(Action(Kind.I, schedule.stages, m))

    def can_run(action: Action) -> bool:
        return done.issuperset(inputs_of(schedule, action))

    while any(device.remaining or device.weights for device in devices):
        # All devices choose before one runs: an action ends after its tick, not within it.
        actions = [device.next_action(can_run, rules) for device in devices]
        if not any(actions):
            raise ScheduleError(
                f"{schedule.name}: these wait for actions that never run: {_stuck(devices)}."
            )
        for device, action in zip(devices, actions, strict=True):
            if action is not None:
                device.run(action)
                done.add(action)
    return schedule.with_rows([device.row for device in devices])


def _stuck(devices: Sequence[_Device]) -> str:
    texts: list[str] = []
    for number, device in enumerate(devices):
        if device.remaining:
            texts.append(f"device {number} at {device.remaining[0]}")
    return ", ".join(texts)


def advance_forwards(row: deque[Action], free: int) -> Iterator[Action]:
    """Yield the forwards that fit now, and leave space for the actions before them in the row."""
    held = 0  # by the actions of the row so far, beside what the device holds now
    for action in row:
        if held >= free:
            return
        if action.kind is Kind.F:
            yield action
            held += 1
        else:
            held -= 1  # its W follows, and frees them


def advance_gradient(row: deque[Action], _: int) -> Iterator[Action]:
    """Yield the second action of the row, if it is a gradient: it holds no activations."""
    for action in islice(row, 1, 2):
        if action.kind is not Kind.F:
            yield action


def swap_gradients(row: deque[Action], free: int) -> Iterator[Action]:
    """Yield the second action of the row, if it and the first one are gradients.

    Unlike a gradient that overtakes a forward, it leaves time for messages.

    >>> forward_first = deque([Action.parse("0F2"), Action.parse("3I1")])
    >>> gradient_first = deque([Action.parse("0I0"), Action.parse("3I1")])
    >>> [str(action) for action in advance_gradient(forward_first, 0)]
    ['3I1']
    >>> [str(action) for action in swap_gradients(forward_first, 0)]
    []
    >>> [str(action) for action in swap_gradients(gradient_first, 0)]
    ['3I1']
    """
    if row and row[0].kind is not Kind.F:
        yield from advance_gradient(row, free)
