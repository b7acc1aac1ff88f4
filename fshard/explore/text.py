"""A grid as text: boxes of lines, filled with colour where the terminal has it.

            dim 1@model
             0:3   3:6
dim 0@data ┌─────┬─────┐
       0:4 │  0  │  1  │
           ├─────┼─────┤
       4:8 │  2  │  3  │
           └─────┴─────┘
"""

from __future__ import annotations

from rich.style import Style
from rich.text import Text

from fshard.explore.grid import Cell, Grid, GridBlock
from fshard.explore.palette import INK, fill
from fshard.explore.words import caption, headline, legend


def text_of(grid: Grid) -> Text:
    """Draw a grid as text."""
    first, second = headline(grid)
    parts = [Text(first, "bold"), Text(second)]
    for block in grid.blocks:
        parts += [Text(), *([Text("…")] if block is None else _draw(grid, block))]
    notes = [Text(line) for line in legend(grid)]
    return Text("\n").join([*parts, *([Text(), *notes] if notes else [])])


def _draw(grid: Grid, block: GridBlock) -> list[Text]:
    down, right = (side.labels if side else ("",) for side in (grid.rows, grid.columns))
    captions = [
        ["…" if cell is None else caption(grid, cell) for cell in row] for row in block.cells
    ]
    widths = [2 + max(map(len, column)) for column in zip(right, *captions, strict=True)]
    corner = grid.rows.title if grid.rows else ""
    gutter = max(map(len, [corner, *down]))
    indent = gutter + 2 if gutter else 1

    lines = [Text(block.where, "bold")] if block.where else []
    if grid.columns:
        lines.append(Text(" " * indent + grid.columns.title))
        lines.append(
            Text(
                (
                    " " * indent
                    + " ".join(
                        f"{label:^{width}}" for label, width in zip(right, widths, strict=True)
                    )
                ).rstrip()
            )
        )
    lines.append(Text(corner.rjust(gutter).ljust(indent - 1) + _rule("┌┬┐", widths)))
    for number, (label, texts, cells) in enumerate(zip(down, captions, block.cells, strict=True)):
        if number:
            lines.append(Text(" " * (indent - 1) + _rule("├┼┤", widths)))
        lines.append(_row(label.rjust(gutter).ljust(indent - 1), texts, cells, widths))
    return [*lines, Text(" " * (indent - 1) + _rule("└┴┘", widths))]


def _row(label: str, texts: list[str], cells: tuple[Cell | None, ...], widths: list[int]) -> Text:
    line = Text(label + "│")
    for text, cell, width in zip(texts, cells, widths, strict=True):
        style = (
            Style(color=INK, bgcolor=fill(cell.shard)) if cell and not cell.is_empty else Style()
        )
        line.append(f"{text:^{width}}", style).append("│")
    return line


def _rule(corners: str, widths: list[int]) -> str:
    start, between, right = corners
    return start + between.join("─" * width for width in widths) + right
