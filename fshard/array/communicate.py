"""Bring an array to the layout that an operation needs, by collectives on its shards.

Autograd records them. `plan_transfer` plans them from shapes and layouts alone, `transfer` runs
them. With an array of shape (8, 4) on a mesh with the axes "data" and "model", 2 devices each:

    layout before          layout after      moves
    P("data")              P("data")         none: `x.shards` itself
    P("data")              P()               all_gather "data"
    P("data")              P(None, "data")   all_to_all "data"
    P(unreduced="data")    P("data")         psum_scatter "data"
    P()                    P("data")         take "data": nothing is sent

A replicated value that meets sharded ones is *varying* in that operation: its gradient is a sum
over the devices (a psum; after an all_gather together a psum_scatter).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from math import lcm, prod
from typing import Any, NamedTuple, cast

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
"""Steps of a reshard that are one move on the shards of an array; others need a general reshard."""

_CALLER = "an operation on arrays"
"""The function that errors of a scope name."""

Moves = tuple[tuple[Move, tuple[str, ...]], ...]
"""Moves in order, each with its axes."""

ApplyMove = Callable[[Mesh, Move, tuple[str, ...], Tensors, Site], Tensors]


# Plan.


class LayoutChange(NamedTuple):
    """The way of an array to a layout.

    Args:
        layout: afterwards.
        moves: that lead there; None where only a general reshard does.
        vary: axes along which the array is varying afterwards, so that its gradient is summed.
        elements: the busiest device sends them.
        axes: along which elements are sent.
        shape: the global shape, where the devices do not divide a dim, or shards are in zigzag
            order; else None.
    """

    layout: Layout
    moves: Moves | None
    vary: tuple[str, ...]
    elements: Fraction
    axes: tuple[str, ...] = ()
    shape: tuple[int, ...] | None = None

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
    elements = sum((step.elements for step in steps), Fraction(0))
    sending_axes = [axis for step in steps if step.elements for axis in step.axes]
    axes = tuple(dict.fromkeys(sending_axes))
    has_zigzag = any(before.mesh.zigzag in step.axes for step in steps)
    uneven_shape = shape if has_zigzag or padded != shape else None

    is_plain = all(step.kind in _PLAIN_KINDS and not step.at for step in steps)
    if before.memory != "device" or not is_plain:
        return LayoutChange(layout, None, vary, elements, axes, uneven_shape)

    moves: list[tuple[Move, tuple[str, ...]]] = []
    for step in steps:
        move = cast("Move", step.move)
        if isinstance(move, AllGather) and {*step.axes} <= {*vary}:
            # The gradient is summed along these axes: this all_gather's transpose, a psum_scatter,
            # does that while it scatters.
            move = AllGather(move.dim)
            vary = tuple(axis for axis in vary if axis not in step.axes)
        moves.append((move, step.axes))
    return LayoutChange(layout, tuple(moves), vary, elements, axes, uneven_shape)


def _padded(shape: tuple[int, ...], before: Layout, after: Layout) -> tuple[int, ...]:
    """Return the shape whose dims the devices divide; dims over several axes are unchanged."""
    if before.spec.is_flat or after.spec.is_flat:
        return shape
    sizes = before.mesh.shape
    padded = list(shape)
    axes_before = before.spec.dims(len(shape))
    axes_after = after.spec.dims(len(shape))
    for dim, length in enumerate(shape):
        if len(axes_before[dim]) > 1 or len(axes_after[dim]) > 1:
            continue
        axes = (*axes_before[dim], *axes_after[dim])
        parts = lcm(*[sizes[axis] for axis in axes])
        padded[dim] = chunk(length, parts) * parts
    return tuple(padded)


# Run.


def transfer(x: Sharded, to: LayoutChange, operation: str) -> Tensors:
    """Return the shards of an array as an operation needs them."""
    is_in_loss = in_loss()
    if to.moves == ():
        is_converted = to.vary and not is_in_loss and _may_be_differentiated(x.shards)
        if not is_converted:
            return x.shards

    key = _key_of_shared(x, to)
    if key is not None and key in x.sums:
        return x.sums[key]
    shards = _transferred(x, to, operation_site(operation), is_in_loss)
    if key is not None:
        x.sums = {**x.sums, key: shards}  # not in place: at first it is a mapping of all arrays
    return shards


# Note [Shared transfers]
# A sum that several operations need is reduced once, and in a planned module every transfer runs
# once. Its result may be used again where the moves would have the same result, and autograd would
# record the same. So the key has whether autograd records, whether sums have a fixed order, and the
# versions of the array and its shards, which change in place. And it has the backward that runs:
# the recompute of a checkpoint must make all tensors that its forward made.


def _key_of_shared(x: Sharded, to: LayoutChange) -> Any:
    """Return the key of a transfer that operations share; None for others.

    See Note [Shared transfers].
    """
    is_shared = bool(x.spec.unreduced) or array_mode().plan is not None
    if not is_shared or transformed() or x.shards[0].is_inference():
        return None
    return (
        to,
        recorded(x.shards),
        torch.is_inference_mode_enabled(),
        run_defaults().has_fixed_order,
        x.version,
        tuple([shard._version for shard in x.shards]),
        _current_backward(),
    )


def _transferred(x: Sharded, to: LayoutChange, site: Site, is_in_loss: bool) -> Tensors:
    """Run the moves of a transfer on the shards of an array."""
    shards = x.shards
    moves = to.moves
    if moves is None and is_in_loss:
        moves = _moves_by_full_array(x, to)
    elif moves is None:
        (resharded,) = reshard_all([x], [to.layout], site)
        shards = resharded.shards
        moves = ()

    apply = _apply_in_loss if is_in_loss else apply_move
    for move, axes in moves:
        if to.shape is None:
            shards = apply(x.mesh, move, axes, shards, site)
        else:
            shards = _apply_to_uneven(apply, x, move, axes, shards, site)
    if to.vary and not is_in_loss and _may_be_differentiated(shards):
        shards = apply_move(x.mesh, Pvary(), to.vary, shards, site)
    return shards


def _may_be_differentiated(shards: Tensors) -> bool:
    """Return True if derivatives of these shards are taken, or may be."""
    is_continuous = shards[0].is_floating_point() or shards[0].is_complex()
    return is_continuous and (transformed() or recorded(shards))


# In a loss function.


def in_loss() -> bool:
    """Return True in a loss function, where every value is varying: see `fs.value_and_grad`."""
    scope = here()
    return scope is not None and bool(scope.varying_axes)


def _moves_by_full_array(x: Sharded, to: LayoutChange) -> Moves:
    """Return the moves from one layout to another by way of the full array.

    A loss function has no general reshard: its devices call single collectives, each with a
    transpose for varying values.
    """
    full = P(unreduced=x.spec.unreduced)
    # An empty array is moved as another one: for it there would be no moves.
    shape = tuple([length or x.mesh.size for length in x.shape])
    moves: Moves = ()
    for before, spec in ((x.layout, full), (x.layout.with_spec(full), to.layout.spec)):
        change = plan_transfer(shape, before, spec)
        if change.moves is None:
            raise LayoutError(
                f"an array cannot go from {before.spec} to {spec} in a loss function. Shard dims, "
                f"not {before.spec}."
            )
        moves += change.moves
    return moves


def _apply_in_loss(
    mesh: Mesh, move: Move, axes: tuple[str, ...], shards: Tensors, site: Site
) -> Tensors:
    """Apply a collective in a loss function.

    The cotangent of a replicated value is a sum over the devices, of which each has a summand.
    """
    group = require(_CALLER).called_group(axes, _CALLER)
    if isinstance(move, Summand):
        if group.index == 0:
            return shards
        # Zeros that depend on x keep the graph, so that all devices call the same collectives in
        # the backward.
        return tuple(x.flatten()[:0].sum().expand_as(x) for x in shards)
    if isinstance(move, Alone):
        return tuple(move.local(x, group.index, group.size) for x in shards)

    if isinstance(move, AllGather):
        move = AllGather(move.dim)
    # A step's parameter is another type of tensor: a view of it unshards it first.
    shards = tuple([x if type(x) is Tensor else x.view_as(x) for x in shards])
    shards = apply(Bound(move, group, site), shards)
    if isinstance(move, Psum) and _may_be_differentiated(shards):
        shards = apply(Bound(Pvary(), group, site), shards)
    return shards


# Note [Uneven and zigzag dims]
# A collective on dims needs shards of equal length, in the order of the devices. So a dim that the
# move splits is brought to the order of its chunks and padded, and the results are cut to the
# lengths of their shards. Shards that the move joins are padded, and the joined dim is cut to its
# length and brought to its own order. An all_to_all does both, here from rows to columns:
#
#     device 0                          device 1
#     [a b c]   [d e f]                 [g h i]                     shards: 3 rows over 2 devices
#     [a b c .] [d e f .]               [g h i .] [. . . .]         padded to 2 rows, and 4 columns
#     [a b] [d e] [g h] [. .]           [c .] [f .] [i .] [. .]     received
#     [a b] [d e] [g h]                 [c] [f] [i]                 cut: 3 columns over 2 devices


def _apply_to_uneven(
    apply: ApplyMove, x: Sharded, move: Move, axes: tuple[str, ...], shards: Tensors, site: Site
) -> Tensors:
    """Apply a move along dims that are uneven, or in zigzag order.

    See Note [Uneven and zigzag dims].
    """
    mesh = x.mesh
    n = prod(mesh.shape[axis] for axis in axes)
    split, joined = _split_and_joined_dim(move)
    split_length = 0
    joined_length = 0
    if split is not None:
        split_length = shards[0].shape[split]
        padded_length = n * chunk(split_length, n)
        shards = tuple([in_zigzag_order(y, mesh, axes, split) for y in shards])
        shards = tuple([_resized(y, split, padded_length) for y in shards])
    if joined is not None:
        is_uneven = x.shape[joined] % n
        joined_length = x.shape[joined] if is_uneven else n * shards[0].shape[joined]
        shards = tuple([_resized(y, joined, chunk(joined_length, n)) for y in shards])

    shards = apply(mesh, move, axes, shards, site)

    if split is not None:
        lengths = _shard_lengths(mesh, axes, split_length)
        pairs = zip(shards, lengths, strict=True)
        shards = tuple([_resized(y, split, length) for y, length in pairs])
    if joined is not None:
        shards = tuple([_resized(y, joined, joined_length) for y in shards])
        shards = tuple([in_zigzag_order(y, mesh, axes, joined, inverse=True) for y in shards])
    return shards


def _split_and_joined_dim(move: Move) -> tuple[int | None, int | None]:
    """Return the dim that a move splits among devices, and the one that it joins from them."""
    if isinstance(move, AllToAll):
        return move.split, move.concat
    if isinstance(move, Take | PsumScatter):
        return move.dim, None
    if isinstance(move, AllGather):
        return None, move.dim
    return None, None


def _shard_lengths(mesh: Mesh, axes: tuple[str, ...], length: int) -> list[int]:
    """Return the lengths of the shards of a dim, on the devices held here."""
    sizes = [mesh.shape[axis] for axis in axes]
    lengths: list[int] = []
    for device in local_devices(mesh):
        coordinates = mesh.coordinates(device)
        index = ravel([coordinates[axis] for axis in axes], sizes)
        start, stop = flat_range(length, prod(sizes), index)
        lengths.append(stop - start)
    return lengths


def in_zigzag_order(
    x: Tensor, mesh: Mesh, axes: tuple[str, ...], dim: int, *, inverse: bool = False
) -> Tensor:
    """Reorder a dim that some axes shard, if one of them is in zigzag order."""
    if mesh.zigzag not in axes:
        return x
    outer_axes = axes[: axes.index(mesh.zigzag)]
    outer = prod(mesh.shape[axis] for axis in outer_axes)
    chunks = x.unflatten(dim, (outer, -1))
    return zigzag(chunks, mesh.shape[mesh.zigzag], dim + 1, inverse=inverse).flatten(dim, dim + 1)


def _resized(x: Tensor, dim: int, length: int) -> Tensor:
    """Cut a dim to a length, or pad it with zeros."""
    missing = length - x.shape[dim]
    if missing == 0:
        return x
    if missing < 0:
        return x.narrow(dim, 0, length)
    return torch.cat([x, x.new_zeros(*x.shape[:dim], missing, *x.shape[dim + 1 :])], dim)


# For operations.


def operation_site(operation: str) -> Site:
    """Return the user's source line, with the operation: the ledger shows both."""
    site = call_site()
    return site._replace(function=f"{site.function} ({operation})")


def with_spec(x: Sharded, spec: P, operation: str, *, is_explicit: bool = False) -> Sharded:
    """Reshard an array within an operation; with `is_explicit`, also within `explicit`."""
    x = leave_loss(x)
    to = plan_transfer(x.shape, x.layout, spec)
    if to.axes and not is_explicit and array_mode().explicit_axes:
        validate_explicit(operation, [x], [to])
    return Sharded(x.shape, to.layout, transfer(x, to, operation))


def spec_like(x: Sharded, shape: Sequence[int]) -> P:
    """Return a spec for a shape: that of x, in dims of the same length that the devices divide."""
    spec = x.spec.replace(unreduced=None)
    if spec.is_flat:
        return spec if tuple(shape) == x.shape else P()
    if len(shape) != x.ndim:
        return P()
    entries: list[tuple[str, ...]] = []
    for dim, axes in enumerate(x.spec.dims(x.ndim)):
        devices = prod(x.mesh.shape[axis] for axis in axes)
        is_same_dim = shape[dim] == x.shape[dim] and shape[dim] % devices == 0
        entries.append(axes if is_same_dim else ())
    return P(*entries)


def extreme_over_devices(
    x: Sharded, axes: tuple[str, ...], operation: str, *, is_max: bool
) -> Sharded:
    """Take the elementwise maximum (or minimum) over the devices along some axes.

    It has no gradient.
    """
    if axes and array_mode().explicit_axes:
        unchanged = plan_transfer(x.shape, x.layout, x.spec)
        validate_explicit(operation, [x], [unchanged._replace(axes=axes)])
    shards = tuple([shard.detach() for shard in x.shards])
    if axes:
        shards = apply_move(x.mesh, Extreme(is_max), axes, shards, operation_site(operation))
    return Sharded(x.shape, x.layout, shards)


def validate_explicit(
    operation: str, arrays: Sequence[Sharded], transfers: Sequence[LayoutChange]
) -> None:
    """Raise for communication that `explicit` forbids."""
    mode = array_mode()
    for number, (x, to) in enumerate(zip(arrays, transfers, strict=True)):
        if not mode.forbids(x.mesh, to.axes):
            continue
        types = ", ".join(str(typeof(x)) for x in arrays)
        raise LayoutError(
            f"{operation} needs communication ({types}), which {mode.explicit_call} forbids. "
            f"Write fs.reshard(x, fs.Layout(mesh, {to.layout.spec})) for argument {number}."
        )
