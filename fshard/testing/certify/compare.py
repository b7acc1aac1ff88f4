"""Comparison of a sharded run with a serial one: every leaf, after each step, in the shard of each device.

device 0   w[0:2]  |  full[0:2]
device 1   w[2:4]  |  full[2:4]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf, prod
from typing import NamedTuple

import torch
from torch import Tensor

import fshard as fs
from fshard.mesh.layout import Layout, Mesh, P
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.reshard.device_put import shard_of
from fshard.mesh.spmd.run import local_devices
from fshard.optim.leaves import Leaf, Leaves
from fshard.testing.certificate import (
    CertificateRow,
    Verdict,
    bound_of,
    constant_factor,
    largest,
    refer_to_first,
    widest,
)

SUBJECTS = {"grads": "gradient", "params": "parameter", "buffers": "buffer"}


class Snapshot(NamedTuple):
    """One step of a run: the gradients given to the optimizer, the parameters and buffers after it; leaves in tree order."""

    grads: list[Leaf]
    params: list[Leaf]
    buffers: list[Leaf]

    def mapped(self, f: Callable[[Leaf], Leaf]) -> Snapshot:
        """Apply a function to each leaf; tied leaves stay tied."""
        return Snapshot(*(Leaves.of(leaves).mapped(f) for leaves in self))


def judge(
    serial: Sequence[Snapshot],
    sharded: Sequence[Snapshot],
    names: Snapshot,
    stage: int | str,
    hints: Mapping[str, str],
    dtype: torch.dtype | None,
) -> list[CertificateRow]:
    """Judge every leaf of a sharded run, by the first step in which it fails or else by its largest error.

    `names` has the names of the leaves, `hints` the likely causes by the field that diverges, `dtype` is the lowest of the
    program; None demands equal bits.
    """
    rows: dict[str, list[CertificateRow]] = {}
    for step, (snapshot, reference) in enumerate(zip(sharded, serial, strict=True)):
        for field, subject in SUBJECTS.items():
            leaves, expected = getattr(snapshot, field), getattr(reference, field)
            largest_of_all = 0.0 if field == "buffers" else max(map(largest, expected), default=0.0)
            for name, leaf, full in zip(getattr(names, field) if leaves else (), leaves, expected, strict=True):
                bound = bound_of(full, largest_of_all, dtype) if dtype else 0.0
                verdict, error, reason = _compare(leaf, full, bound)
                row = CertificateRow(stage, name, verdict, error, bound)
                if reason:
                    hint = hints.get(field, "") if verdict == "DIVERGENT" else ""
                    row = row._replace(reason=f"step {step}: the {subject} {reason}{hint}", step=step)
                rows.setdefault(name, []).append(row)
    failures = [[row for row in of_leaf if row.step is not None] for of_leaf in rows.values()]
    worst = [max(of_leaf, key=lambda row: (row.verdict == "BOUNDED", row.error)) for of_leaf in rows.values()]
    return refer_to_first([failed[0] if failed else row for failed, row in zip(failures, worst, strict=True)])


def _compare(leaf: Leaf, full: Tensor | None, bound: float) -> tuple[Verdict, float, str]:
    """Return the verdict on a leaf in one step, its largest error, and the reason if it fails."""
    if leaf is None or full is None:
        reason = f"is missing: only the {'sharded' if full is None else 'serial'} run has a gradient"
        return ("EXACT", 0.0, "") if leaf is full else ("DIVERGENT", inf, reason)
    pairs = pair_shards(leaf, full)
    if all(torch.equal(pair.shard, pair.expected) for pair in pairs):
        return "EXACT", 0.0, ""
    error = float(torch.cat([pair.error.reshape(-1) for pair in pairs]).max())
    if error <= bound:
        return "BOUNDED", error, ""
    if not full.isfinite().all():
        return "INCONCLUSIVE", error, "of one device is not finite"
    x = torch.cat([pair.shard.reshape(-1) for pair in pairs])
    factor = constant_factor(x, torch.cat([pair.expected.reshape(-1) for pair in pairs]))
    reason = f"is {factor:.4g} times that of one device" if factor else first_difference(leaf, full, bound)
    return "DIVERGENT", error, reason


class ShardPair(NamedTuple):
    """The shard of a device, and the values that are expected in it."""

    shard: Tensor
    expected: Tensor
    device: int = 0

    @property
    def error(self) -> Tensor:
        """The absolute error of each element, in float64."""
        return (widest(self.shard) - widest(self.expected)).abs()


def pair_shards(leaf: Leaf, full: Tensor) -> list[ShardPair]:
    """Pair each shard of a leaf with the same range of a full tensor; every replica has a pair."""
    leaf = fs.unshard(leaf) if isinstance(leaf, Sharded) and leaf.spec.unreduced else leaf
    if not isinstance(leaf, Sharded):
        return [ShardPair(leaf, full)]
    devices = zip(leaf.shards, local_devices(leaf.mesh), strict=True)
    return [ShardPair(shard, shard_of(full, leaf.layout, device), device) for shard, device in devices]


def first_difference(leaf: Leaf, full: Tensor, bound: float) -> str:
    """Describe the first element whose error exceeds a bound, and the device that stores it."""
    numbers = torch.arange(full.numel(), device=full.device).reshape(full.shape)
    for pair, indices in zip(pair_shards(leaf, full), pair_shards(leaf, numbers), strict=True):
        if (differs := ~(pair.error <= bound)).any():
            index = [int(i) for i in torch.unravel_index(indices.expected[differs][0], full.shape)]
            x, expected = pair.shard[differs][0].item(), pair.expected[differs][0].item()
            return f"first differs at {index}: {x:.6g} instead of {expected:.6g} (device {pair.device})"
    return "differs nowhere"


def gather_processes(leaf: Leaf) -> Leaf:
    """Move a leaf from a process mesh to a virtual one that has the shards of all processes; return other leaves unchanged.

    All processes then compare the same numbers, with one verdict.
    """
    if not isinstance(leaf, Sharded) or leaf.mesh.runtime != "process":
        return leaf
    mesh, flat = leaf.mesh, leaf.shards[0].reshape(-1)
    shapes = [leaf.layout.local_shape(leaf.shape, device) for device in range(mesh.size)]
    row = flat.new_zeros(1, max(map(prod, shapes)))
    row[0, : flat.numel()] = flat
    rows = fs.unshard(Sharded((mesh.size, row.shape[1]), Layout(mesh, P(mesh.axis_names)), (row,)))
    shards = [row[: prod(shape)].reshape(shape) for row, shape in zip(rows, shapes, strict=True)]
    return Sharded(leaf.shape, leaf.layout.on(Mesh(mesh.axes, "virtual", mesh.device_type)), tuple(shards))
