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

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.checkpoint.division import ArrayEntry
from fshard.checkpoint.files import digest_of
from fshard.checkpoint.form import TreeForm, form_of, local_index, open_tree
from fshard.checkpoint.index import Index
from fshard.checkpoint.names import (
    leaves_of,
    limited_depth,
    opened,
)
from fshard.mesh.layout import Memory, Mesh, PyTree
from fshard.mesh.layout.host_copies import start_read
from fshard.mesh.layout.kinds import empty_in, memory_of, owned_by
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.runtimes.process import staying
from fshard.mesh.spmd.moments import deaths
from fshard.mesh.spmd.run import as_one_device, is_outside


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
        is_staying: returns False once the process has joined another world.
    """

    index: Index
    shares: Mapping[int, Sequence[WrittenRange]]
    replicas: Mapping[int, Sequence[str]]
    mesh: Mesh | None = None
    wait: Callable[[], object] = tuple
    deaths: int = field(default_factory=lambda: len(deaths))
    is_staying: Callable[[], bool] = field(default_factory=staying)

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
            total = sum([x.values.nbytes for x in ranges])
            if device not in staging or len(staging[device]) < total:
                # Page-locked for a GPU: a copy to other memory would wait for the device.
                kind = "cuda" if any(x.values.is_cuda for x in ranges) else "cpu"
                with owned_by(device):
                    staging[device] = empty_in("host", (total,), torch.uint8, kind)

            shares[device] = []
            end = 0
            for dtype, group in groupby(ranges, _dtype):  # a view of the bytes has one dtype
                run = [*group]
                values = [x.values for x in run]
                start = end
                end += sum([x.nbytes for x in values])
                row = staging[device][start:end].view(dtype)
                row_copies = row.split([x.numel() for x in values])
                for x, copied in zip(run, row_copies, strict=True):
                    shares[device].append(WrittenRange(x.array, x.shape, copied))
                if {*map(_place, values)} == {_place(row)}:
                    torch.cat(values, out=row)  # one call for all, where there may be hundreds
                else:
                    originals += values
                    copies += row_copies
        wait = start_read(originals, copies)
        return replace(self, shares=shares, wait=wait)


def _dtype(x: WrittenRange) -> torch.dtype:
    return x.values.dtype


def _place(x: Tensor) -> tuple[torch.device, Memory]:
    return x.device, memory_of(x)


def snapshot_of(
    tree: PyTree, metrics: Mapping[str, Any] | None = None, *, compare: bool = True
) -> TreeSnapshot:
    """Return the ranges that the devices held here write, and the index of the tree.

    With `compare`, it has digests of replicas, by which they are compared.
    """
    with limited_depth():
        tree, _ = opened(tree)
        content = open_tree(tree)
    arrays = content.arrays()
    form = form_of(content, arrays)
    tensors = [arrays[number] for number in form.stored]
    for x in tensors:
        if isinstance(x, Sharded):
            x.check_view()
    index = form.index.with_values(form.values(content.leaves), _numbers(metrics))
    shares = {device: [*_share(form, tensors, device)] for device in form.devices}
    replicas: dict[int, list[str]] = {}
    if compare:
        replicas = _replica_digests(index.arrays, tensors, form.devices)
    writers = None if form.writers is None else form.writers.root
    return TreeSnapshot(index, shares, replicas, writers)


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


def _share(form: TreeForm, tensors: Sequence[Any], device: int) -> Iterator[WrittenRange]:
    """Yield the ranges that a device writes."""
    for number, index, start, stop in form.ranges(device):
        x = tensors[number]
        shard = x.shards[index] if isinstance(x, Sharded) else x
        # The bits that are stored: torch conjugates and negates some views only when they are read.
        row = shard.detach().resolve_conj().resolve_neg().reshape(-1)
        if stop - start == row.numel():
            yield WrittenRange(number, tuple(shard.shape), row)
        else:
            yield WrittenRange(number, (stop - start,), row[start:stop])


def _shard(x: Any, device: int) -> Tensor:
    """Return the shard of a device, by its number on the full mesh; a plain tensor is the shard."""
    return x.shards[local_index(x, device)] if isinstance(x, Sharded) else x
