"""What `certify` returns: a row for every stage and leaf, shown as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from rich.table import Table

from fshard.mesh.mesh import Mesh
from fshard.mesh.tables import as_html, as_text

Verdict = Literal["EXACT", "BOUNDED", "DIVERGENT"]


class Row(NamedTuple):
    """What was found of one leaf in one stage; `step` is the first at which it diverges."""

    stage: int
    leaf: str
    verdict: Verdict
    error: float
    bound: float
    reason: str = ""
    step: int | None = None


def first_of(rows: Sequence[Row]) -> Row | None:
    """Return what diverges first: in the first stage, at the first step, the first leaf in the order of the tree."""
    divergent = [row for row in rows if row.step is not None]
    return min(
        (row for row in divergent if row.stage == divergent[0].stage), key=lambda row: row.step or 0, default=None
    )


@dataclass(frozen=True)
class Certificate:
    """A row for every stage and leaf.  Prints as a table; see `certify`."""

    mesh: Mesh
    steps: int
    reproducible: bool
    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing diverges."""
        return self.first is None

    @property
    def first(self) -> Row | None:
        """What diverges first: in the first stage, at the first step, the first leaf in the order of the tree."""
        return first_of(self.rows)

    def check(self) -> Certificate:
        """Raise an AssertionError with the table if anything diverges; else return the certificate."""
        if not self.ok:
            raise AssertionError(f"the sharded run is not the run on one device.\n{self}")
        return self

    def table(self) -> Table:
        """Return the certificate as a rich table."""
        one = "a mesh of one device, bit for bit" if self.reproducible else "one device and float64"
        table = Table("stage", "leaf", "verdict", "error", "bound", "reason", title=f"{self.mesh} against {one}")
        table.caption = f"of the worst element, after step {self.steps - 1} or where it diverges"
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

    def __str__(self) -> str:
        return as_text(self.table())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return as_html(self.table())
