"""Planning a reshard: the cheapest way from one spec to another, found by search or straight on.

States are specs of one tensor; steps are the collectives that lead from one to the next, each with the elements that
the busiest device sends for it.  Dijkstra's algorithm over these few states finds the fewest elements, then the fewest
steps.  Where collectives of equal rows send more than that, each device is sent exactly what it lacks: see `supply`.
So nobody gathers a whole that needs a part.  Pure data: nothing is moved here.

    P("data", None) -> P(None, "data")          all_to_all        (n-1)/n of the shard
    P(unreduced="data") -> P("data")            psum_scatter
    P("data") -> P("model"), 4 x 2 devices      direct            3/4 of the new shard, on the average
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

from fshard.errors import LayoutError
from fshard.mesh.arithmetic import chunk, flat_range, ravel, unravel
from fshard.mesh.regions import Dims, Laid, Sizes
from fshard.mesh.spec import P
from fshard.mesh.supply import Direct, Supply, direct

Kind = Literal[
    "slice", "summand", "psum", "psum_scatter", "all_gather", "all_to_all",
    "reshape", "flat_slice", "flat_gather", "flat_scatter",
    "keep", "exchange", "direct",
]  # fmt: skip


@dataclass(frozen=True)
class State:
    """A spec in normal form: the axes of every dim or of the flat tensor, or the owner's place, and the unreduced axes."""

    dims: Dims
    unreduced: frozenset[str]
    flat: tuple[str, ...] | None
    owned: tuple[tuple[str, int], ...] | None = None

    @property
    def owning(self) -> tuple[str, ...]:
        """The axes along which one device alone holds anything."""
        return tuple(axis for axis, _ in self.owned or ())

    @property
    def sharded(self) -> tuple[str, ...]:
        """The axes along which devices hold different pieces."""
        return self.flat or self.owning or tuple(chain.from_iterable(self.dims))


@dataclass(frozen=True)
class Step:
    """One step of a plan: what to do over which axes, what that costs a device, and where it leads.

    `dim` is the dim that is cut, gathered or joined; `other` the dim that an all_to_all cuts; `owner` who keeps the
    whole, or exchanges it for flat ranges; `move` what supplies each device with what it lacks.
    """

    kind: Kind
    axes: tuple[str, ...]
    elements: Fraction
    after: State
    dim: int = 0
    other: int = 0
    owner: int = 0
    move: Direct | None = None


def _state_of(spec: P, ndim: int, axes: Sizes) -> State:
    """Return the normal form of a spec, without the axes along which there is one device: they cut nothing."""
    sizes = dict(axes)

    def real(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(axis for axis in names if sizes[axis] > 1)

    flat, owning = None if spec.flat_axes is None else real(spec.flat_axes), spec.owned_axes or ()
    place = dict(zip(owning, unravel(spec.owner or 0, [sizes[axis] for axis in owning]), strict=True))
    owned = tuple((axis, place[axis]) for axis, size in axes if size > 1 and axis in place)
    return State(tuple(map(real, spec.dims(ndim))), frozenset(real(spec.unreduced)), flat, owned or None)


@lru_cache(maxsize=1024)
def plan(before: P, after: P, shape: tuple[int, ...], axes: tuple[tuple[str, int], ...]) -> tuple[Step, ...]:
    """Return the cheapest steps from one spec to another, for a tensor of `shape` on a mesh of `axes`.

    >>> [step.kind for step in plan(P("data"), P(None, "data"), (8, 8), (("data", 4),))]
    ['all_to_all']
    >>> [step.kind for step in plan(P("data"), P("model"), (8,), (("data", 4), ("model", 2)))]
    ['direct']
    """
    sizes = {axis: size for axis, size in axes if size > 1}
    start, goal = _state_of(before, len(shape), axes), _state_of(after, len(shape), axes)
    path = _search(start, goal, shape, sizes)
    straight = _straight(start, goal, shape, sizes) if any(step.elements for step in path) else ()
    costs = [(sum(step.elements for step in steps), _sent(steps, start, shape, sizes)) for steps in (straight, path)]
    return straight if straight and costs[0] < costs[1] else path


def _search(start: State, goal: State, shape: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[Step, ...]:
    """Return the cheapest way by collectives whose devices all send alike."""
    order = count()  # settles ties: states themselves have no order
    queue: list[tuple[Fraction, int, int, State, tuple[Step, ...]]] = [(Fraction(0), 0, next(order), start, ())]
    done: set[State] = set()
    while queue:
        cost, length, _, state, path = heapq.heappop(queue)
        if state == goal:
            return path
        if state in done:
            continue
        done.add(state)
        for step in _steps(state, goal, shape, sizes):
            if step.after not in done:
                heapq.heappush(queue, (cost + step.elements, length + 1, next(order), step.after, (*path, step)))
    raise LayoutError(
        f"No way leads from {start} to {goal} for shape {shape}."
    )  # the goal can always be sliced from whole


def _straight(start: State, goal: State, shape: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[Step, ...]:
    """Return the steps by which each device is sent exactly what it lacks, if there are any."""
    if 0 in shape or _exchanged(start, goal) or _exchanged(goal, start):
        return ()
    kept, over = start.unreduced & goal.unreduced, start.unreduced - goal.unreduced
    steps: list[Step] = []
    whole = _common(start, goal, shape)
    group = tuple((axis, size) for axis, size in sizes.items() if axis not in kept)
    found = direct(
        _laid(start, whole, sizes), _laid(goal, whole, sizes), group, tuple(a for a, _ in group if a in over)
    )
    for move in found or ():
        axes, busiest = tuple(axis for axis, _ in move.group), Fraction(int(move.elements().max()))
        steps.append(Step("direct", axes, busiest, replace(goal, unreduced=kept), move=move))
    for axis in sizes if found else ():
        if axis in goal.unreduced - kept:
            after = replace(goal, unreduced=steps[-1].after.unreduced | {axis})
            steps.append(Step("summand", (axis,), Fraction(0), after))
    return tuple(steps)


def _exchanged(owned: State, flat: State) -> bool:
    """Return whether an owner and flat ranges make an exchange, which tensors of several owners make together."""
    alike = owned.unreduced == flat.unreduced
    return alike and owned.owned is not None and flat.flat is not None and {*owned.owning} == {*flat.flat}


def _common(before: State, after: State, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in which to compare pieces: that of the flattened tensor, if all are ranges of it."""
    return shape if any(before.dims[1:]) or any(after.dims[1:]) else (prod(shape),)


def _laid(state: State, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Laid:
    """Return what devices hold in a state."""
    if state.flat is not None:
        return Laid(shape, flat=state.flat, parts=(_parts(state.flat, sizes),))
    if state.owned is not None:
        return Laid(shape, owned=state.owned)
    dims = state.dims[: len(shape)] or ((),)
    return Laid(shape, dims, parts=tuple(_parts(axes, sizes) for axes in dims))


def _sent(path: tuple[Step, ...], start: State, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Fraction:
    """Return the elements that all devices together send, without those that only fill up flat ranges."""
    total, sent = prod(shape), Fraction(0)
    for before, step in zip([start, *(step.after for step in path)], path, strict=False):
        n, flat = prod(sizes.values()), before.flat or step.after.flat
        parts = _parts(flat or (), sizes)
        if step.move is not None:
            sent += step.move.total() * Fraction(n, prod(size for _, size in step.move.group))
        elif step.kind == "exchange":
            first, last = flat_range(total, parts, step.owner)
            sent += Fraction(n, parts) * (total - (last - first))
        elif flat and total:
            sent += step.elements * n * Fraction(total, parts * chunk(total, parts))
        else:
            sent += step.elements * n
    return sent


def _steps(state: State, goal: State, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Iterator[Step]:
    total = prod(shape)
    parts = _parts(state.sharded, sizes)
    local = Fraction(total, parts) if state.flat is None else Fraction(chunk(total, parts))
    if state.owned is not None:
        yield from _sums(state, goal, sizes, local)
        yield _exchange(state, replace(state, flat=_ranges(state, goal), owned=None), total, sizes)
        if total:
            yield from _among_owners(state, goal, sizes)
        return
    yield from _sums(state, goal, sizes, local)
    if state.flat is None:
        yield from _dim_steps(state, goal, shape, sizes, local)
    else:
        yield from _flat_steps(state, goal, shape, sizes, local)
    if goal.owned is not None and {*(state.flat or ())} == {*goal.owning}:
        yield _exchange(state, replace(state, flat=None, owned=goal.owned), total, sizes)


def _ranges(state: State, goal: State) -> tuple[str, ...]:
    """Return the axes of flat ranges to exchange a tensor for that one device owns: the goal's own, if they are the same."""
    return goal.flat if goal.flat is not None and {*goal.flat} == {*state.owning} else state.owning


def _exchange(before: State, after: State, total: int, sizes: Mapping[str, int]) -> Step:
    """Collect flat ranges at the owner, or hand them out."""
    axes, owned = before.flat or after.flat or (), before.owned or after.owned or ()
    n, owner = _parts(axes, sizes), _number(owned, axes, sizes)
    start, stop = flat_range(total, n, owner)
    busiest = total - (stop - start) if before.owned is not None else chunk(total, n)
    return Step("exchange", axes, Fraction(busiest), after, owner=owner)


def _number(place: Iterable[tuple[str, int]], axes: Iterable[str], sizes: Mapping[str, int]) -> int:
    """Return the number along some axes, major to minor, of a place."""
    places, axes = dict(place), tuple(axes)
    return ravel([places[axis] for axis in axes], [sizes[axis] for axis in axes])


def _among_owners(state: State, goal: State, sizes: Mapping[str, int]) -> Iterator[Step]:
    """Leave to one of several owners, equal along other axes, what it has."""
    owned, wanted = state.owned or (), goal.owned or ()
    more = tuple(axis for axis in goal.owning if axis not in state.owning)
    if more and {*owned} <= {*wanted} and not {*more} & state.unreduced:
        yield Step("keep", more, Fraction(0), replace(state, owned=wanted), owner=_number(wanted, more, sizes))


def _parts(axes: tuple[str, ...], sizes: Mapping[str, int]) -> int:
    return prod(sizes[axis] for axis in axes)


def _free(state: State, sizes: Mapping[str, int]) -> list[str]:
    return [axis for axis in sizes if axis not in state.sharded and axis not in state.unreduced]


def _sums(state: State, goal: State, sizes: Mapping[str, int], local: Fraction) -> Iterator[Step]:
    """Make sums and summands: what concerns unreduced axes and leaves the cut as it is."""
    for axes in _subsets(state.unreduced, sizes):
        n = _parts(axes, sizes)
        yield Step(
            "psum", axes, Fraction(2 * (n - 1), n) * local, replace(state, unreduced=state.unreduced - set(axes))
        )
    for axis in _free(state, sizes):
        if axis in goal.unreduced:
            yield Step("summand", (axis,), Fraction(0), replace(state, unreduced=state.unreduced | {axis}))


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
        return shape[dim] % _parts((*dims[dim], *more), sizes) == 0

    def moved(changes: Mapping[int, tuple[str, ...]], **others: frozenset[str]) -> State:
        return replace(state, dims=_with(dims, changes), **others)

    for axis, dim in product(_free(state, sizes), range(len(dims))):
        if divides(dim, (axis,)):
            yield Step("slice", (axis,), Fraction(0), moved({dim: (*dims[dim], axis)}), dim)
    for axes, dim in product(_subsets(state.unreduced, sizes), range(len(dims))):
        if divides(dim, axes):
            n = _parts(axes, sizes)
            after = moved({dim: (*dims[dim], *axes)}, unreduced=state.unreduced - set(axes))
            yield Step("psum_scatter", axes, Fraction(n - 1, n) * local, after, dim)
    yield from _gathers(state, shape, sizes, local)
    for target in _same_cut(state, goal, sizes):
        yield _permutation(state, target, shape, sizes, local)
    if len(dims) > 0 and dims[0] and not any(dims[1:]):
        yield Step("reshape", dims[0], Fraction(0), replace(state, dims=_with(dims, {0: ()}), flat=dims[0]))
    if goal.flat is not None and not any(dims):
        yield from _flatten(state, goal.flat, sizes, local)
    if goal.owned is not None and not any(dims):
        yield from _flatten(state, goal.owning, sizes, local)
        if not {*goal.owning} & state.unreduced:
            owner = _number(goal.owned, goal.owning, sizes)
            yield Step("keep", goal.owning, Fraction(0), replace(state, owned=goal.owned), owner=owner)


def _gathers(state: State, shape: tuple[int, ...], sizes: Mapping[str, int], local: Fraction) -> Iterator[Step]:
    """Take the last axes off a dim: by gathering it, or by cutting another dim instead."""
    for dim, axes in enumerate(state.dims):
        for kept in range(len(axes)):
            suffix = axes[kept:]
            n = _parts(suffix, sizes)
            without = _with(state.dims, {dim: axes[:kept]})
            yield Step("all_gather", suffix, (n - 1) * local, replace(state, dims=without), dim)
            for other, others in enumerate(state.dims):
                if other != dim and shape[other] % _parts((*others, *suffix), sizes) == 0:
                    after = replace(state, dims=_with(without, {other: (*others, *suffix)}))
                    yield Step("all_to_all", suffix, Fraction(n - 1, n) * local, after, dim, other)


def _same_cut(state: State, goal: State, sizes: Mapping[str, int]) -> Iterator[State]:
    """Yield the states whose shards are this state's shards, elsewhere: the axes of a dim reordered, or the goal."""
    for dim, axes in enumerate(state.dims):
        for reordered in permutations(axes):
            if reordered != axes:
                yield replace(state, dims=_with(state.dims, {dim: reordered}))
    cuts = [_parts(axes, sizes) for axes in state.dims]
    if goal.flat is None and [_parts(axes, sizes) for axes in goal.dims] == cuts and goal.dims != state.dims:
        candidate = replace(state, dims=goal.dims)
        if not set(candidate.sharded) & state.unreduced:
            yield candidate


def _flatten(state: State, axes: tuple[str, ...], sizes: Mapping[str, int], local: Fraction) -> Iterator[Step]:
    """Go from a whole tensor to flat ranges: free if it is equal on all devices, else by summing."""
    n = _parts(axes, sizes)
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
    total, n = prod(shape), _parts(axes, sizes)
    if axes:
        yield Step("flat_gather", axes, (n - 1) * local, replace(state, flat=None))
    if not axes or (shape and shape[0] % n == 0):
        cut = _with(state.dims, {0: axes}) if axes else state.dims
        yield Step("reshape", axes, Fraction(0), replace(state, flat=None, dims=cut))
    targets = [*permutations(axes)]
    if goal.flat is not None and _parts(goal.flat, sizes) == n and not set(goal.flat) & state.unreduced:
        targets.append(goal.flat)
    for target in targets:
        if target != axes:
            yield _permutation(state, replace(state, flat=target), shape, sizes, local)
    if total % n == 0:
        for axis in _free(state, sizes):
            if total // n % sizes[axis] == 0:
                yield Step("slice", (axis,), Fraction(0), replace(state, flat=(*axes, axis)))
        for kept in range(1, len(axes)):
            gathered = (_parts(axes[kept:], sizes) - 1) * local
            yield Step("all_gather", axes[kept:], gathered, replace(state, flat=axes[:kept]))


def _permutation(
    before: State, after: State, shape: tuple[int, ...], sizes: Mapping[str, int], local: Fraction
) -> Step:
    """Exchange pieces for others of the same sizes: each device is sent one, or has it."""
    axes = {*before.sharded, *after.sharded}
    group = tuple((axis, size) for axis, size in sizes.items() if axis in axes)
    whole = _common(before, after, shape)
    move = Supply(_laid(before, whole, sizes), _laid(after, whole, sizes), group)
    return Step("direct", tuple(axis for axis, _ in group), local, after, move=move)
