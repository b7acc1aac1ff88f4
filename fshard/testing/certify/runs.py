"""The runs that are compared, after each step: gradients, parameters and buffers.

A sharded run is compared with plain torch on one device, both in float64; or, in reproducible mode,
bit for bit with a mesh of one device.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from math import isclose
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
from fshard.rounding import TOLERANCES, bound_of, largest, widest
from fshard.testing.certificate import Certificate, CertificateRow, first_of
from fshard.testing.verdicts import Comparison, Shards, float64_by_default, judge
from fshard.transforms.options import PrecisionOptions

SUBJECTS = {"grads": "gradient", "params": "parameter", "buffers": "buffer"}


class Snapshot(NamedTuple):
    """One step of a run: the leaves, in tree order.

    `grads` are given to the optimizer; `params` and `buffers` are those after the step. `losses`
    has the loss of the batch, which is no row of its own: gradients show more.
    """

    grads: list[Leaf]
    params: list[Leaf]
    buffers: list[Leaf]
    losses: Sequence[Leaf] = ()

    def mapped(self, f: Callable[[Leaf], Leaf]) -> Snapshot:
        """Apply a function to each leaf; tied leaves stay tied."""
        return Snapshot(*(Leaves.of(leaves).mapped(f) for leaves in self))


LOWER_DTYPES = {field.name for field in fields(PrecisionOptions)}
"""Options that let a step compute or send in another dtype: runs in float64 are without them."""


class _ReferenceRun(NamedTuple):
    """The run on one device.

    Args:
        snapshots: of its steps.
        dtype: the lowest of the program, whose roundings are allowed; None demands equal bits.
        title: what the certificate compares with.
        unseen: the mistakes that the comparison does not see.
    """

    snapshots: list[Snapshot]
    dtype: torch.dtype | None
    title: str
    unseen: str


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

    Args:
        mesh: the devices.
        alone: a mesh of one device.
        stages: each is compared.
        train: trains on a mesh in a stage; it is given the snapshots of the serial run, if there is
            one.
        names: of the leaves.
        hints: likely causes, by the field that diverges.
        train_serial: trains by plain torch in float64, from a key of its random draws. None
            compares bit for bit with `train` on the mesh `alone`.
        cure: the advice if a run differs when it is repeated.
    """
    rows: list[CertificateRow] = []
    is_in_float64 = train_serial is not None
    with float64_by_default() if is_in_float64 else nullcontext():
        if train_serial is None:
            with _note_run("on one device"):
                reference = _ReferenceRun(
                    [step.mapped(fs.unshard) for step in train(alone, 0, [])],
                    None,
                    "a mesh of one device, bit for bit",
                    "It does not see an error that a mesh of one device makes too.",
                )
        else:
            reference = _reference_in_float64(train_serial, names, cure)
        serial_snapshots = reference.snapshots if is_in_float64 else []
        for stage in stages:
            with _note_run(f"in stage {stage}"):
                sharded = train(mesh, stage, serial_snapshots)
                comparisons = compared(reference.snapshots, sharded, names, hints, reference.dtype)
                rows += judge(comparisons, stage)
    title = f"{mesh} against {reference.title}"
    return Certificate(tuple(rows), len(reference.snapshots), title, reference.unseen)


def _reference_in_float64(
    train_serial: Callable[[int], list[Snapshot]], names: Snapshot, cure: str
) -> _ReferenceRun:
    """Train on one device in float64, twice; raise unless the two runs agree."""
    with _note_run("on one device in float64: does the program name a dtype?"), _Casts() as casts:
        snapshots = train_serial(0)

    with _note_run("on one device, repeated"):
        repeated = train_serial(1)
        first = first_of(judge(compared(snapshots, repeated, names, {}, casts.dtype), ""))
        if first is not None and first.verdict == "DIVERGENT":
            raise fs.errors.PromiseError(
                "certify: on one device a run must give the same results when it is repeated; got "
                f"another {first.leaf}, {first.reason}. {cure}"
            )

    unseen = "It does not see casts by precision=, compute= or reduce=: reproducible=True does."
    if casts.dtype != torch.float64:
        unseen = f"The program casts to {casts.dtype}, so bounds are wider. {unseen}"
    return _ReferenceRun(snapshots, casts.dtype, "one device, both in float64", unseen)


@contextmanager
def _note_run(run: str) -> Generator[None]:
    """Note on an exception in which run it was raised."""
    try:
        yield
    except Exception as error:
        error.add_note(f"certify: in the run {run}")
        raise


def compared(
    serial: Sequence[Snapshot],
    sharded: Sequence[Snapshot],
    names: Snapshot,
    hints: Mapping[str, str],
    dtype: torch.dtype | None,
) -> Iterator[Comparison]:
    """Compare every leaf of a sharded run with the serial run.

    Args:
        serial: the run on one device.
        sharded: the run on a mesh.
        names: of the leaves.
        hints: the likely causes, by the field that diverges.
        dtype: the lowest of the program; None demands equal bits.
    """
    for step, (snapshot, reference) in enumerate(zip(sharded, serial, strict=True)):
        for field, subject in SUBJECTS.items():
            leaves: list[Leaf] = getattr(snapshot, field)
            expected: list[Any] = getattr(reference, field)
            if not leaves and not expected:
                continue  # `certify_module` has no gradients, though it may have their names

            # Buffers have no common size, as gradients of one loss do.
            largest_of_all = 0.0
            if field != "buffers":
                largest_of_all = max(map(largest, expected), default=0.0)
            hint = hints.get(field, "")
            if field == "grads":
                hint += _hint_of_losses(snapshot, reference)
            columns = zip(getattr(names, field), leaves, expected, strict=True)
            for name, leaf, full in columns:
                bound = bound_of(full, largest_of_all, dtype) if dtype else 0.0
                shards = None if leaf is None else shards_of(leaf)
                yield Comparison(step, name, subject, shards, full, bound, hint)


def _hint_of_losses(snapshot: Snapshot, reference: Snapshot) -> str:
    """Return a likely cause of other gradients if the loss is another one; "" if it is not."""
    hint = ""
    for x, y in zip(snapshot.losses, reference.losses, strict=True):
        loss = float(x)
        expected = float(y)
        if not isclose(loss, expected, rel_tol=1e-6):
            hint = (
                f". The loss is {loss:.5g} instead of {expected:.5g}: is it a mean over samples? "
                "A mean over tokens needs weight="
            )
    return hint


def shards_of(leaf: Any) -> Shards:
    """Return the shards of an array, summed if it is unreduced; a tensor is one shard.

    Those of a fused weight are the shards of its parts.
    """
    if isinstance(leaf, tuple):
        return _shards_of_parts(leaf)
    if isinstance(leaf, fs.Sharded) and leaf.spec.unreduced:
        leaf = fs.unshard(leaf)
    if not isinstance(leaf, fs.Sharded):
        return Shards([leaf], [0], lambda full: [full])
    layout = leaf.layout
    devices = local_devices(leaf.mesh)

    def cut(full: Tensor) -> list[Tensor]:
        return [shard_of(full, layout, device) for device in devices]

    return Shards(leaf.shards, devices, cut)


def _shards_of_parts(parts: Any) -> Shards:
    """Return the shards of the parts of a fused weight, which one device has as one tensor."""
    lengths = [part.shape[parts.joined_dim] for part in parts]
    shards_by_part = [shards_of(part) for part in parts]
    shards = list[Tensor]()
    devices = list[int]()
    for each in shards_by_part:
        shards += each.shards
        devices += each.devices

    def cut(full: Tensor) -> list[Tensor]:
        same_elements = list[Tensor]()
        full_parts = full.split(lengths, parts.joined_dim)
        for part, full_part in zip(shards_by_part, full_parts, strict=True):
            same_elements += part.cut(full_part)
        return same_elements

    return Shards(shards, devices, cut)


def gather_processes(leaf: Leaf) -> Leaf:
    """Move a leaf from a process mesh to a virtual one that has the shards of all processes.

    Other leaves are unchanged. All processes then compare the same numbers, with one verdict.
    """
    if not isinstance(leaf, fs.Sharded) or leaf.mesh.runtime != "process":
        return leaf
    shards: list[Any] = [None] * leaf.mesh.size
    dist.all_gather_object(shards, leaf.shards[0])
    virtual = Mesh(leaf.mesh.axes, "virtual", leaf.mesh.device_type)
    return fs.Sharded(leaf.shape, leaf.layout.on(virtual), tuple(shards))


class _Casts(TorchDispatchMode):
    """Records the lowest dtype that floating tensors are cast to."""

    dtype = torch.float64

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_cast = func is torch.ops.aten._to_copy.default
        if is_cast and is_floating(args[0]) and is_floating(result):
            dtype = result.dtype.to_real()
            if TOLERANCES.get(dtype, 0.0) > TOLERANCES[self.dtype]:
                self.dtype = dtype
        return result


def is_floating(x: Any) -> TypeGuard[Tensor]:
    """Return True if x is a floating or complex tensor."""
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def on_device(tree: PyTree, mesh: Mesh, *, wide: bool) -> PyTree:
    """Move the tensors of a tree to the kind of device of a mesh.

    If `wide`, floating ones become float64 (complex128).
    """

    def moved(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        x = x.to(mesh.device_type)
        return keep_frozen(x, widest(x)) if wide and is_floating(x) else x

    return Leaves.of(tree).mapped(moved)


def keep_frozen(x: Tensor, new: Tensor) -> Tensor:
    """Make `new` a frozen parameter if x is one."""
    return Parameter(new.detach(), requires_grad=False) if is_frozen(x) else new
