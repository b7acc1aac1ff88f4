"""Tables: their HTML has the values of the text, and loses none in a browser's own layout."""

import re
from fractions import Fraction
from html import unescape
from xml.etree import ElementTree

import pytest

import fshard as fs
from fshard.plan.tables.why import ComparedNumber, Reason
from fshard.refit.plan import RefitPlan
from fshard.source import Site
from fshard.tables import Table, TableCell, TableColumn, Tabular, html_of, text_of
from tests.explore.browser import BROWSER, noted_on

COLUMNS = (
    TableColumn("name"),
    TableColumn("calls", "count"),
    TableColumn("size", "bytes"),
    TableColumn("time", "seconds"),
    TableColumn("share", "ratio"),
    TableColumn("error", "error"),
    TableColumn("source line", "source"),
)
SITE = Site("a/very/long/path/of/a/project/that/goes/on/and/on/models.py", 31, "forward_of_block")


def long_table():
    """Return a table with long texts, sections, and rows whose texts are in another order."""
    table = Table(COLUMNS, title="numbers <b>", lead="a lead", notes=("a note", "another"))
    table.add("blocks[10]", 1234, 4096, 0.00123, 0.5, 1e-9, SITE)
    table.add("blocks[2]", 7, 999, 1.5e-5, 0.25, float("nan"), SITE)
    table.add(TableCell("blocks[2]", text=""), 90, Fraction(20000, 3), None, None, 1e-12, None)
    table.add("a name that is longer than all others of the table", 90, 12, 3, 0.1, 0.0, SITE)
    table.add_section()
    table.add("all", 1421, TableCell(1 << 30, remark=" of 2,147,483,648"), 3.1, None, None, None)
    return table


def cells_of(html):
    """Return the texts of the cells of each row of the body."""
    table = re.search("<table.*?</table>", html, re.DOTALL)[0]
    root = ElementTree.fromstring(table)
    return [["".join(cell.itertext()) for cell in row] for row in root.findall("./tbody/tr")]


def without_unit(text):
    return re.sub(r"(?<=\d) (B|s)(?=$|,| of)", "", text)


def test_html_of_a_table_has_the_texts_with_units():
    table = long_table()

    rows = cells_of(html_of(table))

    assert rows[0][1:6] == ["1,234", "4,096 B", "0.00123 s", "50 %", "1.0e-09"]
    assert rows[4][2] == "1,073,741,824 B of 2,147,483,648"
    for shown, texts in zip(rows, table.texts(), strict=True):
        for actual, expected in zip(shown, texts, strict=True):
            assert without_unit(actual) == expected or not expected, (shown, texts)
    assert rows[2][0] == "blocks[2]"  # in text it is blank, below the same name


def test_html_of_a_table_escapes_names_and_has_no_boxes():
    table = Table((TableColumn("<i>"),), title='<script>alert("x")</script>', notes=("<b>",))
    table.add('"><script>')

    html = html_of(table)

    assert "<script" not in html and "<b>" not in html and "<i>" not in html
    assert '"><script>' in unescape(html)
    assert not set("│┃━─┏└") & set(html)


def test_text_of_a_table_keeps_names_in_brackets():
    table = Table((TableColumn("leaf"),))
    table.add("blocks[w].x[bold]")
    assert "blocks[w].x[bold]" in text_of(table)


def test_row_of_another_length_raises():
    with pytest.raises(ValueError, match="A row must have 7 values; got 1"):
        Table(COLUMNS).add(1)


def subclasses(kind):
    for each in kind.__subclasses__():
        yield each
        yield from subclasses(each)


def test_every_printed_table_is_drawn_by_one_mechanism():
    """A value gives its table alone: none has an HTML of its own, but a picture below it."""
    own = {kind.__name__ for kind in subclasses(Tabular) if "_repr_html_" in vars(kind)}
    assert own == {"Placement"}


ONE_LINE = """
for (const row of document.querySelectorAll("table.fshard tr")) {
  const boxes = [...row.cells].map((cell) => cell.getBoundingClientRect());
  const tops = new Set(boxes.map((box) => Math.round(box.top)));
  notes.push([tops.size, Math.max(...boxes.map((box) => box.height))]);
}
for (const box of document.querySelectorAll(".fshard-table"))
  notes.push(box.scrollWidth <= box.clientWidth);
"""


@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_rows_of_a_table_have_one_line_in_a_browser(tmp_path):
    refit = RefitPlan(3, {(0, 4): 1234567}, ("lm_head.weight", "rotary.freqs"))
    cluster = fs.plan.cluster("h100")
    html = html_of(long_table()) + refit._repr_html_() + cluster._repr_html_()

    notes, errors = noted_on(html, ONE_LINE, tmp_path)

    assert errors == []
    *rows, first_fits, second_fits, third_fits = notes
    assert len(rows) == 6 + 4 + 1 + len(cluster.table().texts())
    assert all(count == 1 and height < 30 for count, height in rows), rows
    assert first_fits and second_fits and third_fits


TEXTS = """
const table = document.querySelector("table.fshard");
const cells = [...table.querySelectorAll("td:not(.source)")];
notes.push(cells.filter((cell) => cell.scrollWidth > cell.clientWidth).map((cell) => cell.textContent));
for (const row of table.tBodies[0].rows)
  notes.push(Math.max(...[...row.cells].map((cell) => cell.getBoundingClientRect().height)));
notes.push(table.parentNode.scrollWidth <= table.parentNode.clientWidth);
"""


def table_of_plans():
    """Return a table of plans with the longest layouts and options that there are."""
    texts = (TableColumn("layout"), TableColumn("options"))
    numbers = (TableColumn("step, s", "seconds"), TableColumn("tokens/s", "count"))
    table = Table((*texts, *numbers, TableColumn("MFU", "ratio"), TableColumn("slower by")))
    long_options = "ZeRO-1 = 2, 16 x 2, interleaved x 2, recompute except attention, mlp"
    table.add("data=32 tensor=2", "ZeRO-1, 8 x 2", 0.16, 6_540_000, 0.39, "")
    table.add(
        "data=4 pipeline=2 tensor=4 experts=8 replicas=2",
        long_options,
        0.176,
        5_960_000,
        0.36,
        "waits for stages: 15 ms more",
    )
    return table


@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
@pytest.mark.parametrize("width", [700, 900])
def test_long_texts_of_a_narrow_table_wrap_in_their_row(width, tmp_path):
    notes, errors = noted_on(html_of(table_of_plans()), TEXTS, tmp_path, width=width)

    assert errors == []
    cut, short_row, long_row, fits = notes
    assert cut == []
    assert short_row < 30 < long_row
    assert fits


@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_long_texts_of_a_wide_table_stay_on_one_line(tmp_path):
    notes, errors = noted_on(html_of(table_of_plans()), TEXTS, tmp_path, width=1400)

    assert errors == []
    assert notes == [[], notes[1], notes[1], True]


CLICKS = """
const table = document.querySelector("table.fshard");
const shown = (column) => notes.push([...table.rows].slice(1).map((row) => row.cells[column].textContent));
const click = (column) => table.rows[0].cells[column].click();
const strike = (column, key) => table.rows[0].cells[column].dispatchEvent(
  new KeyboardEvent("keydown", { key, bubbles: true }));
click(2); shown(2); click(2); shown(2); click(2); shown(2);
click(0); shown(0);
strike(5, "Enter"); shown(5);
notes.push([...table.rows[0].cells].map((cell) => cell.getAttribute("aria-sort")));
notes.push(table.rows[1].cells[6].title);
"""


@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_click_on_a_head_sorts_rows_by_value(tmp_path):
    notes, errors = noted_on(html_of(long_table()), CLICKS, tmp_path)

    assert errors == []
    up, down, restored, names, measures, order, title = notes
    total = "1,073,741,824 B of 2,147,483,648"  # a section of its own
    assert up == ["12 B", "999 B", "4,096 B", "6,666.67 B", total]
    assert down == ["6,666.67 B", "4,096 B", "999 B", "12 B", total]
    assert restored == ["4,096 B", "999 B", "6,666.67 B", "12 B", total]
    assert [name[:10] for name in names] == [
        "a name tha",
        "blocks[2]",
        "blocks[2]",
        "blocks[10]",
        "all",
    ]
    assert measures == ["0.0e+00", "1.0e-12", "1.0e-09", "nan", ""]
    assert order == ["none"] * 5 + ["ascending", "none"]
    assert title == str(SITE)


def test_reason_of_a_plan_is_a_table_of_both_plans():
    rows = [ComparedNumber("layers", 0.75, 16.95, "ms"), ComparedNumber("peak", 2.0, 1.5, "GB")]
    texts = [str(row).rstrip() for row in rows]
    head = f"{'':22}{'best':>14}{'this':>14}{'more':>14}"
    text = "\n".join(["tensor=8 is slower.", "The best: data=8.", head, *texts, "a note"])
    reason = Reason(text, rows)

    html = reason._repr_html_()

    assert str(reason) == text
    assert cells_of(html) == [
        ["layers", "0.75", "16.95", "+16.20", "ms"],
        ["peak", "2.00", "1.50", "-0.50", "GB"],
    ]
    lines = re.findall('<div class="line">(.*?)</div>', html)
    assert lines == ["The best: data=8.", "a note"]


def test_rejection_of_a_plan_is_shown_as_its_sentences():
    reason = Reason("data=3 is rejected: 3 does not divide 8.", [])
    assert "data=3 is rejected" in reason._repr_html_()
