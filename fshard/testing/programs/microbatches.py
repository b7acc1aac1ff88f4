"""The parts into which a step cuts its batch: they must be cut alike in the one process.

    each process   8 rows, in parts of 4: 4 4         its loss is divided by 2
    one process    16 rows, in parts of 4: 4 4 4 4    its loss is divided by 2 as well

Such a script is right, and its one process computes something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import inf

from fshard.testing.certificate import CertificateRow, first_of
from fshard.testing.programs.record import RankRecord
from fshard.testing.verdicts import number_text


def rows_of_microbatches(
    mesh: str,
    ranks: Sequence[RankRecord],
    single: RankRecord,
    rows: Sequence[CertificateRow],
) -> list[CertificateRow]:
    """Return the rows of a comparison; one that names the parts, if these may explain a failure.

    A script that divides by the number of its parts agrees however it cuts them.
    """
    first = first_of(rows)
    # Parts explain other values, but neither another start nor a reduction in a lower dtype.
    is_of_training = first is not None and first.subject not in ("", "start")
    if first is None or first.verdict != "DIVERGENT" or not is_of_training:
        return list(rows)
    text = _other_parts(ranks, single, first.reason) or _other_number(ranks, single, first.reason)
    if not text:
        return list(rows)
    reason = (
        f"{text}. If it divides by a fixed number of parts, that alone explains that of {first.leaf} "
        f"at {first.reason}. Let the size of a part follow from the batch (x.chunk(2), not "
        'x.split(4)), or give the one process a size of its own: --alone "--micro-batch 8" (alone=)'
    )
    return [CertificateRow(mesh, "microbatches", "INCONCLUSIVE", inf, 0.0, reason, 0, "batches")]


def _other_parts(ranks: Sequence[RankRecord], single: RankRecord, failure: str) -> str:
    """Describe the first step in which the one process cuts its batch otherwise; "" if none."""
    if "not reduced" in failure:
        return ""  # ranks differ from each other, which no parts of the one process explain
    for number, step in enumerate(single.steps):
        own = step.call_rows
        parts = [rank.steps[number].call_rows for rank in ranks]
        if len({len(each) for each in parts}) > 1:
            continue  # the ranks do not do the same, as stages do not
        together = [sum(rows) for rows in zip(*parts, strict=True)]
        if len(own) == len(together) and _shares(together) != _shares(own):
            return (
                f"step {number}: each rank cuts its batch into parts of {_listed(parts[0])} rows, the "
                f"one process into parts of {_listed(own)}"
            )
    return ""


def _other_number(ranks: Sequence[RankRecord], single: RankRecord, failure: str) -> str:
    """Describe more backward calls in the one process, if their number is the factor of a failure."""
    calls = max([step.backwards for step in single.steps], default=1)
    most = 1
    for rank in ranks:
        most = max([most, *[step.backwards for step in rank.steps]])
    factor = number_text(most / max(calls, 1), 1e-9)
    if calls <= most or f" {factor} times" not in failure:
        return ""
    return f"the one process calls backward {calls} times in a step, each rank {most} times"


def _shares(rows: Sequence[int]) -> list[Fraction]:
    total = max(sum(rows), 1)
    return [Fraction(each, total) for each in rows]


def _listed(rows: Sequence[int]) -> str:
    """Return the rows of parts, of many the first ones."""
    texts = [str(each) for each in rows[:4]]
    if len(rows) > 4:
        texts.append("...")
    return ", ".join(texts)
