"""Dataclasses, and what torch knows as a node of trees, as nodes of fshard's trees: nobody has to register them.

    @dataclass
    class Linear:                       {"w": ..., "b": ...}, with attributes
        w: Tensor
        b: Tensor
        rate: float = field(default=0.1, metadata={"static": True})        no leaf: it goes with the structure

`{"pytree_node": False}` says the same as `{"static": True}`.  A node is made anew without calling the class: it has the
fields, and nothing else.  What is registered with optree is left as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from typing import Any

import optree
import torch.utils._pytree as torch_trees
from torch import Tensor, nn

_o: Any = optree
_torch_nodes: dict[Any, Any] = torch_trees.SUPPORTED_NODES
_lock = threading.Lock()
_leaves: set[type] = {Tensor, nn.Parameter, int, float, str}
"""Classes that are no nodes, or are nodes by now."""
by_torch: set[type] = set()
"""Those that are taken apart as torch does it: their parts may be anything."""


def learn(leaves: Iterable[Any], namespace: str) -> bool:
    """Register the classes of leaves that are to be nodes; return whether there were any."""
    unknown = {*map(type, leaves)} - _leaves
    if not unknown:
        return False
    with _lock:
        new = {kind: node for kind in unknown - _leaves if (node := _node(kind)) is not None}
        for kind, (flatten, unflatten) in new.items():
            _o.register_pytree_node(kind, flatten, unflatten, namespace=namespace)
        by_torch.update(kind for kind in new if not _is_record(kind))
        _leaves.update(unknown)
    return True


Node = tuple[Callable[[Any], tuple[Any, Any, Any]], Callable[[Any, Any], Any]]
"""How a class is taken apart, into (children, what is kept besides, names of the children), and put together."""


def _node(kind: type) -> Node | None:
    if kind.__module__.partition(".")[0] in ("torch", "fshard"):
        return None
    if _is_record(kind):
        return _of_fields(kind)
    return _of_torch(_torch_nodes[kind]) if kind in _torch_nodes else None


def _is_record(kind: type) -> bool:
    return is_dataclass(kind) and not issubclass(kind, Tensor | nn.Module | dict)


def _of_fields(kind: type) -> Node:
    """Return how a dataclass is taken apart."""
    static = {one.name: one.metadata.get("static", not one.metadata.get("pytree_node", True)) for one in fields(kind)}
    names = tuple(name for name in static if not static[name])
    kept = tuple(name for name in static if static[name])

    def flatten(x: Any) -> tuple[Any, Any, Any]:
        return [getattr(x, name) for name in names], tuple(getattr(x, name) for name in kept), names

    def unflatten(besides: Any, children: Any) -> Any:
        made = object.__new__(kind)
        for name, value in (*zip(names, children, strict=True), *zip(kept, besides, strict=True)):
            object.__setattr__(made, name, value)  # it may be frozen
        return made

    return flatten, unflatten


def _of_torch(node: Any) -> Node:
    """Return how torch takes a class apart."""

    def flatten(x: Any) -> tuple[Any, Any, Any]:
        children, context = node.flatten_fn(x)
        keys = node.flatten_with_keys_fn and [key for key, _ in node.flatten_with_keys_fn(x)[0]]
        return children, context, range(len(children)) if keys is None else [_entry(key) for key in keys]

    def unflatten(context: Any, children: Any) -> Any:
        return node.unflatten_fn([*children], context)

    return flatten, unflatten


def _entry(key: Any) -> Any:
    """Return the name or number that a key of torch holds."""
    return next(getattr(key, name) for name in ("name", "key", "idx") if hasattr(key, name))
