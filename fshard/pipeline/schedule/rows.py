"""The data of a schedule: the placement of stages, and the actions of each device in order; as text and as CSV.

A schedule contains no times: a device runs the next action of its row as soon as its inputs are available.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

from fshard.errors import ScheduleError
from fshard.pipeline.schedule.actions import UNITS, Action

_OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


@dataclass(frozen=True)
class ScheduleRows:
    """The data of a `Schedule`, which describes the fields."""

    name: str
    placement: tuple[int, ...]
    microbatches: int
    rows: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "placement", tuple(self.placement))
        object.__setattr__(self, "rows", tuple(map(tuple, self.rows)))
        if errors := list(self._errors()):
            raise ScheduleError(f"{self.name}: {'; '.join(errors)}.")

    def _errors(self) -> Iterator[str]:
        if self.microbatches < 1:
            yield f"microbatches must be at least 1; got {self.microbatches}"
        if not self.placement:
            yield "placement must have at least one stage"
        if errors := [
            f"stage {n} on device {d}"
            for n, d in enumerate(self.placement)
            if not 0 <= d < self.devices
        ]:
            yield f"placement must be on the {self.devices} devices that have rows; got {', '.join(errors)}"
        if errors := [
            action for row in self.rows for action in row if not isinstance(action, Action)
        ]:
            yield f"rows must consist of Actions; got {', '.join(map(repr, errors))}"
            return
        actions = {action for row in self.rows for action in row}
        if errors := sorted(
            str(action) for action in actions if not 0 <= action.stage < self.stages
        ):
            yield f"actions must be of stages below {self.stages}; got {', '.join(errors)}"
        misnumbered = [
            action for action in actions if (action.microbatch is None) != (action.kind in UNITS)
        ]
        if errors := sorted(map(str, misnumbered)):
            yield f"actions must have one microbatch, and {', '.join(sorted(UNITS))} none; got {', '.join(errors)}"

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.placement)

    @property
    def devices(self) -> int:
        """Number of devices."""
        return len(self.rows)

    def with_rows(self, rows: Iterable[Iterable[Action]]) -> Self:
        """Return a copy with other actions."""
        return replace(self, rows=tuple(map(tuple, rows)))

    def without(self, kinds: frozenset[str]) -> Self:
        """Return a copy without the actions of some kinds."""
        return self.with_rows(
            [action for action in row if action.kind not in kinds] for row in self.rows
        )

    def crosses(self, stage: int, step: int) -> bool:
        """Return True if the stage `step` after (or before) this one exists on another device."""
        return (
            0 <= stage + step < self.stages
            and self.placement[stage + step] != self.placement[stage]
        )

    def to_csv(self) -> str:
        """Write a row of cells per device, in the format of torch.distributed.pipelining.

        A schedule without messages is torch's "compute_only" format, one with messages its "compute_comms" format, in
        which torch scales and reduces gradients only at REDUCE_GRAD.
        """
        return "".join(f"{','.join(map(str, row))}\n" for row in self.rows)

    @classmethod
    def from_csv(
        cls,
        text: str,
        *,
        name: str = "csv",
        placement: Iterable[int] | None = None,
        microbatches: int | None = None,
    ) -> Self:
        """Parse the result of `to_csv` or torch.distributed.pipelining.

        Empty cells, where a device of torch's is idle, are skipped. A cell such as `(0F4;3B1)OVERLAP_F_B` is read as
        its actions in sequence, which is how torch runs it.

        Args:
            text: the rows.
            name: of the schedule.
            placement: the device of each stage; default: the device that has its actions.
            microbatches: their number; default: as many as occur.
        """
        lines = _OVERLAPPED.sub(lambda cell: cell[1].replace(";", ","), text).splitlines()
        rows = [
            tuple([Action.parse(cell.strip()) for cell in line.split(",") if cell.strip()])
            for line in lines
        ]
        if microbatches is None:
            microbatches = 1 + max(
                (action.microbatch or 0 for row in rows for action in row), default=0
            )
        devices = _find_placement(name, rows) if placement is None else placement
        return cls(name, tuple(devices), microbatches, tuple(rows))

    def to_text(self) -> str:
        """Write a header line, and a line of actions per device, `-` if it has none."""
        head = f"{self.name}: {self.microbatches} microbatches, stages on devices {' '.join(map(str, self.placement))}"
        return "\n".join([head, *(" ".join(map(str, row)) or "-" for row in self.rows)])

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Parse the result of `to_text`; surrounding blanks and blank lines are ignored."""
        head, *lines = [*filter(None, map(str.strip, text.splitlines()))] or [""]
        match = re.fullmatch(r"(.*): (\d+) microbatches, stages on devices ([\d ]+)", head)
        if not match:
            raise ScheduleError(
                f'A schedule must begin with "name: 8 microbatches, stages on devices 0 1 2 3"; got "{head}".'
            )
        name, microbatches, placement = match.groups()
        csv = "\n".join("" if line == "-" else ",".join(line.split()) for line in lines)
        devices = map(int, placement.split())
        return cls.from_csv(
            f"{csv}\n", name=name, placement=devices, microbatches=int(microbatches)
        )


def _find_placement(name: str, rows: Sequence[Sequence[Action]]) -> list[int]:
    """Find the device of each stage: the one that has its actions."""
    stages = 1 + max((action.stage for row in rows for action in row), default=-1)
    devices: list[set[int]] = [set() for _ in range(stages)]
    for device, row in enumerate(rows):
        for action in row:
            devices[action.stage].add(device)
    errors = [
        f"stage {stage} on {sorted(numbers) or 'none'}"
        for stage, numbers in enumerate(devices)
        if len(numbers) != 1
    ]
    if errors:
        raise ScheduleError(
            f"{name}: each stage must be on one device; got {', '.join(errors)}. Give placement=."
        )
    return [device for (device,) in devices]
