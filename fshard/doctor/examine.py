"""What one process finds: it is called in all of them at the same time."""

from __future__ import annotations

from dataclasses import dataclass

import fshard as fs
from fshard.doctor.machine import Machine, machine, way
from fshard.doctor.speeds import Speed, measure
from fshard.doctor.trials import Trial, attempt

PATIENCE = 120.0
"""Seconds after which a collective that does not end is taken for a failure."""


@dataclass(frozen=True)
class Findings:
    """What one process found."""

    rank: int
    by: str
    """Who has started it."""
    device: str
    way: str
    machine: Machine
    speeds: tuple[Speed, ...]
    trials: tuple[Trial, ...]


def examine(device: str | None, by: str) -> Findings:
    """Look around, measure, and try every collective with the other processes."""
    count = fs.process_count()
    mesh = fs.make_mesh({"all": count}, runtime="process", device=device, timeout=PATIENCE)
    trials = tuple(attempt(mesh))
    speeds = tuple(measure(mesh)) if count > 1 else ()
    return Findings(fs.process_index(), by, mesh.device_type, way(mesh), machine(), speeds, trials)
