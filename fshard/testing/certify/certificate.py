"""The result of `certify`: a row for every stage and leaf, shown as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from rich.table import Table

from fshard.mesh.layout import Mesh
from fshard.tables import Tabular

Verdict = Literal["EXACT", "BOUNDED", "DIVERGENT", "INCONCLUSIVE"]


class CertificateRow(NamedTuple):
    """The verdict on a leaf in a stage (or under a plugin); `step` is the first that fails."""

    stage: int | str
    leaf: str
    verdict: Verdict
    error: float
    bound: float
    reason: str = ""
    step: int | None = None


def first_of(rows: Sequence[CertificateRow]) -> CertificateRow | None:
    """Choose the row that fails first: in the first stage, at the first step; the first leaf, one that diverges if any does."""
    failed = [row for row in rows if row.step is not None]
    stage = [row for row in failed if row.stage == failed[0].stage]
    return min(stage, key=lambda row: (row.step, row.verdict != "DIVERGENT"), default=None)


@dataclass(frozen=True, repr=False)
class Certificate(Tabular):
    """A row for every stage and leaf; prints as a table.  See `certify` and `certify_module`."""

    mesh: Mesh
    steps: int
    reproducible: bool
    rows: tuple[CertificateRow, ...]

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
        if self.first is None:
            return self
        relation = "is not" if self.first.verdict == "DIVERGENT" else "cannot be compared with"
        raise AssertionError(f"the sharded run {relation} the run on one device.\n{self}")

    def table(self) -> Table:
        """Build the rich table."""
        one = "a mesh of one device, bit for bit" if self.reproducible else "one device and float64"
        table = Table("stage", "leaf", "verdict", "error", "bound", "reason", title=f"{self.mesh} against {one}")
        table.caption = f"of the worst element, after step {self.steps - 1} or the first that fails"
        stage = None
        for row in self.rows:
            if stage not in (None, row.stage):
                table.add_section()
            numbers = ("", "") if self.reproducible and row.verdict == "EXACT" else (row.error, row.bound)
            shown = [x if isinstance(x, str) else f"{x:.1e}" for x in numbers]
            table.add_row("" if row.stage == stage else str(row.stage), row.leaf, row.verdict, *shown, row.reason)
            stage = row.stage
        for column in (3, 4):
            table.columns[column].justify = "right"
        return table
