"""`TreeSnapshot`: the share that each device writes of a tree, and the index, which all devices compute alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fshard.checkpoint.division import ArrayEntry
from fshard.checkpoint.files import digest_of
from fshard.checkpoint.index import Index, storable, validate_storable
from fshard.checkpoint.names import NamedLeaf, is_array, is_object, leaves_of, opened, stored_parts, validate_unique
from fshard.errors import CheckpointError
from fshard.mesh.layout import Layout, PyTree
from fshard.mesh.layout.host_copies import start_read
from fshard.mesh.layout.kinds import empty_in, owned_by
from fshard.mesh.layout.mesh import Mesh
from fshard.mesh.layout.sharded import Sharded, key_of
from fshard.mesh.runtimes.launchers import process_count, process_index
from fshard.mesh.spmd.run import device_of, is_outside
from fshard.mesh.spmd.scope import here


class WrittenRange(NamedTuple):
    """A range of a shard, in the file of one device: the index of its array, and its elements."""

    array: int
    shape: tuple[int, ...]
    values: Tensor


@dataclass(frozen=True)
class TreeSnapshot:
    """The ranges that the devices held here are to write, in the order of their files.

    `replicas`: by device the digest of its shard of each array, "" of those that no other device has. `wait` returns when
    the values are there.
    """

    index: Index
    shares: Mapping[int, Sequence[WrittenRange]]
    replicas: Mapping[int, Sequence[str]]
    wait: Callable[[], object] = tuple

    def staged(self, staging: dict[int, Tensor]) -> TreeSnapshot:
        """Start a copy on the host, in memory of each device that is kept for the next one; devices go on meanwhile."""
        shares: dict[int, list[WrittenRange]] = {}
        for device, ranges in self.shares.items():
            size = sum(one.values.nbytes for one in ranges)
            if device not in staging or len(staging[device]) < size:
                kind = "cuda" if any(one.values.is_cuda for one in ranges) else "cpu"
                with owned_by(device):
                    staging[device] = empty_in("host", (size,), torch.uint8, kind)
            parts = staging[device][:size].split([one.values.nbytes for one in ranges])
            copies = [part.view(one.values.dtype) for part, one in zip(parts, ranges, strict=True)]
            shares[device] = [one._replace(values=own) for one, own in zip(ranges, copies, strict=True)]
        values = [[one.values for ranges in tree.values() for one in ranges] for tree in (self.shares, shares)]
        return TreeSnapshot(self.index, shares, self.replicas, start_read(*values))


class WritingDevices(NamedTuple):
    """The number of all devices, and those held here."""

    size: int
    own: Sequence[int]


def snapshot_of(tree: PyTree, metrics: Mapping[str, Any] | None = None) -> TreeSnapshot:
    """Return the ranges that the devices held here write, and the index of the tree."""
    leaves = [leaf for one in leaves_of(opened(tree)[0]) for leaf in _unfolded(one)]
    validate_unique(leaves, "save")
    validate_storable(leaves)
    arrays = [leaf for leaf in leaves if is_array(leaf.value)]
    values = [leaf for leaf in leaves if not is_array(leaf.value)]
    world = _world([x for leaf in arrays for _, x in stored_parts(leaf.value)])
    kept = dict[Any, NamedLeaf]()
    first = [kept.setdefault(tuple([key_of(x) for _, x in stored_parts(leaf.value)]), leaf) for leaf in arrays]
    ties = {leaf.name: (leaf.path, one.name) for leaf, one in zip(arrays, first, strict=True) if leaf.name != one.name}
    stored = [(leaf, at, x) for leaf in kept.values() for at, x in stored_parts(leaf.value)]
    index = Index(
        world.size,
        [_entry(leaf, at, x, world) for leaf, at, x in stored],
        [*ties.values()],
        [(leaf.path, leaf.value) for leaf in values],
        {one.name: float(one.value) for one in leaves_of(dict(metrics or {})) if _is_number(one.value)},
    )
    tensors = [x for _, _, x in stored]
    shares = {device: [*_share(index, tensors, device)] for device in world.own}
    return TreeSnapshot(index, shares, {device: _replicas(index, tensors, device) for device in world.own})


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) or (isinstance(x, Tensor) and x.ndim == 0 and not x.is_complex())


def _unfolded(leaf: NamedLeaf) -> Iterable[NamedLeaf]:
    if not is_object(leaf.value):
        return [leaf]
    return [
        inner
        for one in leaves_of(leaf.value.state_dict())
        for inner in _unfolded(NamedLeaf((*leaf.path, *one.path), one.value))
    ]


def _world(arrays: Sequence[Any]) -> WritingDevices:
    """Return the devices that write; raise if arrays are on meshes of different devices, or not made here."""
    for x in arrays:
        if isinstance(x, Sharded):
            x.check()
    meshes = {x.mesh: None for x in arrays if isinstance(x, Sharded)}
    if len({(mesh.root_size, mesh.runtime) for mesh in meshes}) > 1 or any(m.runtime == "abstract" for m in meshes):
        found = ", ".join(map(str, meshes))
        raise CheckpointError(f"save: all arrays must be on the same devices, which have values; got {found}.")
    if meshes:
        mesh = next(iter(meshes))
        return WritingDevices(mesh.root_size, range(mesh.root_size) if is_outside(mesh) else [device_of(mesh)])
    scope = here()
    if scope is not None:
        return WritingDevices(scope.mesh.root_size, [scope.device])
    return WritingDevices(process_count(), [process_index()]) if dist.is_initialized() else WritingDevices(1, [0])


def _entry(leaf: NamedLeaf, offset: tuple[int, ...], x: Any, world: WritingDevices) -> ArrayEntry:
    shape = tuple(x.shape)
    layout = (
        storable(x.layout) if isinstance(x, Sharded) else Layout(Mesh((("device", world.size),), "abstract", "meta"))
    )
    return ArrayEntry(leaf.name, leaf.path, shape, x.dtype, layout, offset, tuple(leaf.value.shape))


def _share(index: Index, tensors: Sequence[Any], device: int) -> Iterator[WrittenRange]:
    """Yield the ranges that one device writes."""
    column = index.division.column(device)
    for number in index.division.order.tolist():
        start, stop = column.starts[number], column.stops[number]
        if start == stop:
            continue
        shard, first = _shard(tensors[number], device).detach().resolve_conj().resolve_neg(), column.firsts[number]
        shape = tuple(shard.shape) if stop - start == shard.numel() else (stop - start,)
        yield WrittenRange(number, shape, shard.reshape(-1)[start - first : stop - first])


def _replicas(index: Index, tensors: Sequence[Any], device: int) -> list[str]:
    pairs = zip(index.arrays, tensors, strict=True)
    return [digest_of(_shard(x, device)) if entry.replicas > 1 else "" for entry, x in pairs]


def _shard(x: Any, device: int) -> Tensor:
    if not isinstance(x, Sharded):
        return x
    return x.shards[x.mesh.local_index(device)] if is_outside(x.mesh) else x.shards[0]
