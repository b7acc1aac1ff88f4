"""Plan a reshard: the steps from one spec to another, each a collective or a local move. Pure data.

Sums come first, scattered to the devices that need their shards. Then collectives of equal rows, if
these suffice; else one direct exchange, which sends each device exactly what it lacks (`exchange`).

    P("data", None) -> P(None, "data")        all_to_all      (n-1)/n of the shard
    P(unreduced="data") -> P("data")          psum_scatter    (n-1)/n of the tensor
    P("data") -> P("model"), 4 x 2 devices    direct          3/4 of the new shard, on average
    P.flat("data", at=k) -> P(at=k)           flat_gather     (n-1)/n of the tensor
    P() -> P.flat("data", at=k)               direct          nothing

Coordinates in both specs' `at` restrict all steps to the devices there: of those at k, n gather in
the fourth line.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from math import prod
from typing import Any, Literal, TypeVar

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
Item = TypeVar("Item")


@dataclass(frozen=True)
class Step:
    """One step of a plan.

    Args:
        kind: the name of the collective or local move.
        move: what it does with tensors; None for a reshape.
        axes: the axes of the groups that take it together.
        elements: the number of elements that a device sends.
        after: the spec after the step.
        at: coordinates of the devices that take the step. They alone store the tensor before and
            after it.
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
    sizes = dict(axes)
    start = _normalized_spec(before, sizes)
    goal = _normalized_spec(after, sizes)
    large_sizes = {axis: size for axis, size in axes if size > 1}
    steps = _route(start, goal, shape, large_sizes)

    # A spec that is flat over axes of size 1 alone is stored flat, although its normalized form has
    # the dims. So a reshape is due before the first step, which works on dims, or as the only one.
    if steps and before.is_flat and not start.is_flat:
        steps.insert(0, _reshape_to(start))
    if not steps and before.is_flat != after.is_flat:
        steps.append(_reshape_to(after))

    if steps:
        steps[-1] = replace(steps[-1], after=after)
    return tuple(steps)


def _normalized_spec(spec: P, sizes: Mapping[str, int]) -> P:
    """Return a spec without axes of size 1, with its coordinates axis by axis."""
    large = {axis for axis, size in sizes.items() if size > 1}
    dims = [_within(axes, large) for axes in spec.dims(len(spec.entries))]
    flat = _within(spec.flat_axes or (), large)
    unreduced = _within(spec.unreduced, large)
    coordinates = spec.coordinates(sizes)
    at = {axis: index for axis, index in coordinates.items() if axis in large}
    return P(*dims, flat=flat, unreduced=unreduced, at=at)


def _reshape_to(spec: P) -> Step:
    return Step("reshape", None, (), Fraction(0), spec)


def _within(axes: Iterable[str], allowed: Collection[str]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if axis in allowed)


def _without(items: Iterable[Item], removed: Collection[Item]) -> tuple[Item, ...]:
    return tuple(item for item in items if item not in removed)


def _sizes_without(sizes: Mapping[str, int], axes: Collection[str]) -> dict[str, int]:
    return {axis: size for axis, size in sizes.items() if axis not in axes}


def _after_prefix(axes: tuple[str, ...], prefix: tuple[str, ...]) -> tuple[str, ...]:
    """Return the axes after a prefix; () if they do not begin with it."""
    if axes[: len(prefix)] == prefix:
        return axes[len(prefix) :]
    return ()


def _route(start: P, goal: P, shape: tuple[int, ...], sizes: Mapping[str, int]) -> list[Step]:
    """Return the steps between normalized specs."""
    if start == goal:
        return []
    if 0 in shape:
        return [_reshape_to(goal)]
    if any(pair in goal.at for pair in start.at):
        return _route_at_coordinates(start, goal, shape, sizes)

    path = _ReshardPath(start, shape, sizes)
    reduced = _without(start.unreduced, goal.unreduced)
    added = _without(goal.unreduced, start.unreduced)
    if (start.is_flat and start.entries) or (goal.is_flat and goal.entries):
        path.change_flattened_shards(goal)
    elif added:
        path.follow(goal.replace(unreduced=_without(goal.unreduced, added)))
        for axis in added:
            path.step("summand", Summand(), (axis,), unreduced=(*path.spec.unreduced, axis))
    elif reduced and goal.at and {*goal.at_axes}.isdisjoint(start.axes):
        # Each of the devices at the goal's coordinates has a summand: only they need the sum.
        path.direct(start.replace(at=dict(start.at + goal.at)))
        path.follow(goal)
    elif reduced:
        path.sum_up(goal)
        path.follow(goal)
    else:
        path.change(goal)
    return path.steps


def _route_at_coordinates(
    start: P, goal: P, shape: tuple[int, ...], sizes: Mapping[str, int]
) -> list[Step]:
    """Return the steps of the devices at the coordinates that both specs have."""
    shared = [pair for pair in start.at if pair in goal.at]
    fixed_axes = [axis for axes, _ in shared for axis in axes]
    free_start = start.replace(at=dict(_without(start.at, shared)))
    free_goal = goal.replace(at=dict(_without(goal.at, shared)))
    steps = _route(free_start, free_goal, shape, _sizes_without(sizes, fixed_axes))

    restricted: list[Step] = []
    for step in steps:
        after = step.after.replace(at=dict((*shared, *step.after.at)))
        restricted.append(replace(step, at=(*shared, *step.at), after=after))
    return restricted


class _ReshardPath:
    """Steps taken so far, and the spec that they have led to."""

    def __init__(self, start: P, shape: tuple[int, ...], sizes: Mapping[str, int]) -> None:
        self.steps: list[Step] = []
        self.spec = start
        self.shape = shape
        self.sizes = sizes

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
        """Append all steps to another spec."""
        self.steps += _route(self.spec, goal, self.shape, self.sizes)
        self.spec = goal

    def count(self, axes: Iterable[str]) -> int:
        """Return the number of devices along some axes."""
        return prod([self.sizes[axis] for axis in axes])

    @property
    def shard_size(self) -> int:
        """The elements of the largest shard, that of the first device."""
        first = dict.fromkeys(self.sizes, 0)
        spec = self.spec.replace(at=None)
        return prod(spec.local_shape(self.shape, self.sizes, first))

    def dims(self, spec: P) -> list[tuple[str, ...]]:
        return [*spec.dims(len(self.shape))]

    def is_even(self, *specs: P) -> bool:
        """Return True if all shards of these specs are of one size."""
        for spec in specs:
            for length, axes in zip(self.shape, self.dims(spec), strict=True):
                if length % self.count(axes) != 0:
                    return False
        return True

    def change_flattened_shards(self, goal: P) -> None:
        """Change the spec where shards of dims are flattened and sharded further, before or after.

        P("model", flat="data"), for example.
        """
        start = self.spec
        if start.entries == goal.entries and self._change_within_shards(goal):
            return
        reduced = _without(start.unreduced, goal.unreduced)
        if start.unreduced == goal.unreduced and (goal.is_flat or goal.at):
            self.direct(goal)
            return

        unflattened = start.replace(flat=None)
        if not (goal.is_flat and goal.entries):
            self.follow(unflattened)
            self.follow(goal)
            return

        # To the goal's shards of dims first. Sums along its flat axes are left for the last step,
        # which scatters them; other sums are made on the way. If that spec is the start, the sums
        # along flat axes must be made first: these steps would come back here for ever.
        summed_later = _within(reduced, goal.flat_axes or ())
        unreduced = _without(start.unreduced, _without(reduced, summed_later))
        shards_of_dims = goal.replace(flat=None, unreduced=unreduced)
        if shards_of_dims == start:
            self.follow(unflattened.replace(unreduced=_without(start.unreduced, reduced)))
        else:
            self.follow(shards_of_dims)
        self.follow(goal)

    def _change_within_shards(self, goal: P) -> bool:
        """Change how equal shards of dims are flattened, as if each was a tensor.

        Return False if that is not right: shards of several sizes would need several exchanges.
        """
        start = self.spec
        pairs = zip(self.shape, self.dims(start), strict=True)
        shard_shape = tuple(chunk(length, self.count(axes)) for length, axes in pairs)
        axes_of_dims = start.replace(flat=None).split_axes
        shards_start = start.replace(entries=())
        shards_goal = goal.replace(entries=())
        sizes = _sizes_without(self.sizes, axes_of_dims)
        steps = _route(shards_start, shards_goal, shard_shape, sizes)
        has_exchange = any(step.kind == "direct" for step in steps)
        if has_exchange and not self.is_even(start):
            return False

        for step in steps:
            after = step.after.replace(entries=start.entries)
            self.steps.append(replace(step, after=after))
        self.spec = goal
        return True

    def sum_up(self, goal: P) -> None:
        """Reduce over the axes that do not stay unreduced.

        The sum is scattered where the goal shards along these axes, and else made on all devices.
        """
        reduced = _without(self.spec.unreduced, goal.unreduced)
        is_flat = self.spec.is_flat or goal.is_flat
        can_scatter_dims = self.is_even(self.spec, goal) and not is_flat
        if can_scatter_dims:
            self._slice_dims(goal)  # first, so that less is summed

        # For an owner too: a scattered sum, and its shards sent to the owner, are one tensor from
        # each device, (n-1)/n + 1/n. A sum on all devices is 2 (n-1)/n.
        flat_axes = _within(goal.flat_axes or goal.at_axes, reduced)
        if flat_axes and not self.spec.sharded_axes:
            n = self.count(flat_axes)
            sent = (n - 1) * chunk(prod(self.shape), n)
            unreduced = _without(self.spec.unreduced, flat_axes)
            move = PsumScatter(0)
            self.step("flat_scatter", move, flat_axes, sent, flat=flat_axes, unreduced=unreduced)
        elif can_scatter_dims:
            self._scatter_dims(goal, reduced)

        left = _without(self.spec.unreduced, goal.unreduced)
        axes = _within(self.sizes, left)  # in the order of the mesh
        if axes:
            n = self.count(axes)
            sent = Fraction(2 * (n - 1), n) * self.shard_size
            self.step("psum", Psum(), axes, sent, unreduced=goal.unreduced)

    def _scatter_dims(self, goal: P, reduced: Collection[str]) -> None:
        """Reduce and scatter dims along axes that the goal splits them by."""
        for dim, axes in enumerate(self._further_axes(goal)):
            count = 0
            while count < len(axes) and axes[count] in reduced:
                count += 1
            scattered = axes[:count]
            if not scattered:
                continue

            n = self.count(scattered)
            sent = Fraction(n - 1, n) * self.shard_size
            entries = self._entries_with({dim: self.dims(self.spec)[dim] + scattered})
            unreduced = _without(self.spec.unreduced, scattered)
            move = PsumScatter(dim)
            self.step("psum_scatter", move, scattered, sent, entries=entries, unreduced=unreduced)

    def _further_axes(self, goal: P) -> list[tuple[str, ...]]:
        """Return the axes by which the goal splits each dim further.

        () for a dim that is split differently already.
        """
        pairs = zip(self.dims(self.spec), self.dims(goal), strict=True)
        return [_after_prefix(target, axes) for axes, target in pairs]

    def _entries_with(self, changes: Mapping[int, tuple[str, ...]]) -> list[tuple[str, ...]]:
        """Return the entries of the spec with other axes for some dims."""
        entries = self.dims(self.spec)
        for dim, axes in changes.items():
            entries[dim] = axes
        return entries

    def _slice_dims(self, goal: P) -> None:
        """Slice replicated dims as in the goal."""
        for dim, axes in enumerate(self._further_axes(goal)):
            for axis in axes:
                if axis in self.spec.axes:
                    break
                entries = self._entries_with({dim: (*self.dims(self.spec)[dim], axis)})
                self.step("slice", Take(dim), (axis,), entries=entries)

    def change(self, goal: P) -> None:
        """Change the spec without sums: by collectives of equal rows, else by a direct exchange."""
        start = self.spec
        is_even = self.is_even(start, goal)
        if _without(start.at_axes, goal.sharded_axes):
            # Several devices need each element of the one that has it: it sends each element once,
            # and the receivers forward it. A flat layout is replicated along all other axes, so
            # where the start is split, over less than all axes it would be sent several times.
            if start.split_axes:
                receivers = _without(self.sizes, start.unreduced)
            else:
                receivers = start.at_axes
            self.follow(P.flat(*receivers, unreduced=start.unreduced))
            self.follow(goal)
        elif start.at or goal.at or not is_even:
            self.direct(goal)
        elif not start.is_flat and not goal.is_flat:
            self._change_dims(goal)
        else:
            self._change_rows(goal)

    def _change_rows(self, goal: P) -> None:
        """Change the ranges of the flattened tensor."""
        before = _axes_of_ranges(self.spec)
        after = _axes_of_ranges(goal)
        is_other_split = bool(before) and bool(after) and before != after
        if before is None or after is None or is_other_split:
            self.direct(goal)
            return

        entries = goal.entries
        flat = goal.flat_axes
        if not before:
            self.step("flat_slice", Take(0), after, entries=entries, flat=flat)
        elif not after:
            gather = AllGather(0, replicated=True)
            sent = (self.count(before) - 1) * self.shard_size
            self.step("flat_gather", gather, before, sent, entries=entries, flat=flat)
        else:
            self.step("reshape", None, before, entries=entries, flat=flat)

    def _change_dims(self, goal: P) -> None:
        """Slice, exchange and gather the last axes of dims, if that leads to the goal."""
        start = self.spec
        self._slice_dims(goal)
        for dim, target in enumerate(self.dims(goal)):
            removed = _after_prefix(self.dims(self.spec)[dim], target)
            if removed:
                self._remove_axes(dim, target, removed, goal)

        if self.spec.entries != goal.entries:
            self.spec = start
            self.steps = []
            self.direct(goal)

    def _remove_axes(
        self, dim: int, target: tuple[str, ...], removed: tuple[str, ...], goal: P
    ) -> None:
        """Leave a dim sharded over `target`: move its other axes to another dim, or gather."""
        n = self.count(removed)
        destinations: list[int] = []
        for other_dim, axes in enumerate(self._further_axes(goal)):
            if axes[: len(removed)] == removed:
                destinations.append(other_dim)

        if destinations:
            split = destinations[0]
            split_axes = self.dims(self.spec)[split] + removed
            entries = self._entries_with({dim: target, split: split_axes})
            sent = Fraction(n - 1, n) * self.shard_size
            self.step("all_to_all", AllToAll(split, dim), removed, sent, entries=entries)
        elif {*removed}.isdisjoint(goal.split_axes):
            entries = self._entries_with({dim: target})
            sent = (n - 1) * self.shard_size
            gather = AllGather(dim, replicated=True)
            self.step("all_gather", gather, removed, sent, entries=entries)

    def direct(self, goal: P) -> None:
        """Send each device the elements that it lacks."""
        before = self.spec.replace(unreduced=None)
        after = goal.replace(unreduced=None)

        # Even shards of dim 0 are ranges of the flattened tensor too, each of them one box.
        shards_only_first_dim = max(len(before.entries), len(after.entries)) < 2
        if shards_only_first_dim and self.is_even(before, after):
            shape = (prod(self.shape),)
        else:
            shape = self.shape

        axes = _within(self.sizes, before.axes + after.axes)  # in the order of the mesh
        group = tuple((axis, self.sizes[axis]) for axis in axes)
        exchange = DirectExchange((LeafExchange(before, after, shape, group),))
        most_sent = exchange.sent(exchange.length, None, 0)
        move = exchange if most_sent else DirectSlice(exchange)
        self.steps.append(Step("direct", move, axes, most_sent, goal))
        self.spec = goal


def _axes_of_ranges(spec: P) -> tuple[str, ...] | None:
    """Return the axes that split the flattened tensor into ranges; None if shards are no ranges.

    Even shards of dim 0 are ranges too.
    """
    if spec.is_flat:
        return spec.flat_axes
    if len(spec.entries) < 2:
        return spec.split_axes
    return None
