"""Values that are shown as tables: as text, and as HTML in notebooks.

A value gives its columns, each with a kind, and its rows of values. Both drawings are of these:

    Table ──> text_of    boxes of lines, by rich, 110 columns wide
          ──> html_of    a <table> whose rows sort by value, with units

The kind of a column decides how a value is written, its unit, its side, and which column shrinks
first where a page is narrow: the source lines. Then texts wrap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from html import escape
from io import StringIO
from math import isnan
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:  # rich is slow to import
    import rich.table

TableKind = Literal["text", "source", "count", "bytes", "seconds", "ratio", "error"]
"""The kind of a column, or of a cell that differs from its column."""

_NUMBERS = ("count", "bytes", "seconds", "ratio", "error")
_RIGHT_IN_TEXT = ("count", "bytes", "seconds", "ratio")  # errors have equal lengths
_FORMATS = {"seconds": ".3g", "error": ".1e"}
_UNITS = {"bytes": "B", "seconds": "s"}
_WIDTH = 110  # columns of text
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


class TableCell(NamedTuple):
    """A value that is written in another way than its column is.

    Args:
        value: by which a page sorts rows.
        text: of the value; None: by its kind. "" repeats the row above: a page shows the value.
        remark: behind the text and its unit, such as " of 1,000".
        kind: None: that of the column.
    """

    value: Any
    text: str | None = None
    remark: str = ""
    kind: TableKind | None = None


@dataclass(frozen=True)
class TableColumn:
    """A column of a table.

    Args:
        title: of the column.
        kind: of its values.
        wraps: False if the texts of a terminal's table stay on one line.
    """

    title: str
    kind: TableKind = "text"
    wraps: bool = True


@dataclass
class Table:
    """A table as a value: columns, and rows in sections.

    Args:
        columns: of all rows.
        title: above the table.
        lead: a line above the title.
        notes: lines below the table.

    >>> table = Table([TableColumn("line"), TableColumn("size", "bytes")], title="memory")
    >>> table.add("a.py:1", 4096)
    >>> table.add("a.py:2", TableCell(1000, remark=" of 2,000"))
    >>> table.texts()
    [('a.py:1', '4,096'), ('a.py:2', '1,000 of 2,000')]
    """

    columns: Sequence[TableColumn]
    title: str = ""
    lead: str = ""
    notes: Sequence[str] = ()
    sections: list[list[tuple[Any, ...]]] = field(default_factory=lambda: [[]])

    def add(self, *values: Any) -> None:
        """Add a row: a value, or a `TableCell`, for each column. None is an empty cell."""
        if len(values) != len(self.columns):
            raise ValueError(f"A row must have {len(self.columns)} values; got {len(values)}.")
        self.sections[-1].append(values)

    def add_section(self) -> None:
        """Begin a section: a line is drawn above it, and a page sorts its rows alone."""
        self.sections.append([])

    def texts(self) -> list[tuple[str, ...]]:
        """Return the texts of all rows, as the drawing in a terminal has them."""
        rows: list[tuple[str, ...]] = []
        for section in self.sections:
            for row in section:
                cells = [_written(cell) for cell in _cells(self, row)]
                rows.append(tuple(cells))
        return rows

    def __rich__(self) -> rich.table.Table:
        return _rich_table(self)


class Tabular:
    """A value that is printed as its table."""

    def table(self) -> Table:
        """Return the value as a table."""
        raise NotImplementedError

    def __str__(self) -> str:
        return text_of(self.table())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return html_of(self.table())


# -- values as text --------------------------------------------------------------------------------


def count_text(count: Fraction | float) -> str:
    """Write a count; fractions get enough digits not to look like integers.

    >>> count_text(4000), count_text(Fraction(10, 3))
    ('4,000', '3.33')
    >>> count_text(Fraction(8 * 65535, 65536))  # with two digits: 8.00
    '7.9999'
    """
    if isinstance(count, float):
        return f"{count:,.0f}"
    if count.denominator == 1:
        return f"{int(count):,}"
    digits = 2
    while digits < 12 and round(float(count) % 1, digits) in (0, 1):
        digits += 1
    return f"{float(count):,.{digits}f}"


def byte_text(count: int) -> str:
    """Write a number of bytes with a unit.

    >>> byte_text(192), byte_text(1536), byte_text(24 << 20)
    ('192 B', '1.5 KiB', '24.0 MiB')
    """
    power = max(count.bit_length() - 1, 0) // 10
    power = min(power, len(_BYTE_UNITS) - 1)
    decimals = 1 if power else 0
    return f"{count / 1024**power:,.{decimals}f} {_BYTE_UNITS[power]}"


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield rows as lines, whose columns begin at the same character.

    >>> [*aligned([("w", "f32"), ("step", "int")])]
    ['w     f32', 'step  int']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
        yield "  ".join(cells).rstrip()


def _cells(table: Table, row: Sequence[Any]) -> list[TableCell]:
    """Return the cells of a row, each with its kind."""
    cells: list[TableCell] = []
    for column, value in zip(table.columns, row, strict=True):
        cell = value if isinstance(value, TableCell) else TableCell(value)
        cells.append(cell._replace(kind=cell.kind or column.kind))
    return cells


def _written(cell: TableCell) -> str:
    """Return the text of a cell in a terminal."""
    if cell.text is not None:
        return cell.text + cell.remark
    return _by_kind(cell) + cell.remark


def _by_kind(cell: TableCell) -> str:
    """Return the text of a value by the kind of its cell."""
    value = cell.value
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if cell.kind in ("count", "bytes"):
        return count_text(value)
    if cell.kind == "ratio":
        return f"{100 * value:.0f} %"
    return format(value, _FORMATS[cell.kind]) if cell.kind in _FORMATS else str(value)


# -- in a terminal ---------------------------------------------------------------------------------


def text_of(table: Table) -> str:
    """Return a table as text."""
    from rich.console import Console  # slow to import

    console = Console(file=StringIO(), width=_WIDTH, record=True, force_jupyter=False)
    console.print(table)
    text = console.export_text().rstrip()
    return f"{table.lead}\n{text}" if table.lead else text


def _rich_table(table: Table) -> rich.table.Table:
    """Return a table of rich. Texts are no markup: a name may have brackets."""
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(title=Text(table.title) if table.title else None)
    for column in table.columns:
        side = "right" if column.kind in _RIGHT_IN_TEXT else "left"
        drawn.add_column(Text(column.title), justify=side, no_wrap=not column.wraps)
    for number, section in enumerate(table.sections):
        if number:
            drawn.add_section()
        for row in section:
            drawn.add_row(*[Text(_written(cell)) for cell in _cells(table, row)])
    if table.notes:
        drawn.caption = Text("\n".join(table.notes))
        drawn.caption_justify = "center" if len(table.notes) == 1 else "left"
    return drawn


# -- in a notebook ---------------------------------------------------------------------------------

# Colours are those of the page, and a grey that shows on light and dark ones: a notebook's page is
# light or dark whatever the reader's system is. A row is part of the table's grid, so that the
# browser shrinks its columns: Note [Columns that shrink].
_STYLE = """<style>
.fshard-table{overflow-x:auto;font-size:12px;line-height:1.5}
.fshard-table table.fshard{display:grid;width:fit-content;max-width:100%;margin:0;border:0;
border-collapse:collapse;font-size:12px;font-variant-numeric:tabular-nums}
.fshard-table table.fshard :is(thead,tbody,tr){display:contents}
.fshard-table table.fshard caption{grid-column:1/-1;padding:2px 8px;text-align:left;
font-weight:600;color:inherit;white-space:normal}
.fshard-table table.fshard :is(th,td){display:block;min-width:0;max-width:none;padding:2px 8px;
border:0;text-align:left;white-space:normal;overflow-wrap:anywhere}
.fshard-table table.fshard :is(th,.n,.source){white-space:nowrap;overflow:hidden;
text-overflow:ellipsis}
.fshard-table table.fshard th{position:relative;padding-right:18px;font-weight:600;
cursor:pointer;border-bottom:1px solid var(--jp-border-color1,rgba(128,128,128,.6))}
.fshard-table table.fshard .n{text-align:right}
.fshard-table table.fshard th.n{padding:2px 8px 2px 18px}
.fshard-table table.fshard .again{color:color-mix(in srgb,currentColor 65%,transparent)}
.fshard-table table.fshard th::after{position:absolute;right:6px;font-size:9px}
.fshard-table table.fshard th.n::after{left:6px;right:auto}
.fshard-table table.fshard th[aria-sort=ascending]::after{content:"\\25b2"}
.fshard-table table.fshard th[aria-sort=descending]::after{content:"\\25bc"}
.fshard-table table.fshard tbody tr:nth-child(even) td{background:rgba(128,128,128,.1)}
.fshard-table table.fshard tbody+tbody tr:first-child td{
border-top:1px solid var(--jp-border-color2,rgba(128,128,128,.4))}
.fshard-table .line{padding:2px 8px;opacity:.85}
</style>"""

# Handlers are attributes, which pages run that drop or delay scripts. The third click restores the
# order. Rows of a section stay in it; empty cells come last.
_SORT = """const head=event.target.closest('th');if(head){
const heads=[...head.parentNode.children],column=heads.indexOf(head);
const next={ascending:'descending',descending:'none'}[head.getAttribute('aria-sort')]||'ascending';
heads.forEach((other)=>other.setAttribute('aria-sort',other===head?next:'none'));
const key=(row)=>row.cells[column].dataset.value??row.cells[column].textContent;
const sign=next==='descending'?-1:1;
const compare=(a,b)=>{if(next==='none')return a.dataset.row-b.dataset.row;
const x=key(a),y=key(b);if(x===''||y==='')return(x==='')-(y==='');
const more=x-y;return sign*(isNaN(more)?x.localeCompare(y,undefined,{numeric:true}):more||0)};
for(const body of head.closest('table').tBodies){const rows=[...body.rows];
rows.forEach((row,index)=>row.dataset.row??=index);body.append(...rows.sort(compare))}}"""
_KEY = "if(event.key==='Enter'||event.key===' '){event.preventDefault();event.target.click()}"

# Note [Columns that shrink]
# On a narrow page numbers keep their width, and source lines, of width 1fr, have what all others
# leave: they shrink first, and are cut, so that a ledger has a line a row. A source line that is
# cut is in full in the title of its cell. Where that is not enough other long texts wrap within
# their row, the longest first.
_LONG = 16  # letters of a text, or of a source line, that are always on one line


def html_of(table: Table) -> str:
    """Return a table as HTML for a notebook."""
    bodies: list[str] = []
    for section in table.sections:
        rows = "".join([_html_row(table, row) for row in section])
        bodies.append(f"<tbody>{rows}</tbody>")
    heads = "".join([_html_head(column) for column in table.columns])
    caption = f"<caption>{escape(table.title)}</caption>" if table.title else ""
    handlers = f'onclick="{escape(_SORT)}" onkeydown="{escape(_KEY)}"'
    lead = _html_line(table.lead)
    notes = "".join([_html_line(note) for note in table.notes])
    return (
        f'<div class="fshard-table">{_STYLE}{lead}'
        f'<table class="fshard" style="grid-template-columns:{_tracks(table)}">{caption}'
        f"<thead {handlers}><tr>{heads}</tr></thead>{''.join(bodies)}</table>{notes}</div>"
    )


def _tracks(table: Table) -> str:
    """Return the widths of the columns: see Note [Columns that shrink]."""
    tracks: list[str] = []
    for number, column in enumerate(table.columns):
        longest = len(column.title)
        for section in table.sections:
            for row in section:
                cell = _cells(table, row)[number]
                longest = max(longest, len(_html_text(cell)))
        if column.kind in _NUMBERS or longest <= _LONG:
            tracks.append("max-content")
        elif column.kind == "source":
            tracks.append(f"minmax({_LONG}ch,1fr)")
        else:
            tracks.append(f"minmax({_LONG}ch,max-content)")
    return " ".join(tracks)


def _html_head(column: TableColumn) -> str:
    side = ' class="n"' if column.kind in _NUMBERS else ""
    # Cells have their unit in a notebook.
    title = column.title.removesuffix(", s") if column.kind == "seconds" else column.title
    return f'<th scope="col" tabindex="0"{side}>{escape(title)}</th>'


def _html_row(table: Table, row: Sequence[Any]) -> str:
    cells: list[str] = []
    for column, cell in zip(table.columns, _cells(table, row), strict=True):
        cells.append(_html_cell(column, cell))
    return f"<tr>{''.join(cells)}</tr>"


def _html_cell(column: TableColumn, cell: TableCell) -> str:
    classes: list[str] = []
    if column.kind in _NUMBERS:
        classes.append("n")
    elif column.kind == "source":
        classes.append("source")
    if cell.text == "":
        classes.append("again")
    attributes = f' class="{" ".join(classes)}"' if classes else ""

    value = _sorting_value(cell.value)
    if value is not None:
        attributes += f' data-value="{value}"'

    text = _html_text(cell)
    title = ""
    if cell.kind == "bytes" and value is not None and cell.value >= 1024:
        title = byte_text(int(cell.value))
    elif column.kind == "source" and len(text) > _LONG:
        title = text
    if title:
        attributes += f' title="{escape(title)}"'
    return f"<td{attributes}>{escape(text)}</td>"


def _html_text(cell: TableCell) -> str:
    """Return the text of a cell on a page: with its unit, and the value that a row repeats."""
    text = cell.text or _by_kind(cell)
    unit = _UNITS.get(cell.kind or "", "")
    if unit and text and text[-1].isdigit():
        text = f"{text} {unit}"
    return text + cell.remark


def _sorting_value(value: Any) -> str | None:
    """Return a number as JavaScript reads it; "" for one without an order, None for a text."""
    if value is None or isinstance(value, str):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    if isnan(number):
        return ""
    return str(number).replace("inf", "Infinity")


def _html_line(text: str) -> str:
    return f'<div class="line">{escape(text)}</div>' if text else ""
