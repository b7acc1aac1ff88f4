"""The runs that are compared: in float64 with plain torch on one device, or bit for bit with a mesh of one device.

Gradients, parameters and buffers are compared after each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

import fshard as fs
from fshard.mesh.layout import Mesh, PyTree
from fshard.mesh.reshard.device_put import shard_of
from fshard.mesh.spmd.run import local_devices
from fshard.optim.leaves import Leaf, Leaves, is_frozen
from fshard.testing.certificate import Certificate, CertificateRow, first_of
from fshard.testing.verdicts import (
    TOLERANCES,
    Comparison,
    Shards,
    bound_of,
    float64_by_default,
    judge,
    largest,
    widest,
)
from fshard.transforms.options import PrecisionOptions

SUBJECTS = {"grads": "gradient", "params": "parameter", "buffers": "buffer"}


class Snapshot(NamedTuple):
    """One step of a run: the gradients given to the optimizer, the parameters and buffers after it; leaves in tree order."""

    grads: list[Leaf]
    params: list[Leaf]
    buffers: list[Leaf]

    def mapped(self, f: Callable[[Leaf], Leaf]) -> Snapshot:
        """Apply a function to each leaf; tied leaves stay tied."""
        return Snapshot(*(Leaves.of(leaves).mapped(f) for leaves in self))


LOWER_DTYPES = {field.name for field in fields(PrecisionOptions)}
"""Options that let a step compute or send in another dtype: runs in float64 are without them."""


def certificate_of(
    mesh: Mesh,
    alone: Mesh,
    stages: Sequence[Any],
    train: Callable[[Mesh, Any, Sequence[Snapshot]], list[Snapshot]],
    names: Snapshot,
    hints: Mapping[str, str],
    train_serial: Callable[[int], list[Snapshot]] | None,
    cure: str,
) -> Certificate:
    """Compare the runs of a program on a mesh, in some stages, with that on one device.

    That is `train_serial` in float64, from a key of its random draws, and `train` is given its snapshots; or else `train` on
    the mesh `alone`, bit for bit. `hints` has likely causes by the field that diverges, `cure` the advice if a run differs
    when it is repeated.
    """
    rows, dtype, run = list[CertificateRow](), None, "on one device"
    title, unseen = (
        "a mesh of one device, bit for bit",
        "It does not see an error that a mesh of one device makes too.",
    )
    try:
        with nullcontext() if train_serial is None else float64_by_default():
            if train_serial is None:
                serial = [step.mapped(fs.unshard) for step in train(alone, 0, [])]
            else:
                run = "on one device in float64: does the program name a dtype?"
                with _Casts() as casts:
                    serial = train_serial(0)
                dtype, title, run = (
                    casts.dtype,
                    "one device, both in float64",
                    "on one device, repeated",
                )
                first = first_of(judge(compared(serial, train_serial(1), names, {}, dtype), ""))
                if first is not None and first.verdict == "DIVERGENT":
                    raise fs.errors.PromiseError(
                        "certify: on one device a run must give the same results when it is repeated; got another "
                        f"{first.leaf}, {first.reason}. {cure}"
                    )
                unseen = "It does not see casts by precision=, compute= or reduce=: reproducible=True does."
                if dtype != torch.float64:
                    unseen = f"The program casts to {dtype}, so bounds are wider. {unseen}"
            for stage in stages:
                run = f"in stage {stage}"
                sharded = train(mesh, stage, serial if train_serial else [])
                rows += judge(compared(serial, sharded, names, hints, dtype), stage)
    except Exception as error:
        error.add_note(f"certify: in the run {run}")
        raise
    return Certificate(tuple(rows), len(serial), f"{mesh} against {title}", unseen)


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
            for name, leaf, full in zip(
                getattr(names, field) if leaves else (), leaves, expected, strict=True
            ):
                bound = bound_of(full, largest_of_all, dtype) if dtype else 0.0
                shards = None if leaf is None else shards_of(leaf)
                yield Comparison(step, name, subject, shards, full, bound, hints.get(field, ""))


def shards_of(leaf: fs.Sharded | Tensor) -> Shards:
    """Return the shards of an array, summed if it is unreduced; a tensor is one shard."""
    leaf = fs.unshard(leaf) if isinstance(leaf, fs.Sharded) and leaf.spec.unreduced else leaf
    if not isinstance(leaf, fs.Sharded):
        return Shards([leaf], [0], lambda full: [full])
    layout, devices = leaf.layout, local_devices(leaf.mesh)
    return Shards(
        leaf.shards, devices, lambda full: [shard_of(full, layout, device) for device in devices]
    )


def gather_processes(leaf: Leaf) -> Leaf:
    """Move a leaf from a process mesh to a virtual one that has the shards of all processes; return other leaves unchanged.

    All processes then compare the same numbers, with one verdict.
    """
    if not isinstance(leaf, fs.Sharded) or leaf.mesh.runtime != "process":
        return leaf
    shards: list[Any] = [None] * leaf.mesh.size
    dist.all_gather_object(shards, leaf.shards[0])
    return fs.Sharded(
        leaf.shape,
        leaf.layout.on(Mesh(leaf.mesh.axes, "virtual", leaf.mesh.device_type)),
        tuple(shards),
    )


class _Casts(TorchDispatchMode):
    """Records the lowest dtype that floating tensors are cast to."""

    dtype = torch.float64

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and is_floating(args[0]) and is_floating(result):
            self.dtype = max(
                self.dtype, result.dtype.to_real(), key=lambda dtype: TOLERANCES.get(dtype, 0.0)
            )
        return result


def is_floating(x: Any) -> TypeGuard[Tensor]:
    """Return True if x is a floating or complex tensor."""
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def on_device(tree: PyTree, mesh: Mesh, *, wide: bool) -> PyTree:
    """Move the tensors of a tree to the kind of device of a mesh, if `wide` floating ones as float64 (complex128)."""

    def moved(x: Any) -> Any:
        x = x.to(mesh.device_type) if isinstance(x, Tensor) else x
        return keep_frozen(x, widest(x)) if wide and is_floating(x) else x

    return Leaves.of(tree).mapped(moved)


def keep_frozen(x: Tensor, new: Tensor) -> Tensor:
    """Make `new` a frozen parameter if x is one."""
    return Parameter(new.detach(), requires_grad=False) if is_frozen(x) else new
