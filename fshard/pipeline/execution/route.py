"""The messages that a schedule needs.

A *wire* leads from a stage to a later one: values are sent along it, and their gradients back.
Every stage has one to the next; *skips* have names. All devices have the full schedule, so each
derives which messages it receives from another one, first to last: a message is sent as soon as it
is computed, and received when it is needed.

    device 0    0F0  0F1  0B0  0B1        sends the result of stage 0 for microbatch 0, then for 1
    device 1    1F0  1B0  1F1  1B1        receives them in this order, and sends two gradients
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fshard.pipeline.schedule.actions import COMPUTE, UNITS, Action, Kind
from fshard.pipeline.schedule.schedule import Schedule


class Wire(NamedTuple):
    """A connection from one stage to a later one; without a name, it carries the stage's result."""

    source: int
    target: int
    name: str | None = None


class Message(NamedTuple):
    """The message along a wire for one microbatch.

    Its kind is F, a value, or B, the gradient of a value, in the other direction.
    """

    kind: Kind
    wire: Wire
    microbatch: int

    @property
    def ends(self) -> tuple[int, int]:
        """The stage that sends and the stage that receives."""
        source, target, _ = self.wire
        return (source, target) if self.kind is Kind.F else (target, source)

    def __str__(self) -> str:
        value = "result" if self.wire.name is None else f'skip "{self.wire.name}"'
        gradient = "" if self.kind is Kind.F else "the gradient of "
        return f"{gradient}the {value} of stage {self.wire.source} for microbatch {self.microbatch}"


class RoutedAction(NamedTuple):
    """One action of a device with its messages.

    Args:
        action: the action.
        inputs: the messages that it receives, and the devices that send them.
        outputs: the messages that it sends, and the devices that receive them.
    """

    action: Action
    inputs: Sequence[tuple[Message, int]] = ()
    outputs: Sequence[tuple[Message, int]] = ()


class Route:
    """A schedule with its messages.

    `actions` are those of each device, and `receives` the messages that each receives from each
    other one; `pairs` are the devices that send and receive. `skips` has the names of the skips
    that each stage sends, `split` the backwards in two halves, by stage and microbatch.

    Args:
        schedule: placement and actions.
        skips: by name, the stage that sends and the later one that receives.
        backward: False drops all but the forwards.
    """

    def __init__(
        self, schedule: Schedule, skips: Mapping[str, tuple[int, int]], backward: bool
    ) -> None:
        _validate_skips(schedule, skips)
        self.placement = schedule.placement

        wires = [Wire(stage, stage + 1) for stage in range(schedule.stages - 1)]
        wires += [Wire(source, target, name) for name, (source, target) in skips.items()]
        # From the last receiver to the first: a stage accumulates the gradients of its outputs so,
        # as one backward of the full model does. Of the wires to one stage, the one from the stage
        # before it stays the first.
        wires.sort(key=lambda wire: wire.target, reverse=True)
        self._outgoing: list[list[Wire]] = [[] for _ in range(schedule.stages)]
        self._incoming: list[list[Wire]] = [[] for _ in range(schedule.stages)]
        self.skips: list[set[str]] = [set() for _ in range(schedule.stages)]
        for wire in wires:
            self._outgoing[wire.source].append(wire)
            self._incoming[wire.target].append(wire)
            if wire.name is not None:
                self.skips[wire.source].add(wire.name)

        # Messages are derived, so those of the schedule are dropped.
        kinds = COMPUTE if backward else frozenset({Kind.F})
        rows = schedule.without(frozenset(Kind) - kinds - UNITS).rows
        self.actions: list[list[RoutedAction]] = []
        self.split: set[tuple[int, int | None]] = set()
        for row in rows:
            self.actions.append([self._route_action(action) for action in row])
            for action in row:
                if action.kind is Kind.I:
                    self.split.add((action.stage, action.microbatch))

        devices = range(schedule.devices)
        self.receives: list[dict[int, list[Message]]] = []
        for device in devices:
            self.receives.append({source: [] for source in devices if source != device})
        for source, row in enumerate(self.actions):
            for routed in row:
                for message, target in routed.outputs:
                    if target != source:
                        self.receives[target][source].append(message)

    def _route_action(self, action: Action) -> RoutedAction:
        """Add messages to an action: values to F, gradients to B and I, none to others."""
        if action.kind is Kind.F:
            kind = Kind.F
            received_along = self._incoming[action.stage]
            sent_along = self._outgoing[action.stage]
        elif action.kind in (Kind.B, Kind.I):
            kind = Kind.B
            received_along = self._outgoing[action.stage]
            sent_along = self._incoming[action.stage]
        else:
            return RoutedAction(action)

        microbatch = action.microbatch or 0
        inputs: list[tuple[Message, int]] = []
        for wire in received_along:
            message = Message(kind, wire, microbatch)
            source, _ = message.ends
            inputs.append((message, self.placement[source]))
        outputs: list[tuple[Message, int]] = []
        for wire in sent_along:
            message = Message(kind, wire, microbatch)
            _, target = message.ends
            outputs.append((message, self.placement[target]))
        return RoutedAction(action, inputs, outputs)


def _validate_skips(schedule: Schedule, skips: Mapping[str, tuple[int, int]]) -> None:
    errors: list[str] = []
    for name, ends in skips.items():
        source, target = ends
        if not 0 <= source < target < schedule.stages:
            errors.append(f'"{name}": {ends}')
    if errors:
        raise ValueError(
            f"skips must lead to a later stage of 0..{schedule.stages - 1}; "
            f"got {'; '.join(errors)}."
        )
