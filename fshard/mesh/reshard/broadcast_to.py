"""Give plain values of one mesh to the processes of another: `broadcast_to`.

Outside of a mesh its plain values, such as the loss of a step, are None. The first device of the
mesh sends them: a header first, so that receivers know the tree and the types, then the tensors.

    process            0            1            2        broadcast_to(x, source=0 and 1)
    loss of 0 and 1    tensor(2.)   tensor(2.)   None     tensor(2.)   tensor(2.)   tensor(2.)
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from fshard.errors import LayoutError
from fshard.mesh.collectives.autograd import Bound
from fshard.mesh.collectives.ledger import active, uncounted
from fshard.mesh.collectives.moves import Broadcast
from fshard.mesh.layout import (
    Mesh,
    PyTree,
    flatten,
    flatten_with_paths,
    is_dense,
    no_dense,
    require_mesh,
    unflatten,
)
from fshard.mesh.layout.counting import LedgerRow
from fshard.mesh.layout.kinds import compute_device
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.reshard.between import AXIS, mesh_of_numbers
from fshard.mesh.runtimes import process
from fshard.mesh.runtimes.virtual import VirtualWorld
from fshard.mesh.spmd.run import is_outside, run_on_devices
from fshard.mesh.spmd.scope import Group, here, parting, require
from fshard.source import Site, call_site
from fshard.uncompiled import uncompiled

_CALLER = "fs.broadcast_to"
_AT_ONCE = 16 << 20
"""Bytes of tensors that are sent together: a transport has a copy of them. A larger one is sent alone."""


@uncompiled
@torch.no_grad()
def broadcast_to(tree: PyTree, mesh: Mesh | None = None, *, source: Mesh) -> PyTree:
    """Give plain values of one mesh to the processes of another mesh, or to all.

    Outside of a mesh its plain values are None: what `fs.unshard` returns, the loss and the metrics
    of a step. All processes of both meshes must call it, with a tree of their own: only that of the
    first device of `source` counts, but for arrays, which each keeps. Nothing is differentiated.

    Args:
        tree: of tensors, numbers, strings and arrays. On receivers it may be None, if it has no
            arrays.
        mesh: the processes that get the values; None for all processes, or all devices of the run.
        source: the mesh that has the values.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> def main():
    ...     mesh = fs.make_mesh({"data": 2}, devices=(1, 2))
    ...     x = fs.device_put(torch.arange(4.0), fs.Layout(mesh, P("data")))
    ...     total = fs.unshard(x.sum())
    ...     return total, fs.broadcast_to(total, source=mesh)
    >>> fs.run(main, mesh=fs.make_mesh({"device": 3}))
    [(None, tensor(6.)), (tensor(6.), tensor(6.)), (tensor(6.), tensor(6.))]
    """
    source = require_mesh(_CALLER, source)
    if mesh is not None:
        mesh = require_mesh(_CALLER, mesh)
    meeting = _meeting(source, mesh)
    if meeting is None:
        return tree
    receivers = "all" if mesh is None else mesh.grid
    way = f"{source.grid} -> {receivers}"
    sender = meeting.devices.index(source.devices[0])
    broadcast = _Broadcast(meeting, sender, way, call_site())
    (result,) = run_on_devices(meeting, lambda device: broadcast.run(tree))
    return result


def _meeting(source: Mesh, mesh: Mesh | None) -> Mesh | None:
    """Return the mesh of all processes that take part; None where nothing is sent.

    So it is where the caller is outside of both meshes, has all devices, or has shapes alone.
    """
    world = _world_around(source)
    if world is None:
        return None
    if mesh is None:
        numbers = world.devices
    else:
        if not source.is_member and not mesh.is_member:
            return None
        numbers = tuple(sorted({*source.devices, *mesh.devices}))
    return mesh_of_numbers(numbers, world)


def _world_around(source: Mesh) -> Mesh | None:
    """Return the mesh of all devices of the caller's run, or of all processes; None outside."""
    if is_outside(source):
        return None
    scope = here()
    if scope is not None and isinstance(scope.world, VirtualWorld):
        return scope.world.mesh
    is_of_processes = source.runtime == "process" or not source.is_member
    return process.everyone() if is_of_processes else None


@dataclass(frozen=True)
class _BroadcastBetween(Broadcast):
    """A broadcast that members of two meshes may call in different lines of the program.

    `way`: the two meshes, for errors.
    """

    way: str = ""
    has_one_line: ClassVar[bool] = False


@dataclass(frozen=True)
class _TensorType:
    """A tensor in the header: `is_on_host` where the sender has it in host memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_on_host: bool

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _Array:
    """An array in the header: each process keeps its own."""


@dataclass(frozen=True)
class _Broadcast:
    """A broadcast to all devices of a mesh from the one at index `sender`.

    Args:
        mesh: all devices that take part.
        sender: its index among them.
        way: the two meshes in words, for the ledger.
        site: of the call.
    """

    mesh: Mesh
    sender: int
    way: str
    site: Site

    def run(self, tree: PyTree) -> PyTree:
        """Return the sender's tree, with the caller's arrays."""
        group = require(_CALLER).group((AXIS,), _CALLER)
        with parting(group):
            header, tensors = b"", []
            if group.index == self.sender:
                header, tensors = _header_and_tensors(tree)
        header = self._send_header(header, group)
        leaves, structure = flatten(pickle.loads(header), none_is_leaf=True)
        types = [leaf for leaf in leaves if isinstance(leaf, _TensorType)]
        received = iter(self._send_tensors(tensors, types, group))

        own_leaves, _ = flatten(tree, none_is_leaf=True)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, _TensorType):
                leaves[index] = next(received)
            elif isinstance(leaf, _Array):
                leaves[index] = _own_array(own_leaves, index, len(leaves))
        return unflatten(structure, leaves)

    def _send_header(self, header: bytes, group: Group) -> bytes:
        """Send bytes, whose number is sent first."""
        device = compute_device(self.mesh)
        length = torch.tensor([len(header)], device=device)
        (length,) = self._start((length,), group)
        row = torch.zeros(int(length), dtype=torch.uint8, device=device)
        if group.index == self.sender:
            row = torch.frombuffer(bytearray(header), dtype=torch.uint8).to(device)
        (row,) = self._start((row,), group)
        return row.cpu().numpy().tobytes()

    def _send_tensors(
        self, tensors: Sequence[Tensor], types: Sequence[_TensorType], group: Group
    ) -> list[Tensor]:
        """Send tensors, some at a time: see `_AT_ONCE`."""
        device = compute_device(self.mesh)
        results: list[Tensor] = []
        for numbers in _groups(types):
            rows: list[Tensor] = []
            for number in numbers:
                if tensors:
                    rows.append(_bytes_of(tensors[number].to(device)))
                else:
                    rows.append(torch.empty(types[number].nbytes, dtype=torch.uint8, device=device))
            self._record([*rows], group)
            for number, row in zip(numbers, self._start(tuple(rows), group), strict=True):
                kind = types[number]
                memory = "cpu" if kind.is_on_host else device
                x = torch.empty(kind.shape, dtype=kind.dtype, device=memory)
                x.view(-1).view(torch.uint8).copy_(row)
                results.append(x)
        return results

    def _start(self, xs: tuple[Tensor, ...], group: Group) -> tuple[Tensor, ...]:
        with uncounted():
            return Bound(_BroadcastBetween(self.sender, self.way), group, self.site).run(xs)

    def _record(self, rows: Sequence[Tensor], group: Group) -> None:
        """Write into the open ledgers what this device sends of the values."""
        size = sum([row.nbytes for row in rows])
        sent = Broadcast(self.sender).sent(size, group.index, group.size)
        row = LedgerRow("broadcast", (self.way,), self.site._replace(leaves=()))
        for ledger in active():
            ledger.record(group.number, row, sent)


def _header_and_tensors(tree: PyTree) -> tuple[bytes, list[Tensor]]:
    """Return a tree with types in place of tensors, as bytes, and the tensors."""
    paths, leaves, structure = flatten_with_paths(tree, none_is_leaf=True)
    tensors: list[Tensor] = []
    for index, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        if isinstance(leaf, Sharded):
            leaves[index] = _Array()
        elif isinstance(leaf, Tensor):
            _validate_value(path, leaf)
            tensors.append(leaf)
            leaves[index] = _TensorType(tuple(leaf.shape), leaf.dtype, leaf.is_cpu)
    return pickle.dumps(unflatten(structure, leaves)), tensors


def _validate_value(path: str, x: Tensor) -> None:
    name = f"tree{path}"
    if not is_dense(x):
        raise LayoutError(f"{_CALLER}: {name} must be a dense tensor; got {no_dense(x)}.")
    if x.is_meta:
        raise LayoutError(
            f"{_CALLER}: {name} must have values on the first device of source; got a tensor "
            "without values. Give the mesh that has them as source."
        )


def _bytes_of(x: Tensor) -> Tensor:
    """Return the bytes of a tensor as a row."""
    return x.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _groups(types: Sequence[_TensorType]) -> list[list[int]]:
    """Return the numbers of tensors that are sent together."""
    groups: list[list[int]] = []
    free = 0
    for number, kind in enumerate(types):
        if not groups or kind.nbytes > free:
            groups.append([])
            free = _AT_ONCE
        groups[-1].append(number)
        free -= kind.nbytes
    return groups


def _own_array(own_leaves: Sequence[Any], index: int, count: int) -> Sharded:
    """Return the caller's array in place of the sender's; raise if its tree has none there."""
    own = own_leaves[index] if len(own_leaves) == count else None
    if not isinstance(own, Sharded):
        raise LayoutError(
            f"{_CALLER}: a tree with arrays must have them on all processes; got another tree "
            "here than on the sender. Give its plain values alone."
        )
    return own
