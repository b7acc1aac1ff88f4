"""Planning a reshard: the cheapest way from one spec to another, found by search or straight on.

Steps are collectives, each with the elements that the busiest device sends for it.  `search` finds the fewest of them by
collectives of equal rows.  Where these send more than that, each device is sent exactly what it lacks: see `supply`.  So
nobody gathers a whole that needs a part.  Pure data: nothing is moved here.

    P("data", None) -> P(None, "data")          all_to_all        (n-1)/n of the shard
    P(unreduced="data") -> P("data")            psum_scatter
    P("data") -> P("model"), 4 x 2 devices      direct            3/4 of the new shard, on the average
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from math import prod

from fshard.mesh.arithmetic import chunk, flat_range
from fshard.mesh.search import search
from fshard.mesh.spec import P
from fshard.mesh.states import State, Step, common, laid, parts, state_of
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
    start, goal = state_of(before, len(shape), axes), state_of(after, len(shape), axes)
    straight = _straight(start, goal, shape, sizes)
    most = sum((step.elements for step in straight), Fraction(0)) if straight else None
    path = search(start, goal, shape, sizes, most)
    if path is None:
        return straight
    costs = [(sum(step.elements for step in steps), _sent(steps, start, shape, sizes)) for steps in (straight, path)]
    return straight if straight and costs[0] < costs[1] else path


def _straight(start: State, goal: State, shape: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[Step, ...]:
    """Return the steps by which each device is sent exactly what it lacks, if there are any."""
    if 0 in shape or _exchanged(start, goal) or _exchanged(goal, start):
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
    return alike and owned.owned is not None and flat.flat is not None and {*owned.owning} == {*flat.flat}


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
            sent += step.elements * n / parts(before.owning, sizes)  # only owners have anything to send
    return sent
