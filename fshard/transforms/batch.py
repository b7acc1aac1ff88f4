"""The batch of a step: sharded on the mesh, and split into the slices that each device runs in sequence.

A batch of any size is split as evenly as possible: slices differ by at most one sample. With fewer samples than
slices, some are idle. An idle slice gets a neighbour's sample, so that any loss function can run on it and devices
stay in step; its results have weight 0.

    5 samples, 2 devices, 2 slices each         3 samples
    device 0    [0] [1]                         device 0    [(0)] [0]
    device 1    [2] [3 4]                       device 1    [1] [2]

Where no axis shards the samples, as beside a pipeline alone, all tensors of one length contain some, and every device
has them all.

All tensors that axes shard have one row per sample. Tensors in objects of other classes than containers and dataclasses
(a jagged tensor, a graph) may mean anything: such an object raises where its samples would be split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.copying import lazy_copy
from fshard.mesh.layout import (
    Layout,
    Mesh,
    P,
    PyTree,
    Structure,
    broadcast_prefix,
    flatten,
    flatten_with_paths,
    is_dense,
    paths_of,
    unflatten,
)
from fshard.mesh.layout.arithmetic import Range, balanced_range, ravel
from fshard.mesh.layout.kinds import owned_by
from fshard.mesh.layout.sharded import Sharded, in_memory
from fshard.mesh.reshard.device_put import full_values, put_equal
from fshard.mesh.spmd.run import local_devices


class Cut(NamedTuple):
    """How the samples of a tensor are sharded: axes, number of devices, number of samples."""

    axes: tuple[str, ...]
    parts: int
    length: int

    @property
    def is_even(self) -> bool:
        """True if all devices have the same number of samples."""
        return self.length % self.parts == 0

    def ranges(self, mesh: Mesh, device: int, count: int) -> list[Range]:
        """Return which samples a device takes, in `count` slices."""
        index = _device_index(self.axes, mesh, device)
        return [
            balanced_range(self.length, self.parts * count, index * count + number)
            for number in range(count)
        ]

    def local_range(self, mesh: Mesh) -> Range:
        """Return which samples the caller's first device takes."""
        return self.ranges(mesh, local_devices(mesh)[0], 1)[0]

    def device_index(self, mesh: Mesh) -> int:
        """Return the index of the caller's first device along the axes."""
        return _device_index(self.axes, mesh, local_devices(mesh)[0])

    def share(self, mesh: Mesh, axes: tuple[str, ...]) -> float:
        """Return the caller's share of the samples of the devices along some of the axes; an equal one if they have none."""
        lengths, index = self.lengths(), self.device_index(mesh)
        if axes == self.axes:
            return lengths[index] / self.length
        coordinates = mesh.coordinates(local_devices(mesh)[0])
        table = torch.tensor(lengths).view([mesh.shape[axis] for axis in self.axes])
        group = table[
            tuple([slice(None) if axis in axes else coordinates[axis] for axis in self.axes])
        ]
        return lengths[index] / int(group.sum()) if group.any() else 1 / group.numel()

    def rows(self, mesh: Mesh) -> int:
        """Return the number of rows that it has: a neighbour's, if it has no samples."""
        start, stop = self.local_range(mesh)
        return max(stop - start, 1)

    def lengths(self) -> list[int]:
        """Return the number of samples of each device."""
        ranges = (balanced_range(self.length, self.parts, index) for index in range(self.parts))
        return [stop - start for start, stop in ranges]


@lru_cache(maxsize=4096)
def _device_index(axes: tuple[str, ...], mesh: Mesh, device: int) -> int:
    coordinates = mesh.coordinates(device)
    return ravel([coordinates[axis] for axis in axes], [mesh.shape[axis] for axis in axes])


def filled(samples: Range, length: int) -> Range:
    """Return a range of `length` samples; one neighbour, where it is empty."""
    start, stop = samples
    nearest = min(start, length - 1)
    return (start, stop) if stop > start else (nearest, nearest + 1)


class Slice(NamedTuple):
    """A slice of a device's batch: its leaves, and its weight by the number of samples.

    `samples`: their number, a neighbour's included; None: unknown.
    """

    leaves: list[Any]
    rows: int
    samples: int | None


@dataclass(frozen=True)
class Batch:
    """A batch on a mesh.

    Args:
        mesh: the devices.
        devices: the local ones.
        columns: for each leaf, the local shards.
        cut: how the samples are sharded; None: no tensor has any.
        has_samples: for each leaf, True if it has a row per sample; every slice has all of the others.
        structure: of the tree.
        axes: that shard anything: those of the samples first, in their order.
        shapes: global shapes of the leaves that are tensors.
        global_leaves: those of the global batch, if the caller has it.
    """

    mesh: Mesh
    devices: tuple[int, ...]
    columns: list[tuple[Any, ...]]
    cut: Cut | None
    has_samples: list[bool]
    structure: Structure
    axes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    global_leaves: Sequence[Any] = ()

    @property
    def may_differ(self) -> bool:
        """True if other processes may have been given another batch."""
        return len(self.devices) < self.mesh.size and self.mesh.runtime != "abstract"

    @property
    def samples(self) -> int | None:
        """The number of samples."""
        return None if self.cut is None else self.cut.length

    def total(self, count: int) -> int:
        """Return the weight of all slices of all devices together."""
        n = prod(self.mesh.shape[axis] for axis in self.axes)
        return n * count if self.cut is None else self.cut.length * n // self.cut.parts

    def check(self, count: int) -> None:
        """Raise if the batch cannot be split into `count` slices per device."""
        if count > 1 and self.cut is None:
            raise ValueError(
                f"each device's part of the batch must be split into {count} slices, but has no tensor whose first dim is "
                "sharded by its spec, and tensors of several lengths or none. Name those with samples by an axis of one device "
                'if there is no other: batch=P("data").'
            )
        if self.samples == 0:
            raise ValueError("the batch has no samples. Leave it out.")

    def slices(self, device_index: int, count: int, *, is_copied: bool = False) -> list[Slice]:
        """Split the shards of the local device at an index.

        `is_copied`: copy each slice, since kernels round differently where their inputs are aligned differently.
        """
        device, cut = self.devices[device_index], self.cut
        shards = [column[device_index] for column in self.columns]
        if count == 1 and not is_copied and cut is not None and cut.is_even:
            rows = cut.length // cut.parts
            return [Slice(shards, rows, rows)]
        copy_ = (
            lazy_copy if count > 1 else lambda x: x
        )  # a write to one slice must not change the next
        if cut is None:
            return [Slice([*map(copy_, shards)], 1, None) for _ in range(count)]
        slices, ranges = list[Slice](), cut.ranges(self.mesh, device, count)
        first = ranges[0][0]
        for start, stop in ranges:
            leaves = list[Any]()
            for x, has_samples in zip(shards, self.has_samples, strict=True):
                leaf = (
                    x[slice(*filled((start - first, stop - first), len(x)))]
                    if has_samples
                    else copy_(x)
                )
                leaves.append(leaf.clone() if has_samples and is_copied else leaf)
            slices.append(Slice(leaves, stop - start, max(stop - start, 1)))
        return slices

    def tree(self, leaves: list[Any], dtype: torch.dtype | None = None) -> PyTree:
        """Put leaves together again, floating ones in a dtype."""
        if dtype is not None:
            leaves = [
                x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
                for x in leaves
            ]
        return unflatten(self.structure, leaves)


@dataclass(frozen=True)
class BatchPart:
    """A batch of which each device has its own part, as from a loader."""

    tree: PyTree
    cut: Cut

    def on(self, mesh: Mesh, *, split: bool = True) -> Batch:
        """Return the batch in its layout. One that is not `split` into slices may have any objects: they pass as they are."""
        paths, leaves, structure = flatten_with_paths(self.tree, none_is_leaf=True)
        rows, shapes = self.cut.rows(mesh), tuple[tuple[int, ...], ...]()
        has_samples = [rows_of(x) == rows for x in leaves]
        if split:
            for path, x in zip(paths, leaves, strict=True):
                _validate_leaf(x)
                if rows_of(x) not in (None, rows):
                    raise ValueError(
                        f"this device has {rows} of the batch's {self.cut.length} samples from the loader, but {path or 'it'} "
                        f"is {rows_of(x)} long. Give tensors with a row per sample apart from those that all devices get in "
                        "full."
                    )
            leaves = [
                lazy_copy(in_memory(x, mesh, "device")) if isinstance(x, Tensor) else x
                for x in leaves
            ]
            shapes = tuple(
                (*([self.cut.length] if x.ndim else []), *x.shape[1:])
                for x in leaves
                if isinstance(x, Tensor)
            )
        cut, columns = self.cut if split or any(has_samples) else None, [(x,) for x in leaves]
        return Batch(
            mesh, local_devices(mesh), columns, cut, has_samples, structure, self.cut.axes, shapes
        )


def shard_batch(batch: PyTree, specs: PyTree, mesh: Mesh) -> Batch:
    """Shard a batch on a mesh by a P, or a prefix tree of Ps."""
    if isinstance(batch, BatchPart):
        return batch.on(mesh)
    leaves, structure = flatten(batch, none_is_leaf=True)
    leaf_specs: list[Any] = [specs] * len(leaves)
    if not isinstance(specs, P):
        try:
            leaf_specs = broadcast_prefix(specs, batch, none_is_leaf=True)
        except ValueError:
            raise ValueError(
                f"the batch specs {specs!r} are no prefix of the batch {structure}."
            ) from None
    cuts, columns = list[Cut | None](), list[tuple[Any, ...]]()
    for index, (leaf, spec) in enumerate(zip(leaves, leaf_specs, strict=True)):
        try:
            cut, shards = _shard_leaf(leaf, spec, mesh)
        except (TypeError, ValueError) as error:
            raise type(error)(f"batch: {paths_of(structure)[index]}: {error}") from None
        cuts.append(cut)
        columns.append(shards)
    if not any(cuts):
        lengths = [rows_of(x) for x, *_ in columns]
        if (
            len({*lengths} - {None}) == 1
        ):  # no axis shards the samples: every device has those of all tensors
            cuts = [None if length is None else Cut((), 1, length) for length in lengths]
    distinct_cuts = sorted({cut for cut in cuts if cut is not None})
    if len(distinct_cuts) > 1:
        sizes = ", ".join(f"{cut.length} over {' x '.join(cut.axes)}" for cut in distinct_cuts)
        raise ValueError(
            f"the tensors of a batch must have the same samples; got {sizes}. Replicate the others: P()."
        )
    cut = distinct_cuts[0] if distinct_cuts else None
    sample_axes = () if cut is None else cut.axes
    spec_axes = {axis for spec in leaf_specs if isinstance(spec, P) for axis in spec.axes}
    axes = (
        *sample_axes,
        *(axis for axis in mesh.axis_names if axis in spec_axes and axis not in sample_axes),
    )
    shapes = tuple(tuple(x.shape) for x in leaves if isinstance(x, Tensor | Sharded))
    has_samples = [cut is not None for cut in cuts]
    return Batch(
        mesh, local_devices(mesh), columns, cut, has_samples, structure, axes, shapes, leaves
    )


def _validate_leaf(leaf: Any) -> None:
    """Raise if a leaf is no tensor but has some, whose samples cannot be split."""
    if not isinstance(leaf, Tensor | Sharded):
        inside = getattr(leaf, "__dict__", {}).values()
        if getattr(leaf, "ndim", 0) or any(isinstance(x, Tensor) for x in inside):
            raise TypeError(
                f"a {type(leaf).__name__} is not sharded. Write torch.as_tensor(...) around an array. Else give the object's "
                "tensors, or P() for it in the batch's specs: all devices get all of it."
            )


def _shard_leaf(leaf: Any, spec: Any, mesh: Mesh) -> tuple[Cut | None, tuple[Any, ...]]:
    """Shard a leaf on a mesh; return the sharding of its samples, and the local shards."""
    if not isinstance(leaf, Tensor | Sharded):
        if isinstance(spec, P) and spec.axes:
            _validate_leaf(leaf)
        return None, (leaf,) * len(local_devices(mesh))
    if not isinstance(spec, P):
        raise TypeError(f"the spec of a tensor must be a P; got {spec!r}.")
    cut, layout = _cut_and_layout(mesh, spec, tuple(leaf.shape))
    is_even = cut is None or cut.is_even
    if isinstance(leaf, Sharded) and is_even:
        return cut, (
            leaf if leaf.layout == layout else put_equal(leaf, layout, may_alias=True)
        ).shards
    x = full_values(leaf) if isinstance(leaf, Sharded) else leaf
    is_plain = not x.requires_grad and is_dense(x)
    if cut is not None and mesh.size > 1 and (not is_even or is_plain):
        return cut, _shard_samples(x, cut, layout)
    is_cut = mesh.size > 1 and (layout.spec.is_flat or layout.spec.axes)
    if is_cut or not is_plain or not x.is_contiguous():
        return cut, put_equal(x, layout, may_alias=True).shards
    copy_ = in_memory(x, mesh, "device")
    copies = list[Tensor]()
    for device in local_devices(mesh):
        with owned_by(device):
            copies.append(lazy_copy(copy_))  # it is only read, as a rule
    return cut, tuple(copies)


def _shard_samples(x: Tensor, cut: Cut, layout: Layout) -> tuple[Tensor, ...]:
    """Return each device's samples of a tensor; a layout may shard the other dims too."""
    mesh, shards = layout.mesh, list[Tensor]()
    for device in local_devices(mesh):
        (samples,) = cut.ranges(mesh, device, 1)
        shard = x[slice(*filled(samples, cut.length))]
        if layout.spec.split_axes != cut.axes:
            _, *other_dims = layout.ranges(x.shape, device)
            shard = shard[(slice(None), *(slice(*bounds) for bounds in other_dims))]
        with owned_by(device):
            shards.append(in_memory(shard.clone(), mesh, "device"))
    return tuple(shards)


@lru_cache(maxsize=1024)
def _cut_and_layout(mesh: Mesh, spec: P, shape: tuple[int, ...]) -> tuple[Cut | None, Layout]:
    """Return the sharding of a tensor's samples, and its layout; of the other dims only, where samples are uneven."""
    layout = Layout(mesh, spec)
    first, *other_dims = spec.dims(len(shape)) or [()]
    cut = Cut(first, prod(mesh.shape[axis] for axis in first), shape[0]) if first else None
    if cut is not None and not cut.is_even:
        layout = Layout(mesh, P(None, *other_dims))
    layout.check(shape)
    return cut, layout


def rows_of(leaf: Any) -> int | None:
    """Return the length of a tensor's first dim; None if it has no dims, or is no tensor.

    >>> import torch
    >>> rows_of(torch.zeros(3, 2)), rows_of(torch.tensor(1.0)), rows_of("a")
    (3, None, None)
    """
    return leaf.shape[0] if isinstance(leaf, Tensor | Sharded) and len(leaf.shape) else None
