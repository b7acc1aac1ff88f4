"""From two runs that differ to the device, the leaf and the phase.

Both are repeated from the kept inputs:

    this layout       the other layout
    repeats itself    repeats itself        the layouts disagree, in the first phase in which their
                                            slices, gradients or results differ
    differs           repeats itself        a fault in the first run, on the device whose record is
                                            the first to differ from the repetition
    repeats itself    differs               a fault in the run that audits
    differs           differs               the step depends on something that is no input
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fshard.auditing.compare import Difference
from fshard.auditing.meeting import texts_of_all
from fshard.auditing.records import (
    Fault,
    RecordEntry,
    StepRecord,
    faults,
    origins,
    sent_otherwise,
)
from fshard.auditing.runs import Run
from fshard.mesh.layout import Mesh
from fshard.mesh.spmd.scope import here

SLICE_PHASES = ("loss", "gradient")
"""The phases of slices, in order of time: equal bits in every layout, in reproducible mode."""

UNDECIDED = "One of the two is wrong; an audit in a third layout shows which one"
"""The end of a disagreement: each layout repeats itself, so neither has more votes."""


class Finding(NamedTuple):
    """The origin of a difference, as far as it is known.

    Args:
        phase: of the step, in which values first differ.
        device: the number in the world of the device at fault, or of the first element that
            differs; None if either of two devices may be at fault.
        leaf: of parameters or state, "" if there is none.
        text: the sentence of the error.
    """

    phase: str
    device: int | None
    leaf: str
    text: str


UNREPEATABLE = Finding(
    "repetition",
    None,
    "",
    "neither run repeats itself: the step depends on something that is none of its arguments, such "
    "as a count of calls, or random numbers that torch has not drawn",
)
"""The finding of a step that gives other numbers in each run, in both layouts."""


def device_name(mesh: Mesh, number: int) -> str:
    """Return a device by its number and coordinates; one of a process mesh is a process.

    >>> from fshard import make_mesh
    >>> device_name(make_mesh({"data": 2, "model": 2}), 2)
    'device 2 (data=1, model=0)'
    """
    is_of_processes = mesh.runtime == "process"
    if not mesh.is_member:  # then the mesh is abstract here, whatever it is for its members
        is_of_processes = here() is None
    kind = "process" if is_of_processes else "device"
    coordinates = mesh.coordinates(mesh.devices.index(number))
    words = [f"{axis}={index}" for axis, index in coordinates.items()]
    return f"{kind} {number} ({', '.join(words)})"


def faults_of_all(mesh: Mesh, run: Run, again: Run) -> list[Fault]:
    """Return where a run first differed from its repetition, on any device of its mesh."""
    local_faults = faults(run.record, again.record)
    local_sent = sent_otherwise(run.record, again.record)
    all_faults: list[Fault] = []
    sent: list[tuple[str, int, int]] = []
    for text in texts_of_all(mesh, json.dumps([local_faults, local_sent])):
        fault_rows, sent_rows = json.loads(text)
        for device, entry, leaf in fault_rows:
            all_faults.append(Fault(device, RecordEntry(*entry), leaf))
        for subject, group, count in sent_rows:
            sent.append((subject, group, count))
    return origins(all_faults, sent)


def transient(origin_faults: Sequence[Fault], mesh: Mesh, where: str) -> list[Finding]:
    """Return a finding for each device at fault."""
    findings: list[Finding] = []
    for fault in origin_faults:
        name = device_name(mesh, fault.device)
        entry = fault.entry
        text = f"{name} {entry.direction} another {entry} than when the step was repeated, {where}"
        if fault.leaf and fault.leaf != entry.leaf:
            text += f"; the first leaf with it is {fault.leaf}"
        findings.append(Finding(str(entry), fault.device, fault.leaf, text))
    return findings


# -- layouts that disagree -------------------------------------------------------------------------


def persistent(
    first: StepRecord,
    other: StepRecord,
    meshes: tuple[Mesh, Mesh],
    differences: Sequence[Difference],
    *,
    has_slices: bool,
) -> Finding:
    """Return the first phase in which two layouts disagree, each of which repeats itself.

    Args:
        first, other: the records of the two layouts.
        meshes: of both.
        differences: the differences of gradients and results, of all devices.
        has_slices: True if slices have equal bits in both layouts.
    """
    if has_slices:
        tables = slices_of_all(meshes[0], first), slices_of_all(meshes[1], other)
        for phase in SLICE_PHASES:
            finding = _unequal_slice(phase, tables, meshes)
            if finding is not None:
                return finding
    return _unequal_result(differences, meshes[0])


SliceTable = Mapping[tuple[str, int, str], list[tuple[int, int]]]
"""By phase, slice and leaf: the digests of all devices, each with the number of its device."""


def slices_of_all(mesh: Mesh, record: StepRecord) -> SliceTable:
    """Return the digests of the slices of all devices of a mesh."""
    rows: list[Any] = []
    for number, device in record.devices.items():
        for entry, value in device.digests.items():
            if entry.subject in SLICE_PHASES:
                rows.append([entry.subject, entry.slice, entry.leaf, value, number])
    table: dict[tuple[str, int, str], list[tuple[int, int]]] = {}
    for text in texts_of_all(mesh, json.dumps(rows)):
        for subject, slice, leaf, value, number in json.loads(text):
            table.setdefault((subject, slice, leaf), []).append((value, number))
    return {key: sorted(pairs) for key, pairs in table.items()}


def _unequal_slice(
    phase: str, tables: Sequence[SliceTable], meshes: tuple[Mesh, Mesh]
) -> Finding | None:
    """Return the first slice that two layouts compute differently."""
    first, other = tables
    for key, pairs in first.items():
        subject, slice, leaf = key
        other_pairs = other.get(key)
        if subject != phase or other_pairs is None:
            continue
        values, other_values = _values(pairs), _values(other_pairs)
        # Along local axes several devices compute a slice; uses of a leaf may be grouped.
        if len(values) != len(other_values) or values == other_values:
            continue
        computed = RecordEntry("computed", subject, leaf, slice)
        devices = _devices(meshes[0], pairs)
        other_devices = _devices(meshes[1], other_pairs)
        text = (
            f"both layouts repeat themselves, and have another {computed}: {devices} in this one, "
            f"{other_devices} in the other one. {UNDECIDED}"
        )
        return Finding(str(computed), None, leaf, text)
    return None


def _values(pairs: Iterable[tuple[int, int]]) -> list[int]:
    return [value for value, _ in pairs]


def _devices(mesh: Mesh, pairs: Iterable[tuple[int, int]]) -> str:
    return " and ".join([device_name(mesh, number) for _, number in pairs])


def _unequal_result(differences: Sequence[Difference], mesh: Mesh) -> Finding:
    """Return the first kind of result that differs: gradients, then state, then the others."""
    order = ("gradient", "state", "parameter", "buffer", "metric")
    first = min(differences, key=lambda difference: order.index(difference.kind))
    phases = {"gradient": "reduced gradient", "state": "update", "parameter": "update"}
    phase = phases.get(first.kind, first.kind)
    text = (
        f"both layouts repeat themselves, and disagree in the {phase}: {first.kind} {first.name} "
        f"on {device_name(mesh, first.device)}. {UNDECIDED}"
    )
    return Finding(phase, first.device, first.leaf, text)


def differences_of_all(mesh: Mesh, local_differences: Sequence[Difference]) -> list[Difference]:
    """Return the differences on all devices of a mesh, from those of each."""
    gathered: list[Difference] = []
    for text in texts_of_all(mesh, json.dumps(local_differences)):
        gathered += [Difference(*row) for row in json.loads(text)]
    return gathered
