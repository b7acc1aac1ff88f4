"""`recorded_plan`: what a page shows of the collectives that a program of torch has called.

There are no seconds: the calls of a rank follow one another on its lane, each one call long.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from fshard.torch_collectives import RecordedCall, Recording


class RecordedRow(NamedTuple):
    """Calls of a ledger that are alike."""

    collective: str
    axes: tuple[str, ...]
    line: str


def recorded_plan(recording: Recording) -> dict[str, Any]:
    """Return the document of a recording, with the fields of a plan's."""
    rows: dict[RecordedRow, int] = {}
    names: dict[str, int] = {}
    devices: list[dict[str, Any]] = []
    for rank, calls in enumerate(recording.ranks):
        devices.append(_device(rank, calls, recording, rows, names))

    axes = [[name, size] for name, size in recording.axes.items()]
    mesh = " × ".join([f"{name} {size}" for name, size in axes])
    program = recording.program or "a program"
    longest = max([len(calls) for calls in recording.ranks])
    facts = {
        "program": program,
        "layout": mesh,
        "recorded": f"collectives of {prod(recording.axes.values()):,} ranks",
    }
    if recording.mismatch():
        facts["differs"] = recording.mismatch()
    return {
        "title": f"{program} on {len(recording.ranks):,} ranks",
        "facts": facts,
        "others": [],
        "tried": 0,
        "mesh": mesh,
        "axes": axes,
        "stage": None,
        "capacity": 0,
        # The page's length of a plan's time is here the number of calls.
        "numbers": {"calls": longest, "sent": max([device["sent"] for device in devices])},
        "length": max(longest, 1),
        "devices": devices,
        "rows": _ledger(rows, recording),
        "leaves": [],
        "layouts": [],
        "names": [*names],
    }


def _device(
    rank: int,
    calls: Sequence[RecordedCall],
    recording: Recording,
    rows: dict[RecordedRow, int],
    names: dict[str, int],
) -> dict[str, Any]:
    """Return the calls of a rank on lanes by axis, with the fields of `DrawnEvent`."""
    lanes: dict[str, int] = {"lines": 0}
    lines: list[list[Any]] = []
    events: list[list[Any]] = []
    for number, call in enumerate(calls):
        axes = recording.axes_of(call.group)
        lane = lanes.setdefault(f"network: {'+'.join(axes)}", len(lanes))
        row = rows.setdefault(RecordedRow(call.collective, axes, call.line), len(rows))
        name = names.setdefault(call.collective, len(names))
        line = names.setdefault(call.line, len(names))
        events.append([lane, number, number + 1, 1, name, call.sent, 0, 1, row, line])
        # Neighbours of one line of the program are one bar of the first lane.
        if lines and lines[-1][4] == line:
            lines[-1][2] = number + 1
            lines[-1][3] += 1
            lines[-1][5] += call.sent
            lines[-1][7] += 1
        else:
            lines.append([0, number, number + 1, 1, line, call.sent, 0, 1, -1, line])
    return {
        "number": rank,
        "sent": sum([call.sent for call in calls]),
        "peak": 0,
        "holders": [],
        "purposes": {},
        "lanes": [*lanes],
        "events": lines + events,
        "memory": [],
    }


def _ledger(rows: dict[RecordedRow, int], recording: Recording) -> list[dict[str, Any]]:
    """Return the rows with the most calls and bytes of any rank."""
    most: dict[RecordedRow, list[float]] = {row: [0, 0] for row in rows}
    for calls in recording.ranks:
        of_rank: dict[RecordedRow, list[float]] = {}
        for call in calls:
            row = RecordedRow(call.collective, recording.axes_of(call.group), call.line)
            sums = of_rank.setdefault(row, [0, 0])
            sums[0] += 1
            sums[1] += call.sent
        for row, sums in of_rank.items():
            most[row] = [max(*pair) for pair in zip(most[row], sums, strict=True)]
    ledger: list[dict[str, Any]] = []
    for row, (count, sent) in most.items():
        ledger.append(
            {
                "collective": row.collective,
                "axes": row.axes,
                "calls": count,
                "sent": sent,
                "site": row.line,
                "units": "",
            }
        )
    return ledger
