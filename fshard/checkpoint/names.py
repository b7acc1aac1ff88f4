"""Names of leaves: the path in the tree without the number of a stage, joined by dots.

    {"state": {"exp_avg": {"blocks.3.w": x}}}     state.exp_avg.blocks.3.w
    [{"0.weight": x}, {"2.weight": y}]            0.weight, 2.weight
    {"qkv.w": Parts(q, k, v)}                     qkv.w

The second tree has the parameters of a module by stages. In the third one the parts of a fused
weight are one array; the counts of their steps are one number.

A path is stored with the kinds of its entries, so that a tree can be built from it: a string is a
key of a dict or a field, a number is a position, and a list of one entry is any other key of a
dict.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any

import optree
import torch
from torch import Tensor, nn

from fshard.errors import CheckpointError
from fshard.mesh.layout import Mesh, PyTree, flatten
from fshard.mesh.layout.sharded import Sharded, key_of, stack
from fshard.mesh.layout.tree import NAMESPACE, Structure

_optree: Any = optree

TreePath = tuple[Any, ...]
PLAIN = (int, float, str, bool, type(None))


@dataclass(frozen=True)
class NamedLeaf:
    """A leaf of a tree and its path.

    `value` is an array, a value of JSON, or an object with a `state_dict`.
    """

    path: TreePath
    value: Any

    @cached_property
    def name(self) -> str:
        return name_of(self.path)


def name_of(path: TreePath) -> str:
    """Return the name of a path.

    >>> name_of(("state", "exp_avg", "blocks.3.w")), name_of(("groups", 0, [1]))
    ('state.exp_avg.blocks.3.w', 'groups.0.1')
    """
    words: list[str] = []
    for key in path:
        words.append(str(key[0]) if isinstance(key, list) else str(key))
    return ".".join(words)


@dataclass(frozen=True)
class JoinedArray:
    """An array that is stored in parts, which are joined along a dim: those of a fused weight."""

    parts: Sequence[Any]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        shape = [*self.parts[0].shape]
        shape[self.dim] = sum(array.shape[self.dim] for array in self.parts)
        return tuple(shape)

    @property
    def dtype(self) -> Any:
        return self.parts[0].dtype


def stored_parts(x: Any) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Yield the arrays that are stored of an array, and where each begins in it."""
    if not isinstance(x, JoinedArray):
        yield (0,) * x.ndim, x
        return
    offset = [0] * x.parts[0].ndim
    for array in x.parts:
        yield tuple(offset), array
        offset[x.dim] += array.shape[x.dim]


def tie_key(x: Any) -> tuple[Any, ...]:
    """Return a key that is equal for tied arrays."""
    return tuple([key_of(array) for _, array in stored_parts(x)])


def as_leaf(x: Any) -> Any:
    """Return the leaf that is stored of a node of parts; return other nodes as they are.

    `LayerPlans.split` makes such nodes, whose class has the `joined_dim` of the fused weight. Parts
    are one array if they can be concatenated, and one value if all of them are it, such as the
    count of their steps.
    """
    dim = getattr(type(x), "joined_dim", None)
    if dim is None:
        return x
    if all(array is x[0] for array in x):
        return x[0]
    if not all(isinstance(array, Tensor | Sharded) for array in x):
        return x
    if all(array.ndim == 0 for array in x):
        if _are_equal(x):
            return x[0]
        raise CheckpointError(
            "the numbers of the parts of one weight must be equal; they have made other steps."
        )
    return JoinedArray(x, dim) if _can_be_joined(x, dim) else x


def _are_equal(numbers: Sequence[Any]) -> bool:
    """Return True if numbers, plain or replicated, are equal on all devices held here."""
    first, *others = [_shards_of(x) for x in numbers]
    if first[0].is_meta:
        return True  # outside of their mesh, where nothing is stored
    return all(all(map(torch.equal, shards, first)) for shards in others)


def _shards_of(x: Any) -> tuple[Tensor, ...]:
    return x.shards if isinstance(x, Sharded) else (x,)


def _can_be_joined(parts: Sequence[Any], dim: int) -> bool:
    """Return True if parts have one dtype and, but along `dim`, one shape."""
    first = parts[0]
    if first.ndim <= dim:  # state that is smaller than the weight, such as one number a row
        return False
    for array in parts:
        shape = (*array.shape[:dim], first.shape[dim], *array.shape[dim + 1 :])
        if array.dtype != first.dtype or shape != tuple(first.shape):
            return False
    return True


def is_array(x: Any) -> bool:
    """Return True for a leaf that is stored as an array."""
    return isinstance(x, Tensor | Sharded | JoinedArray)


def is_object(x: Any) -> bool:
    """Return True for an object whose state is that of its `state_dict`."""
    if is_array(x):
        return False
    has_state = callable(getattr(x, "state_dict", None))
    return has_state and callable(getattr(x, "load_state_dict", None))


class ShardedObject:
    """A base class of objects whose state is stored as shards, unlike that of their `state_dict`.

    `mesh`: of the shards.
    """

    mesh: Mesh

    def sharded_state(self) -> Any:
        """Return the tree that is stored."""
        raise NotImplementedError

    def load_sharded_state(self, state: Any) -> None:
        """Use arrays of `sharded_state`, into which others have been written."""
        raise NotImplementedError


class SummandArray(Sharded):
    """An unreduced array as its summands along a first dim, in the same memory.

    Their number may differ on another mesh.
    """


def opened(tree: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """Replace objects by trees of their arrays; return the tree, and the function that undoes it.

    Modules are replaced by their tensors, a `ShardedObject` by its state, and unreduced
    arrays by their summands. The function gives the objects a state of this form again.
    """
    leaves, structure = nodes_of(tree)
    if not any(map(_is_opened, leaves)):
        return tree, _unchanged

    states: list[PyTree] = []
    closes: list[Callable[[PyTree], Any]] = []
    for x in leaves:
        state, close_leaf = _opened_leaf(x)
        states.append(state)
        closes.append(close_leaf)

    def close(result: PyTree) -> PyTree:
        results = structure.flatten_up_to(result)
        closed: list[Any] = []
        for close_leaf, state in zip(closes, results, strict=True):
            closed.append(close_leaf(state))
        return _optree.tree_unflatten(structure, closed)

    return _optree.tree_unflatten(structure, states), close


def mesh_of_some(tree: PyTree) -> Mesh | None:
    """Return the mesh of a tree's arrays, if it has some devices; None if they are on all, or none.

    The caller may be outside of it.
    """
    try:
        leaves, _ = nodes_of(tree)
    except RecursionError:
        return None  # what saves the tree raises for it

    objects: list[Any] = []  # whose arrays their state alone shows
    for leaf in leaves:
        mesh = _mesh_of_leaf(leaf)
        if mesh is not None:
            is_of_some = mesh.numbers is not None or not mesh.is_member
            return mesh if is_of_some else None
        if is_object(leaf):
            objects.append(leaf)
    for x in objects:
        mesh = mesh_of_some(x.state_dict())
        if mesh is not None:
            return mesh
    return None


def _mesh_of_leaf(leaf: Any) -> Mesh | None:
    """Return the mesh of an array, or of an object of arrays; None for another leaf."""
    x = as_leaf(leaf)
    if isinstance(x, ShardedObject):
        return x.mesh
    if is_array(x):
        for _, array in stored_parts(x):
            if isinstance(array, Sharded):
                return array.mesh
    return None


def _unchanged(x: Any) -> Any:
    return x


def _is_opened(x: Any) -> bool:
    """Return True for a leaf that `opened` may replace."""
    if isinstance(x, Sharded):
        return bool(x.spec.unreduced)
    return isinstance(x, ShardedObject | nn.Module)


def _opened_leaf(x: Any) -> tuple[PyTree, Callable[[PyTree], Any]]:
    """Return the tree that is stored of a leaf, and the function from such a tree to the leaf."""

    def same_leaf(_: PyTree) -> Any:
        return x  # the tree is in its memory

    if isinstance(x, Sharded) and x.spec.unreduced:
        summands = stack(x, x.spec.unreduced)
        return SummandArray(summands.shape, summands.layout, summands.shards), same_leaf

    if isinstance(x, ShardedObject):
        state, close = opened(x.sharded_state())

        def load(result: PyTree) -> Any:
            x.load_sharded_state(close(result))
            return x

        return state, load

    # A module whose state has more than arrays is an object, which loads its state itself.
    if isinstance(x, nn.Module):
        state = dict(x.state_dict(keep_vars=True))
        if state and all(map(is_array, state.values())):
            return state, same_leaf
    return x, _unchanged


def _is_leaf(x: Any) -> bool:
    return is_array(x) or is_object(x) or as_leaf(x) is not x


def nodes_of(tree: PyTree) -> tuple[list[Any], Structure]:
    """Return the leaves of a tree before `as_leaf`, without empty containers; and its structure."""
    nodes, structure = flatten(tree, none_is_leaf=True)
    if _has_plain_nodes(structure):
        return nodes, structure
    return _optree.tree_flatten(tree, is_leaf=_is_leaf, none_is_leaf=True, namespace=NAMESPACE)


def _has_plain_nodes(structure: Structure) -> bool:
    """Return True if no node of a structure may be a leaf of a saved tree."""
    try:
        return _are_plain_nodes(structure)
    except TypeError:  # something in the structure has no hash
        return False


@lru_cache(maxsize=64)
def _are_plain_nodes(structure: Structure) -> bool:
    kind = structure.type
    if kind is None:
        return True  # a leaf
    if not issubclass(kind, dict | list | tuple) or hasattr(kind, "joined_dim"):
        return False
    return not hasattr(kind, "state_dict") and all(map(_are_plain_nodes, structure.children()))


def leaves_of(tree: PyTree) -> list[NamedLeaf]:
    """Return the leaves of a tree in its order, None and empty containers too."""
    flatten(tree)  # registers the dataclasses in it
    return [*_walk(tree, ())]


def flattened(tree: PyTree) -> tuple[list[NamedLeaf], Callable[[Sequence[Any]], PyTree]]:
    """Return the leaves of a tree, and the function that returns the tree of other leaves.

    Empty containers are no leaves here.
    """
    leaves: list[NamedLeaf] = []
    for leaf in leaves_of(tree):
        is_empty_container = isinstance(leaf.value, dict | list) and not leaf.value
        if not is_empty_container:
            leaves.append(leaf)

    nodes, structure = nodes_of(tree)

    def unflatten(values: Sequence[Any]) -> PyTree:
        return _optree.tree_unflatten(structure, [*map(_as_node, nodes, values)])

    return leaves, unflatten


def _as_node(node: Any, x: Any) -> Any:
    """Return a leaf in the form of the node that it is of: for a node of parts, its parts."""
    if not hasattr(type(node), "joined_dim"):
        return x
    parts = x.parts if isinstance(x, JoinedArray) else [x] * len(node)
    return type(node)(*parts)


def _walk(node: Any, path: TreePath) -> Iterator[NamedLeaf]:
    """Yield the leaves of a node at a path."""
    leaf = as_leaf(node)
    if leaf is not node or is_array(node) or isinstance(node, PLAIN) or is_object(node):
        yield NamedLeaf(path, leaf)
        return

    if isinstance(node, list | tuple) and _are_stages(node):
        for stage in node:
            if stage:  # an empty one is no leaf, since a stage has no name
                yield from _walk(stage, path)
        return

    try:
        children, _, entries, _ = _optree.tree_flatten_one_level(
            node, none_is_leaf=True, namespace=NAMESPACE
        )
    except ValueError:  # not a container
        yield NamedLeaf(path, node)
        return

    # optree has the positions of a namedtuple's entries; names have its fields.
    entries = getattr(node, "_fields", entries)
    is_dict = isinstance(node, dict)
    if not children and isinstance(node, dict | list | tuple):
        yield NamedLeaf(path, {} if is_dict else [])
    for entry, child in zip(entries, children, strict=True):
        if is_dict and not isinstance(entry, str):
            entry = [entry]
        yield from _walk(child, (*path, entry))


def _are_stages(node: Sequence[Any]) -> bool:
    """Return True for parameters of modules by stage: dicts whose names, with dots, differ."""
    if hasattr(node, "_fields") or not all(isinstance(stage, dict) for stage in node):
        return False
    keys = [*chain.from_iterable(node)]
    are_different = len({*keys}) == len(keys)
    are_names = all(isinstance(key, str) for key in keys)
    return are_different and are_names and any("." in key for key in keys)


def build(items: Sequence[tuple[TreePath, Any]]) -> PyTree:
    """Return the tree of some paths and values: dicts and lists.

    >>> build([(("a", 0), 1), (("a", 1), 2), (("b", [3]), 4)])
    {'a': [1, 2], 'b': {3: 4}}
    """
    with limited_depth():
        return _build(items)


@contextmanager
def limited_depth() -> Generator[None]:
    """Raise a CheckpointError for a tree that is nested too deep for Python."""
    try:
        yield
    except RecursionError as error:
        text = (
            f"a tree must be nested less deep than Python's limit, {sys.getrecursionlimit()} calls"
        )
        raise CheckpointError(f"{text}; got one that is deeper. Flatten its containers.") from error


def _build(items: Sequence[tuple[TreePath, Any]]) -> PyTree:
    if len(items) == 1 and items[0][0] == ():
        return items[0][1]

    children: dict[Any, list[tuple[TreePath, Any]]] = {}
    for path, value in items:
        if not path:
            raise CheckpointError(
                "a leaf of the checkpoint is a container of others. Give a target to restore into."
            )
        entry = path[0]
        # Another key of a dict than a string, [3], is ("key", 3) here: a list has no hash, and a
        # number alone is a position.
        key = ("key", entry[0]) if isinstance(entry, list) else entry
        children.setdefault(key, []).append((path[1:], value))

    trees = {key: _build(child) for key, child in children.items()}
    if trees and all(isinstance(key, int) for key in trees):
        return [trees[key] for key in sorted(trees)]
    result: dict[Any, PyTree] = {}
    for key, child in trees.items():
        result[key[1] if isinstance(key, tuple) else key] = child
    return result


def shaped(tree: PyTree, like: PyTree) -> PyTree:
    """Return a tree of dicts and lists with the tuples and Counters of another one.

    What the other one does not have stays as it is.

    >>> shaped({"betas": [1, 2], "lr": [3]}, {"betas": (0, 0)})
    {'betas': (1, 2), 'lr': [3]}
    """
    if isinstance(tree, dict):
        inner = like if isinstance(like, dict) else {}
        result = {key: shaped(child, inner.get(key)) for key, child in tree.items()}
        return type(like)(result) if isinstance(like, Counter) else result
    if isinstance(tree, list):
        inner = [None] * len(tree)
        if isinstance(like, list | tuple) and len(like) == len(tree):
            inner = like
        items = [*map(shaped, tree, inner)]
        return tuple(items) if isinstance(like, tuple) else items
    return tree


def validate_unique(leaves: Sequence[NamedLeaf], subject: str) -> None:
    """Raise if leaves that are different have one name."""
    firsts: dict[str, NamedLeaf] = {}
    repeated: dict[str, None] = {}  # a set in order
    for leaf in leaves:
        first = firsts.setdefault(leaf.name, leaf)
        if first.value is not leaf.value or first.path != leaf.path:
            repeated[leaf.name] = None
    if repeated:
        raise CheckpointError(
            f"{subject}: names must be of one leaf each; got several called {', '.join(repeated)}."
        )
