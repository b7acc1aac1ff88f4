"""Bounds on the distance of a correct sharded run from one in float64, and the verdict on each leaf.

own       4 x the error of the leaf on one device + a rounding: of the step's largest gradient, or for each step of the
          leaf's largest number (parameters and buffers)
bound     own + the effect of rounding all inputs and of moving all gradients by their own bound, up and down: Adam
          makes lr of a rounding, and what cancels is small while its rounding is not

A bound as large as what it bounds is useless: the verdict is INCONCLUSIVE.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, sqrt
from typing import Literal

import torch
from torch import Tensor

import fshard as fs
from fshard.optim.leaves import Leaf, trainable
from fshard.testing.certify.certificate import CertificateRow, first_of
from fshard.testing.certify.runs import Snapshot, Training
from fshard.testing.certify.shards import constant_factor, first_difference, is_floating, largest, pair_shards, widen

Field = Literal["grads", "params", "buffers"]
_FIELDS: tuple[Field, ...] = ("grads", "params", "buffers")
_NAMES: dict[Field, str] = {"grads": "gradient", "params": "parameter", "buffers": "buffer"}
TIMES = 4
"""Allowed error of a sharded run, as a multiple of the error of the run on one device."""


@dataclass(frozen=True)
class Reference:
    """The run on one device, the same in float64, and the bounds: infinite where they are useless."""

    serial: list[Snapshot]
    exact: list[Snapshot]
    bounds: list[Snapshot]


def equal_bits(run: Sequence[Snapshot]) -> Reference:
    """Allow no difference from a run on a mesh of one device."""
    serial = [step.mapped(fs.unshard) for step in run]
    return Reference(serial, serial, [step.mapped(lambda x: _filled(x, 0.0)) for step in serial])


def bounded(training: Training) -> Reference:
    """Train on one device, twice, and in float64; compute the bound of every leaf in every step."""
    serial, draws = training.repeated()
    exact = training.run(draws.repeat(), wide=True)
    own: list[Snapshot] = []
    for step, (ours, wide) in enumerate(zip(serial, exact, strict=True)):
        gradient = max(map(largest, wide.grads), default=0.0)
        own.append(
            Snapshot(
                [_own_bound(a, b, gradient, training) for a, b in zip(ours.grads, wide.grads, strict=True)],
                *(
                    [_own_bound(a, b, (step + 1) * largest(b), training) for a, b in zip(*leaves, strict=True)]
                    for leaves in zip(ours[1:], wide[1:], strict=True)
                ),
            )
        )
    up, down = (training.run(draws.repeat(), wide=True, sign=sign, shifts=own) for sign in (1, -1))
    bounds = [Snapshot(*map(_plus_effect, *steps)) for steps in zip(own, up, down, strict=True)]
    found = Reference(serial, exact, bounds)
    return Reference(serial, exact, [_without_useless(found, training, step) for step in range(len(serial))])


def _own_bound(serial: Leaf, exact: Leaf, scale: float, training: Training) -> Leaf:
    if serial is None or not trainable(serial):
        return _filled(serial, 0.0)
    rounding = torch.finfo(training.compute or serial.dtype).eps * scale
    error = largest(widen(serial) - exact)
    if training.compute is None and serial.dtype == exact.dtype:  # the float64 run is the same run, and rounds as well
        error = max(error, rounding)
    return _filled(serial, TIMES * error + rounding)


def _plus_effect(bounds: list[Leaf], up: list[Leaf], down: list[Leaf]) -> list[Leaf]:
    return [
        bound if bound is None or not trainable(high) else bound + (high - low).abs().nan_to_num(inf, inf)
        for bound, high, low in zip(bounds, up, down, strict=True)
    ]


def _filled(x: Leaf, bound: float) -> Leaf:
    return None if x is None else torch.full(x.shape, bound, dtype=torch.float64, device=x.device)


def _without_useless(it: Reference, training: Training, step: int) -> Snapshot:
    """Replace useless bounds of a step by infinity."""
    return Snapshot(
        *(
            [
                _filled(bound, inf) if _is_useless(it, training, step, field, i) else bound
                for i, bound in enumerate(bounds)
            ]
            for field, bounds in zip(_FIELDS, it.bounds[step], strict=True)
        )
    )


def _is_useless(it: Reference, training: Training, step: int, field: Field, i: int) -> bool:
    """Return True if most elements of a bound exceed the gradient, or the change since the start, of all steps so far.

    A bound of a few roundings counts as 0; elements of a parameter whose gradient never exceeded its bound do not count.
    """
    bound = getattr(it.bounds[step], field)[i]
    values = [x for run in it.exact[: step + 1] if (x := getattr(run, field)[i]) is not None]
    if bound is None or not is_floating(values[-1]):
        return False
    if not values[-1].isfinite().all():
        return True
    eps = torch.finfo(training.compute or getattr(it.serial[step], field)[i].dtype).eps
    counted, raw = torch.ones_like(bound, dtype=torch.bool), values
    if field == "grads":
        rounding = sqrt(eps) * max(map(largest, it.exact[step].grads))
    else:
        rounding = 2 * TIMES * (step + 1) * eps * max(map(largest, values))
        start = widen(getattr(training.start, field)[i])
        values, raw = [x - start for x in values], values
    if field == "params":
        counted = _moved(it, step, i)
    if not counted.any():
        return False
    size = max(x[counted].abs().square().mean().sqrt() for x in values)
    if not size:  # no step has changed it so far, as while gradients are accumulated
        size = max(map(largest, raw))
    return bool(torch.where(bound <= rounding, 0, bound)[counted].median() > size)


def _moved(it: Reference, step: int, i: int) -> Tensor:
    """Mark the elements of a parameter whose gradient was more than its bound in any step so far."""
    moved = torch.zeros_like(it.bounds[step].params[i], dtype=torch.bool)
    for exact, bounds in zip(it.exact[: step + 1], it.bounds, strict=False):
        if exact.grads[i] is not None:
            moved |= exact.grads[i].abs() > bounds.grads[i]
    return moved


# -- verdicts -----------------------------------------------------------------------------------------------------


def judge(
    reference: Reference,
    found: Sequence[Snapshot],
    stage: int | str,
    hints: Mapping[Field, str],
    names: Sequence[str],
    buffer_names: Sequence[str],
) -> list[CertificateRow]:
    """Judge every leaf of a sharded run; `hints` has likely causes by the field that diverges.

    A leaf, a parameter with its gradient, is judged by the first step in which it fails, or else by the last; leaves that
    fail after the first step that does refer to the first leaf.
    """
    params: tuple[Field, ...] = ("grads", "params") if found[0].grads else ("params",)
    buffers: tuple[Field, ...] = ("buffers",)
    leaves = [(name, params, i) for i, name in enumerate(names)]
    leaves += [(name, buffers, i) for i, name in enumerate(buffer_names)]

    def of_leaf(name: str, fields: Sequence[Field], i: int) -> CertificateRow:
        rows: list[CertificateRow] = []
        for step in range(len(found)):
            rows = [_compare(reference, found, step, field, i, hints.get(field, "")) for field in fields]
            for row in rows:
                if row.step is not None:
                    return row._replace(stage=stage, leaf=name)
        verdict = "EXACT" if all(row.verdict == "EXACT" for row in rows) else "BOUNDED"
        return rows[-1]._replace(stage=stage, leaf=name, verdict=verdict)

    rows = [of_leaf(*leaf) for leaf in leaves]
    first = first_of(rows)
    if first is None or first.step is None:
        return rows
    later = f"after {first.leaf} {'has diverged' if first.verdict == 'DIVERGENT' else 'was inconclusive'}"
    for i, row in enumerate(rows):
        if row.step is not None:
            verdict = row.verdict if first.verdict == "DIVERGENT" else "INCONCLUSIVE"
            reason = f"step {row.step}: {later if row.step > first.step else row.reason}"
            rows[i] = row._replace(verdict=verdict, reason=reason)
    return rows


def _compare(it: Reference, found: Sequence[Snapshot], step: int, field: Field, i: int, hint: str) -> CertificateRow:
    """Judge a leaf in one step: a row with the error and bound of the worst element, and the step if it fails."""
    ours, serial, exact, bound = (getattr(run[step], field)[i] for run in (found, it.serial, it.exact, it.bounds))
    row = CertificateRow("", "", "EXACT", 0.0, 0.0)
    if ours is None or serial is None:
        reason = f"only the {'sharded' if serial is None else 'serial'} run has a gradient"
        return row if ours is serial else row._replace(verdict="DIVERGENT", error=inf, reason=reason, step=step)
    pairs, bounds = pair_shards(ours, exact), pair_shards(ours, bound)
    errors = torch.cat([pair.error.reshape(-1) for pair in pairs])
    allowed = torch.cat([pair.expected.reshape(-1) for pair in bounds])
    if not errors.numel():
        return row
    worst, what = int((errors - allowed).argmax()), _NAMES[field]
    row = row._replace(error=float(errors[worst]), bound=float(allowed[worst]))
    if not isfinite(row.bound):
        reason = f"the bound of the {what} is too large: training amplifies roundings, or is not finite"
        return row._replace(verdict="INCONCLUSIVE", reason=reason, step=step)
    if all(torch.equal(pair.found, pair.expected) for pair in pair_shards(ours, serial)):
        return row
    if row.error <= row.bound:
        return row._replace(verdict="BOUNDED")
    factor = constant_factor(ours, serial)
    how = f"is {factor} times that of one device" if factor else f"first differs at {first_difference(ours, serial)}"
    return row._replace(verdict="DIVERGENT", reason=f"the {what} {how}{hint}", step=step)
