"""Trees of tensors, by optree: the few operations that fshard needs, in its own namespace.

Dataclasses are nodes (see `records`).

A `Sharded` is a node whose children are its shards (so that elementwise code need not know it), or, with
`sharded_is_leaf`, a leaf: the global array.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, cast

import optree
from torch import Tensor

from fshard.mesh.records import by_torch, learn

NAMESPACE = "fshard"
PyTree = Any
"""A tensor, or any nesting of containers that optree knows with tensors at the leaves."""
Structure = optree.PyTreeSpec
_o: Any = optree  # its annotations know no "any tree", which is what is passed here

_is_global: list[Callable[[Any], bool]] = []


def register_node(kind: type, flatten: Callable[[Any], Any], unflatten: Callable[[Any, Any], Any]) -> None:
    """Make the class of global arrays a node of trees."""
    _o.register_pytree_node(kind, flatten, unflatten, namespace=NAMESPACE)
    _is_global.append(kind.__instancecheck__)  # asked of every node of every tree: no frame of Python for it


def flatten(tree: PyTree, *, sharded_is_leaf: bool = False, none_is_leaf: bool = False) -> tuple[list[Any], Structure]:
    """Return the leaves of a tree and its structure."""
    if type(tree) is Tensor:
        return [tree], _LEAVES[none_is_leaf]
    is_leaf = _is_global[0] if sharded_is_leaf else None
    leaves, structure = _o.tree_flatten(tree, is_leaf=is_leaf, none_is_leaf=none_is_leaf, namespace=NAMESPACE)
    while learn(leaves, NAMESPACE):
        leaves, structure = _o.tree_flatten(tree, is_leaf=is_leaf, none_is_leaf=none_is_leaf, namespace=NAMESPACE)
    return leaves, structure


_LEAVES = [cast("Structure", _o.tree_structure(0, none_is_leaf=one, namespace=NAMESPACE)) for one in (False, True)]
"""The structure of what is a leaf itself: most messages and results are one tensor."""


def flatten_with_paths(
    tree: PyTree, *, sharded_is_leaf: bool = False, none_is_leaf: bool = False
) -> tuple[list[str], list[Any], Structure]:
    """Return where each leaf stands, as the expression that leads there (`["w"][3]`), the leaves and the structure."""
    leaves, structure = flatten(tree, sharded_is_leaf=sharded_is_leaf, none_is_leaf=none_is_leaf)
    return [*paths_of(structure)], leaves, structure


def torch_alone_knows(x: Any) -> bool:
    """Return whether an object, of a tree that was flattened before, is taken apart as torch does it."""
    return type(x) in by_torch


def any_known() -> bool:
    """Return whether any object so far was taken apart as torch does it."""
    return bool(by_torch)


def flatten_outside(tree: PyTree) -> tuple[list[str], list[Any], Structure]:
    """As `flatten_with_paths`, of a tree that was flattened before; objects that torch alone takes apart are leaves."""
    leaves, structure = _o.tree_flatten(tree, is_leaf=_is_outer, none_is_leaf=True, namespace=NAMESPACE)
    return [*paths_of(structure)], leaves, structure


def _is_outer(x: Any) -> bool:
    return type(x) in by_torch or _is_global[0](x)


def paths_of(structure: Structure) -> tuple[str, ...]:
    """Return where each leaf of a structure stands."""
    try:
        return _paths(structure)
    except TypeError:  # what a node holds beside its children has no hash
        return _paths.__wrapped__(structure)


@lru_cache(maxsize=256)
def _paths(structure: Structure) -> tuple[str, ...]:
    return tuple("".join(_entry(entry) for entry in path) for path in structure.paths())


def _entry(entry: object) -> str:
    return f'["{entry}"]' if isinstance(entry, str) else f"[{entry!r}]"


def unflatten(structure: Structure, leaves: Sequence[Any]) -> PyTree:
    """Put a tree together again."""
    return _o.tree_unflatten(structure, leaves)


def map_leaves(f: Callable[[Any], Any], tree: PyTree) -> PyTree:
    """Apply a function to every leaf; a `Sharded` is one."""
    leaves, structure = flatten(tree, sharded_is_leaf=True)
    return unflatten(structure, [f(leaf) for leaf in leaves])


def broadcast_prefix(prefix: PyTree, tree: PyTree, *, none_is_leaf: bool = False) -> list[Any]:
    """Return for every leaf of a tree what a prefix of the tree says of it; ValueError if it is no prefix."""
    return _o.broadcast_prefix(prefix, tree, is_leaf=_is_global[0], none_is_leaf=none_is_leaf, namespace=NAMESPACE)
