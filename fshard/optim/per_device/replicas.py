"""Checks of own updates: what several devices must have equal is compared.

Differences often begin after the first step. In the updates 1, 2, 4, 8, ... the devices gather a
row of hashes, those of large tensors of samples; with FSHARD_CHECK=1 they do so in every update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.errors import MismatchError, OptimizerError
from fshard.mesh.collectives.moves import Purpose
from fshard.mesh.layout import Layout, Mesh
from fshard.mesh.runtimes.watch import watching
from fshard.mesh.spmd.check_equal import gather_all
from fshard.mesh.spmd.global_inputs import digest
from fshard.mesh.spmd.scope import Group, entered, here, require
from fshard.optim.leaves import Leaves
from fshard.optim.per_device.draws import UpdateDraws
from fshard.source import call_site


class EqualResult(NamedTuple):
    """A result of an update, equal on the devices that hold one shard of a layout.

    Without, on all.
    """

    name: str
    value: Any
    layout: Layout | None


class ReplicaCheck:
    """Compares, between devices, what an own update must return equal."""

    def __init__(self) -> None:
        self._calls = dict[tuple[Mesh, int], int]()

    def compare(
        self,
        mesh: Mesh,
        device: int,
        results_of_device: Callable[[], list[EqualResult]],
        draws: UpdateDraws,
    ) -> None:
        """Raise on all devices unless their results are equal, and the keys of their draws."""
        if not self._is_due(mesh, device):
            return
        group = require("an update").group(mesh.axis_names, "an update")
        results = results_of_device()
        hashes = [int(draws.has_drawn), draws.key >> 1, *[_hash(x.value) for x in results]]
        rows = gather_all(torch.tensor(hashes), group, call_site()).tolist()

        has_drawn = any(row[0] for row in rows)
        if has_drawn and len({row[1] for row in rows}) > 1:
            raise MismatchError(
                "the random state must be the same on all devices, for draws in an update. Give "
                "all processes one seed: torch.manual_seed(0), not that of a rank."
            )
        for column, result in enumerate(results, 2):
            _compare_column(result, mesh, [row[column] for row in rows])

    def _is_due(self, mesh: Mesh, device: int) -> bool:
        """Count a call of a device; return True if the devices compare in it."""
        count = self._calls.get((mesh, device), 0) + 1
        self._calls[mesh, device] = count
        if mesh.size == 1 or mesh.runtime == "abstract":
            return False
        is_power_of_two = count & (count - 1) == 0
        return is_power_of_two or watching()


def _compare_column(result: EqualResult, mesh: Mesh, hashes: Sequence[int]) -> None:
    """Raise unless the devices that hold the same shard have the same hash of a result."""
    hash_of_shard = dict[tuple[int, ...], int]()
    for device, value in enumerate(hashes):
        shard = _shard_number(result.layout, mesh, device)
        if shard is None or value == _NOTHING:
            continue
        if hash_of_shard.setdefault(shard, value) != value:
            raise OptimizerError(
                f"{result.name} must be equal on all devices that have it; got another value on "
                "device "
                f"{mesh.coordinates(device)}. An update sees this device's shards: make a number "
                "from "
                "those of all, by fs.optim.global_norm(grads) or fs.psum(x, axis) over the axes "
                "that "
                'shard the parameters; or leave out sharding="flat", for owners.'
            )


_NOTHING = 0
"""The hash of a result that a device does not have, which is not compared."""


def _shard_number(layout: Layout | None, mesh: Mesh, device: int) -> tuple[int, ...] | None:
    """Return a device's coordinates along the axes that shard an array.

    None if it holds none of it.
    """
    if layout is None:
        return ()
    if not layout.has_any(device):
        return None
    coordinates = mesh.coordinates(device)
    return tuple([coordinates[axis] for axis in layout.spec.sharded_axes])


def _hash(x: Any) -> int:
    """Return a hash of 63 bits: of a tensor, a large one by samples, or of a value's text."""
    if x is None:
        return _NOTHING
    if isinstance(x, Tensor):
        stride = 1 + x.nbytes // (1 << 16)
        return digest(x.reshape(-1)[::stride])
    return digest(torch.tensor([*repr(x).encode()], dtype=torch.uint8))


def sums_over_shards(params: Leaves, updated: Sequence[int]) -> AbstractContextManager[None]:
    """Return the context of an own update on a device, in which sums over replicas raise.

    They would count the parameters several times.
    """
    scope = here()
    if scope is None:
        return nullcontext()

    def validate_sum(call: str, group: Group, purpose: Purpose) -> None:
        if call not in ("fs.psum", "fs.psum_scatter"):
            return
        for i in updated:
            spec, sizes = params.leaves[i].spec, params.leaves[i].mesh.shape
            replicated = [axis for axis in group.axes if axis not in spec.sharded_axes]
            copies = prod([sizes.get(axis, 1) for axis in replicated])
            if copies > 1:
                raise OptimizerError(
                    f"{call} in an update must be over axes that shard all parameters; got "
                    f"{', '.join(replicated)}, along which params{params.paths[i]} is replicated, "
                    f"so that it would count {copies} times. A norm that is right in every stage "
                    "is fs.optim.global_norm(grads)."
                )

    return entered(scope.replaced(notice=validate_sum))
