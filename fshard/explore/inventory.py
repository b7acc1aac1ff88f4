"""The plan of the picture of a tree: layouts and bytes of its leaves.

A tree of parameters or of an optimizer's state becomes branches and leaves, the children of a branch in order. Equal
neighbours in a list are folded, so twelve equal blocks are one line and their bytes are counted twelve times.

    {"blocks": [b, b, b], "norm": g}    =>    blocks  [0..2] 3 x  w  f32[8@data, 6]
                                                                 b  f32[6]
                                              norm            f32[6]
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import optree
from torch import Tensor

from fshard.explore.words import global_bytes, most_bytes
from fshard.mesh.layout import NAMESPACE, Layout, Mesh, PyTree, ShardType
from fshard.mesh.layout.sharded import Sharded, typeof

_o: Any = optree


class Bytes(NamedTuple):
    """Bytes of a subtree: in total, and on the fullest device."""

    total: int = 0
    device: int = 0
    host: int = 0
    unplaced: int = 0

    def plus(self, other: Bytes, times: int = 1) -> Bytes:
        """Add another part, several times."""
        return Bytes(*(mine + times * others for mine, others in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Leaf:
    """A tensor, with its layout if it has one; or something else, by its name."""

    type: ShardType | None
    layout: Layout | None
    other: str = ""

    @property
    def bytes(self) -> Bytes:
        """Its bytes."""
        if self.type is None:
            return Bytes()
        total = global_bytes(self.type)
        if self.layout is None:
            return Bytes(total, unplaced=total)
        held = most_bytes(self.type, self.layout)
        return Bytes(total, host=held) if self.layout.memory == "host" else Bytes(total, device=held)


@dataclass(frozen=True)
class TreeEntry:
    """A child under its name, or `count` equal neighbours under the names of the first and the last."""

    name: str
    node: Leaf | Branch
    count: int = 1


@dataclass(frozen=True)
class Branch:
    """A container: its class and its children."""

    kind: str
    entries: tuple[TreeEntry, ...]

    @property
    def bytes(self) -> Bytes:
        """Bytes of its children together."""
        total = Bytes()
        for entry in self.entries:
            total = total.plus(entry.node.bytes, entry.count)
        return total

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """The meshes of its tensors, in order of occurrence."""
        found: dict[Mesh, None] = {}
        for entry in self.entries:
            if isinstance(entry.node, Branch):
                found |= dict.fromkeys(entry.node.meshes)
            elif entry.node.layout is not None:
                found[entry.node.layout.mesh] = None
        return tuple(found)


def take_stock(tree: PyTree) -> Leaf | Branch:
    """Return the plan of the picture of a tree; a `Leaf` in it is used as it is.

    >>> import torch
    >>> [(entry.name, entry.count, entry.node.bytes.total) for entry in take_stock([torch.zeros(3)] * 4).entries]
    [('[0..3]', 4, 12)]
    """
    if isinstance(tree, Leaf):
        return tree
    if isinstance(tree, Sharded):
        return Leaf(typeof(tree), replace(tree.layout, unit=None))  # blocks with equal layouts are drawn as one
    if isinstance(tree, Tensor):
        return Leaf(typeof(tree), None)
    if tree is None or _is_leaf(tree):
        return Leaf(None, None, _other(tree))
    children, _, keys, _ = _o.tree_flatten_one_level(tree, namespace=NAMESPACE)
    names: tuple[Hashable, ...] = getattr(type(tree), "_fields", None) or keys
    return Branch(
        type(tree).__name__, _folded([(key, take_stock(child)) for key, child in zip(names, children, strict=True)])
    )


def _folded(children: list[tuple[Hashable, Leaf | Branch]]) -> tuple[TreeEntry, ...]:
    """Fold equal neighbours of a list; named entries keep their lines."""
    entries: list[TreeEntry] = []
    for (_, node), run in groupby(
        children, key=lambda child: (None if isinstance(child[0], int) else child[0], child[1])
    ):
        keys = [key for key, _ in run]
        name = str(keys[0]) if isinstance(keys[0], str) else f"[{keys[0]!r}]"
        entries.append(TreeEntry(name if len(keys) == 1 else f"[{keys[0]}..{keys[-1]}]", node, len(keys)))
    return tuple(entries)


def _is_leaf(tree: PyTree) -> bool:
    return bool(_o.tree_is_leaf(tree, namespace=NAMESPACE))


def _other(leaf: object) -> str:
    text = repr(leaf) if isinstance(leaf, bool | int | float | complex | str | None) else type(leaf).__name__
    return text if len(text) <= 40 else text[:39] + "…"
