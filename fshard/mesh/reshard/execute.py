"""Execute a reshard on one device: the steps of `plan`, by collectives.

Leaves with equal steps share one collective per dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from fshard.mesh.collectives.autograd import Bound, apply, recorded, transformed
from fshard.mesh.collectives.ledger import active
from fshard.mesh.collectives.moves import Alone, Move
from fshard.mesh.layout import Layout
from fshard.mesh.layout.arithmetic import chunk, flat_range
from fshard.mesh.layout.counting import LedgerRow
from fshard.mesh.reshard.exchange import KeptRange, Parts
from fshard.mesh.reshard.plan import Step, plan
from fshard.mesh.spmd.scope import Pending, Scope, require
from fshard.source import Site

AT_ONCE = 1 << 24
"""Bytes per device of a direct exchange, about; a larger one runs in several rounds, to bound memory."""


@dataclass(frozen=True, eq=False, slots=True)
class ReshardPlan:
    """The steps of one leaf and its global shape. Hashed by identity: it is a cached value."""

    steps: tuple[Step, ...]
    shape: tuple[int, ...]


@lru_cache(maxsize=4096)
def plan_reshard(before: Layout, after: Layout, shape: tuple[int, ...]) -> ReshardPlan:
    """Return the plan from one layout to another on the same mesh."""
    return ReshardPlan(
        plan(before.spec.shapeless, after.spec.shapeless, shape, after.mesh.axes), shape
    )


def go(
    xs: Sequence[Tensor], plans: Sequence[ReshardPlan], site: Site, *, ahead: bool = False
) -> Callable[[], list[Tensor]]:
    """Execute plans, sharing collectives; return the function that gives the results.

    With `ahead`, the last collectives are only started; autograd does not record these.
    """
    scope, results = require("fs.reshard"), dict(enumerate(xs))
    started: list[tuple[SharedStep, Pending]] = []
    for step in _shared_steps(tuple(plans), tuple([x.dtype for x in xs]), AT_ONCE):
        move, shards = (
            step.move,
            [results.pop(index) for index in step.indices],
        )  # freed once they are packed
        if step.at and any(
            scope.group(axes, "fs.reshard").index != index for axes, index in step.at
        ):
            ys = step.skipped(shards, scope, site)
        elif move is None or (step.is_slice and _is_plain(shards)):
            ys = step.views(shards, scope)
        else:
            bound = Bound(move, scope.group(step.axes, "fs.reshard"), site)
            packed = step.packed(shards, scope)
            if ahead and step.is_last and not isinstance(move, Alone):
                started.append((step, bound.start(packed)))
                continue
            is_plain = not isinstance(move, Alone) and _is_plain(shards)
            ys = step.unpacked(
                bound.start(packed).wait() if is_plain else apply(bound, packed), scope
            )
        results.update(zip(step.indices, ys, strict=True))

    def finish() -> list[Tensor]:
        for step, pending in started:
            results.update(zip(step.indices, step.unpacked(pending.wait(), scope), strict=True))
        return [results[index] for index in range(len(results))]

    return finish


def _is_plain(shards: list[Tensor]) -> bool:
    """Return True if nothing differentiates these shards."""
    return not transformed() and not recorded(tuple(shards))


class SharedStep:
    """One step that several leaves take together, of which `shapes` are the global shapes."""

    def __init__(
        self, indices: list[int], steps: list[Step], shapes: list[tuple[int, ...]], *, is_last: bool
    ) -> None:
        step = steps[0]
        self.indices, self.steps, self.shapes, self.is_last = indices, steps, shapes, is_last
        self.kind, self.axes, self.at = step.kind, step.axes, step.at
        self.move: Move | None = step.move
        if isinstance(step.move, Parts):
            self.move = Parts(
                tuple(
                    leaf
                    for step in steps
                    if isinstance(step.move, Parts)
                    for leaf in step.move.leaves
                )
            )
        self.is_slice = step.kind == "flat_slice" or isinstance(self.move, KeptRange)
        self._axes = tuple(
            dict.fromkeys(axis for step in steps for axis in step.after.sharded_axes)
        )
        self._local_shapes: dict[tuple[int, ...], list[tuple[int, ...]]] = {}

    def local_shapes(self, scope: Scope) -> list[tuple[int, ...]]:
        """Return the shape of each leaf's shard after the step, cached by coordinates."""
        groups = [scope.group((axis,), "fs.reshard") for axis in self._axes]
        key = tuple([group.index for group in groups])
        shapes = self._local_shapes.get(key)
        if shapes is None:
            sizes = {axis: group.size for axis, group in zip(self._axes, groups, strict=True)}
            coordinates = dict(zip(self._axes, key, strict=True))
            pairs = zip(self.steps, self.shapes, strict=True)
            shapes = [step.after.local_shape(shape, sizes, coordinates) for step, shape in pairs]
            self._local_shapes[key] = shapes
        return shapes

    def packed(self, xs: Sequence[Tensor], scope: Scope) -> tuple[Tensor, ...]:
        """Return what a device puts into the collective: flat shards are padded to equal lengths."""
        if isinstance(self.move, Parts):
            return (self.move.joined(xs),)
        if isinstance(self.move, KeptRange):
            return tuple([self.move.parts.joined([x]) for x in xs])
        n = scope.group(self.axes, "fs.reshard").size
        if self.kind in ("flat_slice", "flat_scatter"):
            return tuple([_padded(x, chunk(x.numel(), n) * n) for x in xs])
        if self.kind == "flat_gather":
            shapes = self.local_shapes(scope)
            return tuple(
                [_padded(x, chunk(prod(shape), n)) for x, shape in zip(xs, shapes, strict=True)]
            )
        return tuple(xs)

    def unpacked(self, ys: Sequence[Tensor], scope: Scope) -> list[Tensor]:
        """Return the shards from a result of the collective, without padding."""
        if isinstance(self.move, Parts):
            ys = self.move.split(ys[0], scope.group(self.axes, "fs.reshard").index)
        return [_trimmed(y, shape) for y, shape in zip(ys, self.local_shapes(scope), strict=True)]

    def views(self, xs: list[Tensor], scope: Scope) -> list[Tensor]:
        """Run a reshape, or a slice of plain tensors."""
        if self.is_slice:
            group, move = scope.group(self.axes, "fs.reshard"), self.move
            xs = [
                move.new_shard(x, group.index) if isinstance(move, KeptRange) else
                x.reshape(-1)[slice(*flat_range(x.numel(), group.size, group.index))]
                for x in xs
            ]  # fmt: skip
        return [_trimmed(x, shape) for x, shape in zip(xs, self.local_shapes(scope), strict=True)]

    def skipped(self, xs: list[Tensor], scope: Scope, site: Site) -> list[Tensor]:
        """Return the empty shards of a device that takes no part in a step.

        A device that represents all of an abstract mesh records the bytes of one that takes part.
        """
        groups = (
            ()
            if scope.world.has_values
            else [(scope.group(axes, "fs.reshard"), index) for axes, index in self.at]
        )
        is_all = bool(groups) and all(group.represents_all for group, _ in groups)
        if is_all and self.move is not None and not isinstance(self.move, Alone):
            sent = sum(
                step.elements * x.element_size() for x, step in zip(xs, self.steps, strict=True)
            )
            device = scope.device + sum(
                (index - group.index) * group.dims[0][1] for group, index in groups
            )
            for ledger in active():
                ledger.record(
                    device,
                    LedgerRow(self.move.name, self.axes, site._replace(leaves=())),
                    Fraction(sent),
                )
        return [_trimmed(x, shape) for x, shape in zip(xs, self.local_shapes(scope), strict=True)]


@lru_cache(maxsize=1024)
def _shared_steps(
    plans: tuple[ReshardPlan, ...], dtypes: tuple[torch.dtype, ...], at_once: int
) -> tuple[SharedStep, ...]:
    """Return the shared steps of leaves with these dtypes, direct exchanges in rounds of about `at_once` bytes."""
    shared: dict[object, tuple[int, list[int]]] = {}
    bytes_before: dict[object, int] = {}
    for number in range(max([len(each.steps) for each in plans], default=0)):
        for index, dtype in enumerate(dtypes):
            if number >= len(plans[index].steps):
                continue
            step = plans[index].steps[number]
            key: tuple[object, ...] = number, step.kind, step.axes, step.at, dtype, step.move
            if isinstance(step.move, Parts):
                (supply,) = step.move.leaves
                ends = *key[:-1], supply.before.at, supply.after.at
                begin = bytes_before.get(ends, 0)
                bytes_before[ends] = begin + supply.length * dtype.itemsize
                key = *key[:-1], begin // at_once
            shared.setdefault(key, (number, []))[1].append(index)
    return tuple(
        SharedStep(
            indices,
            [plans[index].steps[number] for index in indices],
            [plans[index].shape for index in indices],
            is_last=all(number + 1 == len(plans[index].steps) for index in indices),
        )
        for number, indices in shared.values()
    )


def _padded(x: Tensor, length: int) -> Tensor:
    """Flatten, and fill up with zeros to a length."""
    flat = x if x.ndim == 1 else x.reshape(-1)
    return flat if flat.numel() == length else pad(flat, (0, length - flat.numel()))


def _trimmed(y: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the first elements of a padded result, in a shape."""
    size = prod(shape)
    if y.numel() != size:
        y = (
            y.reshape(-1)[:size] if size else y.reshape(-1)[:0].clone()
        )  # a view would keep all of it alive
    return y if y.shape == shape else y.reshape(shape)
