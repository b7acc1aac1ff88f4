"""Optimizer state in host memory or on disk: moved to its update and back, in groups of leaves.

    memory   updated on   state                          gradients and parameters
    host     device       in groups to the device        stay
    disk     device       in groups to the device        stay
    host     host         stays                          to the host; parameters back
    disk     host         in groups to the host          to the host; parameters back

    group    0          1          2
    fetch    ███        ███        ███              the next group is fetched while one is updated,
    update         ███        ███        ███        and the last one is written back:
    store                ███        ███        ███  three have buffers

An optimizer that is not made of rules, such as a pair of plain functions, gets all of its state at
once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fshard.ambient import setting
from fshard.memory.kinds import purpose
from fshard.memory.pool import Pool
from fshard.memory.transfers import Link, Transfer, start
from fshard.mesh.layout import Memory, Mesh, PyTree, flatten, unflatten
from fshard.mesh.layout.counting import MEMORIES
from fshard.mesh.layout.kinds import empty_in, memory_of, owned_by
from fshard.mesh.layout.sharded import Sharded, key_of
from fshard.mesh.spmd.run import local_devices

UpdateOn = Literal["device", "host"]

GROUPS = 16
"""The groups of a device's state: three have buffers, 3/16 of it. No reason is known for 16."""

LARGEST = 1 << 26
"""The most bytes of a group with several leaves; a larger leaf is a group of its own."""

# A view of another dtype must begin at a multiple of its item size. 64 bytes are the alignment of
# torch's allocations on CPUs.
_ALIGNMENT = 64


@dataclass(frozen=True)
class Offload:
    """The memories in which optimizer state is stored and updated.

    Args:
        mesh: the devices.
        memory: of the state.
        update_on: memory of the update.
        rounded: parameters that are written, rounded, when their masters have been updated: by the
            masters' identity.
    """

    mesh: Mesh
    memory: Memory
    update_on: UpdateOn
    rounded: Mapping[int, Tensor] = field(default_factory=dict[int, Tensor])

    def moves(self, memory: Memory | None) -> bool:
        """Return True if leaves in a memory are moved to the update."""
        return memory not in (None, "device", self.update_on)

    def stores(self, memory: Memory | None) -> bool:
        """Return True if the next values of leaves in a memory are written there."""
        return self.moves(memory) or memory == self.memory != "device"

    @torch.no_grad()
    def round(self, master: Tensor, home: Tensor) -> None:
        """Write the parameter of a master that is stored in `home`, if it has one."""
        param = self.rounded.get(id(home))
        if param is not None:
            param.copy_(master)


_offload: ContextVar[Offload | None] = ContextVar("offload", default=None)


def current_offload() -> Offload | None:
    """Return the offload of the calling update, if its state must be moved there."""
    return _offload.get()


def offloading(offload: Offload | None) -> AbstractContextManager[None]:
    """Move state within the context."""
    return setting(_offload, offload)


def rounding(leaves: Iterable[tuple[Any, Any]]) -> AbstractContextManager[None]:
    """Write parameters, rounded, when masters that are elsewhere are updated.

    Args:
        leaves: pairs of a master, or None, and its parameter.
    """
    offload = current_offload()
    if offload is None:
        return nullcontext()
    rounded = dict(offload.rounded)
    for master, param in leaves:
        if master is None:
            continue
        pairs = zip(shards_and_devices(master), shards_and_devices(param), strict=True)
        for (master_shard, _), (param_shard, _) in pairs:
            rounded[id(master_shard)] = param_shard
    return setting(_offload, replace(offload, rounded=rounded))


# -- leaves --------------------------------------------------------------------------------------


def shards_and_devices(leaf: Any) -> list[tuple[Tensor, int]]:
    """Return the local shards of a leaf and their devices' numbers; [] of what is no tensor."""
    if isinstance(leaf, Sharded):
        numbers = [leaf.mesh.devices[device] for device in local_devices(leaf.mesh)]
        return list(zip(leaf.shards, numbers, strict=True))
    if isinstance(leaf, Tensor):
        return [(leaf, 0)]
    return []


def home_of(leaf: Any, mesh: Mesh) -> Memory | None:
    """Return the memory of a leaf's shards, beside the devices of a mesh.

    None if they are in several, or if the leaf has none or is a number.
    """
    if isinstance(leaf, Tensor) and not leaf.ndim:
        return None  # on the host anyway
    shards = shards_and_devices(leaf)
    memories: set[Memory] = {memory_of(x, mesh.device_type) for x, _ in shards}
    return memories.pop() if len(memories) == 1 else None


def is_away(leaf: Any) -> bool:
    """Return True if a leaf must be moved to the current update."""
    offload = current_offload()
    return offload is not None and offload.moves(home_of(leaf, offload.mesh))


def empty_for(
    mesh: Mesh, device: int, memory: Memory, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Return an empty tensor in a memory, which counts for a device of a mesh."""
    with owned_by(device):
        return empty_in(memory, shape, dtype, mesh.device_type)


def moved(
    leaves: Sequence[Any],
    mesh: Mesh,
    source: Memory,
    target: Memory,
    into: Sequence[Any] | None = None,
) -> list[Any]:
    """Return leaves in another memory, copied together.

    They are new ones, or those of `into` that are not None. Ties stay ties.
    """
    homes = [None] * len(leaves) if into is None else into
    pairs: dict[tuple[int, ...], tuple[Any, Any]] = {}  # a leaf and its home; ties once
    for leaf, home in zip(leaves, homes, strict=True):
        pairs[key_of(leaf)] = (leaf, home)

    results: dict[tuple[int, ...], Any] = {}
    moves: list[_Move] = []
    for key, (leaf, home) in pairs.items():
        results[key] = _empty_like(leaf, mesh, target) if home is None else home
        rows = zip(shards_and_devices(leaf), shards_and_devices(results[key]), strict=True)
        for (shard, device), (home_shard, _) in rows:
            moves.append(_Move(shard, home_shard, Link(source, target, mesh.runtime, device)))
    for transfer in _start_all(moves):
        transfer.wait()
    return [results[key_of(leaf)] for leaf in leaves]


def _empty_like(leaf: Any, mesh: Mesh, memory: Memory) -> Any:
    """Return a leaf of the same form in a memory, without values."""
    shards: list[Tensor] = []
    for shard, device in shards_and_devices(leaf):
        shards.append(empty_for(mesh, device, memory, shard.shape, shard.dtype))
    if isinstance(leaf, Sharded):
        return Sharded(leaf.shape, leaf.layout.with_memory(memory), tuple(shards))
    (x,) = shards
    return x


class _Move(NamedTuple):
    """A copy of a tensor to another memory."""

    source: Tensor
    target: Tensor
    link: Link


def _start_all(moves: Sequence[_Move]) -> list[Transfer]:
    """Start copies: those of one link as one transfer."""
    moves_of_links: dict[Link, list[_Move]] = {}
    for move in moves:
        moves_of_links.setdefault(move.link, []).append(move)
    transfers: list[Transfer] = []
    for link, moves_of_link in moves_of_links.items():
        sources = [move.source for move in moves_of_link]
        targets = [move.target for move in moves_of_link]
        transfers.append(start(sources, targets, link))
    return transfers


def stored(leaf: Any, *, beside_gradients: bool = False) -> Any:
    """Return a new leaf of state in the memory of the state: for `init`.

    With `beside_gradients` it is in the memory of gradients in the update.
    """
    offload = current_offload()
    if offload is None or leaf is None:
        return leaf
    memory = offload.update_on if beside_gradients else offload.memory
    home = home_of(leaf, offload.mesh)
    if home is not None and home != memory:
        return moved([leaf], offload.mesh, home, memory)[0]
    if isinstance(leaf, Sharded) and leaf.layout.memory != memory:
        # The layout is a parameter's: the shards are in the memory already.
        return Sharded(leaf.shape, leaf.layout.with_memory(memory), leaf.shards)
    return leaf


Update = Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]
"""A function of gradients, state and parameters: to updates (or parameters) and the next state."""


def at_once(update: Update, *, writes: bool = False, in_place: bool = True) -> Update:
    """Return an update for which all that is elsewhere is fetched before.

    Args:
        update: of an optimizer.
        writes: it is a step: it returns the next parameters.
        in_place: write state back to its memory, not to new memory.
    """

    def run(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        offload = current_offload()
        if offload is None:
            return update(grads, state, params)
        with setting(_offload, None):
            result, after = update(grads, fetched(state, offload), fetched(params, offload))
        if writes:
            result = written_back(result, params, offload, in_place=True)
        return result, written_back(after, state, offload, in_place=in_place)

    return run


def fetched(tree: PyTree, offload: Offload) -> PyTree:
    """Return a tree with all leaves in the memory of the update."""
    leaves, structure = flatten(tree, none_is_leaf=True)
    homes = [home_of(leaf, offload.mesh) for leaf in leaves]
    for memory in MEMORIES:
        if not offload.moves(memory):
            continue
        away = [i for i, home in enumerate(homes) if home == memory]
        copies = moved([leaves[i] for i in away], offload.mesh, memory, offload.update_on)
        for i, copy in zip(away, copies, strict=True):
            leaves[i] = copy
    return unflatten(structure, leaves)


def written_back(tree: PyTree, before: PyTree, offload: Offload, *, in_place: bool) -> PyTree:
    """Return a tree whose leaves are in the memories that they had before the update.

    Args:
        tree: after the update.
        before: the tree that was fetched.
        offload: the memories.
        in_place: write to the leaves of `before`, not to new memory.
    """
    leaves, structure = flatten(tree, none_is_leaf=True)
    homes, _ = flatten(before, none_is_leaf=True)
    memories = [home_of(home, offload.mesh) for home in homes]

    def is_away_from(memory: Memory, i: int) -> bool:
        """Return True if a leaf belongs in a memory, but its next value is elsewhere."""
        leaf = leaves[i]
        if memories[i] != memory or leaf is None or key_of(leaf) == key_of(homes[i]):
            return False
        return in_place or home_of(leaf, offload.mesh) != memory

    for memory in MEMORIES:
        if not offload.stores(memory):
            continue
        away = [i for i in range(len(leaves)) if is_away_from(memory, i)]
        into: list[Any] = []
        for i in away:
            _round_shards(leaves[i], homes[i], offload)
            fits = in_place and leaves[i].dtype == homes[i].dtype
            into.append(homes[i] if fits else None)
        results = moved([leaves[i] for i in away], offload.mesh, offload.update_on, memory, into)
        for i, leaf in zip(away, results, strict=True):
            leaves[i] = leaf
    return unflatten(structure, leaves)


def _round_shards(leaf: Any, home: Any, offload: Offload) -> None:
    """Write the parameters whose masters are these shards, and are stored in `home`."""
    pairs = zip(shards_and_devices(leaf), shards_and_devices(home), strict=True)
    for (shard, _), (home_shard, _) in pairs:
        offload.round(shard, home_shard)


# -- groups --------------------------------------------------------------------------------------

Column = Sequence[Tensor | None]


def groups_of(sizes: Sequence[int]) -> list[list[int]]:
    """Return the indices of leaves of these sizes, in groups that are moved and updated together.

    >>> groups_of([4] * 6), len(groups_of([1] * 64))
    ([[0], [1], [2], [3], [4], [5]], 16)
    """
    limit = min(max(sum(sizes) // GROUPS, 1), LARGEST)
    groups: list[list[int]] = [[]]
    room = limit
    for i, size in enumerate(sizes):
        if groups[-1] and size > room:
            groups.append([])
            room = limit
        groups[-1].append(i)
        room -= size
    return groups


def streamed(
    columns: Sequence[Column],
    devices: Sequence[int],
    groups: Sequence[Sequence[int]],
    offload: Offload,
) -> Generator[tuple[Sequence[int], list[list[Tensor | None]]]]:
    """Yield groups of rows of some columns, in the memory of the update; then write them back.

    Args:
        columns: tensors, which are updated in place; None where there is none.
        devices: the number of the device of each row.
        groups: of rows.
        offload: names the memories.
    """
    moving = [_Group(columns, devices, rows, offload) for rows in groups]
    pools: dict[int, Pool] = {}
    for device in set(devices):
        largest = max(group.sizes.get(device, 0) for group in moving)
        pools[device] = _pool(largest, device, offload)

    # Three groups have buffers: one is updated, the next one is fetched, and the one before is
    # written back. It is released after the update, so that its copies run beside this one too.
    moving[0].fetch(pools)
    for i, group in enumerate(moving):
        if i + 1 < len(moving):
            moving[i + 1].fetch(pools)
        yield group.rows, group.tensors()
        if i > 0:
            moving[i - 1].release(pools)
        group.store()
    moving[-1].release(pools)

    # The caller may read on the host what is stored there. Copies end in the order of their starts,
    # so that the host waits for the last ones alone.
    for group in reversed(moving):
        group.finish()


def _pool(nbytes: int, device: int, offload: Offload) -> Pool:
    """Return a pool of buffers of a device in the memory of the update."""

    def make() -> Tensor:
        with purpose("state"):
            return empty_for(offload.mesh, device, offload.update_on, (nbytes,), torch.uint8)

    return Pool(make)


class _AwayTensor(NamedTuple):
    """A tensor of a group that is moved to the update.

    Args:
        column, row: its indices in the group.
        offset: in the buffer of its device.
        home: the tensor.
    """

    column: int
    row: int
    offset: int
    home: Tensor


class _Group:
    """Rows of tensors that are moved and updated together.

    Those that are elsewhere get views of one buffer for each device.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        devices: Sequence[int],
        rows: Sequence[int],
        offload: Offload,
    ) -> None:
        self.rows = rows
        self.sizes: dict[int, int] = {}  # of the buffer of each device
        self._offload = offload
        self._columns = [[column[row] for row in rows] for column in columns]
        self._devices = [devices[row] for row in rows]
        self._away: list[_AwayTensor] = []
        for number, column in enumerate(self._columns):
            for i, (x, device) in enumerate(zip(column, self._devices, strict=True)):
                if x is None or not offload.moves(self._memory_of(x)):
                    continue
                offset = self.sizes.get(device, 0)
                self._away.append(_AwayTensor(number, i, offset, x))
                aligned_size = -(-x.nbytes // _ALIGNMENT) * _ALIGNMENT
                self.sizes[device] = offset + aligned_size

    def fetch(self, pools: Mapping[int, Pool]) -> None:
        """Start to copy what is elsewhere into buffers of the pools."""
        self._buffers = {device: pools[device].take() for device in self.sizes}
        moves: list[_Move] = []
        for column, row, offset, home in self._away:
            buffer = self._buffers[self._devices[row]]
            view = buffer[offset : offset + home.nbytes].view(home.dtype).view(home.shape)
            link = self._link(self._memory_of(home), self._offload.update_on, row)
            moves.append(_Move(home, view, link))
            self._columns[column][row] = view
        self._transfers = _start_all(moves)

    def tensors(self) -> list[list[Tensor | None]]:
        """Wait for what is fetched; return the columns of the rows."""
        self.finish()
        return self._columns

    def store(self) -> None:
        """Start to write back what was fetched; write the parameters of masters."""
        moves: list[_Move] = []
        for column, row, _, home in self._away:
            view = self._columns[column][row]
            assert view is not None
            self._offload.round(view, home)
            link = self._link(self._offload.update_on, self._memory_of(home), row)
            moves.append(_Move(view, home, link))
        self._transfers = _start_all(moves)

    def release(self, pools: Mapping[int, Pool]) -> None:
        """Return the buffers to the pools, once what is written back no longer needs them."""
        for transfer in self._transfers:
            transfer.release()
        for device, buffer in self._buffers.items():
            pools[device].release(buffer)

    def _memory_of(self, x: Tensor) -> Memory:
        return memory_of(x, self._offload.mesh.device_type)

    def finish(self) -> None:
        """Wait for what is fetched or written back."""
        for transfer in self._transfers:
            transfer.wait()

    def _link(self, source: Memory, target: Memory, row: int) -> Link:
        return Link(source, target, self._offload.mesh.runtime, self._devices[row])
