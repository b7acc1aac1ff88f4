"""`page`: the cost of a step as one HTML file, which needs no network and no server.

    report ─> `document`: numbers, devices, ledger, leaves ─> JSON in page.html ─> page.js draws it
    window.js gives page.js the window; `bundled` makes one module of the two
    recording of another program ─> the same, of calls in order instead of seconds

Neighbours on a lane that are thinner than a bin of the timeline are merged, so each device of the
report has at most some thousand events. Other devices do what the device of their stage does.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from html import escape
from importlib.resources import files
from math import inf, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor

from fshard.errors import PlanError
from fshard.explore.described import DescribedPlan
from fshard.explore.palette import COMPUTE, COPIES, MESSAGES, NETWORKS, PURPOSE_FILLS, fill
from fshard.explore.recorded import recorded_plan
from fshard.mesh.layout import Mesh, P, arithmetic
from fshard.mesh.layout.sharded import Sharded, typeof
from fshard.mesh.layout.tree import flatten_with_paths, path_text
from fshard.source import Site
from fshard.torch_collectives import Recording

if TYPE_CHECKING:
    from fshard.plan.cost import Cost, DeviceCost

EVENTS = 3000
"""Events of a device above which thin ones are merged."""

BINS = 1500
"""The bins of a timeline: about the pixels of its width."""

_HOLDERS = 12
"""The largest holders of memory at the peak that are listed."""


def page(
    report: Cost | DescribedPlan | Recording,
    path: str | Path | None = None,
    *,
    compare: Cost | DescribedPlan | Recording | None = None,
) -> Path | str:
    """Write the cost of a step as one HTML file: mesh, timeline, memory, ledger and leaves.

    Args:
        report: of `fs.plan.cost`; or a plan with its cost, from `describe`, so that the page has
            the plan's facts too; or the `Recording` of a program of torch.distributed.
        path: of the file; None returns the text of the page.
        compare: a second one, which is shown beside the first, with what differs.

    Returns:
        The path, or the text.
    """
    content = document(report, compare)
    data = json.dumps(content, separators=(",", ":"))
    titles = [plan["title"] for plan in content["plans"]]
    values = {
        "title": escape(" and ".join(dict.fromkeys(titles))),
        "style": resource("fshard.explore", "page.css"),
        "script": bundled("fshard.explore", "window.js"),
        "data": data.replace("<", "\\u003c"),  # a "</script>" in a text would end the data
    }
    # In one pass: a value may contain what reads like the name of another one.
    names = re.compile(r"\{(title|style|script|data)\}")
    text = names.sub(lambda match: values[match[1]], resource("fshard.explore", "page.html"))
    if path is None:
        return text
    Path(path).write_text(text, encoding="utf-8")
    return Path(path)


def resource(package: str, name: str) -> str:
    """Return the text of a file of a package."""
    return (files(package) / name).read_text("utf-8")


_IMPORT = re.compile(r'^import [^"]* from "(\.[^"]*)/([\w.]+)";\n', re.MULTILINE)
_PACKAGES = {".": "", "../explore": "fshard.explore"}


def bundled(package: str, name: str) -> str:
    """Return a module of JavaScript as one text, which a page without a network can have.

    The first import of each module is replaced by the text of the module, later ones by nothing.
    So two modules may not have equal names: the browser refuses to read them.

    Args:
        package: of the module.
        name: of its file. It imports from "./" or "../explore/".
    """
    included: set[tuple[str, str]] = set()

    def text_of(package: str, name: str) -> str:
        if (package, name) in included:
            return ""
        included.add((package, name))
        return _IMPORT.sub(
            lambda match: text_of(_PACKAGES[match[1]] or package, match[2]),
            resource(package, name),
        )

    return text_of(package, name)


def framed(report: Cost) -> dict[str, str]:
    """Return the page for a notebook, and its table as text.

    It is in a frame, so it needs no package of widgets.
    """
    style = "width:100%;height:900px;border:0"
    frame = f'<iframe srcdoc="{escape(str(page(report)))}" style="{style}"></iframe>'
    return {"text/html": frame, "text/plain": str(report)}


def is_report(x: object) -> TypeGuard[Cost]:
    """Return True for the cost of a step.

    `fshard.plan` is never imported: for a report it is loaded.
    """
    module: Any = sys.modules.get("fshard.plan.cost")
    return module is not None and isinstance(x, module.Cost)


def document(
    report: Cost | DescribedPlan | Recording,
    compare: Cost | DescribedPlan | Recording | None = None,
) -> dict[str, Any]:
    """Return all that a page shows, of one report or of two."""
    from fshard.plan.tables.summary import DEFINITION
    from fshard.plan.trace import PURPOSES

    shown = [report] if compare is None else [report, compare]
    are_recordings = {isinstance(each, Recording) for each in shown}
    if len(are_recordings) > 1:
        raise PlanError(
            "explore: both must be plans or both recordings; got one of each. Write two pages."
        )
    return {
        "clock": "calls" if isinstance(report, Recording) else "seconds",
        "mfu": DEFINITION,
        "purposes": PURPOSES,
        "fills": [fill(shard) for shard in range(11)],
        "colours": {
            "compute": COMPUTE,
            "networks": NETWORKS,
            "messages": MESSAGES,
            "copies": COPIES,
            "purposes": PURPOSE_FILLS,
        },
        "plans": [_shown(each) for each in shown],
    }


def _shown(each: Cost | DescribedPlan | Recording) -> dict[str, Any]:
    """Return what the page shows of a plan, a cost or a recording."""
    if isinstance(each, Recording):
        return recorded_plan(each)
    if isinstance(each, DescribedPlan):
        return _described(each)
    facts = {
        "layout": _mesh_text(each.mesh),
        "cluster": f"{each.mesh.size:,} × {each.cluster.name}",
    }
    title = f"A step on {each.mesh.size:,} × {each.cluster.name}"
    return {"title": title, "facts": facts, "others": [], "tried": 0, **_plan(each)}


def _described(described: DescribedPlan) -> dict[str, Any]:
    cost = described.cost
    plan = _plan(cost)
    numbers: dict[str, float] = {"seconds": cost.seconds}
    peak = cost.cluster.peak(described.dtype)
    numbers["mfu"] = described.flops / (cost.seconds * cost.mesh.size * peak)
    del plan["numbers"]["utilization"]  # one number of utilization on a page
    if described.tokens:
        numbers["tokens"] = described.tokens / cost.seconds
    facts = described.facts()
    name, _, _ = described.model.partition(",")
    return {
        **plan,
        "title": f"{name} on {cost.mesh.size:,} × {cost.cluster.name}",
        "facts": facts,
        "others": [*described.others],
        "tried": described.tried,
        "numbers": {**numbers, **plan["numbers"]},
    }


def _mesh_text(mesh: Mesh) -> str:
    return str(mesh).partition(";")[0] + ")"


class Numbering(dict[Any, int]):
    """The number of each text or layout, in order of occurrence."""

    def __missing__(self, key: Any) -> int:
        self[key] = len(self)
        return self[key]


def _plan(report: Cost) -> dict[str, Any]:
    times = report.times
    numbers = {
        "seconds": report.seconds,
        "peak": report.peak(),
        "utilization": report.utilization(),
        "sent": float(report.sent()),
        "exposed": sum(times.exposed.values()),
        "idle": times.idle,
        "compute": times.compute,
        "copies": times.copies,
    }

    rows: list[dict[str, Any]] = []
    row_numbers: dict[Any, int] = {}
    for row, calls, sent in report.comm.rows():
        row_numbers[row] = len(rows)
        rows.append(
            {
                "collective": row.collective,
                "axes": row.axes,
                "calls": calls,
                "sent": float(sent),
                "site": _site_text(row.site),
            }
        )

    names = Numbering()
    layouts = Numbering()
    devices: list[dict[str, Any]] = []
    for number, device in report.devices.items():
        devices.append(_device(number, device, names, row_numbers))
    _add_units(rows, devices, [*names])
    leaves = [*_leaves(report.arguments, layouts)]
    mesh = report.mesh
    return {
        "mesh": _mesh_text(mesh),
        "axes": mesh.axes,
        "stage": _stage_axis(report),
        "capacity": report.cluster.memory,
        "exposed": {"+".join(axes): seconds for axes, seconds in times.exposed.items()},
        "numbers": numbers,
        "devices": devices,
        "rows": rows,
        "leaves": leaves,
        "layouts": [_shards(mesh, spec, shape) for spec, shape in layouts],
        "names": [*names],
    }


def _site_text(site: Site) -> str:
    """Return a line of the program; "" for one of the step, which is fshard's own."""
    return str(site) if site.is_of_program else ""


def _add_units(
    rows: Sequence[dict[str, Any]], devices: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> None:
    """Add to each row of the ledger the units of parameters that its calls are for."""
    units: dict[int, dict[str, None]] = defaultdict(dict)
    for device in devices:
        for *_, number, unit in device["events"]:
            name = names[int(unit)]
            if number >= 0 and name:
                units[number][name] = None
    for number, row in enumerate(rows):
        row["units"] = units_text([*units[number]])


def units_text(units: Sequence[str]) -> str:
    """Write the names of units; those that are numbered alike as ranges.

    >>> units_text(["head", "layers[2]", "layers[0]", "layers[1]", "layers[4]"])
    'head, layers[0-2, 4]'
    """
    numbers: dict[str, list[int]] = {}
    for unit in units:
        name, bracket, number = unit.removesuffix("]").rpartition("[")
        is_numbered = bool(bracket) and number.isdecimal()
        numbers.setdefault(name if is_numbered else unit, [])
        if is_numbered:
            numbers[name].append(int(number))
    texts: list[str] = []
    for name, indices in numbers.items():
        texts.append(f"{name}[{_ranges(sorted(indices))}]" if indices else name)
    return ", ".join(texts)


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join([f"{a}-{b}" if a < b else str(a) for a, b in runs])


def _stage_axis(report: Cost) -> int | None:
    """Return the number of the axis of stages, along which devices differ; None without stages."""
    devices = [*report.devices]
    if len(devices) == 1:
        return None
    for number, (axis, size) in enumerate(report.mesh.axes):
        if devices == [report.mesh.index({axis: index}) for index in range(size)]:
            return number
    raise ValueError(f"devices {devices} must be those along one axis of {report.mesh}")


# -- devices -------------------------------------------------------------------------------------


@dataclass(slots=True)
class DrawnEvent:
    """An event of a timeline, or neighbours on a lane that are drawn as one.

    Args:
        lane: its number; those of lane 0 are units.
        start, end: in seconds.
        seconds: the sum of those of its events, without gaps.
        name: the number of the text of its longest event.
        bytes: sums, as are operations (flops) and the number of events (calls).
        row: of the ledger; -1 for none.
        unit: the number of the text.
    """

    lane: int
    start: float
    end: float
    seconds: float
    name: int
    bytes: float
    flops: int
    calls: int
    row: int
    unit: int

    def as_list(self) -> list[Any]:
        """Return the fields in the order in which page.js reads them."""
        start, end, seconds = _rounded(self.start), _rounded(self.end), _rounded(self.seconds)
        sums = [_rounded(self.bytes), self.flops, self.calls]
        return [self.lane, start, end, seconds, self.name, *sums, self.row, self.unit]


def _rounded(x: float) -> float:
    """Return a number in 9 digits: all digits would make the data a fifth larger."""
    return float(f"{x:.9g}") if isinstance(x, float) else x


def _device(
    number: int, device: DeviceCost, names: Numbering, rows: Mapping[Any, int]
) -> dict[str, Any]:
    """Return the memory and the timeline of a device."""
    from fshard.plan.trace import Operation

    width = device.times.step / BINS or 1.0
    lanes = Numbering(units=0)
    events: list[DrawnEvent] = []
    units: list[DrawnEvent] = []
    highest: dict[int, tuple[float, ...]] = {}  # of each bin of time the sample with most bytes
    for (lane, event, start, end), unit in zip(device.times.timed, _units(device), strict=True):
        text, size, flops, row = _fields(event, rows)
        drawn = DrawnEvent(
            lanes[lane], start, end, end - start, names[text], size, flops, 1, row, names[unit]
        )
        events.append(drawn)
        if lane == "compute":
            units.append(replace(drawn, lane=0, name=drawn.unit))
        if isinstance(event, Operation):
            bin_number = int(end / width)
            sample = highest.get(bin_number)
            if sample is None or sum(event.memory) >= sum(sample[1:]):
                highest[bin_number] = (end, *event.memory)

    width_of_thin = width if len(events) > EVENTS else 0.0
    merged = _merged(units, inf) + _merged(events, width_of_thin)
    holders = device.used.holders()
    purposes = Counter[str]()
    for holder in holders:
        purposes[holder.purpose] += holder.bytes
    return {
        "number": number,
        "peak": device.used.peak(),
        "holders": [
            [size, purpose, _site_text(site)] for size, purpose, site in holders[:_HOLDERS]
        ],
        "purposes": dict(purposes),
        "lanes": [*lanes],
        "events": [event.as_list() for event in merged],
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


# Note [Units of a timeline]
# A unit's mark is the start of its all-gather, which may be ahead of its use. If as many
# all-gathers along some axes start as there are marks, each belongs to the mark of its number, and
# its unit is used from the wait for it. As many reductions as there are units have the reverse
# order of the units. Collectives that match neither have no unit.


def _units(device: DeviceCost) -> list[str]:
    """Return the unit of each timed event: see Note [Units of a timeline]."""
    from fshard.plan.trace import CollectiveWait, MessageWait, Operation

    unit_of, gathers = _units_of_collectives(device)
    units: list[str] = []
    unit = "begin"  # of the operations
    for index, event in enumerate(device.events):
        if isinstance(event, Operation):
            # Its own unit is that of the last mark, which is too early if units are prefetched.
            if not gathers or event.unit in ("begin", "update"):
                unit = event.unit
            units.append(unit)
        elif isinstance(event, CollectiveWait):
            if event.start in gathers:
                unit = unit_of[event.start]
        elif not isinstance(event, MessageWait):
            units.append(unit_of.get(index, ""))
    return units


def _units_of_collectives(device: DeviceCost) -> tuple[dict[int, str], set[int]]:
    """Return the units of collectives by the index of their start, and the all-gathers of these.

    See Note [Units of a timeline].
    """
    from fshard.plan.trace import CollectiveStart

    marks = [mark.name for mark in device.used.timeline if mark.name not in ("begin", "update")]
    units_in_backward = [*dict.fromkeys(marks)][::-1]
    starts: dict[tuple[str, Any], list[int]] = defaultdict(list)
    for index, event in enumerate(device.events):
        if not isinstance(event, CollectiveStart):
            continue
        # An all-gather that is not started ahead is none of a unit.
        if event.is_started or event.row.collective != "all_gather":
            starts[event.row.collective, event.row.axes].append(index)

    unit_of: dict[int, str] = {}
    gathers: set[int] = set()
    for (collective, _), indices in starts.items():
        if collective == "all_gather" and len(indices) == len(marks):
            unit_of |= dict(zip(indices, marks, strict=True))
            gathers |= {*indices}
        elif collective.startswith("psum") and len(indices) == len(units_in_backward):
            unit_of |= dict(zip(indices, units_in_backward, strict=True))
    return unit_of, gathers


def _merged(events: Sequence[DrawnEvent], width: float) -> list[DrawnEvent]:
    """Merge neighbours on a lane with one row and one unit, up to a width in seconds.

    The longest of them names the result.
    """
    merged: list[DrawnEvent] = []
    last: dict[int, DrawnEvent] = {}  # the last event of each lane
    longest: dict[int, float] = {}  # and the seconds of the one that names it
    for event in events:
        lane = event.lane
        group = last.get(lane)
        is_neighbour = (
            group is not None
            and event.end - group.start < width
            and (group.row, group.unit) == (event.row, event.unit)
        )
        if group is None or not is_neighbour:
            last[lane] = replace(event)
            longest[lane] = event.seconds
            merged.append(last[lane])
            continue
        if event.seconds > longest[lane]:
            group.name = event.name
            longest[lane] = event.seconds
        group.end = event.end
        group.seconds += event.seconds
        group.bytes += event.bytes
        group.flops += event.flops
        group.calls += event.calls
    return merged


# -- leaves --------------------------------------------------------------------------------------


def _leaves(arguments: Sequence[Any], layouts: Numbering) -> Iterator[dict[str, Any]]:
    """Yield the tensors of a step's arguments; those without a layout are sharded by the step."""
    roles = ["params", "state", *["buffers"] * (len(arguments) - 3), "batch"]
    for role, tree in zip(roles, arguments, strict=True):
        paths, leaves, _ = flatten_with_paths(tree)
        for path, x in zip(paths, leaves, strict=True):
            if not isinstance(x, Sharded | Tensor):
                continue
            unit = ""
            layout = -1
            if isinstance(x, Sharded):
                unit = x.layout.unit or ""
                layout = layouts[x.layout.spec, x.shape]
            yield {
                "path": path_text(f'["{role}"]{path}'),
                "type": str(typeof(x)),
                "item": x.dtype.itemsize,
                "bytes": prod(x.shape) * x.dtype.itemsize,
                "unit": unit,
                "layout": layout,
            }


def _shards(mesh: Mesh, spec: P, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return which devices have which shard of a leaf.

    These are the axes that shard it, the coordinates of the devices that have any of it, and the
    local shapes.
    """
    number_of = mesh.axis_names.index
    axes = sorted(map(number_of, spec.split_axes))
    coordinates = spec.coordinates(mesh.shape)
    everywhere = spec.replace(at={}, shape=None)  # the shards of all stages have equal shapes
    return {
        "axes": axes,
        "place": [[number_of(axis), index] for axis, index in coordinates.items()],
        "shapes": _local_shapes(mesh, everywhere, shape, tuple(axes)),
    }


@lru_cache(maxsize=256)
def _local_shapes(
    mesh: Mesh, spec: P, shape: tuple[int, ...], axes: Sequence[int]
) -> list[list[Any]]:
    """Return runs of equal local shapes, [count, shape].

    Shards are numbered along their axes in the order of the mesh. Cached, as all stages of a model
    have equal shards.
    """
    names = [mesh.axis_names[axis] for axis in axes]
    sizes = [mesh.shape[name] for name in names]
    runs: list[list[Any]] = []
    for shard in range(prod(sizes)):
        coordinates = dict.fromkeys(mesh.axis_names, 0)
        coordinates |= zip(names, arithmetic.unravel(shard, sizes), strict=True)
        local = spec.local_shape(shape, mesh.shape, coordinates)
        if not runs or runs[-1][1] != local:
            runs.append([0, local])
        runs[-1][0] += 1
    return runs
