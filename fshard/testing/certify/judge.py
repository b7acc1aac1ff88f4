"""The verdict on every leaf of a stage, and the reason where one diverges."""

from __future__ import annotations

from fshard.optim.leaves import Leaves
from fshard.testing.certify.certificate import Row, first_of
from fshard.testing.certify.comparison import Comparison, What
from fshard.testing.certify.reasons import Reasons
from fshard.transforms.patterns import named, parts_of


def judged(it: Comparison) -> list[Row]:
    """Judge every leaf; give the reason where one diverges first, and refer to that one where others follow."""
    names = [named(parts_of(path)) or "params" for path in Leaves.of(it.task.params).paths]
    paths = Leaves.of(it.task.buffers).paths if it.task.has_buffers else []
    beside = [f"buffers.{named(parts_of(path))}".rstrip(".") for path in paths]
    rows = [_row(it, place, name, ("grads", "params")) for place, name in enumerate(names)]
    rows += [_row(it, place, name, ("buffers",)) for place, name in enumerate(beside)]
    first = first_of(rows)
    if first is None or first.step is None:
        return rows
    reasons = Reasons(it, first.step)

    def explained(place: int, row: Row) -> Row:
        if row.step is None:
            return row
        why = f"after {first.leaf} has diverged"
        if row.step == first.step:
            why = reasons.of(place) if place < len(names) else reasons.of_buffer(place - len(names))
        return row._replace(reason=f"step {row.step}: {why}")

    return [explained(*one) for one in enumerate(rows)]


def _row(it: Comparison, place: int, path: str, looked_at: tuple[What, ...]) -> Row:
    """Judge a leaf by what is looked at in every step; the verdict is of the last."""
    gaps = [[it.gap(step, what, place) for what in looked_at] for step in range(it.task.steps)]
    for step, found in enumerate(gaps):
        for gap in found:
            if not gap.ok:
                return Row(it.stage, path, "DIVERGENT", gap.error, gap.bound, step=step)
    same = all(found[-1].same for found in gaps)
    return Row(it.stage, path, "EXACT" if same else "BOUNDED", *gaps[-1][-1][1:])
