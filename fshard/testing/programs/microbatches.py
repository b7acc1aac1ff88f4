"""The parts into which a step cuts its batch: they must be cut alike in the one process.

    each process   8 rows, in parts of 4: 4 4         its loss is divided by 2
    one process    16 rows, in parts of 4: 4 4 4 4    its loss is divided by 2 as well

Such a script is right, and its one process computes something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import inf

from fshard.testing.certificate import CertificateRow
from fshard.testing.programs.record import RankRecord


def rows_of_microbatches(
    mesh: str,
    ranks: Sequence[RankRecord],
    single: RankRecord,
    rows: Sequence[CertificateRow],
) -> list[CertificateRow]:
    """Return the rows of a comparison; one that names the parts, if these may explain a failure.

    A script that counts its parts agrees however it cuts them.
    """
    failed = [row for row in rows if row.verdict == "DIVERGENT"]
    has_other_cause = any(row.subject in ("", "start") for row in failed)
    if not failed or has_other_cause:
        return list(rows)
    text = _difference(ranks, single)
    if not text:
        return list(rows)
    reason = (
        f"{text}. So gradients of the one process are those of other parts, and prove nothing. Let "
        "the size of a part follow from the batch (x.chunk(2), not x.split(4)), or give the one "
        'process a size of its own: --alone "--micro-batch 8" (alone=)'
    )
    return [CertificateRow(mesh, "microbatches", "INCONCLUSIVE", inf, 0.0, reason, 0, "batches")]


def _difference(ranks: Sequence[RankRecord], single: RankRecord) -> str:
    """Describe the first step in which the one process cuts its batch otherwise; "" if none."""
    for step, own in enumerate(single.parts):
        parts = [rank.parts[step] for rank in ranks if step < len(rank.parts)]
        if len(parts) < len(ranks) or len({len(each) for each in parts}) > 1:
            continue  # the ranks do not do the same, as stages do not
        together = [sum(rows) for rows in zip(*parts, strict=True)]
        if _shares(together) != _shares(own):
            return (
                f"step {step}: each rank cuts its batch into parts of {_listed(parts[0])} rows, the "
                f"one process into parts of {_listed(own)}"
            )
    for step, calls in enumerate(single.backwards):
        most = max(rank.backwards[step] for rank in ranks if step < len(rank.backwards))
        if calls > most:
            return (
                f"step {step}: the one process calls backward {calls} times, each rank {most} times"
            )
    return ""


def _shares(rows: Sequence[int]) -> list[Fraction]:
    total = max(sum(rows), 1)
    return [Fraction(each, total) for each in rows]


def _listed(rows: Sequence[int]) -> str:
    """Return the rows of parts, of many the first ones."""
    texts = [str(each) for each in rows[:4]]
    if len(rows) > 4:
        texts.append("...")
    return ", ".join(texts)
