"""What is worked out once for a tree of parameters: how each comes to its use, and how its gradient goes where it is to lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

from fshard.errors import LayoutError
from fshard.mesh.layout import Layout
from fshard.mesh.mesh import Mesh
from fshard.mesh.sharded import Sharded
from fshard.mesh.spec import P
from fshard.mesh.steps import Way, way_between
from fshard.transforms.ordered import way_in_order
from fshard.transforms.patterns import named, parts_of, unit_of
from fshard.transforms.reductions import Along
from fshard.transforms.tape import Order
from fshard.transforms.units import Leaf


@dataclass
class Known:
    """What is known of a tree of parameters: the ways of its leaves, and the order in which units were last used.

    What is gathered ahead is a guess: a wrong one costs time only.  All devices have agreed on the turns of reductions.
    `key` is what it depends on: it is compared, for to hash it takes longer where little is known.
    """

    key: object
    leaves: tuple[Leaf, ...]
    mesh: Mesh
    axes: tuple[str, ...]
    in_order: bool
    order: Order | None = None
    by_unit: list[list[int]] = field(init=False)
    _ways: dict[Along, tuple[list[Way | None], int]] = field(default_factory=dict[Along, tuple[list[Way | None], int]])

    def __post_init__(self) -> None:
        by_unit: dict[str, list[int]] = {}
        for place, leaf in enumerate(self.leaves):
            if leaf.dtype.is_floating_point or leaf.dtype.is_complex:
                by_unit.setdefault(leaf.unit, []).append(place)
        self.by_unit = [*by_unit.values()]

    def ways(self, along: Along) -> tuple[list[Way | None], int]:
        """Return the ways of gradients that devices along the batch's axes, and these, hold summands of; how many these are."""
        found = self._ways.get(along)
        if found is None:
            ways = [self._way(along, leaf) if leaf.trained else None for leaf in self.leaves]
            found = self._ways[along] = ways, prod(self.mesh.shape[axis] for axis in along)
        return found

    def _way(self, along: Along, leaf: Leaf) -> Way:
        """Return the way of one gradient: over the batch's axes first, if the order of additions matters."""
        axes = (*along, *self.axes)
        if self.in_order:
            return way_in_order(self.mesh, axes, leaf.gradient, leaf.shape)
        return way_between(Layout(self.mesh, P(unreduced=axes)), leaf.gradient, leaf.shape)


def leaf_of(path: str, x: Sharded, gradients: Callable[[Layout], Layout] | None) -> Leaf:
    """Return what is to be done with a parameter, given where its gradient is to lie; None: it is not trained."""
    layout, whole = x.layout, Layout(x.mesh)
    wanted = layout if gradients is None else gradients(layout)
    if not isinstance(wanted, Layout):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise LayoutError(
            f"value_and_grad: {gradients=!r} has to return a Layout for {named(parts_of(path))}; found {wanted!r}. "
            "Write opt.gradients of a partitioned optimizer, or leave it out."
        )
    gather = way_between(layout, whole, x.shape)
    return Leaf(path, x.shape, x.dtype, layout.unit or unit_of(path), gather, gradients is not None, wanted)


def refuse_half_frozen(paths: Sequence[str], at: Sequence[int], fixed: Sequence[bool]) -> None:
    """Raise naming parameters that are frozen under one name and trained under another."""
    names: dict[int, list[str]] = {}
    for path, place in zip(paths, at, strict=True):
        names.setdefault(place, []).append(named(parts_of(path)))
    half = {place for place, fix in zip(at, fixed, strict=True) if not fix} & {
        place for place, fix in zip(at, fixed, strict=True) if fix
    }
    if half:
        wrong = "; ".join(" and ".join(names[place]) for place in sorted(half))
        raise LayoutError(f"frozen: {wrong} are one parameter (tied), and only one name of it is frozen. Freeze all.")
