"""The labels of pictures, the same in text and in SVG."""

from __future__ import annotations

from math import prod

from fshard.explore.devices import Devices, elided, listed, summed
from fshard.explore.grid import Cell, Grid
from fshard.mesh.layout import Layout, ShardType


def size(count: int) -> str:
    """Write a number of bytes.

    >>> size(192), size(1536), size(24 << 20)
    ('192 B', '1.5 KiB', '24.0 MiB')
    """
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    power = min(max(count.bit_length() - 1, 0) // 10, len(units) - 1)
    return f"{count / 1024**power:,.{1 if power else 0}f} {units[power]}"


def global_bytes(kind: ShardType) -> int:
    """Return the bytes of the global tensor."""
    return prod(kind.shape) * kind.dtype.itemsize


def most_bytes(kind: ShardType, layout: Layout) -> int:
    """Return the bytes of the largest shard: that of the first device that stores any."""
    return (
        prod(layout.local_shape(kind.shape, layout.mesh.index(layout.place))) * kind.dtype.itemsize
    )


def is_uneven(kind: ShardType, layout: Layout) -> bool:
    """Return True if some shards are smaller than others, as flat ones can be, and those outside `at`."""
    alone = all(layout.mesh.shape[name] == 1 for name in kind.spec.at_axes)
    return not alone or (kind.spec.is_flat and prod(kind.shape) % layout.flat_parts != 0)


def headline(grid: Grid) -> tuple[str, str]:
    """Return the type, the mesh and the bytes."""
    if grid.heading is not None:
        return grid.heading
    kind, count = grid.type, grid.mesh.size
    upto = "at most " if is_uneven(kind, grid.layout) else ""
    every = "on the only device" if count == 1 else f"on each of {count:,} devices"
    return (
        f"{kind} on {grid.mesh}",
        f"{size(global_bytes(kind))}, {upto}{size(most_bytes(kind, grid.layout))} {every}",
    )


def legend(grid: Grid) -> tuple[str, ...]:
    """Return the legend of a picture; empty if it needs none."""
    spec, mesh = grid.type.spec, grid.mesh
    copied = [name for name in grid.layout.replicated_axes if mesh.shape[name] > 1]
    coordinates_text = " and ".join(
        f"coordinate {coordinate} along {' x '.join(axes)}" for axes, coordinate in spec.at
    )
    lines = (
        [f"{'' if spec.split_axes else 'unsharded '}at {coordinates_text}, nothing elsewhere"]
        if coordinates_text
        else []
    )
    lines += (
        [f"Σ: still to be summed, over {' and '.join(spec.unreduced)}"] if spec.unreduced else []
    )
    lines += [f"equal copies along {' and '.join(copied)}"] if copied else []
    lines += {"device": [], "host": ["in the memory of the host"], "disk": ["on disk"]}[
        grid.type.memory
    ]
    return (*lines, *grid.notes)


def caption(grid: Grid, cell: Cell) -> str:
    """Return the devices that hold a cell: "0-3", "Σ 0+1, 2+3", "host 5", "disk 5"."""
    if grid.type.spec.unreduced:
        indices = elided(cell.copies.count, 4)
        firsts = (None if index is None else cell.copies.device(index) for index in indices)
        text = "Σ " + ", ".join(
            "…" if n is None else summed(Devices(n, cell.summands.steps)) for n in firsts
        )
    else:
        text = listed(cell.copies)
    memory = "" if grid.type.memory == "device" else f"{grid.type.memory} "
    return f"{memory}{text}{' (empty)' if cell.is_empty else ''}"


def coordinates(grid: Grid, cell: Cell) -> str:
    """Return the coordinates of the devices that hold a cell: "data=0, model=*", with * for all along an axis."""
    free = {*grid.layout.replicated_axes, *grid.type.spec.unreduced}
    coordinate = grid.mesh.coordinates(cell.copies.first)
    return ", ".join(
        f"{name}={'*' if name in free and grid.mesh.shape[name] > 1 else coordinate[name]}"
        for name in coordinate
    )
