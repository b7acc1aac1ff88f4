"""The order of sums in reproducible mode: one binary tree over slices and over devices.

A batch sharded over ("a", "b") has its slices in the order of a, then b. Neighbours are added
first:

    slices   0   1   2   3       a = 0: 0, 1;  a = 1: 2, 3;  b = 0, 1 within each
             0 + 1   2 + 3       over "b"
             (0+1) + (2+3)       over "a"
"""

from __future__ import annotations

from collections.abc import Sequence

from fshard.pipeline.execution.gradient_sums import add_gradients
from fshard.transforms.fsdp.plans import Gradients, UnitPlan
from fshard.transforms.fsdp.reductions import Reducer

_Tree = tuple[int, Gradients]
"""The height of a tree, and its sum."""


class TreeAccumulator:
    """Gradients of slices, added in one binary tree.

    Two trees of one height become one of the next.

    slices 0 1 2 3 4 5 6 7 -> ((0+1)+(2+3)) + ((4+5)+(6+7))

    A slice that has not used a unit counts as 0: the other devices have zeros for it. Uses of a
    leaf in one slice are added in sequence, the last first, as autograd adds them, in their own
    dtype; slices as devices are added, each times its weight, in the dtype in which they are
    reduced.

    Args:
        units: of the parameters.
        reducer: of their gradients.
    """

    def __init__(self, units: Sequence[UnitPlan], reducer: Reducer) -> None:
        self._units = units
        self._reducer = reducer
        self._slice_sums: dict[int, Gradients] = {}  # by the number of the unit
        self._trees: list[list[_Tree]] = [[] for _ in units]

    def add(self, unit: UnitPlan, gs: Gradients) -> None:
        """Add the gradients of one use of some leaves of a unit in this slice."""
        sums = self._slice_sums.setdefault(unit.number, [None] * len(unit.indices))
        for index, g in enumerate(gs):
            if g is not None:
                total = sums[index]
                sums[index] = g if total is None else total + g

    def end_slice(self, weight: float) -> None:
        """End a slice of this weight."""
        for unit, trees in zip(self._units, self._trees, strict=True):
            gs: Gradients = [None] * len(unit.indices)
            gs = self._slice_sums.get(unit.number, gs)
            gs = self._reducer.cast(unit.indices, gs)
            if weight != 1.0:
                gs = [None if g is None else g * weight for g in gs]
            trees.append((0, gs))
            while len(trees) > 1 and trees[-1][0] == trees[-2][0]:
                height, left = trees[-2]
                _, right = trees[-1]
                trees[-2:] = [(height + 1, _add_leaves(left, right))]
        self._slice_sums = {}

    def take(self, unit: UnitPlan) -> Gradients | None:
        """Return the sum of a unit's gradients, once; None if no slice has used it."""
        trees = [gs for _, gs in self._trees[unit.number]]
        self._trees[unit.number] = []
        while len(trees) > 1:
            trees[-2:] = [_add_leaves(trees[-2], trees[-1])]
        (gs,) = trees
        if all(g is None for g in gs):
            return None
        return gs


def _add_leaves(left: Gradients, right: Gradients) -> Gradients:
    """Add the gradients of two trees; one that is None counts as zeros.

    They turn -0.0 into 0.0, as the zeros of other devices do.
    """
    return [add_gradients(a, b, missing=0.0) for a, b in zip(left, right, strict=True)]
