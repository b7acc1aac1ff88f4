"""Bring an array to the layout that an operation needs: collectives on its shards, which autograd records.

A replicated value that meets sharded ones is *varying* in that operation: its gradient is a sum over the devices (a
psum; after an all_gather together a psum_scatter).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from math import lcm, prod
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor

from fshard.array.mode import array_mode
from fshard.errors import LayoutError
from fshard.mesh.collectives.autograd import Bound, Tensors, apply, recorded, transformed
from fshard.mesh.collectives.moves import (
    AllGather,
    AllToAll,
    Alone,
    Extreme,
    Move,
    Psum,
    PsumScatter,
    Pvary,
    Summand,
    Take,
)
from fshard.mesh.collectives.on_shards import apply_move
from fshard.mesh.layout import Layout, Mesh, P
from fshard.mesh.layout.arithmetic import chunk, flat_range, ravel, zigzag
from fshard.mesh.layout.mesh import run_defaults
from fshard.mesh.layout.sharded import Sharded, typeof
from fshard.mesh.reshard.device_put import reshard_all
from fshard.mesh.reshard.execute import plan_reshard
from fshard.mesh.reshard.varying import leave_loss
from fshard.mesh.spmd.run import local_devices
from fshard.mesh.spmd.scope import here, require
from fshard.source import Site, call_site

_current_backward: Any = torch._C._current_graph_task_id  # pyright: ignore[reportPrivateUsage]
"""Returns the number of the backward that runs in this thread, or -1."""
_PLAIN_KINDS = {"slice", "summand", "psum", "psum_scatter", "all_gather", "all_to_all"}


class LayoutChange(NamedTuple):
    """The moves that bring an input to its layout, and the axes along which it is varying afterwards.

    `moves` is None where only a general reshard leads there.
    """

    layout: Layout
    moves: tuple[tuple[Move, tuple[str, ...]], ...] | None
    vary: tuple[str, ...]
    elements: Fraction
    """Elements that the busiest device sends."""
    shape: tuple[int, ...] | None = None
    """The global shape, where the devices do not divide a dim, or shards are in zigzag order."""

    @property
    def is_free(self) -> bool:
        return self.moves == () and not self.vary


@lru_cache(maxsize=8192)
def plan_transfer(
    shape: tuple[int, ...], before: Layout, spec: P, vary: tuple[str, ...] = ()
) -> LayoutChange:
    """Plan how an array of this shape gets from a layout to a spec."""
    layout = Layout(before.mesh, spec)
    padded = _padded(shape, before, layout)
    steps = plan_reshard(before, layout, padded).steps
    sent = sum((step.elements for step in steps), Fraction(0))
    is_plain = padded == shape and not any(before.mesh.zigzag in step.axes for step in steps)
    if before.memory != "device" or any(step.kind not in _PLAIN_KINDS or step.at for step in steps):
        return LayoutChange(layout, None, vary, sent, None if is_plain else shape)
    moves: list[tuple[Move, tuple[str, ...]]] = []
    for step in steps:
        move = cast("Move", step.move)
        if isinstance(move, AllGather) and {*step.axes} <= {
            *vary
        }:  # its gradient is scattered while it is summed
            move, vary = AllGather(move.dim), tuple(axis for axis in vary if axis not in step.axes)
        moves.append((move, step.axes))
    return LayoutChange(layout, tuple(moves), vary, sent, None if is_plain else shape)


def _padded(shape: tuple[int, ...], before: Layout, after: Layout) -> tuple[int, ...]:
    """Return the shape whose dims the devices divide; that of dims over several axes is unchanged."""
    if before.spec.is_flat or after.spec.is_flat:
        return shape
    sizes, padded = before.mesh.shape, list(shape)
    for dim, pair in enumerate(
        zip(before.spec.dims(len(shape)), after.spec.dims(len(shape)), strict=True)
    ):
        if all(len(axes) <= 1 for axes in pair):
            parts = lcm(*(sizes[axis] for axes in pair for axis in axes))
            padded[dim] = chunk(shape[dim], parts) * parts
    return tuple(padded)


def transfer(x: Sharded, to: LayoutChange, operation: str) -> Tensors:
    """Return the shards of an array as an operation needs them."""
    is_own, moves = in_loss(), to.moves
    if moves == () and (is_own or not (to.vary and _is_followed(x.shards))):
        return x.shards
    key = None
    if (
        (x.spec.unreduced or array_mode().plan is not None)
        and not transformed()
        and not x.shards[0].is_inference()
    ):
        backward = _current_backward()  # which recomputes all that a forward has made
        key = (
            to,
            recorded(x.shards),
            torch.is_inference_mode_enabled(),
            run_defaults().has_fixed_order,
            x.version,
            tuple([shard._version for shard in x.shards]),
            backward,
        )
        if key in x.sums:  # what several operations need is made once
            return x.sums[key]
    site, shards = operation_site(operation), x.shards
    if moves is None and is_own:  # by way of the full array
        spec = P(unreduced=x.spec.unreduced)
        moves = (
            *_moves(x.shape, x.layout, spec),
            *_moves(x.shape, x.layout.with_spec(spec), to.layout.spec),
        )
    elif moves is None:
        (resharded,) = reshard_all([x], [to.layout], site)
        shards = resharded.shards
    apply = _apply_own if is_own else apply_move
    for move, axes in moves or ():
        is_plain = to.shape is None
        shards = (
            apply(x.mesh, move, axes, shards, site)
            if is_plain
            else _in_order(apply, x, move, axes, shards, site)
        )
    if to.vary and not is_own and _is_followed(shards):
        shards = apply_move(x.mesh, Pvary(), to.vary, shards, site)
    if key is not None:
        x.sums = {**x.sums, key: shards}
    return shards


def _moves(
    shape: tuple[int, ...], before: Layout, spec: P
) -> tuple[tuple[Move, tuple[str, ...]], ...]:
    shape = tuple(
        length or before.mesh.size for length in shape
    )  # an empty array is moved as another one
    moves = plan_transfer(shape, before, spec).moves
    if moves is None:
        raise LayoutError(
            f"an array cannot go from {before.spec} to {spec} in a loss function. Shard dims, not {before.spec}."
        )
    return moves


def in_loss() -> bool:
    """Return True in a loss function, where every value is varying: see `fs.value_and_grad`."""
    scope = here()
    return scope is not None and bool(scope.varying_axes)


def _apply_own(
    mesh: Mesh, move: Move, axes: tuple[str, ...], shards: Tensors, site: Site
) -> Tensors:
    """Apply a collective in a loss function: the cotangent of a replicated value is a sum over the devices."""
    group = require("an operation on arrays").called_group(axes, "an operation on arrays")
    if isinstance(move, Alone):
        if isinstance(
            move, Summand
        ):  # zeros keep the graph, so that devices call the same collectives in the backward
            return (
                shards
                if group.index == 0
                else tuple(x.flatten()[:0].sum().expand_as(x) for x in shards)
            )
        return tuple(move.local(x, group.index, group.size) for x in shards)
    if isinstance(move, AllGather):
        move = AllGather(move.dim)
    shards = tuple(
        [x if type(x) is torch.Tensor else x.view_as(x) for x in shards]
    )  # a parameter is unsharded first
    shards = apply(Bound(move, group, site), shards)
    return (
        apply(Bound(Pvary(), group, site), shards)
        if isinstance(move, Psum) and _is_followed(shards)
        else shards
    )


def _in_order(
    apply: Any, x: Sharded, move: Move, axes: tuple[str, ...], shards: Tensors, site: Site
) -> Tensors:
    """Apply a collective to dims in zigzag order, or that the devices do not divide: it gets padded ones."""
    split = (
        move.split
        if isinstance(move, AllToAll)
        else move.dim
        if isinstance(move, Take | PsumScatter)
        else None
    )
    joined = (
        move.concat
        if isinstance(move, AllToAll)
        else move.dim
        if isinstance(move, AllGather)
        else None
    )
    mesh, sizes = x.mesh, [x.mesh.shape[axis] for axis in axes]
    n, length, total = prod(sizes), 0, 0
    if split is not None:
        length = shards[0].shape[split]
        shards = tuple(
            [
                _resized(in_zigzag_order(y, mesh, axes, split), split, n * chunk(length, n))
                for y in shards
            ]
        )
    if joined is not None:
        total = x.shape[joined] if x.shape[joined] % n else n * shards[0].shape[joined]
        shards = tuple([_resized(y, joined, chunk(total, n)) for y in shards])
    shards = apply(mesh, move, axes, shards, site)
    if split is not None:
        coordinates = [mesh.coordinates(device) for device in local_devices(mesh)]
        ranges = [
            flat_range(length, n, ravel([coordinate[axis] for axis in axes], sizes))
            for coordinate in coordinates
        ]
        shards = tuple(
            [
                _resized(y, split, stop - start)
                for y, (start, stop) in zip(shards, ranges, strict=True)
            ]
        )
    if joined is not None:
        shards = tuple(
            [
                in_zigzag_order(_resized(y, joined, total), mesh, axes, joined, inverse=True)
                for y in shards
            ]
        )
    return shards


def in_zigzag_order(
    x: Tensor, mesh: Mesh, axes: tuple[str, ...], dim: int, *, inverse: bool = False
) -> Tensor:
    """Reorder a dim that some axes shard, if one of them is in zigzag order."""
    if mesh.zigzag not in axes:
        return x
    outer = prod(mesh.shape[axis] for axis in axes[: axes.index(mesh.zigzag)])
    chunks = x.unflatten(dim, (outer, -1))
    return zigzag(chunks, mesh.shape[mesh.zigzag], dim + 1, inverse=inverse).flatten(dim, dim + 1)


def _resized(x: Tensor, dim: int, length: int) -> Tensor:
    """Cut a dim to a length, or pad it with zeros."""
    missing = length - x.shape[dim]
    if missing <= 0:
        return x.narrow(dim, 0, length) if missing else x
    return torch.cat([x, x.new_zeros(*x.shape[:dim], missing, *x.shape[dim + 1 :])], dim)


def _is_followed(shards: Tensors) -> bool:
    """Return True if derivatives of these shards are taken, or may be."""
    return (transformed() or recorded(shards)) and (
        shards[0].is_floating_point() or shards[0].is_complex()
    )


def operation_site(operation: str) -> Site:
    """Return the user's source line, with the operation: the ledger shows both."""
    site = call_site()
    return site._replace(function=f"{site.function} ({operation})")


def with_spec(x: Sharded, spec: P, operation: str, *, is_explicit: bool = False) -> Sharded:
    """Reshard an array within an operation; with `is_explicit`, also within `explicit`."""
    x = leave_loss(x)
    to = plan_transfer(x.shape, x.layout, spec)
    if to.elements and not is_explicit and array_mode().is_explicit:
        raise_implicit(operation, [x], [to])
    return Sharded(x.shape, to.layout, transfer(x, to, operation))


def spec_like(x: Sharded, shape: Sequence[int]) -> P:
    """Return a spec for a shape: that of x, in dims of the same length that the devices divide."""
    spec = x.spec.replace(unreduced=None)
    if spec.is_flat or len(shape) != x.ndim:
        return spec if spec.is_flat and tuple(shape) == x.shape else P()
    cuts = [(axes, prod(x.mesh.shape[axis] for axis in axes)) for axes in x.spec.dims(x.ndim)]
    return P(
        *(
            a if n == m and n % cut == 0 else ()
            for (a, cut), n, m in zip(cuts, shape, x.shape, strict=True)
        )
    )


def largest(x: Sharded, axes: tuple[str, ...], operation: str, *, is_max: bool) -> Sharded:
    """Take the elementwise maximum (or minimum) over the devices along some axes; without a gradient."""
    if axes and array_mode().is_explicit:
        raise_implicit(operation, [x], [plan_transfer(x.shape, x.layout, x.spec)])
    shards = tuple(shard.detach() for shard in x.shards)
    shards = (
        apply_move(x.mesh, Extreme(is_max), axes, shards, operation_site(operation))
        if axes
        else shards
    )
    return Sharded(x.shape, x.layout, shards)


def raise_implicit(
    operation: str, arrays: Sequence[Sharded], transfers: Sequence[LayoutChange]
) -> NoReturn:
    """Raise for communication within `explicit`."""
    number = next((number for number, to in enumerate(transfers) if to.elements), 0)
    raise LayoutError(
        f"{operation} needs communication ({', '.join(str(typeof(x)) for x in arrays)}), which fs.array.explicit() forbids. "
        f"Write fs.reshard(x, fs.Layout(mesh, {transfers[number].layout.spec})) for argument {number}."
    )
