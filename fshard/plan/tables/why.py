"""`why_text`: the terms by which a layout is slower than the best one, or why it is rejected."""

from __future__ import annotations

from typing import NamedTuple

from fshard.plan.estimate import PlanEstimate
from fshard.plan.tables.layout import layout_text


class ComparedNumber(NamedTuple):
    """A number of the best plan and of another one, as text."""

    name: str
    best: float
    other: float
    unit: str

    def __str__(self) -> str:
        more = self.other - self.best
        return f"{self.name:22}{self.best:14,.2f}{self.other:14,.2f}{more:+14,.2f} {self.unit}"


def slower_text(best: PlanEstimate, other: PlanEstimate) -> str:
    """Return the seconds and bytes of two plans by term, and the term by which one loses."""
    rows = list[ComparedNumber]()
    for name, seconds in other.terms.items():
        rows.append(ComparedNumber(name, 1e3 * best.terms.get(name, 0.0), 1e3 * seconds, "ms"))
    largest = max(rows, key=lambda row: row.other - row.best)
    rows.append(ComparedNumber("step", 1e3 * best.seconds, 1e3 * other.seconds, "ms"))
    rows.append(ComparedNumber("operations", best.flops / 1e15, other.flops / 1e15, "PFLOP"))
    sizes = best.memory()
    for name, size in other.memory().items():
        rows.append(ComparedNumber(name, sizes.get(name, 0) / 1e9, size / 1e9, "GB"))
    rows.append(ComparedNumber("peak", best.peak / 1e9, other.peak / 1e9, "GB"))

    ratio = other.seconds / best.seconds
    if ratio > 1 + 1e-6:
        more = f"{largest.other - largest.best:,.2f} ms more for {largest.name}"
        head = f"takes {ratio:.3g} times as long as the best plan: {more}."
    elif other.plan == best.plan:
        head = "is the best plan."
    else:
        head = "is as fast as the best plan of the search, or faster: its constraints left it out."
    lines = [f"{layout_text(other.plan)} {head}", f"The best: {layout_text(best.plan)}."]
    lines.append(f"{'':22}{'best':>14}{'this':>14}{'more':>14}")
    return "\n".join([*lines, *[str(row).rstrip() for row in rows], *other.notes])


def rejected_text(reason: str, nearest: PlanEstimate | None) -> str:
    """Return why a layout is rejected; of one that does not fit, the bytes by purpose too."""
    if nearest is None:
        return f"The layout is rejected: {reason.rstrip('.')}."
    lines = [f"{layout_text(nearest.plan)} is rejected: {reason.rstrip('.')}."]
    for name, size in nearest.memory().items():
        lines.append(f"{name:22}{size / 1e9:14,.2f} GB")
    lines.append(f"{'peak':22}{nearest.peak / 1e9:14,.2f} GB")
    lines.append(f"{'memory of a device':22}{nearest.cluster.memory / 1e9:14,.2f} GB")
    return "\n".join(lines)
