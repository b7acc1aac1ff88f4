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
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import compress
from operator import ne
from sys import getrefcount
from typing import Any, NamedTuple

from torch import Tensor, nn

from fshard.copying import CONTAINERS, MANY, Copying, blank, entries_of, held_by_attributes, plain, slots_of
from fshard.errors import ModuleError
from fshard.transforms.attributes import Attributes
from fshard.transforms.holders import INTERNAL
from fshard.transforms.layers import Layers
from fshard.transforms.seen import Seen, seen_of

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
        self._puts = [(plain(place.container).__setitem__.__get__(place.container), place) for place in places]
        kinds = [plain(container) for container in containers]
        self._dicts = [x for x, kind in zip(containers, kinds, strict=True) if kind is dict]
        self._entries, self._lengths = [*map(entries_of, self._dicts)], [*map(len, self._dicts)]
        rest = [(x, kind) for x, kind in zip(containers, kinds, strict=True) if kind is not dict]
        self._others = [(x, kind, entries_of(x)) for x, kind in rest]
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

    def put(self, tensors: Mapping[str, Any]) -> None:
        """Put other tensors into the places of some."""
        for put, (_, key, name) in self._puts if tensors else ():
            if name in tensors:
                put(key, tensors[name])

    def rebound(self, tensors: Mapping[str, Any]) -> list[str]:
        """Return the parameters that a call has bound to something else."""
        return [name for container, key, name in self._params if container.get(key) is not tensors[name]]

    def restore(self) -> None:
        """Undo whatever a call has put into the modules, its tensors among them."""
        for _ in map(dict.update, self._dicts, self._entries):  # a loop of C's: there are many
            pass
        for own, original in compress(
            zip(self._dicts, self._entries, strict=True), map(ne, map(len, self._dicts), self._lengths)
        ):
            for key in dict.keys(own) - original.keys():
                dict.__delitem__(own, key)
        for container, kind, original in self._others:
            if not container and not original:
                continue
            kind.clear(container)
            if kind is OrderedDict:  # whose update calls a class's own __setitem__
                for key, value in original.items():
                    OrderedDict.__setitem__(container, key, value)
            else:
                (set.update if kind is set else kind.extend)(container, original)

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


class _Copying(Copying):
    """One copy of a module's structure, in the making."""

    def __init__(self, root: nn.Module, names: Mapping[int, str], leads: dict[int, bool]) -> None:
        held = held_by_attributes(root, lambda x: isinstance(x, CONTAINERS) and len(x) <= MANY)
        super().__init__({*names, *map(id, root.modules())}, held, leads, {})
        self._root, self._names = root, names
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

    def _own(self, x: Any) -> Any:
        if isinstance(x, Tensor | Empty):
            return x
        made = self._memo[id(x)] = blank(x)
        self._fill(vars(made), vars(x).items())
        for key, value in slots_of(x):
            object.__setattr__(made, key, self._settled(value, f"a slot of {type(x).__name__}"))
        made.__dict__["_compiled_call_impl"] = None  # what module.compile() has made runs the module itself
        return made

    def _is_to_copy(self, container: Any) -> bool:
        return len(container) <= MANY

    def _fill(self, made: Any, items: Iterable[tuple[Any, Any]]) -> None:
        """Copy entries, and note the places among them."""
        put = plain(made).__setitem__
        for key, value in items:
            name = self._names.get(id(value))
            if name is not None:
                self._places.append(Place(made, key, name))
            key = self.of(key) if isinstance(made, dict) else key
            put(made, key, value if name is not None else self._value(key, value))

    def _value(self, key: Any, value: Any) -> Any:
        made = self.of(value)
        if made is not value and isinstance(made, CONTAINERS) and (key in _WRITTEN or key not in INTERNAL):
            self._containers.append(made)
        return made

    def _partial(self, x: partial[Any]) -> Any:
        made = super()._partial(x)
        self._containers.append(made.keywords)
        return made

    def _attributes(self, made: Any, x: Any) -> None:
        if hasattr(x, "__dict__"):
            self._containers.append(vars(made))
        super()._attributes(made, x)

    def _settled(self, x: Any, where: str) -> Any:
        if id(x) in self._names:
            self._stuck.append(f'"{self._names[id(x)]}" stands, {where}')
        return self.of(x)
