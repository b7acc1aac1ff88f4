"""The order of sums in reproducible mode: one binary tree over slices and over devices.

A batch sharded over ("a", "b") has its slices in the order of a, then b. Neighbours are added
first:

    slices   0   1   2   3       a = 0: 0, 1;  a = 1: 2, 3;  b = 0, 1 within each
             0 + 1   2 + 3       over "b"
             (0+1) + (2+3)       over "a"
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fshard.pipeline.execution.gradient_sums import add_gradients
from fshard.transforms.fsdp.plans import Gradients
from fshard.transforms.fsdp.reductions import GradientSums
from fshard.transforms.fsdp.units import LazyUnit


class TreeAccumulator:
    """Gradients of slices, added in one binary tree: two trees of a height become one of the next.

    slices 0 1 2 3 4 5 6 7 -> ((0+1)+(2+3)) + ((4+5)+(6+7))

    A slice that has not used a unit counts as 0: the other devices have zeros for it. Uses of a
        leaf in one slice are
    added in sequence, the last first, as autograd adds them, in their own dtype; slices as devices
    are added, each times its weight, in the dtype in which they are reduced.
    """

    def __init__(self, units: Sequence[LazyUnit], reductions: GradientSums) -> None:
        self._units = units
        self._reductions = reductions
        self._slice_sums: dict[LazyUnit, Gradients] = {}
        # those of each unit have falling heights, from its first slices to its last
        self._trees: dict[LazyUnit, list[_Tree]] = {}

    def add(self, unit: LazyUnit, gs: Gradients) -> None:
        """Add the gradients of one use of some leaves of a unit in this slice."""
        sums = self._slice_sums.setdefault(unit, [None] * len(unit.indices))
        for index, g in enumerate(gs):
            if g is not None:
                total = sums[index]
                sums[index] = g if total is None else total + g

    def end_slice(self, weight: float) -> None:
        """End a slice of this weight."""
        for unit in self._units:
            gs = self._slice_sums.get(unit, [None] * len(unit.indices))
            gs = self._reductions.cast(unit.indices, gs)
            if weight != 1.0:
                gs = [None if g is None else g * weight for g in gs]
            trees = self._trees.setdefault(unit, [])
            trees.append(_Tree(0, gs))
            while len(trees) > 1 and trees[-2].height == trees[-1].height:
                left, right = trees[-2:]
                trees[-2:] = [_Tree(left.height + 1, _add_leaves(left.sums, right.sums))]
        self._slice_sums = {}

    def take(self, unit: LazyUnit) -> Gradients | None:
        """Return the sum of a unit's gradients, None if no slice has used it, and begin anew."""
        sums = [tree.sums for tree in self._trees.pop(unit)]
        while len(sums) > 1:
            sums[-2:] = [_add_leaves(sums[-2], sums[-1])]
        (gs,) = sums
        return gs if any(g is not None for g in gs) else None


class _Tree(NamedTuple):
    """The sum of 2 ** height slices."""

    height: int
    sums: Gradients


def _add_leaves(left: Gradients, right: Gradients) -> Gradients:
    return [add_gradients(a, b, missing=0.0) for a, b in zip(left, right, strict=True)]
