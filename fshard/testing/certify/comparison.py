"""How near a sharded run is to the run on one device, and how near it has to be."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Literal, NamedTuple

import torch

from fshard.mesh.mesh import Mesh
from fshard.optim.finite import all_finite
from fshard.optim.leaves import Leaf, trainable
from fshard.testing.certify.beside import beside, largest, wide
from fshard.testing.certify.runs import Task, Turn, largest_in_parts, on_one_device

What = Literal["grads", "params", "buffers"]
TIMES = 4
"""How much further from float64 the sharded run may be than the one on one device."""


class Gap(NamedTuple):
    """How far the worst element of a leaf, the nearest to its bound or the furthest beyond, is from where it should be."""

    same: bool
    error: float
    bound: float

    @property
    def ok(self) -> bool:
        """Whether it has the same bits, or is within the bound (not so if anything is NaN)."""
        return self.same or self.error <= self.bound


@dataclass(frozen=True)
class Comparison:
    """One stage beside the run on one device, `alone`, and the one in float64, `exact`."""

    task: Task
    mesh: Mesh
    stage: int
    turns: list[Turn]
    alone: list[Turn]
    exact: list[Turn]
    bounds: list[Turn]

    def gap(self, step: int, what: What, place: int) -> Gap:
        """Compare a gradient, or a parameter or buffer after a step; no gradients, if neither run's are all finite."""
        if what == "grads" and self._infinite[step]:
            return Gap(True, 0.0, 0.0)
        every = (self.turns, self.alone, self.exact, self.bounds)
        found, alone, exact, bound = (getattr(turns[step], what)[place] for turns in every)
        if found is None or alone is None:
            return Gap(found is alone, 0.0 if found is alone else inf, 0.0)
        same = all(torch.equal(piece.found, piece.expected) for piece in beside(found, alone))
        errors = torch.cat([piece.error.reshape(-1) for piece in beside(found, exact)])
        bounds = torch.cat([piece.expected.reshape(-1) for piece in beside(found, bound)])
        if not errors.numel():
            return Gap(same, 0.0, 0.0)
        worst = int((errors - bounds).argmax())
        return Gap(same, float(errors[worst]), float(bounds[worst]))

    @cached_property
    def _infinite(self) -> list[bool]:
        """Whether in each step both runs have gradients that are not finite: a scaled loss may, and then neither moves."""
        return [not (all_finite(a.grads) or all_finite(b.grads)) for a, b in zip(self.turns, self.alone, strict=True)]


# -- the bounds ---------------------------------------------------------------------------------------------------


def bounds_of(task: Task, mesh: Mesh, alone: list[Turn], exact: list[Turn]) -> list[Turn]:
    """Return how far from float64 each element may be, in each step: not at all where bits are promised.

    gradient    4 x the error of its leaf on one device + a rounding of the largest that devices sum (it may cancel)
    others      4 x the error of the leaf on one device + a rounding of the leaf's largest a step (few may be lucky)
    float64     its error is not known, and taken to be one such rounding
    all         + as far as training carries a shift of all gradients by their bound (Adam makes lr of a rounding), and a
                rounding of all that goes in: what cancels is small, and its rounding is not
    """
    if task.reproducible:
        return [Turn(*([_allowed(x, 0.0) for x in leaves] for leaves in turn)) for turn in alone]
    own: list[Turn] = []
    summed = largest_in_parts(task.wide(), mesh, exact)
    for step, (one, other, most) in enumerate(zip(alone, exact, summed, strict=True)):
        grads = [_bound(task, *pair, most) for pair in zip(one.grads, other.grads, strict=True)]
        params, buffers = (
            [_bound(task, a, b, (step + 1) * largest(b)) for a, b in zip(*pair, strict=True)]
            for pair in ((one.params, other.params), (one.buffers, other.buffers))
        )
        own.append(Turn(grads, params, buffers))
    up, down = (
        on_one_device(task.rounded(way), [[None if x is None else way * x for x in turn.grads] for turn in own])
        for way in (1, -1)
    )
    return [Turn(*map(_wider, *turns)) for turns in zip(own, up, down, strict=True)]


def _wider(bounds: list[Leaf], up: list[Leaf], down: list[Leaf]) -> list[Leaf]:
    return [
        bound if bound is None or not trainable(high) else bound + (high - low).abs().nan_to_num(0, inf)
        for bound, high, low in zip(bounds, up, down, strict=True)
    ]


def _bound(task: Task, alone: Leaf, exact: Leaf, rounded: float) -> Leaf:
    if alone is None or not trainable(alone):
        return _allowed(alone, 0.0)
    rounding = torch.finfo(task.compute or alone.dtype).eps * rounded
    error = largest(wide(alone) - exact)
    if task.compute is None and alone.dtype == exact.dtype:  # what is called exact is the same run, and rounds as well
        error = max(error, rounding)
    return _allowed(alone, TIMES * error + rounding)


def _allowed(x: Leaf, bound: float) -> Leaf:
    return None if x is None else torch.full(x.shape, bound, dtype=torch.float64, device=x.device)
