"""`TreeForm`: names, layouts and shares, which the saves of one tree have in common.

A run saves one tree again and again. Names, the index, and which device writes what are computed
for the first of these saves; the others find them by a key.

    tree ──> leaves, key ──┬── new:   names, index, division ──> form
                           └── known: ──────────────────────────> form
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from fshard.checkpoint.division import ArrayEntry, Division
from fshard.checkpoint.index import Index, storable, validate_storable
from fshard.checkpoint.names import (
    PLAIN,
    JoinedArray,
    NamedLeaf,
    TreePath,
    as_leaf,
    is_array,
    is_object,
    leaves_of,
    limited_depth,
    nodes_of,
    opened,
    stored_parts,
    tie_key,
    validate_unique,
)
from fshard.errors import CheckpointError
from fshard.mesh.layout import Layout, Mesh, PyTree, is_dense
from fshard.mesh.layout.sharded import Sharded, key_of
from fshard.mesh.runtimes.launchers import process_count, process_index
from fshard.mesh.runtimes.process import world_number
from fshard.mesh.spmd.run import device_of, is_outside
from fshard.mesh.spmd.scope import here


class OpenTree(NamedTuple):
    """A tree, and the states of the objects in it.

    Args:
        tree: whose leaves may be objects.
        leaves: its arrays and values; in place of an object those of its state.
        states: of the objects, in order.
        structure: equal for trees whose leaves have equal paths.
    """

    tree: PyTree
    leaves: list[Any]
    states: list[OpenTree]
    structure: tuple[Any, ...]

    def arrays(self) -> list[Any]:
        """Return the arrays among the leaves, by the parts that are stored."""
        result: list[Any] = []
        for leaf in self.leaves:
            if isinstance(leaf, JoinedArray):
                result += leaf.parts
            elif is_array(leaf):
                result.append(leaf)
        return result

    def named(self) -> Iterator[NamedLeaf]:
        """Yield the leaves with their paths; empty containers too."""
        states = iter(self.states)
        for leaf in leaves_of(self.tree):
            if not is_object(leaf.value):
                yield leaf
                continue
            for x in next(states).named():
                yield NamedLeaf((*leaf.path, *x.path), x.value)


def open_tree(tree: PyTree) -> OpenTree:
    """Return a tree with the states of its objects."""
    nodes, structure = nodes_of(tree)
    leaves: list[Any] = []
    states: list[OpenTree] = []
    places: list[int] = []
    for place, node in enumerate(nodes):
        if isinstance(node, _COMMON):
            leaves.append(node)
            continue
        leaf = as_leaf(node)
        if is_object(leaf):
            state = open_tree(leaf.state_dict())
            leaves += state.leaves
            states.append(state)
            places.append(place)
        else:
            leaves.append(leaf)
    # Structures are equal for keys 1, True and 1.0 of a dict; as text these differ.
    paths = repr(structure.paths())
    key = structure, paths, tuple(places), tuple([state.structure for state in states])
    return OpenTree(tree, leaves, states, key)


_COMMON = (Sharded, Tensor, *PLAIN)
"""Leaves that are stored as they are."""


class StoredRange(NamedTuple):
    """Elements that a device writes.

    Args:
        array: the number of their array.
        local_index: of the shard, among those that the caller has.
        start: their first one of the shard.
        stop: one past the last.
    """

    array: int
    local_index: int
    start: int
    stop: int


@dataclass
class TreeForm:
    """The properties that the saves of one tree have in common: all but values.

    Args:
        index: without the values of the tree.
        stored: the arrays of the tree that are stored, by their number: of tied ones the first.
        places: of each value its path, its number among the leaves, and the value of one without.
        writers: a mesh of the devices that write; None for a process without others.
        devices: those of them that the caller has.
        local_indices: of these devices, that of the shard of each array.
    """

    index: Index
    stored: Sequence[int]
    places: Sequence[tuple[TreePath, int | None, Any]]
    writers: Mesh | None
    devices: Sequence[int]
    local_indices: Mapping[int, Sequence[int]]

    def __post_init__(self) -> None:
        self.ranges = cache(self._ranges)  # of a device

    def values(self, leaves: Sequence[Any]) -> list[tuple[TreePath, Any]]:
        """Return the values of a tree with their paths."""
        result: list[tuple[TreePath, Any]] = []
        for path, place, constant in self.places:
            result.append((path, constant if place is None else leaves[place]))
        return result

    def _ranges(self, device: int) -> list[StoredRange]:
        """Return what a device writes, in the order of its file."""
        division = self.index.division
        column = division.column(device)
        result: list[StoredRange] = []
        for number in division.order.tolist():
            start = column.starts[number]
            stop = column.stops[number]
            first = column.firsts[number]
            if start < stop:
                index = self.local_indices[device][number]
                result.append(StoredRange(number, index, start - first, stop - first))
        return result


_forms: dict[Any, TreeForm] = {}
"""The forms of the last trees by their key. They have no tensors."""
_KEPT = 32
"""Forms that are kept. A program has few trees, and a key for each device that saves by itself."""


def form_of(tree: OpenTree, arrays: Sequence[Any]) -> TreeForm:
    """Return the form of a tree; raise if the tree cannot be saved.

    `arrays` are those of the tree.
    """
    kinds = [*map(_kind, tree.leaves)]
    layouts = {id(x.layout): x.layout for x in arrays if isinstance(x, Sharded)}
    meshes = dict.fromkeys([layout.mesh for layout in layouts.values()])  # a set in order
    if None in kinds:
        return _new_form(tree, arrays, [*meshes])

    places: dict[Any, int] = {}
    ties = [places.setdefault(key_of(x), place) for place, x in enumerate(arrays)]
    key = tree.structure, tuple(kinds), tuple(ties), tuple(meshes), _caller([*meshes])
    try:
        form = _forms.get(key)
    except TypeError:  # something in the structure of the tree has no hash
        return _new_form(tree, arrays, [*meshes])
    if form is None:
        form = _new_form(tree, arrays, [*meshes])
        if len(_forms) >= _KEPT:
            _forms.clear()
        _forms[key] = form
    return form


def _kind(leaf: Any) -> Any:
    """Return all of a leaf that its form depends on; None for one that is not known."""
    if isinstance(leaf, Sharded):
        shards = [(x.shape, x.dtype, is_dense(x)) for x in leaf.shards]
        return leaf.shape, leaf.layout, tuple(shards)
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, is_dense(leaf), leaf.is_meta
    if isinstance(leaf, JoinedArray):
        return leaf.dim, *map(_kind, leaf.parts)
    return type(leaf) if isinstance(leaf, PLAIN) else None


def _caller(meshes: Sequence[Mesh]) -> Any:
    """Return which devices the caller has."""
    if not meshes:
        return calling_device()
    return None if is_outside(meshes[0]) else device_of(meshes[0])


def _new_form(tree: OpenTree, arrays: Sequence[Any], meshes: Sequence[Mesh]) -> TreeForm:
    leaves = [*tree.named()]
    validate_unique(leaves, "save")
    validate_storable(leaves)
    parts, stored, ties = _stored(leaves)
    for x in arrays:
        if isinstance(x, Sharded):
            x.check()

    writers, devices = _writers(meshes)
    size = 1 if writers is None else writers.root_size
    index = Index(size, _entries(parts, size), ties, [])
    local_indices: dict[int, list[int]] = {}
    for device in devices:
        local_indices[device] = [local_index(x, device) for _, _, x in parts]
    places = _places_of_values(leaves, tree.leaves)
    return TreeForm(index, stored, places, writers, devices, local_indices)


Part = tuple[NamedLeaf, tuple[int, ...], Any]
"""An array that is stored: its leaf, the offset in the array of that leaf, and the array."""


def _stored(
    leaves: Iterable[NamedLeaf],
) -> tuple[list[Part], list[int], list[tuple[TreePath, str]]]:
    """Return the arrays that are stored, their numbers among all arrays, and the ties of others."""
    firsts: dict[Any, NamedLeaf] = {}
    ties: dict[str, tuple[TreePath, str]] = {}
    parts: list[Part] = []
    stored: list[int] = []
    number = 0
    for leaf in leaves:
        if not is_array(leaf.value):
            continue
        first = firsts.setdefault(tie_key(leaf.value), leaf)
        if leaf.name != first.name:
            ties[leaf.name] = leaf.path, first.name
        for offset, x in stored_parts(leaf.value):
            if leaf is first:
                parts.append((leaf, offset, x))
                stored.append(number)
            number += 1
    return parts, stored, [*ties.values()]


def _places_of_values(
    leaves: Iterable[NamedLeaf], nodes: Sequence[Any]
) -> list[tuple[TreePath, int | None, Any]]:
    """Return of each value its path, its number among the nodes, and the value of one without."""
    places: list[tuple[TreePath, int | None, Any]] = []
    place = 0
    for leaf in leaves:
        # An empty container is made for the list of names: it is no node.
        is_node = is_array(leaf.value) or (place < len(nodes) and nodes[place] is leaf.value)
        if not is_node:
            places.append((leaf.path, None, leaf.value))
            continue
        if not is_array(leaf.value):
            places.append((leaf.path, place, None))
        place += 1
    return places


def share_sizes(tree: PyTree) -> list[int]:
    """Return the bytes of the values that each device writes; the tree may be one without values."""
    with limited_depth():
        tree, _ = opened(tree)
        parts, *_ = _stored(open_tree(tree).named())
    sizes = [x.mesh.root_size for _, _, x in parts if isinstance(x, Sharded)]
    size = max(sizes, default=1)
    entries = _entries(parts, size)
    division = Division(entries)
    result: list[int] = []
    for device in range(size):
        column = division.column(device)
        total = 0
        for entry, start, stop in zip(entries, column.starts, column.stops, strict=True):
            total += (stop - start) * entry.itemsize
        result.append(total)
    return result


def local_index(x: Any, device: int) -> int:
    """Return the index of a device's shard among those of the caller; 0 for a plain tensor."""
    has_all_shards = isinstance(x, Sharded) and is_outside(x.mesh)
    return x.mesh.local_index(device) if has_all_shards else 0


def _entries(stored: Sequence[Part], size: int) -> list[ArrayEntry]:
    """Return the entries of arrays that are stored, on a number of devices."""
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


def _writers(meshes: Sequence[Mesh]) -> tuple[Mesh | None, Sequence[int]]:
    """Return a mesh of the devices that write, None for one without others; and those held here.

    Raises if the meshes of arrays have different devices.
    """
    has_values = all(mesh.runtime != "abstract" for mesh in meshes)
    sets_of_devices = {(mesh.devices, mesh.runtime) for mesh in meshes}
    if len(sets_of_devices) > 1 or not has_values:
        names = ", ".join(map(str, meshes))
        raise CheckpointError(
            f"save: all arrays must be on the same devices, which have values; got {names}."
        )
    if not meshes:
        mesh, device = calling_device()
        return mesh, [device]
    mesh = meshes[0]  # any of them: they have the same devices
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
        mesh = Mesh(axes, mesh.runtime, "cpu", None, mesh.numbers, world=mesh.world)
        return mesh, scope.device
    if dist.is_initialized():
        axes = (("device", process_count()),)
        return Mesh(axes, "process", "cpu", world=world_number()), process_index()
    return None, 0
