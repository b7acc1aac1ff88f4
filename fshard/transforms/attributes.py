"""What a forward keeps in plain attributes from one call to the next: it is handed back, and lent again, as buffers are.

    self.calls += 1
    self.mean = 0.9 * self.mean + 0.1 * x.mean()
    self.mean.mul_(0.9)                              plain tensors are lent, too
    self.table = table                               also if it was None before, or not there

So it is averaged over devices, as all that is remembered, and each slice of a step begins with the same.  Kept is what a call
changes and a later one may read before it sets it, by its code (see `methods`) or as it was seen to (see `observed`).

All else a call *leaves* behind: the device's next call finds it, without its graph, and whoever looks at the module: an
attention map, a norm that is logged.  So are strings, and whatever cannot be changed.  Lists and objects are put back: who
reads one after an earlier call has changed it is warned.  Who looks at a boosted model finds graphs, too, so the loss that a
router has left there may be added to another.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import chain
from operator import is_
from typing import Any, NamedTuple, cast
from weakref import ref

from torch import Tensor, nn

from fshard.mesh.differentiate import transformed
from fshard.transforms.holders import (
    INTERNAL,
    VALUES,
    are_same,
    has_graph,
    holds,
    is_counted,
    is_same,
    items_of,
    shares,
    stays,
    storages_of,
)
from fshard.transforms.kept import ABSENT, Slot, as_tensor, set_in, slot_of, value_of
from fshard.transforms.lent import lent, untouched
from fshard.transforms.methods import Reads
from fshard.transforms.observed import unwatch, watch
from fshard.transforms.seen import Seen

_LOOKS = 8
"""In so many first calls, and in one of as many later, it is looked whether objects are changed."""


class Attributes:
    """The plain attributes of a replica's modules.

    Args:
        modules: with the names of their paths.
        places: the dicts and lists in which registered tensors stand, and their keys there.
        alone: plain tensors, by their ids, that share memory with no other: these are lent to a call.
        owned: objects, by their ids, that the replica has to itself, and puts back.
        seen: what is known of them.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        places: Iterable[tuple[Any, Any]],
        alone: Collection[int],
        owned: Collection[int],
        seen: Seen,
    ) -> None:
        filled = dict[int, set[Any]]()
        for container, key in places:
            filled.setdefault(id(container), set()).add(key)
        self._seen = seen
        self._modules = {path: _Module(path, module, filled, alone) for path, module in modules}
        self._kinds = {module.kind for module in self._modules.values()}
        self._layers = {path.rpartition(".")[2] for path in self._modules}
        self._held: dict[int, _Held] = {}
        self._calls, self._looking = 0, self._held
        self._lending = [module for module in self._modules.values() if module.lends]
        self._busy: list[_Module] = []
        self._modes = [(module.first, module.now) for module in self._modules.values() if "training" in module.now]
        self._all = [each for module in self._modules.values() for each in (module.now, module.now["_modules"])]
        self._views, self._begun, self._lengths = [each.values() for each in self._all], list[int](), list[int]()
        for path, module in self._modules.items():
            for key, x in module.holders:
                if id(x) not in self._held and id(x) not in filled:
                    items = items_of(x)
                    if not any(id(each) in filled for each in items):
                        self._held[id(x)] = _Held(x, items, shared=id(x) not in owned)
                if id(x) in self._held:
                    self._held[id(x)].slots.append(Slot(path, key))

    def put(self, kept: Mapping[str, Any]) -> None:
        """Lend plain tensors to a call, and what earlier calls have kept, by its names, or left behind."""
        seen, left, watched = self._seen, self._seen.left, dict[str, set[str]]()
        for slot in tuple(seen.changed):  # to which other threads add
            if slot not in seen.states or slot in seen.lost or slot in left:
                watched.setdefault(slot.path, set()).add(slot.key)
        for first, now in self._modes:
            first["training"] = now["training"]
        self._busy = [*self._lending, *(self._modules[path] for path in watched if path in self._modules)]
        for module in self._lending:
            module.lend()
        for path in watched.keys() & self._modules.keys() if watched else ():
            self._modules[path].watch(watched[path])
        self._calls += 1
        self._looking = self._held if self._calls <= _LOOKS or self._calls % _LOOKS == 0 else {}
        for held in self._looking.values():
            held.begin()
        for name, x in kept.items():
            slot = slot_of(name)
            if slot is not None and slot.path in self._modules:
                self._put(slot, value_of(lent(x)))
        for slot in [slot for slot in left if slot in seen.states and slot.name in kept]:
            del left[slot]
        for slot, x in {**seen.given, **left}.items() if seen.given or left else ():
            if slot.path in self._modules and (slot in left or slot.name not in kept):
                self._put(slot, lent(x))
        self._lengths, self._begun = [*map(len, self._all)], self._ids()

    def _put(self, slot: Slot, x: Any) -> None:
        module = self._modules[slot.path]
        module.put(slot.key, x)
        self._busy.append(module)

    def stay(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Note what modules have that a graph still refers to."""
        if self._seen.late is not None:
            self._seen.late.note(modules)

    def end(self) -> None:
        """Watch no more, whatever has become of the call."""
        for module in self._busy:
            module.end()
        self._busy, self._begun = [], []

    def _to_look_at(self) -> Iterable[_Module]:
        """Return the modules of which a call may have changed attributes: mostly none, and every call asks."""
        same = [*map(len, self._all)] == self._lengths and self._ids() == self._begun
        return dict.fromkeys(self._busy) if same else self._modules.values()

    def _ids(self) -> list[int]:
        """Return what all attributes are now, by numbers: it is held elsewhere, and nobody is to find another holder."""
        return [*map(id, chain.from_iterable(self._views))]

    def kept(self, before: Mapping[str, Any], registered: Iterable[Any]) -> dict[str, Any]:
        """Return what is kept after a call that was given this and has registered tensors; warn of what is lost."""
        seen, after, losses, read = self._seen, dict(before), list[str](), self._read_in_vain()
        left, taken = seen.left, cast("frozenset[int] | None", None)
        modules = self._to_look_at()
        for module in modules:
            for change in module.changed():
                slot = Slot(module.path, change.key)
                known = slot in seen.changed
                if taken is None and isinstance(change.now, Tensor):
                    taken = storages_of(registered)
                x = as_tensor(change.now) if self._may_be_state(slot, change) else None
                if x is not None and not shares(change.now, taken):
                    after[slot.name] = x
                    seen.lost.discard(slot)
                    seen.keep_graph(slot, change.now)
                    continue
                after.pop(slot.name, None)
                shown = seen.keep_graph(slot, change.now)
                if known and module.log.get(change.key) != "set, read" and change.leaves_loss and not shown:
                    losses.append(f"{module.title}.{change.key}")
                if module.log.get(change.key) == "read" and is_counted(change.now):
                    read.append(f"{module.title}.{change.key}")
                if stays(change.now, taken):
                    left[slot] = change.now.detach() if isinstance(change.now, Tensor) else change.now
                    seen.lost.discard(slot)
                else:
                    left.pop(slot, None)
                    seen.lost.add(slot)
        for slot in left.keys() & seen.states if left else ():
            x = as_tensor(left[slot])
            if x is not None:
                after.setdefault(slot.name, x)
        self._look_at_held()
        read += [f"{module.title}'s submodules" for module in modules if module.has_other_modules()]
        if read:
            names = ", ".join(dict.fromkeys(read))
            warnings.warn(
                f"{names} was changed by a forward, and the next one does not find it as in torch: lists, strings and objects "
                "are put back after a call, or shared by all slices of a batch. Keep buffers, or tensors and numbers that are "
                "attributes.",
                stacklevel=2,
            )
        if losses:
            names = ", ".join(dict.fromkeys(losses))
            warnings.warn(
                f"A forward leaves {names} behind with its graph, which nobody outside can see. A loss that is to be trained "
                "has to be returned.",
                stacklevel=2,
            )
        return after

    def _read_in_vain(self) -> list[str]:
        """Note what a call has done to what it was watched for; return what it has read that was lost."""
        read: list[str] = []
        for module in dict.fromkeys(self._busy):
            for key, done in module.log.items():
                slot = Slot(module.path, key)
                if done == "read":
                    self._seen.states.add(slot)
                    read += [f"{module.title}.{key}"] if slot in self._seen.lost else []
        return read

    def _may_be_state(self, slot: Slot, change: Change) -> bool:
        """Return whether what an attribute is now may be read by a later call before it is set; if not, it is watched."""
        seen = self._seen
        if slot not in seen.states and slot not in seen.unread:
            first = slot.key == "training" or self._may_be_read_first(slot)
            (seen.states if first else seen.unread).add(slot)
        seen.changed.add(slot)
        if change.written:
            seen.states.add(slot)
        return slot in seen.states

    def _may_be_read_first(self, slot: Slot) -> bool:
        """Return whether a method reads an attribute on some way to it on which it was not set before."""
        return self._reads.may_be_first(self._modules[slot.path].kind, slot.key)

    @cached_property
    def _reads(self) -> Reads:
        return Reads(self._kinds, self._layers)

    def _look_at_held(self) -> None:
        """Note which objects have been changed, that stay what they are."""
        for held in self._looking.values():
            if held.is_changed():
                for found in (self._seen.changed, self._seen.states, self._seen.lost):
                    found.update(held.slots)


class _Held:
    """An object, and what it held when a call began."""

    def __init__(self, x: Any, items: list[Any], *, shared: bool) -> None:
        self._x, self._items, self._shared, self._times, self.slots = x, items, shared, 0, list[Slot]()

    def begin(self) -> None:
        """Look at it before a call; whatever is put back after each call is as it was."""
        if self._shared:
            self._items = items_of(self._x)

    def is_changed(self) -> bool:
        """Return whether calls change it: one that is shared by all calls may be completed once, as a configuration is."""
        if are_same(items_of(self._x), self._items):
            return False
        self._times += 1
        return not self._shared or self._times > 1


class Change(NamedTuple):
    """An attribute that a call has changed: what it was at first, and is now; and whether it was written to in place."""

    key: str
    first: Any
    now: Any
    written: bool

    @property
    def leaves_loss(self) -> bool:
        """Whether it has a graph, where there was something of which a loss could have been made."""
        had = type(self.first) in (bool, int, float) or (
            isinstance(self.first, Tensor) and not self.first.requires_grad
        )
        if isinstance(self.now, (list, tuple, dict)):  # of losses, and not of features
            return any(isinstance(x, Tensor) and not x.ndim and has_graph(x) for x in items_of(self.now))
        return had and has_graph(self.now)


class _Module:
    """The attributes of one module, as they are between calls, `first`, and `now`, in one."""

    def __init__(self, path: str, module: nn.Module, filled: Mapping[int, set[Any]], alone: Collection[int]) -> None:
        self.path, self.kind, self.title = path, type(module), type(module).__name__
        self.log = dict[str, str]()
        self._module, self.now, self._watched = ref(module), vars(module), cast("Collection[str]", ())
        self._torchs = self.kind.__module__.startswith("torch.")
        self._computed = _computed_by_torch(self.now) if self._torchs else frozenset()
        put_by_others = {"forward"} | filled.get(id(self.now), set())  # `layers` sets forward
        self._never = (INTERNAL - {"training"}) | put_by_others
        self.first, self._modules = dict(self.now), [*self.now["_modules"].values()]
        known = {key: x for key, x in self.first.items() if key not in self._never}
        self.lends = [(key, x) for key, x in known.items() if id(x) in alone and not self._is_torchs(key)]
        lent_ones = {key for key, _ in self.lends}
        self.holders = [
            (key, x) for key, x in known.items() if holds(x) and key not in lent_ones and not self._is_torchs(key)
        ]
        self._put: dict[str, Any] = {}

    def _is_torchs(self, key: str) -> bool:
        """Return whether it is torch that sets an attribute of its own layer: only numbers are a state there."""
        return self._torchs and (key.startswith("_") or key in self._computed)

    def lend(self) -> None:
        """Lend the tensors to a call."""
        for key, x in self.lends:
            self.put(key, lent(x))

    def watch(self, keys: Collection[str]) -> None:
        """Watch some attributes in a call."""
        if (module := self._module()) is not None:
            self._watched = keys
            watch(module, keys, self.log)

    def end(self) -> None:
        """Watch no more."""
        if self._watched and (module := self._module()) is not None:
            unwatch(module, self._watched)
            self._watched = ()
        self._put = {}
        self.log.clear()

    def put(self, key: str, x: Any) -> None:
        """Set an attribute for a call; whoever puts back all puts it back."""
        set_in(self.now, key, x)
        self._put[key] = x

    def changed(self) -> Iterator[Change]:
        """Yield which attributes a call has changed."""
        begun = self.first
        if self._put:
            begun = {key: x for key, x in {**self.first, **self._put}.items() if x is not ABSENT}
        more = ("forward" in self.now) - ("forward" in begun)
        if len(self.now) - more != len(begun) or not all(map(is_, begun.values(), self.now.values())):
            for key in dict.fromkeys((*begun, *self.now)):
                was, now = begun.get(key, ABSENT), self.now.get(key, ABSENT)
                fits = (
                    isinstance(now, VALUES)
                    or not self._is_torchs(key)
                    or (key not in self.first and isinstance(now, Tensor))
                )
                registered = now is ABSENT and any(key in self.now[kind] for kind in ("_modules", "_parameters"))
                if key not in self._never and fits and not registered and not is_same(was, now):
                    yield Change(key, self.first.get(key, ABSENT), now, written=False)
        for key, x in self._put.items():
            if isinstance(x, Tensor) and self.now.get(key) is x and _is_written(x):
                yield Change(key, self.first.get(key, ABSENT), x, written=True)

    def has_other_modules(self) -> bool:
        """Return whether a call has replaced submodules, or has made some with tensors."""
        now = [*self.first["_modules"].values()]
        return not all(map(is_, self._modules, now)) or any(map(_has_tensors, now[len(self._modules) :]))


def _computed_by_torch(own: Mapping[str, Any]) -> frozenset[str]:
    """Return what hooks of torch's make of a layer's parameters in each call, which is no state: weight of weight_orig."""
    split = (name.rpartition("_") for name in own["_parameters"])
    return frozenset(key for key, _, end in split if end in ("orig", "g", "v"))


def _has_tensors(module: Any) -> bool:
    return module is not None and any(True for _ in chain(module.parameters(), module.buffers()))


def _is_written(copy: Tensor) -> bool:
    """Return whether a call has written to a tensor that was lent to it."""
    return copy._version > 0 if transformed() else not untouched(copy)
