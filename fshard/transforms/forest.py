"""`Forest`: gradients of slices, added in one binary tree, so that the bits do not depend on how slices are dealt out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from fshard.transforms.units import Unit

Gradients = list[Tensor | None]
"""Of the leaves of a unit."""


class Forest:
    """Gradients of slices, added in one binary tree: two trees of one height become one of the next.

    slices   0 1 2 3 4 5 6 7    ->    ((0+1)+(2+3)) + ((4+5)+(6+7))

    A slice that has not used a unit stands in its tree as nothing, which is 0: the other devices have zeros for it.  Uses of
    a leaf in one slice are added one after the other, the last first, as autograd adds them, in their own dtype; slices as
    devices add them, each times what it counts for, in the dtype that `widened` gives.
    """

    def __init__(self, units: Sequence[Unit], widened: Callable[[Unit, Gradients], Gradients]) -> None:
        self._widened = widened
        self._now: dict[Unit, Gradients] = {}
        self._trees: dict[Unit, list[tuple[int, Gradients]]] = {unit: [] for unit in units}

    def plant(self, unit: Unit, gs: Gradients) -> None:
        """Take what one use of some leaves of a unit gave in this slice."""
        now = self._now.setdefault(unit, [None] * len(unit.places))
        for at, g in enumerate(gs):
            if g is not None:
                known = now[at]
                now[at] = g if known is None else known + g

    def grow(self, weight: float) -> None:
        """End a slice, which counts for so much."""
        for unit, trees in self._trees.items():
            gs = self._widened(unit, self._now.get(unit, [None] * len(unit.places)))
            trees.append((0, gs if weight == 1.0 else [None if g is None else g * weight for g in gs]))
            while len(trees) > 1 and trees[-1][0] == trees[-2][0]:
                (height, left), (_, right) = trees[-2:]
                trees[-2:] = [(height + 1, _added(left, right))]
        self._now = {}

    def harvest(self, unit: Unit) -> Gradients | None:
        """Return the sum of a unit's gradients; None if no slice has used it."""
        trees = [tree for _, tree in self._trees.pop(unit)]
        while len(trees) > 1:
            trees[-2:] = [_added(trees[-2], trees[-1])]
        (gs,) = trees
        return gs if any(g is not None for g in gs) else None


def _added(left: Gradients, right: Gradients) -> Gradients:
    return [_sum(a, b) for a, b in zip(left, right, strict=True)]


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        found = a if b is None else b
        return None if found is None else found + 0.0  # as with zeros: -0.0 becomes 0.0
    return a + b
