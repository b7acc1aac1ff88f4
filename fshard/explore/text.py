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

from collections.abc import Sequence
from itertools import zip_longest

from rich.style import Style
from rich.text import Text

from fshard.explore.grid import Cell, Grid, GridBlock
from fshard.explore.palette import INK, fill
from fshard.explore.words import caption, headline, in_lines, legend

_WIDEST = 100  # columns of a line of blocks
_BETWEEN = Text("   ")


def text_of(grid: Grid) -> Text:
    """Draw a grid as text."""
    first, second = headline(grid)
    lines = [Text(first, "bold"), Text(second)]
    for row in grid.blocks:
        blocks: list[list[Text]] = []
        for block in row:
            blocks.append([Text("…")] if block is None else _block(grid, block))
        widths = [max(map(len, block_lines)) for block_lines in blocks]
        for numbers in in_lines(widths, len(_BETWEEN), _WIDEST):
            lines.append(Text())
            lines += _beside([blocks[number] for number in numbers])
    notes = legend(grid)
    if notes:
        lines.append(Text())
        lines += [Text(note) for note in notes]
    return Text("\n").join(lines)


def _beside(blocks: Sequence[list[Text]]) -> list[Text]:
    """Return the lines of blocks beside each other."""
    widths = [max(map(len, block)) for block in blocks]
    lines: list[Text] = []
    for row in zip_longest(*blocks, fillvalue=Text()):
        cells: list[Text] = []
        for text, width in zip(row, widths, strict=True):
            cell = text.copy()
            cell.pad_right(width - len(text))
            cells.append(cell)
        line = _BETWEEN.join(cells)
        line.rstrip()
        lines.append(line)
    return lines


def _block(grid: Grid, block: GridBlock) -> list[Text]:
    row_labels = ("",) if grid.rows is None else grid.rows.labels
    column_labels = ("",) if grid.columns is None else grid.columns.labels
    captions: list[list[str]] = []
    for cells in block.cells:
        captions.append(["…" if cell is None else caption(grid, cell) for cell in cells])
    columns = zip(column_labels, *captions, strict=True)
    widths = [2 + max(map(len, column)) for column in columns]

    # Names of rows are aligned on the right, with a space before the cells.
    corner = "" if grid.rows is None else grid.rows.title
    gutter = max(map(len, [corner, *row_labels]))
    margin = gutter + 1 if gutter else 0

    def indented(label: str) -> str:
        return label.rjust(gutter).ljust(margin)

    lines: list[Text] = []
    if block.title:
        lines.append(Text(block.title, "bold"))
    if grid.columns is not None:
        pairs = zip(column_labels, widths, strict=True)
        labels = " ".join(f"{label:^{width}}" for label, width in pairs)
        indent = " " * (margin + 1)  # the border too
        lines.append(Text(indent + grid.columns.title))
        lines.append(Text((indent + labels).rstrip()))

    lines.append(Text(indented(corner) + _rule("┌┬┐", widths)))
    rows = zip(row_labels, captions, block.cells, strict=True)
    for number, (label, texts, cells) in enumerate(rows):
        if number:
            lines.append(Text(indented("") + _rule("├┼┤", widths)))
        lines.append(_row(indented(label), texts, cells, widths))
    lines.append(Text(indented("") + _rule("└┴┘", widths)))
    return lines


def _row(
    label: str, texts: Sequence[str], cells: Sequence[Cell | None], widths: Sequence[int]
) -> Text:
    line = Text(label + "│")
    for text, cell, width in zip(texts, cells, widths, strict=True):
        style = Style()
        if cell is not None and not cell.is_empty:
            style = Style(color=INK, bgcolor=fill(cell.shard))
        line.append(f"{text:^{width}}", style).append("│")
    return line


def _rule(corners: str, widths: Sequence[int]) -> str:
    left, between, right = corners
    return left + between.join("─" * width for width in widths) + right
