"""Bring an array to the layout that an operation needs: collectives on its shards, which autograd records.

On a virtual mesh all shards are here, so a collective is one linear map on them, in the caller's thread. Elsewhere it
is the runtime's. A replicated value that meets sharded ones is *varying* in that operation: its gradient is a sum over
the devices (a psum; after an all_gather together a psum_scatter).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from fshard.errors import LayoutError
from fshard.mesh.collectives.autograd import Bound, LinearMap, Tensors, apply, recorded, transformed
from fshard.mesh.collectives.ledger import LedgerRow, active
from fshard.mesh.collectives.moves import AllGather, Extreme, Move, Pvary, Same, Wired
from fshard.mesh.layout import Layout, Mesh, P
from fshard.mesh.layout.sharded import Sharded, typeof
from fshard.mesh.reshard.device_put import reshard
from fshard.mesh.reshard.execute import MOVES, plan_reshard
from fshard.mesh.spmd.run import is_outside, run_on_devices
from fshard.mesh.spmd.scope import require
from fshard.source import Site, call_site


class _Mode(threading.local):
    explicit = False
    constants = False


state = _Mode()
"""`explicit`: implicit communication raises. `constants`: plain tensors are equal everywhere (in a sharded module)."""

_PLAIN_KINDS = {"slice", "summand", "psum", "psum_scatter", "all_gather", "all_to_all"}


@lru_cache(maxsize=512)
def _groups(mesh: Mesh, axes: tuple[str, ...]) -> list[list[int]]:
    """Return the devices of each group along some axes."""
    sizes, others = dict(mesh.axes), [axis for axis in mesh.axis_names if axis not in axes]
    order = [mesh.axis_names.index(axis) for axis in (*others, *axes)]
    devices = np.arange(mesh.size).reshape(tuple(sizes.values())).transpose(order)
    return devices.reshape(-1, int(np.prod([sizes[axis] for axis in axes]))).tolist()


@dataclass(frozen=True)
class OnShards(LinearMap):
    """A collective on the shards of all devices of a virtual mesh."""

    move: Move
    axes: tuple[str, ...]
    mesh: Mesh
    site: Site

    def run(self, xs: Tensors) -> Tensors:
        results: list[Any] = [None] * len(xs)
        for devices in _groups(self.mesh, self.axes):
            given = [xs[device] for device in devices]
            self._count(given, devices)
            seen: set[int] = set()
            for device, y in zip(devices, self.move.meaning(given), strict=True):
                results[device] = y.detach() if id(y) in seen else y  # one autograd node per device
                seen.add(id(y))
        return tuple(results)

    def _count(self, given: list[Tensor], devices: list[int]) -> None:
        if not isinstance(self.move, Wired):
            return
        row = LedgerRow(self.move.name, self.axes, self.site)
        for ledger in active():
            for index, (device, x) in enumerate(zip(devices, given, strict=True)):
                size = x.numel() * x.element_size()
                ledger.record(device, row, self.move.sent(size, index, len(devices)))

    def transposed(self) -> OnShards:
        return replace(self, move=self.move.transposed())

    def batched(self) -> OnShards:
        return replace(self, move=self.move.batched())


def apply_move(mesh: Mesh, move: Move, axes: tuple[str, ...], shards: Tensors, site: Site) -> Tensors:
    """Apply a collective to the shards held here, differentiably (pmax and pmin: without a gradient)."""
    if is_outside(mesh):
        linear = OnShards(move, axes, mesh, site)
        return linear.run(shards) if isinstance(move, Extreme) else apply(linear, shards)

    def on_device(device: int) -> Tensors:
        bound = Bound(move, require("an operation on arrays").group(axes, "an operation on arrays"), site)
        return bound.run(shards) if isinstance(move, Extreme) else apply(bound, shards)

    return run_on_devices(mesh, on_device)[0]


class LayoutChange(NamedTuple):
    """How one input gets its layout: the moves, and the axes along which it is varying afterwards.

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
def plan_transfer(shape: tuple[int, ...], before: Layout, spec: P, vary: tuple[str, ...]) -> LayoutChange:
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
    if to.moves == () and not (to.vary and _is_followed(x.shards)):
        return x.shards
    key = None
    if x.spec.unreduced and not transformed() and not x.shards[0].is_inference():
        key = to, torch.is_grad_enabled(), x.version, tuple([shard._version for shard in x.shards])
        if key in x.sums:  # a sum that several operations need is made once
            return x.sums[key]
    site = operation_site(what)
    if to.moves is None:
        shards = reshard(x, to.layout).shards
    else:
        shards = x.shards
        for move, axes in to.moves:
            shards = apply_move(x.mesh, move, axes, shards, site)
    if to.vary and _is_followed(shards):
        shards = apply_move(x.mesh, Pvary(), to.vary, shards, site)
    if key is not None:
        x.sums = {**x.sums, key: shards}
    return shards


def _is_followed(shards: Tensors) -> bool:
    """Return True if derivatives of these shards are taken, or may be."""
    return (transformed() or recorded(shards)) and (shards[0].is_floating_point() or shards[0].is_complex())


def operation_site(what: str) -> Site:
    """Return the user's source line, with the operation: the ledger shows both."""
    site = call_site()
    return site._replace(function=f"{site.function} ({what})")


def with_spec(x: Sharded, spec: P, what: str, *, is_asked: bool = False) -> Sharded:
    """Reshard an array within an operation, or since the program asks for it."""
    to = plan_transfer(x.shape, x.layout, spec, ())
    if state.explicit and to.elements and not is_asked:
        refuse_implicit(what, [x], [to])
    return Sharded(x.shape, to.layout, transfer(x, to, what))


def largest(x: Sharded, axes: tuple[str, ...], what: str, *, is_max: bool = True) -> Sharded:
    """Take the elementwise maximum (or minimum) over the devices along some axes; without a gradient."""
    shards = tuple(shard.detach() for shard in x.shards)
    if axes:
        if state.explicit:
            refuse_implicit(what, [x], [plan_transfer(x.shape, x.layout, x.spec, ())])
        shards = apply_move(x.mesh, Extreme(is_max), axes, shards, operation_site(what))
    return Sharded(x.shape, x.layout, shards)


def refuse_implicit(what: str, arrays: Sequence[Sharded], transfers: Sequence[LayoutChange]) -> NoReturn:
    """Raise for communication within `explicit`."""
    number = next((number for number, to in enumerate(transfers) if to.elements), 0)
    raise LayoutError(
        f"{what} needs communication ({', '.join(str(typeof(x)) for x in arrays)}), which fs.array.explicit() forbids. "
        f"Write fs.reshard(x, fs.Layout(mesh, {transfers[number].layout.spec})) for argument {number}."
    )


def own_gradient(gradients: Sequence[Tensor], x: Sharded) -> Sharded:
    """Return the gradients of an array's shards as an array; that of an unreduced one is replicated."""
    shards, unreduced = tuple(gradients), x.spec.unreduced
    layout = x.layout
    if unreduced:
        spec = x.spec._replace(unreduced=())  # pyright: ignore[reportPrivateUsage]
        layout = x.layout.with_spec(spec)
        if recorded(shards):
            shards = apply_move(x.mesh, Same(), unreduced, shards, operation_site("grad"))
    return Sharded(x.shape, layout, shards)


def cotangents(g: Any, y: Sharded) -> Tensors:
    """Return the cotangent of an array as the cotangents of its shards."""
    if g is None:
        return tuple(torch.ones_like(shard) for shard in y.shards)
    if not isinstance(g, Sharded) or g.shape != y.shape or g.mesh != y.mesh:
        raise ValueError(f"grad_outputs must be arrays like the outputs; got {g!r} for {y!r}.")
    spec = y.spec._replace(unreduced=())  # pyright: ignore[reportPrivateUsage]
    return transfer(g, plan_transfer(g.shape, g.layout, spec, y.spec.unreduced), "grad")
