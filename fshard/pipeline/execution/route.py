"""The messages that a schedule needs.

A *wire* leads from a stage to a later one: values are sent along it, and their gradients back. Every stage has one to
the next; *skips* have names. All devices have the full schedule, so each derives which messages it receives from
another, in which order: a message is sent as soon as it is computed, and received when it is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from fshard.pipeline.schedule.actions import COMPUTE, UNITS, Action, Kind
from fshard.pipeline.schedule.schedule import Schedule


class Wire(NamedTuple):
    """A connection from one stage to a later one; without a name, it carries the stage's result."""

    source: int
    to: int
    name: str | None = None


class Message(NamedTuple):
    """The message along a wire for one microbatch: F, a value, or B, its gradient, in the other direction."""

    kind: Kind
    wire: Wire
    microbatch: int

    @property
    def ends(self) -> tuple[int, int]:
        """The stage that sends and the stage that receives."""
        return self.wire[:2] if self.kind is Kind.F else (self.wire.to, self.wire.source)

    def __str__(self) -> str:
        value = "result" if self.wire.name is None else f'skip "{self.wire.name}"'
        gradient = "" if self.kind is Kind.F else "the gradient of "
        return f"{gradient}the {value} of stage {self.wire.source} for microbatch {self.microbatch}"


class RoutedAction(NamedTuple):
    """One action of a device: its inputs with the devices they are from, and its outputs with those they are sent to."""

    action: Action
    inputs: Sequence[tuple[Message, int]] = ()
    outputs: Sequence[tuple[Message, int]] = ()


class Route:
    """A schedule with its messages: the `actions` of each device, and the messages that it `receives` from each other.

    `split` are the backwards in two halves, by stage and microbatch; `pairs` the devices that send and receive.

    Args:
        schedule: placement and actions.
        skips: by name, the stage that sends and the later one that receives.
        backward: False drops all but the forwards.
    """

    def __init__(
        self, schedule: Schedule, skips: Mapping[str, tuple[int, int]], backward: bool
    ) -> None:
        errors = [
            f'"{name}": {ends}'
            for name, ends in skips.items()
            if not 0 <= ends[0] < ends[1] < schedule.stages
        ]
        if errors:
            raise ValueError(
                f"skips must lead to a later stage of 0..{schedule.stages - 1}; got {'; '.join(errors)}."
            )
        self.placement = schedule.placement
        wires = [Wire(*pair) for pair in pairwise(range(schedule.stages))]
        wires += [Wire(*ends, name) for name, ends in skips.items()]
        wires.sort(
            key=lambda wire: -wire.to
        )  # gradients are accumulated in this order, as in one backward
        self._outgoing = [
            [wire for wire in wires if wire.source == stage] for stage in range(schedule.stages)
        ]
        self._incoming = [
            [wire for wire in wires if wire.to == stage] for stage in range(schedule.stages)
        ]
        self.skips = [
            {wire.name for wire in wires if wire.name is not None} for wires in self._outgoing
        ]
        kinds = (COMPUTE if backward else frozenset({Kind.F})) | UNITS
        rows = schedule.without(frozenset(Kind) - kinds).rows
        self.split = {
            (action.stage, action.microbatch)
            for row in rows
            for action in row
            if action.kind is Kind.I
        }
        self.actions = [[self._route_action(action) for action in row] for row in rows]
        devices = range(schedule.devices)
        self.receives = [
            {source: list[Message]() for source in devices if source != device}
            for device in devices
        ]
        self.pairs = set[tuple[int, int]]()
        for source, row in enumerate(self.actions):
            for message, to in (output for routed in row for output in routed.outputs):
                if to != source:
                    self.pairs.add((source, to))
                    self.receives[to][source].append(message)

    def _route_action(self, action: Action) -> RoutedAction:
        kind, inputs, outputs = Kind.F, self._incoming[action.stage], self._outgoing[action.stage]
        if action.kind in (Kind.B, Kind.I):
            kind, inputs, outputs = Kind.B, outputs, inputs
        elif action.kind is not Kind.F:
            return RoutedAction(action)
        received, sent = (
            [Message(kind, wire, action.microbatch or 0) for wire in wires]
            for wires in (inputs, outputs)
        )
        return RoutedAction(
            action,
            [(message, self.placement[message.ends[0]]) for message in received],
            [(message, self.placement[message.ends[1]]) for message in sent],
        )
