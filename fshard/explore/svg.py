"""A grid as SVG: a coloured box per cell, with the same text as the text output.

Replicas are a stack of cards, unreduced cells are striped, host memory and disk have a dashed border, and shards of a flat
tensor have widths proportional to their lengths. Text outside the cells has the colour of the page's text, so that it is
legible on any background; a file of its own follows the reader's light or dark mode.

Drawing proceeds left to right and top to bottom; every function returns its drawing and size.
"""

from __future__ import annotations

from html import escape
from typing import NamedTuple

from fshard.explore.grid import Cell, Grid, GridBlock
from fshard.explore.palette import FONT, INK, MUTED, fill
from fshard.explore.words import caption, coordinates, headline, legend

_PAGE = "currentColor"  # of the page's text
_LETTER, _LINE = 7.3, 18.0  # of a 12 px letter
_HEIGHT, _GAP, _MARGIN = 34.0, 6.0, 10.0
_FULL = 104.0  # the width of the longest flat shard


class Drawn(NamedTuple):
    """A shard of a picture, at (0, 0), and its size."""

    svg: str
    width: float
    height: float


_MODES = "<style>svg{color:#24292f}@media(prefers-color-scheme:dark){svg{color:#d1d7e0}}</style>"


def svg_of(grid: Grid) -> str:
    """Draw a grid as an SVG document, for a file."""
    return _svg(grid, _MODES)


def html_of(grid: Grid) -> str:
    """Draw a grid as HTML, for a notebook: as wide as its column at most."""
    return _svg(grid, "")


def _svg(grid: Grid, style: str) -> str:
    first, second = headline(grid)
    words = [_line(first, bold=True), _line(second)]
    more = Drawn(_text("…", 0, 3 * _LINE), _width("…"), _LINE)
    blocks = _in_row([more if block is None else _draw(grid, block) for block in grid.blocks])
    notes = [_line(note) for note in legend(grid)]
    body = _stacked(
        [*words, Drawn("", 0, 8), blocks, *([Drawn("", 0, 8)] if notes else []), *notes]
    )
    width, height = body.width + 2 * _MARGIN, body.height + 2 * _MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" style="max-width:100%;height:auto" role="img" aria-label="{escape(first)}" '
        f'font-family="{FONT}" font-size="12">{style}<defs><pattern id="fshard-sum" width="8" height="8" '
        f'patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="3" height="8" fill="#fff" '
        f'opacity=".38"/></pattern></defs>'
        f"{_moved(body, _MARGIN, _MARGIN)}</svg>"
    )


def _draw(grid: Grid, block: GridBlock) -> Drawn:
    """Draw a block: its title, the names of the sides and the ranges around the cells."""
    down, right = (side.labels if side else ("",) for side in (grid.rows, grid.columns))
    corner = [grid.rows.title] if grid.rows else []
    gutter = max((_width(text) + 8 for text in [*corner, *down]), default=0.0) if grid.rows else 0.0
    widths = [_column(grid, block, column, right[column]) for column in range(len(right))]
    parts: list[str] = []
    top = 0.0
    if block.where:
        parts.append(_text(block.where, gutter, 12, bold=True))
        top += _LINE
    if grid.columns:
        parts.append(_text(grid.columns.title, gutter, top + 12))
        x = gutter
        for text, width in zip(right, widths, strict=True):
            parts.append(_text(text, x + width / 2, top + 12 + _LINE, anchor="middle"))
            x += width + _GAP
        parts += [_text(text, gutter - 8, top + 12 + _LINE, anchor="end") for text in corner]
        top += 2 * _LINE
    for label, cells in zip(down, block.cells, strict=True):
        height = _HEIGHT if any(cells) else _LINE
        if grid.rows:
            parts.append(_text(label, gutter - 8, top + height / 2 + 4, anchor="end"))
        x = gutter
        for cell, width in zip(cells, widths, strict=True):
            parts.append(_cell(grid, cell, x, top, width, height))
            x += width + _GAP
        top += height + _GAP
    across = sum(widths) + _GAP * (len(widths) - 1)
    widest = max(
        across,
        *(_width(text) for text in [block.where, grid.columns.title if grid.columns else ""]),
    )
    return Drawn("".join(parts), gutter + widest + _GAP, top)


def _column(grid: Grid, block: GridBlock, column: int, label: str) -> float:
    """Return the width of a column: that of its text, and for a flat shard in proportion to its length."""
    cells = [row[column] for row in block.cells]
    words = max(
        _width(text) for text in [label, *(caption(grid, cell) if cell else "…" for cell in cells)]
    )
    if not any(cells):
        return words + 10
    if grid.type.spec.is_flat and cells[0] is not None:
        longest = max(stop - start for each in grid.cells for start, stop in each.ranges)
        start, stop = cells[0].ranges[0]
        return max(words + 14, _FULL * (stop - start) / max(longest, 1))
    return max(words + 22, 56.0)


def _cell(grid: Grid, cell: Cell | None, x: float, y: float, width: float, height: float) -> str:
    if cell is None:
        return _text("…", x + width / 2, y + height / 2 + 4, anchor="middle")
    colour, shape = fill(cell.shard), f'width="{width:g}" height="{height:g}" rx="5"'
    cards = (
        0 if cell.is_empty else min(cell.copies.count, 3) - 1
    )  # the cards below the uppermost: shown as rims
    pile = "".join(
        f'<rect x="{x + 2.5 * card:g}" y="{y + 2.5 * card:g}" {shape} fill="{colour}" stroke="{INK}" '
        f'stroke-opacity=".35" stroke-width=".8"/>'
        for card in range(cards, 0, -1)
    )
    rim = f'stroke="{INK}" stroke-opacity=".25" stroke-width=".8"'
    if grid.type.memory != "device" or cell.is_empty:
        rim = (
            f'stroke="{_PAGE if cell.is_empty else INK}" stroke-width="1.6" stroke-dasharray="4 3"'
        )
    box = f'<rect x="{x:g}" y="{y:g}" {shape} fill="{"none" if cell.is_empty else colour}" {rim}/>'
    if grid.type.spec.unreduced and not cell.is_empty:
        box += f'<rect x="{x:g}" y="{y:g}" {shape} fill="url(#fshard-sum)"/>'
    where = ", ".join(f"{start}:{stop}" for start, stop in cell.ranges)
    words = _text(
        caption(grid, cell),
        x + width / 2,
        y + height / 2 + 4.3,
        _PAGE if cell.is_empty else INK,
        "middle",
        bold=True,
    )
    title = f"[{where}] on {caption(grid, cell)} ({coordinates(grid, cell)})"
    return f"<g><title>{escape(title)}</title>{pile}{box}{words}</g>"


def _width(text: str) -> float:
    return _LETTER * len(text)


def _text(
    text: str, x: float, y: float, colour: str = _PAGE, anchor: str = "start", *, bold: bool = False
) -> str:
    weight = ' font-weight="600"' if bold else ""
    where = f' text-anchor="{anchor}"' if anchor != "start" else ""
    faint = f' fill-opacity="{MUTED}"' if colour == _PAGE and not bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{colour}"{faint}{where}{weight}>{escape(text)}</text>'
        if text
        else ""
    )


def _line(text: str, *, bold: bool = False) -> Drawn:
    return Drawn(_text(text, 0, 12, bold=bold), _width(text), _LINE)


def _moved(drawn: Drawn, x: float, y: float) -> str:
    return f'<g transform="translate({x:g} {y:g})">{drawn.svg}</g>' if drawn.svg else ""


def _stacked(parts: list[Drawn]) -> Drawn:
    svg, top = "", 0.0
    for drawn in parts:
        svg, top = svg + _moved(drawn, 0, top), top + drawn.height
    return Drawn(svg, max(drawn.width for drawn in parts), top)


def _in_row(parts: list[Drawn]) -> Drawn:
    svg, x = "", 0.0
    for drawn in parts:
        svg, x = svg + _moved(drawn, x, 0), x + drawn.width + 14
    return Drawn(svg, x - 14, max(drawn.height for drawn in parts))
