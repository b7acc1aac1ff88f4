"""Names of leaves: the path in the tree without the number of a stage, joined by dots.

    {"state": {"exp_avg": {"blocks.3.w": x}}}     state.exp_avg.blocks.3.w
    [{"0.weight": x}, {"2.weight": y}]            0.weight, 2.weight      parameters of modules, in stages
    {"qkv.w": Parts(q, k, v)}                     qkv.w: the parts of a fused weight are one array, their count one number

A path is stored with the kinds of its entries, so that a tree can be built from it: a string is a key of a dict or a
field, a number is a position, and a list of one entry is any other key of a dict.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import optree
import torch
from torch import Tensor, nn

from fshard.errors import CheckpointError
from fshard.mesh.layout import PyTree, flatten
from fshard.mesh.layout.sharded import Sharded, key_of, stack
from fshard.mesh.layout.tree import NAMESPACE

_optree: Any = optree
_optree.register_pytree_node(
    Counter,
    lambda x: ([*x.values()], [*x], [*x]),
    lambda keys, x: Counter(dict(zip(keys, x, strict=True))),
    namespace=NAMESPACE,
)
TreePath = tuple[Any, ...]
PLAIN = (int, float, str, bool, type(None))


@dataclass(frozen=True)
class NamedLeaf:
    """A leaf of a tree and its path; `value` is an array, a value of JSON, or an object with a `state_dict`."""

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
    return ".".join(str(key[0]) if isinstance(key, list) else str(key) for key in path)


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
    start = 0
    for array in x.parts:
        yield tuple([start * (dim == x.dim) for dim in range(array.ndim)]), array
        start += array.shape[x.dim]


def tie_key(x: Any) -> tuple[Any, ...]:
    """Return a key that is equal for tied arrays."""
    return tuple([key_of(array) for _, array in stored_parts(x)])


def as_leaf(x: Any) -> Any:
    """Return the leaf that is stored of a node of parts, which has a `joined_dim`: see `LayerPlans.split`; else the node.

    Parts are one array if they can be concatenated, and one value if all of them are it, such as the count of their steps.
    """
    dim = getattr(type(x), "joined_dim", None)
    if dim is None:
        return x
    if all(array is x[0] for array in x):
        return x[0]
    if not all(isinstance(array, Tensor | Sharded) for array in x):
        return x
    if all(array.ndim == 0 for array in x):
        shards = [array.shards if isinstance(array, Sharded) else (array,) for array in x]
        if all(torch.equal(a, b) for row in shards for a, b in zip(row, shards[0], strict=True)):
            return x[0]
        raise CheckpointError(
            "the numbers of the parts of one weight must be equal; they have made other steps."
        )
    kinds = {(array.dtype, *array.shape[:dim], None, *array.shape[dim + 1 :]) for array in x}
    return JoinedArray(x, dim) if len(kinds) == 1 and x[0].ndim > dim else x


def is_array(x: Any) -> bool:
    """Return True for a leaf that is stored as an array."""
    return isinstance(x, Tensor | Sharded | JoinedArray)


def is_object(x: Any) -> bool:
    """Return True for an object whose state is that of its `state_dict`."""
    return (
        not is_array(x)
        and callable(getattr(x, "state_dict", None))
        and callable(getattr(x, "load_state_dict", None))
    )


class ShardedObject:
    """A base class of objects whose state is stored as shards, unlike that of their `state_dict`."""

    def sharded_state(self) -> Any:
        """Return the tree that is stored."""
        raise NotImplementedError

    def load_sharded_state(self, state: Any) -> None:
        """Use arrays of `sharded_state`, into which others have been written."""
        raise NotImplementedError


class SummandArray(Sharded):
    """An unreduced array as its summands along a first dim, in the same memory; their number may differ on another mesh."""


def opened(tree: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """Replace modules by their tensors, a `ShardedObject` by its state, unreduced arrays by their summands.

    Return the tree, and a function that gives the objects such a state again.
    """
    flatten(tree)  # registers the dataclasses in it
    leaves, structure = _optree.tree_flatten(
        tree, is_leaf=_is_leaf, none_is_leaf=True, namespace=NAMESPACE
    )
    pairs = [_opened_leaf(x) for x in leaves]
    if all(x is state for x, (state, _) in zip(leaves, pairs, strict=True)):
        return tree, lambda result: result

    def close(result: PyTree) -> PyTree:
        values = zip(pairs, structure.flatten_up_to(result), strict=True)
        return _optree.tree_unflatten(
            structure, [close_leaf(value) for (_, close_leaf), value in values]
        )

    return _optree.tree_unflatten(structure, [state for state, _ in pairs]), close


def _opened_leaf(x: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return the tree that is stored of a leaf, and the function that returns the leaf from such a tree, in its memory."""
    if isinstance(x, Sharded) and x.spec.unreduced:
        summands = stack(x, x.spec.unreduced)
        return SummandArray(summands.shape, summands.layout, summands.shards), lambda result: x
    if isinstance(x, ShardedObject):
        state, close = opened(x.sharded_state())

        def load(result: Any) -> Any:
            x.load_sharded_state(close(result))
            return x

        return state, load
    state = dict(x.state_dict(keep_vars=True)) if isinstance(x, nn.Module) else {}
    if state and all(map(is_array, state.values())):
        return state, lambda result: x
    return x, lambda result: result


def _is_leaf(x: Any) -> bool:
    return is_array(x) or is_object(x) or as_leaf(x) is not x


def leaves_of(tree: PyTree) -> list[NamedLeaf]:
    """Return the leaves of a tree in its order, None and empty containers too."""
    flatten(tree)  # registers the dataclasses in it
    return [*_walk(tree, ())]


def flattened(tree: PyTree) -> tuple[list[NamedLeaf], Callable[[Sequence[Any]], PyTree]]:
    """Return the leaves of a tree, without empty containers, and the function that returns a tree of other leaves."""
    leaves = [
        leaf
        for leaf in leaves_of(tree)
        if not (isinstance(leaf.value, dict | list) and not leaf.value)
    ]
    nodes, structure = _optree.tree_flatten(
        tree, is_leaf=_is_leaf, none_is_leaf=True, namespace=NAMESPACE
    )

    def as_node(node: Any, x: Any) -> Any:
        """Return a leaf in the form of the node of parts that it is of."""
        if not hasattr(type(node), "joined_dim"):
            return x
        return type(node)(*(x.parts if isinstance(x, JoinedArray) else [x] * len(node)))

    return leaves, lambda values: _optree.tree_unflatten(structure, [*map(as_node, nodes, values)])


def _walk(node: Any, path: TreePath) -> Iterator[NamedLeaf]:
    leaf = as_leaf(node)
    if leaf is not node or is_array(node) or isinstance(node, PLAIN) or is_object(node):
        yield NamedLeaf(path, leaf)
        return
    if isinstance(node, list | tuple) and _are_stages(node):
        for stage in filter(None, node):
            yield from _walk(stage, path)
        return
    try:
        children, _, entries, _ = _optree.tree_flatten_one_level(
            node, none_is_leaf=True, namespace=NAMESPACE
        )
    except ValueError:  # not a container
        yield NamedLeaf(path, node)
        return
    entries = getattr(node, "_fields", entries)
    if not children and isinstance(node, dict | list | tuple):
        yield NamedLeaf(path, {} if isinstance(node, dict) else [])
    for entry, child in zip(entries, children, strict=True):
        is_other_key = isinstance(node, dict) and not isinstance(entry, str)
        yield from _walk(child, (*path, [entry] if is_other_key else entry))


def _are_stages(node: Sequence[Any]) -> bool:
    """Return True for parameters of modules by stage: dicts whose names, with dots, differ."""
    if hasattr(node, "_fields") or not all(isinstance(stage, dict) for stage in node):
        return False
    keys = [key for stage in node for key in stage]
    differ = len({*keys}) == len(keys) and all(isinstance(key, str) for key in keys)
    return differ and any("." in key for key in keys)


def build(items: Sequence[tuple[TreePath, Any]]) -> PyTree:
    """Return the tree of some paths and values: dicts and lists.

    >>> build([(("a", 0), 1), (("a", 1), 2), (("b", [3]), 4)])
    {'a': [1, 2], 'b': {3: 4}}
    """
    with limited_depth():
        return _build(items)


@contextmanager
def limited_depth() -> Generator[None]:
    """Raise for a tree that is nested too deep for Python as for any other that is no checkpoint."""
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
        key = path[0]
        children.setdefault(("key", key[0]) if isinstance(key, list) else key, []).append(
            (path[1:], value)
        )
    trees = {key: _build(child) for key, child in children.items()}
    if trees and all(isinstance(key, int) for key in trees):
        return [trees[key] for key in sorted(trees)]
    return {key[1] if isinstance(key, tuple) else key: x for key, x in trees.items()}


def shaped(tree: PyTree, like: PyTree) -> PyTree:
    """Return a tree of dicts and lists with the tuples and Counters of another one, as far as that has their keys.

    >>> shaped({"betas": [1, 2], "lr": [3]}, {"betas": (0, 0)})
    {'betas': (1, 2), 'lr': [3]}
    """
    if isinstance(tree, dict):
        inner = like if isinstance(like, dict) else {}
        result = {key: shaped(x, inner.get(key)) for key, x in tree.items()}
        return type(like)(result) if isinstance(like, Counter) else result
    if isinstance(tree, list):
        inner = (
            like
            if isinstance(like, list | tuple) and len(like) == len(tree)
            else [None] * len(tree)
        )
        items = [*map(shaped, tree, inner)]
        return tuple(items) if isinstance(like, tuple) else items
    return tree


def validate_unique(leaves: Sequence[NamedLeaf], subject: str) -> None:
    """Raise if leaves that are different have one name."""
    firsts = dict[str, NamedLeaf]()
    pairs = [(leaf, firsts.setdefault(leaf.name, leaf)) for leaf in leaves]
    repeated = dict.fromkeys(
        x.name for x, first in pairs if first.value is not x.value or first.path != x.path
    )
    if repeated:
        raise CheckpointError(
            f"{subject}: names must be of one leaf each; got several called {', '.join(repeated)}."
        )
