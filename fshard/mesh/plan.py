"""Planning a reshard: the cheapest way from one spec to another, found by search.

States are specs of one tensor; steps are the collectives that lead from one to the next, each with the elements that
a device sends for it.  Dijkstra's algorithm over these few states finds the fewest elements, then the fewest steps; so
a full gather happens only where nothing cheaper leads there.  Pure data: nothing is moved here.

    P("data", None) -> P(None, "data")          all_to_all        (n-1)/n of the shard
    P("data") -> P("model"), 4 x 2 devices      slice, ppermute, all_gather
    P(unreduced="data") -> P("data")            psum_scatter
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
from fshard.mesh.arithmetic import chunk, ravel, unravel
from fshard.mesh.matching import Dims, Matching, Pairs
from fshard.mesh.spec import P

Kind = Literal[
    "slice", "summand", "psum", "psum_scatter", "all_gather", "all_to_all", "ppermute",
    "reshape", "flat_slice", "flat_gather", "flat_scatter", "flat_ppermute",
    "keep", "exchange",
]  # fmt: skip


@dataclass(frozen=True)
class State:
    """A spec in normal form: the axes of every dim, of the flat tensor or of its owner, and those still to be summed over."""

    dims: Dims
    unreduced: frozenset[str]
    flat: tuple[str, ...] | None
    owned: tuple[str, ...] | None = None
    owner: int | None = None

    @property
    def sharded(self) -> tuple[str, ...]:
        """The axes along which devices hold different pieces."""
        return self.flat or self.owned or tuple(chain.from_iterable(self.dims))


@dataclass(frozen=True)
class Step:
    """One step of a plan: what to do over which axes, what that costs a device, and where it leads.

    `dim` is the dim that is cut, gathered or joined; `other` the dim that an all_to_all cuts; `pairs` who sends to
    whom in a ppermute; `owner` who keeps the whole, or exchanges it for flat ranges.
    """

    kind: Kind
    axes: tuple[str, ...]
    elements: Fraction
    after: State
    dim: int = 0
    other: int = 0
    pairs: Pairs = ()
    owner: int = 0


def state_of(spec: P, ndim: int) -> State:
    """Return the normal form of a spec."""
    return State(spec.dims(ndim), frozenset(spec.unreduced), spec.flat_axes, spec.owned_axes, spec.owner)


def _cut(state: State, sizes: Mapping[str, int]) -> State:
    """Return a state without the axes along which there is one device: they cut nothing, and there is nobody to ask."""

    def real(axes: Iterable[str]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if axis in sizes)

    flat, owned = None if state.flat is None else real(state.flat), real(state.owned or ())
    owner = state.owner if owned else None
    return State(tuple(map(real, state.dims)), frozenset(real(state.unreduced)), flat, owned or None, owner)


@lru_cache(maxsize=1024)
def plan(before: P, after: P, shape: tuple[int, ...], axes: tuple[tuple[str, int], ...]) -> tuple[Step, ...]:
    """Return the cheapest steps from one spec to another, for a tensor of `shape` on a mesh of `axes`.

    >>> [step.kind for step in plan(P("data"), P(None, "data"), (8, 8), (("data", 4),))]
    ['all_to_all']
    >>> [step.kind for step in plan(P("data"), P("model"), (8,), (("data", 4), ("model", 2)))]
    ['slice', 'ppermute', 'all_gather']
    """
    sizes = {axis: size for axis, size in axes if size > 1}
    start, goal = _cut(state_of(before, len(shape)), sizes), _cut(state_of(after, len(shape)), sizes)
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
        f"No way leads from {before} to {after} for shape {shape}."
    )  # the goal can always be sliced from whole


def _steps(state: State, goal: State, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Iterator[Step]:
    total = prod(shape)
    parts = _parts(state.sharded, sizes)
    local = Fraction(total, parts) if state.flat is None else Fraction(chunk(total, parts))
    if state.owned is not None:
        yield from _sums(state, goal, sizes, Fraction(total))
        yield _exchange(state, replace(state, flat=state.owned, owned=None, owner=None), total, sizes)
        if total:
            yield from _among_owners(state, goal, sizes)
        return
    yield from _sums(state, goal, sizes, local)
    if state.flat is None:
        yield from _dim_steps(state, goal, shape, sizes, local)
    else:
        yield from _flat_steps(state, goal, shape, sizes, local)
    if goal.owned is not None and state.flat == goal.owned:
        yield _exchange(state, replace(state, flat=None, owned=goal.owned, owner=goal.owner), total, sizes)


def _exchange(before: State, after: State, total: int, sizes: Mapping[str, int]) -> Step:
    """Collect flat ranges at the owner, or hand them out: alone it costs as if every device were an owner."""
    axes, owner = (after.owned, after.owner) if after.owned is not None else (before.owned, before.owner)
    n = _parts(axes or (), sizes)
    return Step("exchange", axes or (), Fraction((n - 1) * chunk(total, n)), after, owner=owner or 0)


def _among_owners(state: State, goal: State, sizes: Mapping[str, int]) -> Iterator[Step]:
    """Leave to one of several owners, equal along other axes, what it has."""
    owned, wanted = state.owned or (), goal.owned or ()
    more = tuple(axis for axis in wanted if axis not in owned)
    if not more or not set(owned) <= set(wanted) or set(more) & state.unreduced:
        return
    place = dict(zip(wanted, unravel(goal.owner or 0, [sizes[axis] for axis in wanted]), strict=True))

    def number(axes: tuple[str, ...]) -> int:
        return ravel([place[axis] for axis in axes], [sizes[axis] for axis in axes])

    if number(owned) == state.owner:
        yield Step("keep", more, Fraction(0), replace(state, owned=wanted, owner=goal.owner), owner=number(more))


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
        yield _permutation("ppermute", state, target, sizes, local)
    if len(dims) > 0 and dims[0] and not any(dims[1:]):
        yield Step("reshape", dims[0], Fraction(0), replace(state, dims=_with(dims, {0: ()}), flat=dims[0]))
    if goal.flat is not None and not any(dims):
        yield from _flatten(state, goal.flat, sizes, local)
    if goal.owned is not None and not any(dims):
        yield from _flatten(state, goal.owned, sizes, local)
        if not set(goal.owned) & state.unreduced:
            after = replace(state, owned=goal.owned, owner=goal.owner)
            yield Step("keep", goal.owned, Fraction(0), after, owner=goal.owner or 0)


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
            yield _permutation("flat_ppermute", state, replace(state, flat=target), sizes, local)
    if total % n == 0:
        for axis in _free(state, sizes):
            if total // n % sizes[axis] == 0:
                yield Step("slice", (axis,), Fraction(0), replace(state, flat=(*axes, axis)))
        for kept in range(1, len(axes)):
            gathered = (_parts(axes[kept:], sizes) - 1) * local
            yield Step("all_gather", axes[kept:], gathered, replace(state, flat=axes[:kept]))


def _permutation(
    kind: Literal["ppermute", "flat_ppermute"], before: State, after: State, sizes: Mapping[str, int], local: Fraction
) -> Step:
    axes = tuple(axis for axis in sizes if axis in before.sharded or axis in after.sharded)
    matching = Matching(_cuts(before), _cuts(after), tuple((axis, sizes[axis]) for axis in axes))
    return Step(kind, axes, local, after, pairs=matching)


def _cuts(state: State) -> Dims:
    return state.dims if state.flat is None else (state.flat,)
