"""Execute a reshard on one device: the steps of `plan`, by collectives.

Leaves with equal steps share one collective per dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from fshard.mesh.collectives.autograd import Bound, apply, recorded, transformed
from fshard.mesh.collectives.ledger import LedgerRow, active
from fshard.mesh.collectives.moves import AllGather, AllToAll, Alone, Move, Psum, PsumScatter, Summand, Take
from fshard.mesh.layout import Layout
from fshard.mesh.layout.arithmetic import chunk, flat_range
from fshard.mesh.reshard.exchange import KeptRange, Parts
from fshard.mesh.reshard.plan import Kind, Step, plan
from fshard.mesh.reshard.regions import ShardState
from fshard.mesh.spmd.scope import Pending, Scope, require
from fshard.source import Site

AT_ONCE = 1 << 24
"""Bytes per device of a direct exchange, about; a larger one runs in several rounds, to bound memory."""

MOVES: dict[Kind, Callable[[int, int], Move]] = {
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


@dataclass(frozen=True, eq=False, slots=True)
class ReshardPlan:
    """The steps of one leaf and its global shape. Hashed by identity: it is a cached value."""

    steps: tuple[Step, ...]
    shape: tuple[int, ...]


STAY = ReshardPlan((), ())
"""The plan of an array whose layout does not change."""


@lru_cache(maxsize=4096)
def plan_reshard(before: Layout, after: Layout, shape: tuple[int, ...]) -> ReshardPlan:
    """Return the plan from one layout to another on the same mesh."""
    return ReshardPlan(plan(before.spec.shapeless, after.spec.shapeless, shape, after.mesh.axes), shape)


def go(
    xs: Sequence[Tensor], ways: Sequence[ReshardPlan], site: Site, *, ahead: bool = False
) -> Callable[[], list[Tensor]]:
    """Execute plans, sharing collectives; return the function that gives the results.

    With `ahead`, the last collectives are only started, if autograd does not record them.
    """
    scope, results = require("fs.reshard"), dict(enumerate(xs))
    dtypes = tuple([x.dtype for x in xs])
    later: list[tuple[SharedStep, Pending]] = []
    for turn in range(max([len(way.steps) for way in ways], default=0)):
        for shared in _shared_steps(tuple(ways), turn, dtypes, AT_ONCE):
            move, given = shared.move, [results.pop(place) for place in shared.places]  # freed once they are packed
            if shared.at and not _is_at(shared.at, scope):
                shared.put(results, shared.skipped(given, scope, site))
            elif move is None or (shared.is_slice and _is_plain(given)):
                shared.put(results, shared.views(given, scope))
            else:
                bound = Bound(move, scope.group(shared.axes, "fs.reshard"), site)
                if ahead and shared.last and not isinstance(move, Alone):
                    later.append((shared, bound.start(shared.packed(given, scope))))
                else:
                    shared.put(results, shared.unpacked(apply(bound, shared.packed(given, scope)), scope))

    def finish() -> list[Tensor]:
        for shared, pending in later:
            shared.put(results, shared.unpacked(pending.wait(), scope))
        return [results[place] for place in range(len(results))]

    return finish


def _is_plain(xs: Sequence[Tensor]) -> bool:
    """Return True if autograd records none of these tensors."""
    return not transformed() and not recorded(tuple(xs))


class SharedStep:
    """One step that several leaves take together: `now` has each leaf's step and global shape."""

    __slots__ = ("_shapes", "_sizes", "_where", "at", "axes", "is_slice", "kind", "last", "move", "now", "places")

    def __init__(self, places: list[int], now: list[tuple[Step, tuple[int, ...]]], last: bool) -> None:
        self.places, self.now, self.last = places, now, last
        step = now[0][0]
        self.kind, self.axes, self.at = step.kind, step.axes, step.at
        self.move: Move | None = MOVES[step.kind](step.dim, step.other) if step.kind in MOVES else None
        if step.supply is not None:
            supplies = tuple([own.supply for own, _ in now if own.supply is not None])
            self.move = Parts(supplies) if step.elements else KeptRange(step.supply)
        self.is_slice = step.kind == "flat_slice" or isinstance(self.move, KeptRange)
        states = [step.after for step, _ in now]
        self._sizes = None if any(any(state.dims) for state in states) else [prod(shape) for _, shape in now]
        self._where = [*{axes: None for state in states for axes in (*state.dims, state.flat, state.at_axes) if axes}]
        self._shapes: dict[tuple[int, ...], tuple[list[tuple[int, ...]], list[int]]] = {}

    def put(self, results: dict[int, Tensor], ys: Iterable[Tensor]) -> None:
        results.update(zip(self.places, ys, strict=True))

    def shapes(self, scope: Scope) -> tuple[list[tuple[int, ...]], list[int]]:
        """Return, for each leaf, its shard's shape after the step and the size of what is flattened, cached per index."""
        key = tuple([scope.group(axes, "fs.reshard").index for axes in self._where])
        found = self._shapes.get(key)
        if found is None:
            shapes = [_shard_shape(step.after, shape, scope) for step, shape in self.now]
            sizes = [prod(_block_shape(step.after, shape, scope)) for step, shape in self.now]
            found = self._shapes[key] = shapes, sizes
        return found

    def packed(self, xs: Sequence[Tensor], scope: Scope) -> tuple[Tensor, ...]:
        """Return what a device puts into the collective: flat shards are padded to equal lengths."""
        if isinstance(self.move, Parts):
            return (self.move.joined(xs),)
        if isinstance(self.move, KeptRange):
            return tuple([_filled(x, self.move.parts.length) for x in xs])
        if self.kind not in ("flat_slice", "flat_scatter", "flat_gather"):
            return tuple(xs)
        n = scope.group(self.axes, "fs.reshard").size
        lengths = [
            chunk(size, n) * (1 if self.kind == "flat_gather" else n) for size in self._sizes or self.shapes(scope)[1]
        ]
        return tuple([_filled(x, length) for x, length in zip(xs, lengths, strict=True)])

    def unpacked(self, ys: Sequence[Tensor], scope: Scope) -> list[Tensor]:
        """Return the shards from a result of the collective, without padding."""
        if isinstance(self.move, Parts):
            ys = self.move.split(ys[0], scope.group(self.axes, "fs.reshard").index)
        return [_trimmed(y, shape) for y, shape in zip(ys, self.shapes(scope)[0], strict=True)]

    def views(self, xs: list[Tensor], scope: Scope) -> list[Tensor]:
        """Run a reshape, or a slice of plain tensors."""
        if self.kind == "reshape":
            return [x.reshape(shape) for x, shape in zip(xs, self.shapes(scope)[0], strict=True)]
        group = scope.group(self.axes, "fs.reshard")
        if isinstance(self.move, KeptRange):
            kept = [self.move.supply.kept(x, group.index) for x in xs]
            return [_trimmed(x, shape) for x, shape in zip(kept, self.shapes(scope)[0], strict=True)]
        return [x.reshape(-1)[slice(*flat_range(x.numel(), group.size, group.index))] for x in xs]

    def skipped(self, xs: list[Tensor], scope: Scope, site: Site) -> list[Tensor]:
        """Return the empty shards of a device that takes no part in a step.

        The one device of an abstract mesh represents all: it records the bytes of a device that takes part.
        """
        if not scope.world.has_values and self.move is not None and not isinstance(self.move, Alone):
            sent = sum(step.elements * x.element_size() for x, (step, _) in zip(xs, self.now, strict=True))
            groups = [(scope.group((axis,), "fs.reshard"), place) for axis, place in self.at]
            device = scope.device + sum((place - group.index) * group.dims[0][1] for group, place in groups)
            for opened in active():
                row = LedgerRow(self.move.name, self.axes, site._replace(leaves=()))
                opened.record(device, row, Fraction(sent))
        empty = [step.after.elsewhere(len(shape)) for step, shape in self.now]
        return [x if x.shape == own else _trimmed(x, own) for x, own in zip(xs, empty, strict=True)]


@lru_cache(maxsize=1024)
def _shared_steps(
    ways: tuple[ReshardPlan, ...], turn: int, dtypes: tuple[torch.dtype, ...], at_once: int
) -> tuple[SharedStep, ...]:
    """Return the shared steps of leaves with these dtypes, direct exchanges in rounds of about `at_once` bytes."""
    groups: dict[object, list[int]] = {}
    begun: dict[object, int] = {}
    for place, (way, dtype) in enumerate(zip(ways, dtypes, strict=True)):
        if turn < len(way.steps):
            step = way.steps[turn]
            one: object = step.kind, step.axes, step.at, dtype, step.dim, step.other
            if step.supply is not None and not step.elements:
                one = one, step.supply
            elif step.supply is not None:
                owner = one, step.supply.before.at, step.supply.after.at
                start = begun.get(owner, 0)
                begun[owner] = start + step.supply.length * dtype.itemsize
                one = one, start // at_once
            groups.setdefault(one, []).append(place)
    return tuple(
        SharedStep(
            places,
            [(ways[place].steps[turn], ways[place].shape) for place in places],
            last=all(turn + 1 == len(ways[place].steps) for place in places),
        )
        for places in groups.values()
    )


def _is_at(at: tuple[tuple[str, int], ...], scope: Scope) -> bool:
    """Return True if the calling device has these coordinates."""
    return all(scope.group((axis,), "fs.reshard").index == place for axis, place in at)


def _shard_shape(state: ShardState, shape: tuple[int, ...], scope: Scope) -> tuple[int, ...]:
    """Return the shape of the calling device's shard in a state."""
    if not _is_at(state.at, scope):
        return state.elsewhere(len(shape))
    block = _block_shape(state, shape, scope)
    if state.flat is None:
        return block
    return (_length(prod(block), state.flat, scope),)


def _block_shape(state: ShardState, shape: tuple[int, ...], scope: Scope) -> tuple[int, ...]:
    """Return the shape of the calling device's shard, before it is flattened."""
    return tuple([_length(length, axes, scope) for length, axes in zip(shape, state.dims, strict=True)])


def _length(length: int, axes: tuple[str, ...], scope: Scope) -> int:
    """Return the number of elements that the calling device has of a dim."""
    if not axes:
        return length
    group = scope.group(axes, "fs.reshard")
    start, stop = flat_range(length, group.size, group.index)
    return stop - start


def _filled(x: Tensor, length: int) -> Tensor:
    """Flatten, and fill up with zeros to a length."""
    flat = x if x.ndim == 1 else x.reshape(-1)
    return flat if flat.numel() == length else pad(flat, (0, length - flat.numel()))


def _trimmed(y: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the first elements of a padded result, in a shape."""
    size = prod(shape)
    if y.numel() != size:
        y = y.reshape(-1)[:size] if size else y.reshape(-1)[:0].clone()  # a view would keep all of it alive
    return y if y.shape == shape else y.reshape(shape)
