"""`Forest`: gradients of slices, added in one binary tree, so that the bits do not depend on how slices are dealt out."""

from __future__ import annotations

from torch import Tensor

from fshard.transforms.units import Unit


class Forest:
    """Gradients of slices, added in one binary tree: two trees of one height become one of the next.

    slices   0 1 2 3 4 5 6 7    ->    ((0+1)+(2+3)) + ((4+5)+(6+7))
    """

    def __init__(self) -> None:
        self._now: dict[Unit, list[Tensor | None]] = {}
        self._trees: dict[Unit, list[tuple[int, list[Tensor | None]]]] = {}

    def plant(self, unit: Unit, gs: list[Tensor | None]) -> None:
        """Take what one use of a unit gave in this slice."""
        known = self._now.get(unit)
        self._now[unit] = gs if known is None else _added(known, gs)

    def grow(self) -> None:
        """End a slice."""
        for unit, gs in self._now.items():
            trees = self._trees.setdefault(unit, [])
            trees.append((0, gs))
            while len(trees) > 1 and trees[-1][0] == trees[-2][0]:
                (height, left), (_, right) = trees[-2:]
                trees[-2:] = [(height + 1, _added(left, right))]
        self._now = {}

    def harvest(self, unit: Unit) -> list[Tensor | None] | None:
        """Return the sum of a unit's gradients."""
        trees = [tree for _, tree in self._trees.pop(unit, [])]
        while len(trees) > 1:
            trees[-2:] = [_added(trees[-2], trees[-1])]
        return trees[0] if trees else None


def _added(left: list[Tensor | None], right: list[Tensor | None]) -> list[Tensor | None]:
    return [b if a is None else a if b is None else a + b for a, b in zip(left, right, strict=True)]
