"""Plain values and structures of trees as bytes, and back: what processes send beside tensors.

It is JSON, not pickle: bytes from another process can name classes and functions that are imported
already, but call none of them. An encoded value is itself (None, bool, int, float, str), or a list
of its kind and its items:

    (1, torch.float32)      ["tuple", 1, ["dtype", "float32"]]
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from types import FunctionType
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from fshard.mesh.layout.tree import Structure

_ITSELF = (type(None), bool, int, float, str)

# The numbers that optree gives to kinds of nodes.
_NAMEDTUPLE = 6
_DEFAULTDICT = 8
_STRUCTSEQ = 10

# The factories of a defaultdict that a message may name: the dict calls them for missing keys.
_FACTORIES = (None, list, dict, set, int, float, str)


def to_bytes(value: Any) -> bytes:
    """Return plain values, and structures of trees, as bytes; raise for objects of other kinds.

    >>> from_bytes(to_bytes({"mask": None, "dtype": (torch.float32, torch.Size([2]))}))
    {'mask': None, 'dtype': (torch.float32, torch.Size([2]))}
    """
    return json.dumps(_encoded(value)).encode()


def from_bytes(data: bytes) -> Any:
    """Return the value of `to_bytes`; raise if the bytes are of another kind."""
    return _decoded(json.loads(data))


def _encoded(x: Any) -> Any:
    """Return a value as JSON's: itself, or a list that begins with its kind."""
    if type(x) in _ITSELF:
        return x
    for name, kind in KINDS.items():
        if kind.has(x):
            return [name, *kind.encode(x)]
    raise TypeError(
        "A message to another process must have tensors and plain values; got "
        f"{type(x).__name__}. Make it a dataclass or a NamedTuple, or leave it out."
    )


def _decoded(x: Any) -> Any:
    if not isinstance(x, list):
        return x
    name, *items = cast("list[Any]", x)
    if name not in KINDS:
        raise ValueError(f"A message has a value of unknown kind: {name!r}.")
    return KINDS[name].decode(items)


class ValueKind(NamedTuple):
    """A kind of values: which these are, the items of one in JSON, and the value of such items."""

    has: Callable[[Any], bool]
    encode: Callable[[Any], list[Any]]
    decode: Callable[[list[Any]], Any]


def _instance_of(kind: Any) -> Callable[[Any], bool]:
    return lambda x: isinstance(x, kind)


def _of_type(
    kind: type, encode: Callable[[Any], list[Any]], decode: Callable[[list[Any]], Any]
) -> ValueKind:
    return ValueKind(lambda x: type(x) is kind, encode, decode)


# -- collections ----------------------------------------------------------------------------------


def _sequence(kind: Any) -> ValueKind:
    return _of_type(kind, _encoded_items, lambda items: kind(_decoded_items(items)))


def _encoded_items(xs: Any) -> list[Any]:
    return [_encoded(x) for x in xs]


def _decoded_items(items: list[Any]) -> list[Any]:
    return [_decoded(item) for item in items]


def _encoded_dict(x: dict[Any, Any]) -> list[Any]:
    return [[_encoded(key), _encoded(value)] for key, value in x.items()]


def _decoded_dict(items: list[Any]) -> dict[Any, Any]:
    return {_decoded(key): _decoded(value) for key, value in items}


def _is_namedtuple(x: Any) -> bool:
    return isinstance(x, tuple) and hasattr(x, "_fields")


def _encoded_namedtuple(x: Any) -> list[Any]:
    return [_reference(type(x)), *_encoded_items(x)]


def _decoded_namedtuple(items: list[Any]) -> Any:
    """Return a named tuple with these items, without a call of its class."""
    name, *values = items
    kind = _validate_tuple_class(_referred(name))
    return tuple.__new__(kind, _decoded_items(values))


def _validate_tuple_class(x: Any) -> Any:
    is_tuple_class = isinstance(x, type) and issubclass(x, tuple)
    if not is_tuple_class:
        raise ValueError(f"A message must have a class of tuples; got {x!r}.")
    return x


# -- numbers, bytes and values of torch -----------------------------------------------------------


def _encoded_bytes(x: bytes) -> list[Any]:
    return [base64.b64encode(x).decode()]


def _decoded_bytes(items: list[Any]) -> bytes:
    return base64.b64decode(items[0])


def _encoded_dtype(x: torch.dtype) -> list[Any]:
    return [str(x).removeprefix("torch.")]


def _decoded_dtype(items: list[Any]) -> torch.dtype:
    return _of_kind(getattr(torch, items[0]), torch.dtype)


def _is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray | np.generic) and x.dtype.kind in "biufcSU"  # no objects


def _encoded_array(x: Any) -> list[Any]:
    array = np.asarray(x)
    is_scalar = isinstance(x, np.generic)
    return [is_scalar, array.dtype.str, [*array.shape], *_encoded_bytes(array.tobytes())]


def _decoded_array(items: list[Any]) -> Any:
    is_scalar, dtype, shape, data = items
    array = np.frombuffer(base64.b64decode(data), np.dtype(dtype)).reshape(shape).copy()
    return array[()] if is_scalar else array


# -- objects --------------------------------------------------------------------------------------


def _encoded_structure(x: Any) -> list[Any]:
    return [_encoded(x.__getstate__())]


def _decoded_structure(items: list[Any]) -> Structure:
    state = _decoded(items[0])
    nodes, *_ = state
    for kind, _, data, *_ in nodes:
        if kind in (_NAMEDTUPLE, _STRUCTSEQ):
            _validate_tuple_class(data)
        elif kind == _DEFAULTDICT and data[0] not in _FACTORIES:
            raise ValueError(f"A message has a defaultdict of an unknown kind: {data[0]!r}.")
    structure: Any = Structure.__new__(Structure)
    structure.__setstate__(state)  # raises for classes that are no registered nodes
    return structure


def _encoded_dataclass(x: Any) -> list[Any]:
    entries = [[each.name, _encoded(getattr(x, each.name))] for each in fields(x)]
    return [_reference(type(x)), *entries]


def _decoded_dataclass(items: list[Any]) -> Any:
    """Return an instance with the fields of a message, without a call of its class."""
    name, *entries = items
    kind = _referred(name)
    if not is_dataclass(kind):
        raise ValueError(f"A message must have a dataclass; got {kind!r}.")

    names = {each.name for each in fields(kind)}
    new: Any = object.__new__
    result = new(kind)
    for field_name, value in entries:
        if field_name not in names:
            raise ValueError(f"A message has {field_name!r}, which is no field of {kind!r}.")
        object.__setattr__(result, field_name, _decoded(value))
    return result


def _encoded_enum(x: Enum) -> list[Any]:
    return [_reference(type(x)), x.name]


def _decoded_enum(items: list[Any]) -> Any:
    name, member = items
    return _of_kind(_referred(name), type(Enum))[member]


def _of_kind(x: Any, kind: Any) -> Any:
    if not isinstance(x, kind):
        raise ValueError(f"A message must have a {kind.__name__}; got {x!r}.")
    return x


# -- classes and functions by name ----------------------------------------------------------------


def _reference(x: Any) -> str:
    """Return the name of a class or a function that the other process finds; raise for others."""
    name = f"{x.__module__}:{x.__qualname__}"
    if _find(name) is not x:
        raise TypeError(
            "A message to another process must name classes and functions of modules; "
            f"got {x!r}. Define it in a module."
        )
    return name


def _referred(name: str) -> Any:
    """Return a class of values, or a function, of a module that is imported."""
    x = _find(name)
    if not isinstance(x, FunctionType) and not _is_value_class(x):
        raise ValueError(f"A message names {name}, which is no class of values here.")
    return x


def _is_value_class(x: Any) -> bool:
    if not isinstance(x, type):
        return False
    if x.__module__ == "builtins" or is_dataclass(x):
        return True
    return issubclass(x, tuple | dict | Enum | Tensor | nn.Module)


def _find(name: str) -> Any:
    module, _, path = name.partition(":")
    x: Any = sys.modules.get(module)
    for part in path.split("."):
        x = getattr(x, part, None)
    return x


KINDS = {
    "tuple": _sequence(tuple),
    "list": _sequence(list),
    "set": _sequence(set),
    "frozenset": _sequence(frozenset),
    "size": _sequence(torch.Size),
    "dict": _of_type(dict, _encoded_dict, _decoded_dict),
    "complex": _of_type(complex, lambda x: [x.real, x.imag], lambda items: complex(*items)),
    "bytes": _of_type(bytes, _encoded_bytes, _decoded_bytes),
    "dtype": _of_type(torch.dtype, _encoded_dtype, _decoded_dtype),
    "device": _of_type(torch.device, lambda x: [str(x)], lambda items: torch.device(items[0])),
    "numpy": ValueKind(_is_array, _encoded_array, _decoded_array),
    "structure": ValueKind(_instance_of(Structure), _encoded_structure, _decoded_structure),
    "enum": ValueKind(_instance_of(Enum), _encoded_enum, _decoded_enum),
    "reference": ValueKind(
        _instance_of(type | FunctionType),
        lambda x: [_reference(x)],
        lambda items: _referred(items[0]),
    ),
    "namedtuple": ValueKind(_is_namedtuple, _encoded_namedtuple, _decoded_namedtuple),
    "dataclass": ValueKind(is_dataclass, _encoded_dataclass, _decoded_dataclass),
}
"""The kinds of values by their names in messages; the first that has a value encodes it.

So a class is a reference before it could be a dataclass, which its instances are.
"""
