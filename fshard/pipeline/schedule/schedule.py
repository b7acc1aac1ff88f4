"""Schedules as values: the placement of stages, and the actions of each device in order.

An action is written as in torch.distributed.pipelining: stage, action, microbatch.

    device 0    0F0  0F1  0B0  0B1      0F1 is the forward of stage 0 on microbatch 1
    device 1    1F0  1B0  1F1  1B1      1B0 is the backward of stage 1 on microbatch 0

A schedule contains no times: a device runs the next action of its row as soon as its inputs are available.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from fshard.errors import ScheduleError

if TYPE_CHECKING:
    from rich.console import Group

    from fshard.pipeline.schedule.simulate import Simulation
    from fshard.pipeline.schedule.verify import Proof


class Kind(StrEnum):
    """The kind of an action; the values are written in text and CSV."""

    F = "F"  # forward
    B = "B"  # full backward: I and W
    I = "I"  # noqa: E741  backward, the gradient of the stage's input
    W = "W"  # backward, the gradients of its weights
    SEND_F = "SEND_F"  # its output to the stage after it
    RECV_F = "RECV_F"  # its input from the stage before it
    SEND_B = "SEND_B"  # the gradient of its input to the stage before it
    RECV_B = "RECV_B"  # the gradient of its output from the stage after it
    GATHER = "UNSHARD"  # its weights, from all devices that hold a part
    FREE = "RESHARD"  # the gathered weights again
    REDUCE = "REDUCE_GRAD"  # the gradients of its weights, to all devices that hold a part

    __hash__ = str.__hash__  # actions are looked up often, and an enum's own hash is slow


COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
"""Actions that take a device's time."""
MESSAGES = frozenset({Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B})
"""Messages between the devices of two neighbouring stages."""
UNITS = frozenset({Kind.GATHER, Kind.FREE, Kind.REDUCE})
"""Actions on a stage's weights, for all microbatches."""

_PARTNERS = {
    Kind.SEND_F: (Kind.RECV_F, 1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, 1),
}
_ACTION = re.compile(rf"(\d+)({'|'.join(sorted(Kind, key=len, reverse=True))})(\d*)")
_OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


class Action(NamedTuple):
    """One thing that a device does: `2F0` is the forward of stage 2 on microbatch 0, `1UNSHARD` gathers stage 1.

    >>> Action.parse("2F0")
    Action(kind=<Kind.F: 'F'>, stage=2, microbatch=0)
    >>> print(Action.parse("2SEND_F0").partner)
    3RECV_F0
    """

    kind: Kind
    stage: int
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parse the result of `str`."""
        if not (found := _ACTION.fullmatch(text.strip())):
            raise ScheduleError(
                f'"{text}" is no action: write the stage, one of {", ".join(Kind)}, and the microbatch: 2F0.'
            )
        stage, kind, microbatch = found.groups()
        return cls(Kind(kind), int(stage), int(microbatch) if microbatch else None)

    @property
    def partner(self) -> Action:
        """The receive of a send, and the send of a receive."""
        kind, step = _PARTNERS[self.kind]
        return Action(kind, self.stage + step, self.microbatch)


@dataclass(frozen=True)
class Schedule:
    """Placement of stages, and the actions of each device in order.

    Args:
        name: of the schedule.
        placement: the device of each stage.
        microbatches: number of microbatches.
        rows: the actions of each device.

    >>> schedule = Schedule.from_csv("0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1B1", name="1f1b")
    >>> schedule.placement, schedule.microbatches
    ((0, 1), 2)
    >>> print(schedule.to_text())
    1f1b: 2 microbatches, stages on devices 0 1
    0F0 0F1 0B0 0B1
    1F0 1B0 1F1 1B1
    """

    name: str
    placement: tuple[int, ...]
    microbatches: int
    rows: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "placement", tuple(self.placement))
        object.__setattr__(self, "rows", tuple(map(tuple, self.rows)))
        if complaints := list(self._complaints()):
            raise ScheduleError(f"{self.name}: {'; '.join(complaints)}.")

    def _complaints(self) -> Iterator[str]:
        """Yield all errors."""
        if self.microbatches < 1:
            yield f"microbatches={self.microbatches} has to be at least 1"
        if not self.placement:
            yield "a model has at least one stage"
        places = enumerate(self.placement)
        if lost := [f"stage {stage} on device {at}" for stage, at in places if not 0 <= at < self.devices]:
            yield f"there are {self.devices} rows, and the placement has {', '.join(lost)}"
        if strange := [each for row in self.rows for each in row if not isinstance(each, Action)]:
            yield f"the rows have {', '.join(map(repr, strange))}, which is no Action"
            return
        actions = {action for row in self.rows for action in row}
        if unknown := sorted(str(each) for each in actions if not 0 <= each.stage < self.stages):
            yield f"there are {self.stages} stages, and the rows have {', '.join(unknown)}"
        if wrong := sorted(str(each) for each in actions if (each.microbatch is None) != (each.kind in UNITS)):
            yield f"one microbatch belongs to each action, none to {', '.join(sorted(UNITS))}; found {', '.join(wrong)}"

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.placement)

    @property
    def devices(self) -> int:
        """Number of devices."""
        return len(self.rows)

    def with_rows(self, rows: Iterable[Iterable[Action]]) -> Schedule:
        """Return the same with other actions."""
        return replace(self, rows=tuple(map(tuple, rows)))

    def to_csv(self, *, overlapped: bool = False) -> str:
        """Write a row of cells per device, in the format of torch.distributed.pipelining.

        A schedule without messages is torch's "compute_only" format, one with messages its "compute_comms" format, in
        which torch scales and reduces gradients only at REDUCE_GRAD.

        Args:
            overlapped: True writes a forward, and the backward after it of another stage and microbatch, as one cell, as
                torch does for DualPipe-V: `(0F4;3B1)OVERLAP_F_B`.
        """
        return "".join(f"{','.join(_overlapped(row) if overlapped else map(str, row))}\n" for row in self.rows)

    @classmethod
    def from_csv(
        cls, text: str, *, name: str = "csv", placement: Iterable[int] | None = None, microbatches: int | None = None
    ) -> Schedule:
        """Parse the result of `to_csv` or torch.distributed.pipelining.

        Empty cells, where a device of torch's is idle, are skipped. A cell such as `(0F4;3B1)OVERLAP_F_B` is read as
        its actions in sequence, which is how torch runs it.

        Args:
            text: the rows.
            name: of the schedule.
            placement: the device of each stage; default: the device that has its actions.
            microbatches: their number; default: as many as occur.
        """
        rows = [tuple(_cells(line)) for line in text.splitlines()]
        if microbatches is None:
            microbatches = 1 + max((each.microbatch or 0 for row in rows for each in row), default=0)
        places = _places(name, rows) if placement is None else placement
        return cls(name, tuple(places), microbatches, tuple(rows))

    def to_text(self) -> str:
        """Write a header line, and a line of actions per device, `-` if it has none."""
        places = " ".join(map(str, self.placement))
        head = f"{self.name}: {self.microbatches} microbatches, stages on devices {places}"
        return "\n".join([head, *(" ".join(map(str, row)) or "-" for row in self.rows)])

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """Parse the result of `to_text`; surrounding blanks and blank lines are ignored."""
        head, *lines = [*filter(None, map(str.strip, text.splitlines()))] or [""]
        found = re.fullmatch(r"(.*): (\d+) microbatches, stages on devices ([\d ]+)", head)
        if not found:
            raise ScheduleError(
                f'A schedule begins with "name: 8 microbatches, stages on devices 0 1 2 3"; found "{head}".'
            )
        name, microbatches, places = found.groups()
        csv = "\n".join("" if line == "-" else ",".join(line.split()) for line in lines)
        return cls.from_csv(f"{csv}\n", name=name, placement=map(int, places.split()), microbatches=int(microbatches))

    def verify(self, *, memory: int | None = None) -> Proof:
        """Verify that the schedule can run; raise with a drawing of all errors: see
        `fshard.pipeline.schedule.verify`.
        """
        from fshard.pipeline.schedule.verify import verify

        return verify(self, memory=memory)

    def simulate(self, **options: Any) -> Simulation:
        """Return when each action happens: for the options see `fshard.pipeline.schedule.simulate.simulate`."""
        from fshard.pipeline.schedule.simulate import simulate

        return simulate(self, **options)

    def __str__(self) -> str:
        from fshard.pipeline.schedule.draw import schedule_as_text

        return schedule_as_text(self).plain

    def __rich__(self) -> Group:
        from rich.console import Group

        from fshard.pipeline.schedule.draw import schedule_as_text

        return Group(schedule_as_text(self))  # a bare Text would be wrapped

    def _repr_html_(self) -> str:
        from fshard.pipeline.schedule.draw import schedule_as_html

        return schedule_as_html(self)


def _overlapped(row: Iterable[Action]) -> list[str]:
    """Write a row with each forward and the backward after it in one cell."""
    cells: list[str] = []
    before: Action | None = None
    for action in row:
        pair = before and (before.kind, action.kind) == (Kind.F, Kind.B)
        if before and pair and before.stage != action.stage and before.microbatch != action.microbatch:
            cells[-1] = f"({before};{action})OVERLAP_F_B"
        else:
            cells.append(str(action))
        before = action
    return cells


def _cells(line: str) -> Iterator[Action]:
    """Read the actions of one device."""
    for cell in filter(None, map(str.strip, line.split(","))):
        overlapped = _OVERLAPPED.fullmatch(cell)
        yield from map(Action.parse, overlapped[1].split(";") if overlapped else [cell])


def _places(name: str, rows: Sequence[Sequence[Action]]) -> list[int]:
    """Find the device of each stage: the one that has its actions."""
    stages = 1 + max((action.stage for row in rows for action in row), default=-1)
    found: list[set[int]] = [set() for _ in range(stages)]
    for device, row in enumerate(rows):
        for action in row:
            found[action.stage].add(device)
    wrong = [f"stage {stage} on {sorted(at) or 'none'}" for stage, at in enumerate(found) if len(at) != 1]
    if wrong:
        raise ScheduleError(f"{name}: each stage must be on one device; got {', '.join(wrong)}. Give placement=.")
    return [device for (device,) in found]


def with_units(schedule: Schedule, live: int = 2) -> Schedule:
    """Add UNSHARD and RESHARD of stages' weights around their use, and REDUCE_GRAD after the last one.

    Existing ones are replaced.

    Args:
        schedule: with or without messages.
        live: number of stages that a device has unsharded at a time: the current one and the next ones, so with 2 one is
            gathered while another computes.

    >>> schedule = Schedule.from_csv("0F0,0F1,1F0,1F1,1B0,1B1,0B0,0B1", name="bfs")
    >>> print(with_units(schedule, live=1).to_csv())
    0UNSHARD,0F0,0F1,0RESHARD,1UNSHARD,1F0,1F1,1B0,1B1,1REDUCE_GRAD,1RESHARD,0UNSHARD,0B0,0B1,0REDUCE_GRAD,0RESHARD
    <BLANKLINE>
    """
    if live < 1:
        raise ScheduleError(
            f"{schedule.name}: live={live} should be at least 1: a stage is unsharded while it is computed."
        )
    return schedule.with_rows(_with_units(row, live) for row in without_units(schedule).rows)


def without_units(schedule: Schedule) -> Schedule:
    """Remove UNSHARD, RESHARD and REDUCE_GRAD from a schedule."""
    return schedule.with_rows([action for action in row if action.kind not in UNITS] for row in schedule.rows)


def _with_units(row: Sequence[Action], live: int) -> Iterator[Action]:
    last = {action.stage: number for number, action in enumerate(row) if action.kind in {Kind.B, Kind.W}}
    unsharded: list[int] = []
    for number, (action, wanted) in enumerate(zip(row, _wanted(row, live), strict=True)):
        yield from (Action(Kind.FREE, stage) for stage in unsharded if stage not in wanted)
        yield from (Action(Kind.GATHER, stage) for stage in wanted if stage not in unsharded)
        yield action
        unsharded = wanted
        if last.get(action.stage) == number:
            yield Action(Kind.REDUCE, action.stage)
    yield from (Action(Kind.FREE, stage) for stage in unsharded)


def _wanted(row: Sequence[Action], live: int) -> list[list[int]]:
    """Return, for each action, the stages that are computed from it on: the first few, in order."""
    wanted: list[list[int]] = []
    following: list[int] = []
    for action in reversed(row):
        if action.kind in COMPUTE:
            following = [action.stage, *(stage for stage in following if stage != action.stage)]
        wanted.append(following[:live])
    return wanted[::-1]
