"""What a forward keeps in plain attributes from one call to the next: it is handed back, and lent again, as buffers are.

    self.calls += 1                                        "head.calls:kept"     a number: a tensor without dims
    self.mean = 0.9 * self.mean + 0.1 * x.mean()           "head.mean:kept"      a tensor: its only row
    self.mean.mul_(0.9)                                    likewise: plain tensors are lent, too
    self.table = table                                     likewise, also if it was None before, or not there
    self.table = None                                      "head.table:kept"     None: no row

So it is averaged over devices, as all that is remembered, and each slice of a step begins with the same.  Kept is what some
method reads; what is only ever set cannot change what a forward computes.  A tensor with a graph is kept where a method
reads it first and sets it then: else it is of one call alone.  Of all else, a list that grows, say, a warning tells: the next
call begins with what was there at first.
"""

from __future__ import annotations

import dis
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from inspect import unwrap
from operator import is_
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fshard.mesh.differentiate import transformed
from fshard.mesh.tree import PyTree
from fshard.transforms.lent import lent, untouched

INTERNAL = frozenset(vars(nn.Module()))
"""What torch keeps in every module."""
_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}
_KEPT = ":kept"
_VALUES = (bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)
_ABSENT = object()


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


def without(tree: PyTree, names: Collection[str]) -> PyTree:
    """Return buffers without those of some names."""
    return {name: x for name, x in tree.items() if name not in names}


def kept_of(tree: PyTree) -> dict[str, Any]:
    """Return those of the buffers that stand for attributes."""
    return {name: x for name, x in tree.items() if name.endswith(_KEPT)}


def as_tensor(value: Any) -> Tensor | None:
    """Return the tensor that stands for a value, from which `value_of` makes it again; None if there is none.

    >>> [value_of(as_tensor(value)) for value in (3, False, None, torch.ones(2))]
    [3, False, None, tensor([1., 1.])]
    """
    if isinstance(value, Tensor):
        return None if value.is_complex() or value.layout is not torch.strided else value.unsqueeze(0)
    if value is None:
        return torch.empty(0)
    if type(value) not in _DTYPES or (type(value) is int and abs(value) >= 1 << 53):  # a mean has no more digits
        return None
    return torch.tensor(value, dtype=_DTYPES[type(value)])


def value_of(x: Tensor) -> Any:
    """Return what a tensor stands for."""
    if not x.ndim:
        return x.item()
    return x[0] if len(x) else None


def put(module: nn.Module, made: Mapping[str, Any]) -> None:
    """Put what forwards have made into a module: attributes, and buffers that it had not."""
    for name, x in made.items():
        slot = slot_of(name)
        if slot is not None:
            vars(module.get_submodule(slot.path))[slot.key] = value_of(x)
        else:
            path, _, key = name.rpartition(".")
            vars(module.get_submodule(path))["_buffers"][key] = x


class Attributes:
    """The plain attributes of a replica's modules; torch's own modules keep nothing there.

    Args:
        modules: with the names of their paths.
        places: the dicts and lists in which registered tensors stand, and their keys there.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], places: Iterable[tuple[Any, Any]]) -> None:
        own = {path: module for path, module in modules if not type(module).__module__.startswith("torch.")}
        filled = dict[int, set[Any]]()
        for container, key in places:
            filled.setdefault(id(container), set()).add(key)
        self._kinds = {type(module) for module in own.values()}
        self._modules = {path: _Module(module, filled) for path, module in own.items()}

    def put(self, kept: Mapping[str, Any]) -> None:
        """Lend plain tensors to a call, and what earlier calls have kept, by its names."""
        copies: dict[int, Tensor] = {}
        for module in self._modules.values():
            module.begin(copies)
        for name, x in kept.items():
            slot = slot_of(name)
            if slot is not None and slot.path in self._modules:
                self._modules[slot.path].put(slot.key, value_of(lent(x)))

    def kept(self, before: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is kept after a call that was given this, and warn of what is lost."""
        after, lost = dict(before), list[str]()
        for path, module in self._modules.items():
            for key, first, now in module.changed():
                x = as_tensor(now) if self._is_kept(key, now) else None
                if x is not None:
                    after[Slot(path, key).name] = x
                elif self._is_missed(key, first, now):
                    lost.append(f"{module.title}.{key}")
            lost += [f"{module.title}.{key}" for key in module.written() if self._is_read(key)]
        if lost:
            warnings.warn(
                f"A forward has changed {', '.join(dict.fromkeys(lost))}, of which the next call knows nothing: it begins with "
                "what was there at first. Kept are buffers, and attributes that are tensors or numbers. What is to be read "
                "later, by a loss, say, make one of these, or return it.",
                stacklevel=2,
            )
        return after

    def _is_read(self, key: str) -> bool:
        """Return whether a method may read an attribute: one does, or what has set it is no method."""
        known = [_known(kind) for kind in self._kinds]
        return any(key in each.read for each in known) or not any(key in each.written for each in known)

    def _is_kept(self, key: str, now: Any) -> bool:
        """Return whether what an attribute is after a call may be read by the next one."""
        if not isinstance(now, Tensor) or not now.requires_grad:
            return self._is_read(key)
        known = [_known(kind) for kind in self._kinds]
        return any(key in each.first_read for each in known) or not any(key in each.written for each in known)

    def _is_missed(self, key: str, first: Any, now: Any) -> bool:
        """Return whether the loss of a value may matter: of what was only set it does to who reads the number there was."""
        if isinstance(now, Tensor) and now.requires_grad:
            return type(first) in (bool, int, float)
        return self._is_read(key)


class _Module:
    """The attributes of one module, as they are between calls and in one."""

    def __init__(self, module: nn.Module, filled: Mapping[int, set[Any]]) -> None:
        self.title, self._now = type(module).__name__, vars(module)
        self._never = INTERNAL | {"forward"} | filled.get(id(self._now), set())  # `layers` sets forward
        self._first = dict(self._now)
        known = {key: x for key, x in self._first.items() if key not in self._never}
        self._tensors = [(key, _lendable(x)) for key, x in known.items() if type(x) is Tensor and not x.requires_grad]
        self._containers = {key: (x, _items(x)) for key, x in known.items() if _is_plain(x) and id(x) not in filled}
        self._put: dict[str, Any] = {}

    def begin(self, copies: dict[int, Tensor]) -> None:
        """Lend the tensors to a call, each once."""
        self._put = {}
        for key, x in self._tensors:
            if id(x) not in copies:
                copies[id(x)] = lent(x)
            self.put(key, copies[id(x)])

    def put(self, key: str, x: Any) -> None:
        """Set an attribute for a call; whoever puts back all puts it back."""
        self._now[key] = self._put[key] = x

    def changed(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield which attributes a call has set, or written to, what they were at first and what they are."""
        begun = {**self._first, **self._put} if self._put else self._first
        more = ("forward" in self._now) - ("forward" in begun)
        if len(self._now) - more != len(begun) or not all(map(is_, begun.values(), self._now.values())):
            for key in dict.fromkeys((*begun, *self._now)):
                was, now = begun.get(key, _ABSENT), self._now.get(key, _ABSENT)
                if key not in self._never and not _is_same(was, now):
                    yield key, self._first.get(key, _ABSENT), now
        for key, x in self._put.items():
            if isinstance(x, Tensor) and self._now.get(key) is x and _is_written(x):
                yield key, self._first.get(key, _ABSENT), x

    def written(self) -> list[str]:
        """Return which attributes are lists, dicts or sets that hold something else after a call."""
        return [key for key, (x, items) in self._containers.items() if not _are_same(_items(x), items)]


def _lendable(x: Tensor) -> Tensor:
    """Return a tensor whose memory is torch's own, so that to lend it costs nothing."""
    return x if untouched(lent(x)) else x.clone()


def _is_plain(x: Any) -> bool:
    return type(x) in (list, dict, set)


def _items(x: Any) -> list[Any]:
    return [*x.keys(), *x.values()] if isinstance(x, dict) else [*x]


def _is_same(was: Any, now: Any) -> bool:
    return was is now or (type(was) is type(now) and isinstance(was, _VALUES) and was == now)


def _are_same(was: list[Any], now: list[Any]) -> bool:
    return len(was) == len(now) and all(map(_is_same, was, now))


def _is_written(copy: Tensor) -> bool:
    """Return whether a call has written to a tensor that was lent to it."""
    return copy._version > 0 if transformed() else not untouched(copy)


# -- what methods read ------------------------------------------------------------------------------------------------


class _Known(NamedTuple):
    """The attributes that methods of a class read, those that they set, and those that one method reads and then sets."""

    read: set[str]
    written: set[str]
    first_read: set[str]


@lru_cache(maxsize=4096)
def _known(kind: type) -> _Known:
    """Return what the methods of a class do to attributes; `__init__` counts as none of them."""
    known = _Known(set(), set(), set())
    for base in kind.__mro__:
        if base is object or base.__module__.startswith("torch."):
            continue
        for name, member in vars(base).items():
            for code in _codes(member) if name not in ("__init__", "__repr__", "extra_repr") else ():
                _note(code, known)
    return known


def _note(code: CodeType, known: _Known) -> None:
    read = (
        {x for x in code.co_consts if isinstance(x, str)} if {"getattr", "hasattr"} & {*code.co_names} else set[str]()
    )
    written = set[str]()
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            read.add(step.argval)
        elif step.opname in ("STORE_ATTR", "DELETE_ATTR"):
            if step.argval in read and step.argval not in written:
                known.first_read.add(step.argval)
            written.add(step.argval)
    known.read.update(read)
    known.written.update(written)


def _codes(member: Any) -> Iterator[CodeType]:
    """Yield the code of a method, and of the functions within it."""
    if isinstance(member, property):
        member = member.fget
    if isinstance(member, staticmethod | classmethod):
        member = member.__func__
    found: list[Any] = [member.__code__] if isinstance(member := unwrap(member), FunctionType) else []
    while found:
        code = found.pop()
        yield code
        found += [x for x in code.co_consts if isinstance(x, CodeType)]
