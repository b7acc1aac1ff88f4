"""What is worked out once of a model in stages: the ways of its parameters and of their gradients.

    a piece at the first stage's place  ──lent──>  a piece at another's  ──gathered──>  whole, for a while
    summands, one from each device of the place  ──reduced──>  the gradient's layout, there

All ways begin and end at one place along the pipeline: other devices have other stages, and no part in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.errors import LayoutError
from fshard.mesh.layout import Layout
from fshard.mesh.mesh import Mesh
from fshard.mesh.sharded import Sharded
from fshard.mesh.spec import P
from fshard.mesh.steps import STAY, Way, way_between
from fshard.mesh.tree import PyTree, Structure, unflatten
from fshard.optim.leaves import trainable
from fshard.pipeline.post import Known as Messages
from fshard.pipeline.route import Route
from fshard.pipeline.turns import Stage
from fshard.transforms.ordered import way_in_order
from fshard.transforms.patterns import named, parts_of
from fshard.transforms.slices import How
from fshard.transforms.stage_layouts import on_place, place_of
from fshard.transforms.stage_params import Tie
from fshard.transforms.units import Leaf


class Own(NamedTuple):
    """The parameters of one stage, each once: they and their numbers, and what puts them together as the stage takes them."""

    leaves: list[Leaf]
    numbers: list[int]
    tree: Callable[[list[Tensor]], PyTree]


class Borrowed(NamedTuple):
    """A parameter that a stage needs at another place than its own, and the way of its piece to that place."""

    leaf: int
    place: int
    way: Way


class Weights(NamedTuple):
    """The parameters of all stages.

    Args:
        leaves: each once; a number is a place among them.
        own: those of each stage.
        ways: of their gradients, None where they are not trained.
        borrowed: what stages need of others' parameters.
        ties: the trained parameters of several stages.
    """

    leaves: list[Leaf]
    own: list[Own]
    ways: list[Way | None]
    borrowed: list[Borrowed]
    ties: list[Tie]


@dataclass(frozen=True)
class Plan:
    """What all devices know of all steps.

    Args:
        how: a step is taken.
        axis: along which the pipeline lies.
        stages: what is called.
        inputs: gives the first one its part of a microbatch.
        route: who does what, and when.
        weights: the parameters.
        messages: what devices have learnt of them; None: they are told anew.
    """

    how: How
    axis: str
    stages: Sequence[Stage]
    inputs: Callable[[PyTree], PyTree]
    route: Route
    weights: Weights
    messages: dict[int, dict[Any, Messages]] | None

    def used_in(self, leaf: Leaf) -> torch.dtype:
        """Return the dtype that a parameter is used in."""
        return self.how.manner.compute or leaf.dtype if leaf.dtype.is_floating_point else leaf.dtype

    def reduced_in(self, leaf: Leaf) -> torch.dtype:
        """Return the dtype that a gradient is added up and reduced in."""
        if leaf.dtype.is_complex:
            return leaf.dtype
        used, wide = self.used_in(leaf), self.how.slices is not None or self.how.accumulate > 1
        return self.how.manner.reduce or (torch.promote_types(used, torch.float32) if wide else used)


@dataclass(frozen=True)
class Terms:
    """What the ways of parameters depend on, besides these.

    Args:
        how: a step is taken.
        axis: along which the pipeline lies.
        placement: where each stage lies along it.
        gradients: from a parameter's layout to its gradient's; None: they are the same.
        mesh: the devices.
        over: the axes that the batch is cut over, along which gradients are summed.
    """

    how: How
    axis: str
    placement: Sequence[int]
    gradients: Callable[[Layout], Layout] | None
    mesh: Mesh
    over: tuple[str, ...]

    def weights(
        self, structures: Sequence[Structure], given: Sequence[tuple[str, Sharded, bool]], at: Sequence[int]
    ) -> Weights:
        """Return what is to be known of parameters.

        Args:
            structures: of the trees of the stages.
            given: for each leaf of these its path, what it is, and whether it is frozen.
            at: the number of each, the same for those that are tied.
        """
        rest = iter(at)
        numbers = [[next(rest) for _ in range(structure.num_leaves)] for structure in structures]
        firsts = [given[at.index(number)] for number in range(len({*at}))]
        leaves, layouts = [self._leaf(*first) for first in firsts], [x.layout for _, x, _ in firsts]
        users = [[stage for stage, own in enumerate(numbers) if number in own] for number in range(len(leaves))]
        borrowed = [
            Borrowed(number, place, way_between(layout, on_place(layout, self.axis, place), leaf.shape))
            for number, (leaf, layout, stages) in enumerate(zip(leaves, layouts, users, strict=True))
            for place in sorted({self.placement[stage] for stage in stages})
            if place != place_of(layout, self.axis)
        ]
        ties = [
            self._tie(number, leaf.shape, stages)
            for number, (leaf, stages) in enumerate(zip(leaves, users, strict=True))
            if leaf.trained and len(stages) > 1
        ]
        ways = [self._way(leaf) if leaf.trained else None for leaf in leaves]
        own = [
            self._own(mine, structure, leaves, layouts, place)
            for mine, structure, place in zip(numbers, structures, self.placement, strict=True)
        ]
        return Weights(leaves, own, ways, borrowed, ties)

    def _leaf(self, path: str, x: Sharded, fixed: bool) -> Leaf:
        trained = self.how.backward and trainable(x) and not fixed
        wanted = self.gradients(x.layout) if trained and self.gradients is not None else x.layout
        if place_of(wanted, self.axis) != place_of(x.layout, self.axis):
            raise LayoutError(
                f"{self.how.caller}: gradients= lays that of {named(parts_of(path))} as {wanted.spec}, and not where the "
                f"parameter lies, {x.spec}. Keep its place along {self.axis}."
            )
        return Leaf(path, x.shape, x.dtype, "", STAY, trained, wanted)

    def _own(
        self,
        numbers: Sequence[int],
        structure: Structure,
        leaves: Sequence[Leaf],
        layouts: Sequence[Layout],
        place: int,
    ) -> Own:
        """Return what a stage at a place is to have of parameters that lie so, or are lent to it."""
        unique, whole = list(dict.fromkeys(numbers)), on_place(Layout(self.mesh), self.axis, place)
        at = [unique.index(number) for number in numbers]

        def gathered(number: int) -> Leaf:
            piece, leaf = on_place(layouts[number], self.axis, place), leaves[number]
            return leaf._replace(gather=way_between(piece, whole, leaf.shape))

        def tree(xs: list[Tensor]) -> PyTree:
            return unflatten(structure, [xs[place] for place in at])

        return Own(list(map(gathered, unique)), unique, tree)

    def _way(self, leaf: Leaf) -> Way:
        """Return the way of a gradient among the devices of its stage."""
        place = place_of(leaf.gradient, self.axis)
        assert place is not None
        if self.how.slices is not None:
            return way_in_order(self.mesh, self.over, leaf.gradient, leaf.shape, ((self.axis, place),))
        return way_between(Layout(self.mesh, P(unreduced=self.over, on={self.axis: place})), leaf.gradient, leaf.shape)

    def _tie(self, number: int, shape: tuple[int, ...], stages: list[int]) -> Tie:
        places = tuple(self.placement[stage] for stage in stages)
        stack = (1 if self.how.slices is None else self.how.accumulate, *shape)
        layouts = [on_place(Layout(self.mesh), self.axis, place) for place in places]
        return Tie(number, tuple(stages), places, tuple(way_between(layout, layouts[0], stack) for layout in layouts))
