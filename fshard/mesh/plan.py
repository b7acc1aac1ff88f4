"""Planning a reshard: the cheapest way from one spec to another, found by search or straight on.

Steps are collectives, each with the elements that the busiest device sends for it.  `search` finds the fewest of them by
collectives of equal rows.  Where these send more than that, each device is sent exactly what it lacks: see `supply`.  So
nobody gathers a whole that needs a part.  What stays at its place along some axes goes its way there, by the devices of that
place alone.  Pure data: nothing is moved here.

    P("data", None) -> P(None, "data")          all_to_all        (n-1)/n of the shard
    P(unreduced="data") -> P("data")            psum_scatter
    P("data") -> P("model"), 4 x 2 devices      direct            3/4 of the new shard, on the average
    P.flat("data", on=k) -> P(on=k)             flat_gather       (n-1)/n of the whole, by those at k; nothing elsewhere
    P() -> P.flat("data", on=k)                 keep, flat_slice
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from math import prod
from typing import NamedTuple

from fshard.mesh.arithmetic import chunk, flat_range
from fshard.mesh.search import State, Step, common, keep, laid, parts, search, state_of
from fshard.mesh.spec import P
from fshard.mesh.supply import direct


@lru_cache(maxsize=1024)
def plan(before: P, after: P, shape: tuple[int, ...], axes: tuple[tuple[str, int], ...]) -> tuple[Step, ...]:
    """Return the cheapest steps from one spec to another, for a tensor of `shape` on a mesh of `axes`.

    >>> [step.kind for step in plan(P("data"), P(None, "data"), (8, 8), (("data", 4),))]
    ['all_to_all']
    >>> [step.kind for step in plan(P("data"), P("model"), (8,), (("data", 4), ("model", 2)))]
    ['direct']
    """
    sizes = {axis: size for axis, size in axes if size > 1}
    return _route(state_of(before, len(shape), axes), state_of(after, len(shape), axes), shape, sizes).steps


class Route(NamedTuple):
    """Steps that lead from one state to another, and the elements that the busiest device, and all, send for them."""

    steps: tuple[Step, ...] = ()
    busiest: Fraction = Fraction(0)
    total: Fraction = Fraction(0)

    def then(self, other: Route) -> Route:
        """Return the two, one after the other."""
        return Route(self.steps + other.steps, self.busiest + other.busiest, self.total + other.total)

    @staticmethod
    def of(steps: tuple[Step, ...], start: State, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Route:
        """Return steps with what they cost."""
        return Route(steps, sum((step.elements for step in steps), Fraction(0)), _sent(steps, start, shape, sizes))


def _route(start: State, goal: State, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Route:
    """Return the cheapest route; what stays where it is along some axes is planned without them."""
    both = tuple(place for place in start.on if place in goal.on)
    if both:
        rest = {axis: size for axis, size in sizes.items() if axis not in dict(both)}
        there = [replace(one, on=tuple(place for place in one.on if place not in both)) for one in (start, goal)]
        route = _route(there[0], there[1], shape, rest)
        return route._replace(steps=tuple(replace(step, on=both + step.on) for step in route.steps))
    in_pieces = any(state.on and (state.cut or state.flat is not None) for state in (start, goal))
    routes = (_by_place if in_pieces else _by_search)(start, goal, shape, sizes)
    return min(routes, key=lambda route: route[1:])


def _by_search(start: State, goal: State, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Iterator[Route]:
    """Yield the route by collectives, if it may be the cheapest, and the one straight on."""
    exchanged = _exchanged(start, goal) or _exchanged(goal, start)
    straight = Route.of(() if exchanged else _straight(start, goal, shape, sizes), start, shape, sizes)
    path = search(start, goal, shape, sizes, straight.busiest if straight.steps else None)
    if path is not None:
        yield Route.of(path, start, shape, sizes)
    if straight.steps:
        yield straight


def _by_place(start: State, goal: State, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Iterator[Route]:
    """Yield routes of what lies in pieces at one place: kept there or summed first, straight on, and by flat ranges of all."""
    if 0 in shape:
        yield Route((Step("reshape", (), Fraction(0), goal),))
        return
    if goal.on and not {*goal.on_axes} & {*start.sharded, *start.unreduced}:
        kept = keep(start, goal, sizes)
        yield Route((kept,)).then(_route(kept.after, goal, shape, sizes))
    open_sums = start.unreduced & goal.unreduced
    straight, summed = _straight(start, goal, shape, sizes), replace(start, unreduced=open_sums)
    in_pieces = start.on or start.cut or start.flat is not None
    if summed != start and not (straight and in_pieces):  # a sum of too many to be shared out, or a small one
        yield _route(start, summed, shape, sizes).then(_route(summed, goal, shape, sizes))
    if not straight:
        return
    yield Route.of(straight, start, shape, sizes)
    everywhere = State(((),) * len(shape), open_sums, tuple(axis for axis in sizes if axis not in open_sums))
    if everywhere != start:
        spread = Route.of(_straight(start, everywhere, shape, sizes), start, shape, sizes)
        yield spread.then(_route(everywhere, goal, shape, sizes))


def _straight(start: State, goal: State, shape: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[Step, ...]:
    """Return the steps by which each device is sent exactly what it lacks, if there are any."""
    if 0 in shape:
        return ()
    kept, over = start.unreduced & goal.unreduced, start.unreduced - goal.unreduced
    if not (over or start.sharded or goal.sharded):
        return ()
    steps: list[Step] = []
    whole = common(start, goal, shape)
    group = tuple((axis, size) for axis, size in sizes.items() if axis not in kept)
    found = direct(laid(start, whole, sizes), laid(goal, whole, sizes), group, tuple(a for a, _ in group if a in over))
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
    return alike and bool(owned.on) and flat.flat is not None and {*owned.on_axes} == {*flat.flat}


def _sent(path: tuple[Step, ...], start: State, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Fraction:
    """Return the elements that all devices together send, without those that only fill up flat ranges."""
    total, sent = prod(shape), Fraction(0)
    for before, step in zip([start, *(step.after for step in path)], path, strict=False):
        n, flat = prod(sizes.values()), before.flat or step.after.flat
        cut = parts(flat or (), sizes)
        if step.move is not None:
            sent += step.move.total() * Fraction(n, prod(size for _, size in step.move.group))
        elif step.kind == "exchange":
            first, last = flat_range(total, cut, step.owner)
            sent += Fraction(n, cut) * (total - (last - first))
        elif flat and total:
            sent += step.elements * n * Fraction(total, cut * chunk(total, cut))
        else:
            sent += step.elements * n / parts(before.on_axes, sizes)  # only owners have anything to send
    return sent
