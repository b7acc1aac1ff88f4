"""The plan of a picture: a layout as a grid of cells, independent of the output format.

A tensor has a *side* per dim that is drawn (sharded ones, and others until there are two); a flat tensor has one side
in all. The last two sides are the rows and columns of a grid; those before make a block of it per part. A cell is a
shard with the devices that hold it; devices without any are not drawn.

    (8, 6) as P("data", "model")            (4, 6, 2) as P("data", "model", "pipe")
              columns: dim 1@model             blocks: dim 0@data    rows: dim 1    columns: dim 2
    rows:       0  1                           0:2  [ 0 1 ]   2:4  [ 4 5 ]
    dim 0@data  2  3 ...                            [ 2 3 ]        [ 6 7 ]

Only visible cells are computed, so the size of the mesh does not matter. None replaces omitted parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice, product
from math import prod

import torch

from fshard.explore.devices import Devices, box, elided
from fshard.mesh.layout import Layout, Mesh, P, ShardType, arithmetic
from fshard.mesh.layout.arithmetic import Range

_INSIDE = (8, 4)  # of more than 8 rows or columns, the first 4 and the last are drawn
_OUTSIDE = (4, 2)  # so for blocks
_MOST_PLACES = 32  # of blocks, drawn or left out, before the last one


@dataclass(frozen=True)
class Cell:
    """One shard of the tensor."""

    shard: int  # its number, in device order
    ranges: tuple[Range, ...]  # of each dim, or the one flat range
    copies: Devices  # one device of every replica
    summands: Devices  # the steps from there to the devices whose sum the replica is

    @property
    def is_empty(self) -> bool:
        """True if the shard has no elements."""
        return any(start == stop for start, stop in self.ranges)

    def holders(self) -> Iterator[tuple[int, ...]]:
        """Yield the devices of every replica: the value of the shard is the sum over them."""
        return (tuple(copy + step for step in self.summands) for copy in self.copies)


@dataclass(frozen=True)
class Side:
    """A dim of the tensor, or all of them flattened."""

    name: str  # "dim 0@data"
    dim: int  # 0 for all of them flattened
    axes: tuple[str, ...]  # that shard it, major to minor
    parts: int
    shown: tuple[int | None, ...]  # the parts that are drawn; None where some are omitted
    labels: tuple[str, ...]  # of the parts drawn: "0:4"

    @property
    def title(self) -> str:
        """The name, and the number of parts if not all are drawn."""
        return f"{self.name}, {self.parts:,} parts" if None in self.shown else self.name


@dataclass(frozen=True)
class GridBlock:
    """A grid of cells: rows of columns. None where parts are omitted. `where` is its index in the outer sides."""

    where: str
    cells: tuple[tuple[Cell | None, ...], ...]


@dataclass(frozen=True)
class Grid:
    """A full picture: a grid per part of the sides that are neither rows nor columns."""

    type: ShardType
    mesh: Mesh
    rows: Side | None  # None for a tensor of fewer than two dims
    columns: Side | None  # None for a tensor without dims
    blocks: tuple[GridBlock | None, ...]  # None where some are omitted
    notes: tuple[str, ...]  # facts that are not drawn
    heading: tuple[str, str] | None = None  # in place of the type and the bytes

    @property
    def layout(self) -> Layout:
        """The layout of the tensor."""
        return Layout(self.mesh, self.type.spec, self.type.memory)

    @property
    def cells(self) -> tuple[Cell, ...]:
        """All cells that are drawn."""
        return tuple(
            cell for block in self.blocks if block for row in block.cells for cell in row if cell
        )


def plan_grid(kind: ShardType, mesh: Mesh) -> Grid:
    """Return the plan of the picture of a tensor of this type.

    >>> import torch
    >>> from fshard.mesh.layout.spec import P
    >>> grid = plan_grid(ShardType(torch.float32, (8, 6), P("data")), Mesh((("data", 2), ("model", 2)), "virtual", "cpu"))
    >>> [(cell.ranges, list(cell.holders())) for cell in grid.cells]
    [(((0, 4), (0, 6)), [(0,), (1,)]), (((4, 8), (0, 6)), [(2,), (3,)])]
    """
    layout = Layout(mesh, kind.spec, kind.memory, unit="drawn")  # whose dims may be uneven
    layout.check(kind.shape)
    dims = enumerate(layout.spec.dims(len(kind.shape)) if not layout.spec.is_flat else ())
    return _grid(
        kind,
        layout,
        _sides(kind.shape, layout, [dim for dim, axes in dims if _parts(layout, axes) > 1]),
    )


def plan_mesh(mesh: Mesh) -> Grid:
    """Return the plan of the picture of a mesh: its devices by their coordinates.

    >>> grid = plan_mesh(Mesh((("data", 2), ("model", 3)), "virtual", "cpu"))
    >>> grid.rows.name, grid.columns.labels, [cell.shard for cell in grid.cells]
    ('data', ('0', '1', '2'), [0, 1, 2, 3, 4, 5])
    """
    shape = tuple(mesh.shape.values())
    layout = Layout(mesh, P(*mesh.axis_names))
    sides = tuple(
        replace(
            side,
            name=side.axes[0],
            labels=tuple("…" if index is None else str(index) for index in side.shown),
        )
        for side in _sides(shape, layout, [*range(len(shape))])
    )
    heading = (str(mesh), "1 device" if mesh.size == 1 else f"{mesh.size:,} devices")
    return replace(
        _grid(ShardType(torch.int64, shape, layout.spec), layout, sides), notes=(), heading=heading
    )


def _grid(kind: ShardType, layout: Layout, sides: tuple[Side, ...]) -> Grid:
    outer, (rows, columns) = sides[:-2], (None, None, *sides)[-2:]
    every_index = product(*(side.shown for side in outer))
    block_indices = [*islice(every_index, _MOST_PLACES)]
    if next(every_index, None) is not None:  # some are omitted, up to the last one
        block_indices += [(None,), tuple(side.shown[-1] for side in outer)]
    blocks = (
        None
        if None in block_index
        else _block(kind.shape, layout, outer, block_index, rows, columns)
        for block_index in block_indices
    )
    hidden = {*range(0 if kind.spec.is_flat else len(kind.shape))} - {side.dim for side in sides}
    names = ", ".join(f"dim {dim} ({kind.shape[dim]})" for dim in sorted(hidden))
    notes = (f"not drawn, unsharded: {names}",) if names else ()
    return Grid(
        kind, layout.mesh, rows, columns, tuple(block for block, _ in groupby(blocks)), notes
    )


def _sides(shape: Sequence[int], layout: Layout, cut: list[int]) -> tuple[Side, ...]:
    """Return the sides to draw: the dims in `cut`, and the last others until there are two."""
    if layout.spec.flat_axes is not None:
        return (_side(shape, layout, "flat", 0, layout.spec.split_axes, _INSIDE),)
    dims = dict(enumerate(layout.spec.dims(len(shape))))
    uncut = [dim for dim in reversed(dims) if dim not in cut]
    drawn = sorted(cut + uncut[: max(0, 2 - len(cut))])
    return tuple(
        _side(
            shape,
            layout,
            f"dim {dim}",
            dim,
            dims[dim],
            _OUTSIDE if number < len(drawn) - 2 else _INSIDE,
        )
        for number, dim in enumerate(drawn)
    )


def _side(
    shape: Sequence[int],
    layout: Layout,
    name: str,
    dim: int,
    axes: tuple[str, ...],
    limit: tuple[int, int],
) -> Side:
    parts = _parts(layout, axes)
    shown = elided(parts, *limit)
    owners = [
        None
        if index is None
        else layout.mesh.index(layout.place | _coordinates(layout, axes, index))
        for index in shown
    ]
    labels = tuple(
        "…" if owner is None else "{}:{}".format(*layout.ranges(shape, owner)[dim])
        for owner in owners
    )
    return Side(f"{name}@{'+'.join(axes)}" if axes else name, dim, axes, parts, shown, labels)


def _block(
    shape: Sequence[int],
    layout: Layout,
    outer: Sequence[Side],
    block_index: Sequence[int | None],
    rows: Side | None,
    columns: Side | None,
) -> GridBlock:
    """Return the grid of the cells at one index in the outer sides."""

    def cell(row: int | None, column: int | None) -> Cell | None:
        parts = [*zip((*outer, rows, columns), (*block_index, row, column), strict=True)]
        coordinates: dict[str, int] = {}
        for side, index in parts:
            if index is None:
                return None
            coordinates |= _coordinates(layout, side.axes, index) if side else {}
        return _cell(shape, layout, coordinates)

    where = [
        f"{side.name} {side.labels[side.shown.index(index)]}"
        for side, index in zip(outer, block_index, strict=True)
    ]
    down = rows.shown if rows else (0,)
    right = columns.shown if columns else (0,)
    return GridBlock(
        ", ".join(where), tuple(tuple(cell(row, column) for column in right) for row in down)
    )


def _cell(shape: Sequence[int], layout: Layout, coordinates: Mapping[str, int]) -> Cell:
    """Return the shard whose owners have these coordinates along the sharding axes."""
    mesh, spec = layout.mesh, layout.spec
    first = mesh.index({**layout.place, **coordinates})
    owners = [name for name in mesh.axis_names if name in spec.split_axes]
    return Cell(
        shard=arithmetic.ravel(
            [coordinates.get(name, 0) for name in owners], [mesh.shape[name] for name in owners]
        ),
        ranges=layout.ranges(shape, first),
        copies=box(mesh, layout.replicated_axes, first),
        summands=box(mesh, spec.unreduced, 0),
    )


def _parts(layout: Layout, axes: Sequence[str]) -> int:
    return prod(layout.mesh.shape[name] for name in axes)


def _coordinates(layout: Layout, axes: Sequence[str], index: int) -> dict[str, int]:
    return dict(
        zip(
            axes, arithmetic.unravel(index, [layout.mesh.shape[name] for name in axes]), strict=True
        )
    )
