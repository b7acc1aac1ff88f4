"""Bounds on the distance of a sharded run from float64, and the distance.

gradient    4 x the error of its leaf on one device + a rounding of the largest summand of devices (they may cancel)
others      4 x the error of the leaf on one device + a rounding of the leaf's largest number a step (the error may be luck)
float64     its error is unknown; one such rounding is assumed
all         + the effect of shifting all gradients by their bound (Adam makes lr of a rounding), and of rounding all
            inputs: a sum that cancels is small, its rounding is not

A bound as large as the value itself is INCONCLUSIVE.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, sqrt
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fshard.optim.leaves import Leaf, trainable
from fshard.optim.scaling import all_finite
from fshard.testing.certify.certificate import CertificateRow, Verdict, first_of
from fshard.testing.certify.runs import Snapshot
from fshard.testing.certify.shards import is_floating, largest, pair_shards, widen

What = Literal["grads", "params", "buffers"]
_WORDS: dict[What, str] = {"grads": "gradient", "params": "parameter", "buffers": "buffer"}
TIMES = 4
"""Allowed error of a sharded run, as a multiple of the error of the run on one device."""


class Gap(NamedTuple):
    """The error and bound of the worst element of a leaf: the nearest to its bound, or the furthest beyond.

    `inconclusive`: the reason if the bound is too large.
    """

    same: bool
    error: float
    bound: float
    inconclusive: str = ""

    @property
    def verdict(self) -> Verdict:
        """EXACT for equal bits, BOUNDED for an error within the bound; DIVERGENT if either is NaN."""
        if self.inconclusive:
            return "INCONCLUSIVE"
        return "EXACT" if self.same else "BOUNDED" if self.error <= self.bound else "DIVERGENT"


@dataclass(frozen=True)
class Reference:
    """The serial run, the one in float64 and the bounds, after `start`; in reproducible mode the bounds are 0."""

    start: Snapshot
    serial: list[Snapshot]
    exact: list[Snapshot]
    bounds: list[Snapshot]
    summands: list[float]
    compute: torch.dtype | None = None


def bounded(
    start: Snapshot,
    serial: list[Snapshot],
    exact: list[Snapshot],
    summands: list[float],
    perturbed_run: Callable[[int, list[list[Leaf]]], list[Snapshot]],
    compute: torch.dtype | None = None,
) -> Reference:
    """Compute the bounds of every leaf in every step; `perturbed_run(sign, shifts)` trains in float64 on moved inputs."""
    own: list[Snapshot] = []
    for step, (one, other, most) in enumerate(zip(serial, exact, summands, strict=True)):
        grads = [_bound(a, b, most, compute) for a, b in zip(one.grads, other.grads, strict=True)]
        params, buffers = (
            [_bound(a, b, (step + 1) * largest(b), compute) for a, b in zip(*pair, strict=True)]
            for pair in ((one.params, other.params), (one.buffers, other.buffers))
        )
        own.append(Snapshot(grads, params, buffers))
    up, down = (
        perturbed_run(sign, [[None if x is None else sign * x for x in step.grads] for step in own]) for sign in (1, -1)
    )
    bounds = [Snapshot(*map(_widened, *steps)) for steps in zip(own, up, down, strict=True)]
    return Reference(start, serial, exact, bounds, summands, compute)


def equal_bits(start: Snapshot, serial: list[Snapshot]) -> Reference:
    """Allow no difference from the serial run."""
    zeros = [Snapshot(*([_filled(x, 0.0) for x in leaves] for leaves in step)) for step in serial]
    return Reference(start, serial, serial, zeros, [0.0] * len(serial))


def _bound(serial: Leaf, exact: Leaf, rounded: float, compute: torch.dtype | None) -> Leaf:
    if serial is None or not trainable(serial):
        return _filled(serial, 0.0)
    rounding = torch.finfo(compute or serial.dtype).eps * rounded
    error = largest(widen(serial) - exact)
    if compute is None and serial.dtype == exact.dtype:  # the float64 run is the same run, and rounds as well
        error = max(error, rounding)
    return _filled(serial, TIMES * error + rounding)


def _widened(bounds: list[Leaf], up: list[Leaf], down: list[Leaf]) -> list[Leaf]:
    return [
        bound if bound is None or not trainable(high) else bound + (high - low).abs().nan_to_num(0, inf)
        for bound, high, low in zip(bounds, up, down, strict=True)
    ]


def _filled(x: Leaf, bound: float) -> Leaf:
    return None if x is None else torch.full(x.shape, bound, dtype=torch.float64, device=x.device)


@dataclass(frozen=True)
class Comparison:
    """A sharded run beside its reference."""

    reference: Reference
    found: list[Snapshot]

    def gap(self, step: int, what: What, place: int) -> Gap:
        """Compare a leaf in a step; gradients that are not finite in either run are equal: a scaled loss skips the step."""
        if what == "grads" and self._overflown[step]:
            return Gap(True, 0.0, 0.0)
        it = self.reference
        found, serial, exact, bound = (
            getattr(run[step], what)[place] for run in (self.found, it.serial, it.exact, it.bounds)
        )
        if found is None or serial is None:
            return Gap(found is serial, 0.0 if found is serial else inf, 0.0)
        same = all(torch.equal(pair.found, pair.expected) for pair in pair_shards(found, serial))
        errors = torch.cat([pair.error.reshape(-1) for pair in pair_shards(found, exact)])
        bounds = torch.cat([pair.expected.reshape(-1) for pair in pair_shards(found, bound)])
        if not errors.numel():
            return Gap(same, 0.0, 0.0)
        worst = int((errors - bounds).argmax())
        return Gap(same, float(errors[worst]), float(bounds[worst]), self._inconclusive(step, what, place))

    @cached_property
    def _overflown(self) -> list[bool]:
        pairs = zip(self.found, self.reference.serial, strict=True)
        return [not (all_finite(a.grads) or all_finite(b.grads)) for a, b in pairs]

    def _inconclusive(self, step: int, what: What, place: int) -> str:
        """Explain why a bound is inconclusive: for most elements it exceeds the gradient, or the change since the
        start.

        A bound of a few roundings counts as 0; elements whose gradient never exceeded its bound do not count.
        """
        it = self.reference
        exact, bound = (getattr(run[step], what)[place] for run in (it.exact, it.bounds))
        if not is_floating(exact):
            return ""
        if not exact.isfinite().all():
            return f"the {_WORDS[what]} on one device is not finite"
        eps = torch.finfo(it.compute or getattr(it.serial[step], what)[place].dtype).eps
        values = [getattr(run, what)[place] for run in it.exact[: step + 1]]
        values = [x for x in values if x is not None and x.isfinite().all()]
        rounding = 2 * TIMES * (step + 1) * eps * max(map(largest, values))
        if what == "grads":
            rounding = sqrt(eps) * it.summands[step]
        else:
            start = widen(getattr(it.start, what)[place])
            values = [x - start for x in values]
        moved = self._moved(step, place) if what == "params" else torch.ones_like(bound, dtype=torch.bool)
        size = max(x[moved].abs().square().mean().sqrt() for x in values)
        if not moved.any() or torch.where(bound <= rounding, 0, bound)[moved].median() <= size:
            return ""
        return f"the bound of the {_WORDS[what]} is too large: training amplifies roundings, or depends on the dtype"

    def _moved(self, step: int, place: int) -> Tensor:
        """Mark the elements of a parameter whose gradient was more than its bound in any step so far."""
        it = self.reference
        moved = torch.zeros_like(it.bounds[step].params[place], dtype=torch.bool)
        if not it.exact[step].grads:  # they are unknown
            return ~moved
        for exact, bounds in zip(it.exact[: step + 1], it.bounds, strict=False):
            if exact.grads[place] is not None:
                moved |= exact.grads[place].abs() > bounds.grads[place]
        return moved


def judge(
    comparison: Comparison,
    stage: int | str,
    names: Sequence[str],
    buffer_names: Sequence[str],
    explain: Callable[[int], Callable[[What, int], str]],
) -> list[CertificateRow]:
    """Judge every leaf; explain failures in the first step with any, and refer others to the first."""
    params: list[tuple[What, int]] = [("params", i) for i in range(len(names))]
    buffers: list[tuple[What, int]] = [("buffers", i) for i in range(len(buffer_names))]
    places = params + buffers
    named = zip([*names, *buffer_names], places, strict=True)
    rows = [_row(comparison, stage, name, what, place) for name, (what, place) in named]
    first = first_of(rows)
    if first is None or first.step is None:
        return rows
    reason_of = explain(first.step)
    for i, (row, (what, place)) in enumerate(zip(rows, places, strict=True)):
        if row.step is None:
            continue
        reason = row.reason or f"after {first.leaf} has diverged"
        if row.step == first.step and row.verdict == "DIVERGENT":
            reason = reason_of(what, place)
        elif first.verdict == "INCONCLUSIVE" and row.verdict == "DIVERGENT":
            row, reason = row._replace(verdict="INCONCLUSIVE"), f"after {first.leaf} was inconclusive"
        rows[i] = row._replace(reason=f"step {row.step}: {reason}")
    return rows


def _row(comparison: Comparison, stage: int | str, name: str, what: What, place: int) -> CertificateRow:
    """Judge a leaf, a parameter with its gradient, by the first step in which it fails, or else by the last."""
    both = what == "params" and bool(comparison.found[0].grads)
    gaps: list[Gap] = []
    for step in range(len(comparison.found)):
        gaps = [comparison.gap(step, each, place) for each in (("grads", "params") if both else (what,))]
        for gap in gaps:
            if gap.verdict in ("DIVERGENT", "INCONCLUSIVE"):
                return CertificateRow(stage, name, gap.verdict, gap.error, gap.bound, gap.inconclusive, step)
    same = all(gap.same for gap in gaps)
    return CertificateRow(stage, name, "EXACT" if same else "BOUNDED", gaps[-1].error, gaps[-1].bound)
