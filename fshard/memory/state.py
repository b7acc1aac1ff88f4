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

An optimizer that is not made of rules, such as a pair of plain functions, gets all of its state at once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Literal

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
GROUPS, LARGEST = 16, 1 << 26
"""The groups of a device's state, of one leaf or more, and the largest size in bytes of those with several leaves."""
_ALIGNMENT = 64


@dataclass(frozen=True)
class Offload:
    """The memories in which optimizer state is stored and updated.

    Args:
        mesh: the devices.
        memory: of the state.
        update_on: memory of the update.
        rounded: parameters that are written, rounded, when their masters have been updated: by the masters' identity.
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
    """Write parameters, rounded, when masters that are elsewhere are updated: pairs of a master or None and a parameter."""
    offload = current_offload()
    if offload is None:
        return nullcontext()
    columns = [map(shards_and_devices, pair) for pair in leaves if pair[0] is not None]
    pairs = [pair for column in columns for pair in zip(*column, strict=True)]
    rounded = {id(master): param for (master, _), (param, _) in pairs}
    return setting(_offload, replace(offload, rounded={**offload.rounded, **rounded}))


# -- leaves ----------------------------------------------------------------------------------------------------------


def shards_and_devices(leaf: Any) -> list[tuple[Tensor, int]]:
    """Return the local shards of a leaf with the numbers of their devices; none of what is no tensor."""
    if isinstance(leaf, Sharded):
        return list(zip(leaf.shards, local_devices(leaf.mesh), strict=True))
    return [(leaf, 0)] if isinstance(leaf, Tensor) else []


def home_of(leaf: Any) -> Memory | None:
    """Return the memory of a leaf's shards; None if they are in several, or if it has none or is a number."""
    if isinstance(leaf, Tensor) and not leaf.ndim:
        return None  # on the host anyway
    memories: set[Memory] = {memory_of(x) for x, _ in shards_and_devices(leaf)}
    return memories.pop() if len(memories) == 1 else None


def is_away(leaf: Any) -> bool:
    """Return True if a leaf must be moved to the current update."""
    offload = current_offload()
    return offload is not None and offload.moves(home_of(leaf))


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
    """Return leaves in another memory, copied together: new ones, or those of `into`. Ties stay ties."""

    def begin(leaf: Any, home: Any) -> list[Transfer]:
        pairs, homes = shards_and_devices(leaf), [x for x, _ in shards_and_devices(home)]
        homes = homes or [empty_for(mesh, device, target, x.shape, x.dtype) for x, device in pairs]
        links = [Link(source, target, mesh.runtime, device) for _, device in pairs]
        return [start(x, y, link) for (x, _), y, link in zip(pairs, homes, links, strict=True)]

    def arrived(leaf: Any, home: Any, transfers: list[Transfer]) -> Any:
        shards = [transfer.wait() for transfer in transfers]
        if home is not None or not isinstance(leaf, Sharded):
            return shards[0] if home is None else home
        return Sharded(leaf.shape, leaf.layout.with_memory(target), tuple(shards))

    pairs = {
        key_of(leaf): (leaf, home)
        for leaf, home in zip(leaves, into or [None] * len(leaves), strict=True)
    }
    under_way = {key: begin(*pair) for key, pair in pairs.items()}
    results = {key: arrived(*pairs[key], transfers) for key, transfers in under_way.items()}
    return [results[key_of(leaf)] for leaf in leaves]


def stored(leaf: Any, *, beside_gradients: bool = False) -> Any:
    """Return a new leaf of state in the memory of the state, or of gradients in the update: for `init`."""
    offload = current_offload()
    if offload is None or leaf is None:
        return leaf
    memory, home = offload.update_on if beside_gradients else offload.memory, home_of(leaf)
    if home is not None and home != memory:
        return moved([leaf], offload.mesh, home, memory)[0]
    if isinstance(leaf, Sharded) and leaf.layout.memory != memory:  # the layout is a parameter's
        return Sharded(leaf.shape, leaf.layout.with_memory(memory), leaf.shards)
    return leaf


Update = Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]
"""A function of gradients, state and parameters: to updates (or parameters) and the next state."""


def at_once(update: Update, *, writes: bool = False, in_place: bool = True) -> Update:
    """Return an update, or a step that `writes` parameters, for which all that is elsewhere is fetched before.

    State is written back `in_place`, or to new memory.
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
    homes = [home_of(leaf) for leaf in leaves]
    for memory in MEMORIES:
        away = [i for i, home in enumerate(homes) if home == memory and offload.moves(memory)]
        near = moved([leaves[i] for i in away], offload.mesh, memory, offload.update_on)
        for i, leaf in zip(away, near, strict=True):
            leaves[i] = leaf
    return unflatten(structure, leaves)


def written_back(tree: PyTree, before: PyTree, offload: Offload, *, in_place: bool) -> PyTree:
    """Return a tree whose leaves are in the memory that they had before the update: `in_place`, or in new memory."""
    (leaves, structure), (homes, _) = (flatten(each, none_is_leaf=True) for each in (tree, before))

    def must_move(x: Any, home: Any, memory: Memory | None) -> bool:
        return x is not None and key_of(x) != key_of(home) and (in_place or home_of(x) != memory)

    memories = [home_of(home) for home in homes]
    for memory in filter(offload.stores, MEMORIES):
        there = [i for i, home in enumerate(memories) if home == memory]
        away = [i for i in there if must_move(leaves[i], homes[i], memory)]
        for i in away:
            for (x, _), (home, _) in zip(
                shards_and_devices(leaves[i]), shards_and_devices(homes[i]), strict=True
            ):
                offload.round(x, home)
        into = [homes[i] if in_place and leaves[i].dtype == homes[i].dtype else None for i in away]
        results = moved([leaves[i] for i in away], offload.mesh, offload.update_on, memory, into)
        for i, leaf in zip(away, results, strict=True):
            leaves[i] = leaf
    return unflatten(structure, leaves)


# -- groups ----------------------------------------------------------------------------------------------------------

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
    """Yield groups of rows of some columns, in the memory of the update; then write back what was elsewhere.

    Args:
        columns: tensors, which are updated in place; None where there is none.
        devices: the number of the device of each row.
        groups: of rows.
        offload: names the memories.
    """
    moving = [_Group(columns, devices, rows, offload) for rows in groups]
    sizes = {device: max(group.sizes.get(device, 0) for group in moving) for device in {*devices}}
    pools = {device: _pool(size, device, offload) for device, size in sizes.items()}
    moving[0].fetch(pools)
    for i, group in enumerate(moving):
        if group is not moving[-1]:
            moving[i + 1].fetch(pools)
        yield group.rows, group.tensors()
        if i:
            moving[i - 1].release(pools)
        group.store()
    moving[-1].release(pools)


def _pool(nbytes: int, device: int, offload: Offload) -> Pool:
    def make() -> Tensor:
        with purpose("state"):
            return empty_for(offload.mesh, device, offload.update_on, (nbytes,), torch.uint8)

    return Pool(make)


class _Group:
    """Rows of tensors, of which those that are elsewhere get views of one buffer for each device."""

    def __init__(
        self,
        columns: Sequence[Column],
        devices: Sequence[int],
        rows: Sequence[int],
        offload: Offload,
    ) -> None:
        self.rows, self._offload = rows, offload
        self._columns = [[column[row] for row in rows] for column in columns]
        self._devices = [devices[row] for row in rows]
        self._away: list[
            tuple[int, int, int, Tensor]
        ] = []  # column, index in it, offset in the buffer, tensor
        self.sizes: dict[int, int] = {}
        for number, column in enumerate(self._columns):
            for i, (x, device) in enumerate(zip(column, self._devices, strict=True)):
                if x is not None and offload.moves(memory_of(x)):
                    offset = self.sizes.get(device, 0)
                    self.sizes[device] = offset + -(-x.nbytes // _ALIGNMENT) * _ALIGNMENT
                    self._away.append((number, i, offset, x))

    def _link(self, source: Memory, target: Memory, i: int) -> Link:
        return Link(source, target, self._offload.mesh.runtime, self._devices[i])

    def fetch(self, pools: Mapping[int, Pool]) -> None:
        offload = self._offload
        self._buffers = {device: pools[device].take() for device in self.sizes}
        self._transfers: list[Transfer] = []
        for number, i, offset, x in self._away:
            buffer = self._buffers[self._devices[i]]
            view = buffer[offset : offset + x.nbytes].view(x.dtype).view(x.shape)
            self._transfers.append(start(x, view, self._link(memory_of(x), offload.update_on, i)))
            self._columns[number][i] = view

    def tensors(self) -> list[list[Tensor | None]]:
        for transfer in self._transfers:
            transfer.wait()
        return self._columns

    def store(self) -> None:
        """Start to write back what was fetched; write the parameters of masters."""
        self._transfers, offload = [], self._offload
        for number, i, _, home in self._away:
            view = self._columns[number][i]
            assert view is not None
            offload.round(view, home)
            self._transfers.append(
                start(view, home, self._link(offload.update_on, memory_of(home), i))
            )

    def release(self, pools: Mapping[int, Pool]) -> None:
        for transfer in self._transfers:
            transfer.wait()
        for device, buffer in self._buffers.items():
            pools[device].release(buffer)
