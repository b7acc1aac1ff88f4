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
from fshard.transforms.patterns import named, parts_of


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

    def __init__(self, tree: PyTree, mesh: Mesh, layout_of: Callable[[str], Layout] | None = None) -> None:
        paths, leaves, self._structure = flatten_with_paths(tree, none_is_leaf=True)
        self._layouts = {path: Layout(mesh) if layout_of is None else layout_of(path) for path in paths}
        wrong = [
            f"{named(parts_of(path))} has {x.spec} on {x.mesh}"
            for path, x in zip(paths, leaves, strict=True)
            if isinstance(x, Sharded) and (x.mesh, x.spec) != (mesh, self._layouts[path].spec)
        ]
        if wrong:
            raise LayoutError(
                f"buffers must be replicated on {mesh}; {'; '.join(wrong)}. Replicate them, P(), or give plain tensors."
            )
        self._given = dict(zip(paths, leaves, strict=True))
        placed = [put_equal(x, self._layouts[path]) if isinstance(x, Tensor) else x for path, x in self._given.items()]
        self._columns = [x.shards if isinstance(x, Sharded) else (x,) * mesh.size for x in placed]
        self.paths = [path for path, x in self._given.items() if isinstance(x, Tensor | Sharded | int | float)]

    def part(self, place: int) -> PyTree:
        """Return the buffers of the device at index `place`."""
        return unflatten(self._structure, [column[place] for column in self._columns])

    def before(self, place: int) -> dict[str, Any]:
        """Return the same by path."""
        return {path: column[place] for path, column in zip(self._given, self._columns, strict=True)}

    def changed(self, place: int, tree: PyTree, near: torch.device) -> dict[str, Tensor]:
        """Return the buffers of a returned tree that are not the given ones, by path, numbers as tensors near to it."""
        if not self._given and type(tree) is tuple and not tree:
            return {}
        paths, leaves, _ = flatten_with_paths(tree, none_is_leaf=True)
        before = self.before(place)
        for path in sorted(before.keys() ^ {*paths}):
            error = f"{named(parts_of(path))} {'is missing' if path in before else 'was not given'}"
            raise ValueError(f"the loss function must return the buffers that it was given; {error}.")
        return {path: number_of(path, x, near) for path, x in zip(paths, leaves, strict=True) if x is not before[path]}

    def after(self, changed: Sequence[Mapping[str, Tensor]]) -> PyTree:
        """Return the buffers for the next step, in the layouts of the given ones, from those of each device at hand."""
        if not any(changed):
            return unflatten(self._structure, [*self._given.values()])
        return unflatten(self._structure, [self._next(path, x, changed) for path, x in self._given.items()])

    def _next(self, path: str, given: Any, changed: Sequence[Mapping[str, Tensor]]) -> Any:
        if not any(path in one for one in changed):
            return given
        if not isinstance(given, Sharded):
            return changed[0][path]
        shards = tuple(one.get(path, x) for one, x in zip(changed, given.shards, strict=True))
        layout = self._layouts[path]
        shape = given.shape if layout.spec.at else tuple(shards[0].shape)
        return Sharded(shape, layout, shards)


@lru_cache(maxsize=64)
def no_buffers(mesh: Mesh) -> Buffers:
    """Return the buffers of a loss function that has none."""
    return Buffers((), mesh)


def number_of(path: str, x: Any, near: torch.device) -> Tensor:
    """Return a buffer as a tensor."""
    if isinstance(x, Tensor):
        return x
    if isinstance(x, int | float):
        return torch.full((), x, device=near)
    raise TypeError(f"{named(parts_of(path))} must be a tensor or a number to be averaged; got {type(x).__name__}.")


# -- the mean over slices and devices -------------------------------------------------------------------------------


def written_paths(slices: Iterable[Written]) -> set[str]:
    """Return the buffers that slices of non-zero weight have written to."""
    return {path for one in slices if one.weight for path in one.changed}


def irregular(slices: Iterable[Written], given: Mapping[str, Any]) -> list[BufferEntry]:
    """Return the buffers that slices wrote with another shape or dtype, in a fixed order."""
    found = {entry_of(path, x) for one in slices if one.weight for path, x in one.changed.items()}
    return sorted((entry for entry in found if entry_of(entry.path, given[entry.path]) != entry), key=repr)


def irregular_difference(slices: Sequence[Written], given: Mapping[str, Any], group: Group | None) -> dict[str, float]:
    """Return the difference of the irregular buffers: not 0 unless all devices have the same, each of one shape."""
    entries = irregular(slices, given)
    has_several_shapes = len({entry.path for entry in entries}) < len(entries)
    return {"buffers": has_several_shapes + difference(entries, group)}


def flags(paths: Sequence[str], written: Collection[str]) -> list[float]:
    """Return 1 for each of the paths that was written to, else 0."""
    return [float(path in written) for path in paths]


def entries_to_average(
    paths: Sequence[str], flags: Sequence[float], slices: Sequence[Written], given: Mapping[str, Any], agreed: bool
) -> list[BufferEntry]:
    """Return the buffers to average: those with a flag, and irregular ones if all devices have the same of them.

    Args:
        paths: of the given buffers.
        flags: number of devices that wrote to each.
        slices: the writes of this device's slices.
        given: the buffers before the step.
        agreed: True if all devices have the same irregular ones, each of one shape.
    """
    others = irregular(slices, given)
    strange = {entry.path for entry in others}
    if not agreed:
        names = ", ".join(sorted(named(parts_of(path)) for path in strange)) or "of other devices"
        warnings.warn(
            f"buffers {names} have different shapes or dtypes on different devices or slices, so they have no mean and are "
            "as before the step. That is right for a buffer that can be computed again, such as a mask.",
            stacklevel=2,
        )
        others = []
    regular = [
        entry_of(path, given[path]) for path, times in zip(paths, flags, strict=True) if times and path not in strange
    ]
    return regular + others


def averaged(
    slices: Sequence[Written],
    entries: Sequence[BufferEntry],
    group: Group | None,
    given: Mapping[str, Any],
    near: torch.device,
    site: Site,
) -> dict[str, Tensor]:
    """Return the means of entries over all slices that wrote to them.

    A collective of the group, with the same entries on all devices; `given` are those that the slices began with.
    """
    if not entries:
        return {}
    with torch.no_grad():
        begun = {entry.path: given[entry.path] for entry in entries if _counts_from(given.get(entry.path), entry)}
        sums = tree_sum([_row(one, entries, begun, near) for one in slices])
    (sums,) = reduce_rows((sums,), group, site)
    *totals, counts = sums.split([*(_count(entry) for entry in entries), len(entries)])
    result: dict[str, Tensor] = {}
    for entry, total, count in zip(entries, totals, counts, strict=True):
        x = total / count
        own = next((one.changed[entry.path] for one in slices if entry.path in one.changed), given.get(entry.path))
        place = own.device if isinstance(own, Tensor) else near
        if entry.dtype.is_complex:
            x = torch.view_as_complex(x.reshape(*entry.shape, 2))
        elif not entry.dtype.is_floating_point:
            x = x.round()
        x = x.reshape(entry.shape).to(place, entry.dtype)
        result[entry.path] = begun[entry.path] + x if entry.path in begun else x
    return result


def _counts_from(given: Any, entry: BufferEntry) -> bool:
    """Return True if integers are averaged as differences from those before: so large ones keep all digits."""
    return isinstance(given, Tensor) and given.dtype is torch.int64 and entry_of(entry.path, given) == entry


def _row(one: Written, entries: Sequence[BufferEntry], begun: Mapping[str, Tensor], near: torch.device) -> Tensor:
    """Return all numbers of a slice, times its weight, and for each entry the weight itself."""
    wrote = one.changed if one.weight else {}
    weights = [one.weight * (entry.path in wrote) for entry in entries]

    def numbers(path: str) -> Tensor:
        x = wrote[path] - begun[path] if path in begun else wrote[path]
        return (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).to(near, torch.float64).reshape(-1)

    values = [
        numbers(entry.path) * weight if weight else torch.zeros(_count(entry), dtype=torch.float64, device=near)
        for entry, weight in zip(entries, weights, strict=True)
    ]
    return torch.cat([*values, torch.tensor(weights, dtype=torch.float64, device=near)])


def _count(entry: BufferEntry) -> int:
    return torch.Size(entry.shape).numel() * (2 if entry.dtype.is_complex else 1)
