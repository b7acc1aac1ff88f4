"""Values that enter and leave a loss function, in which a cotangent is the part of one device.

The objective is the mean of the losses of all devices that have the same samples. So the gradient
of a value in a loss function is the mean of the devices' cotangents, and a shard's cotangent counts
as often as there are shards. Outside of a loss function, in a loop between forward and backward,
all devices have the gradient itself.

             value    cotangent                         of
    enter    equal    mean of the devices' parts        a plain tensor: an input of the model
    leave    equal    times the number of shards        an array: a parameter, or a hook's value

The maps and their transposes are linear maps, so second derivatives are right too. Arrays of a
planned module are on a mesh with `is_varying`, by which they are known outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from fshard.mesh.collectives.autograd import Bound, LinearMap, Tensors, apply, recorded, transformed
from fshard.mesh.collectives.moves import Psum
from fshard.mesh.layout import Layout, Mesh
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.spmd.run import as_one_device
from fshard.mesh.spmd.scope import here
from fshard.source import Site, call_site


@dataclass(frozen=True)
class Enter(LinearMap):
    """Use a value in a loss function.

    The cotangent is the mean of all parts: their sum over a group, divided by n.
    """

    total: Bound | None
    n: int

    def run(self, xs: Tensors) -> Tensors:
        return xs

    def transposed(self) -> LinearMap:
        return MeanOfParts(self.total, self.n)


@dataclass(frozen=True)
class MeanOfParts(LinearMap):
    """Take the gradient from the devices' parts. The cotangent of all parts is equal."""

    total: Bound | None
    n: int

    def run(self, xs: Tensors) -> Tensors:
        sums = xs if self.total is None else self.total.run(xs)
        return tuple([x / self.n for x in sums])

    def transposed(self) -> LinearMap:
        return Enter(self.total, self.n)

    def batched(self) -> LinearMap:
        total = None if self.total is None else self.total.batched()
        return MeanOfParts(total, self.n)


@dataclass(frozen=True)
class Leave(LinearMap):
    """Use a shard of a loss function outside. The cotangent counts n times: see the module."""

    n: int

    def run(self, xs: Tensors) -> Tensors:
        return xs

    def transposed(self) -> LinearMap:
        return _Times(self.n)


@dataclass(frozen=True)
class _Times(LinearMap):
    """Multiply by n: the transpose of `Leave`."""

    n: int

    def run(self, xs: Tensors) -> Tensors:
        return tuple([x * self.n for x in xs])

    def transposed(self) -> LinearMap:
        return Leave(self.n)


def enter_loss(x: Tensor, mesh: Mesh) -> Tensor:
    """Return a tensor, equal on all devices of a mesh, as a value of a loss function on it."""
    is_differentiable = x.is_floating_point() or x.is_complex()
    if not is_differentiable:
        return x
    if not recorded((x,)) and not transformed():
        return x

    total = _total(mesh, mesh.axis_names, call_site())
    (entered,) = apply(Enter(total, mesh.size), (x,))
    return entered


def is_left(x: Sharded) -> bool:
    """Return True if an array of a loss function is used outside of it."""
    if not x.layout.mesh.is_varying:
        return False
    scope = here()
    return scope is None or not scope.varying_axes


def leave_loss(x: Any) -> Any:
    """Return an array of a loss function as one of the loop around it; anything else unchanged."""
    if not isinstance(x, Sharded) or not is_left(x):
        return x

    shards = x.shards
    n = number_of_shards(x)
    if n > 1 and (recorded(shards) or transformed()):
        shards = apply(Leave(n), _plain(shards))
    return Sharded(x.shape, _outside(x.layout), shards)


@lru_cache(maxsize=4096)  # one layout for each, by which calls of operations are known
def _outside(layout: Layout) -> Layout:
    """Return the layout that an array of a loss function has outside of it."""
    return layout.on(replace(layout.mesh, is_varying=False))


def number_of_shards(x: Sharded) -> int:
    """Return how many devices have other shards, or other summands, of an array."""
    spec = x.spec
    return prod([x.mesh.shape[axis] for axis in (*spec.split_axes, *spec.unreduced)])


def gradient_of_parts(x: Sharded, parts: Sequence[Tensor]) -> Sharded:
    """Return the gradient of an array of a loss function, as an array outside.

    `parts` are the cotangents of its shards, one for each device.
    """
    mesh = x.mesh
    replicated = tuple([axis for axis in mesh.axis_names if axis not in x.spec.axes])
    total = _total(mesh, replicated, call_site()) if replicated else None
    shards = apply(MeanOfParts(total, mesh.size), tuple(parts))
    layout = x.layout.with_spec(x.spec.replace(unreduced=None))
    return Sharded(x.shape, _outside(layout), shards)


def _total(mesh: Mesh, axes: tuple[str, ...], site: Site) -> Bound:
    """Return a sum over some axes of a mesh."""
    with as_one_device(mesh) as scope:
        return Bound(Psum(), scope.group(axes, "the gradient of an input"), site)


def _plain(shards: Tensors) -> Tensors:
    """Return shards of which lazy parameters are unsharded."""
    return tuple([x if type(x) is torch.Tensor else x.view_as(x) for x in shards])
