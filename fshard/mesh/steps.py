"""What one device does to have its shards in another layout: the steps of `plan`, taken with collectives.

Leaves that stand at the same kind of step take it together, as one collective for each dtype; but large ones travel alone,
because laying them out in one buffer would cost more than a message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

from torch import Tensor

from fshard.mesh.arithmetic import Range, chunk, flat_range
from fshard.mesh.differentiate import Bound, Tensors, apply, recorded, transformed
from fshard.mesh.layout import Layout
from fshard.mesh.moves import AllGather, AllToAll, Alone, Move, Psum, PsumScatter, Summand, Take
from fshard.mesh.owners import Handover, Owned, collect, filled, hand_out, keep
from fshard.mesh.plan import plan
from fshard.mesh.scope import Scope, require
from fshard.mesh.states import Kind, Step
from fshard.mesh.supply import PartialSum
from fshard.source import Site

LARGE = 1 << 20
"""Bytes from which on a leaf travels alone."""

_MOVES: dict[Kind, Callable[[int, int], Move]] = {
    "slice": lambda dim, other: Take(dim),
    "summand": lambda dim, other: Summand(),
    "psum": lambda dim, other: Psum(),
    "psum_scatter": lambda dim, other: PsumScatter(dim),
    "all_gather": lambda dim, other: AllGather(dim, replicated=True),
    "all_to_all": lambda dim, other: AllToAll(other, dim),
    "flat_slice": lambda dim, other: Take(0),
    "flat_scatter": lambda dim, other: PsumScatter(0),
    "flat_gather": lambda dim, other: AllGather(0, replicated=True),
}


@lru_cache(maxsize=1024)
def _move(kind: Kind, dim: int, other: int) -> Move:
    return _MOVES[kind](dim, other)


def move_of(step: Step) -> Move | None:
    """Return the move that a step is; None if it is none, but another shape or an exchange with owners."""
    return _move(step.kind, step.dim, step.other) if step.kind in _MOVES else step.move


class Way(NamedTuple):
    """The steps of one leaf, and the shape of the whole."""

    steps: tuple[Step, ...]
    shape: tuple[int, ...]


@lru_cache(maxsize=4096)
def steps_between(before: Layout, after: Layout, shape: tuple[int, ...]) -> tuple[Step, ...]:
    """Return the cheapest steps from one layout to another on the same mesh."""
    return plan(before.spec.shapeless, after.spec.shapeless, shape, after.mesh.axes)


def convert(x: Tensor, before: Layout, after: Layout, shape: tuple[int, ...], site: Site) -> Tensor:
    """Return one device's shard in another layout on the same mesh.  From a replicated one, nothing is sent."""
    return take_steps(x, steps_between(before, after, shape), shape, site)


def take_steps(x: Tensor, steps: tuple[Step, ...], shape: tuple[int, ...], site: Site) -> Tensor:
    """Take the steps of a plan on one device, whose shard is `x`."""
    return go([x], [Way(steps, shape)], site)()[0] if steps else x


def wire_of(step: Step, shape: tuple[int, ...], n: int) -> Move | None:
    """Return the move that sends something in a step, of a tensor of this shape, over n devices."""
    if step.kind == "exchange":
        return Handover(((prod(shape), step.owner),), n, out=step.after.owned is None)
    move = move_of(step)
    return None if isinstance(move, Alone) else move


def go(xs: Sequence[Tensor], ways: Sequence[Way], site: Site, *, ahead: bool = False) -> Callable[[], list[Tensor]]:
    """Go all ways, together where that can be; return what gives the results.

    With `ahead`, the last collectives are only started, where autograd has no part in them.
    """
    scope, results = require("fs.reshard"), list(xs)
    finishes: list[Callable[[], None]] = []
    for turn in range(max((len(way.steps) for way in ways), default=0)):
        for places in _together(results, ways, turn):
            now = [(ways[place].steps[turn], ways[place].shape) for place in places]
            step = now[0][0]
            move = move_of(step)
            if move is None or (step.kind == "flat_slice" and _is_plain(results[place] for place in places)):
                own = _unmoved([results[place] for place in places], now, scope, site)
                for place, y in zip(places, own, strict=True):
                    results[place] = y
                continue
            bound = Bound(move, scope.group(step.axes, "fs.reshard"), site)
            given = tuple(
                _before(results[place], step, shape, scope) for place, (step, shape) in zip(places, now, strict=True)
            )
            last = all(turn + 1 == len(ways[place].steps) for place in places)
            if ahead and last and not isinstance(move, Alone):
                finishes.append(_later(bound.start(given).wait, results, places, now, scope))
            else:
                _put(results, places, apply(bound, given), now, scope)

    def finish() -> list[Tensor]:
        for one in finishes:
            one()
        return results

    return finish


def _together(xs: Sequence[Tensor], ways: Sequence[Way], turn: int) -> Iterable[list[int]]:
    """Return the places of those leaves whose steps are one collective, or that need none."""
    groups: dict[object, list[int]] = {}
    for place, (x, way) in enumerate(zip(xs, ways, strict=True)):
        if turn < len(way.steps):
            step = way.steps[turn]
            move = move_of(step)
            one = move if move is not None and step.kind != "flat_slice" else (step.kind, step.after.owned is None)
            alone = place if move is not None and x.nbytes >= LARGE else -1
            groups.setdefault((one, step.axes, x.dtype, alone), []).append(place)
    return groups.values()


def _unmoved(xs: list[Tensor], now: list[tuple[Step, tuple[int, ...]]], scope: Scope, site: Site) -> list[Tensor]:
    """Take a step that is no move of each tensor by itself: another shape, a range, or one to or from owners."""
    first = now[0][0]

    def on(move: Move) -> Bound:
        return Bound(move, scope.group(first.axes, "fs.reshard"), site)

    if first.kind == "flat_slice":
        return [x.reshape(-1)[slice(*_own_range(step, shape, scope))] for x, (step, shape) in zip(xs, now, strict=True)]
    if first.kind == "reshape":
        return [_reshaped(x, step, shape, scope) for x, (step, shape) in zip(xs, now, strict=True)]
    owned = [Owned(x, shape, step.owner) for x, (step, shape) in zip(xs, now, strict=True)]
    if first.kind == "keep":
        return [keep(one, on) for one in owned]
    return collect(owned, on) if first.after.owned is not None else hand_out(owned, on)


def _is_plain(xs: Iterable[Tensor]) -> bool:
    """Return whether no derivative of what is done to these tensors is asked for."""
    return not transformed() and not recorded(tuple(xs))


def _later(
    wait: Callable[[], Tensors],
    results: list[Tensor],
    places: list[int],
    now: list[tuple[Step, tuple[int, ...]]],
    scope: Scope,
) -> Callable[[], None]:
    return lambda: _put(results, places, wait(), now, scope)


def _put(
    results: list[Tensor], places: list[int], ys: Tensors, now: list[tuple[Step, tuple[int, ...]]], scope: Scope
) -> None:
    for place, y, (step, shape) in zip(places, ys, now, strict=True):
        results[place] = _after(y, step, shape, scope)


def _reshaped(x: Tensor, step: Step, shape: tuple[int, ...], scope: Scope) -> Tensor:
    if step.after.flat is not None:
        return x.reshape(-1)
    size = scope.group(step.axes, "fs.reshard").size if step.axes else 1
    return x.reshape((shape[0] // size, *shape[1:]) if size > 1 else shape)


def _before(x: Tensor, step: Step, shape: tuple[int, ...], scope: Scope) -> Tensor:
    """Fill what is uneven up to one length, for the way."""
    if step.move is not None:
        return filled(x, step.move.length)
    if not step.kind.startswith("flat_"):
        return x
    if step.kind == "flat_gather":
        return filled(x, chunk(prod(shape), scope.group(step.axes, "fs.reshard").size))
    target = scope.group(step.after.flat or (), "fs.reshard")
    each = chunk(prod(shape), target.size)
    return filled(x, each * target.size)


def _after(y: Tensor, step: Step, shape: tuple[int, ...], scope: Scope) -> Tensor:
    """Trim what was filled up."""
    if step.move is not None:
        return y if isinstance(step.move, PartialSum) else _piece(y, step, shape, scope)
    if not step.kind.startswith("flat_"):
        return y
    total = prod(shape)
    if step.kind == "flat_gather":
        flat = y if y.numel() == total else y[:total]
        return flat if len(shape) == 1 else flat.reshape(shape)
    start, stop = _own_range(step, shape, scope)
    return y if y.numel() == stop - start else y[: stop - start]


def _piece(y: Tensor, step: Step, shape: tuple[int, ...], scope: Scope) -> Tensor:
    """Return the own piece, which stands in front."""
    after = step.after
    if after.flat is not None:
        start, stop = _own_range(step, shape, scope)
        return y[: stop - start]
    if after.owned is not None:
        mine = all(scope.group((axis,), "fs.reshard").index == place for axis, place in after.owned)
        return Owned(y, shape, 0).whole(mine, y)
    cuts = [prod(scope.group((axis,), "fs.reshard").size for axis in axes) for axes in after.dims]
    piece = [length // cut for length, cut in zip(shape, cuts, strict=True)]
    return y[: prod(piece)].view(piece)


def _own_range(step: Step, shape: tuple[int, ...], scope: Scope) -> Range:
    target = scope.group(step.after.flat or (), "fs.reshard")
    return flat_range(prod(shape), target.size, target.index)
