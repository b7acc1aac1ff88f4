"""The plan of a picture: a layout as a grid of cells, independent of the output format.

A tensor has a *side* per dim that is drawn: sharded ones, and others until there are two. Of a flat
tensor it is one side for the flattened elements, after those of sharded dims. The last two sides
are the rows and columns of a grid. Those before make a block of it per part: the last of them
across, the others down, as small multiples. A cell is a shard with the devices that hold it;
devices without any are not drawn.

    (8, 6) as P("data", "model")            (4, 6, 2) as P("data", "model", "pipe")
              columns: dim 1@model             blocks: dim 0@data    rows: dim 1    columns: dim 2
    rows:       0  1                           0:2  [ 0 1 ]   2:4  [ 4 5 ]
    dim 0@data  2  3 ...                            [ 2 3 ]        [ 6 7 ]

Only visible cells are computed, so the size of the mesh does not matter. None replaces omitted
parts; of a mesh of 16 devices or fewer there are none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, product
from math import prod

import torch

from fshard.explore.devices import Devices, box, elided
from fshard.mesh.layout import Layout, Mesh, P, ShardType, arithmetic
from fshard.mesh.layout.arithmetic import Range

_COMPLETE = 16  # devices of a mesh of which nothing is omitted
_INSIDE = (8, 4)  # of more than 8 rows or columns, the first 4 and the last are drawn
_OUTSIDE = (4, 2)  # so for blocks
_MOST_ROWS = 8  # of blocks, drawn or left out, before the last one


@dataclass(frozen=True)
class Cell:
    """One shard of the tensor.

    Args:
        shard: its number, in device order.
        ranges: of each dim, or the one flat range.
        copies: one device of every replica.
        summands: the steps from there to the devices whose sum the replica is.
        block: of a flat shard within the shards of dims, the ranges of these; else ().
    """

    shard: int
    ranges: tuple[Range, ...]
    copies: Devices
    summands: Devices
    block: tuple[Range, ...] = ()

    @property
    def is_empty(self) -> bool:
        """True if the shard has no elements."""
        return any(start == stop for start, stop in self.ranges)

    def holders(self) -> Iterator[tuple[int, ...]]:
        """Yield the devices of every replica: the value of the shard is the sum over them."""
        for copy in self.copies:
            yield tuple(copy + step for step in self.summands)


@dataclass(frozen=True)
class Side:
    """A dim of the tensor, or all of them flattened.

    Args:
        name: such as "dim 0@data".
        dim: None for all of them flattened.
        axes: that shard it, major to minor.
        parts: the number of ranges that it is cut into.
        shown: the parts that are drawn; None where some are omitted.
        labels: of the parts drawn, such as "0:4".
    """

    name: str
    dim: int | None
    axes: tuple[str, ...]
    parts: int
    shown: tuple[int | None, ...]
    labels: tuple[str, ...]

    @property
    def title(self) -> str:
        """The name, and the number of parts if not all are drawn."""
        return f"{self.name}, {self.parts:,} parts" if None in self.shown else self.name


@dataclass(frozen=True)
class GridBlock:
    """A grid of cells at one index in the outer sides.

    Args:
        title: the index in the outer sides, as text.
        cells: rows of columns; None where parts are omitted.
    """

    title: str
    cells: tuple[tuple[Cell | None, ...], ...]


@dataclass(frozen=True)
class Grid:
    """A full picture: a grid per part of the sides that are neither rows nor columns.

    Args:
        type: of the tensor.
        mesh: its devices.
        rows: None for a tensor of fewer than two dims, or a flat one.
        columns: None for a tensor without dims.
        blocks: in rows; None where some are omitted.
        notes: facts that are not drawn.
        heading: in place of the type and the bytes.
    """

    type: ShardType
    mesh: Mesh
    rows: Side | None
    columns: Side | None
    blocks: tuple[tuple[GridBlock | None, ...], ...]
    notes: tuple[str, ...]
    heading: tuple[str, str] | None = None

    @property
    def layout(self) -> Layout:
        """The layout of the tensor."""
        return Layout(self.mesh, self.type.spec, self.type.memory)

    @property
    def cells(self) -> tuple[Cell, ...]:
        """All cells that are drawn."""
        cells: list[Cell] = []
        for block in chain(*self.blocks):
            for row in block.cells if block is not None else ():
                cells += [cell for cell in row if cell is not None]
        return tuple(cells)


def plan_grid(kind: ShardType, mesh: Mesh) -> Grid:
    """Return the plan of the picture of a tensor of this type.

    >>> import torch
    >>> from fshard.mesh.layout.spec import P
    >>> mesh = Mesh((("data", 2), ("model", 2)), "virtual", "cpu")
    >>> grid = plan_grid(ShardType(torch.float32, (8, 6), P("data")), mesh)
    >>> [(cell.ranges, list(cell.holders())) for cell in grid.cells]
    [(((0, 4), (0, 6)), [(0,), (1,)]), (((4, 8), (0, 6)), [(2,), (3,)])]
    """
    layout = Layout(mesh, kind.spec, kind.memory, unit="drawn")  # of a unit dims may be uneven
    layout.check(kind.shape)
    cut_dims: list[int] = []
    for dim, axes in enumerate(layout.spec.dims(len(kind.shape))):
        if _parts(layout, axes) > 1:
            cut_dims.append(dim)
    return _grid(kind, layout, _sides(kind.shape, layout, cut_dims))


def plan_mesh(mesh: Mesh) -> Grid:
    """Return the plan of the picture of a mesh: its devices by their coordinates.

    It is that of a tensor with an element for each device.

    >>> grid = plan_mesh(Mesh((("data", 2), ("model", 3)), "virtual", "cpu"))
    >>> grid.rows.name, grid.columns.labels, [cell.shard for cell in grid.cells]
    ('data', ('0', '1', '2'), [0, 1, 2, 3, 4, 5])
    """
    shape = tuple(mesh.shape.values())
    layout = Layout(mesh, P(*mesh.axis_names))
    sides: list[Side] = []
    for side in _sides(shape, layout, [*range(len(shape))]):
        coordinates = ["…" if index is None else str(index) for index in side.shown]
        sides.append(replace(side, name=side.axes[0], labels=tuple(coordinates)))

    grid = _grid(ShardType(torch.int64, shape, layout.spec), layout, tuple(sides))
    count = "1 device" if mesh.size == 1 else f"{mesh.size:,} devices"
    return replace(grid, notes=(), heading=(str(mesh), count))


def _grid(kind: ShardType, layout: Layout, sides: tuple[Side, ...]) -> Grid:
    outer_sides = sides[:-2]
    rows, columns = (None, None, *sides)[-2:]

    # The number of visited indices is limited, as a tensor may have many outer sides.
    down = outer_sides[:-1]
    indices = product(*[side.shown for side in down])
    row_indices = [*islice(indices, _MOST_ROWS)]
    is_cut_short = next(indices, None) is not None
    if is_cut_short:
        last = tuple([side.shown[-1] for side in down])
        row_indices += [(None,), last]

    across: tuple[tuple[int | None, ...], ...] = ((),)  # indices in the last outer side
    if outer_sides:
        across = tuple([(index,) for index in outer_sides[-1].shown])
    blocks: list[tuple[GridBlock | None, ...]] = []
    for row_index in row_indices:
        if None in row_index:
            if blocks[-1] != (None,):
                blocks.append((None,))  # one for all rows that are omitted here
            continue
        row: list[GridBlock | None] = []
        for index in across:
            block_index = (*row_index, *index)
            block = None
            if None not in index:
                block = _block(kind.shape, layout, outer_sides, block_index, rows, columns)
            row.append(block)
        blocks.append(tuple(row))

    hidden_dims: list[str] = []
    if not kind.spec.is_flat:
        drawn_dims = {side.dim for side in sides}
        for dim, length in enumerate(kind.shape):
            if dim not in drawn_dims:
                hidden_dims.append(f"dim {dim} ({length})")
    notes = (f"not drawn, unsharded: {', '.join(hidden_dims)}",) if hidden_dims else ()
    return Grid(kind, layout.mesh, rows, columns, tuple(blocks), notes)


def _sides(shape: Sequence[int], layout: Layout, cut_dims: list[int]) -> tuple[Side, ...]:
    """Return the sides to draw: the dims that are cut, and the last others until there are two.

    Of a flat layout these are the dims that are cut, and the flattened elements of each part.
    """
    axes_of_dims = layout.spec.dims(len(shape))
    flat_axes = layout.spec.flat_axes
    drawn: list[tuple[str, int | None, tuple[str, ...]]] = []
    if flat_axes is None:
        uncut_dims = [dim for dim in reversed(range(len(axes_of_dims))) if dim not in cut_dims]
        missing = max(0, 2 - len(cut_dims))
        for dim in sorted(cut_dims + uncut_dims[:missing]):
            drawn.append((f"dim {dim}", dim, axes_of_dims[dim]))
    else:
        for dim in cut_dims:
            drawn.append((f"dim {dim}", dim, axes_of_dims[dim]))
        drawn.append(("flat", None, flat_axes))

    sides: list[Side] = []
    for number, (name, dim, axes) in enumerate(drawn):
        is_outer = number < len(drawn) - 2
        limit = _OUTSIDE if is_outer else _INSIDE
        sides.append(_side(shape, layout, name, dim, axes, limit))
    return tuple(sides)


def _side(
    shape: Sequence[int],
    layout: Layout,
    name: str,
    dim: int | None,
    axes: tuple[str, ...],
    limit: tuple[int, int],
) -> Side:
    """Return one side, of which `elided` chooses the parts to draw if there are many devices."""
    parts = _parts(layout, axes)
    shown = elided(parts, *limit)
    if layout.mesh.size <= _COMPLETE:
        shown = tuple(range(parts))
    labels: list[str] = []
    for index in shown:
        if index is None:
            labels.append("…")
        else:
            owner = layout.mesh.index(layout.place | _coordinates(layout, axes, index))
            if dim is None:
                ((start, stop),) = layout.ranges(shape, owner)
            else:
                start, stop = layout.block(shape, owner)[dim]
            labels.append(f"{start}:{stop}")
    if axes:
        name = f"{name}@{'+'.join(axes)}"
    return Side(name, dim, axes, parts, shown, tuple(labels))


def _block(
    shape: Sequence[int],
    layout: Layout,
    outer_sides: Sequence[Side],
    block_index: Sequence[int | None],
    rows: Side | None,
    columns: Side | None,
) -> GridBlock:
    """Return the grid of the cells at one index in the outer sides."""
    titles: list[str] = []
    for side, index in zip(outer_sides, block_index, strict=True):
        titles.append(f"{side.name} {side.labels[side.shown.index(index)]}")

    sides = (*outer_sides, rows, columns)
    row_indices = (0,) if rows is None else rows.shown
    column_indices = (0,) if columns is None else columns.shown
    cells: list[tuple[Cell | None, ...]] = []
    for row in row_indices:
        indices = [(*block_index, row, column) for column in column_indices]
        cells.append(tuple([_cell(shape, layout, sides, index) for index in indices]))
    return GridBlock(", ".join(titles), tuple(cells))


def _cell(
    shape: Sequence[int],
    layout: Layout,
    sides: Sequence[Side | None],
    indices: Sequence[int | None],
) -> Cell | None:
    """Return the shard at these indices in the sides; None where parts are omitted."""
    coordinates: dict[str, int] = {}  # of the owners, along the axes that shard the tensor
    for side, index in zip(sides, indices, strict=True):
        if index is None:
            return None
        if side is not None:
            coordinates |= _coordinates(layout, side.axes, index)

    mesh = layout.mesh
    spec = layout.spec
    owner_axes = [name for name in mesh.axis_names if name in spec.split_axes]
    sizes = [mesh.shape[name] for name in owner_axes]
    shard = arithmetic.ravel([coordinates.get(name, 0) for name in owner_axes], sizes)
    first = mesh.index({**layout.place, **coordinates})
    has_block = spec.is_flat and len([side for side in sides if side is not None]) > 1
    return Cell(
        shard=shard,
        ranges=layout.ranges(shape, first),
        copies=box(mesh, layout.replicated_axes, first),
        summands=box(mesh, spec.unreduced, 0),
        block=layout.block(shape, first) if has_block else (),
    )


def _parts(layout: Layout, axes: Sequence[str]) -> int:
    return prod(layout.mesh.shape[name] for name in axes)


def _coordinates(layout: Layout, axes: Sequence[str], index: int) -> dict[str, int]:
    """Return the coordinates of a part of a side that some axes shard."""
    sizes = [layout.mesh.shape[name] for name in axes]
    return dict(zip(axes, arithmetic.unravel(index, sizes), strict=True))
