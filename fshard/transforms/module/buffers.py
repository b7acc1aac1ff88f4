"""Buffers: state of a loss function that is no parameter, such as the running statistics of BatchNorm.

They are replicated. Every slice of a step starts with the same ones, and the next step's are the mean over all slices
that wrote to them, weighted as the loss is. So a step is one update of the buffers, on any mesh and with any slices. A
buffer that no slice writes to (a mask, a table) is not sent.

    device 0    n = 5   mean (3,)               n     5        of all that wrote to it; integers are rounded
    device 1    n = 5              mask (2,)    mean  (3,)     of device 0
    device 2    n = 5              mask (4,)    mask           as before the step, with a warning: shapes differ

Each device adds one flag per buffer to the numbers that are summed anyway; then only written buffers are summed.
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
    """The buffers that a step is given, replicated unless `layout_of` returns other layouts by path."""

    def __init__(
        self, tree: PyTree, mesh: Mesh, layout_of: Callable[[str], Layout] | None = None
    ) -> None:
        paths, leaves, self._structure = flatten_with_paths(tree, none_is_leaf=True)
        self._layouts = {
            path: Layout(mesh) if layout_of is None else layout_of(path) for path in paths
        }
        self._inputs = dict(zip(paths, leaves, strict=True))
        columns: list[Sequence[Any]] = []
        for path, x in self._inputs.items():
            if isinstance(x, Sharded) and (x.mesh, x.spec) != (mesh, self._layouts[path].spec):
                name = titled(path, "the buffer")
                raise LayoutError(
                    f"buffers must be replicated on {mesh}; {name} has {x.spec} on {x.mesh}. Replicate them, P(), or "
                    "give plain tensors."
                )
            x = put_equal(x, self._layouts[path]) if isinstance(x, Tensor) else x
            columns.append(x.shards if isinstance(x, Sharded) else (x,) * mesh.size)
        self._columns = columns
        self.paths = [
            path
            for path, x in self._inputs.items()
            if isinstance(x, Tensor | Sharded | int | float)
        ]

    def part(self, index: int) -> PyTree:
        """Return the buffers of the local device at `index`."""
        return unflatten(self._structure, [column[index] for column in self._columns])

    def before(self, index: int) -> dict[str, Any]:
        """Return the same by path."""
        return {
            path: column[index] for path, column in zip(self._inputs, self._columns, strict=True)
        }

    def changed(self, index: int, tree: PyTree, device: torch.device) -> dict[str, Tensor]:
        """Return the buffers of a returned tree that are not the given ones, by path, numbers as tensors on a device."""
        if not self._inputs and type(tree) is tuple and not tree:
            return {}
        paths, leaves, _ = flatten_with_paths(tree, none_is_leaf=True)
        before = self.before(index)
        for path in sorted(before.keys() ^ {*paths}):
            error = f"{titled(path, 'the buffer')} {'is missing' if path in before else 'was not given'}"
            raise ValueError(
                f"the loss function must return the buffers that it was given; {error}."
            )
        return {
            path: number_of(path, x, device)
            for path, x in zip(paths, leaves, strict=True)
            if x is not before[path]
        }

    def after(self, changed: Sequence[Mapping[str, Tensor]]) -> PyTree:
        """Return the buffers for the next step, in the layouts of the given ones, from those that local devices changed."""
        leaves = {**self._inputs}
        for path in {path for buffers in changed for path in buffers}:
            x, layout = self._inputs[path], self._layouts[path]
            if isinstance(x, Sharded):
                shards = tuple(
                    buffers.get(path, shard)
                    for buffers, shard in zip(changed, x.shards, strict=True)
                )
                leaves[path] = Sharded(
                    x.shape if layout.spec.at else tuple(shards[0].shape), layout, shards
                )
            else:
                leaves[path] = changed[0][path]
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
        f"{titled(path, 'the buffer')} must be a tensor or a number to be averaged; got {type(x).__name__}."
    )


# -- the mean over slices and devices -------------------------------------------------------------------------------


def written_paths(slices: Iterable[Written]) -> set[str]:
    """Return the buffers that slices of non-zero weight have written to."""
    return {path for written in slices if written.weight for path in written.changed}


def irregular(slices: Iterable[Written], before: Mapping[str, Any]) -> list[BufferEntry]:
    """Return the buffers that slices wrote with another shape or dtype, in a fixed order."""
    entries = {
        entry_of(path, x)
        for written in slices
        if written.weight
        for path, x in written.changed.items()
    }
    return sorted(
        (entry for entry in entries if entry_of(entry.path, before[entry.path]) != entry), key=repr
    )


def irregular_difference(
    slices: Sequence[Written], before: Mapping[str, Any], group: Group | None
) -> dict[str, float]:
    """Return the difference of the irregular buffers: not 0 unless all devices have the same, each of one shape."""
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
    """Return the buffers to average: those with a flag, and irregular ones if all devices have the same of them.

    Args:
        paths: of the given buffers.
        flags: number of devices that wrote to each.
        slices: the writes of this device's slices.
        before: the buffers before the step.
        agreed: True if all devices have the same irregular ones, each of one shape.
    """
    entries = irregular(slices, before)
    irregular_paths = {entry.path for entry in entries}
    if not agreed:
        names = (
            ", ".join(sorted(titled(path, "the buffer") for path in irregular_paths))
            or "of other devices"
        )
        warnings.warn(
            f"buffers {names} have different shapes or dtypes on different devices or slices, so they have no mean and are "
            "as before the step. That is right for a buffer that can be computed again, such as a mask.",
            stacklevel=2,
        )
        entries = []
    flagged = [
        path
        for path, count in zip(paths, flags, strict=True)
        if count and path not in irregular_paths
    ]
    return [entry_of(path, before[path]) for path in flagged] + entries


def averaged(
    slices: Sequence[Written],
    entries: Sequence[BufferEntry],
    group: Group | None,
    before: Mapping[str, Any],
    device: torch.device,
    site: Site,
) -> dict[str, Tensor]:
    """Return the means of entries over all slices that wrote to them.

    A collective of the group, with the same entries on all devices; `before` are those that the slices began with.
    """
    if not entries:
        return {}
    with torch.no_grad():
        # Integers are averaged as differences from those before, so that large ones keep all digits.
        integers = [
            (entry, before.get(entry.path)) for entry in entries if entry.dtype is torch.int64
        ]
        bases = {
            entry.path: x
            for entry, x in integers
            if isinstance(x, Tensor) and entry_of(entry.path, x) == entry
        }
        sums = tree_sum([_weighted_row(written, entries, bases, device) for written in slices])
    (sums,) = reduce_rows((sums,), group, site)
    *totals, counts = sums.split([*(_numel(entry) for entry in entries), len(entries)])
    result: dict[str, Tensor] = {}
    for (path, dtype, shape), total, count in zip(entries, totals, counts, strict=True):
        x = total / count
        if dtype.is_complex:
            x = torch.view_as_complex(x.reshape(*shape, 2))
        elif not dtype.is_floating_point:
            x = x.round()
        like = next(
            (written.changed[path] for written in slices if path in written.changed),
            before.get(path),
        )
        x = x.reshape(shape).to(like.device if isinstance(like, Tensor) else device, dtype)
        result[path] = bases[path] + x if path in bases else x
    return result


def _weighted_row(
    written: Written,
    entries: Sequence[BufferEntry],
    bases: Mapping[str, Tensor],
    device: torch.device,
) -> Tensor:
    """Return all numbers of a slice, times its weight, and for each entry the weight itself."""
    values, weights = list[Tensor](), list[float]()
    for entry in entries:
        x = written.changed.get(entry.path) if written.weight else None
        weights.append(0.0 if x is None else written.weight)
        if x is None:
            values.append(torch.zeros(_numel(entry), dtype=torch.float64, device=device))
            continue
        x = x - bases[entry.path] if entry.path in bases else x
        numbers = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
        values.append(numbers.to(device, torch.float64).reshape(-1) * written.weight)
    return torch.cat([*values, torch.tensor(weights, dtype=torch.float64, device=device)])


def _numel(entry: BufferEntry) -> int:
    return torch.Size(entry.shape).numel() * (2 if entry.dtype.is_complex else 1)
