"""Comparisons of the shards of a leaf with the same ranges of a full tensor.  Every replica is compared.

device 0   w[0:2]  |  full[0:2]
device 1   w[2:4]  |  full[2:4]
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.nn import Parameter

import fshard as fs
from fshard.mesh.layout import Layout, Mesh, P
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.reshard.device_put import shard_of
from fshard.mesh.spmd.run import local_devices
from fshard.optim.leaves import Leaf, is_frozen


def gather_processes(leaf: Leaf) -> Leaf:
    """Move a leaf from a process mesh to a virtual one that has the shards of all processes; return others unchanged.

    All processes then compare the same numbers, with one verdict.
    """
    if not isinstance(leaf, Sharded) or leaf.mesh.runtime != "process":
        return leaf
    mesh, own = leaf.mesh, leaf.shards[0].reshape(-1)
    shapes = [leaf.layout.local_shape(leaf.shape, device) for device in range(mesh.size)]
    row = own.new_zeros(1, max(map(prod, shapes)))
    row[0, : own.numel()] = own
    rows = fs.unshard(Sharded((mesh.size, row.shape[1]), Layout(mesh, P(mesh.axis_names)), (row,)))
    shards = [each[: prod(shape)].reshape(shape) for each, shape in zip(rows, shapes, strict=True)]
    return Sharded(leaf.shape, leaf.layout.on(Mesh(mesh.axes, "virtual", mesh.device_type)), tuple(shards))


class LeafPair(NamedTuple):
    """The shard of one device, and the values that are expected in it."""

    device: int
    found: Tensor
    expected: Tensor

    @property
    def error(self) -> Tensor:
        """The absolute error of each element, in float64."""
        return (widen(self.found) - widen(self.expected)).abs()


def pair_shards(found: Leaf, full: Tensor) -> list[LeafPair]:
    """Pair each shard of a leaf with the same range of a full tensor."""
    if isinstance(found, Sharded) and found.spec.unreduced:
        found = fs.unshard(found)
    if not isinstance(found, Sharded):
        return [LeafPair(0, found, full)]
    return [
        LeafPair(device, shard, shard_of(full, found.layout, device))
        for device, shard in zip(local_devices(found.mesh), found.shards, strict=True)
    ]


def constant_factor(found: Leaf, full: Tensor, tolerance: float = 1e-3) -> str:
    """Return the number that all of a full tensor is multiplied by in a leaf; "" if there is none, or it is 1."""
    pairs = [pair for pair in pair_shards(found, full) if pair.found.numel()]
    ours = torch.cat([widen(pair.found).reshape(-1) for pair in pairs])
    expected = torch.cat([widen(pair.expected).reshape(-1) for pair in pairs])
    factor = float((ours * expected.conj()).sum().real / expected.abs().square().sum())
    is_constant = largest(ours - factor * expected) <= tolerance * abs(factor) * largest(expected)
    return f"{factor:.4g}" if is_constant and abs(factor - 1) > tolerance else ""


def first_difference(found: Leaf, full: Tensor, tolerance: float = 1e-3) -> str:
    """Describe the first element that differs by more than a tolerance (or else at all), and the device that stores it."""
    numbers = torch.arange(full.numel(), device=full.device).reshape(full.shape)
    for allowed in (tolerance * largest(full), 0.0):
        for pair, (_, _, indices) in zip(pair_shards(found, full), pair_shards(found, numbers), strict=True):
            wrong = ~(pair.error <= allowed)
            if wrong.any():
                at = [int(i) for i in torch.unravel_index(indices[wrong][0], full.shape)]
                got, expected = pair.found[wrong][0].item(), pair.expected[wrong][0].item()
                return f"{at}: {got:.6g} instead of {expected:.6g} (device {pair.device})"
    return "no element"


def largest(x: Tensor | None) -> float:
    """Take the largest absolute value; NaN if there is one."""
    return 0.0 if x is None or not x.numel() else float(x.abs().max())


def widen(x: Any, sign: int = 0, eps: float = 0.0, draw: torch.Generator | None = None) -> Any:
    """Convert floating tensors to float64 (complex128), and leave all else as it is.

    With `sign`, each number is moved by eps/2 of it: half of them up and half down, by signs from `draw`.
    """
    if not is_floating(x):
        return x
    wide = x.to(torch.complex128 if x.is_complex() else torch.float64)
    if sign:
        signs = torch.randint(2, x.shape, generator=draw).to(x.device) * 2 - 1
        wide = wide * (1 + sign * signs * eps / 2)
    return keep_frozen(x, wide)


def is_floating(x: Any) -> TypeGuard[Tensor]:
    """Return True if x is a floating or complex tensor."""
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def keep_frozen(x: Tensor, new: Tensor) -> Tensor:
    """Make `new` a frozen parameter if x is one."""
    return Parameter(new.detach(), requires_grad=False) if is_frozen(x) else new
