"""Buffers: state of a loss function that is no parameter, such as BatchNorm's running statistics.

They are replicated. Every slice of a step starts with the same ones, and the next step's are the
mean over all slices that wrote to them, weighted as the loss is. So a step is one update of the
buffers, on any mesh and with any slices. A buffer that no slice writes to (a mask, a table) is not
sent.

    device 0  n = 5  mean (3,)             n     5      of all that wrote to it, rounded
    device 1  n = 5            mask (2,)   mean  (3,)   of device 0
    device 2  n = 5            mask (4,)   mask         as before, with a warning: shapes differ

Each device adds one flag per buffer to the numbers that are summed anyway; then only written
buffers are summed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.errors import LayoutError
from fshard.mesh.layout import Layout, Mesh, PyTree, flatten_with_paths, unflatten
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.reshard.device_put import put_equal
from fshard.mesh.spmd.scope import Group
from fshard.source import Site
from fshard.transforms.agreement import difference, reduce_rows, tree_sum
from fshard.transforms.patterns import titled


class Written(NamedTuple):
    """The buffers that one slice wrote to, by path, and the weight of the slice."""

    weight: float
    changed: Mapping[str, Tensor]


class BufferEntry(NamedTuple):
    """The path, dtype and shape of a buffer."""

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def entry_of(path: str, x: Tensor | float) -> BufferEntry:
    """Return the entry of a tensor or a number."""
    x = x if isinstance(x, Tensor) else torch.full((), x)
    return BufferEntry(path, x.dtype, tuple(x.shape))


class Buffers:
    """The buffers that a step is given.

    They are replicated unless `layout_of` returns other layouts by path.
    """

    def __init__(
        self, tree: PyTree, mesh: Mesh, layout_of: Callable[[str], Layout] | None = None
    ) -> None:
        paths, leaves, self._structure = flatten_with_paths(tree, none_is_leaf=True)
        self._inputs = dict(zip(paths, leaves, strict=True))
        self._layouts: dict[str, Layout] = {}
        self._columns: list[Sequence[Any]] = []  # of each buffer, the value on each local device
        self.paths: list[str] = []  # of those that can be averaged
        for path, leaf in self._inputs.items():
            layout = Layout(mesh) if layout_of is None else layout_of(path)
            if isinstance(leaf, Sharded) and (leaf.mesh, leaf.spec) != (mesh, layout.spec):
                name = titled(path, "the buffer")
                raise LayoutError(
                    f"buffers must be replicated on {mesh}; {name} has {leaf.spec} on {leaf.mesh}. "
                    "Replicate them, P(), or give plain tensors."
                )
            self._layouts[path] = layout
            if isinstance(leaf, Tensor | Sharded | int | float):
                self.paths.append(path)
            if isinstance(leaf, Tensor):
                leaf = put_equal(leaf, layout)
            if isinstance(leaf, Sharded):
                self._columns.append(leaf.shards)
            else:
                self._columns.append((leaf,) * mesh.size)

    def part(self, index: int) -> PyTree:
        """Return the buffers of the local device at `index`."""
        return unflatten(self._structure, [column[index] for column in self._columns])

    def before(self, index: int) -> dict[str, Any]:
        """Return the same by path."""
        values = [column[index] for column in self._columns]
        return dict(zip(self._inputs, values, strict=True))

    def changed(self, index: int, tree: PyTree, device: torch.device) -> dict[str, Tensor]:
        """Return the buffers of a returned tree that are not the given ones, by path.

        Numbers are returned as tensors on a device.
        """
        if not self._inputs and type(tree) is tuple and not tree:
            return {}
        paths, leaves, _ = flatten_with_paths(tree, none_is_leaf=True)
        before = self.before(index)
        for path in sorted(before.keys() ^ {*paths}):
            error = "is missing" if path in before else "was not given"
            raise ValueError(
                "the loss function must return the buffers that it was given; "
                f"{titled(path, 'the buffer')} {error}."
            )
        written: dict[str, Tensor] = {}
        for path, leaf in zip(paths, leaves, strict=True):
            if leaf is not before[path]:
                written[path] = number_of(path, leaf, device)
        return written

    def after(self, changed: Sequence[Mapping[str, Tensor]]) -> PyTree:
        """Return the buffers for the next step, in the layouts of the given ones.

        `changed`: the buffers that each local device changed.
        """
        leaves = {**self._inputs}
        changed_paths: set[str] = set()
        for buffers in changed:
            changed_paths.update(buffers)
        for path in changed_paths:
            before = self._inputs[path]
            if not isinstance(before, Sharded):
                leaves[path] = changed[0][path]
                continue
            shards: list[Tensor] = []
            for buffers, shard in zip(changed, before.shards, strict=True):
                shards.append(buffers.get(path, shard))
            # A replicated buffer may change its shape. Of one at a coordinate, most devices have
            # no values, which show no shape.
            layout = self._layouts[path]
            shape = before.shape if layout.spec.at else tuple(shards[0].shape)
            leaves[path] = Sharded(shape, layout, tuple(shards))
        return unflatten(self._structure, [*leaves.values()])


@lru_cache(maxsize=64)
def no_buffers(mesh: Mesh) -> Buffers:
    """Return the buffers of a loss function that has none."""
    return Buffers((), mesh)


def number_of(path: str, x: Any, device: torch.device) -> Tensor:
    """Return a buffer as a tensor."""
    if isinstance(x, Tensor):
        return x
    if isinstance(x, int | float):
        return torch.full((), x, device=device)
    raise TypeError(
        f"{titled(path, 'the buffer')} must be a tensor or a number to be averaged; "
        f"got {type(x).__name__}."
    )


# -- the mean over slices and devices --------------------------------------------------------------


def written_paths(slices: Iterable[Written]) -> set[str]:
    """Return the buffers that slices of non-zero weight have written to."""
    paths: set[str] = set()
    for written in slices:
        if written.weight:
            paths.update(written.changed)
    return paths


def irregular(slices: Iterable[Written], before: Mapping[str, Any]) -> list[BufferEntry]:
    """Return the buffers that slices wrote with another shape or dtype, in a fixed order."""
    entries: set[BufferEntry] = set()
    for written in slices:
        if not written.weight:
            continue
        for path, value in written.changed.items():
            entry = entry_of(path, value)
            if entry != entry_of(path, before[path]):
                entries.add(entry)
    return sorted(entries, key=repr)


def irregular_difference(
    slices: Sequence[Written], before: Mapping[str, Any], group: Group | None
) -> dict[str, float]:
    """Return the difference of the irregular buffers.

    It is 0 if all devices have the same, each of one shape.
    """
    entries = irregular(slices, before)
    has_several_shapes = len({entry.path for entry in entries}) < len(entries)
    return {"buffers": has_several_shapes + difference(entries, group)}


def flags(paths: Sequence[str], written: Collection[str]) -> list[float]:
    """Return 1 for each of the paths that was written to, else 0."""
    return [float(path in written) for path in paths]


def entries_to_average(
    paths: Sequence[str],
    flags: Sequence[float],
    slices: Sequence[Written],
    before: Mapping[str, Any],
    agreed: bool,
) -> list[BufferEntry]:
    """Return the buffers to average.

    Those with a flag, and irregular ones if all devices have the same of them.

    Args:
        paths: of the given buffers.
        flags: number of devices that wrote to each.
        slices: the writes of this device's slices.
        before: the buffers before the step.
        agreed: True if all devices have the same irregular ones, each of one shape.
    """
    irregular_entries = irregular(slices, before)
    irregular_paths = {entry.path for entry in irregular_entries}
    if not agreed:
        names = sorted([titled(path, "the buffer") for path in irregular_paths])
        warnings.warn(
            f"buffers {', '.join(names) or 'of other devices'} have different shapes or dtypes on "
            "different devices or slices, so they have no mean and are as before the step. That is "
            "right for a buffer that can be computed again, such as a mask.",
            stacklevel=2,
        )
        irregular_entries = []
    entries: list[BufferEntry] = []
    for path, writers in zip(paths, flags, strict=True):
        if writers and path not in irregular_paths:
            entries.append(entry_of(path, before[path]))
    return entries + irregular_entries


def averaged(
    slices: Sequence[Written],
    entries: Sequence[BufferEntry],
    group: Group | None,
    before: Mapping[str, Any],
    device: torch.device,
    site: Site,
) -> dict[str, Tensor]:
    """Return the means of entries over all slices that wrote to them.

    A collective of the group, with the same entries on all devices; `before` are those that the
    slices began with.
    """
    if not entries:
        return {}
    bases = _integer_bases(entries, before)
    with torch.no_grad():
        sums = tree_sum([_weighted_row(written, entries, bases, device) for written in slices])
    (sums,) = reduce_rows((sums,), group, site)
    lengths = [_numel(entry) for entry in entries]
    *totals, counts = sums.split([*lengths, len(entries)])

    means: dict[str, Tensor] = {}
    for (path, dtype, shape), total, count in zip(entries, totals, counts, strict=True):
        mean = total / count
        if dtype.is_complex:
            mean = torch.view_as_complex(mean.reshape(*shape, 2))
        elif not dtype.is_floating_point:
            mean = mean.round()
        values = [written.changed[path] for written in slices if path in written.changed]
        like = values[0] if values else before.get(path)
        memory = like.device if isinstance(like, Tensor) else device
        mean = mean.reshape(shape).to(memory, dtype)
        means[path] = bases[path] + mean if path in bases else mean
    return means


def _integer_bases(entries: Sequence[BufferEntry], before: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the values before the step of integer buffers.

    These are averaged as differences from them, so that large ones keep all digits: float64 has 53
    bits.
    """
    bases: dict[str, Tensor] = {}
    for entry in entries:
        value = before.get(entry.path)
        if entry.dtype is torch.int64 and isinstance(value, Tensor):
            if entry_of(entry.path, value) == entry:
                bases[entry.path] = value
    return bases


def _weighted_row(
    written: Written,
    entries: Sequence[BufferEntry],
    bases: Mapping[str, Tensor],
    device: torch.device,
) -> Tensor:
    """Return all numbers of a slice, times its weight, and for each entry the weight itself."""
    values: list[Tensor] = []
    weights: list[float] = []
    for entry in entries:
        value = written.changed.get(entry.path)
        if value is None or not written.weight:
            weights.append(0.0)
            values.append(torch.zeros(_numel(entry), dtype=torch.float64, device=device))
            continue
        weights.append(written.weight)
        if entry.path in bases:
            value = value - bases[entry.path]
        if value.is_complex():
            value = torch.view_as_real(value.resolve_conj())
        values.append(value.to(device, torch.float64).reshape(-1) * written.weight)
    return torch.cat([*values, torch.tensor(weights, dtype=torch.float64, device=device)])


def _numel(entry: BufferEntry) -> int:
    """Return the count of real numbers of an entry."""
    count = torch.Size(entry.shape).numel()
    return 2 * count if entry.dtype.is_complex else count
