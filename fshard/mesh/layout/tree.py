"""Trees of tensors, by optree, in a namespace of fshard.

A `Sharded` is a leaf, the global array: for optree in any namespace and for torch's pytrees. Code
that needs its shards names them: `x.shards`, `flatten_shards`, and `fs.array.lift` for torch.func.
Dataclasses and the node types of torch's pytrees are nodes without registration; a field with
`metadata={"static": True}` (or `{"pytree_node": False}`) is part of the structure.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any, cast

import optree
import torch.utils._pytree as torch_trees
from torch import Tensor, nn

from fshard.errors import LayoutError

NAMESPACE = "fshard"
PyTree = Any
"""A tensor, or any nesting of optree containers with tensors as leaves."""
Structure = optree.PyTreeSpec
_o: Any = optree  # its annotations have no type for any tree


def _counter_children(x: Counter[Any]) -> tuple[list[int], list[Any], list[Any]]:
    keys = list(x)
    return list(x.values()), keys, keys


def _counter_of(keys: list[Any], counts: Sequence[int]) -> Counter[Any]:
    return Counter(dict(zip(keys, counts, strict=True)))


# The milestones of MultiStepLR are a Counter, which optree takes for a leaf.
_o.register_pytree_node(Counter, _counter_children, _counter_of, namespace=NAMESPACE)


def flatten(tree: PyTree, *, none_is_leaf: bool = False) -> tuple[list[Any], Structure]:
    """Return the leaves of a tree and its structure."""
    if type(tree) is Tensor:
        return [tree], _LEAVES[none_is_leaf]
    leaves, structure = _o.tree_flatten(tree, none_is_leaf=none_is_leaf, namespace=NAMESPACE)
    # optree takes the first object of a class for a leaf. Its children may be of new classes too.
    while learn(leaves, NAMESPACE):
        leaves, structure = _o.tree_flatten(tree, none_is_leaf=none_is_leaf, namespace=NAMESPACE)
    return leaves, structure


_LEAVES = [
    cast("Structure", _o.tree_structure(0, none_is_leaf=flag, namespace=NAMESPACE))
    for flag in (False, True)
]
"""The structure of a single leaf: most messages and results are one tensor."""


def flatten_with_paths(
    tree: PyTree, *, none_is_leaf: bool = False
) -> tuple[list[str], list[Any], Structure]:
    """Return the path of each leaf as an expression (`["w"][3]`), the leaves and the structure."""
    leaves, structure = flatten(tree, none_is_leaf=none_is_leaf)
    return [*paths_of(structure)], leaves, structure


def paths_of(structure: Structure) -> tuple[str, ...]:
    """Return the path of each leaf of a structure."""
    try:
        return _paths(structure)
    except TypeError:  # auxiliary data of a node is not hashable
        return _paths.__wrapped__(structure)


@lru_cache(maxsize=256)
def _paths(structure: Structure) -> tuple[str, ...]:
    paths: list[str] = []
    for path in structure.paths():
        keys = [f'["{entry}"]' if isinstance(entry, str) else f"[{entry!r}]" for entry in path]
        paths.append("".join(keys))
    return tuple(paths)


def path_text(path: str) -> str:
    """Return a path as a user reads it: keys of dicts by dots, as modules name parameters.

    >>> path_text('["blocks"][3]["attn.w"]'), path_text('["blocks.3.attn.w"]'), path_text("[1]")
    ('blocks[3].attn.w', 'blocks.3.attn.w', '[1]')
    """
    return re.sub(r'\["([^"]*)"\]', r".\1", path).removeprefix(".")


def unflatten(structure: Structure, leaves: Sequence[Any]) -> PyTree:
    """Put a tree together again."""
    return _o.tree_unflatten(structure, leaves)


def map_leaves(f: Callable[..., Any], tree: PyTree, *trees: PyTree) -> PyTree:
    """Apply a function to every leaf, and to those of other trees beside it; a `Sharded` is one."""
    leaves, structure = flatten(tree)
    columns = [leaves, *[flatten(each)[0] for each in trees]]
    return unflatten(structure, [f(*column) for column in zip(*columns, strict=True)])


def broadcast_prefix(prefix: PyTree, tree: PyTree, *, none_is_leaf: bool = False) -> list[Any]:
    """Return, for every leaf of a tree, its value in a prefix of the tree.

    Raises ValueError if it is not a prefix.
    """
    return _o.broadcast_prefix(prefix, tree, none_is_leaf=none_is_leaf, namespace=NAMESPACE)


@contextmanager
def collected(name: str) -> Generator[Callable[[str], Any]]:
    """Collect the errors of several leaves, and raise one with their paths."""
    errors: list[tuple[str, Exception]] = []

    @contextmanager
    def attempt(path: str) -> Generator[None]:
        try:
            yield
        except (ValueError, TypeError) as error:  # a LayoutError is a ValueError
            errors.append((path, error))

    yield attempt
    if errors:
        raise _joined(name, errors)


def _joined(name: str, errors: Sequence[tuple[str, Exception]]) -> Exception:
    """Return one error with the texts of several, each with the paths of its leaves."""
    paths_by_text: dict[str, list[str]] = {}
    for path, error in errors:
        is_expression = not path.startswith("[")  # such as `argument x["w"]`
        paths_by_text.setdefault(str(error), []).append(path if is_expression else path_text(path))

    lines: list[str] = []
    for text, paths in paths_by_text.items():
        has_paths = any(paths)  # the path of a tree that is one leaf is ""
        lines.append(f"{', '.join(paths)}: {text}" if has_paths else text)

    kinds = {type(error) for _, error in errors}
    if len(kinds) == 1:
        kind = kinds.pop()
    elif LayoutError in kinds:
        kind = LayoutError
    else:
        kind = ValueError
    indent = "\n  "
    start = indent if len(lines) > 1 else ""
    return kind(f"{name}: {start}{indent.join(lines)}")


_torch_nodes: dict[Any, Any] = torch_trees.SUPPORTED_NODES
_lock = threading.Lock()
_leaves: set[type] = {Tensor, nn.Parameter, int, float, str}
"""Classes that are no nodes, or are nodes by now."""


def learn(leaves: Iterable[Any], namespace: str) -> bool:
    """Register the node classes among the leaves; return True if there were any."""
    unregistered = {*map(type, leaves)} - _leaves
    if not unregistered:
        return False
    with _lock:  # optree raises for a class that another thread has registered already
        for kind in unregistered - _leaves:
            # `P` and `Layout` are dataclasses, but leaves.
            library = kind.__module__.partition(".")[0]
            if library in ("torch", "fshard"):
                continue
            if is_dataclass(kind) and not issubclass(kind, Tensor | nn.Module | dict):
                _o.register_pytree_node(kind, *_dataclass_node(kind), namespace=namespace)
            elif kind in _torch_nodes:
                _o.register_pytree_node(kind, *_torch_node(kind), namespace=namespace)
        _leaves.update(unregistered)
    return True


Node = tuple[Callable[[Any], tuple[Any, Any, Any]], Callable[[Any, Any], Any]]
"""A function that flattens objects of a class into (children, auxiliary data, names of the
children), and one that rebuilds them."""


def _dataclass_node(kind: type) -> Node:
    """Return how to flatten a dataclass."""
    names: list[str] = []
    static_names: list[str] = []
    for field in fields(kind):
        is_node = field.metadata.get("pytree_node", True)
        is_static = field.metadata.get("static", not is_node)
        if is_static:
            static_names.append(field.name)
        else:
            names.append(field.name)

    def flatten(x: Any) -> tuple[Any, Any, Any]:
        children = [getattr(x, name) for name in names]
        static_values = tuple(getattr(x, name) for name in static_names)
        return children, static_values, tuple(names)

    def unflatten(values: Any, children: Any) -> Any:
        x = object.__new__(kind)  # not by __init__: children may be anything, such as layouts
        values_by_name = dict(zip(names, children, strict=True))
        values_by_name.update(zip(static_names, values, strict=True))
        for name, value in values_by_name.items():
            object.__setattr__(x, name, value)  # it may be frozen
        return x

    return flatten, unflatten


def _torch_node(kind: type) -> Node:
    """Return how torch's pytrees flatten a class."""
    node = _torch_nodes[kind]

    def flatten(x: Any) -> tuple[Any, Any, Any]:
        children, context = node.flatten_fn(x)
        if node.flatten_with_keys_fn is None:
            return children, context, range(len(children))
        pairs, _ = node.flatten_with_keys_fn(x)
        return children, context, [_name_of_key(key) for key, _ in pairs]

    def unflatten(context: Any, children: Any) -> Any:
        return node.unflatten_fn([*children], context)

    return flatten, unflatten


def _name_of_key(key: Any) -> Any:
    """Return the name, key or index that a key of torch's pytrees has."""
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    raise TypeError(f"a key of torch's pytrees must have a name, a key or an idx; got {key!r}.")
