"""Names of leaves: the path in the tree without the number of a stage, joined by dots.

    {"state": {"exp_avg": {"blocks.3.w": x}}}     state.exp_avg.blocks.3.w
    [{"0.weight": x}, {"2.weight": y}]            0.weight, 2.weight      parameters of modules, in stages
    Joined parts of one fused weight              one name, each part with its offset

A path is stored with the kinds of its entries, so that a tree can be built from it: a string is a key of a dict or a
field, a number is a position, and a list of one entry is any other key of a dict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import optree
from torch import Tensor

from fshard.errors import CheckpointError
from fshard.mesh.layout import PyTree, flatten
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.layout.tree import NAMESPACE

Path = tuple[Any, ...]
PLAIN = (int, float, str, bool, type(None))


@dataclass(frozen=True)
class Leaf:
    """A leaf of a tree and its path; `value` is an array, a value of JSON, or an object with a `state_dict`."""

    path: Path
    value: Any

    @property
    def name(self) -> str:
        return name_of(self.path)


def name_of(path: Path) -> str:
    """Return the name of a path.

    >>> name_of(("state", "exp_avg", "blocks.3.w")), name_of(("groups", 0, [1]))
    ('state.exp_avg.blocks.3.w', 'groups.0.1')
    """
    return ".".join(str(one[0]) if isinstance(one, list) else str(one) for one in path)


def is_array(x: Any) -> bool:
    """Return True for a leaf that is stored as an array."""
    return isinstance(x, Tensor | Sharded)


def is_object(x: Any) -> bool:
    """Return True for an object whose state is that of its `state_dict`."""
    return (
        not is_array(x) and callable(getattr(x, "state_dict", None)) and callable(getattr(x, "load_state_dict", None))
    )


def leaves_of(tree: PyTree) -> list[Leaf]:
    """Return the leaves of a tree in its order, None and empty containers too."""
    flatten(tree)  # registers the dataclasses in it
    return [*_walk(tree, ())]


def flattened(tree: PyTree) -> tuple[list[Leaf], Callable[[Sequence[Any]], PyTree]]:
    """Return the leaves of a tree, without empty containers, and a function that puts others in their place."""
    leaves = [leaf for leaf in leaves_of(tree) if not (isinstance(leaf.value, dict | list) and not leaf.value)]
    structure = optree.tree_structure(
        tree, is_leaf=lambda x: is_array(x) or is_object(x), none_is_leaf=True, namespace=NAMESPACE
    )
    return leaves, lambda values: optree.tree_unflatten(structure, values)


def _walk(node: Any, path: Path) -> Iterator[Leaf]:
    if is_array(node) or isinstance(node, PLAIN) or is_object(node):
        yield Leaf(path, node)
        return
    if isinstance(node, list | tuple) and _are_stages(node):
        for stage in node:
            yield from _walk(stage, path)
        return
    try:
        children, _, entries, _ = _one_level(node)
    except ValueError:  # not a container
        yield Leaf(path, node)
        return
    entries = getattr(node, "_fields", entries)
    if not children and isinstance(node, dict | list | tuple):
        yield Leaf(path, {} if isinstance(node, dict) else [])
    for entry, child in zip(entries, children, strict=True):
        yield from _walk(child, (*path, _entry(entry, node)))


def _one_level(node: Any) -> Any:
    one: Any = optree
    return one.tree_flatten_one_level(node, none_is_leaf=True, namespace=NAMESPACE)


def _entry(entry: Any, node: Any) -> Any:
    if isinstance(entry, str) or not isinstance(node, dict):
        return entry
    return [entry]


def _are_stages(node: Sequence[Any]) -> bool:
    """Return True for parameters of modules by stage: dicts whose names, with dots, differ."""
    if hasattr(node, "_fields") or not all(isinstance(stage, dict) for stage in node):
        return False
    keys = [key for stage in node for key in stage]
    return any(isinstance(key, str) and "." in key for key in keys) and all(isinstance(key, str) for key in keys)


def build(items: Sequence[tuple[Path, Any]]) -> PyTree:
    """Return the tree of some paths and values: dicts and lists.

    >>> build([(("a", 0), 1), (("a", 1), 2), (("b", [3]), 4)])
    {'a': [1, 2], 'b': {3: 4}}
    """
    if len(items) == 1 and items[0][0] == ():
        return items[0][1]
    below: dict[Any, list[tuple[Path, Any]]] = {}
    for path, value in items:
        key = path[0]
        below.setdefault(("key", key[0]) if isinstance(key, list) else key, []).append((path[1:], value))
    built = {key: build(rest) for key, rest in below.items()}
    if built and all(isinstance(key, int) for key in built):
        return [built[key] for key in sorted(built)]
    return {key[1] if isinstance(key, tuple) else key: x for key, x in built.items()}


def refuse_repeated(leaves: Sequence[Leaf], what: str) -> None:
    """Raise if leaves that are different have one name."""
    seen: dict[str, Leaf] = {}
    repeated: dict[str, None] = {}
    for leaf in leaves:
        if seen.setdefault(leaf.name, leaf).value is not leaf.value:
            repeated[leaf.name] = None
    if repeated:
        raise CheckpointError(f"{what}: names must be of one leaf each; got several called {', '.join(repeated)}.")
