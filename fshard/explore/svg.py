"""A grid as SVG: a coloured box per cell, with the same text as the text output.

Replicas are a stack of cards, unreduced cells are striped, host memory and disk have a dashed
border, and shards of a flat tensor have widths proportional to their lengths. Text outside the
cells has the colour of the page's text, so that it is legible on any background; a file of its own
follows the reader's light or dark mode.

Drawing proceeds left to right and top to bottom; every function returns its drawing and size.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from fshard.explore.grid import Cell, Grid, GridBlock, Side
from fshard.explore.palette import FONT, INK, MUTED, fill
from fshard.explore.words import caption, coordinates, headline, in_lines, legend

_PAGE = "currentColor"  # of the page's text
_LETTER = 7.3  # the width of a 12 px letter
_LINE = 18.0  # the height of a line of text
_HEIGHT = 34.0  # of a cell
_GAP = 6.0  # between cells
_BLOCK_GAP = 14.0
_MARGIN = 10.0  # of the picture
_WIDEST = 760.0  # a line of blocks, or of columns, in a notebook of 900 pixels
_MOST_SHRUNK = 1140.0  # a block that shrinks to it, with letters of 8 px instead of 12
_FULL = 104.0  # the width of the longest flat shard
_MOST_CARDS = 3  # of a stack of replicas
_CARD = 2.5  # the part of a lower card that is seen, to the right and below


class Drawn(NamedTuple):
    """A shard of a picture, at (0, 0), and its size."""

    svg: str
    width: float
    height: float


_SPACE = Drawn("", 0, 8)
"""Between the text and the cells."""

_MODES = "<style>svg{color:#24292f}@media(prefers-color-scheme:dark){svg{color:#d1d7e0}}</style>"

_STRIPES = (
    '<pattern id="fshard-sum" width="8" height="8" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="3" height="8" fill="#fff" opacity=".38"/></pattern>'
)


def svg_of(grid: Grid) -> str:
    """Draw a grid as an SVG document, for a file."""
    return _svg(grid, _MODES)


def html_of(grid: Grid) -> str:
    """Draw a grid as HTML, for a notebook: as wide as its column at most."""
    return _svg(grid, "")


def _svg(grid: Grid, style: str) -> str:
    first, second = headline(grid)
    rows = [_line(first, bold=True), _line(second), _SPACE, _blocks(grid)]
    notes = [_line(note) for note in legend(grid)]
    if notes:
        rows += [_SPACE, *notes]
    body = _stacked(rows)

    width = body.width + 2 * _MARGIN
    height = body.height + 2 * _MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" style="max-width:100%;height:auto" role="img" '
        f'aria-label="{escape(first)}" font-family="{FONT}" font-size="12">'
        f"{style}<defs>{_STRIPES}</defs>{_moved(body, _MARGIN, _MARGIN)}</svg>"
    )


def _blocks(grid: Grid) -> Drawn:
    """Draw all rows of blocks; a row that is wider than a notebook continues below."""
    omitted = Drawn(_text("…", 0, 3 * _LINE), _width("…"), _LINE)
    lines: list[Drawn] = []
    for row in grid.blocks:
        blocks: list[Drawn] = []
        for block in row:
            blocks.append(omitted if block is None else _block(grid, block))
        widths = [drawn.width for drawn in blocks]
        for numbers in in_lines(widths, _BLOCK_GAP, _WIDEST):
            if lines:
                lines.append(_SPACE)
            lines.append(_in_row([blocks[number] for number in numbers]))
    return _stacked(lines)


def _block(grid: Grid, block: GridBlock) -> Drawn:
    """Draw a block: its title, and its cells; columns that are far too many continue below."""
    row_title, row_labels = _title_and_labels(grid.rows)
    _, column_labels = _title_and_labels(grid.columns)
    gutter = 0.0  # the width of the names of rows, left of the cells
    if grid.rows is not None:
        gutter = max(_width(text) + 8 for text in (row_title, *row_labels))
    widths: list[float] = []
    for column, label in enumerate(column_labels):
        widths.append(_column_width(grid, block, column, label))

    svg = ""
    top = 0.0
    width = _width(block.title)
    if block.title:
        svg += _text(block.title, gutter, 12, bold=True)
        top += _LINE

    lines = [[*range(len(widths))]]
    if gutter + sum(widths) > _MOST_SHRUNK:
        lines = in_lines(widths, _GAP, _WIDEST - gutter)
    for number, columns in enumerate(lines):
        if number:
            top += _SPACE.height
        drawn = _columns(grid, block, columns, widths, gutter, top)
        svg += drawn.svg
        top += drawn.height
        width = max(width, drawn.width)
    return Drawn(svg, gutter + width + _GAP, top)


def _columns(
    grid: Grid,
    block: GridBlock,
    columns: Sequence[int],
    widths: Sequence[float],
    gutter: float,
    begin: float,
) -> Drawn:
    """Draw some columns of a block, below `begin`: the names of the sides, the ranges, the cells.

    The width is that of the cells, without the gutter.
    """
    row_title, row_labels = _title_and_labels(grid.rows)
    column_title, column_labels = _title_and_labels(grid.columns)
    lefts: dict[int, float] = {}
    x = gutter
    for column in columns:
        lefts[column] = x
        x += widths[column] + _GAP

    parts: list[str] = []
    top = begin
    if grid.columns is not None:
        parts.append(_text(column_title, gutter, top + 12))
        baseline = top + 12 + _LINE
        for column, left in lefts.items():
            middle = left + widths[column] / 2
            parts.append(_text(column_labels[column], middle, baseline, anchor="middle"))
        if grid.rows is not None:
            parts.append(_text(row_title, gutter - 8, baseline, anchor="end"))
        top += 2 * _LINE

    for label, cells in zip(row_labels, block.cells, strict=True):
        height = _HEIGHT if any(cells) else _LINE
        if grid.rows is not None:
            parts.append(_text(label, gutter - 8, top + height / 2 + 4, anchor="end"))
        for column, left in lefts.items():
            cell = cells[column]
            width = widths[column]
            if cell is None:
                parts.append(_text("…", left + width / 2, top + height / 2 + 4, anchor="middle"))
            else:
                parts.append(_cell(grid, cell, left, top, width, height))
        top += height + _GAP

    width_of_cells = x - gutter - _GAP
    return Drawn("".join(parts), max(width_of_cells, _width(column_title)), top - begin)


def _title_and_labels(side: Side | None) -> tuple[str, Sequence[str]]:
    """Return the texts of a side; a tensor without this side has one row or column of cells."""
    if side is None:
        return "", ("",)
    return side.title, side.labels


def _column_width(grid: Grid, block: GridBlock, column: int, label: str) -> float:
    """Return the width of a column: that of its text, and of flat shards by their length."""
    cells = [row[column] for row in block.cells]
    texts = [label]
    for cell in cells:
        texts.append("…" if cell is None else caption(grid, cell))
    width_of_text = max(map(_width, texts))
    if not any(cells):
        return width_of_text + 10

    first = cells[0]
    if grid.type.spec.is_flat and first is not None:
        longest = max(_length(cell) for cell in grid.cells)
        return max(width_of_text + 14, _FULL * _length(first) / max(longest, 1))
    return max(width_of_text + 22, 56.0)


def _length(cell: Cell) -> int:
    """Return the number of elements of a flat shard."""
    ((start, stop),) = cell.ranges
    return stop - start


def _cell(grid: Grid, cell: Cell, x: float, y: float, width: float, height: float) -> str:
    """Draw a cell: the stack of its replicas, its box, stripes if it is unreduced, its caption."""
    shape = f'width="{width:g}" height="{height:g}" rx="5"'
    colour = "none" if cell.is_empty else fill(cell.shard)
    text_colour = _PAGE if cell.is_empty else INK

    parts: list[str] = []
    if not cell.is_empty:
        rim = f'stroke="{INK}" stroke-opacity=".35" stroke-width=".8"'
        lower_cards = min(cell.copies.count, _MOST_CARDS) - 1
        for card in range(lower_cards, 0, -1):
            place = f'x="{x + _CARD * card:g}" y="{y + _CARD * card:g}"'
            parts.append(f'<rect {place} {shape} fill="{colour}" {rim}/>')

    is_dashed = grid.type.memory != "device" or cell.is_empty
    if is_dashed:
        rim = f'stroke="{text_colour}" stroke-width="1.6" stroke-dasharray="4 3"'
    else:
        rim = f'stroke="{INK}" stroke-opacity=".25" stroke-width=".8"'
    place = f'x="{x:g}" y="{y:g}"'
    parts.append(f'<rect {place} {shape} fill="{colour}" {rim}/>')
    if grid.type.spec.unreduced and not cell.is_empty:
        parts.append(f'<rect {place} {shape} fill="url(#fshard-sum)"/>')

    words = caption(grid, cell)
    middle = x + width / 2
    parts.append(_text(words, middle, y + height / 2 + 4.3, text_colour, "middle", bold=True))
    ranges = _ranges(cell.ranges)
    if cell.block:
        ranges = f"{_ranges(cell.block)}, flat {ranges}"
    title = f"[{ranges}] on {words} ({coordinates(grid, cell)})"
    return f"<g><title>{escape(title)}</title>{''.join(parts)}</g>"


def _ranges(ranges: Sequence[tuple[int, int]]) -> str:
    return ", ".join([f"{start}:{stop}" for start, stop in ranges])


def _width(text: str) -> float:
    return _LETTER * len(text)


def _text(
    text: str, x: float, y: float, colour: str = _PAGE, anchor: str = "start", *, bold: bool = False
) -> str:
    if not text:
        return ""
    weight = ' font-weight="600"' if bold else ""
    anchor_attribute = f' text-anchor="{anchor}"' if anchor != "start" else ""
    faint = f' fill-opacity="{MUTED}"' if colour == _PAGE and not bold else ""
    place = f'x="{x:g}" y="{y:g}"'
    return f'<text {place} fill="{colour}"{faint}{anchor_attribute}{weight}>{escape(text)}</text>'


def _line(text: str, *, bold: bool = False) -> Drawn:
    return Drawn(_text(text, 0, 12, bold=bold), _width(text), _LINE)


def _moved(drawn: Drawn, x: float, y: float) -> str:
    return f'<g transform="translate({x:g} {y:g})">{drawn.svg}</g>' if drawn.svg else ""


def _stacked(parts: list[Drawn]) -> Drawn:
    svg = ""
    top = 0.0
    for drawn in parts:
        svg += _moved(drawn, 0, top)
        top += drawn.height
    return Drawn(svg, max(drawn.width for drawn in parts), top)


def _in_row(parts: list[Drawn]) -> Drawn:
    svg = ""
    x = 0.0
    for drawn in parts:
        svg += _moved(drawn, x, 0)
        x += drawn.width + _BLOCK_GAP
    return Drawn(svg, x - _BLOCK_GAP, max(drawn.height for drawn in parts))
