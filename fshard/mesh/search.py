"""The cheapest way from one state to another by collectives whose devices all send alike, found by search.

Each collective leads from some states to others, and a device sends so many elements for it.  The A* algorithm over
these states finds the fewest elements, in few steps; so a full gather happens only where nothing cheaper leads
there.  States are as many as there are ways to distribute axes over dims, so what cannot lead there for the fewest
elements is not looked at: of each state it is known what is to be sent at least.

What a plan is made of: states, which are specs of one tensor in normal form, and steps that lead from one to the next.

P("data", ("model", "pipe"))     dims (("data",), ("model", "pipe"))
P.flat("data")                   flat ("data",)
P.owned("b", "a", by=2)          on (("a", 0), ("b", 1)) on 2 x 3 devices: a place, whatever order it was counted in
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import chain, combinations, count, permutations, product
from math import prod
from typing import Literal

from fshard.mesh.arithmetic import chunk, flat_range, ravel
from fshard.mesh.regions import Dims, Laid, Sizes
from fshard.mesh.spec import P
from fshard.mesh.supply import Direct, Supply


def search(
    start: State, goal: State, shape: tuple[int, ...], sizes: Mapping[str, int], most: Fraction | None = None
) -> tuple[Step, ...] | None:
    """Return the cheapest way by collectives whose devices all send alike; None if a device has to send more than `most`."""
    order = count()  # settles ties: states themselves have no order
    queue: list[tuple[Fraction, int, int, Fraction, State, tuple[Step, ...]]] = []
    heapq.heappush(queue, (Fraction(0), 0, next(order), Fraction(0), start, ()))
    done: set[State] = set()
    while queue:
        _, _, _, cost, state, path = heapq.heappop(queue)
        if state == goal:
            return path
        if state in done:
            continue
        done.add(state)
        for step in _steps(state, goal, shape, sizes):
            if step.after not in done:
                sent = cost + step.elements
                whole = sent + _least(step.after, goal, prod(shape), sizes)
                steps = len(path) + 1 + _astray(step.after, goal)
                if most is None or whole <= most:
                    heapq.heappush(queue, (whole, steps, next(order), sent, step.after, (*path, step)))
    return None  # without a bound that is never so: the goal can always be sliced from the whole


def _least(state: State, goal: State, total: int, sizes: Mapping[str, int]) -> Fraction:
    """Return how many elements a device has to send at least, on the average, from one state to another.

    An element of a sum of s summands takes s - 1 messages until a device has it, any other element none; and a message to
    each device more that is to have it.
    """
    devices = parts(tuple(axis for axis in sizes if axis not in state.unreduced & goal.unreduced), sizes)
    summands = parts(tuple(state.unreduced - goal.unreduced), sizes)
    wanted = Fraction(total, parts((*goal.sharded, *(goal.unreduced - state.unreduced)), sizes))
    if summands > 1:
        return Fraction(total * (summands - 2), devices) + wanted
    return max(Fraction(0), wanted - Fraction(total, parts(state.sharded, sizes)))


def _astray(state: State, goal: State) -> int:
    """Return how many axes are not yet where they are to be: what leads towards the goal is looked at first."""
    return len(_places(state) ^ _places(goal))


@lru_cache(maxsize=4096)
def _places(state: State) -> frozenset[tuple[str, int, int]]:
    """Return what each axis cuts, and at which place among others."""
    cuts = [*enumerate(state.dims), (-1, state.flat or state.on_axes)]
    return frozenset((axis, dim, place) for dim, axes in cuts for place, axis in enumerate(axes))


def _steps(state: State, goal: State, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Iterator[Step]:
    total = prod(shape)
    pieces = parts(state.cut, sizes)
    local = Fraction(total, pieces) if state.flat is None else Fraction(chunk(total, pieces))
    yield from _spreads(state, goal)
    if state.on:
        yield from _sums(state, goal, sizes, Fraction(total))
        yield _exchange(state, replace(state, flat=_ranges(state, goal), on=()), total, sizes)
        return
    yield from _sums(state, goal, sizes, local)
    if state.flat is None:
        yield from _dim_steps(state, goal, shape, sizes, local)
    else:
        yield from _flat_steps(state, goal, shape, sizes, local)
    if goal.on and {*(state.flat or ())} == {*goal.on_axes}:
        yield _exchange(state, replace(state, flat=None, on=goal.on), total, sizes)


def _ranges(state: State, goal: State) -> tuple[str, ...]:
    """Return the axes of flat ranges to exchange a tensor for that one device owns: the goal's own, if they are the same."""
    return goal.flat if goal.flat is not None and {*goal.flat} == {*state.on_axes} else state.on_axes


def _exchange(before: State, after: State, total: int, sizes: Mapping[str, int]) -> Step:
    """Collect flat ranges at the owner, or hand them out."""
    axes = before.flat or after.flat or ()
    n, owner = parts(axes, sizes), number(before.on or after.on, axes, sizes)
    start, stop = flat_range(total, n, owner)
    busiest = total - (stop - start) if before.on else chunk(total, n)
    return Step("exchange", axes, Fraction(busiest), after, owner=owner)


def _free(state: State, sizes: Mapping[str, int]) -> list[str]:
    return [axis for axis in sizes if axis not in state.sharded and axis not in state.unreduced]


def _sums(state: State, goal: State, sizes: Mapping[str, int], local: Fraction) -> Iterator[Step]:
    """Make sums and summands: what concerns unreduced axes and leaves the cut as it is."""
    for axes in _subsets(state.unreduced - goal.unreduced, sizes):
        n = parts(axes, sizes)
        yield Step(
            "psum", axes, Fraction(2 * (n - 1), n) * local, replace(state, unreduced=state.unreduced - set(axes))
        )
    for axis in _free(state, sizes):
        if axis in goal.unreduced:
            yield Step("summand", (axis,), Fraction(0), replace(state, unreduced=state.unreduced | {axis}))


def _spreads(state: State, goal: State) -> Iterator[Step]:
    """Make summands of pieces: each device puts its own among zeros."""
    whole = state.flat or state.on_axes
    cuts = [(dim, axes[kept:]) for dim, axes in enumerate(state.dims) for kept in range(len(axes))]
    for dim, axes in [(0, whole)] if whole else cuts:
        if {*axes} <= goal.unreduced:
            dims = _with(state.dims, {} if whole else {dim: state.dims[dim][: -len(axes)]})
            after = State(dims, state.unreduced | {*axes}, None)
            yield Step("flat_spread" if whole else "spread", axes, Fraction(0), after, dim)


def keep(state: State, goal: State, sizes: Mapping[str, int]) -> Step:
    """Leave to the devices at the goal's place what all have that are equal along these axes."""
    axes, places = goal.on_axes, dict(state.on + goal.on)
    on = tuple((axis, places[axis]) for axis in sizes if axis in places)
    return Step("keep", axes, Fraction(0), replace(state, on=on), owner=number(goal.on, axes, sizes))


def _subsets(axes: frozenset[str], sizes: Mapping[str, int]) -> Iterator[tuple[str, ...]]:
    ordered = [axis for axis in sizes if axis in axes]
    for length in range(len(ordered), 0, -1):
        yield from combinations(ordered, length)


def _with(dims: Dims, changes: Mapping[int, tuple[str, ...]]) -> Dims:
    return tuple(changes.get(dim, axes) for dim, axes in enumerate(dims))


def _dim_steps(
    state: State, goal: State, shape: tuple[int, ...], sizes: Mapping[str, int], local: Fraction
) -> Iterator[Step]:
    dims = state.dims

    def divides(dim: int, more: tuple[str, ...]) -> bool:
        return shape[dim] % parts((*dims[dim], *more), sizes) == 0

    def moved(changes: Mapping[int, tuple[str, ...]], **others: frozenset[str]) -> State:
        return replace(state, dims=_with(dims, changes), **others)

    for axis, dim in product(_free(state, sizes), range(len(dims))):
        if divides(dim, (axis,)):
            yield Step("slice", (axis,), Fraction(0), moved({dim: (*dims[dim], axis)}), dim)
    for axes, dim in product(_subsets(state.unreduced - goal.unreduced, sizes), range(len(dims))):
        if divides(dim, axes):
            n = parts(axes, sizes)
            after = moved({dim: (*dims[dim], *axes)}, unreduced=state.unreduced - set(axes))
            yield Step("psum_scatter", axes, Fraction(n - 1, n) * local, after, dim)
    yield from _gathers(state, shape, sizes, local)
    for target in _same_cut(state, goal, sizes):
        yield _permutation(state, target, shape, sizes, local)
    if len(dims) > 0 and dims[0] and not any(dims[1:]):
        yield Step("reshape", dims[0], Fraction(0), replace(state, dims=_with(dims, {0: ()}), flat=dims[0]))
    if goal.flat is not None and not any(dims):
        yield from _flatten(state, goal.flat, sizes, local)
    if goal.on and not any(dims):
        yield from _flatten(state, goal.on_axes, sizes, local)
        if not {*goal.on_axes} & state.unreduced:
            yield keep(state, goal, sizes)


def _gathers(state: State, shape: tuple[int, ...], sizes: Mapping[str, int], local: Fraction) -> Iterator[Step]:
    """Take the last axes off a dim: by gathering it, or by cutting another dim instead."""
    for dim, axes in enumerate(state.dims):
        for kept in range(len(axes)):
            suffix = axes[kept:]
            n = parts(suffix, sizes)
            without = _with(state.dims, {dim: axes[:kept]})
            yield Step("all_gather", suffix, (n - 1) * local, replace(state, dims=without), dim)
            for other, others in enumerate(state.dims):
                if other != dim and shape[other] % parts((*others, *suffix), sizes) == 0:
                    after = replace(state, dims=_with(without, {other: (*others, *suffix)}))
                    yield Step("all_to_all", suffix, Fraction(n - 1, n) * local, after, dim, other)


def _same_cut(state: State, goal: State, sizes: Mapping[str, int]) -> Iterator[State]:
    """Yield the states whose shards are this state's shards, elsewhere: the axes of a dim reordered, or the goal."""
    for dim, axes in enumerate(state.dims):
        for reordered in permutations(axes):
            if reordered != axes:
                yield replace(state, dims=_with(state.dims, {dim: reordered}))
    cuts = [parts(axes, sizes) for axes in state.dims]
    if goal.flat is None and [parts(axes, sizes) for axes in goal.dims] == cuts and goal.dims != state.dims:
        candidate = replace(state, dims=goal.dims)
        if not set(candidate.sharded) & state.unreduced:
            yield candidate


def _flatten(state: State, axes: tuple[str, ...], sizes: Mapping[str, int], local: Fraction) -> Iterator[Step]:
    """Go from a whole tensor to flat ranges: free if it is equal on all devices, else by summing."""
    n = parts(axes, sizes)
    if not axes:
        yield Step("reshape", axes, Fraction(0), replace(state, flat=axes))
        return
    if not set(axes) & state.unreduced:
        yield Step("flat_slice", axes, Fraction(0), replace(state, flat=axes))
    if set(axes) <= state.unreduced:
        after = replace(state, flat=axes, unreduced=state.unreduced - set(axes))
        yield Step("flat_scatter", axes, Fraction((n - 1) * chunk(int(local), n)), after)


def _flat_steps(
    state: State, goal: State, shape: tuple[int, ...], sizes: Mapping[str, int], local: Fraction
) -> Iterator[Step]:
    axes = state.flat or ()
    total, n = prod(shape), parts(axes, sizes)
    if axes:
        yield Step("flat_gather", axes, (n - 1) * local, replace(state, flat=None))
    if not axes or (shape and shape[0] % n == 0):
        cut = _with(state.dims, {0: axes}) if axes else state.dims
        yield Step("reshape", axes, Fraction(0), replace(state, flat=None, dims=cut))
    targets = [*permutations(axes)]
    if goal.flat is not None and parts(goal.flat, sizes) == n and not set(goal.flat) & state.unreduced:
        targets.append(goal.flat)
    for target in targets:
        if target != axes:
            yield _permutation(state, replace(state, flat=target), shape, sizes, local)
    if total % n == 0:
        for axis in _free(state, sizes):
            if total // n % sizes[axis] == 0:
                yield Step("slice", (axis,), Fraction(0), replace(state, flat=(*axes, axis)))
        for kept in range(1, len(axes)):
            gathered = (parts(axes[kept:], sizes) - 1) * local
            yield Step("all_gather", axes[kept:], gathered, replace(state, flat=axes[:kept]))


def _permutation(
    before: State, after: State, shape: tuple[int, ...], sizes: Mapping[str, int], local: Fraction
) -> Step:
    """Exchange pieces for others of the same sizes: each device is sent one, or has it."""
    axes = {*before.sharded, *after.sharded}
    group = tuple((axis, size) for axis, size in sizes.items() if axis in axes)
    whole = common(before, after, shape)
    move = Supply(laid(before, whole, sizes), laid(after, whole, sizes), group)
    return Step("direct", tuple(axis for axis, _ in group), local, after, move=move)


Kind = Literal[
    "slice", "summand", "psum", "psum_scatter", "all_gather", "all_to_all",
    "reshape", "flat_slice", "flat_gather", "flat_scatter",
    "keep", "exchange", "direct", "spread", "flat_spread",
]  # fmt: skip


@dataclass(frozen=True)
class State:
    """A spec in normal form: the axes of every dim or of the flat tensor, the unreduced axes, and the place it lies at."""

    dims: Dims
    unreduced: frozenset[str]
    flat: tuple[str, ...] | None
    on: tuple[tuple[str, int], ...] = ()

    @property
    def on_axes(self) -> tuple[str, ...]:
        """The axes along which it lies at one place only."""
        return tuple(axis for axis, _ in self.on)

    @property
    def cut(self) -> tuple[str, ...]:
        """The axes that cut it."""
        return self.flat or tuple(chain.from_iterable(self.dims))

    @property
    def sharded(self) -> tuple[str, ...]:
        """The axes along which devices hold different pieces, or some hold none."""
        return self.cut + self.on_axes

    def elsewhere(self, ndim: int) -> tuple[int, ...]:
        """Return the shape of the empty piece that a device has where the tensor does not lie."""
        return (0,) * (1 if self.flat is not None else max(ndim, 1))


@dataclass(frozen=True)
class Step:
    """One step of a plan: what to do over which axes, what that costs a device, and where it leads.

    `dim` is the dim that is cut, gathered or joined; `other` the dim that an all_to_all cuts; `owner` who keeps the
    whole, or exchanges it for flat ranges; `move` what supplies each device with what it lacks.  Only the devices at the
    place `on` take the step: the tensor lies there before and after, and what the states say is of these devices.
    """

    kind: Kind
    axes: tuple[str, ...]
    elements: Fraction
    after: State
    dim: int = 0
    other: int = 0
    owner: int = 0
    move: Direct | None = None
    on: tuple[tuple[str, int], ...] = ()


def state_of(spec: P, ndim: int, axes: Sizes) -> State:
    """Return the normal form of a spec, without the axes along which there is one device: they cut nothing."""
    sizes = dict(axes)

    def real(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(axis for axis in names if sizes[axis] > 1)

    place = spec.place(sizes)
    flat = None if spec.flat_axes is None else real(spec.flat_axes)
    on = tuple((axis, place[axis]) for axis, size in axes if size > 1 and axis in place)
    return State(tuple(map(real, spec.dims(ndim))), frozenset(real(spec.unreduced)), flat, on)


def parts(axes: tuple[str, ...], sizes: Mapping[str, int]) -> int:
    """Return into how many pieces some axes cut a dim."""
    return prod(sizes[axis] for axis in axes)


def number(place: Iterable[tuple[str, int]], axes: Iterable[str], sizes: Mapping[str, int]) -> int:
    """Return the number along some axes, major to minor, of a place."""
    places, axes = dict(place), tuple(axes)
    return ravel([places[axis] for axis in axes], [sizes[axis] for axis in axes])


def common(before: State, after: State, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in which to compare pieces: that of the flattened tensor, if all are ranges of it."""
    return shape if any(before.dims[1:]) or any(after.dims[1:]) else (prod(shape),)


def laid(state: State, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Laid:
    """Return what devices hold in a state."""
    if state.flat is not None:
        return Laid(shape, None, state.flat, state.on, (parts(state.flat, sizes),))
    dims = state.dims[: len(shape)] or ((),)
    return Laid(shape, dims, None, state.on, tuple(parts(axes, sizes) for axes in dims))
