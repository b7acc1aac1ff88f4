"""The comparisons of a sharded run with a serial one: gradients, parameters and buffers, after each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import fshard as fs
from fshard.mesh.layout import Mesh
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.reshard.device_put import shard_of
from fshard.mesh.spmd.run import local_devices
from fshard.optim.leaves import Leaf, Leaves
from fshard.testing.verdicts import Comparison, Shards, bound_of, largest

SUBJECTS = {"grads": "gradient", "params": "parameter", "buffers": "buffer"}


class Snapshot(NamedTuple):
    """One step of a run: the gradients given to the optimizer, the parameters and buffers after it; leaves in tree order."""

    grads: list[Leaf]
    params: list[Leaf]
    buffers: list[Leaf]

    def mapped(self, f: Callable[[Leaf], Leaf]) -> Snapshot:
        """Apply a function to each leaf; tied leaves stay tied."""
        return Snapshot(*(Leaves.of(leaves).mapped(f) for leaves in self))


def compared(
    serial: Sequence[Snapshot],
    sharded: Sequence[Snapshot],
    names: Snapshot,
    hints: Mapping[str, str],
    dtype: torch.dtype | None,
) -> Iterator[Comparison]:
    """Compare every leaf of a sharded run.

    `names` has the names of the leaves, `hints` the likely causes by the field that diverges, `dtype` is the lowest of the
    program; None demands equal bits.
    """
    for step, (snapshot, reference) in enumerate(zip(sharded, serial, strict=True)):
        for field, subject in SUBJECTS.items():
            leaves, expected = getattr(snapshot, field), getattr(reference, field)
            largest_of_all = 0.0 if field == "buffers" else max(map(largest, expected), default=0.0)
            for name, leaf, full in zip(getattr(names, field) if leaves else (), leaves, expected, strict=True):
                bound = bound_of(full, largest_of_all, dtype) if dtype else 0.0
                shards = None if leaf is None else shards_of(leaf)
                yield Comparison(step, name, subject, shards, full, bound, hints.get(field, ""))


def shards_of(leaf: fs.Sharded | torch.Tensor) -> Shards:
    """Return the shards of an array, summed if it is unreduced; a tensor is one shard."""
    leaf = fs.unshard(leaf) if isinstance(leaf, Sharded) and leaf.spec.unreduced else leaf
    if not isinstance(leaf, Sharded):
        return Shards([leaf], [0], lambda full: [full])
    layout, devices = leaf.layout, local_devices(leaf.mesh)
    return Shards(leaf.shards, devices, lambda full: [shard_of(full, layout, device) for device in devices])


def gather_processes(leaf: Leaf) -> Leaf:
    """Move a leaf from a process mesh to a virtual one that has the shards of all processes; return other leaves unchanged.

    All processes then compare the same numbers, with one verdict.
    """
    if not isinstance(leaf, Sharded) or leaf.mesh.runtime != "process":
        return leaf
    shards: list[Any] = [None] * leaf.mesh.size
    dist.all_gather_object(shards, leaf.shards[0])
    return Sharded(leaf.shape, leaf.layout.on(Mesh(leaf.mesh.axes, "virtual", leaf.mesh.device_type)), tuple(shards))
