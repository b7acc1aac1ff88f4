"""`page`: the cost of a step as one HTML file, which needs no network and no server.

    report ─> plan_of: numbers, devices, ledger, leaves ─> JSON in page.html ─> page.js draws it

Events that are thinner than a bin of the timeline are merged, so a page has some thousand events for each device. Devices
without events of their own do what the device of their stage does: a page of 16,384 devices has those of its stages.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fshard.explore.palette import fill
from fshard.mesh.layout import Layout, Mesh, arithmetic
from fshard.mesh.layout.sharded import Sharded, typeof
from fshard.mesh.layout.tree import flatten_with_paths

if TYPE_CHECKING:  # explore is below plan but for its types
    from fshard.plan.cost import Cost, DeviceCost

EVENTS, BINS = 3000, 1500
"""Events of a device above which thin ones are merged, and the bins of a timeline."""
_REDUCTIONS = ("psum_scatter", "psum")


def page(report: Cost, path: str | Path | None = None, *, compare: Cost | None = None) -> Path | str:
    """Write the cost of a step as one HTML file: mesh, timeline, memory, ledger and leaves. It needs no network.

    Args:
        report: of `fs.plan.cost`.
        path: of the file. None to return the text of the page.
        compare: a second report, which is shown side by side on the same scale of time.

    Returns:
        The path, or the text.
    """
    texts = {name: (files("fshard.explore") / name).read_text("utf-8") for name in ("page.html", "page.css", "page.js")}
    data = json.dumps(document(report, compare), separators=(",", ":")).replace("</", "<\\/")
    title = f"A step on {report.mesh.size:,} × {report.cluster.name}"
    filled = {"{title}": escape(title), "{style}": texts["page.css"], "{script}": texts["page.js"], "{data}": data}
    text = re.sub("|".join(map(re.escape, filled)), lambda match: filled[match[0]], texts["page.html"])
    if path is None:
        return text
    path = Path(path)
    path.write_text(text, encoding="utf-8")
    return path


def document(report: Cost, compare: Cost | None = None) -> dict[str, Any]:
    """Return all that a page shows, of one report or of two."""
    from fshard.plan.trace import PURPOSES

    plans = [plan_of(each) for each in (report, compare) if each is not None]
    return {"purposes": PURPOSES, "fills": [fill(shard) for shard in range(11)], "plans": plans}


def plan_of(report: Cost) -> dict[str, Any]:
    """Return the numbers of a report, its devices, its ledger and its leaves."""
    mesh, times = report.mesh, report.times
    rows = report.comm.rows()
    names = Numbering()
    layouts = LayoutTable(mesh)
    number_of_row = {row: number for number, (row, _, _) in enumerate(rows)}
    return {
        "mesh": str(mesh).partition(";")[0] + ")",
        "axes": mesh.axes,
        "stage": _stage_axis(report),
        "cluster": report.cluster.name,
        "capacity": report.cluster.memory,
        "numbers": {
            "seconds": report.seconds,
            "peak": report.peak(),
            "utilization": report.utilization(),
            "flops": report.flops(),
            "traffic": report.traffic(),
            "sent": float(report.sent()),
            "compute": times.compute,
            "network": sum(times.network.values()),
            "exposed": sum(times.exposed.values()),
            "idle": times.idle,
            "copies": times.copies,
        },
        "devices": [_device(number, each, names, number_of_row) for number, each in report.devices.items()],
        "rows": [
            [row.collective, row.axes, calls, float(sent), f"{row.site}{row.site.given}"] for row, calls, sent in rows
        ],
        "leaves": [*_leaves(report.arguments, layouts)],
        "layouts": layouts.rows,
        "names": [*names],
    }


def _stage_axis(report: Cost) -> int | None:
    """Return the number of the axis along which the devices of a report differ, None if one does what all do."""
    mesh, numbers = report.mesh, [*report.devices]
    if len(numbers) == 1:
        return None
    return next(
        number
        for number, (axis, size) in enumerate(mesh.axes)
        if numbers == [mesh.index({axis: index}) for index in range(size)]
    )


class Numbering(dict[str, int]):
    """The number of each text, in order of occurrence."""

    def __missing__(self, text: str) -> int:
        self[text] = len(self)
        return self[text]


# -- devices -------------------------------------------------------------------------------------------------------------


def _device(number: int, device: DeviceCost, names: Numbering, rows: dict[Any, int]) -> dict[str, Any]:
    """Return the memory and the timeline of a device.

    An event is [lane, start, end, seconds, name, bytes, flops, calls, row of the ledger, unit]; thin ones are merged.
    """
    from fshard.plan.trace import Operation

    timed = device.times.timed
    units = _units(device)
    lanes = Numbering()
    events = [
        [lanes[lane], start, end, end - start, *_fields(event, names, rows), names[unit]]
        for (lane, event, start, end), unit in zip(timed, units, strict=True)
    ]
    memory = [(end, event.memory) for _, event, _, end in timed if isinstance(event, Operation) and event.memory]
    return {
        "number": number,
        "peak": device.used.peak(),
        "seconds": device.times.step,
        "holders": [[size, purpose, str(site)] for size, purpose, site in device.used.holders()[:12]],
        "lanes": [*lanes],
        "events": _rounded(_merged(events, device.times.step / BINS) if len(events) > EVENTS else events),
        "units": _rounded(_spans(events, lanes["compute"])),
        "memory": _rounded([[end, *values] for end, values in _highest(memory, device.times.step / BINS)]),
    }


def _fields(event: Any, names: Numbering, rows: dict[Any, int]) -> tuple[int, float, int, int, int]:
    """Return the name of an event, its bytes, operations, calls and row of the ledger (-1: none)."""
    from fshard.plan.trace import CollectiveStart, Copy, MessageSend

    match event:
        case CollectiveStart():
            return names[event.row.collective], event.sent, 0, 1, rows[event.row]
        case MessageSend():
            row = next((number for row, number in rows.items() if row.collective == "send"), -1)
            return names[f"send to device {event.to}"], event.sent, 0, 1, row
        case Copy():
            return names[f"copy {event.source} to {event.target}"], event.size, 0, 1, -1
        case _:
            return names[event.name], event.traffic, event.flops, 1, -1


def _units(device: DeviceCost) -> list[str]:
    """Return the unit of each timed event.

    Note [Units of a timeline]
    A unit's mark is where its all-gather starts, which may be ahead of its use. If as many all-gathers along some axes
    start as there are marks, each belongs to the mark of its number, and a unit is used from the wait for its own.
    Reductions of as many calls as there are units are in the reverse order of their first use.
    """
    from fshard.plan.trace import CollectiveStart, CollectiveWait, MessageWait, Operation

    marks = [mark.name for mark in device.used.timeline if mark.name not in ("begin", "update")]
    first_used = [*dict.fromkeys(marks)]
    calls = defaultdict[tuple[str, tuple[str, ...]], list[int]](list)
    for index, event in enumerate(device.events):
        if isinstance(event, CollectiveStart):
            calls[event.row.collective, event.row.axes].append(index)
    of_collective = dict[int, str]()
    for (collective, _), indices in calls.items():
        if collective == "all_gather" and len(indices) == len(marks):
            of_collective |= dict(zip(indices, marks, strict=True))
    has_gathers = bool(of_collective)
    for (collective, _), indices in calls.items():
        if collective in _REDUCTIONS and len(indices) == len(first_used):
            of_collective |= dict(zip(indices, reversed(first_used), strict=True))
    units, unit = list[str](), "begin"
    for index, event in enumerate(device.events):
        match event:
            case Operation():
                unit = event.unit if event.unit in ("begin", "update") or not has_gathers else unit
                units.append(unit)
            case CollectiveWait():
                collective = device.events[event.start]
                assert isinstance(collective, CollectiveStart)
                if collective.row.collective == "all_gather":
                    unit = of_collective.get(event.start, unit)
            case MessageWait():
                pass
            case _:
                units.append(of_collective.get(index, unit if isinstance(event, CollectiveStart) else ""))
    return units


def _merged(events: Sequence[list[Any]], width: float) -> list[list[Any]]:
    """Return events, of which thin neighbours on a lane, with one unit and one row, are one; the longest names them."""
    merged, last = list[list[Any]](), dict[int, list[Any]]()
    longest = dict[int, float]()
    for event in events:
        lane, start, end, seconds, name, size, flops, calls, row, unit = event
        group = last.get(lane)
        is_thin = group is not None and end - group[1] < width and group[8:] == [row, unit]
        if group is None or not is_thin:
            last[lane], longest[lane] = [*event], seconds
            merged.append(last[lane])
            continue
        if seconds > longest[lane]:
            group[4], longest[lane] = name, seconds
        group[2] = end
        for number, value in ((3, seconds), (5, size), (6, flops), (7, calls)):
            group[number] += value
    return merged


def _spans(events: Sequence[list[Any]], lane: int) -> list[list[Any]]:
    """Return [unit, start, end] of consecutive operations of one unit."""
    spans = list[list[Any]]()
    for event in events:
        if event[0] == lane and spans and spans[-1][0] == event[9]:
            spans[-1][2] = event[2]
        elif event[0] == lane:
            spans.append([event[9], event[1], event[2]])
    return spans


def _highest(memory: Sequence[tuple[float, tuple[int, ...]]], width: float) -> list[tuple[float, tuple[int, ...]]]:
    """Return the sample of each bin of time with the most bytes."""
    bins = dict[int, tuple[float, tuple[int, ...]]]()
    for end, values in memory:
        number = int(end / width) if width else 0
        if number not in bins or sum(values) > sum(bins[number][1]):
            bins[number] = end, values
    return [*bins.values()]


def _rounded(rows: Sequence[list[Any]]) -> list[list[Any]]:
    """Return rows of numbers, fractions with nine digits."""
    return [[float(f"{x:.9g}") if isinstance(x, float) else x for x in row] for row in rows]


# -- leaves --------------------------------------------------------------------------------------------------------------


class LayoutTable:
    """The shards of layouts, each written once: rows of [axes, coordinates of the devices that have any, local shapes].

    Shards are numbered along `axes`, those that shard a leaf, in the order of the mesh. Local shapes are runs of equal
    ones: [count, shape].
    """

    def __init__(self, mesh: Mesh) -> None:
        self.rows: list[list[Any]] = []
        self._mesh = mesh
        self._numbers: dict[Any, int] = {}
        self._runs: dict[Any, list[list[Any]]] = {}

    def number(self, layout: Layout, shape: tuple[int, ...]) -> int:
        """Return the row of a layout of a tensor."""
        key = shape, layout.spec
        if key not in self._numbers:
            self._numbers[key] = len(self.rows)
            axes = [axis for axis in self._mesh.axis_names if axis in layout.spec.split_axes]
            numbers = {axis: number for number, axis in enumerate(self._mesh.axis_names)}
            place = [[numbers[axis], index] for axis, index in layout.place.items()]
            self.rows.append([[numbers[axis] for axis in axes], place, self._local_shapes(layout, shape, axes)])
        return self._numbers[key]

    def _local_shapes(self, layout: Layout, shape: tuple[int, ...], axes: Sequence[str]) -> list[list[Any]]:
        spec, sizes = layout.spec, [self._mesh.shape[axis] for axis in axes]
        key = shape, spec.entries, spec.flat_axes, tuple(axes)
        if key not in self._runs:
            runs = self._runs[key] = []
            first = dict.fromkeys(self._mesh.axis_names, 0) | layout.place
            for shard in range(prod(sizes)):
                coordinates = first | dict(zip(axes, arithmetic.unravel(shard, sizes), strict=True))
                local = spec.local_shape(shape, self._mesh.shape, coordinates)
                if runs and runs[-1][1] == local:
                    runs[-1][0] += 1
                else:
                    runs.append([1, local])
        return self._runs[key]


def _leaves(arguments: Sequence[Any], layouts: LayoutTable) -> Iterator[list[Any]]:
    """Yield [path, type, bytes of an element, elements, memory, unit, row of the layout] of each tensor (-1: no layout)."""
    roles = ["params", "state", *["buffers"] * (len(arguments) - 3), "batch"]
    for role, tree in zip(roles, arguments, strict=True):
        for path, x in zip(*flatten_with_paths(tree)[:2], strict=True):
            name = role + re.sub(r'\["([^"]*)"\]', r".\1", path)
            if isinstance(x, Sharded):
                number, unit = layouts.number(x.layout, x.shape), str(x.layout.unit or "")
                yield [name, str(typeof(x)), x.dtype.itemsize, prod(x.shape), x.layout.memory, unit, number]
            elif isinstance(x, Tensor):
                yield [name, str(typeof(x)), x.dtype.itemsize, x.numel(), "", "", -1]
