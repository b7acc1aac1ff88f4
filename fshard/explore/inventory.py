"""The plan of the picture of a tree: layouts and bytes of its leaves.

A tree of parameters or of an optimizer's state becomes branches and leaves, the children of a branch in order. A dict
with dotted names, as of a module's parameters, becomes the tree that the names spell. Equal neighbours in a list are
folded, so twelve equal blocks are one line and their bytes are counted twelve times.

    {"blocks": [b, b, b], "norm": g}    =>    blocks  [0..2] 3 x  w  f32[8@data, 6]
                                                                 b  f32[6]
                                              norm            f32[6]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import optree
from torch import Tensor

from fshard.explore.words import global_bytes, most_bytes
from fshard.mesh.layout import NAMESPACE, Layout, Mesh, PyTree, ShardType
from fshard.mesh.layout.counting import MEMORIES
from fshard.mesh.layout.sharded import Sharded, typeof

_o: Any = optree


class Bytes(NamedTuple):
    """Bytes of a subtree: in total, of the fullest device in each memory, and on no mesh."""

    total: int = 0
    device: int = 0
    host: int = 0
    disk: int = 0
    unplaced: int = 0


@dataclass(frozen=True)
class Leaf:
    """A tensor, with its layout if it has one; or something else, by its name."""

    type: ShardType | None
    layout: Layout | None
    text: str = ""


@dataclass(frozen=True)
class TreeEntry:
    """A child under its name, or `count` equal neighbours under the names of the first and the last."""

    name: str
    node: Leaf | Branch
    count: int = 1


@dataclass(frozen=True)
class Branch:
    """A container: its class ("" for a part of dotted names) and its children."""

    kind: str
    entries: tuple[TreeEntry, ...]


def leaves_of(node: Leaf | Branch, times: int = 1) -> Iterator[tuple[Leaf, int]]:
    """Yield all leaves below a node, and how often each occurs."""
    if isinstance(node, Leaf):
        yield node, times
    else:
        for entry in node.entries:
            yield from leaves_of(entry.node, times * entry.count)


def bytes_of(node: Leaf | Branch) -> Bytes:
    """Add up the bytes of all leaves below a node.

    A leaf at a coordinate (of a stage, an owner) counts for the devices there: the fullest of them is taken.
    """
    total = unplaced = 0
    placed: dict[tuple[str, tuple[str, ...]], dict[int, int]] = defaultdict(
        lambda: defaultdict(int)
    )
    for leaf, times in leaves_of(node):
        if leaf.type is None:
            continue
        total += times * global_bytes(leaf.type)
        if leaf.layout is None:
            unplaced += times * global_bytes(leaf.type)
            continue
        axes = tuple(axis for names, _ in leaf.type.spec.at for axis in names)
        placed[leaf.layout.memory, axes][leaf.layout.mesh.index(leaf.layout.place)] += (
            times * most_bytes(leaf.type, leaf.layout)
        )
    device, host, disk = (
        sum(max(each.values()) for key, each in placed.items() if key[0] == memory)
        for memory in MEMORIES
    )
    return Bytes(total, device, host, disk, unplaced)


def meshes_of(node: Leaf | Branch) -> tuple[Mesh, ...]:
    """List the meshes of the tensors below a node, in order of occurrence."""
    return tuple(
        dict.fromkeys(leaf.layout.mesh for leaf, _ in leaves_of(node) if leaf.layout is not None)
    )


def take_stock(tree: PyTree) -> Leaf | Branch:
    """Return the plan of the picture of a tree.

    >>> import torch
    >>> [(entry.name, entry.count) for entry in take_stock([torch.zeros(3)] * 4).entries]
    [('[0..3]', 4)]
    >>> [(entry.name, entry.node.entries[0].name) for entry in take_stock({"a.w": torch.zeros(3), "b.w": 1}).entries]
    [('a', 'w'), ('b', 'w')]
    """
    if isinstance(tree, Sharded):
        return Leaf(
            typeof(tree), replace(tree.layout, unit=None)
        )  # blocks with equal layouts are drawn as one
    if isinstance(tree, Tensor):
        return Leaf(typeof(tree), None)
    if tree is None or _o.tree_is_leaf(tree, namespace=NAMESPACE):
        text = (
            repr(tree)
            if isinstance(tree, bool | int | float | complex | str | None)
            else type(tree).__name__
        )
        return Leaf(None, None, text if len(text) <= 40 else text[:39] + "…")
    children, _, keys, _ = _o.tree_flatten_one_level(tree, namespace=NAMESPACE)
    names: tuple[Hashable, ...] = getattr(type(tree), "_fields", None) or keys
    nodes = [(key, take_stock(child)) for key, child in zip(names, children, strict=True)]
    return _branch(type(tree).__name__, nodes)


def _branch(kind: str, children: Sequence[tuple[Hashable, Leaf | Branch]]) -> Branch:
    """Make a branch: dotted names become branches, then equal neighbours of a list are folded."""
    groups: dict[Hashable, list[tuple[Hashable, Leaf | Branch]]] = defaultdict(list)
    for key, node in children:
        head, dot, tail = key.partition(".") if isinstance(key, str) else (key, "", "")
        groups[head].append((tail if dot else None, node))
    if any(
        len(entries) > 1 and None in dict(entries) for entries in groups.values()
    ):  # "a" and "a.b"
        return Branch(kind, _folded(children))
    if any(None not in dict(entries) for entries in groups.values()) and all(
        str(head).isdigit() for head in groups
    ):
        groups = {
            int(str(head)): groups[head] for head in sorted(groups, key=lambda head: int(str(head)))
        }
    nodes = [
        (head, entries[0][1] if None in dict(entries) else _branch("", entries))
        for head, entries in groups.items()
    ]
    return Branch(kind, _folded(nodes))


def _folded(children: Sequence[tuple[Hashable, Leaf | Branch]]) -> tuple[TreeEntry, ...]:
    """Fold equal neighbours of a list; named entries keep their lines."""
    entries: list[TreeEntry] = []
    for (_, node), run in groupby(
        children, key=lambda child: (None if isinstance(child[0], int) else child[0], child[1])
    ):
        keys = [key for key, _ in run]
        name = str(keys[0]) if isinstance(keys[0], str) else f"[{keys[0]!r}]"
        entries.append(
            TreeEntry(name if len(keys) == 1 else f"[{keys[0]}..{keys[-1]}]", node, len(keys))
        )
    return tuple(entries)
