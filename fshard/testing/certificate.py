"""The result of `certify`, `certify_module` and `certify_program`: a row for every leaf."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from fshard.tables import Tabular

if TYPE_CHECKING:  # it is imported where a table is shown
    from rich.table import Table

Verdict = Literal["EXACT", "BOUNDED", "DIVERGENT", "INCONCLUSIVE"]


class CertificateRow(NamedTuple):
    """The verdict on a leaf in a stage (under a plugin, on a mesh); `step` is the first that fails."""

    stage: int | str
    leaf: str
    verdict: Verdict
    error: float
    bound: float
    reason: str = ""
    step: int | None = None


def first_of(rows: Sequence[CertificateRow]) -> CertificateRow | None:
    """Choose the row that fails first: in the first stage, at the first step; the first leaf, one that diverges if any does."""
    failures = [row for row in rows if row.step is not None]
    stage = [row for row in failures if row.stage == failures[0].stage]
    return min(stage, key=lambda row: (row.step, row.verdict != "DIVERGENT"), default=None)


@dataclass(frozen=True, repr=False)
class Certificate(Tabular):
    """A row for every leaf in every stage, or on every mesh (see `column`); prints as a table."""

    rows: tuple[CertificateRow, ...]
    steps: int
    title: str
    unseen: str
    column: Literal["stage", "mesh"] = "stage"

    @property
    def ok(self) -> bool:
        """True if every leaf is EXACT or BOUNDED."""
        return self.first is None

    @property
    def first(self) -> CertificateRow | None:
        """The row that fails first: in the first stage, at the first step, the first leaf in the order of the tree."""
        return first_of(self.rows)

    def check(self) -> Certificate:
        """Raise an AssertionError with the table if any leaf is DIVERGENT or INCONCLUSIVE; else return the certificate."""
        if not self.ok:
            raise AssertionError(f"the sharded run is not the run on one device.\n{self}")
        return self

    def json(self) -> str:
        """Return the rows as JSON."""
        rows = [
            {self.column if name == "stage" else name: x for name, x in row._asdict().items()}
            for row in self.rows
        ]
        return json.dumps(
            {"ok": self.ok, "steps": self.steps, "unseen": self.unseen, "rows": rows}, indent=1
        )

    def table(self) -> Table:
        """Return the rows as a rich table."""
        from rich.table import Table

        table = Table(self.column, "leaf", "verdict", "error", "bound", "reason", title=self.title)
        table.caption = f"{self.steps} steps. {self.unseen}"
        stage = None
        for row in self.rows:
            if stage not in (None, row.stage):
                table.add_section()
            numbers = f"{row.error:.1e}", f"{row.bound:.1e}"
            table.add_row(
                "" if row.stage == stage else str(row.stage),
                row.leaf,
                row.verdict,
                *numbers,
                row.reason,
            )
            stage = row.stage
        return table
