"""The order of additions in reproducible mode: one binary tree over the slices of a device, and over devices.

A batch sharded over ("a", "b") has its slices in the order of a, then b. Neighbours are added first:

    slices   0   1   2   3       a = 0: 0, 1;  a = 1: 2, 3;  b = 0, 1 within each
             0 + 1   2 + 3       over "b"
             (0+1) + (2+3)       over "a"
"""

from __future__ import annotations

from collections.abc import Sequence

from fshard.pipeline.execution.gradient_sums import add_gradients
from fshard.transforms.fsdp.plans import Gradients
from fshard.transforms.fsdp.reductions import GradientSums
from fshard.transforms.fsdp.units import LazyUnit


class TreeAccumulator:
    """Gradients of slices, added in one binary tree: two trees of one height become one of the next.

    slices 0 1 2 3 4 5 6 7 -> ((0+1)+(2+3)) + ((4+5)+(6+7))

    A slice that has not used a unit counts as 0: the other devices have zeros for it. Uses of a leaf in one slice are
    added in sequence, the last first, as autograd adds them, in their own dtype; slices as devices are added, each
    times its weight, in the dtype in which they are reduced.
    """

    def __init__(self, units: Sequence[LazyUnit], reductions: GradientSums) -> None:
        self._reductions = reductions
        self._slice_sums: dict[LazyUnit, Gradients] = {}
        self._trees: dict[LazyUnit, list[tuple[int, Gradients]]] = {unit: [] for unit in units}

    def add(self, unit: LazyUnit, gs: Gradients) -> None:
        """Add the gradients of one use of some leaves of a unit in this slice."""
        sums = self._slice_sums.setdefault(unit, [None] * len(unit.indices))
        for index, g in enumerate(gs):
            if g is not None:
                total = sums[index]
                sums[index] = g if total is None else total + g

    def end_slice(self, weight: float) -> None:
        """End a slice of this weight."""
        for unit, trees in self._trees.items():
            gs = self._slice_sums.get(unit, [None] * len(unit.indices))
            gs = self._reductions.cast(unit.indices, gs)
            trees.append(
                (0, gs if weight == 1.0 else [None if g is None else g * weight for g in gs])
            )
            while len(trees) > 1 and trees[-1][0] == trees[-2][0]:
                (height, first_sum), (_, right) = trees[-2:]
                trees[-2:] = [(height + 1, _add_leaves(first_sum, right))]
        self._slice_sums = {}

    def result(self, unit: LazyUnit) -> Gradients | None:
        """Return the sum of a unit's gradients; None if no slice has used it."""
        trees = [tree for _, tree in self._trees.pop(unit)]
        while len(trees) > 1:
            trees[-2:] = [_add_leaves(trees[-2], trees[-1])]
        (gs,) = trees
        return gs if any(g is not None for g in gs) else None


def _add_leaves(first_sum: Gradients, right: Gradients) -> Gradients:
    return [add_gradients(a, b, missing=0.0) for a, b in zip(first_sum, right, strict=True)]
