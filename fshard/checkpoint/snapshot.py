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
from fshard.checkpoint.names import (
    NamedLeaf,
    TreePath,
    is_array,
    is_object,
    leaves_of,
    limited_depth,
    opened,
    stored_parts,
    tie_key,
    validate_unique,
)
from fshard.errors import CheckpointError
from fshard.mesh.layout import Layout, Mesh, PyTree, Runtime
from fshard.mesh.layout.host_copies import start_read
from fshard.mesh.layout.kinds import empty_in, owned_by
from fshard.mesh.layout.sharded import Sharded
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
        """Start a copy on the host, in memory of each device that is reused by the next one; devices go on meanwhile."""
        shares: dict[int, list[WrittenRange]] = {}
        for device, ranges in self.shares.items():
            sizes = [x.values.nbytes for x in ranges]
            if device not in staging or len(staging[device]) < sum(sizes):
                kind = "cuda" if any(x.values.is_cuda for x in ranges) else "cpu"
                with owned_by(device):
                    staging[device] = empty_in("host", (sum(sizes),), torch.uint8, kind)
            buffers = zip(ranges, staging[device][: sum(sizes)].split(sizes), strict=True)
            shares[device] = [
                x._replace(values=buffer.view(x.values.dtype)) for x, buffer in buffers
            ]
        values = [
            [x.values for ranges in tree.values() for x in ranges] for tree in (self.shares, shares)
        ]
        return TreeSnapshot(self.index, shares, self.replicas, start_read(*values))


def snapshot_of(tree: PyTree, metrics: Mapping[str, Any] | None = None) -> TreeSnapshot:
    """Return the ranges that the devices held here write, and the index of the tree."""
    with limited_depth():
        leaves = [*_with_states(leaves_of(opened(tree)[0]))]
    validate_unique(leaves, "save")
    validate_storable(leaves)
    arrays = [leaf for leaf in leaves if is_array(leaf.value)]
    size, devices = _writers([x for leaf in arrays for _, x in stored_parts(leaf.value)])
    firsts, ties = dict[Any, NamedLeaf](), dict[str, tuple[TreePath, str]]()
    for leaf in arrays:
        first = firsts.setdefault(tie_key(leaf.value), leaf)
        if leaf.name != first.name:
            ties[leaf.name] = leaf.path, first.name
    entries, tensors = list[ArrayEntry](), list[Any]()
    plain = Layout(Mesh((("device", size),), "abstract", "meta"))
    for leaf in firsts.values():
        for offset, x in stored_parts(leaf.value):
            layout, full = (
                storable(x.layout) if isinstance(x, Sharded) else plain,
                tuple(leaf.value.shape),
            )
            entries.append(
                ArrayEntry(leaf.name, leaf.path, tuple(x.shape), x.dtype, layout, offset, full)
            )
            tensors.append(x)
    values = [(leaf.path, leaf.value) for leaf in leaves if not is_array(leaf.value)]
    numbers = {
        x.name: float(x.value) for x in leaves_of(dict(metrics or {})) if _is_number(x.value)
    }
    index = Index(size, entries, [*ties.values()], values, numbers)
    shares = {device: [*_share(index, tensors, device)] for device in devices}
    pairs, digests = [*zip(entries, tensors, strict=True)], dict[int, list[str]]()
    for device in devices:
        digests[device] = [
            digest_of(_shard(x, device)) if entry.replicas > 1 else "" for entry, x in pairs
        ]
    return TreeSnapshot(index, shares, digests)


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) or (
        isinstance(x, Tensor) and x.ndim == 0 and not x.is_complex()
    )


def _with_states(leaves: Iterable[NamedLeaf]) -> Iterator[NamedLeaf]:
    """Replace objects by the leaves of their states."""
    for leaf in leaves:
        if is_object(leaf.value):
            state = leaves_of(leaf.value.state_dict())
            yield from _with_states(NamedLeaf((*leaf.path, *x.path), x.value) for x in state)
        else:
            yield leaf


def _writers(arrays: Sequence[Any]) -> tuple[int, Sequence[int]]:
    """Return the number of devices that write, and those held here; raise if arrays are on different devices."""
    for x in arrays:
        if isinstance(x, Sharded):
            x.check()
    meshes = [*dict.fromkeys(x.mesh for x in arrays if isinstance(x, Sharded))]
    if len({(mesh.root_size, mesh.runtime) for mesh in meshes}) > 1 or any(
        m.runtime == "abstract" for m in meshes
    ):
        names = ", ".join(map(str, meshes))
        raise CheckpointError(
            f"save: all arrays must be on the same devices, which have values; got {names}."
        )
    if meshes:
        size = meshes[0].root_size
        return size, range(size) if is_outside(meshes[0]) else [device_of(meshes[0])]
    _, size, device = calling_device()
    return size, [device]


def calling_device() -> tuple[Runtime | None, int, int]:
    """Return the runtime, the number of all devices and that of the caller; None, 1, 0 for a process without others."""
    if (scope := here()) is not None:
        return scope.mesh.runtime, scope.mesh.root_size, scope.device
    return ("process", process_count(), process_index()) if dist.is_initialized() else (None, 1, 0)


def _share(index: Index, tensors: Sequence[Any], device: int) -> Iterator[WrittenRange]:
    """Yield the ranges that a device writes."""
    column = index.division.column(device)
    for number in index.division.order.tolist():
        start, stop = column.starts[number], column.stops[number]
        if start == stop:
            continue
        shard, first = (
            _shard(tensors[number], device).detach().resolve_conj().resolve_neg(),
            column.firsts[number],
        )
        shape = tuple(shard.shape) if stop - start == shard.numel() else (stop - start,)
        yield WrittenRange(number, shape, shard.reshape(-1)[start - first : stop - first])


def _shard(x: Any, device: int) -> Tensor:
    if not isinstance(x, Sharded):
        return x
    return x.shards[x.mesh.local_index(device)] if is_outside(x.mesh) else x.shards[0]
