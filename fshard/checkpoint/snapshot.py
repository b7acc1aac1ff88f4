"""`TreeSnapshot`: the share of a tree that each device writes, and the index of the tree.

All devices compute the index alike. Here an array of 8 elements is sharded over data=2 and
replicated over model=2, so each device writes 2 elements of its shard:

    device    shard            written
    0         [0 1 2 3]        [0 1]
    1         [0 1 2 3]            [2 3]
    2         [4 5 6 7]        [4 5]
    3         [4 5 6 7]            [6 7]
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from fshard.mesh.layout import Layout, Mesh, PyTree
from fshard.mesh.layout.host_copies import start_read
from fshard.mesh.layout.kinds import empty_in, owned_by
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.runtimes.launchers import process_count, process_index
from fshard.mesh.spmd.moments import deaths
from fshard.mesh.spmd.run import as_one_device, device_of, is_outside
from fshard.mesh.spmd.scope import here


class WrittenRange(NamedTuple):
    """A range of a shard, in the file of one device: the index of its array, and its elements."""

    array: int
    shape: tuple[int, ...]
    values: Tensor


@dataclass(frozen=True)
class TreeSnapshot:
    """The ranges that the devices held here are to write.

    Args:
        index: of the tree.
        shares: the ranges by device, in the order of its file.
        replicas: by device the digest of its shard of each array, "" of those that no other device
            has.
        mesh: of the devices that write; None for a process without others.
        wait: returns when the values of the ranges are there.
        deaths: the number of virtual devices that were killed before.
    """

    index: Index
    shares: Mapping[int, Sequence[WrittenRange]]
    replicas: Mapping[int, Sequence[str]]
    mesh: Mesh | None = None
    wait: Callable[[], object] = tuple
    deaths: int = field(default_factory=lambda: len(deaths))

    @property
    def ranks(self) -> Sequence[int] | None:
        """The ranks of the processes that write, by their device; None for virtual devices."""
        if self.mesh is None or self.mesh.runtime != "process":
            return None
        return self.mesh.devices

    def staged(self, staging: dict[int, Tensor]) -> TreeSnapshot:
        """Start a copy on the host, in `staging` by device, which the next copy reuses.

        Devices go on meanwhile: later work on their streams does not change the copy.
        """
        shares: dict[int, list[WrittenRange]] = {}
        originals: list[Tensor] = []
        copies: list[Tensor] = []
        for device, ranges in self.shares.items():
            sizes = [x.values.nbytes for x in ranges]
            total = sum(sizes)
            if device not in staging or len(staging[device]) < total:
                # Page-locked for a GPU: a copy to other memory would wait for the device.
                kind = "cuda" if any(x.values.is_cuda for x in ranges) else "cpu"
                with owned_by(device):
                    staging[device] = empty_in("host", (total,), torch.uint8, kind)

            buffers = staging[device][:total].split(sizes)
            shares[device] = []
            for x, buffer in zip(ranges, buffers, strict=True):
                copied = buffer.view(x.values.dtype)
                originals.append(x.values)
                copies.append(copied)
                shares[device].append(x._replace(values=copied))
        wait = start_read(originals, copies)
        return TreeSnapshot(self.index, shares, self.replicas, self.mesh, wait, self.deaths)


def snapshot_of(
    tree: PyTree, metrics: Mapping[str, Any] | None = None, *, compare: bool = True
) -> TreeSnapshot:
    """Return the ranges that the devices held here write, and the index of the tree.

    With `compare`, it has digests of replicas, by which they are compared.
    """
    with limited_depth():
        tree, _ = opened(tree)
        leaves = [*_with_states(leaves_of(tree))]
    validate_unique(leaves, "save")
    validate_storable(leaves)

    arrays = [leaf for leaf in leaves if is_array(leaf.value)]
    values = [(leaf.path, leaf.value) for leaf in leaves if not is_array(leaf.value)]
    firsts: dict[Any, NamedLeaf] = {}
    ties: dict[str, tuple[TreePath, str]] = {}
    stored: list[tuple[NamedLeaf, tuple[int, ...], Any]] = []
    for leaf in arrays:
        first = firsts.setdefault(tie_key(leaf.value), leaf)
        if leaf.name != first.name:
            ties[leaf.name] = leaf.path, first.name
        if leaf is first:
            stored.extend([(leaf, offset, x) for offset, x in stored_parts(leaf.value)])

    tensors = [x for _, _, x in stored]
    mesh, devices = _writers(tensors)
    size = 1 if mesh is None else mesh.root_size
    entries = _entries(stored, size)
    index = Index(size, entries, [*ties.values()], values, _numbers(metrics))
    shares = {device: [*_share(index, tensors, device)] for device in devices}
    writers = None if mesh is None else mesh.root
    replicas = _replica_digests(entries, tensors, devices) if compare else {}
    return TreeSnapshot(index, shares, replicas, writers)


def _entries(
    stored: Sequence[tuple[NamedLeaf, tuple[int, ...], Any]], size: int
) -> list[ArrayEntry]:
    """Return the entries of arrays that are stored: leaf, offset in it, and array."""
    # A plain tensor is equal on all devices, so it is stored as one that is replicated over them.
    replicated = Layout(Mesh((("device", size),), "abstract", "meta"))
    entries: list[ArrayEntry] = []
    for leaf, offset, x in stored:
        layout = storable(x.layout) if isinstance(x, Sharded) else replicated
        shape = tuple(x.shape)
        full_shape = tuple(leaf.value.shape)
        entry = ArrayEntry(leaf.name, leaf.path, shape, x.dtype, layout, offset, full_shape)
        entries.append(entry)
    return entries


def _replica_digests(
    entries: Sequence[ArrayEntry], tensors: Sequence[Any], devices: Sequence[int]
) -> dict[int, list[str]]:
    """Return by device the digest of its shard of each array, "" of those that no other device has.

    They are compared at the commit: a replica writes a part of the shard alone, so what differs
    elsewhere in it would be lost in silence.
    """
    is_replicated = [entry.replicas > 1 for entry in entries]
    digests: dict[int, list[str]] = {}
    for device in devices:
        row: list[str] = []
        for x, is_digested in zip(tensors, is_replicated, strict=True):
            row.append(digest_of(_shard(x, device)) if is_digested else "")
        digests[device] = row
    return digests


def _numbers(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the numbers of a tree of metrics by name."""
    numbers: dict[str, float] = {}
    for leaf in leaves_of(dict(metrics or {})):
        x = leaf.value
        is_number = isinstance(x, int | float)
        is_real_scalar = isinstance(x, Tensor) and x.ndim == 0 and not x.is_complex()
        if is_number or is_real_scalar:
            numbers[leaf.name] = float(x)
    return numbers


def _with_states(leaves: Iterable[NamedLeaf]) -> Iterator[NamedLeaf]:
    """Replace objects by the leaves of their states."""
    for leaf in leaves:
        if is_object(leaf.value):
            state = leaves_of(leaf.value.state_dict())
            yield from _with_states(NamedLeaf((*leaf.path, *x.path), x.value) for x in state)
        else:
            yield leaf


def _writers(arrays: Sequence[Any]) -> tuple[Mesh | None, Sequence[int]]:
    """Return a mesh of the devices that write, None for one without others; and those held here.

    Raises if arrays are on different devices.
    """
    meshes: dict[Mesh, None] = {}  # a set in order
    for x in arrays:
        if isinstance(x, Sharded):
            x.check()
            meshes[x.mesh] = None

    has_values = all(mesh.runtime != "abstract" for mesh in meshes)
    if len({(mesh.devices, mesh.runtime) for mesh in meshes}) > 1 or not has_values:
        names = ", ".join(map(str, meshes))
        raise CheckpointError(
            f"save: all arrays must be on the same devices, which have values; got {names}."
        )
    if not meshes:
        mesh, device = calling_device()
        return mesh, [device]
    mesh = next(iter(meshes))  # any of them: they have the same devices
    devices = range(mesh.root_size) if is_outside(mesh) else [device_of(mesh)]
    return mesh, devices


def calling_device() -> tuple[Mesh | None, int]:
    """Return a mesh of all devices around the caller, and the caller's number in it.

    It is (None, 0) for a process without others.
    """
    scope = here()
    if scope is not None:
        mesh = scope.mesh
        axes = (("device", mesh.root_size),)
        return Mesh(axes, mesh.runtime, "cpu", None, mesh.numbers), scope.device
    if dist.is_initialized():
        return Mesh((("device", process_count()),), "process", "cpu"), process_index()
    return None, 0


@contextmanager
def as_device_of(mesh: Mesh | None) -> Generator[None]:
    """Run a block as the device of a mesh of some devices that the caller is.

    So all that names no mesh is of its devices: tokens of saves, waits, random states. With None,
    and for a caller that has all devices, the block runs as it is.
    """
    if mesh is None or is_outside(mesh):
        yield
        return
    with as_one_device(mesh):
        yield


def _share(index: Index, tensors: Sequence[Any], device: int) -> Iterator[WrittenRange]:
    """Yield the ranges that a device writes."""
    column = index.division.column(device)
    for number in index.division.order.tolist():
        start = column.starts[number]
        stop = column.stops[number]
        if start == stop:
            continue
        # The bits that are stored: torch conjugates and negates some views only when they are read.
        shard = _shard(tensors[number], device).detach().resolve_conj().resolve_neg()
        first = column.firsts[number]
        is_full = stop - start == shard.numel()
        shape = tuple(shard.shape) if is_full else (stop - start,)
        yield WrittenRange(number, shape, shard.reshape(-1)[start - first : stop - first])


def _shard(x: Any, device: int) -> Tensor:
    """Return the shard of a device, by its number on the full mesh; a plain tensor is the shard."""
    if not isinstance(x, Sharded):
        return x
    return x.shards[x.mesh.local_index(device)] if is_outside(x.mesh) else x.shards[0]
