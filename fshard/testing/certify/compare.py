"""Comparison of a sharded run with a serial one: every leaf, after each step, in the shard of each device.

device 0   w[0:2]  |  full[0:2]
device 1   w[2:4]  |  full[2:4]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, prod
from typing import NamedTuple

import torch
from torch import Tensor

import fshard as fs
from fshard.mesh.layout import Layout, Mesh, P
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.reshard.device_put import shard_of
from fshard.mesh.spmd.run import local_devices
from fshard.optim.leaves import Leaf
from fshard.testing.certify.certificate import Certificate, CertificateRow, Verdict, refer_to_first
from fshard.testing.certify.runs import Snapshot

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""The relative difference that rounding explains, by the lowest precision of a program."""
SUBJECTS = {"grads": "gradient", "params": "parameter", "buffers": "buffer"}


def bound_of(x: Tensor | None, largest_of_all: float, dtype: torch.dtype) -> float:
    """Return the error that rounding in a dtype explains: relative to the largest number of a leaf.

    What is zero up to rounding has no size of its own: it counts as a thousandth of the largest number of all leaves (16
    roundings of it in a lower dtype), and as 1e-5.
    """
    floor = max(1e-3 * TOLERANCES[dtype], 16 * torch.finfo(dtype).eps) * largest_of_all
    return max(TOLERANCES[dtype] * max(largest(x), 1e-5), floor)


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
                hint = hints.get(field, "") if verdict == "DIVERGENT" else ""
                row = CertificateRow(stage, name, verdict, error, bound)
                row = row._replace(reason=f"step {step}: the {subject} {reason}{hint}", step=step) if reason else row
                rows.setdefault(name, []).append(row)
    return refer_to_first([_summarize(of_leaf) for of_leaf in rows.values()])


def _summarize(rows: Sequence[CertificateRow]) -> CertificateRow:
    failures = [row for row in rows if row.step is not None]
    return (
        failures[0] if failures else max(rows, key=lambda row: (row.verdict == "BOUNDED", row.error / (row.bound or 1)))
    )


def _compare(leaf: Leaf, full: Tensor | None, bound: float) -> tuple[Verdict, float, str]:
    """Return the verdict on a leaf in one step, its largest error, and the reason if it fails."""
    if leaf is None or full is None:
        reason = f"is missing: only the {'sharded' if full is None else 'serial'} run has a gradient"
        return ("EXACT", 0.0, "") if leaf is full else ("DIVERGENT", inf, reason)
    pairs = pair_shards(leaf, full)
    if all(torch.equal(pair.shard, pair.expected) for pair in pairs):
        return "EXACT", 0.0, ""
    x, expected = (torch.cat([column.reshape(-1) for column in columns]) for columns in zip(*(p[:2] for p in pairs)))
    error = float((_widest(x) - _widest(expected)).abs().max())
    if error <= bound:
        return "BOUNDED", error, ""
    if not full.isfinite().all():
        return "INCONCLUSIVE", error, "of one device is not finite"
    factor = constant_factor(x, expected)
    return "DIVERGENT", error, f"is {factor:.4g} times that of one device" if factor else first_difference(leaf, full)


def certificate(mesh: Mesh, rows: Sequence[CertificateRow], steps: int, dtype: torch.dtype | None) -> Certificate:
    """Return a certificate that says what it compared, and what it does not see."""
    if dtype is None:
        return Certificate(
            tuple(rows),
            steps,
            f"{mesh} against a mesh of one device, bit for bit",
            "It does not see an error that a mesh of one device makes too.",
        )
    unseen = "It does not see casts by precision=, compute= or reduce=: reproducible=True does."
    if dtype != torch.float64:
        unseen = f"The program casts to {dtype}, so bounds are wider. {unseen}"
    return Certificate(tuple(rows), steps, f"{mesh} against one device, both in float64", unseen)


class ShardPair(NamedTuple):
    """The shard of a device, and the values that are expected in it."""

    shard: Tensor
    expected: Tensor
    device: int = 0

    @property
    def error(self) -> Tensor:
        """The absolute error of each element, in float64."""
        return (_widest(self.shard) - _widest(self.expected)).abs()


def pair_shards(leaf: Leaf, full: Tensor) -> list[ShardPair]:
    """Pair each shard of a leaf with the same range of a full tensor; every replica has a pair."""
    leaf = fs.unshard(leaf) if isinstance(leaf, Sharded) and leaf.spec.unreduced else leaf
    if not isinstance(leaf, Sharded):
        return [ShardPair(leaf, full)]
    devices = zip(leaf.shards, local_devices(leaf.mesh), strict=True)
    return [ShardPair(shard, shard_of(full, leaf.layout, device), device) for shard, device in devices]


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


def constant_factor(x: Tensor, expected: Tensor, tolerance: float = 1e-3) -> float | None:
    """Return the number that all of `expected` is multiplied by in x; None if there is none, or it is 1."""
    x, expected = _widest(x), _widest(expected)
    factor = float((x * expected.conj()).sum().real / expected.abs().square().sum())
    is_constant = (x - factor * expected).abs().max() <= tolerance * abs(factor) * largest(expected)
    return factor if is_constant and abs(factor - 1) > tolerance else None


def first_difference(leaf: Leaf, full: Tensor, tolerance: float = 1e-3) -> str:
    """Describe the first element that differs by more than a tolerance (or else at all), and the device that stores it."""
    numbers = torch.arange(full.numel(), device=full.device).reshape(full.shape)
    for bound in (tolerance * largest(full), 0.0):
        for pair, indices in zip(pair_shards(leaf, full), pair_shards(leaf, numbers), strict=True):
            if (differs := ~(pair.error <= bound)).any():
                index = [int(i) for i in torch.unravel_index(indices.expected[differs][0], full.shape)]
                x, expected = pair.shard[differs][0].item(), pair.expected[differs][0].item()
                return f"first differs at {index}: {x:.6g} instead of {expected:.6g} (device {pair.device})"
    return "differs nowhere"


def largest(x: Tensor | None) -> float:
    """Take the largest absolute value of those that are finite."""
    return 0.0 if x is None or not x.numel() else float(_widest(x).abs().nan_to_num(0.0, 0.0).max())


def _widest(x: Tensor) -> Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)
