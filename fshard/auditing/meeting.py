"""Collectives of an audit: flags, numbers and texts, from all devices to all processes.

All devices of a mesh take part, and processes outside of it get the result too: so all of them
repeat a step, or raise, together. Virtual devices that are called from outside have one caller,
which knows everything.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fshard.mesh.layout import Mesh
from fshard.mesh.reshard.broadcast_to import broadcast_to
from fshard.mesh.spmd.check_equal import gather_all
from fshard.mesh.spmd.run import is_outside, run_on_devices
from fshard.mesh.spmd.scope import require
from fshard.source import call_site

_CALLER = "fs.audit"


def largest_of_all(mesh: Mesh, numbers: Sequence[float]) -> list[float]:
    """Return the largest of each number over all devices of a mesh."""
    if is_outside(mesh) or not numbers:
        return [*numbers]
    rows = _gathered_rows(mesh, torch.tensor(numbers, dtype=torch.float64))
    return [max(column) for column in zip(*rows, strict=True)]


def is_any(mesh: Mesh, flag: bool) -> bool:
    """Return True if a flag is set on any device of a mesh."""
    (largest,) = largest_of_all(mesh, [float(flag)])
    return bool(largest)


def texts_of_all(mesh: Mesh, text: str) -> list[str]:
    """Return the texts of all devices of a mesh, in their order."""
    if is_outside(mesh):
        return [text]
    data = text.encode()
    (longest,) = largest_of_all(mesh, [float(len(data))])
    # One longer than the longest, as there is no tensor in an empty buffer. Texts are JSON: none
    # ends with a space.
    padded = data.ljust(int(longest) + 1)
    rows = _gathered_rows(mesh, torch.frombuffer(bytearray(padded), dtype=torch.uint8))
    return [bytes(row).decode().rstrip(" ") for row in rows]


def _gathered_rows(mesh: Mesh, row: torch.Tensor) -> list[list[int]]:
    """Return the rows of all devices; outside of the mesh a row of this caller does not count."""
    rows: list[list[int]] | None = None
    if mesh.is_member:
        site = call_site()

        def on_device(device: int) -> list[list[int]]:
            group = require(_CALLER).group(mesh.axis_names, _CALLER)
            return gather_all(row.to(mesh.device_type), group, site).tolist()

        (rows,) = run_on_devices(mesh, on_device)
    if mesh.numbers is not None:
        rows = broadcast_to(rows, source=mesh)
    assert rows is not None
    return rows
