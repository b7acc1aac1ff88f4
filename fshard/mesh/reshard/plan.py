"""Plan a reshard: the steps from one spec to another, each a collective or a local move. Pure data.

Sums come first, scattered to where the target needs their shards. Then collectives of equal rows, if these suffice;
else one direct exchange, which sends each device exactly what it lacks (`exchange`). Coordinates in both specs' `at`
restrict all steps to the devices there.

    P("data", None) -> P(None, "data")          all_to_all        (n-1)/n of the shard
    P(unreduced="data") -> P("data")            psum_scatter
    P("data") -> P("model"), 4 x 2 devices      direct            3/4 of the new shard, on average
    P.flat("data", at=k) -> P(at=k)             flat_gather       (n-1)/n of the tensor, by the devices at k
    P() -> P.flat("data", at=k)                 direct, without communication
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from math import prod
from typing import Any, Literal

from fshard.mesh.layout import P
from fshard.mesh.layout.arithmetic import chunk
from fshard.mesh.reshard.exchange import Supply
from fshard.mesh.reshard.regions import Dims, ShardState, Sizes, block_shape, shard_length

Kind = Literal[
    "slice", "summand", "psum", "psum_scatter", "all_gather", "all_to_all",
    "reshape", "flat_slice", "flat_gather", "flat_scatter", "direct",
]  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One step of a plan: its kind, axes, cost per device and the state after it.

    `dim`: the dim that is split, gathered or concatenated; `other`: the dim that an all_to_all splits; `supply`: what
    a direct exchange sends. Only the devices at the coordinates `at` take the step; they alone store the tensor before
    and after it.
    """

    kind: Kind
    axes: tuple[str, ...]
    elements: Fraction
    after: ShardState
    dim: int = 0
    other: int = 0
    supply: Supply | None = None
    at: tuple[tuple[str, int], ...] = ()


@lru_cache(maxsize=1024)
def plan(before: P, after: P, shape: tuple[int, ...], axes: Sizes) -> tuple[Step, ...]:
    """Return the steps from one spec to another, for a tensor of `shape` on a mesh of `axes`.

    >>> [step.kind for step in plan(P("data"), P(None, "data"), (8, 8), (("data", 4),))]
    ['all_to_all']
    >>> [step.kind for step in plan(P("data"), P("model"), (8,), (("data", 4), ("model", 2)))]
    ['direct']
    """
    sizes = {axis: size for axis, size in axes if size > 1}
    return tuple(_route(_state(before, len(shape), axes), _state(after, len(shape), axes), shape, sizes))


def _state(spec: P, ndim: int, axes: Sizes) -> ShardState:
    """Return a spec normalized: axes of size 1 are removed."""
    sizes = dict(axes)

    def real(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(axis for axis in names if sizes[axis] > 1)

    place = spec.coordinates(sizes)
    flat = None if spec.flat_axes is None else real(spec.flat_axes)
    on = tuple((axis, place[axis]) for axis, size in axes if size > 1 and axis in place)
    return ShardState(tuple(map(real, spec.dims(ndim))), frozenset(real(spec.unreduced)), flat, on)


def _route(start: ShardState, goal: ShardState, shape: tuple[int, ...], sizes: Mapping[str, int]) -> list[Step]:
    if start == goal:
        return []
    if 0 in shape:
        return [Step("reshape", (), Fraction(0), goal)]
    both = tuple(place for place in start.at if place in goal.at)
    if both:
        rest = {axis: size for axis, size in sizes.items() if axis not in dict(both)}
        there = [replace(one, at=tuple(place for place in one.at if place not in both)) for one in (start, goal)]
        return [replace(step, at=both + step.at) for step in _route(there[0], there[1], shape, rest)]
    path = _Path(start, shape, sizes)
    if any(one.flat is not None and any(one.dims) for one in (start, goal)):
        path.flattened_shards(goal)
    elif goal.unreduced - start.unreduced:
        path.follow(replace(goal, unreduced=goal.unreduced & start.unreduced))
        for axis in sizes:
            if axis in goal.unreduced - start.unreduced:
                path.step("summand", (axis,), unreduced=path.state.unreduced | {axis})
    elif start.unreduced != goal.unreduced:
        if goal.at and not {*goal.at_axes} & {*start.sharded, *start.unreduced}:
            places = dict(start.at + goal.at)  # only the devices there need the sum
            path.direct(replace(start, at=tuple((axis, places[axis]) for axis in sizes if axis in places)))
        else:
            path.sum_up(goal)
        path.follow(goal)
    elif not path.by_collectives(goal):
        path.direct(goal)
    return path.steps


class _Path:
    """Steps taken so far, and where they have led."""

    def __init__(self, start: ShardState, shape: tuple[int, ...], sizes: Mapping[str, int]) -> None:
        self.steps: list[Step] = []
        self.state, self.shape, self.sizes = start, shape, sizes

    def step(self, kind: Kind, axes: tuple[str, ...], elements: Fraction | int = 0, *args: Any, **changes: Any) -> None:
        """Append a step that changes these fields of the state; `args` are its dim, other and supply."""
        self.state = replace(self.state, **changes)
        self.steps.append(Step(kind, axes, Fraction(elements), self.state, *args))

    def follow(self, goal: ShardState) -> None:
        self.steps += _route(self.state, goal, self.shape, self.sizes)
        self.state = goal

    def parts(self, axes: Iterable[str]) -> int:
        """Return the number of shards along some axes."""
        return prod(self.sizes[axis] for axis in axes)

    @property
    def local(self) -> Fraction:
        """The elements of the largest shard."""
        return Fraction(shard_length(self.state, self.shape, tuple(self.sizes.items())))

    def is_even(self, *states: ShardState) -> bool:
        """Return True if all shards of these states are of one size."""
        pairs = [pair for state in states for pair in zip(self.shape, state.dims, strict=True)]
        return not any(length % self.parts(axes) for length, axes in pairs)

    def flattened_shards(self, goal: ShardState) -> None:
        """Change the layout where shards of dims are flattened and sharded further: if both states have these, in them."""
        start = self.state
        if start.dims == goal.dims:
            block, flat = block_shape(start, self.shape, tuple(self.sizes.items())), ((),) * len(self.shape)
            rest = {axis: size for axis, size in self.sizes.items() if not any(axis in axes for axes in start.dims)}
            steps = _route(replace(start, dims=flat), replace(goal, dims=flat), block, rest)
            if self.is_even(start) or not any(step.supply for step in steps):
                self.steps += [replace(step, after=replace(step.after, dims=start.dims)) for step in steps]
                self.state = goal
                return
        if start.unreduced == goal.unreduced and (goal.flat is not None or goal.at):
            self.direct(goal)
            return
        via = replace(start, flat=None)
        if goal.flat is not None and any(goal.dims):
            scattered = replace(goal, flat=None, unreduced=start.unreduced & (goal.unreduced | {*goal.flat}))
            via = scattered if scattered != start else replace(via, unreduced=start.unreduced & goal.unreduced)
        self.follow(via)
        self.follow(goal)

    def cut(self, changes: Mapping[int, tuple[str, ...]]) -> Dims:
        return tuple(changes.get(dim, axes) for dim, axes in enumerate(self.state.dims))

    def sum_up(self, goal: ShardState) -> None:
        """Reduce over the axes that do not stay unreduced; scatter where the target shards along them."""
        over, is_even = self.state.unreduced - goal.unreduced, self.is_even(self.state, goal)
        if goal.flat is None and is_even:
            self._slices(goal)
        scattered = tuple(axis for axis in goal.flat or goal.at_axes if axis in over)
        if scattered and self.state.is_unsharded and not self.state.at:
            n = self.parts(scattered)
            sent, rest = (n - 1) * chunk(prod(self.shape), n), self.state.unreduced - {*scattered}
            self.step("flat_scatter", scattered, sent, flat=scattered, unreduced=rest)
        for dim, axes in enumerate(self._wanted(goal) if is_even and goal.flat is None is self.state.flat else ()):
            some = tuple(axes[: next((at for at, axis in enumerate(axes) if axis not in over), len(axes))])
            if some:
                n, dims = self.parts(some), self.cut({dim: self.state.dims[dim] + some})
                sent, rest = Fraction(n - 1, n) * self.local, self.state.unreduced - {*some}
                self.step("psum_scatter", some, sent, dim, dims=dims, unreduced=rest)
        axes = tuple(axis for axis in self.sizes if axis in self.state.unreduced - goal.unreduced)
        if axes:
            n = self.parts(axes)
            self.step("psum", axes, Fraction(2 * (n - 1), n) * self.local, unreduced=goal.unreduced)

    def _wanted(self, goal: ShardState) -> list[tuple[str, ...]]:
        """Return the axes by which the target splits each dim further; none where the dim is split differently
        already.
        """
        pairs = zip(self.state.dims, goal.dims, strict=True)
        return [wanted[len(axes) :] if wanted[: len(axes)] == axes else () for axes, wanted in pairs]

    def _slices(self, goal: ShardState) -> None:
        """Slice replicated dims as in the target."""
        for dim, axes in enumerate(self._wanted(goal) if self.state.flat is None else ()):
            for axis in axes:
                if axis in (*self.state.sharded, *self.state.unreduced):
                    break
                self.step("slice", (axis,), 0, dim, dims=self.cut({dim: (*self.state.dims[dim], axis)}))

    def by_collectives(self, goal: ShardState) -> bool:
        """Change the layout by collectives of equal rows, or via flat ranges; return True if that reaches the target."""
        start = self.state
        if {*start.at_axes} - {*goal.sharded}:  # elements that many devices need are sent once, then forwarded
            axes = (
                start.at_axes
                if start.is_unsharded
                else tuple(axis for axis in self.sizes if axis not in start.unreduced)
            )
            self.follow(ShardState(((),) * len(self.shape), start.unreduced, axes))
            self.follow(goal)
        elif start.at or goal.at or not self.is_even(start, goal):
            return False
        elif start.flat is None and goal.flat is None:
            return self._by_dims(goal)
        elif start.flat is None and (start.is_unsharded or (start.dims[0] == goal.flat and not any(start.dims[1:]))):
            kind = "flat_slice" if start.is_unsharded and goal.flat else "reshape"
            self.step(kind, goal.flat or (), 0, dims=goal.dims, flat=goal.flat)
        elif goal.is_unsharded and start.flat:
            self.step("flat_gather", start.flat, (self.parts(start.flat) - 1) * self.local, flat=None)
        elif start.flat == () or (goal.flat is None and goal.dims[:1] == (start.flat,) and not any(goal.dims[1:])):
            self.step("reshape", start.flat or (), 0, dims=self.cut({0: start.flat or ()}), flat=None)
            self.follow(goal)
        elif goal.flat == ():
            self.follow(replace(goal, flat=None))
            self.step("reshape", (), 0, flat=())
        else:
            return False
        return True

    def _by_dims(self, goal: ShardState) -> bool:
        """Slice, exchange and gather the last axes of dims, if that leads to the goal."""
        start = self.state
        self._slices(goal)
        for dim, (axes, wanted) in enumerate(zip(self.state.dims, goal.dims, strict=True)):
            common = len(wanted) if axes[: len(wanted)] == wanted else len(axes)
            suffix, n = axes[common:], self.parts(axes[common:])
            if not suffix:
                continue
            others = [other for other, more in enumerate(self._wanted(goal)) if more[: len(suffix)] == suffix]
            if others:
                changes = {dim: wanted, others[0]: self.state.dims[others[0]] + suffix}
                self.step("all_to_all", suffix, Fraction(n - 1, n) * self.local, dim, others[0], dims=self.cut(changes))
            elif not {*suffix} & {*goal.cut}:
                self.step("all_gather", suffix, (n - 1) * self.local, dim, dims=self.cut({dim: wanted}))
        if self.state.dims != goal.dims:
            self.state, self.steps = start, []
        return self.state.dims == goal.dims

    def direct(self, goal: ShardState) -> None:
        flattened = self.is_even(self.state, goal) and not any(self.state.dims[1:]) and not any(goal.dims[1:])
        shape = (prod(self.shape),) if flattened else self.shape
        before, after = (
            replace(state, dims=(state.dims or ((),))[: len(shape)], unreduced=frozenset[str]())
            for state in (self.state, goal)
        )
        group = tuple((axis, size) for axis, size in self.sizes.items() if axis in before.sharded + after.sharded)
        supply = Supply(before, after, shape, group)
        busiest = Fraction(int(supply.elements().max()))
        self.steps.append(Step("direct", tuple(axis for axis, _ in group), busiest, goal, supply=supply))
        self.state = goal
