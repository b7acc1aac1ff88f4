"""Gradients that ranks have of their own: they are not reduced, or later in the step.

gradients before step()      differ along data, and their mean is that of one process
gradients that are given     agree, or the change does: step() has reduced them
                             differ too: it is not reduced along data
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import prod

import torch
from torch import Tensor

from fshard.testing.programs.batches import coordinates_of
from fshard.testing.programs.pair import RunPair
from fshard.testing.verdicts import Comparison, number_text

DATA_AXES = ("data", "dp", "replica", "replicate", "fsdp", "ddp", "shard", "batch")
"""Names of axes along which processes load other rows."""

_REDUCED_LATER = "gradients are reduced in step(), after which the runs are compared"


def judged_as_local(
    run: RunPair, gradient: Comparison, given: Comparison | None, change: Comparison
) -> tuple[Comparison, Comparison | None]:
    """Describe the cause if ranks have their own gradients: they are not reduced.

    If `step()` reduces them, or parameters, the result of it is judged instead. Equal changes
    alone prove nothing: those of Adam hardly depend on the size of a gradient.
    """
    scale = _scale_of_sum(run, gradient)
    if scale is None:
        return gradient, given
    is_sent = _is_sent_in_step(run, gradient)
    is_given_local = given is not None and is_local(run, given)
    if not is_sent and (given is None or is_given_local):
        return gradient._replace(cause=_unreduced_text(run, scale, gradient)), given

    if given is not None and is_given_local:
        is_reduced_later = gradient.leaf in _reduced_later(run, gradient.step)
        given_scale = _scale_of_sum(run, given)
        if is_reduced_later and change.is_within_bound():
            given = None
        elif given_scale is not None:
            given = given._replace(cause=_unreduced_text(run, given_scale, given))
    # Its result is judged instead, later in the step.
    return gradient._replace(shards=None, full=None, note=_REDUCED_LATER), given


def _is_sent_in_step(run: RunPair, gradient: Comparison) -> bool:
    """Return True if `step()` sends as many elements as a gradient has, on all its ranks."""
    assert gradient.shards is not None
    by_rank = zip(gradient.shards.devices, gradient.shards.shards, strict=True)
    for rank, x in by_rank:
        if run.ranks[rank].steps[gradient.step].sends < max(x.numel(), 1):
            return False
    return True


def _reduced_later(run: RunPair, step: int) -> frozenset[str]:
    """Return the parameters that `step()` may reduce after optimizers have them, on any rank."""
    names: frozenset[str] = frozenset()
    for rank in run.ranks:
        names |= rank.steps[step].reduced_later
    return names


def _groups(run: RunPair, comparison: Comparison) -> list[tuple[int, list[Tensor]]]:
    """Return the shards of ranks that have the same elements, with the first rank of each."""
    assert comparison.shards is not None and comparison.full is not None
    by_rank = dict(zip(comparison.shards.devices, comparison.shards.shards, strict=True))
    numbers = torch.arange(comparison.full.numel()).reshape(comparison.full.shape)
    groups: dict[bytes, tuple[int, list[Tensor]]] = {}
    for rank, x in by_rank.items():
        elements = run.layouts[comparison.leaf][rank].of(numbers).numpy().tobytes()
        _, members = groups.setdefault(elements, (rank, []))
        members.append(x)
    return list(groups.values())


def is_local(run: RunPair, comparison: Comparison) -> bool:
    """Return True if ranks that have the same elements have other values, beyond rounding."""
    if comparison.is_within_bound():
        return False
    for _, members in _groups(run, comparison):
        if not all(_is_near(members[0], x, comparison.bound) for x in members):
            return True
    return False


def _scale_of_sum(run: RunPair, gradient: Comparison) -> float | None:
    """Return what the gradient of one process is of the sum of those of ranks.

    It is one over a number of ranks, as for a mean, or 1; None if it is none.
    """
    assert gradient.full is not None
    scales = {1.0 / n for n in (1, *run.counts().values())}
    for rank, members in _groups(run, gradient):
        total = torch.stack(members).sum(0)
        expected = run.layouts[gradient.leaf][rank].of(gradient.full)
        scales = {s for s in scales if _is_near(s * total, expected, gradient.bound)}
    return min(scales, default=None)


def _unreduced_text(run: RunPair, scale: float, gradient: Comparison) -> str:
    """Describe gradients of which a multiple of the sum over ranks is right."""
    axes = _axes_of_differences(run, gradient)
    what = _operations_text(run, scale, axes, gradient)
    if not what:
        what = f"sum times {number_text(scale, 1e-9)} over ranks"
    along = " and ".join(axes)
    return (
        f"differs along {along}, where the {what} is that of one process: it is not reduced "
        f"along {along}{run.ranks[0].sync_hint}"
    )


def _operations_text(run: RunPair, scale: float, axes: Sequence[str], gradient: Comparison) -> str:
    """Return the axes of a mean and those of a sum that make a gradient; "" if none do.

    Ranks along other axes have equal gradients, so the sum over all counts each several times.
    """
    members = max(len(members) for _, members in _groups(run, gradient))
    scale *= members / prod([run.axes[name] for name in axes])
    by_data = sorted(axes, key=lambda name: name not in DATA_AXES)
    for n in range(len(axes) + 1):
        for means in combinations(by_data, n):
            if abs(scale * prod([run.axes[name] for name in means]) - 1) > 1e-9:
                continue
            sums = [name for name in axes if name not in means]
            texts: list[str] = []
            if means:
                texts.append(f"mean over {' and '.join(means)}")
            if sums:
                texts.append(f"sum over {' and '.join(sums)}")
            return " and the ".join(texts)
    return ""


def _axes_of_differences(run: RunPair, comparison: Comparison) -> list[str]:
    """Return the axes along which ranks that have the same elements have other values."""
    assert comparison.shards is not None
    by_rank = dict(zip(comparison.shards.devices, comparison.shards.shards, strict=True))
    slices = run.layouts[comparison.leaf]
    coordinates = coordinates_of(run.axes)
    names: list[str] = []
    for number, name in enumerate(run.axes):
        for rank, other in combinations(by_rank, 2):
            steps = [i != j for i, j in zip(coordinates[rank], coordinates[other], strict=True)]
            is_along = [i for i, is_step in enumerate(steps) if is_step] == [number]
            is_same_slice = is_along and slices[rank].is_equal(slices[other])
            if is_same_slice and not _is_near(by_rank[rank], by_rank[other], comparison.bound):
                names.append(name)
                break
    return names


def _is_near(x: Tensor, y: Tensor, bound: float) -> bool:
    return bool(((x - y).abs() <= bound).all())
