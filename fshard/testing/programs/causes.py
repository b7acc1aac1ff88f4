"""Likely causes of a divergence, which its numbers show.

the difference is a multiple of the parameter        a regulariser that ranks have unlike
the loss is right, if it is weighted by rows         gradients are averaged over ranks instead
each shard of the rows has a factor of its own       the norm for clipping is that of a shard
"""

from __future__ import annotations

from torch import Tensor

from fshard.rounding import bound_of
from fshard.testing.programs.batches import rows_at
from fshard.testing.programs.pair import RunPair
from fshard.testing.verdicts import Comparison, constant_factor, number_text


def regulariser_text(run: RunPair, gradient: Comparison) -> str:
    """Describe a gradient that differs by a multiple of the parameter; "" if it does not."""
    if gradient.shards is None or gradient.full is None or gradient.is_within_bound():
        return ""
    params = run.single.start if gradient.step == 0 else run.single.steps[gradient.step - 1].params
    param = gradient.shards.same_elements_of(params[gradient.leaf])
    # Equal elements, as of a norm's weight, show nothing: a multiple is any other constant.
    if bool((param == param[:1]).all()):
        return ""
    difference = gradient.shards.flattened() - gradient.shards.same_elements_of(gradient.full)
    factor = constant_factor(difference, param, gradient.tolerance)
    if factor is None:
        return ""
    times = number_text(factor, gradient.tolerance)
    return (
        f"; the difference is {times} times the parameter: has the loss of each rank the "
        "regulariser that the one process has?"
    )


def rows_text(run: RunPair, step: int) -> str:
    """Describe ranks of unlike numbers of rows, whose losses are means over these; "" else.

    The loss of one process is the mean by rows then. That of gradients over ranks is another one.
    """
    single = run.single.steps[step].loss
    losses: list[float] = []
    rows: list[int] = []
    for rank in run.ranks:
        loss = rank.steps[step].loss
        if loss is not None:
            losses.append(loss)
            rows.append(rows_at(rank, step))
    if single is None or len(set(rows)) < 2:
        return ""
    by_rows = sum([x * n for x, n in zip(losses, rows, strict=True)]) / sum(rows)
    by_ranks = sum(losses) / len(losses)
    bound = bound_of(None, abs(single), run.dtypes.of_gradients)
    if abs(by_rows - single) > bound or abs(by_ranks - single) <= bound:
        return ""
    numbers = ", ".join([str(n) for n in rows])
    return (
        f"; a mean of means? Ranks have {numbers} rows, and the mean of their losses by rows is "
        "that of one process, not the mean over ranks"
    )


def factors_of_shards_text(run: RunPair, given: Comparison) -> str:
    """Describe a full gradient whose shards of rows have a factor each; "" if they have none.

    A DTensor is gathered before it is compared, so its shards are found by the factors.
    """
    if given.shards is None or given.full is None or not given.full.ndim:
        return ""
    actual = given.shards.shards[0]
    if actual.shape != given.full.shape:
        return ""
    for axis, size in run.axes.items():
        factors = _factors_of_chunks(actual, given.full, size, given.tolerance)
        if len({round(x, 6) for x in factors}) > 1:
            texts: list[str] = []
            for number, factor in enumerate(factors):
                texts.append(f"times {number_text(factor, given.tolerance)} in shard {number}")
            return (
                f"is that of one device {' and '.join(texts)} of its rows along {axis}: does the "
                "norm for clipping differ?"
            )
    return ""


def _factors_of_chunks(x: Tensor, full: Tensor, n: int, tolerance: float) -> list[float]:
    """Return the factor of each of n chunks of rows; none if a chunk has no constant factor."""
    factors: list[float] = []
    for part, expected in zip(x.chunk(n), full.chunk(n), strict=True):
        if part.numel() < 2 or not expected.any():
            return []
        factor = constant_factor(part, expected, tolerance)
        if factor is None:
            is_equal = bool(((part - expected).abs() <= tolerance * expected.abs().max()).all())
            if not is_equal:
                return []
            factor = 1.0
        factors.append(factor)
    return factors
