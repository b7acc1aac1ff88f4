"""Comparisons of the shards of a leaf with the same ranges of a full tensor.  Every replica is compared.

device 0   w[0:2]  |  full[0:2]
device 1   w[2:4]  |  full[2:4]
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.nn import Parameter

import fshard as fs
from fshard.mesh.layout import Layout, Mesh, P
from fshard.mesh.layout.sharded import Sharded
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
    shards = zip(local_devices(found.mesh), found.shards, strict=True)
    return [LeafPair(device, shard, local_range(full, found.layout, device)) for device, shard in shards]


def local_range(full: Tensor, layout: Layout, device: int) -> Tensor:
    """Slice a device's shard of a layout out of a full tensor."""
    stored = full.reshape(-1) if layout.spec.is_flat else full
    return stored[tuple(slice(*limits) for limits in layout.ranges(full.shape, device))]


def is_near(pairs: Iterable[LeafPair], tolerance: float, *, times: float = 1) -> bool:
    """Compare shards with `times` their expected values, relative to the largest expected number."""
    scaled = [pair._replace(expected=widen(pair.expected) * times) for pair in pairs]
    allowed = tolerance * max((largest(pair.expected) for pair in scaled), default=0.0)
    return allowed > 0 and all(largest(pair.error) <= allowed for pair in scaled)


def first_difference(found: Leaf, full: Tensor, tolerance: float) -> str:
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


def widen(x: Any) -> Any:
    """Convert floating tensors to float64 (complex128); leave all else as it is."""
    return keep_frozen(x, x.to(torch.complex128 if x.is_complex() else torch.float64)) if is_floating(x) else x


def is_floating(x: Any) -> TypeGuard[Tensor]:
    """Return True if x is a floating or complex tensor."""
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def keep_frozen(x: Tensor, new: Tensor) -> Tensor:
    """Make `new` a frozen parameter if x is one."""
    return Parameter(new.detach(), requires_grad=False) if is_frozen(x) else new
