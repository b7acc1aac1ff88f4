"""The verdict on every leaf of a stage, and the reason where one diverges."""

from __future__ import annotations

from fshard.optim.leaves import Leaves
from fshard.testing.certify.certificate import Row, first_of
from fshard.testing.certify.comparison import Comparison
from fshard.testing.certify.reasons import Reasons
from fshard.transforms.rules import named, parts_of


def judged(it: Comparison) -> list[Row]:
    """Judge every leaf; give the reason where one diverges first, and refer to that one where others follow."""
    rows = [
        _row(it, place, named(parts_of(path)) or "params") for place, path in enumerate(Leaves.of(it.task.params).paths)
    ]
    first = first_of(rows)
    if first is None or first.step is None:
        return rows
    reasons = Reasons(it, first.step)

    def explained(place: int, row: Row) -> Row:
        if row.step is None:
            return row
        why = reasons.of(place) if row.step == first.step else f"after {first.leaf} has diverged"
        return row._replace(reason=f"step {row.step}: {why}")

    return [explained(*one) for one in enumerate(rows)]


def _row(it: Comparison, place: int, path: str) -> Row:
    gaps = [(it.gap(step, "grads", place), it.gap(step, "params", place)) for step in range(it.task.steps)]
    for step, pair in enumerate(gaps):
        for gap in pair:
            if not gap.ok:
                return Row(it.stage, path, "DIVERGENT", gap.error, gap.bound, step=step)
    same = all(parameter.same for _, parameter in gaps)
    return Row(it.stage, path, "EXACT" if same else "BOUNDED", *gaps[-1][1][1:])
