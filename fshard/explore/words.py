"""The labels of pictures, the same in text and in SVG."""

from __future__ import annotations

from collections.abc import Sequence

from fshard.explore.devices import Devices, elided, listed, summed
from fshard.explore.grid import Cell, Grid
from fshard.mesh.layout import Memory
from fshard.mesh.layout.layout import bytes_on_devices

_MOST_SUMS = 4
"""The replicas of an unreduced cell that are named; of more the first two and the last."""

_MEMORY_NOTES: dict[Memory, str] = {"host": "in the memory of the host", "disk": "on disk"}


def headline(grid: Grid) -> tuple[str, str]:
    """Return the type, the mesh and the bytes."""
    if grid.heading is not None:
        return grid.heading
    return f"{grid.type} on {grid.mesh}", bytes_on_devices(grid.type, grid.layout)


def in_lines(widths: Sequence[float], gap: float, most: float) -> list[list[int]]:
    """Return the numbers of blocks by line: a line that would be wider than `most` ends before.

    >>> in_lines([4, 4, 4], gap=1, most=9), in_lines([20, 4], gap=1, most=9)
    ([[0, 1], [2]], [[0], [1]])
    """
    lines: list[list[int]] = []
    line_width = most
    for number, width in enumerate(widths):
        line_width += gap + width
        if line_width > most:
            lines.append([])
            line_width = width
        lines[-1].append(number)
    return lines


def legend(grid: Grid) -> tuple[str, ...]:
    """Return the legend of a picture; empty if it needs none."""
    spec = grid.type.spec
    lines: list[str] = []
    if spec.at:
        coordinates = [f"coordinate {index} along {' x '.join(axes)}" for axes, index in spec.at]
        unsharded = "" if spec.split_axes else "unsharded "
        lines.append(f"{unsharded}at {' and '.join(coordinates)}, nothing elsewhere")
    if spec.unreduced:
        lines.append(f"Σ: still to be summed, over {' and '.join(spec.unreduced)}")
    copied = [name for name in grid.layout.replicated_axes if grid.mesh.shape[name] > 1]
    if copied:
        lines.append(f"equal copies along {' and '.join(copied)}")
    if grid.type.memory in _MEMORY_NOTES:
        lines.append(_MEMORY_NOTES[grid.type.memory])
    return (*lines, *grid.notes)


def caption(grid: Grid, cell: Cell) -> str:
    """Return the devices that hold a cell: "0-3", "Σ 0+1, 2+3", "host 5", "disk 5"."""
    # A sliced mesh has the numbers of its parent, of which it is any row.
    numbers = grid.mesh.numbers if grid.mesh.parent is None else None
    text = listed(cell.copies, numbers)
    if grid.type.spec.unreduced:
        text = f"Σ {_sums(cell, numbers)}"
    if grid.type.memory != "device":
        text = f"{grid.type.memory} {text}"
    if cell.is_empty:
        text += " (empty)"
    return text


def _sums(cell: Cell, numbers: Sequence[int] | None) -> str:
    """Write each replica of an unreduced cell as the sum of its devices: "0+1, 2+3"."""
    sums: list[str] = []
    for index in elided(cell.copies.count, _MOST_SUMS):
        if index is None:
            sums.append("…")
        else:
            first = cell.copies.device(index)
            sums.append(summed(Devices(first, cell.summands.steps), numbers))
    return ", ".join(sums)


def coordinates(grid: Grid, cell: Cell) -> str:
    """Return the coordinates of the devices that hold a cell: "data=0, model=*".

    An axis has * if the devices along all of it hold the cell.
    """
    holding_axes = {*grid.layout.replicated_axes, *grid.type.spec.unreduced}
    texts: list[str] = []
    for name, coordinate in grid.mesh.coordinates(cell.copies.first).items():
        has_all = name in holding_axes and grid.mesh.shape[name] > 1
        texts.append(f"{name}={'*' if has_all else coordinate}")
    return ", ".join(texts)
