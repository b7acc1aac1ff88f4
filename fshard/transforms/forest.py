"""`Forest`: gradients of slices, added in one binary tree, so that the bits do not depend on how slices are dealt out."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fshard.transforms.units import Unit


class Forest:
    """Gradients of slices, added in one binary tree: two trees of one height become one of the next.

    slices   0 1 2 3 4 5 6 7    ->    ((0+1)+(2+3)) + ((4+5)+(6+7))

    A slice that has not used a unit stands in its tree as nothing, which is 0: the other devices have zeros for it.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._now: dict[Unit, list[Tensor | None]] = {}
        self._trees: dict[Unit, list[tuple[int, list[Tensor | None]]]] = {unit: [] for unit in units}

    def plant(self, unit: Unit, gs: list[Tensor | None]) -> None:
        """Take what one use of a unit gave in this slice."""
        known = self._now.get(unit)
        self._now[unit] = gs if known is None else _added(known, gs)

    def grow(self) -> None:
        """End a slice."""
        for unit, trees in self._trees.items():
            trees.append((0, self._now.get(unit, [None] * len(unit.places))))
            while len(trees) > 1 and trees[-1][0] == trees[-2][0]:
                (height, left), (_, right) = trees[-2:]
                trees[-2:] = [(height + 1, _added(left, right))]
        self._now = {}

    def harvest(self, unit: Unit) -> list[Tensor | None] | None:
        """Return the sum of a unit's gradients; None if no slice has used it."""
        trees = [tree for _, tree in self._trees.pop(unit)]
        while len(trees) > 1:
            trees[-2:] = [_added(trees[-2], trees[-1])]
        (gs,) = trees
        return gs if any(g is not None for g in gs) else None


def _added(left: list[Tensor | None], right: list[Tensor | None]) -> list[Tensor | None]:
    return [_sum(a, b) for a, b in zip(left, right, strict=True)]


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        found = a if b is None else b
        return None if found is None else found + 0.0  # as with zeros: -0.0 becomes 0.0
    return a + b
