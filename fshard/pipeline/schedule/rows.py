"""The data of a schedule: a placement of stages, and a row of actions for each device.

    placement   0 1                     the device of each stage
    rows        0F0 0F1 0B0 0B1         the actions of device 0, first to last
                1F0 1B0 1F1 1B1         the actions of device 1

A schedule contains no times: a device runs the next action of its row as soon as the inputs of that
action are available.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Self

from fshard.errors import ScheduleError
from fshard.pipeline.schedule.actions import UNITS, Action

_OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_HEADER = re.compile(r"(.*): (\d+) microbatches, stages on devices ([\d ]+)")


@dataclass(frozen=True)
class ScheduleRows:
    """The data of a `Schedule`, which describes the fields."""

    name: str
    placement: tuple[int, ...]
    microbatches: int
    rows: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        # Lists may be given; a schedule is hashed, so it has tuples.
        object.__setattr__(self, "placement", tuple(self.placement))
        object.__setattr__(self, "rows", tuple(map(tuple, self.rows)))
        errors = list(self._errors())
        if errors:
            raise ScheduleError(f"{self.name}: {'; '.join(errors)}.")

    def _errors(self) -> Iterator[str]:
        if self.microbatches < 1:
            yield f"microbatches must be at least 1; got {self.microbatches}"
        yield from self._placement_errors()
        yield from self._action_errors()

    def _placement_errors(self) -> Iterator[str]:
        if not self.placement:
            yield "placement must have at least one stage"

        misplaced: list[str] = []
        for stage, device in enumerate(self.placement):
            if not 0 <= device < self.devices:
                misplaced.append(f"stage {stage} on device {device}")
        if misplaced:
            yield (
                f"placement must be on the {self.devices} devices that have rows; "
                f"got {', '.join(misplaced)}"
            )

    def _action_errors(self) -> Iterator[str]:
        entries = list(chain(*self.rows))
        others = [repr(entry) for entry in entries if not isinstance(entry, Action)]
        if others:
            yield f"rows must consist of Actions; got {', '.join(others)}"
            return

        actions = set(entries)
        unknown = [str(action) for action in actions if not 0 <= action.stage < self.stages]
        if unknown:
            yield f"actions must be of stages below {self.stages}; got {', '.join(sorted(unknown))}"

        misnumbered: list[str] = []
        for action in actions:
            is_numbered = action.microbatch is not None
            if is_numbered == (action.kind in UNITS):
                misnumbered.append(str(action))
        if misnumbered:
            yield (
                f"actions must have one microbatch, and {', '.join(sorted(UNITS))} none; "
                f"got {', '.join(sorted(misnumbered))}"
            )

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
        rows: list[list[Action]] = []
        for row in self.rows:
            rows.append([action for action in row if action.kind not in kinds])
        return self.with_rows(rows)

    def crosses(self, stage: int, step: int) -> bool:
        """Return True if the stage `step` after (or before) this one exists on another device."""
        neighbour = stage + step
        exists = 0 <= neighbour < self.stages
        return exists and self.placement[neighbour] != self.placement[stage]

    def to_csv(self) -> str:
        """Write a row of cells per device, in the format of torch.distributed.pipelining.

        A schedule without messages has torch's "compute_only" format. One with messages has the
        "compute_comms" format, in which torch scales and reduces gradients only at REDUCE_GRAD.
        """
        lines = [",".join(map(str, row)) + "\n" for row in self.rows]
        return "".join(lines)

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

        Empty cells, where a device of torch's is idle, are skipped. A cell such as
        `(0F4;3B1)OVERLAP_F_B` is read as two actions, one after the other, as torch runs it.

        Args:
            text: the rows.
            name: of the schedule.
            placement: the device of each stage; default: the device that has its actions.
            microbatches: their number; default: as many as occur.
        """
        text = _OVERLAPPED.sub(lambda cell: cell[1].replace(";", ","), text)
        rows: list[tuple[Action, ...]] = []
        for line in text.splitlines():
            cells = [cell.strip() for cell in line.split(",")]
            rows.append(tuple([Action.parse(cell) for cell in cells if cell]))

        if microbatches is None:
            numbers = [action.microbatch or 0 for action in chain(*rows)]
            microbatches = 1 + max(numbers, default=0)
        devices = _find_placement(name, rows) if placement is None else placement
        return cls(name, tuple(devices), microbatches, tuple(rows))

    def to_text(self) -> str:
        """Write a header line, and a line of actions per device, `-` if it has none."""
        placement = " ".join(map(str, self.placement))
        header = f"{self.name}: {self.microbatches} microbatches, stages on devices {placement}"
        lines = [" ".join(map(str, row)) or "-" for row in self.rows]
        return "\n".join([header, *lines])

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Parse the result of `to_text`; surrounding blanks and blank lines are ignored."""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        header = lines.pop(0) if lines else ""
        match = _HEADER.fullmatch(header)
        if match is None:
            raise ScheduleError(
                'A schedule must begin with "name: 8 microbatches, stages on devices 0 1 2 3"; '
                f'got "{header}".'
            )
        name, microbatches, placement = match.groups()

        csv = ""
        for line in lines:
            cells = "" if line == "-" else ",".join(line.split())
            csv += f"{cells}\n"
        devices = map(int, placement.split())
        return cls.from_csv(csv, name=name, placement=devices, microbatches=int(microbatches))


def _find_placement(name: str, rows: Sequence[Sequence[Action]]) -> list[int]:
    """Find the device of each stage: the one that has its actions."""
    numbers = [action.stage for action in chain(*rows)]
    stages = 1 + max(numbers, default=-1)
    devices: list[set[int]] = [set() for _ in range(stages)]
    for device, row in enumerate(rows):
        for action in row:
            devices[action.stage].add(device)

    errors: list[str] = []
    for stage, devices_of_stage in enumerate(devices):
        if len(devices_of_stage) != 1:
            errors.append(f"stage {stage} on {sorted(devices_of_stage) or 'none'}")
    if errors:
        raise ScheduleError(
            f"{name}: each stage must be on one device; got {', '.join(errors)}. Give placement=."
        )
    return [device for (device,) in devices]
