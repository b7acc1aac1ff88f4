"""Copies of a module's structure, with empty places where its tensors stood.

A forward that swaps tensors must not do so in the user's module: virtual devices are threads, and another one may run
in the middle of it.  So each call has a replica to itself: modules, and the lists, dicts and sets among their
attributes, are copied; so is whatever leads back to one of the modules or of their tensors (a bound method, a partial, a
closure, a helper object), and it points into the replica; everything else is shared, large containers too.

    module --blueprint--> replica without tensors --built--> replicas, each lent to one call at a time

A *place* is an entry of a dict or list in which a registered tensor stands: `_parameters["weight"]`, and also
`_flat_weights[0]` of an LSTM, which keeps its own list.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from functools import partial
from sys import getrefcount
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fshard.errors import ModuleError
from fshard.transforms.attributes import Attributes, Seen, seen_of
from fshard.transforms.holders import INTERNAL, MANY, contents_of, slots_of
from fshard.transforms.layers import Layers

_ATOMS = (Tensor, str, int, float, complex, bytes, type(None), type, ModuleType, BuiltinFunctionType, torch.dtype)
_CONTAINERS = (OrderedDict, dict, list, set, deque)
_WRITTEN = frozenset({"_parameters", "_buffers", "_modules"})
"""What a forward may write to of all that torch keeps in every module; the others are hooks."""


class Empty(NamedTuple):
    """What stands in a place while no call has put a tensor there."""

    name: str


class Place(NamedTuple):
    """An entry of a dict or a list, and the name of the registered tensor that belongs there."""

    container: Any
    key: Any
    name: str


class Replica:
    """A copy of a module that one call at a time uses.

    Args:
        modules: its modules with the names of their paths, the root first.
        places: where registered tensors belong.
        containers: the dicts, lists and sets that a forward may write to, to be put back after it.
        owned: every object that was made for the replica.
        attributes: those that a forward may set.

    `layers` lets the modules draw by their names; `buffers` are theirs, by their paths.
    """

    def __init__(
        self,
        modules: list[tuple[str, nn.Module]],
        places: list[Place],
        containers: list[Any],
        owned: list[Any],
        attributes: Attributes,
    ) -> None:
        self.modules, self.places, self._owned, self.attributes = modules, places, owned, attributes
        self._puts = [(_plain(place.container).__setitem__.__get__(place.container), place) for place in places]
        self._originals = [(container, _plain(container), _entries(container)) for container in containers]
        self._rest: list[int] = []
        own = {id(vars(module)["_parameters"]) for _, module in modules}
        self._params = [place for place in places if id(place.container) in own]
        self.layers = Layers(modules)
        self.buffers = [(path, vars(module)["_buffers"]) for path, module in modules]

    def settle(self) -> None:
        """Count who refers to it now that it is finished, and nobody uses it."""
        self._rest = self._references()

    def fill(self, tensors: Mapping[str, Any]) -> None:
        """Put tensors, or what stands for them, into their places."""
        for put, (_, key, name) in self._puts:
            put(key, tensors[name])

    def rebound(self, tensors: Mapping[str, Any]) -> list[str]:
        """Return the parameters that a call has bound to something else."""
        return [name for container, key, name in self._params if container.get(key) is not tensors[name]]

    def restore(self) -> None:
        """Undo whatever a call has put into the modules, its tensors among them."""
        for container, plain, original in self._originals:
            if not container and not original:
                continue
            if plain is dict:
                dict.update(container, original)
                if len(container) != len(original):
                    for key in dict.keys(container) - original.keys():
                        dict.__delitem__(container, key)
                continue
            plain.clear(container)
            if plain is OrderedDict:  # whose update calls a class's own __setitem__
                for key, value in original.items():
                    OrderedDict.__setitem__(container, key, value)
            else:
                (set.update if plain is set else plain.extend)(container, original)

    def is_at_rest(self) -> bool:
        """Return whether nobody outside refers to it; who does may call it again, as a checkpoint will in backward."""
        return self._references() == self._rest

    def _references(self) -> list[int]:
        return [*map(getrefcount, self._owned)]


class Blueprint:
    """What replicas of one module are built from; it holds none of the module's tensors, nor the module.

    Args:
        module: the module, as it is now.
        names: the name of every registered tensor by its id.
        adapt: called with each module of every replica.
        alone: the plain tensors that share memory with no other.
    """

    def __init__(
        self, module: nn.Module, names: Mapping[int, str], adapt: Callable[[nn.Module], None], alone: Sequence[Tensor]
    ) -> None:
        self._adapt, self._alone, self._seen = adapt, {id(x): x for x in alone}, seen_of(module)
        first = _Copying(module, names, {}).replica(lambda module: None, self._alone, self._seen)
        first.fill({name: Empty(name) for name in names.values()})
        self._first = first.modules[0][1]
        self._empties = {id(container[key]): name for container, key, name in first.places}
        self._leads: dict[int, bool] = {}
        self._followed = [weakref.ref(original) for original in module.modules()]

    def build(self) -> Replica:
        """Make a replica."""
        replica = _Copying(self._first, self._empties, self._leads).replica(self._adapt, self._alone, self._seen)
        replica.settle()
        return replica

    def follow(self, replica: Replica) -> None:
        """Put a replica's modules into the mode, training or not, of the modules that they stand for."""
        for followed, (_, module) in zip(self._followed, replica.modules, strict=True):
            original = followed()
            if original is not None:
                module.__dict__["training"] = original.training


class _Copying:
    """One copy of a module's structure, in the making."""

    def __init__(self, root: nn.Module, names: Mapping[int, str], leads: dict[int, bool]) -> None:
        self._root = root
        self._tree = {id(module) for module in root.modules()}
        self._names = names
        self._leads = leads
        self._memo: dict[int, Any] = {}
        self._places: list[Place] = []
        self._containers: list[Any] = []
        self._stuck: list[str] = []

    def replica(self, adapt: Callable[[nn.Module], None], alone: Collection[int], seen: Seen) -> Replica:
        """Copy the whole; raise if a tensor stands where no other can be put."""
        self.of(self._root)
        if self._stuck:
            raise ModuleError(
                f"functionalize of {type(self._root).__name__}: no other tensor can be put where "
                f"{', '.join(sorted(set(self._stuck)))}. Keep it in a list or a dict, or look it up in forward: self.weight."
            )
        modules = [(name, self._memo[id(module)]) for name, module in self._root.named_modules()]
        for _, module in modules:
            adapt(module)
        dicts = [vars(module) for _, module in modules]
        internal = {id(own[key]) for own in dicts for key in INTERNAL & own.keys()}
        owned = [x for x in self._memo.values() if id(x) not in internal]
        places = [(place.container, place.key) for place in self._places]
        attributes = Attributes(modules, places, alone, {id(x) for x in owned}, seen)
        return Replica(modules, self._places, dicts + self._containers, owned, attributes)

    def of(self, x: Any) -> Any:
        """Return the copy of an object, or the object itself if it is to be shared."""
        if isinstance(x, _ATOMS):
            return x
        if id(x) in self._memo:
            return self._memo[id(x)]
        if id(x) in self._tree:
            return self._module(x)
        if isinstance(x, _CONTAINERS) and (len(x) <= MANY or self._leads_back(x)):
            return self._container(x)
        return self._pointing(x) if self._leads_back(x) else x

    def _module(self, module: nn.Module) -> nn.Module:
        made = self._memo[id(module)] = _blank(module)
        self._fill(vars(made), vars(module).items())
        for key, value in slots_of(module):
            object.__setattr__(made, key, self._settled(value, f"a slot of {type(module).__name__}"))
        made.__dict__["_compiled_call_impl"] = None  # what module.compile() has made runs the module itself
        return made

    def _container(self, x: Any) -> Any:
        made, plain, entries = _emptied(x), _plain(x), _entries(x)
        self._memo[id(x)] = made
        if isinstance(x, dict):
            self._fill(made, entries.items())
        elif isinstance(x, set):
            set.update(made, (self._settled(item, "a set") for item in entries))
        else:
            plain.extend(made, entries)
            self._fill(made, enumerate(entries))
        self._attributes(made, x)
        return made

    def _fill(self, made: Any, items: Iterable[tuple[Any, Any]]) -> None:
        """Copy entries, and note the places among them."""
        put = _plain(made).__setitem__
        for key, value in items:
            name = self._names.get(id(value))
            if name is not None:
                self._places.append(Place(made, key, name))
            key = self.of(key) if isinstance(made, dict) else key
            put(made, key, value if name is not None else self._value(key, value))

    def _value(self, key: Any, value: Any) -> Any:
        made = self.of(value)
        if made is not value and isinstance(made, _CONTAINERS) and (key in _WRITTEN or key not in INTERNAL):
            self._containers.append(made)
        return made

    def _pointing(self, x: Any) -> Any:
        """Copy what leads back into the tree."""
        made: Any
        if isinstance(x, tuple):
            items = [self._settled(item, "a tuple") for item in x]
            made = getattr(type(x), "_make", type(x))(items)  # a NamedTuple has its own way
        elif isinstance(x, frozenset):
            made = frozenset(self._settled(item, "a set") for item in x)
        elif isinstance(x, MethodType):
            made = MethodType(x.__func__, self.of(x.__self__))
        elif isinstance(x, partial):
            made = partial(self.of(x.func), *(self._settled(item, "a partial") for item in x.args))
            self._containers.append(made.keywords)
            self._fill(made.keywords, x.keywords.items())
        elif isinstance(x, FunctionType):
            made = self._closure(x)
        elif isinstance(x, weakref.ref):
            made = weakref.ref(self.of(x()))
        else:
            made = self._object(x)
        self._memo[id(x)] = made
        return made

    def _object(self, x: Any) -> Any:
        made = self._memo[id(x)] = _blank(x) if isinstance(x, nn.Module) else copy(x)
        self._attributes(made, x)
        return made

    def _attributes(self, made: Any, x: Any) -> None:
        if hasattr(x, "__dict__"):
            self._containers.append(vars(made))
            self._fill(vars(made), vars(x).items())
        for key, value in slots_of(x):
            object.__setattr__(made, key, self._settled(value, f"a slot of {type(x).__name__}"))

    def _closure(self, f: FunctionType) -> FunctionType:
        cells = tuple(CellType() for _ in f.__closure__ or ())
        made = FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, cells)
        made.__dict__.update(f.__dict__)
        made.__kwdefaults__ = f.__kwdefaults__
        self._memo[id(f)] = made  # before its cells: it may stand in one of them
        for cell, old in zip(cells, f.__closure__ or (), strict=True):
            for content in contents_of(old):
                cell.cell_contents = self._settled(content, f"the closure of {f.__qualname__}")
        made.__defaults__ = self.of(f.__defaults__)
        return made

    def _settled(self, x: Any, where: str) -> Any:
        """Copy what stands where nothing else can be put later."""
        if id(x) in self._names:
            self._stuck.append(f'"{self._names[id(x)]}" stands, {where}')
        return self.of(x)

    def _leads_back(self, x: Any) -> bool:
        """Return whether an object leads to a module of the tree or to a registered tensor."""
        if id(x) not in self._leads:
            self._leads[id(x)] = self._search(x)
        return self._leads[id(x)]

    def _search(self, x: Any) -> bool:
        seen: dict[int, Any] = {}
        found = [x]
        while found:
            x = found.pop()
            if id(x) in self._tree or id(x) in self._names:
                return True
            if id(x) not in seen and not isinstance(x, _ATOMS):
                seen[id(x)] = x  # held, so that no other object gets its id
                found += _parts(x)
        return False


def _blank(module: nn.Module) -> nn.Module:
    return object.__new__(type(module))


def _emptied(x: Any) -> Any:
    """Return a container of the same kind with nothing in it."""
    if type(x) in (dict, OrderedDict, list, set):
        return type(x)()
    make, arguments, *_ = x.__reduce_ex__(4)  # as copy does: a defaultdict keeps its default
    made = make(*arguments)
    _plain(x).clear(made)
    return made


def _plain(x: Any) -> Any:
    """Return the built-in class of a container: its methods write also where those of a class of the user's refuse to."""
    return next(kind for kind in _CONTAINERS if isinstance(x, kind))


def _entries(x: Any) -> Any:
    """Return what a container holds, in a plain one."""
    if isinstance(x, dict):
        return dict(_plain(x).items(x))
    return {*x} if isinstance(x, set) else [*x]


def _parts(x: Any) -> list[Any]:
    """Return the objects that an object is made of, as far as they could be copied."""
    parts: list[Any]
    if isinstance(x, dict):
        parts = [*x.keys(), *x.values()]
    elif isinstance(x, list | tuple | set | frozenset | deque):
        parts = list(x)
    elif isinstance(x, MethodType):
        parts = [x.__self__]
    elif isinstance(x, partial):
        parts = [x.func, *x.args, *x.keywords.values()]
    elif isinstance(x, FunctionType):
        parts = [content for cell in x.__closure__ or () for content in contents_of(cell)] + list(x.__defaults__ or ())
    elif isinstance(x, weakref.ref):
        parts = [x()] if isinstance(x(), nn.Module) else []
    else:
        parts = [*getattr(x, "__dict__", {}).values(), *(value for _, value in slots_of(x))]
    return parts
