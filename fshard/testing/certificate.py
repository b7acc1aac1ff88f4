"""The result of `certify`, `certify_module` and `certify_program`: a row for every leaf, and what rounding explains."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

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


TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""The relative difference that rounding explains, by the lowest precision of a program."""


def bound_of(x: Tensor | None, largest_of_all: float, dtype: torch.dtype) -> float:
    """Return the error that rounding in a dtype explains: relative to the largest number of a leaf.

    A gradient that is zero up to rounding has no size of its own: it counts as 1e-5, and as a thousandth of the largest
    number of all leaves; in a lower dtype 32 roundings of that number are allowed.
    """
    roundings = max(1e-3 * TOLERANCES[dtype], 32 * torch.finfo(dtype).eps)
    return max(TOLERANCES[dtype] * max(largest(x), 1e-5), roundings * largest_of_all)


def largest(x: Tensor | None) -> float:
    """Take the largest absolute value of those that are finite."""
    return 0.0 if x is None or not x.numel() else float(widest(x).abs().nan_to_num(0.0, 0.0).max())


def constant_factor(x: Tensor, expected: Tensor, tolerance: float = 1e-3) -> float | None:
    """Return the number that all of `expected` is multiplied by in x; None if there is none, or it is 1."""
    x, expected = widest(x), widest(expected)
    factor = float((x * expected.conj()).sum().real / expected.abs().square().sum())
    is_constant = (x - factor * expected).abs().max() <= tolerance * abs(factor) * largest(expected)
    return factor if is_constant and abs(factor - 1) > tolerance else None


def widest(x: Tensor) -> Tensor:
    """Convert any tensor to float64 (complex128)."""
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def first_of(rows: Sequence[CertificateRow]) -> CertificateRow | None:
    """Choose the row that fails first: in the first stage, at the first step; the first leaf, one that diverges if any does."""
    failures = [row for row in rows if row.step is not None]
    stage = [row for row in failures if row.stage == failures[0].stage]
    return min(stage, key=lambda row: (row.step, row.verdict != "DIVERGENT"), default=None)


def refer_to_first(rows: Sequence[CertificateRow]) -> list[CertificateRow]:
    """Let rows of a stage that fail later than its first refer to that one."""
    first = first_of(rows)
    return [
        row._replace(reason=f"step {row.step}: after {first.leaf} has diverged")
        if first is not None and row.step not in (None, first.step)
        else row
        for row in rows
    ]


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
        rows = [{self.column if name == "stage" else name: x for name, x in row._asdict().items()} for row in self.rows]
        return json.dumps({"ok": self.ok, "steps": self.steps, "unseen": self.unseen, "rows": rows}, indent=1)

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
            table.add_row("" if row.stage == stage else str(row.stage), row.leaf, row.verdict, *numbers, row.reason)
            stage = row.stage
        return table
