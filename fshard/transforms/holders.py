"""Objects that may be changed and stay the same: lists, tensors, arrays, objects of the user's own; and who shares memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from enum import Enum
from functools import partial
from logging import Logger
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any

import torch
from torch import Tensor, nn

from fshard.transforms.old_copying import CONTAINERS, MANY, slots_of
from fshard.mesh.differentiate import transformed

from fshard.transforms.lent import lent, untouched

INTERNAL = frozenset(vars(nn.Module()))
"""What torch keeps in every module."""
VALUES = (bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)
"""What cannot be changed."""
ABSENT: Any = object()
_UNCHANGED = (*VALUES, NoneType, Enum, type, BuiltinFunctionType)
ATOMS = frozenset({*VALUES, NoneType})
_ALIKE = (Enum, FunctionType, MethodType, BuiltinFunctionType, set, frozenset, torch.optim.Optimizer)
_FIXED = (nn.Module, type, ModuleType, torch.Generator, Logger, *VALUES)


def holds(x: Any) -> bool:
    """Return whether something may be changed and stay the same object."""
    if isinstance(x, Tensor):
        return not x.is_inference()
    if isinstance(x, CONTAINERS) or is_array(x):
        return True
    return (hasattr(x, "__dict__") or hasattr(x, "__slots__")) and not isinstance(x, _FIXED) and not callable(x)


def stays(x: Any, taken: Collection[int] | None = None) -> bool:
    """Return whether a later call may find what one has left: what nobody changes, and tensors with other memory than that."""
    if isinstance(x, tuple | frozenset):
        items: Iterable[Any] = x
        return all(not isinstance(each, Tensor) and stays(each) for each in items)
    if isinstance(x, Tensor):
        plain = type(x) is Tensor and x.layout is torch.strided and not x.is_meta and not transformed()
        return plain and not shares(x, taken)
    return isinstance(x, _UNCHANGED) or (isinstance(x, FunctionType) and x.__closure__ is None)


def shares(x: Any, taken: Collection[int] | None) -> bool:
    """Return whether a tensor has its memory from those of some storages."""
    return bool(taken) and isinstance(x, Tensor) and _storage(x) in taken


def storages_of(xs: Iterable[Any]) -> frozenset[int]:
    """Return which memory tensors have."""
    return frozenset(storage for x in xs if isinstance(x, Tensor) and (storage := _storage(x)) is not None)


def is_counted(x: Any) -> bool:
    """Return whether what is no number to be averaged goes on by what it was: a name or a function, but no key of a cache."""
    if isinstance(x, tuple):
        items: Iterable[Any] = x
        return any(isinstance(each, float) or is_counted(each) for each in items if not isinstance(each, int))
    return isinstance(x, (int, float, complex, str, bytes, Enum, FunctionType, BuiltinFunctionType))


def is_array(x: Any) -> bool:
    """Return whether something is an array of numpy's that is small enough to be looked into."""
    return type(x).__module__ == "numpy" and getattr(x, "nbytes", 1 << 20) <= 1 << 16


def items_of(x: Any) -> list[Any]:
    """Return what something holds, and what that holds: values of which some differ if any of it is changed."""
    items, seen, left = list[Any](), set[int](), [x]
    while left and len(items) < MANY:
        x = left.pop()
        if id(x) not in seen:
            seen.add(id(x))
            inner = _inner(x)
            items += inner
            left += [each for each in inner if type(each) not in ATOMS and holds(each)]
    return items


def has_graph(x: Any) -> bool:
    """Return whether a gradient can go through something."""
    return isinstance(x, Tensor) and x.requires_grad


def tensors_of(x: Any) -> list[Tensor]:
    """Return a tensor, or those in a plain list, tuple or dict."""
    items = items_of([*x] if type(x) is tuple else x) if type(x) in (list, tuple, dict) else [x]
    return [each for each in items if isinstance(each, Tensor)]


def tensors_at(x: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a value leads to, with the ways there, as far as a deep copy of it has copies of them.

    >>> [way for way, _ in tensors_at({"rows": [torch.ones(1), (torch.ones(1),)]}, "table")]
    ["table['rows'][0]", "table['rows'][1][0]"]
    """
    seen, left = dict[int, Any](), [(name, x)]
    while left:
        name, x = left.pop()
        if id(x) not in seen:
            seen[id(x)] = x  # held, so that no other object gets its id
            if isinstance(x, Tensor):
                yield name, x
            else:
                left += [*_ways_from(x, name)][::-1]


def _ways_from(x: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield what an object holds, with the ways there, but for modules, and for what is not copied or has no order."""
    if isinstance(x, (*_ALIKE, *_FIXED)) or (isinstance(x, (*CONTAINERS, tuple)) and len(x) > MANY):
        return
    if isinstance(x, dict):
        items = enumerate(dict.items(x))
        yield from (
            (f"{name}[{key!r}]" if isinstance(key, str | int) else f"{name}[{at}]", y) for at, (key, y) in items
        )
    elif isinstance(x, (list, tuple, deque)):
        yield from ((f"{name}[{at}]", y) for at, y in enumerate(x))
    elif isinstance(x, partial):
        yield from ((f"{name}.args", x.args), (f"{name}.keywords", x.keywords))
    elif not hasattr(type(x), "__deepcopy__"):
        yield from ((f"{name}.{key}", y) for key, y in (*getattr(x, "__dict__", {}).items(), *slots_of(x)))


def _inner(x: Any) -> list[Any]:
    if isinstance(x, Tensor):
        return [x._version]
    if is_array(x):
        return [x.tobytes()]
    if isinstance(x, CONTAINERS) and len(x) > MANY:
        return []
    if isinstance(x, dict):
        return [*dict.keys(x), *dict.values(x)]
    if isinstance(x, CONTAINERS):
        return [*x]
    return [*getattr(x, "__dict__", {}).values(), *(value for _, value in slots_of(x))]


def is_same(was: Any, now: Any) -> bool:
    """Return whether two values are one object, or equal and of a kind that cannot be changed."""
    return was is now or (type(was) is type(now) and isinstance(was, VALUES) and was == now)


def are_same(was: list[Any], now: list[Any]) -> bool:
    """Return whether all are."""
    return len(was) == len(now) and (all(map(is_, was, now)) or all(map(is_same, was, now)))


def alone_among(module: nn.Module) -> tuple[list[Tensor], list[str]]:
    """Return the plain tensors of a module that share memory with no other; and those that share a registered one's."""
    registered = storages_of((*module.parameters(), *module.buffers()))
    known = {id(x) for x in (*module.parameters(), *module.buffers())}
    found: dict[int, list[tuple[str, Tensor]]] = {}
    for path, part in module.named_modules():
        for key, value in vars(part).items():
            for x in [value] if isinstance(value, Tensor) else items_of(value) if holds(value) else ():
                storage = _storage(x) if isinstance(x, Tensor) and key not in INTERNAL and id(x) not in known else None
                if storage is not None and f"{key}_orig" not in vars(part)["_parameters"]:  # of which a hook makes it
                    found.setdefault(storage, []).append((f"{path}.{key}".removeprefix("."), x))
    alone = [x for tensors in found.values() for _, x in tensors if len(tensors) == 1 and not x.requires_grad]
    views = [name for storage in found.keys() & registered for name, _ in found[storage]]
    return [x for x in alone if type(x) is Tensor and untouched(lent(x))], sorted(views)


def _storage(x: Tensor) -> int | None:
    try:
        storage: Any = x.untyped_storage()
        return storage._cdata if x.numel() else None
    except RuntimeError:  # a sparse tensor has none
        return None
