"""The terms by which a layout is slower than the best one, or why it is rejected.

slower_text    on one line, for tables: "74 ms: waits +240 ms, gather -100 ms"
Reason         all terms of both, or the reason of a rejection
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fshard.plan.estimate import PlanEstimate
from fshard.plan.tables.layout import layout_text
from fshard.plan.tables.summary import digits
from fshard.tables import Table, TableCell, TableColumn, html_of

SHOWN_TERM = 0.05
"""The least part of the largest term that a second one must be to be shown."""


def slower_text(best: Mapping[str, float], other: Mapping[str, float]) -> str:
    """Return by how much a step is longer, and the two terms that differ most; "" if it is not.

    Args:
        best: the seconds of a step by term.
        other: those of another one.

    >>> slower_text({"waits": 0.1, "gather": 0.2}, {"waits": 0.34, "gather": 0.1, "update": 0.001})
    '141 ms: waits +240 ms, gather -100 ms'
    """
    more = sum(other.values()) - sum(best.values())
    is_rounding = more <= 1e-6 * sum(best.values())
    if is_rounding:
        return ""
    return f"{digits(1e3 * more)} ms: {_terms_text(best, other)}"


def _terms_text(best: Mapping[str, float], other: Mapping[str, float]) -> str:
    """Return the two terms that differ most, with a sign; one if the second is small beside it."""
    rows = _compared(best, other, 1e3, "ms")
    rows.sort(key=lambda row: -abs(row.more))
    texts = list[str]()
    for row in rows[:2]:
        if abs(row.more) >= SHOWN_TERM * abs(rows[0].more):
            sign = "+" if row.more > 0 else "-"
            texts.append(f"{row.name} {sign}{digits(abs(row.more))} ms")
    return ", ".join(texts)


class ComparedNumber(NamedTuple):
    """A number of the best plan and of another one, as text."""

    name: str
    best: float
    other: float
    unit: str

    @property
    def more(self) -> float:
        """By how much the number of the other plan is larger."""
        return self.other - self.best

    def __str__(self) -> str:
        numbers = f"{self.best:14,.2f}{self.other:14,.2f}{self.more:+14,.2f}"
        return f"{self.name:22}{numbers} {self.unit}"


class Reason(NamedTuple):
    """Why a layout is not the best: as text, and the numbers of both plans that the text has."""

    text: str
    numbers: list[ComparedNumber]

    def to_dict(self) -> dict[str, Any]:
        """Return both for a file of JSON."""
        return {"text": self.text, "numbers": [row._asdict() for row in self.numbers]}

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        """Return the numbers as a table between the sentences of the text; these alone without."""
        columns = (
            TableColumn("term"),
            TableColumn("best", "count"),
            TableColumn("this", "count"),
            TableColumn("more", "count"),
            TableColumn("unit"),
        )
        rows = {str(row).rstrip() for row in self.numbers}
        sentences = [line for line in self.text.split("\n") if line not in rows]
        if not self.numbers:
            return html_of(Table((), notes=sentences))

        title, best, _, *notes = sentences  # the third line has the heads of the columns
        table = Table(columns, title=title, notes=(best, *notes))
        for row in self.numbers:
            numbers = [row.best, row.other]
            cells = [TableCell(number, f"{number:,.2f}") for number in numbers]
            table.add(row.name, *cells, TableCell(row.more, f"{row.more:+,.2f}"), row.unit)
        return html_of(table)


def slower_reason(best: PlanEstimate, other: PlanEstimate, left_out: str) -> Reason:
    """Return the seconds and bytes of two plans by term, and the terms by which one loses.

    Args:
        best: the first plan of a search.
        other: the one that is compared.
        left_out: why the search does not have it first, if it is not slower.
    """
    terms = _compared(best.terms, other.terms, 1e3, "ms")
    numbers = [
        *terms,
        ComparedNumber("step", 1e3 * best.seconds, 1e3 * other.seconds, "ms"),
        ComparedNumber("operations", best.flops / 1e15, other.flops / 1e15, "PFLOP"),
        *_compared(best.memory(), other.memory(), 1e-9, "GB"),
        ComparedNumber("peak", best.peak / 1e9, other.peak / 1e9, "GB"),
    ]

    ratio = other.seconds / best.seconds
    is_slower = ratio > 1 + 1e-6  # else the difference is a rounding
    if is_slower:
        more = f"{digits(1e3 * (other.seconds - best.seconds))} ms more"
        terms_text = _terms_text(best.terms, other.terms)
        head = f"takes {more}, {ratio:.3g} times as long as the best plan: {terms_text}."
    elif other.plan == best.plan:
        head = "is the best plan."
    else:
        head = f"is as fast as the best plan of the search, or faster: {left_out}."

    lines = [f"{layout_text(other.plan)} {head}", f"The best: {layout_text(best.plan)}."]
    lines.append(f"{'':22}{'best':>14}{'this':>14}{'more':>14}")
    lines += [str(row).rstrip() for row in numbers]
    lines += other.notes
    return Reason("\n".join(lines), numbers)


def _compared(
    best: Mapping[str, float], other: Mapping[str, float], factor: float, unit: str
) -> list[ComparedNumber]:
    """Return the terms of two plans; one that only one of them has is 0 in the other."""
    rows = list[ComparedNumber]()
    for name in {**best, **other}:
        number_of_best = factor * best.get(name, 0.0)
        number_of_other = factor * other.get(name, 0.0)
        rows.append(ComparedNumber(name, number_of_best, number_of_other, unit))
    return rows


def rejected_reason(reason: str, nearest: PlanEstimate | None) -> Reason:
    """Return why a layout is rejected; of one that does not fit, the bytes by purpose too."""
    if nearest is None:
        return Reason(f"The layout is rejected: {reason.rstrip('.')}.", [])
    lines = [f"{layout_text(nearest.plan)} is rejected: {reason.rstrip('.')}."]
    for name, size in nearest.memory().items():
        lines.append(f"{name:22}{size / 1e9:14,.2f} GB")
    lines.append(f"{'peak':22}{nearest.peak / 1e9:14,.2f} GB")
    lines.append(f"{'memory of a device':22}{nearest.cluster.memory / 1e9:14,.2f} GB")
    return Reason("\n".join(lines), [])
