"""Names and tensors for what is kept in plain attributes, among the buffers.

self.calls = 3            "head.calls:kept"     a number is a tensor without dims
self.mean = x.mean(0)     "head.mean:kept"      a tensor is its only row
self.table = None         "head.table:kept"     None is no row
del self.table            "head.table:kept"     neither is what was deleted, in another dtype

What a forward has written to a frozen parameter is kept by that name as well: "head.weight:kept".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fshard.mesh.tree import PyTree

_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
_KEPT = ":kept"
ABSENT: Any = object()
"""The value of an attribute that is not there."""


class Slot(NamedTuple):
    """The path of a module, and an attribute of it that is kept."""

    path: str
    key: str

    @property
    def name(self) -> str:
        """The name by which it stands among the buffers."""
        return f"{self.path}.{self.key}{_KEPT}".removeprefix(".")


def slot_of(name: str) -> Slot | None:
    """Return which attribute a name among the buffers is for; None if it is that of a buffer.

    >>> slot_of("head.calls:kept"), slot_of("head.running_mean")
    (Slot(path='head', key='calls'), None)
    """
    path, _, key = name.removesuffix(_KEPT).rpartition(".")
    return Slot(path, key) if name.endswith(_KEPT) else None


def kept_name(parameter: str) -> str:
    """Return by which name a frozen parameter that a forward has written to stands among the buffers."""
    return parameter + _KEPT


def without(tree: PyTree, names: Collection[str]) -> PyTree:
    """Return buffers without those of some names."""
    return {name: x for name, x in tree.items() if name not in names}


def kept_of(tree: PyTree) -> dict[str, Any]:
    """Return those of the buffers that stand for attributes."""
    return {name: x for name, x in tree.items() if name.endswith(_KEPT) and not is_forgotten(x)}


def as_tensor(value: Any) -> Tensor | None:
    """Return the tensor that stands for a value, from which `value_of` makes it again; None if there is none.

    >>> [value_of(as_tensor(value)) for value in (3, False, None, torch.ones(2))]
    [3, False, None, tensor([1., 1.])]
    """
    if isinstance(value, Tensor):
        return None if value.layout is not torch.strided else value.unsqueeze(0)
    if value is None or value is ABSENT:
        return torch.empty(0, dtype=torch.float32 if value is None else torch.int8)
    if type(value) not in _DTYPES or (type(value) is int and abs(value) >= 1 << 53):  # a mean has no more digits
        return None
    return torch.tensor(value, dtype=_DTYPES[type(value)])


def value_of(x: Tensor) -> Any:
    """Return what a tensor stands for."""
    if not x.ndim:
        return x.item()
    return x[0] if len(x) else ABSENT if x.dtype is torch.int8 else None


def set_in(attributes: dict[str, Any], key: str, value: Any) -> None:
    """Let an attribute have a value, or not be there."""
    if value is ABSENT:
        attributes.pop(key, None)
    else:
        attributes[key] = value


def nothing() -> Tensor:
    """Return what stands for a buffer that a forward has set to None, so that it can be sent and averaged."""
    return torch.empty(0, dtype=torch.bool)


def is_nothing(x: Any) -> bool:
    """Return whether a buffer is None for a module."""
    return isinstance(x, Tensor) and x.dtype is torch.bool and x.shape == (0,)


def forgotten() -> Tensor:
    """Return what stands, where a tree has to stay as it is, for an attribute that is kept no more."""
    return torch.empty(0, dtype=torch.int16)


def is_forgotten(x: Any) -> bool:
    """Return whether an attribute is kept no more."""
    return isinstance(x, Tensor) and x.dtype is torch.int16 and x.shape == (0,)


def put(module: nn.Module, made: Mapping[str, Any]) -> None:
    """Put what forwards have made into a module: attributes, and buffers that it had not."""
    for name, x in made.items():
        slot = slot_of(name)
        if is_forgotten(x):
            continue
        if slot is not None:
            own = vars(module.get_submodule(slot.path))
            if slot.key in own["_parameters"]:
                own["_parameters"][slot.key].data = value_of(x)
            else:
                set_in(own, slot.key, value_of(x))
        else:
            path, _, key = name.rpartition(".")
            vars(module.get_submodule(path))["_buffers"][key] = None if is_nothing(x) else x
