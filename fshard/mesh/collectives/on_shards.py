"""Collectives on the shards of an array, from outside of `run`: on a virtual mesh one linear map in the caller's thread."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from fshard.mesh.collectives.autograd import Bound, LinearMap, Tensors, apply
from fshard.mesh.collectives.ledger import active
from fshard.mesh.collectives.moves import Extreme, Move, Wired
from fshard.mesh.layout import Mesh
from fshard.mesh.layout.counting import LedgerRow, counting, without_counters
from fshard.mesh.spmd.run import is_outside, run_on_devices
from fshard.mesh.spmd.scope import require
from fshard.source import Site


@lru_cache(maxsize=512)
def _groups_of_devices(mesh: Mesh, axes: tuple[str, ...]) -> list[list[int]]:
    """Return the devices of each group along some axes."""
    replicated = [axis for axis in mesh.axis_names if axis not in axes]
    devices = np.arange(mesh.size).reshape([size for _, size in mesh.axes])
    order = [mesh.axis_names.index(axis) for axis in (*replicated, *axes)]
    return (
        devices.transpose(order)
        .reshape(-1, int(np.prod([mesh.shape[axis] for axis in axes])))
        .tolist()
    )


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
        for devices in _groups_of_devices(self.mesh, self.axes):
            members, ids = [xs[device] for device in devices], set[int]()
            if isinstance(self.move, Wired) and (ledgers := active()):
                for index, (device, x) in enumerate(zip(devices, members, strict=True)):
                    sent = self.move.sent(x.numel() * x.element_size(), index, len(devices))
                    for ledger in ledgers:
                        ledger.record(device, LedgerRow(self.move.name, self.axes, self.site), sent)
            with without_counters():
                ys = self.move.meaning(members)
            for device, y in zip(devices, ys, strict=True):
                results[device] = y.detach() if id(y) in ids else y  # one autograd node per device
                ids.add(id(y))
                for counter in counters:
                    counter.claim(y, device)
        return tuple(results)

    def transposed(self) -> OnShards:
        return replace(self, move=self.move.transposed())

    def batched(self) -> OnShards:
        return replace(self, move=self.move.batched())


def apply_move(
    mesh: Mesh, move: Move, axes: tuple[str, ...], shards: Tensors, site: Site
) -> Tensors:
    """Apply a collective to the shards held here, differentiably (pmax and pmin: without a gradient)."""
    if is_outside(mesh):
        linear = OnShards(move, axes, mesh, site)
        return linear.run(shards) if isinstance(move, Extreme) else apply(linear, shards)

    def on_device(device: int) -> Tensors:
        bound = Bound(
            move,
            require("an operation on arrays").called_group(axes, "an operation on arrays"),
            site,
        )
        return bound.run(shards) if isinstance(move, Extreme) else apply(bound, shards)

    return run_on_devices(mesh, on_device)[0]
