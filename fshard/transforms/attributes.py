"""What a forward keeps in plain attributes from one call to the next: it is handed back, and lent again, as buffers are.

    self.calls += 1                                        "head.calls:kept"     a number: a tensor without dims
    self.mean = 0.9 * self.mean + 0.1 * x.mean()           "head.mean:kept"      a tensor: its only row
    self.mean.mul_(0.9)                                    likewise: plain tensors are lent, too
    self.table = table                                     likewise, also if it was None before, or not there
    self.table = None                                      "head.table:kept"     None: no row

So it is averaged over devices, as all that is remembered, and each slice of a step begins with the same.  Kept is what a call
changes and a later one reads before it sets it (see `observed`); until that is known, what might be.  Not kept are lists,
strings and objects: who reads such a thing after an earlier call has changed it is told that he reads what was there at
first.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from operator import is_
from types import CellType, ModuleType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from fshard.mesh.differentiate import transformed
from fshard.mesh.tree import PyTree
from fshard.transforms.lent import lent, untouched
from fshard.transforms.observed import code_of, watch

INTERNAL = frozenset(vars(nn.Module()))
"""What torch keeps in every module."""
_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}
_KEPT = ":kept"
_VALUES = (bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)
_CONTAINERS = (dict, list, set, deque)
_FIXED = (nn.Module, type, ModuleType, torch.Generator, *_VALUES)
_MANY = 1 << 12
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


def nothing() -> Tensor:
    """Return what stands for a buffer that a forward has set to None, so that it can be sent and averaged."""
    return torch.empty(0, dtype=torch.bool)


def is_nothing(x: Any) -> bool:
    """Return whether a buffer is None for a module."""
    return isinstance(x, Tensor) and x.dtype is torch.bool and x.shape == (0,)


def put(module: nn.Module, made: Mapping[str, Any]) -> None:
    """Put what forwards have made into a module: attributes, and buffers that it had not."""
    for name, x in made.items():
        slot = slot_of(name)
        if slot is not None:
            vars(module.get_submodule(slot.path))[slot.key] = value_of(x)
        else:
            path, _, key = name.rpartition(".")
            vars(module.get_submodule(path))["_buffers"][key] = None if is_nothing(x) else x


class Seen:
    """What the calls of a module have been seen to do to attributes; replicas share it."""

    def __init__(self) -> None:
        self.changed: set[Slot] = set()
        self.states: set[Slot] = set()
        self.passing: set[Slot] = set()
        self.lost: set[Slot] = set()

    def note(self, slot: Slot, done: str) -> None:
        """Note what was done to an attribute first."""
        if done == "read":
            self.states.add(slot)
        elif done == "set, read":
            self.passing.add(slot)


class Attributes:
    """The plain attributes of a replica's modules.

    Args:
        modules: with the names of their paths.
        places: the dicts and lists in which registered tensors stand, and their keys there.
        alone: plain tensors, by their ids, that share memory with no other: these are lent to a call.
        seen: what is known of them.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        places: Iterable[tuple[Any, Any]],
        alone: Collection[int],
        seen: Seen,
    ) -> None:
        filled = dict[int, set[Any]]()
        for container, key in places:
            filled.setdefault(id(container), set()).add(key)
        self._seen = seen
        self._modules = {path: _Module(path, module, filled, alone) for path, module in modules}
        self._kinds = {module.kind for module in self._modules.values()}
        self._held: dict[int, tuple[Any, list[Any], list[Slot]]] = {}
        for path, module in self._modules.items():
            for key, x in module.holders:
                if id(x) not in self._held and id(x) not in filled:
                    items = _items(x)
                    if not any(id(each) in filled for each in items):
                        self._held[id(x)] = x, items, []
                if id(x) in self._held:
                    self._held[id(x)][2].append(Slot(path, key))

    def put(self, kept: Mapping[str, Any]) -> None:
        """Lend plain tensors to a call, and what earlier calls have kept, by its names."""
        for slot in self._seen.changed:
            self._modules[slot.path].watched.add(slot.key)
        for module in self._modules.values():
            module.begin()
        for name, x in kept.items():
            slot = slot_of(name)
            if slot is not None and slot.path in self._modules:
                self._modules[slot.path].put(slot.key, value_of(lent(x)))

    def kept(self, before: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is kept after a call that was given this, and warn of what is lost."""
        after, seen, read, left = dict(before), self._seen, list[str](), list[str]()
        for module in self._modules.values():
            for key, done in module.log.items():
                seen.note(slot := Slot(module.path, key), done)
                if done == "read" and slot in seen.lost:
                    read.append(f"{module.title}.{key}")
            for key, first, now, written in module.changed():
                slot = Slot(module.path, key)
                known = slot in seen.changed
                if written or key == "training":
                    seen.states.add(slot)
                seen.changed.add(slot)
                x = as_tensor(now)
                if slot in seen.states or (slot not in seen.passing and (not known or self._may_read(key))):
                    after.pop(slot.name, None)
                    seen.lost.discard(slot)
                    if x is not None:
                        after[slot.name] = x
                    else:
                        seen.lost.add(slot)
                    continue
                after.pop(slot.name, None)
                if slot not in seen.passing and isinstance(now, Tensor) and now.requires_grad and _had_value(first):
                    left.append(f"{module.title}.{key}")
        for x, items, slots in self._held.values():
            if not _are_same(_items(x), items):
                seen.changed.update(slots)
                seen.states.update(slots)
                seen.lost.update(slots)
        read += [f"{module.title}'s submodules" for module in self._modules.values() if module.has_other_modules()]
        if read:
            warnings.warn(
                f"{', '.join(read)} was changed by a forward, and the next one does not find it as in torch: lists, strings "
                "and objects are put back after a call, or shared by all slices of a batch. Keep buffers, or tensors and "
                "numbers that are attributes.",
                stacklevel=2,
            )
        if left:
            warnings.warn(
                f"A forward leaves {', '.join(left)} behind with its graph, which nobody outside can see. A loss that is to be "
                "trained has to be returned.",
                stacklevel=2,
            )
        return after

    def _may_read(self, key: str) -> bool:
        """Return whether a forward may read an attribute: its code does in some branch, or what has set it is no method."""
        code = code_of(self._kinds)
        return key in code.read or key not in code.written


class _Module:
    """The attributes of one module, as they are between calls and in one."""

    def __init__(self, path: str, module: nn.Module, filled: Mapping[int, set[Any]], alone: Collection[int]) -> None:
        self.path, self.kind, self.title = path, type(module), type(module).__name__
        self.watched, self.log = set[str](), dict[str, str]()
        self._module, self._now, self._watching = ref(module), vars(module), frozenset[str]()
        self._torchs = self.kind.__module__.startswith("torch.")  # of these, numbers: what they compute is no state
        self._never = (INTERNAL | {"forward"} | filled.get(id(self._now), set())) - {
            "training"
        }  # `layers` sets forward
        self._first, self._modules = dict(self._now), [*vars(module)["_modules"].values()]
        known = {key: x for key, x in self._first.items() if key not in self._never}
        self._tensors = [(key, x) for key, x in known.items() if id(x) in alone and not self._torchs]
        lent_ones = {key for key, _ in self._tensors}
        self.holders = [(key, x) for key, x in known.items() if _holds(x) and key not in lent_ones and not self._torchs]
        self._put: dict[str, Any] = {}

    def begin(self) -> None:
        """Lend the tensors to a call, and watch what has been changed before."""
        self._put = {}
        self._first["training"] = self._now["training"]
        for key, x in self._tensors:
            self.put(key, lent(x))
        if self.watched != self._watching:
            self._watching = frozenset(self.watched)
            module = self._module()
            assert module is not None
            watch(module, self._watching, self.log)
        self.log.clear()

    def put(self, key: str, x: Any) -> None:
        """Set an attribute for a call; whoever puts back all puts it back."""
        self._now[key] = self._put[key] = x

    def changed(self) -> Iterator[tuple[str, Any, Any, bool]]:
        """Yield which attributes a call has changed, what they were at first and what they are; and whether in place."""
        begun = {**self._first, **self._put} if self._put else self._first
        more = ("forward" in self._now) - ("forward" in begun)
        if len(self._now) - more != len(begun) or not all(map(is_, begun.values(), self._now.values())):
            for key in dict.fromkeys((*begun, *self._now)):
                was, now = begun.get(key, _ABSENT), self._now.get(key, _ABSENT)
                if (
                    key not in self._never
                    and not _is_same(was, now)
                    and not (self._torchs and not isinstance(now, _VALUES))
                ):
                    yield key, self._first.get(key, _ABSENT), now, False
        for key, x in self._put.items():
            if isinstance(x, Tensor) and self._now.get(key) is x and _is_written(x):
                yield key, self._first.get(key, _ABSENT), x, True

    def has_other_modules(self) -> bool:
        """Return whether a call has replaced submodules."""
        return not all(map(is_, self._modules, self._first["_modules"].values()))


def alone_among(module: nn.Module) -> tuple[list[Tensor], list[str]]:
    """Return the plain tensors of a module that share memory with no other; and those that share a registered one's."""
    registered = {storage for x in (*module.parameters(), *module.buffers()) if (storage := _storage(x)) is not None}
    known = {id(x) for x in (*module.parameters(), *module.buffers())}
    found: dict[int, list[tuple[str, Tensor]]] = {}
    for path, part in module.named_modules():
        for key, value in vars(part).items():
            for x in [value] if isinstance(value, Tensor) else _items(value) if _holds(value) else ():
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
    except (RuntimeError, NotImplementedError):  # a sparse one, say
        return None


def _had_value(first: Any) -> bool:
    """Return whether an attribute had something that a loss could have been made of."""
    return type(first) in (bool, int, float) or (isinstance(first, Tensor) and not first.requires_grad)


def _holds(x: Any) -> bool:
    """Return whether something may be changed and stay the same object."""
    if isinstance(x, Tensor):
        return not x.is_inference()
    if isinstance(x, _CONTAINERS) or _is_array(x):
        return True
    return (hasattr(x, "__dict__") or hasattr(x, "__slots__")) and not isinstance(x, _FIXED) and not callable(x)


def _is_array(x: Any) -> bool:
    return type(x).__module__ == "numpy" and getattr(x, "nbytes", 1 << 20) <= 1 << 16


def _items(x: Any) -> list[Any]:
    """Return what something holds, and what that holds: values of which some differ if any of it is changed."""
    items, seen, left = list[Any](), set[int](), [x]
    while left and len(items) < _MANY:
        x = left.pop()
        if id(x) not in seen:
            seen.add(id(x))
            inner = _inner(x)
            items += inner
            left += [each for each in inner if _holds(each)]
    return items


def _inner(x: Any) -> list[Any]:
    if isinstance(x, Tensor):
        return [x._version]
    if _is_array(x):
        return [x.tobytes()]
    if isinstance(x, dict):
        return [*dict.keys(x), *dict.values(x)]
    if isinstance(x, _CONTAINERS):
        return [*x]
    return [*getattr(x, "__dict__", {}).values(), *(value for _, value in slots_of(x))]


def contents_of(cell: CellType) -> list[Any]:
    """Return what a closure's variable holds: nothing as long as it has not been set."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def slots_of(x: Any) -> list[tuple[str, Any]]:
    """Return the attributes that a class of Python keeps in slots."""
    names = [name for kind in type(x).__mro__ for name in _listed(vars(kind).get("__slots__", ()))]
    return [(name, getattr(x, name)) for name in names if not name.startswith("__") and hasattr(x, name)]


def _listed(names: str | Iterable[str]) -> Iterable[str]:
    return (names,) if isinstance(names, str) else names


def _is_same(was: Any, now: Any) -> bool:
    return was is now or (type(was) is type(now) and isinstance(was, _VALUES) and was == now)


def _are_same(was: list[Any], now: list[Any]) -> bool:
    return len(was) == len(now) and all(map(_is_same, was, now))


def _is_written(copy: Tensor) -> bool:
    """Return whether a call has written to a tensor that was lent to it."""
    return copy._version > 0 if transformed() else not untouched(copy)
