"""Which messages a schedule needs: worked out once, from what its devices compute.

A *wire* leads from a stage to a later one: values go along it, and their gradients back.  Every stage has one to the next,
and there are *skips*, which have names.  A message has its place by the computation that it is made in, and all devices know
the whole schedule; so a device knows what comes from another, in which order, and nobody has to ask or to wait in turn.

What a row itself says of sends and receives is for proofs and pictures: here a message is sent as soon as it is made, and
awaited when it is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from fshard.errors import ScheduleError
from fshard.pipeline.schedule import COMPUTE, UNITS, Action, Kind, Schedule


class Wire(NamedTuple):
    """A way from one stage to a later one; without a name, it is that of the one stage's result."""

    source: int
    to: int
    name: str | None = None


class Mail(NamedTuple):
    """What goes along a wire for one microbatch: F, a value, or B, its gradient, the other way."""

    kind: Kind
    wire: Wire
    microbatch: int

    @property
    def ends(self) -> tuple[int, int]:
        """The stage that it comes from and the stage that it goes to."""
        return self.wire[:2] if self.kind is Kind.F else (self.wire.to, self.wire.source)

    def __str__(self) -> str:
        what = "result" if self.wire.name is None else f'skip "{self.wire.name}"'
        gradient = "" if self.kind is Kind.F else "the gradient of "
        return f"{gradient}the {what} of stage {self.wire.source} for microbatch {self.microbatch}"


class Turn(NamedTuple):
    """One thing that a device does, what it takes for it and from where, and what it then gives and to whom."""

    action: Action
    takes: Sequence[tuple[Mail, int]] = ()
    gives: Sequence[tuple[Mail, int]] = ()


class Route:
    """The wires of a schedule, and what each device does; `split` are the backwards that come in two halves.

    Args:
        schedule: where stages lie, and in which order what is computed.
        skips: by name, from which stage to which later one.
        backward: whether there is one; else all but the forwards is left out.
        units: whether stages can be gathered, freed and reduced.
    """

    def __init__(
        self, schedule: Schedule, skips: Mapping[str, tuple[int, int]], backward: bool, *, units: bool = False
    ) -> None:
        self.placement = schedule.placement
        kept = (COMPUTE if backward else {Kind.F}) | (UNITS if units else set())
        self.rows = [[action for action in row if action.kind in kept] for row in schedule.rows]
        wires = [Wire(*pair) for pair in pairwise(range(schedule.stages))]
        wires += [Wire(*ends, name) for name, ends in skips.items()]
        wires.sort(key=lambda wire: -wire.to)  # gradients are added in this order, as one backward adds them
        self.gives = [[wire for wire in wires if wire.source == stage] for stage in range(schedule.stages)]
        self.takes = [[wire for wire in wires if wire.to == stage] for stage in range(schedule.stages)]
        self.names = [{wire.name for wire in gives if wire.name is not None} for gives in self.gives]
        self.split = {(action.stage, action.microbatch) for row in self.rows for action in row if action.kind is Kind.I}
        self._coming: dict[int, Mapping[int, Sequence[Mail]]] = {}
        self._turns: dict[int, Sequence[Turn]] = {}
        _check(schedule, skips, units)

    def turns(self, device: int) -> Sequence[Turn]:
        """Return what a device does, one after the other."""
        found = self._turns.get(device)
        if found is None:
            found = self._turns[device] = [self._turn(action) for action in self.rows[device]]
        return found

    def _turn(self, action: Action) -> Turn:
        takes, gives = self.takes[action.stage], self.gives[action.stage]
        kind = Kind.F
        if action.kind in (Kind.B, Kind.I):
            kind, takes, gives = Kind.B, gives, takes
        elif action.kind is not Kind.F:
            return Turn(action)
        taken, given = ([Mail(kind, wire, action.microbatch or 0) for wire in wires] for wires in (takes, gives))
        return Turn(
            action,
            [(mail, self.placement[mail.ends[0]]) for mail in taken],
            [(mail, self.placement[mail.ends[1]]) for mail in given],
        )

    def comes(self, device: int) -> Mapping[int, Sequence[Mail]]:
        """Return what a device gets from each other, in that order."""
        found = self._coming.get(device)
        if found is None:
            found = self._coming[device] = {
                source: [mail for turn in self.turns(source) for mail, to in turn.gives if to == device]
                for source in range(len(self.rows))
                if source != device
            }
        return found


def _check(schedule: Schedule, skips: Mapping[str, tuple[int, int]], units: bool) -> None:
    """Raise unless everything that the schedule and the skips say can be done."""
    wrong = [
        f"{action} on device {device}"
        for device, row in enumerate(schedule.rows)
        for action in row
        if action.kind in UNITS and not units
    ]
    if wrong:
        raise ScheduleError(
            f"the schedule {schedule.name} gathers, frees or reduces weights, which stages do not let the interpreter do: "
            f"{', '.join(wrong[:5])}{' ...' if len(wrong) > 5 else ''}."
        )
    astray = [f'"{name}": {ends}' for name, ends in skips.items() if not 0 <= ends[0] < ends[1] < schedule.stages]
    if astray:
        raise ScheduleError(
            f"skips lead from a stage to a later one of 0..{schedule.stages - 1}; found {'; '.join(astray)}."
        )
