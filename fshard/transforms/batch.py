"""The batch of a step: sharded on the mesh, and split into slices, which a device runs in sequence.

A batch of any size is split as evenly as possible: slices differ by at most one sample. With fewer
samples than slices, some are idle. An idle slice gets a neighbour's sample, so that any loss
function can run on it and devices stay in step; its results have weight 0.

    5 samples, 2 devices, 2 slices each         3 samples
    device 0    [0] [1]                         device 0    [(0)] [0]
    device 1    [2] [3 4]                       device 1    [1] [2]

Where no axis shards the samples, as beside a pipeline alone, all tensors of one length contain
some, and every device has them all.

All tensors that axes shard have one row per sample. Tensors in objects of other classes than
containers and dataclasses (a jagged tensor, a graph) may mean anything: such an object raises where
its samples would be split.
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
    path_text,
    paths_of,
    unflatten,
)
from fshard.mesh.layout.arithmetic import Range, balanced_range, ravel
from fshard.mesh.layout.kinds import owned_by
from fshard.mesh.layout.sharded import Sharded, in_memory
from fshard.mesh.reshard.device_put import full_values, put_equal, shard_of, validate_leaf
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
        """Return the caller's share of the samples that the devices along some of the axes have.

        It is an equal one if they have no samples.
        """
        lengths = self.lengths()
        length = lengths[self.device_index(mesh)]
        if axes == self.axes:
            return length / self.length

        # The devices of the group: those with the caller's coordinates along all other axes.
        coordinates = mesh.coordinates(local_devices(mesh)[0])
        table = torch.tensor(lengths).view([mesh.shape[axis] for axis in self.axes])
        group = tuple([slice(None) if axis in axes else coordinates[axis] for axis in self.axes])
        group_lengths = table[group]
        total = int(group_lengths.sum())
        if total == 0:
            return 1 / group_lengths.numel()
        return length / total

    def rows(self, mesh: Mesh) -> int:
        """Return the number of rows that the caller has: a neighbour's, if it has no samples."""
        start, stop = self.local_range(mesh)
        return max(stop - start, 1)

    def lengths(self) -> list[int]:
        """Return the number of samples of each device."""
        lengths: list[int] = []
        for index in range(self.parts):
            start, stop = balanced_range(self.length, self.parts, index)
            lengths.append(stop - start)
        return lengths


@lru_cache(maxsize=4096)
def _device_index(axes: tuple[str, ...], mesh: Mesh, device: int) -> int:
    coordinates = mesh.coordinates(device)
    indices = [coordinates[axis] for axis in axes]
    sizes = [mesh.shape[axis] for axis in axes]
    return ravel(indices, sizes)


def filled(samples: Range, length: int) -> Range:
    """Return a range of `length` samples, or that of one neighbour if it is empty.

    >>> filled((1, 3), 5), filled((2, 2), 5), filled((5, 5), 5)
    ((1, 3), (2, 3), (4, 5))
    """
    start, stop = samples
    if stop > start:
        return start, stop
    neighbour = min(start, length - 1)
    return neighbour, neighbour + 1


class Slice(NamedTuple):
    """A slice of a device's batch.

    Args:
        leaves: of the tree.
        rows: the weight: the number of samples, 0 of an idle slice, and 1 if there are none to
            count.
        samples: the number of samples, a neighbour's included; None: unknown.
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
        has_samples: for each leaf, True if it has a row per sample. Every slice gets the others in
            full.
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
        """Return the weight of all slices of all devices together.

        Devices along axes that shard other dims than the samples have equal samples, and each of
        them counts.
        """
        n = prod(self.mesh.shape[axis] for axis in self.axes)
        if self.cut is None:
            return n * count
        return self.cut.length * n // self.cut.parts

    def check(self, count: int) -> None:
        """Raise if the batch cannot be split into `count` slices per device."""
        if count > 1 and self.cut is None:
            raise ValueError(
                f"each device's part of the batch must be split into {count} slices, but has no "
                "tensor whose first dim is sharded by its spec, and tensors of several lengths or "
                "none. Name those with samples by an axis of one device if there is no other: "
                'batch=P("data").'
            )
        if self.samples == 0:
            raise ValueError("the batch has no samples. Leave it out.")

    def slices(self, device_index: int, count: int, *, is_copied: bool = False) -> list[Slice]:
        """Split the shards of the local device at an index.

        `is_copied`: copy each slice, since kernels round differently where their inputs are aligned
        differently.
        """
        cut = self.cut
        shards = [column[device_index] for column in self.columns]
        if count == 1 and not is_copied and cut is not None and cut.is_even:
            rows = cut.length // cut.parts
            return [Slice(shards, rows, rows)]

        def for_slice(shard: Any) -> Any:
            # All slices get this shard, and a write to it in one must not change the next.
            return lazy_copy(shard) if count > 1 else shard

        if cut is None:
            return [Slice([*map(for_slice, shards)], 1, None) for _ in range(count)]
        slices: list[Slice] = []
        ranges = cut.ranges(self.mesh, self.devices[device_index], count)
        first_sample = ranges[0][0]
        for start, stop in ranges:
            leaves: list[Any] = []
            for shard, has_samples in zip(shards, self.has_samples, strict=True):
                if not has_samples:
                    leaves.append(for_slice(shard))
                    continue
                local_range = (start - first_sample, stop - first_sample)
                first_row, end_row = filled(local_range, len(shard))
                samples = shard[first_row:end_row]
                leaves.append(samples.clone() if is_copied else samples)
            rows = stop - start
            slices.append(Slice(leaves, rows, max(rows, 1)))
        return slices

    def tree(self, leaves: list[Any], dtype: torch.dtype | None = None) -> PyTree:
        """Put leaves together again, floating ones in a dtype."""
        if dtype is None:
            return unflatten(self.structure, leaves)
        cast_leaves: list[Any] = []
        for leaf in leaves:
            is_floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
            cast_leaves.append(leaf.to(dtype) if is_floating else leaf)
        return unflatten(self.structure, cast_leaves)


@dataclass(frozen=True)
class BatchPart:
    """A batch of which each device has its own part, as from a loader."""

    tree: PyTree
    cut: Cut

    def on(self, mesh: Mesh, *, split: bool = True) -> Batch:
        """Return the batch in its layout.

        `split`: into slices; a batch that is not may have any objects, which are passed as they
        are.
        """
        paths, leaves, structure = flatten_with_paths(self.tree, none_is_leaf=True)
        rows = self.cut.rows(mesh)
        has_samples = [rows_of(leaf) == rows for leaf in leaves]
        shapes: list[tuple[int, ...]] = []
        if split:
            self._validate_rows(paths, leaves, rows)
            leaves = [self._in_device_memory(leaf, mesh) for leaf in leaves]
            shapes = [self._global_shape(leaf) for leaf in leaves if isinstance(leaf, Tensor)]

        is_cut = split or any(has_samples)
        return Batch(
            mesh,
            devices=local_devices(mesh),
            columns=[(leaf,) for leaf in leaves],
            cut=self.cut if is_cut else None,
            has_samples=has_samples,
            structure=structure,
            axes=self.cut.axes,
            shapes=tuple(shapes),
        )

    def _validate_rows(self, paths: Sequence[str], leaves: Sequence[Any], rows: int) -> None:
        """Raise if a leaf has neither the device's number of rows nor none."""
        for path, leaf in zip(paths, leaves, strict=True):
            _validate_leaf(leaf)
            if rows_of(leaf) not in (None, rows):
                name = path_text(path) or "it"
                raise ValueError(
                    f"this device has {rows} of the batch's {self.cut.length} samples from the "
                    f"loader, but {name} is {rows_of(leaf)} long. Give tensors with a row "
                    "per sample apart from those that all devices get in full."
                )

    def _in_device_memory(self, leaf: Any, mesh: Mesh) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return lazy_copy(in_memory(leaf, mesh, "device"))

    def _global_shape(self, leaf: Tensor) -> tuple[int, ...]:
        if leaf.ndim == 0:
            return ()
        return (self.cut.length, *leaf.shape[1:])


def shard_batch(batch: PyTree, specs: PyTree, mesh: Mesh) -> Batch:
    """Shard a batch on a mesh by a P, or a prefix tree of Ps."""
    if isinstance(batch, BatchPart):
        return batch.on(mesh)
    leaves, structure = flatten(batch, none_is_leaf=True)
    leaf_specs = _leaf_specs(batch, specs, leaves, structure)

    cuts: list[Cut | None] = []
    columns: list[tuple[Any, ...]] = []
    for index, (leaf, spec) in enumerate(zip(leaves, leaf_specs, strict=True)):
        try:
            cut, shards = _shard_leaf(leaf, spec, mesh)
        except (TypeError, ValueError) as error:
            path = paths_of(structure)[index]
            subject = f"batch: {path_text(path)}" if path else "batch"
            raise type(error)(f"{subject}: {error}") from None
        cuts.append(cut)
        columns.append(shards)
    if not any(cuts):
        cuts = _unsharded_cuts(columns)

    cut = _common_cut(cuts)
    axes = _sharding_axes(cut, leaf_specs, mesh)
    shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor | Sharded)]
    return Batch(
        mesh,
        devices=local_devices(mesh),
        columns=columns,
        cut=cut,
        has_samples=[cut is not None for cut in cuts],
        structure=structure,
        axes=axes,
        shapes=tuple(shapes),
        global_leaves=leaves,
    )


def _leaf_specs(
    batch: PyTree, specs: PyTree, leaves: Sequence[Any], structure: Structure
) -> list[Any]:
    """Return the spec of each leaf."""
    if isinstance(specs, P):
        return [specs] * len(leaves)
    try:
        return broadcast_prefix(specs, batch, none_is_leaf=True)
    except ValueError:
        raise ValueError(
            f"the batch specs {specs!r} are no prefix of the batch {structure}."
        ) from None


def _unsharded_cuts(columns: Sequence[tuple[Any, ...]]) -> list[Cut | None]:
    """Return the cuts of leaves of which no axis shards samples.

    Every device has the samples of all tensors, if these have one length. Else their samples are
    unknown.
    """
    lengths = [rows_of(shards[0]) for shards in columns]
    distinct_lengths = {*lengths} - {None}
    if len(distinct_lengths) != 1:
        return [None] * len(columns)
    return [None if length is None else Cut((), 1, length) for length in lengths]


def _common_cut(cuts: Sequence[Cut | None]) -> Cut | None:
    """Return the cut of all leaves with samples, or raise with those that differ."""
    distinct_cuts = sorted({cut for cut in cuts if cut is not None})
    if not distinct_cuts:
        return None
    if len(distinct_cuts) > 1:
        sizes = ", ".join(f"{cut.length} over {' x '.join(cut.axes)}" for cut in distinct_cuts)
        raise ValueError(
            f"the tensors of a batch must have the same samples; got {sizes}. "
            "Replicate the others: P()."
        )
    return distinct_cuts[0]


def _sharding_axes(cut: Cut | None, leaf_specs: Sequence[Any], mesh: Mesh) -> tuple[str, ...]:
    """Return the axes that shard anything: those of the samples first, in their order."""
    sample_axes = () if cut is None else cut.axes
    spec_axes: set[str] = set()
    for spec in leaf_specs:
        if isinstance(spec, P):
            spec_axes.update(spec.axes)
    spec_axes.difference_update(sample_axes)
    return (*sample_axes, *[axis for axis in mesh.axis_names if axis in spec_axes])


def _validate_leaf(leaf: Any) -> None:
    """Raise if a leaf is no tensor but has some, whose samples cannot be split."""
    if isinstance(leaf, Tensor | Sharded):
        return
    attributes = getattr(leaf, "__dict__", {}).values()
    has_tensors = any(isinstance(value, Tensor) for value in attributes)
    if getattr(leaf, "ndim", 0) or has_tensors:
        raise TypeError(
            f"a {type(leaf).__name__} is not sharded. Write torch.as_tensor(...) around an array. "
            "Else give the object's tensors, or P() for it in the batch's specs: all devices get "
            "all of it."
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
    if isinstance(leaf, Sharded):
        if is_even:
            return cut, _resharded(leaf, layout).shards
        leaf = full_values(leaf)

    # `put_equal` records a tensor that requires a gradient as one node for all devices, and raises
    # for one that is not dense. It cannot shard uneven samples, which no layout has.
    is_plain = not leaf.requires_grad and is_dense(leaf)
    if cut is not None and mesh.size > 1 and (not is_even or is_plain):
        return cut, _shard_samples(leaf, cut, layout)
    is_divided = mesh.size > 1 and (layout.spec.is_flat or layout.spec.axes)
    if is_divided or not is_plain or not leaf.is_contiguous():
        return cut, put_equal(leaf, layout, may_alias=True).shards

    # All devices get the same tensor: they only read it, as a rule, so that copies are lazy.
    source = in_memory(leaf, mesh, "device")
    copies: list[Tensor] = []
    for device in local_devices(mesh):
        with owned_by(mesh.devices[device]):
            copies.append(lazy_copy(source))
    return cut, tuple(copies)


def _resharded(leaf: Sharded, layout: Layout) -> Sharded:
    if leaf.layout == layout:
        return leaf
    return put_equal(leaf, layout, may_alias=True)


def _shard_samples(x: Tensor, cut: Cut, layout: Layout) -> tuple[Tensor, ...]:
    """Return each device's samples of a tensor; a layout may shard the other dims too."""
    mesh = layout.mesh
    validate_leaf(x, layout)  # a sparse or nested tensor has no views of its samples
    shards: list[Tensor] = []
    for device in local_devices(mesh):
        shard = _device_samples(x, cut, layout, device)
        with owned_by(mesh.devices[device]):
            shards.append(in_memory(shard.clone(), mesh, "device"))
    return tuple(shards)


def _device_samples(x: Tensor, cut: Cut, layout: Layout, device: int) -> Tensor:
    """Return a view of a global tensor: the samples of one device."""
    (samples,) = cut.ranges(layout.mesh, device, 1)
    start, stop = filled(samples, cut.length)
    shard = x[start:stop]
    if layout.spec.split_axes == cut.axes:
        return shard
    _, *other_ranges = layout.ranges(x.shape, device)
    other_slices = [slice(*bounds) for bounds in other_ranges]
    return shard[(slice(None), *other_slices)]


def device_shard(x: Tensor, spec: P, mesh: Mesh, device: int) -> Tensor:
    """Return a view of a tensor of the global batch: the shard of one device."""
    cut, layout = _cut_and_layout(mesh, spec, tuple(x.shape))
    if cut is not None:
        return _device_samples(x, cut, layout, device)
    return shard_of(x, layout, device)


@lru_cache(maxsize=1024)
def _cut_and_layout(mesh: Mesh, spec: P, shape: tuple[int, ...]) -> tuple[Cut | None, Layout]:
    """Return the sharding of a tensor's samples, and the layout of the tensor.

    Uneven samples are in balanced ranges, which no layout has: then it shards the other dims alone.
    """
    layout = Layout(mesh, spec)
    first, *other_dims = spec.dims(len(shape)) or [()]
    cut = None
    if first:
        parts = prod(mesh.shape[axis] for axis in first)
        cut = Cut(first, parts, shape[0])
        if not cut.is_even:
            layout = Layout(mesh, P(None, *other_dims))
    layout.check(shape)
    return cut, layout


def rows_of(leaf: Any) -> int | None:
    """Return the length of a tensor's first dim; None if it has no dims, or is no tensor.

    >>> import torch
    >>> rows_of(torch.zeros(3, 2)), rows_of(torch.tensor(1.0)), rows_of("a")
    (3, None, None)
    """
    if not isinstance(leaf, Tensor | Sharded) or not len(leaf.shape):
        return None
    return leaf.shape[0]
