"""Collectives on the shards of an array, from outside of `run`.

On a virtual mesh the caller has the shards of all devices, so a collective is one linear map of all
of them, in the caller's thread.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
from torch import Tensor

from fshard.mesh.collectives.autograd import Bound, LinearMap, Tensors, apply
from fshard.mesh.collectives.ledger import active
from fshard.mesh.collectives.moves import Extreme, Move, Wired
from fshard.mesh.layout import Mesh
from fshard.mesh.layout.counting import LedgerRow, counting, without_counters
from fshard.mesh.spmd.moments import listeners
from fshard.mesh.spmd.run import is_outside, reach_on, run_on_devices
from fshard.mesh.spmd.scope import require
from fshard.source import Site


# Numpy takes 13 us, as long as a small collective on shards.
@lru_cache(maxsize=512)
def _groups_of_devices(mesh: Mesh, axes: tuple[str, ...]) -> list[list[int]]:
    """Return the devices of each group along some axes.

    On a mesh a=2, b=2, the groups along "a" are [[0, 2], [1, 3]].
    """
    other_axes = [axis for axis in mesh.axis_names if axis not in axes]
    order = [mesh.axis_names.index(axis) for axis in (*other_axes, *axes)]
    size = prod([mesh.shape[axis] for axis in axes])
    devices = np.arange(mesh.size).reshape([length for _, length in mesh.axes])
    return devices.transpose(order).reshape(-1, size).tolist()


@dataclass(frozen=True)
class OnShards(LinearMap):
    """A collective on the shards of all devices of a virtual mesh."""

    move: Move
    axes: tuple[str, ...]
    mesh: Mesh
    site: Site

    def run(self, xs: Tensors) -> Tensors:
        results: list[Any] = [None] * len(xs)
        counters = counting().counters
        groups = _groups_of_devices(self.mesh, self.axes)
        if listeners and isinstance(self.move, Wired) and len(groups[0]) > 1:
            reach_on(self.mesh, "collective")
        for devices in groups:
            members = [xs[device] for device in devices]
            self._record_bytes(devices, members)
            with without_counters():
                ys = self.move.meaning(members)

            ids: set[int] = set()
            for device, y in zip(devices, ys, strict=True):
                # Devices may share a result, but each needs an autograd node of its own.
                results[device] = y.detach() if id(y) in ids else y
                ids.add(id(y))
                for counter in counters:
                    counter.claim(y, device)
        return tuple(results)

    def _record_bytes(self, devices: list[int], members: list[Tensor]) -> None:
        ledgers = active()
        if not ledgers or not isinstance(self.move, Wired):
            return
        row = LedgerRow(self.move.name, self.axes, self.site)
        for index, (device, x) in enumerate(zip(devices, members, strict=True)):
            sent = self.move.sent(x.numel() * x.element_size(), index, len(devices))
            for ledger in ledgers:
                ledger.record(device, row, sent)

    def transposed(self) -> OnShards:
        return replace(self, move=self.move.transposed())

    def batched(self) -> OnShards:
        return replace(self, move=self.move.batched())


_CALLER = "an operation on arrays"
"""The name in errors of a scope."""


def apply_move(
    mesh: Mesh, move: Move, axes: tuple[str, ...], shards: Tensors, site: Site
) -> Tensors:
    """Apply a collective to the shards held here, differentiably (pmax and pmin: not)."""
    is_differentiable = not isinstance(move, Extreme)
    if is_outside(mesh):
        linear = OnShards(move, axes, mesh, site)
        return apply(linear, shards) if is_differentiable else linear.run(shards)

    def on_device(device: int) -> Tensors:
        group = require(_CALLER).called_group(axes, _CALLER)
        bound = Bound(move, group, site)
        return apply(bound, shards) if is_differentiable else bound.run(shards)

    (results,) = run_on_devices(mesh, on_device)
    return results
