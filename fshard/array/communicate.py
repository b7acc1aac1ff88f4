"""Bring an array to the layout that an operation needs: collectives on its shards, which autograd records.

A replicated value that meets sharded ones is *varying* in that operation: its gradient is a sum over the devices (a
psum; after an all_gather together a psum_scatter).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import torch

from fshard.errors import LayoutError
from fshard.mesh.collectives.autograd import Tensors, recorded, transformed
from fshard.mesh.collectives.moves import AllGather, Alone, Extreme, Move, Psum, Pvary, Summand
from fshard.mesh.collectives.on_shards import apply_move
from fshard.mesh.layout import Layout, Mesh, P
from fshard.mesh.layout.sharded import Sharded, typeof
from fshard.mesh.reshard.device_put import reshard
from fshard.mesh.reshard.execute import MOVES, plan_reshard
from fshard.mesh.spmd.scope import here, require
from fshard.source import Site, call_site


class _Mode(threading.local):
    explicit = False
    constants = False
    reduces = False
    plan: Any = None
    observer: Any = None


state = _Mode()
"""`explicit`: implicit communication raises. `constants`: plain tensors are equal everywhere (in a sharded module).
`reduces`: partial sums are reduced at once. `plan`: of the module that runs (`fs.tensor_parallel`). `observer`: is called
with every operation: (call, arrays, args, results)."""

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

    @property
    def is_free(self) -> bool:
        return self.moves == () and not self.vary


@lru_cache(maxsize=8192)
def plan_transfer(shape: tuple[int, ...], before: Layout, spec: P, vary: tuple[str, ...] = ()) -> LayoutChange:
    """Plan how an array of this shape gets from a layout to a spec."""
    layout = Layout(before.mesh, spec)
    steps = plan_reshard(before, layout, shape).steps
    sent = sum((step.elements for step in steps), Fraction(0))
    if before.memory != "device" or any(step.kind not in _PLAIN_KINDS or step.at for step in steps):
        return LayoutChange(layout, None, vary, sent)
    moves: list[tuple[Move, tuple[str, ...]]] = []
    for step in steps:
        move = MOVES[step.kind](step.dim, step.other)
        if isinstance(move, AllGather) and {*step.axes} <= {*vary}:  # its gradient is scattered while it is summed
            move, vary = AllGather(move.dim), tuple(axis for axis in vary if axis not in step.axes)
        moves.append((move, step.axes))
    return LayoutChange(layout, tuple(moves), vary, sent)


def transfer(x: Sharded, to: LayoutChange, what: str) -> Tensors:
    """Return the shards of an array as an operation needs them."""
    is_own, moves = in_loss(), to.moves
    if moves == () and (is_own or not (to.vary and _is_followed(x.shards))):
        return x.shards
    key = None
    if (x.spec.unreduced or state.plan is not None) and not transformed() and not x.shards[0].is_inference():
        backward = _current_backward()  # which recomputes all that a forward has made
        key = to, torch.is_grad_enabled(), x.version, tuple([shard._version for shard in x.shards]), backward
        if key in x.sums:  # what several operations need is made once
            return x.sums[key]
    site, shards = operation_site(what), x.shards
    if moves is None and is_own:  # by way of the full array
        spec = P(unreduced=x.spec.unreduced)
        moves = (*_moves(x.shape, x.layout, spec), *_moves(x.shape, x.layout.with_spec(spec), to.layout.spec))
    elif moves is None:
        shards = reshard(x, to.layout).shards
    for move, axes in moves or ():
        shards = (_apply_own if is_own else apply_move)(x.mesh, move, axes, shards, site)
    if to.vary and not is_own and _is_followed(shards):
        shards = apply_move(x.mesh, Pvary(), to.vary, shards, site)
    if key is not None:
        x.sums = {**x.sums, key: shards}
    return shards


def _moves(shape: tuple[int, ...], before: Layout, spec: P) -> tuple[tuple[Move, tuple[str, ...]], ...]:
    moves = plan_transfer(shape, before, spec).moves
    if moves is None:
        raise LayoutError(
            f"an array cannot go from {before.spec} to {spec} in a loss function. Shard dims, not {before.spec}."
        )
    return moves


def in_loss() -> bool:
    """Return True in a loss function, where every value is varying: see `fs.value_and_grad`."""
    scope = here()
    return scope is not None and bool(scope.own)


def _apply_own(mesh: Mesh, move: Move, axes: tuple[str, ...], shards: Tensors, site: Site) -> Tensors:
    """Apply a collective in a loss function: the cotangent of a replicated value is a sum over the devices."""
    if isinstance(move, Alone):
        group = require("an operation on arrays").called_group(axes, "an operation on arrays")
        if isinstance(move, Summand):  # zeros keep the graph, so that devices call the same collectives in the backward
            return shards if group.index == 0 else tuple(x.flatten()[:0].sum().expand_as(x) for x in shards)
        return tuple(move.local(x, group.index, group.size) for x in shards)
    if isinstance(move, AllGather):
        move = AllGather(move.dim)
    shards = tuple([x if type(x) is torch.Tensor else x.view_as(x) for x in shards])  # a parameter is unsharded first
    shards = apply_move(mesh, move, axes, shards, site)
    return apply_move(mesh, Pvary(), axes, shards, site) if isinstance(move, Psum) and _is_followed(shards) else shards


def _is_followed(shards: Tensors) -> bool:
    """Return True if derivatives of these shards are taken, or may be."""
    return (transformed() or recorded(shards)) and (shards[0].is_floating_point() or shards[0].is_complex())


def operation_site(what: str) -> Site:
    """Return the user's source line, with the operation: the ledger shows both."""
    site = call_site()
    return site._replace(function=f"{site.function} ({what})")


def with_spec(x: Sharded, spec: P, what: str, *, is_explicit: bool = False) -> Sharded:
    """Reshard an array within an operation; with `is_explicit`, also within `explicit`."""
    to = plan_transfer(x.shape, x.layout, spec)
    if state.explicit and to.elements and not is_explicit:
        refuse_implicit(what, [x], [to])
    return Sharded(x.shape, to.layout, transfer(x, to, what))


def largest(x: Sharded, axes: tuple[str, ...], what: str, *, is_max: bool) -> Sharded:
    """Take the elementwise maximum (or minimum) over the devices along some axes; without a gradient."""
    if state.explicit and axes:
        refuse_implicit(what, [x], [plan_transfer(x.shape, x.layout, x.spec)])
    shards = tuple(shard.detach() for shard in x.shards)
    shards = apply_move(x.mesh, Extreme(is_max), axes, shards, operation_site(what)) if axes else shards
    return Sharded(x.shape, x.layout, shards)


def refuse_implicit(what: str, arrays: Sequence[Sharded], transfers: Sequence[LayoutChange]) -> NoReturn:
    """Raise for communication within `explicit`."""
    number = next((number for number, to in enumerate(transfers) if to.elements), 0)
    raise LayoutError(
        f"{what} needs communication ({', '.join(str(typeof(x)) for x in arrays)}), which fs.array.explicit() forbids. "
        f"Write fs.reshard(x, fs.Layout(mesh, {transfers[number].layout.spec})) for argument {number}."
    )
