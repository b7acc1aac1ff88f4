"""`page`: the cost of a step as one HTML file, which needs no network and no server.

    report ─> `document`: numbers, devices, ledger, leaves ─> JSON in page.html ─> page.js draws it

Neighbours on a lane that are thinner than a bin of the timeline are merged, so each device of the report has at most some
thousand events. Other devices do what the device of their stage does.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from html import escape
from importlib.resources import files
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor

from fshard.explore.palette import fill
from fshard.mesh.layout import Mesh, P, arithmetic
from fshard.mesh.layout.sharded import Sharded, typeof
from fshard.mesh.layout.tree import flatten_with_paths

if TYPE_CHECKING:
    from fshard.plan.cost import Cost, DeviceCost

EVENTS, BINS = 3000, 1500
"""Events of a device above which thin ones are merged, and the bins of a timeline."""


def page(
    report: Cost, path: str | Path | None = None, *, compare: Cost | None = None
) -> Path | str:
    """Write the cost of a step as one HTML file: mesh, timeline, memory, ledger and leaves. It needs no network.

    Args:
        report: of `fs.plan.cost`.
        path: of the file; None returns the text of the page.
        compare: a second report, which is shown side by side on the same scale of time.

    Returns:
        The path, or the text.
    """
    style, script, text = [
        (files("fshard.explore") / f"page.{kind}").read_text("utf-8")
        for kind in ("css", "js", "html")
    ]
    title = f"A step on {report.mesh.size:,} × {report.cluster.name}"
    data = json.dumps(document(report, compare), separators=(",", ":")).replace("<", "\\u003c")
    values = {"title": escape(title), "style": style, "script": script, "data": data}
    text = re.sub(r"\{(title|style|script|data)\}", lambda match: values[match[1]], text)
    if path is None:
        return text
    Path(path).write_text(text, encoding="utf-8")
    return Path(path)


def framed(report: Cost) -> dict[str, str]:
    """Return the page for a notebook: in a frame, so it needs no package of widgets; and its table as text."""
    frame = f'<iframe srcdoc="{escape(str(page(report)))}" style="width:100%;height:900px;border:0"></iframe>'
    return {"text/html": frame, "text/plain": str(report)}


def is_report(x: object) -> TypeGuard[Cost]:
    """Return True for the cost of a step. `fshard.plan` is never imported: for a report it is loaded."""
    module: Any = sys.modules.get("fshard.plan.cost")
    return module is not None and isinstance(x, module.Cost)


def document(report: Cost, compare: Cost | None = None) -> dict[str, Any]:
    """Return all that a page shows, of one report or of two."""
    from fshard.plan.trace import PURPOSES

    plans = [_plan(each) for each in (report, compare) if each is not None]
    return {"purposes": PURPOSES, "fills": [fill(shard) for shard in range(11)], "plans": plans}


def _plan(report: Cost) -> dict[str, Any]:
    mesh, times, names, layouts = report.mesh, report.times, Numbering(), Numbering()
    rows, staged_devices = report.comm.rows(), [*report.devices]
    row_numbers = {row: number for number, (row, _, _) in enumerate(rows)}
    staged = [
        staged_devices == [mesh.index({axis: index}) for index in range(size)]
        for axis, size in mesh.axes
    ]
    numbers = {
        "seconds": report.seconds,
        "peak": report.peak(),
        "utilization": report.utilization(),
    }
    numbers |= {"sent": float(report.sent()), "exposed": sum(times.exposed.values())}
    numbers |= {"idle": times.idle, "compute": times.compute}
    return {
        "mesh": str(mesh).partition(";")[0] + ")",
        "axes": mesh.axes,
        "stage": staged.index(True)
        if len(staged_devices) > 1
        else None,  # the axis along which devices differ
        "capacity": report.cluster.memory,
        "numbers": numbers,
        "devices": [
            _device(number, device, names, row_numbers) for number, device in report.devices.items()
        ],
        "rows": [
            {
                "collective": row.collective,
                "axes": row.axes,
                "calls": calls,
                "sent": float(sent),
                "site": str(row.site),
            }
            for row, calls, sent in rows
        ],
        "leaves": [*_leaves(report.arguments, layouts)],
        "layouts": [_shards(mesh, *layout) for layout in layouts],
        "names": [*names],
    }


class Numbering(dict[Any, int]):
    """The number of each text or layout, in order of occurrence."""

    def __missing__(self, key: Any) -> int:
        self[key] = len(self)
        return self[key]


# -- devices -------------------------------------------------------------------------------------------------------------


def _device(
    number: int, device: DeviceCost, names: Numbering, rows: Mapping[Any, int]
) -> dict[str, Any]:
    """Return the memory and the timeline of a device.

    An event is [lane, start, end, seconds, name, bytes, flops, calls, row of the ledger, unit]. Those of lane 0 are units.
    """
    lanes, timed, width = Numbering(units=0), device.times.timed, device.times.step / BINS or 1.0
    events, units = list[list[Any]](), list[list[Any]]()
    highest = dict[int, tuple[float, ...]]()  # of each bin of time the sample with the most bytes
    for (lane, event, start, end), unit in zip(timed, _units(device), strict=True):
        name, size, flops, row = _fields(event, rows)
        events.append(
            [lanes[lane], start, end, end - start, names[name], size, flops, 1, row, names[unit]]
        )
        if lane == "compute":
            units.append([0, *events[-1][1:4], names[unit], *events[-1][5:]])
        memory, number_of_bin = getattr(event, "memory", ()), int(end / width)
        if memory and sum(memory) >= sum(highest.get(number_of_bin, (0.0,))[1:]):
            highest[number_of_bin] = end, *memory
    merged = [
        *_merged(units, float("inf")),
        *_merged(events, width if len(events) > EVENTS else 0.0),
    ]
    return {
        "number": number,
        "peak": device.used.peak(),
        "holders": [
            [size, purpose, str(site)] for size, purpose, site in device.used.holders()[:12]
        ],
        "lanes": [*lanes],
        "events": [
            [float(f"{x:.9g}") if isinstance(x, float) else x for x in event] for event in merged
        ],
        "memory": [*highest.values()],
    }


def _fields(event: Any, rows: Mapping[Any, int]) -> tuple[str, float, int, int]:
    """Return the name of an event, its bytes, operations, and row of the ledger (-1: none)."""
    from fshard.plan.trace import CollectiveStart, Copy, MessageSend

    match event:
        case CollectiveStart():
            return event.row.collective, event.sent, 0, rows[event.row]
        case MessageSend():
            sends = [number for row, number in rows.items() if row.collective == "send"]
            return f"send to device {event.to}", event.sent, 0, sends[0]
        case Copy():
            return f"{event.source} to {event.target}", event.size, 0, -1
        case _:
            return event.name, event.traffic, event.flops, -1


def _units(device: DeviceCost) -> list[str]:
    """Return the unit of each timed event.

    Note [Units of a timeline]
    A unit's mark is the start of its all-gather, which may be ahead of its use. If as many all-gathers along some axes start
    as there are marks, each belongs to the mark of its number, and its unit is used from the wait for it. As many
    reductions as there are units have the reverse order of the units. Collectives that match neither have no unit.
    """
    from fshard.plan.trace import CollectiveStart, CollectiveWait, MessageWait, Operation

    marks = [mark.name for mark in device.used.timeline if mark.name not in ("begin", "update")]
    backward, calls, unit_of = (
        [*dict.fromkeys(marks)][::-1],
        defaultdict[Any, list[int]](list),
        dict[int, str](),
    )
    for index, event in enumerate(device.events):
        if isinstance(event, CollectiveStart) and (
            event.is_started or event.row.collective != "all_gather"
        ):
            calls[event.row.collective, event.row.axes].append(index)
    for (collective, _), indices in calls.items():
        order = (
            marks
            if collective == "all_gather"
            else backward
            if collective.startswith("psum")
            else ()
        )
        if len(order) == len(indices):
            unit_of |= dict(zip(indices, order, strict=True))
    gathers = {
        index for (name, _), indices in calls.items() if name == "all_gather" for index in indices
    } & {*unit_of}
    units, unit = list[str](), "begin"
    for index, event in enumerate(device.events):
        if isinstance(event, Operation):
            unit = unit if gathers and event.unit not in ("begin", "update") else event.unit
            units.append(unit)
        elif isinstance(event, CollectiveWait):
            unit = unit_of[event.start] if event.start in gathers else unit
        elif not isinstance(event, MessageWait):
            units.append(unit_of.get(index, ""))
    return units


def _merged(events: Sequence[list[Any]], width: float) -> list[list[Any]]:
    """Merge neighbours on a lane with one row and one unit up to a width; the longest names them."""
    merged, last, longest = list[list[Any]](), dict[int, list[Any]](), dict[int, float]()
    for event in events:
        lane, _, end, seconds, name = event[:5]
        group = last.get(lane)
        if group is None or end - group[1] >= width or group[8:] != event[8:]:
            last[lane], longest[lane] = [*event], seconds
            merged.append(last[lane])
            continue
        if seconds > longest[lane]:
            group[4], longest[lane] = name, seconds
        group[2] = end
        for field in (3, 5, 6, 7):
            group[field] += event[field]
    return merged


# -- leaves --------------------------------------------------------------------------------------------------------------


def _leaves(arguments: Sequence[Any], layouts: Numbering) -> Iterator[dict[str, Any]]:
    """Yield the tensors of a step's arguments; those without a layout are sharded by the step."""
    roles = ["params", "state", *["buffers"] * (len(arguments) - 3), "batch"]
    for role, tree in zip(roles, arguments, strict=True):
        for path, x in zip(*flatten_with_paths(tree)[:2], strict=True):
            if isinstance(x, Sharded | Tensor):
                leaf = {
                    "path": role + re.sub(r'\["([^"]*)"\]', r".\1", path),
                    "type": str(typeof(x)),
                }
                leaf |= {
                    "item": x.dtype.itemsize,
                    "bytes": prod(x.shape) * x.dtype.itemsize,
                    "unit": "",
                    "layout": -1,
                }
                if isinstance(x, Sharded):
                    leaf |= {"unit": x.layout.unit or "", "layout": layouts[x.layout.spec, x.shape]}
                yield leaf


def _shards(mesh: Mesh, spec: P, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return the axes that shard a leaf, the coordinates of the devices that have any of it, and the local shapes."""
    number = mesh.axis_names.index
    axes, place = sorted(map(number, spec.split_axes)), spec.coordinates(mesh.shape).items()
    shapes = _local_shapes(
        mesh, spec.replace(at={}, shape=None), shape, tuple(axes)
    )  # stages have equal shards
    return {
        "axes": axes,
        "place": [[number(axis), index] for axis, index in place],
        "shapes": shapes,
    }


@lru_cache(maxsize=256)
def _local_shapes(
    mesh: Mesh, spec: P, shape: tuple[int, ...], axes: Sequence[int]
) -> list[list[Any]]:
    """Return runs of equal local shapes, [count, shape]. Shards are numbered along their axes in the order of the mesh."""
    split, runs = [mesh.axes[axis] for axis in axes], list[list[Any]]()
    for shard in range(prod(size for _, size in split)):
        index = arithmetic.unravel(shard, [size for _, size in split])
        coordinates = dict.fromkeys(mesh.axis_names, 0) | dict(
            zip([axis for axis, _ in split], index, strict=True)
        )
        local = spec.local_shape(shape, mesh.shape, coordinates)
        if not runs or runs[-1][1] != local:
            runs.append([0, local])
        runs[-1][0] += 1
    return runs
