"""The result of `certify`, `certify_module` and `certify_program`: a row for every leaf."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fshard.tables import Table, TableCell, TableColumn, Tabular

Verdict = Literal["EXACT", "BOUNDED", "DIVERGENT", "INCONCLUSIVE"]


class CertificateRow(NamedTuple):
    """The verdict on a leaf in a stage (under a plugin, on a mesh).

    `step` is the first that fails, and `subject` what of the leaf: its start, the loss, its
    gradient, the change of the parameter.
    """

    stage: int | str
    leaf: str
    verdict: Verdict
    error: float
    bound: float
    reason: str = ""
    step: int | None = None
    subject: str = ""


WARNING = "WARNING"
"""A note with this word is above the table: the verdict may be right, and the program is not."""

FEW = 3
"""Leaves with the same reason from which on a table has one row for them."""

_TIMES = {"start": -1, "loss": 0, "gradient": 1, "gradient that the optimizer is given": 2}


def time_of(subject: str) -> int:
    """Return when in a step a subject is there: a gradient before the change that it makes."""
    return _TIMES.get(subject, len(_TIMES))


def first_of(
    rows: Sequence[CertificateRow], *, prefers_causes: bool = False
) -> CertificateRow | None:
    """Choose the row that fails first: in the first stage, at the first step.

    Of several leaves it is the first that diverges, else the first; a gradient is before a change.
    With `prefers_causes` a gradient whose reason is a cause is before one that only names an
    element.
    """
    failures = [row for row in rows if row.step is not None]
    if not failures:
        return None
    failures_of_stage = [row for row in failures if row.stage == failures[0].stage]

    def order(row: CertificateRow) -> tuple[int, bool, int, bool]:
        is_judged = prefers_causes and "gradient" in row.subject
        has_no_cause = is_judged and " first differs at " in row.reason
        return row.step or 0, row.verdict != "DIVERGENT", time_of(row.subject), has_no_cause

    return min(failures_of_stage, key=order)


def _merged(rows: Sequence[CertificateRow]) -> list[CertificateRow]:
    """Return a row for leaves that fail for the same reason, with the largest error of them."""
    groups: dict[tuple[object, ...], list[CertificateRow]] = {}
    for number, row in enumerate(rows):
        key = (row.stage, row.verdict, row.reason)
        groups.setdefault(key if row.step is not None else (number,), []).append(row)
    merged: list[CertificateRow] = []
    for group in groups.values():
        if len(group) < FEW:
            merged += group
            continue
        names = ", ".join([row.leaf for row in group[:2]])
        error = max(row.error for row in group)
        bound = max(row.bound for row in group)
        leaf = f"{len(group)} leaves: {names}, ..."
        merged.append(group[0]._replace(leaf=leaf, error=error, bound=bound))
    return merged


@dataclass(frozen=True, repr=False)
class Certificate(Tabular):
    """A row for every leaf in every stage, or on every mesh (see `column`); prints as a table."""

    rows: tuple[CertificateRow, ...]
    steps: int
    title: str
    unseen: str
    column: Literal["stage", "mesh"] = "stage"
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if every leaf is EXACT or BOUNDED."""
        return self.first is None

    @property
    def first(self) -> CertificateRow | None:
        """The row that fails first: see `first_of`."""
        return first_of(self.rows, prefers_causes=self.column == "mesh")

    @property
    def warnings(self) -> tuple[str, ...]:
        """The notes on what looks wrong in the program, such as data that is not divided."""
        return tuple([note for note in self.notes if WARNING in note])

    def check(self) -> Certificate:
        """Raise an AssertionError with the table if any leaf is DIVERGENT or INCONCLUSIVE.

        Else return the certificate.
        """
        if not self.ok:
            raise AssertionError(f"the sharded run is not the run on one device.\n{self}")
        return self

    def json(self) -> str:
        """Return the rows as JSON."""
        rows: list[dict[str, object]] = []
        for row in self.rows:
            entry = row._asdict()
            # First, under the name of the column.
            rows.append({self.column: entry.pop("stage"), **entry})
        content = {
            "ok": self.ok,
            "steps": self.steps,
            "notes": list(self.notes),
            "unseen": self.unseen,
            "rows": rows,
        }
        return json.dumps(content, indent=1)

    def table(self) -> Table:
        """Return the rows as a table."""
        columns = (
            TableColumn(self.column),
            TableColumn("leaf"),
            TableColumn("verdict"),
            TableColumn("error", "error"),
            TableColumn("bound", "error"),
            TableColumn("reason"),
        )
        quiet = [note for note in self.notes if note not in self.warnings]
        note = " ".join([f"{self.steps} steps.", *quiet, self.unseen])
        lead = "\n".join([line for line in (*self.warnings, self._lead()) if line])
        table = Table(columns, title=self.title, lead=lead, notes=(note,))
        stage = None
        for row in _merged(self.rows):
            is_first_of_stage = row.stage != stage
            if is_first_of_stage and stage is not None:
                table.add_section()
            name = TableCell(row.stage, text=None if is_first_of_stage else "")
            table.add(name, row.leaf, row.verdict, row.error, row.bound, row.reason)
            stage = row.stage
        return table

    def _lead(self) -> str:
        """Return the row that fails first, in words; "" if none does."""
        first = self.first
        if first is None:
            return ""
        reason = first.reason or f"step {first.step}: {first.subject}"
        return f"first: {first.leaf}, {reason}"
