"""The plan of the picture of a tree: layouts and bytes of its leaves.

A tree of parameters or of an optimizer's state becomes branches and leaves, the children of a
branch in order. A dict with dotted names, as of a module's parameters, becomes the tree that the
names spell. Equal neighbours in a list are folded, so twelve equal blocks are one line and their
bytes are counted twelve times.

    {"blocks": [b, b, b], "norm": g}    =>    blocks  [0..2] 3 x  w  f32[8@data, 6]
                                                                 b  f32[6]
                                              norm            f32[6]
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import optree
from torch import Tensor

from fshard.mesh.layout import NAMESPACE, Layout, Memory, Mesh, PyTree, ShardType
from fshard.mesh.layout.layout import global_bytes, most_bytes
from fshard.mesh.layout.sharded import Sharded, typeof

_o: Any = optree

_LONGEST = 40
"""The letters of a value that is no tensor."""


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
    """A child under its name, or `count` equal neighbours under the first and the last name."""

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

    A leaf at a coordinate (of a stage, an owner) counts for the devices there. Of these
    coordinates the one with the most bytes counts.
    """
    total = 0
    unplaced = 0
    # By memory and the axes of a coordinate: the bytes at each coordinate, by its first device.
    placed: dict[tuple[Memory, tuple[str, ...]], Counter[int]] = defaultdict(Counter)
    for leaf, times in leaves_of(node):
        if leaf.type is None:
            continue
        size_in_all = times * global_bytes(leaf.type)
        total += size_in_all
        if leaf.layout is None:
            unplaced += size_in_all
            continue
        device = leaf.layout.mesh.index(leaf.layout.place)
        sizes = placed[leaf.layout.memory, leaf.type.spec.at_axes]
        sizes[device] += times * most_bytes(leaf.type, leaf.layout)

    fullest: Counter[Memory] = Counter()
    for (memory, _), sizes in placed.items():
        fullest[memory] += max(sizes.values())
    return Bytes(total, fullest["device"], fullest["host"], fullest["disk"], unplaced)


def meshes_of(node: Leaf | Branch) -> tuple[Mesh, ...]:
    """List the meshes of the tensors below a node, in order of occurrence."""
    layouts = [leaf.layout for leaf, _ in leaves_of(node)]
    return tuple(dict.fromkeys(layout.mesh for layout in layouts if layout is not None))


def take_stock(tree: PyTree) -> Leaf | Branch:
    """Return the plan of the picture of a tree.

    >>> import torch
    >>> [(entry.name, entry.count) for entry in take_stock([torch.zeros(3)] * 4).entries]
    [('[0..3]', 4)]
    >>> stock = take_stock({"a.w": torch.zeros(3), "b.w": 1})
    >>> [(entry.name, entry.node.entries[0].name) for entry in stock.entries]
    [('a', 'w'), ('b', 'w')]
    """
    if isinstance(tree, Sharded):
        layout = replace(tree.layout, unit=None)  # equal blocks are folded, whatever their units
        return Leaf(typeof(tree), layout)
    if isinstance(tree, Tensor):
        return Leaf(typeof(tree), None)
    if tree is None or _o.tree_is_leaf(tree, namespace=NAMESPACE):
        return Leaf(None, None, _text_of(tree))

    children, _, keys, _ = _o.tree_flatten_one_level(tree, namespace=NAMESPACE)
    names: Sequence[Hashable] = getattr(type(tree), "_fields", None) or keys  # of a named tuple
    nodes = [(name, take_stock(child)) for name, child in zip(names, children, strict=True)]
    return _branch(type(tree).__name__, nodes)


def _text_of(x: object) -> str:
    """Return a number or a string as text, anything else by its class."""
    is_plain = isinstance(x, bool | int | float | complex | str | None)
    text = repr(x) if is_plain else type(x).__name__
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST - 1]}…"
    return text


Child = tuple[Hashable, "Leaf | Branch"]
"""A child of a branch, under its name or number."""


def _branch(kind: str, children: Sequence[Child]) -> Branch:
    """Make a branch: dotted names become branches, then equal neighbours of a list are folded."""
    # By the name before the first dot: the names after it, None without a dot, and the nodes.
    groups: dict[Hashable, list[tuple[str | None, Leaf | Branch]]] = defaultdict(list)
    for key, node in children:
        head, tail = _split_at_dot(key)
        groups[head].append((tail, node))

    nodes: list[Child] = []
    for head, entries in _in_order(groups).items():
        tails = [tail for tail, _ in entries]
        if None not in tails:
            nodes.append((head, _branch("", entries)))
        elif len(entries) == 1:
            nodes.append((head, entries[0][1]))
        else:
            return Branch(kind, _folded(children))  # "a" and "a.b": the names spell no tree
    return Branch(kind, _folded(nodes))


def _split_at_dot(key: Hashable) -> tuple[Hashable, str | None]:
    """Return the part of a name before its first dot and the one after it; None without a dot."""
    if not isinstance(key, str):
        return key, None
    head, dot, tail = key.partition(".")
    return head, tail if dot else None


def _in_order(groups: Mapping[Hashable, list[Any]]) -> Mapping[Hashable, list[Any]]:
    """Sort the groups of "0.w", "1.w", ... by number: so they are a list, and can be folded."""
    numbers: dict[int, Hashable] = {}
    has_dots = False
    for head, entries in groups.items():
        if not str(head).isdecimal():
            return groups
        numbers[int(str(head))] = head
        has_dots |= any(tail is not None for tail, _ in entries)
    is_unique = len(numbers) == len(groups)  # unlike "1.w" and "01.w"
    if not has_dots or not is_unique:
        return groups
    return {number: groups[numbers[number]] for number in sorted(numbers)}


def _folded(children: Sequence[Child]) -> tuple[TreeEntry, ...]:
    """Fold equal neighbours of a list; named entries keep their lines."""

    def key_of_run(child: Child) -> tuple[Hashable, Leaf | Branch]:
        key, node = child
        name = None if isinstance(key, int) else key
        return name, node

    entries: list[TreeEntry] = []
    for (_, node), run in groupby(children, key_of_run):
        keys = [key for key, _ in run]
        if len(keys) > 1:
            name = f"[{keys[0]}..{keys[-1]}]"
        elif isinstance(keys[0], str):
            name = keys[0]
        else:
            name = f"[{keys[0]!r}]"
        entries.append(TreeEntry(name, node, len(keys)))
    return tuple(entries)
