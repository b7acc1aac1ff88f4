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

from fshard.mesh.collectives.moves import (
    AllGather,
    AllToAll,
    Move,
    Psum,
    PsumScatter,
    Summand,
    Take,
)
from fshard.mesh.layout import P
from fshard.mesh.layout.arithmetic import chunk
from fshard.mesh.reshard.exchange import DirectExchange, DirectSlice, LeafExchange
from fshard.mesh.reshard.regions import Sizes

Kind = Literal[
    "slice", "summand", "psum", "psum_scatter", "all_gather", "all_to_all",
    "reshape", "flat_slice", "flat_gather", "flat_scatter", "direct",
]  # fmt: skip
"""A flat step works on the flattened shard, padded to a multiple of the number of devices."""


@dataclass(frozen=True)
class Step:
    """One step of a plan: its move (None: a reshape), its axes, the elements that a device sends, and the spec after it.

    Only the devices at the coordinates `at` take the step; they alone store the tensor before and after it.
    """

    kind: Kind
    move: Move | None
    axes: tuple[str, ...]
    elements: Fraction
    after: P
    at: tuple[tuple[tuple[str, ...], int], ...] = ()


@lru_cache(maxsize=1024)
def plan(before: P, after: P, shape: tuple[int, ...], axes: Sizes) -> tuple[Step, ...]:
    """Return the steps from one spec to another, for a tensor of `shape` on a mesh of `axes`.

    >>> [step.kind for step in plan(P("data"), P(None, "data"), (8, 8), (("data", 4),))]
    ['all_to_all']
    >>> [step.kind for step in plan(P("data"), P("model"), (8,), (("data", 4), ("model", 2)))]
    ['direct']
    """
    start, goal = (_normalized_spec(spec, dict(axes)) for spec in (before, after))
    steps = _route(start, goal, shape, {axis: size for axis, size in axes if size > 1})
    if before.is_flat > start.is_flat and steps:  # the first step needs the dims
        steps.insert(0, Step("reshape", None, (), Fraction(0), start))
    if not steps:
        return (
            ()
            if before.is_flat == after.is_flat
            else (Step("reshape", None, (), Fraction(0), after),)
        )
    return (*steps[:-1], replace(steps[-1], after=after))


def _normalized_spec(spec: P, sizes: Mapping[str, int]) -> P:
    """Return a spec without axes of size 1, with its coordinates axis by axis."""

    def large(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(axis for axis in names if sizes[axis] > 1)

    coordinates = {
        axis: index for axis, index in spec.coordinates(sizes).items() if sizes[axis] > 1
    }
    dims = map(large, spec.dims(len(spec.entries)))
    return P(
        *dims, flat=large(spec.flat_axes or ()), unreduced=large(spec.unreduced), at=coordinates
    )


def _route(start: P, goal: P, shape: tuple[int, ...], sizes: Mapping[str, int]) -> list[Step]:
    """Return the steps between normalized specs."""
    if start == goal:
        return []
    if 0 in shape:
        return [Step("reshape", None, (), Fraction(0), goal)]
    if common := [pair for pair in start.at if pair in goal.at]:
        fixed = {axis for axes, _ in common for axis in axes}
        ends = [
            spec.replace(at=dict(pair for pair in spec.at if pair not in common))
            for spec in (start, goal)
        ]
        steps = _route(
            ends[0],
            ends[1],
            shape,
            {axis: size for axis, size in sizes.items() if axis not in fixed},
        )
        return [
            replace(
                step,
                at=(*common, *step.at),
                after=step.after.replace(at=dict((*common, *step.after.at))),
            )
            for step in steps
        ]
    path, reduced = _ReshardPath(start, shape, sizes), _without(start.unreduced, goal.unreduced)
    if any(spec.is_flat and spec.entries for spec in (start, goal)):
        path.change_flattened_shards(goal)
    elif added := _without(goal.unreduced, start.unreduced):
        path.follow(goal.replace(unreduced=_without(goal.unreduced, added)))
        for axis in added:
            path.step("summand", Summand(), (axis,), unreduced=(*path.spec.unreduced, axis))
    elif reduced and goal.at and not {*goal.at_axes} & {*start.sharded_axes, *start.unreduced}:
        path.direct(
            start.replace(at=dict(start.at + goal.at))
        )  # only the devices there need the sum
        path.follow(goal)
    elif reduced:
        path.sum_up(goal)
        path.follow(goal)
    else:
        path.change(goal)
    return path.steps


def _without(axes: Iterable[str], removed: Iterable[str]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if axis not in removed)


class _ReshardPath:
    """Steps taken so far, and the spec that they have led to."""

    def __init__(self, start: P, shape: tuple[int, ...], sizes: Mapping[str, int]) -> None:
        self.steps: list[Step] = []
        self.spec, self.shape, self.sizes = start, shape, sizes

    def step(
        self,
        kind: Kind,
        move: Move | None,
        axes: tuple[str, ...],
        sent: Fraction | int = 0,
        **changes: Any,
    ) -> None:
        """Append a step that changes these fields of the spec."""
        self.spec = self.spec.replace(**changes)
        self.steps.append(Step(kind, move, axes, Fraction(sent), self.spec))

    def follow(self, goal: P) -> None:
        self.steps += _route(self.spec, goal, self.shape, self.sizes)
        self.spec = goal

    def count(self, axes: Iterable[str]) -> int:
        """Return the number of devices along some axes."""
        return prod([self.sizes[axis] for axis in axes])

    @property
    def local(self) -> Fraction:
        """The elements of the largest shard, the first one."""
        first = dict.fromkeys(self.sizes, 0)
        return Fraction(prod(self.spec.replace(at=None).local_shape(self.shape, self.sizes, first)))

    def dims(self, spec: P) -> list[tuple[str, ...]]:
        return [*spec.dims(len(self.shape))]

    def is_even(self, *specs: P) -> bool:
        """Return True if all shards of these specs are of one size."""
        pairs = [pair for spec in specs for pair in zip(self.shape, self.dims(spec), strict=True)]
        return not any(length % self.count(axes) for length, axes in pairs)

    def change_flattened_shards(self, goal: P) -> None:
        """Change the spec where shards of dims are flattened and sharded further: if both specs have these, in them."""
        start = self.spec
        if start.entries == goal.entries:
            pairs = zip(self.shape, self.dims(start), strict=True)
            block = tuple(chunk(length, self.count(axes)) for length, axes in pairs)
            split = start.replace(flat=None).split_axes
            sizes = {axis: size for axis, size in self.sizes.items() if axis not in split}
            steps = _route(start.replace(entries=()), goal.replace(entries=()), block, sizes)
            if self.is_even(start) or not any(step.kind == "direct" for step in steps):
                self.steps += [
                    replace(step, after=step.after.replace(entries=start.entries)) for step in steps
                ]
                self.spec = goal
                return
        if start.unreduced == goal.unreduced and (goal.is_flat or goal.at):
            self.direct(goal)
            return
        via, reduced = start.replace(flat=None), _without(start.unreduced, goal.unreduced)
        if goal.is_flat and goal.entries:
            scattered = goal.replace(
                flat=None,
                unreduced=_without(start.unreduced, _without(reduced, goal.flat_axes or ())),
            )
            summed = start.replace(flat=None, unreduced=_without(start.unreduced, reduced))
            via = scattered if scattered != start else summed
        self.follow(via)
        self.follow(goal)

    def sum_up(self, goal: P) -> None:
        """Reduce over the axes that do not stay unreduced; scatter where the target shards along them."""
        reduced = _without(self.spec.unreduced, goal.unreduced)
        by_dims = self.is_even(self.spec, goal) and not goal.is_flat and not self.spec.is_flat
        if by_dims:
            self._slice_dims(goal)
        flat = tuple(axis for axis in goal.flat_axes or goal.at_axes if axis in reduced)
        if flat and not self.spec.sharded_axes:
            n, unreduced = self.count(flat), _without(self.spec.unreduced, flat)
            sent = (n - 1) * chunk(prod(self.shape), n)
            self.step("flat_scatter", PsumScatter(0), flat, sent, flat=flat, unreduced=unreduced)
            by_dims = False
        for dim, axes in enumerate(self._further_axes(goal) if by_dims else ()):
            scattered = axes[
                : next((i for i, axis in enumerate(axes) if axis not in reduced), len(axes))
            ]
            if scattered:
                n, unreduced = self.count(scattered), _without(self.spec.unreduced, scattered)
                entries = self._changed_entries({dim: self.dims(self.spec)[dim] + scattered})
                sent = Fraction(n - 1, n) * self.local
                self.step(
                    "psum_scatter",
                    PsumScatter(dim),
                    scattered,
                    sent,
                    entries=entries,
                    unreduced=unreduced,
                )
        axes = tuple(
            axis for axis in self.sizes if axis in _without(self.spec.unreduced, goal.unreduced)
        )
        if axes:
            n = self.count(axes)
            self.step(
                "psum",
                Psum(),
                axes,
                Fraction(2 * (n - 1), n) * self.local,
                unreduced=goal.unreduced,
            )

    def _further_axes(self, goal: P) -> list[tuple[str, ...]]:
        """Return the axes by which the target splits each dim further; none where the dim is split differently already."""
        pairs = zip(self.dims(self.spec), self.dims(goal), strict=True)
        return [
            target[len(axes) :] if target[: len(axes)] == axes else () for axes, target in pairs
        ]

    def _changed_entries(self, changes: Mapping[int, tuple[str, ...]]) -> list[tuple[str, ...]]:
        return [changes.get(dim, axes) for dim, axes in enumerate(self.dims(self.spec))]

    def _slice_dims(self, goal: P) -> None:
        """Slice replicated dims as in the target."""
        for dim, axes in enumerate(self._further_axes(goal)):
            for axis in axes:
                if axis in self.spec.axes:
                    break
                entries = self._changed_entries({dim: (*self.dims(self.spec)[dim], axis)})
                self.step("slice", Take(dim), (axis,), entries=entries)

    def change(self, goal: P) -> None:
        """Change the spec without sums: by collectives of equal rows, else by a direct exchange."""
        start = self.spec
        if {*start.at_axes} - {
            *goal.sharded_axes
        }:  # elements that many devices need are sent once, then forwarded
            unsharded = not start.split_axes
            axes = start.at_axes if unsharded else _without(self.sizes, start.unreduced)
            self.follow(P.flat(*axes, unreduced=start.unreduced))
            self.follow(goal)
        elif start.at or goal.at or not self.is_even(start, goal):
            self.direct(goal)
        elif not start.is_flat and not goal.is_flat:
            self._change_dims(goal)
        else:
            self._change_rows(goal)

    def _change_rows(self, goal: P) -> None:
        """Change the ranges of the flattened tensor; those of a tensor whose first dim alone is sharded are such."""
        before, after = (
            spec.flat_axes if spec.is_flat else spec.split_axes if len(spec.entries) < 2 else None
            for spec in (self.spec, goal)
        )
        if before is None or after is None or (before and after and before != after):
            self.direct(goal)
            return
        kind, move, axes, sent = "reshape", None, before, Fraction(0)
        if not before:
            kind, move, axes = "flat_slice", Take(0), after
        elif not after:
            kind, move, sent = (
                "flat_gather",
                AllGather(0, replicated=True),
                (self.count(before) - 1) * self.local,
            )
        self.step(kind, move, axes, sent, entries=goal.entries, flat=goal.flat_axes)

    def _change_dims(self, goal: P) -> None:
        """Slice, exchange and gather the last axes of dims, if that leads to the goal."""
        start = self.spec
        self._slice_dims(goal)
        for dim, target in enumerate(self.dims(goal)):
            axes = self.dims(self.spec)[dim]
            suffix = axes[len(target) if axes[: len(target)] == target else len(axes) :]
            n = self.count(suffix)
            if not suffix:
                continue
            splits = [
                d
                for d, more in enumerate(self._further_axes(goal))
                if more[: len(suffix)] == suffix
            ]
            if splits:
                split = splits[0]
                entries = self._changed_entries(
                    {dim: target, split: self.dims(self.spec)[split] + suffix}
                )
                self.step(
                    "all_to_all",
                    AllToAll(split, dim),
                    suffix,
                    Fraction(n - 1, n) * self.local,
                    entries=entries,
                )
            elif {*suffix}.isdisjoint(goal.split_axes):
                gather = AllGather(dim, replicated=True)
                self.step(
                    "all_gather",
                    gather,
                    suffix,
                    (n - 1) * self.local,
                    entries=self._changed_entries({dim: target}),
                )
        if self.spec.entries != goal.entries:
            self.spec, self.steps = start, []
            self.direct(goal)

    def direct(self, goal: P) -> None:
        """Send each device the elements that it lacks."""
        before, after = (spec.replace(unreduced=None) for spec in (self.spec, goal))
        is_flat = self.is_even(before, after) and max(len(before.entries), len(after.entries)) < 2
        shape = (prod(self.shape),) if is_flat else self.shape
        group = tuple(
            (axis, size) for axis, size in self.sizes.items() if axis in before.axes + after.axes
        )
        exchange = DirectExchange((LeafExchange(before, after, shape, group),))
        busiest = exchange.sent(exchange.length, None, 0)
        move = exchange if busiest else DirectSlice(exchange)
        self.steps.append(Step("direct", move, tuple(axis for axis, _ in group), busiest, goal))
        self.spec = goal
