"""Execute a reshard on one device: the steps of `plan`, by collectives.

Leaves with equal steps share one collective per dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from fshard.mesh.collectives.autograd import Bound, apply, recorded, transformed
from fshard.mesh.collectives.ledger import LedgerRow, active
from fshard.mesh.collectives.moves import AllGather, AllToAll, Alone, Move, Psum, PsumScatter, Summand, Take
from fshard.mesh.layout import Layout
from fshard.mesh.layout.arithmetic import Range, chunk, flat_range
from fshard.mesh.reshard.owners import Handover, Owned, filled, hand_over, keep, nothing
from fshard.mesh.reshard.plan import Kind, ShardState, Step, plan
from fshard.mesh.spmd.scope import Pending, Scope, require
from fshard.source import Site

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


def move_of(step: Step) -> Move | None:
    """Return the move that a step is; None if it is none, but another shape or an exchange with owners."""
    return _MOVES[step.kind](step.dim, step.other) if step.kind in _MOVES else step.move


@dataclass(frozen=True, eq=False, slots=True)
class ReshardPlan:
    """The steps of one leaf and its global shape. Hashed by identity: it is a cached value."""

    steps: tuple[Step, ...]
    shape: tuple[int, ...]
    slices: tuple[tuple[int, tuple[str, ...]], ...] | None = None
    """The dims to slice and their axes, if that is all there is to do."""


STAY = ReshardPlan((), (), ())
"""The plan of an array whose layout does not change."""


@lru_cache(maxsize=4096)
def plan_reshard(before: Layout, after: Layout, shape: tuple[int, ...]) -> ReshardPlan:
    """Return the plan from one layout to another on the same mesh."""
    steps = plan(before.spec.shapeless, after.spec.shapeless, shape, after.mesh.axes)
    only_slices = all(step.kind == "slice" and not step.at for step in steps)
    return ReshardPlan(steps, shape, tuple((step.dim, step.axes) for step in steps) if only_slices else None)


def take(x: Tensor, way: ReshardPlan, site: Site) -> Tensor:
    """Go a way on one device, whose shard is `x`."""
    if way.slices is None or (way.slices and not _is_plain((x,))):
        return go([x], [way], site)()[0]
    for dim, axes in way.slices:
        group = require("fs.reshard").group(axes, "fs.reshard")
        each = x.shape[dim] // group.size
        x = x.narrow(dim, group.index * each, each)
    return x


def wire_of(step: Step, shape: tuple[int, ...], n: int) -> Move | None:
    """Return the move that sends something in a step, of a tensor of this shape, over n devices."""
    if step.kind == "exchange":
        return Handover(((prod(shape), step.owner),), n, out=not step.after.at)
    move = move_of(step)
    return None if isinstance(move, Alone) else move


def go(
    xs: Sequence[Tensor], ways: Sequence[ReshardPlan], site: Site, *, ahead: bool = False, into: Sequence[Tensor] = ()
) -> Callable[[], list[Tensor]]:
    """Execute plans, sharing collectives; return the function that gives the results.

    With `ahead`, the last collectives are only started, if autograd does not record them. `into`: memory for results
    that are assembled from flat shards.
    """
    scope, results = require("fs.reshard"), list(xs)
    later: list[tuple[SharedStep, Pending, list[Fit]]] = []
    for turn in range(max([len(way.steps) for way in ways], default=0)):
        for shared in _shared_steps(tuple(ways), turn, tuple([x.dtype for x in results])):
            move, given = shared.move, [results[place] for place in shared.places]
            if shared.at and not _is_at(shared.at, scope):
                shared.put(results, shared.watched(given, scope, site))
                continue
            if move is None or (shared.kind == "flat_slice" and _is_plain(given)):
                shared.put(results, shared.alone(given, scope, site))
                continue
            bound, fits = Bound(move, scope.group(shared.axes, "fs.reshard"), site), shared.fits(scope)
            filled_up = tuple([fit.before(x) for x, fit in zip(given, fits, strict=True)])
            if into and shared.last and shared.kind == "flat_gather" and _is_plain(given):
                places = tuple([into[place] for place in shared.places])
                shared.put(results, _trimmed(bound.start(filled_up, places).wait(), fits))
            elif ahead and shared.last and not isinstance(move, Alone):
                later.append((shared, bound.start(filled_up), fits))
            else:
                shared.put(results, _trimmed(apply(bound, filled_up), fits))

    def finish() -> list[Tensor]:
        for shared, pending, fits in later:
            shared.put(results, _trimmed(pending.wait(), fits))
        return results

    return finish


def _trimmed(ys: Iterable[Tensor], fits: Sequence[Fit]) -> list[Tensor]:
    return [fit.after(y) for y, fit in zip(ys, fits, strict=True)]


def _is_plain(xs: Sequence[Tensor]) -> bool:
    """Return True if autograd records none of these tensors."""
    return not transformed() and not recorded(tuple(xs))


class Fit(NamedTuple):
    """How one leaf is padded for a collective (to `length`; -1: not), and the range of the result that is its shard."""

    length: int = -1
    own: Range | None = None
    shape: tuple[int, ...] | None = None

    def before(self, x: Tensor) -> Tensor:
        return x if self.length < 0 else filled(x, self.length)

    def after(self, y: Tensor) -> Tensor:
        if self.own is not None and y.numel() != (size := self.own[1] - self.own[0]):
            y = y[:size] if size else y[:0].clone()  # a view would keep all of it alive
        return y if self.shape is None or y.shape == self.shape else y.reshape(self.shape)


class SharedStep:
    """One step that several leaves take together: `now` has each leaf's step and global shape."""

    __slots__ = ("_fits", "_where", "axes", "kind", "last", "move", "now", "at", "places")

    def __init__(self, places: list[int], now: list[tuple[Step, tuple[int, ...]]], last: bool) -> None:
        self.places, self.now, self.last = places, now, last
        step = now[0][0]
        self.kind, self.axes, self.at, self.move = step.kind, step.axes, step.at, move_of(step)
        self._where = [*{axes: None for step, _ in now if (axes := (*(step.after.flat or ()), *step.after.at_axes))}]
        self._fits: dict[tuple[int, ...], list[Fit]] = {}

    def put(self, results: list[Tensor], ys: Iterable[Tensor]) -> None:
        for place, y in zip(self.places, ys, strict=True):
            results[place] = y

    def fits(self, scope: Scope) -> list[Fit]:
        """Return the padding of each leaf, cached per index of the device."""
        key = tuple([scope.group(axes, "fs.reshard").index for axes in self._where])
        found = self._fits.get(key)
        if found is None:
            found = self._fits[key] = [_fit(step, shape, scope) for step, shape in self.now]
        return found

    def watched(self, xs: list[Tensor], scope: Scope, site: Site) -> list[Tensor]:
        """Return the empty shards of a device that takes no part in a step.

        The one device of an abstract mesh represents all: it records the bytes of a device that takes part.
        """
        if not scope.world.has_values:
            self._count(xs, scope, site)
        empty = [step.after.elsewhere(len(shape)) for step, shape in self.now]
        return [x if x.shape == own else nothing(x, own) for x, own in zip(xs, empty, strict=True)]

    def _count(self, xs: list[Tensor], scope: Scope, site: Site) -> None:
        step, shape = self.now[0]
        move = wire_of(step, shape, scope.group(self.axes, "fs.reshard").size) if self.axes else None
        if move is None:
            return
        sent = sum(one.elements * x.element_size() for x, (one, _) in zip(xs, self.now, strict=True))
        groups = [(scope.group((axis,), "fs.reshard"), place) for axis, place in self.at]
        device = scope.device + sum((place - group.index) * group.dims[0][1] for group, place in groups)
        for opened in active():
            opened.record(device, LedgerRow(move.name, self.axes, site._replace(leaves=())), Fraction(sent))

    def alone(self, xs: list[Tensor], scope: Scope, site: Site) -> list[Tensor]:
        """Run a step that is not one move per tensor: a reshape, a slice, or an exchange with owners."""

        def on(move: Move) -> Bound:
            return Bound(move, scope.group(self.axes, "fs.reshard"), site)

        if self.kind == "flat_slice":
            return [x.reshape(-1)[slice(*(fit.own or ()))] for x, fit in zip(xs, self.fits(scope), strict=True)]
        if self.kind == "reshape":
            return [_reshaped(x, step, shape, scope) for x, (step, shape) in zip(xs, self.now, strict=True)]
        if self.kind == "keep":
            empty = [step.after.elsewhere(len(shape)) for step, shape in self.now]
            return [keep(x, step.owner, own, on) for x, (step, _), own in zip(xs, self.now, empty, strict=True)]
        owned = [Owned(x, shape, step.owner) for x, (step, shape) in zip(xs, self.now, strict=True)]
        return hand_over(owned, on, out=not self.now[0][0].after.at)


@lru_cache(maxsize=1024)
def _shared_steps(ways: tuple[ReshardPlan, ...], turn: int, dtypes: tuple[torch.dtype, ...]) -> tuple[SharedStep, ...]:
    """Return the shared steps of leaves with these dtypes."""
    groups: dict[object, list[int]] = {}
    for place, (way, dtype) in enumerate(zip(ways, dtypes, strict=True)):
        if turn < len(way.steps):
            step = way.steps[turn]
            move = move_of(step)
            one = move if move is not None and step.kind != "flat_slice" else (step.kind, bool(step.after.at))
            groups.setdefault((one, step.axes, step.at, dtype), []).append(place)
    return tuple(
        SharedStep(
            places,
            [(ways[place].steps[turn], ways[place].shape) for place in places],
            last=all(turn + 1 == len(ways[place].steps) for place in places),
        )
        for places in groups.values()
    )


def _fit(step: Step, shape: tuple[int, ...], scope: Scope) -> Fit:
    """Return the padding and range of a leaf in the move of a step."""
    if step.move is None and not step.kind.startswith("flat_"):
        return Fit()
    after, total = step.after, prod(shape)
    if step.kind == "flat_gather":
        each = chunk(total, scope.group(step.axes, "fs.reshard").size)
        return Fit(each, (0, total), shape if len(shape) != 1 else None)
    here = _is_at(after.at, scope)
    if after.flat is not None:
        n, index = (
            (group.size, group.index) if after.flat and (group := scope.group(after.flat, "fs.reshard")) else (1, 0)
        )
        length = chunk(total, n) * n if step.move is None else step.move.length
        return Fit(length, flat_range(total, n, index) if here else (0, 0))
    assert step.move is not None
    shard_shape = _shard_shape(after, shape, scope) if here else after.elsewhere(len(shape))
    return Fit(step.move.length, (0, prod(shard_shape)), shard_shape)


def _is_at(on: tuple[tuple[str, int], ...], scope: Scope) -> bool:
    """Return True if the calling device has these coordinates."""
    return all(scope.group((axis,), "fs.reshard").index == place for axis, place in on)


def _shard_shape(state: ShardState, shape: tuple[int, ...], scope: Scope) -> tuple[int, ...]:
    """Return the shape of a shard whose dims are sharded."""
    cuts = [prod(scope.group((axis,), "fs.reshard").size for axis in axes) for axes in state.dims]
    return tuple(length // cut for length, cut in zip(shape, cuts, strict=True))


def _reshaped(x: Tensor, step: Step, shape: tuple[int, ...], scope: Scope) -> Tensor:
    after = step.after
    if after.flat is not None:
        return x.reshape(-1)
    return x.reshape(_shard_shape(after, shape, scope) if _is_at(after.at, scope) else after.elsewhere(len(shape)))
