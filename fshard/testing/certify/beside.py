"""What devices hold of a leaf, beside the same pieces of a whole tensor.  Replicas are all looked at.

device 0   w[0:2]  |  whole[0:2]
device 1   w[2:4]  |  whole[2:4]
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.nn import Parameter

import fshard as fs
from fshard.mesh.layout import Layout
from fshard.mesh.mesh import Mesh
from fshard.mesh.sharded import Sharded
from fshard.mesh.spec import P
from fshard.mesh.spmd import held
from fshard.optim.leaves import Leaf, is_frozen


def known_to_all(leaf: Leaf) -> Leaf:
    """Return what lies on a process mesh as on a virtual one, with the shards of all processes: so all come to one verdict."""
    if not isinstance(leaf, Sharded) or leaf.mesh.runtime != "process":
        return leaf
    mesh, own = leaf.mesh, leaf.shards[0].reshape(-1)
    shapes = [leaf.layout.local_shape(leaf.shape, device) for device in range(mesh.size)]
    row = own.new_zeros(1, max(map(prod, shapes)))
    row[0, : own.numel()] = own
    rows = fs.unshard(Sharded((mesh.size, row.shape[1]), Layout(mesh, P(mesh.axis_names)), (row,)))
    shards = [each[: prod(shape)].reshape(shape) for each, shape in zip(rows, shapes, strict=True)]
    return Sharded(leaf.shape, leaf.layout.on(Mesh(mesh.axes, "virtual", mesh.device_type)), tuple(shards))


class Piece(NamedTuple):
    """What one device has of a leaf, and what stands there in the whole."""

    device: int
    found: Tensor
    expected: Tensor

    @property
    def error(self) -> Tensor:
        """How far each element is off."""
        return (wide(self.found) - wide(self.expected)).abs()


def beside(found: Leaf, whole: Tensor) -> list[Piece]:
    """Pair what each device holds of a leaf with the same piece of a whole tensor."""
    if isinstance(found, Sharded) and found.spec.unreduced:
        found = fs.unshard(found)
    if not isinstance(found, Sharded):
        return [Piece(0, found, whole)]
    pairs = zip(held(found.mesh), found.shards, strict=True)
    return [Piece(device, shard, piece_of(whole, found.layout, device)) for device, shard in pairs]


def piece_of(whole: Tensor, layout: Layout, device: int) -> Tensor:
    """Cut out of a whole tensor what a device holds in a layout."""
    lying = whole.reshape(-1) if layout.spec.is_flat else whole
    return lying[tuple(slice(*limits) for limits in layout.ranges(whole.shape, device))]


def near(pieces: Iterable[Piece], tolerance: float, *, times: float = 1) -> bool:
    """Return whether pieces are so many times what is expected, but for some of the largest number expected."""
    scaled = [piece._replace(expected=wide(piece.expected) * times) for piece in pieces]
    allowed = tolerance * max((largest(piece.expected) for piece in scaled), default=0.0)
    return allowed > 0 and all(largest(piece.error) <= allowed for piece in scaled)


def first_difference(found: Leaf, whole: Tensor, tolerance: float) -> str:
    """Name the first element that differs by more than a tolerance, or at all, and the first device that has it."""
    numbers = torch.arange(whole.numel(), device=whole.device).reshape(whole.shape)
    for allowed in (tolerance * largest(whole), 0.0):
        for piece, (_, _, places) in zip(beside(found, whole), beside(found, numbers), strict=True):
            wrong = ~(piece.error <= allowed)
            if wrong.any():
                at = [int(i) for i in torch.unravel_index(places[wrong][0], whole.shape)]
                has, should = piece.found[wrong][0].item(), piece.expected[wrong][0].item()
                return f"{at}: {has:.6g} instead of {should:.6g} (device {piece.device})"
    return "no element"


def largest(x: Tensor | None) -> float:
    """Return the largest absolute value; NaN if there is one."""
    return 0.0 if x is None or not x.numel() else float(x.abs().max())


def wide(x: Any) -> Any:
    """Return what is floating in float64, all else as it is."""
    return frozen_as(x, x.to(torch.complex128 if x.is_complex() else torch.float64)) if is_floating(x) else x


def is_floating(x: Any) -> TypeGuard[Tensor]:
    """Return whether this is a tensor of numbers that rounding concerns."""
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def frozen_as(x: Tensor, new: Tensor) -> Tensor:
    """Return a new tensor, frozen if another one is."""
    return Parameter(new.detach(), requires_grad=False) if is_frozen(x) else new
