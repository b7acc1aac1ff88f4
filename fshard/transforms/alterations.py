"""What is done to a boosted model's structure from outside, between one call and the next.

    model.module.tau = 0.5                                followed: the next call has it
    model.module.state = None                             followed: what a forward has kept there is forgotten
    model.module.layer.register_forward_hook(hook)        followed
    model.module.head = nn.Linear(4, 2)                   refused: its tensors would lie nowhere
    model.module.layer.requires_grad_(False)              refused: how the optimizer's state lies is decided

All devices have to do the same, as in any such loop.  What a forward keeps is shown there, too: `model.module.calls`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fshard.copying import MANY
from fshard.errors import ModuleError
from fshard.transforms.holders import ATOMS, CONTAINERS, INTERNAL, are_same, holds, items_of, stays
from fshard.transforms.in_common import is_common, own_of, parts_in
from fshard.transforms.kept import ABSENT, Slot, put, set_in, slot_of
from fshard.transforms.skeleton import written_to

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_TENSORS = ("_parameters", "_buffers", "_modules")
_HOOKS = tuple(sorted(key for key in INTERNAL if key.endswith("_hooks") and key.startswith(("_forward", "_backward"))))
_ABOUT_HOOKS = tuple(sorted(key for key in INTERNAL if key.startswith(("_forward", "_backward"))))

COMPILED = (
    "torch.compile cannot follow parameters that are gathered when they are used. Compile functions that are given them, "
    "fs.gathered(torch.compile(fn)), parts without parameters, or the criterion"
)
_COMPILED_IN_PLACE = "_compiled_call_impl"


class Altered(NamedTuple):
    """Attributes that were set, and to what; modes that were switched; and whether the module as a function is another one."""

    attributes: dict[Slot, Any]
    modes: list[Slot]
    anew: bool

    @property
    def values(self) -> dict[Slot, Any]:
        """What attributes were set to that any call can be given."""
        return {slot: x for slot, x in self.attributes.items() if stays(x) and not callable(x)}

    @property
    def switches(self) -> bool:
        """Whether a forward may do something else from now on: an attribute was set that is no number to be annealed."""
        return any(x is None or isinstance(x, bool | str) for x in self.attributes.values())

    @property
    def forgotten(self) -> set[str]:
        """The names of what calls may have kept, and the caller knows better."""
        return {slot.name for slot in (*self.attributes, *self.modes)}


class _Inner(NamedTuple):
    """A plain tensor or a container that is an attribute, and what it held."""

    x: Any
    items: list[Any]

    def is_as_noted(self) -> bool:
        return are_same(items_of(self.x), self.items)


_MANY = 2 * MANY
"""What a dict has that calls have a copy of, keys and values: what is larger they share."""


class Alterations:
    """Compares a module with what it was.

    Objects need no look where they are the same that calls have: in stages, `objects`, those that these have in common.
    """

    def __init__(self, module: nn.Module, *, objects: bool) -> None:
        self._objects = objects
        self._module, self._is_written_to = module, written_to(module)
        self._note()

    def _note(self) -> None:
        """Note what the module is; what is noted is held, so that nothing else takes its address."""
        self._parts = [(path, vars(part)) for path, part in self._module.named_modules()]
        self._dicts = [each for _, own in self._parts for each in (own, *(own[key] for key in (*_TENSORS, *_HOOKS)))]
        self._noted = {id(each): dict(each) for each in self._dicts}
        self._inner = dict[Slot, _Inner]()
        self._look_into(
            (Slot(path, key), x) for path, own in self._parts for key, x in own.items() if key not in INTERNAL
        )
        self._params = dict(self._module.named_parameters())
        self._trained = [x.requires_grad for x in self._params.values()]
        self._buffers = {name: (x, x._version) for name, x in self._module.named_buffers()}
        self._note_values()

    def _look_into(self, attributes: Iterable[tuple[Slot, Any]]) -> None:
        """Note what may be changed within attributes, each once; large ones are not looked into."""
        known = {id(inner.x) for inner in self._inner.values()}
        for slot, x in attributes:
            looked_at = isinstance(x, (Tensor, *CONTAINERS)) or self._is_copied(x)
            if looked_at and id(x) not in known and len(items := items_of(x)) <= _MANY:
                known.add(id(x))
                self._inner[slot] = _Inner(x, items)

    def _is_copied(self, x: Any) -> bool:
        """Return whether an object is none that calls have, but stages have copies of it."""
        return self._objects and type(x) not in ATOMS and holds(x) and not is_common(x, own_of(self._module))

    def _note_values(self) -> None:
        self._lengths = [*map(len, self._dicts)]
        self._views = [each.values() for each in self._dicts if each]
        self._values = [*chain.from_iterable(self._views)]

    def _is_as_noted(self) -> bool:
        """Return whether nothing has been done: quick, since every call asks."""
        return [*map(len, self._dicts)] == self._lengths and all(
            map(is_, chain.from_iterable(self._views), self._values)
        )

    def found(self) -> Altered | None:
        """Return what has been done since the last time; None if nothing has."""
        with _C.DisableTorchFunctionSubclass():  # it asks all parameters and buffers, in every call
            trained = [x.requires_grad for x in self._params.values()]
            versions = [x._version == version for x, version in self._buffers.values()]
        within = [slot for slot, inner in self._inner.items() if not inner.is_as_noted()]
        written = self._is_written_to()
        if self._is_as_noted() and trained == self._trained and all(versions) and not within and not written:
            return None
        wrong = [name for name, now, then in zip(self._params, trained, self._trained, strict=True) if now is not then]
        wrong += [name for name, same in zip(self._buffers, versions, strict=True) if not same]
        wrong += [
            f"{path}.{key}".removeprefix(".")
            for path, own in self._parts
            for kind in _TENSORS
            for key in self._different(own[kind])
        ]
        if wrong:
            raise ModuleError(
                f"{', '.join(wrong)} of model.module was replaced, written to, frozen or thawed after the model was boosted. "
                "What there is, and which is trained, was decided then: do it before, or boost model.unwrap() anew."
            )
        if written:
            raise ModuleError(
                "parameters or buffers of model.module were written to after the model was boosted: they have no memory "
                "there. Do it before, or to model.unwrap(), and boost that anew."
            )
        slots = [*within, *(Slot(path, key) for path, own in self._parts for key in self._different(own))]
        if idle := [slot.path or "the model" for slot in slots if slot.key == _COMPILED_IN_PLACE]:
            warnings.warn(f"compile() of {', '.join(idle)} counts for nothing: {COMPILED}.", stacklevel=3)
        slots = [slot for slot in slots if slot.key != _COMPILED_IN_PLACE]
        hooks = any(self._different(own[kind]) for _, own in self._parts for kind in _HOOKS)
        self._note()
        parts = dict(self._parts)
        attributes = {slot: parts[slot.path].get(slot.key, ABSENT) for slot in slots if slot.key not in INTERNAL}
        modes = [slot for slot in slots if slot.key == "training"]
        found = Altered(attributes, modes, anew=False)
        found = found._replace(anew=hooks or len(found.values) < len(attributes))
        return found if attributes or hooks or modes else None

    def show(self, kept: Mapping[str, Tensor], left: Mapping[Slot, Any], graphs: Mapping[Slot, Any]) -> None:
        """Let the module have what calls have kept, by the names of buffers, and left behind; `graphs` with its graph."""
        parts = dict(self._parts)
        shown = ((name, x, slot_of(name)) for name, x in kept.items())
        kept = {name: x for name, x, slot in shown if slot and slot.key not in parts[slot.path]["_parameters"]}
        if kept or left or graphs:
            put(self._module, {name: x.detach() for name, x in kept.items()})
            for slot, x in left.items():
                if slot.name not in kept:
                    set_in(vars(self._module.get_submodule(slot.path)), slot.key, x)
            for slot in {*left, *graphs, *(slot for name in kept if (slot := slot_of(name)) is not None)}:
                own = parts[slot.path]
                if slot in graphs:
                    own[slot.key] = graphs[slot]
                now = own.get(slot.key, ABSENT)
                set_in(self._noted[id(own)], slot.key, now)
                self._inner.pop(slot, None)
                self._look_into([(slot, now)])
            self._note_values()

    def _different(self, now: dict[str, Any]) -> list[str]:
        before = self._noted[id(now)]
        return [key for key in dict.fromkeys((*before, *now)) if before.get(key, self) is not now.get(key, self)]


def alter(stages: Sequence[nn.Module], module: nn.Module, altered: Altered) -> None:
    """Do to copies of parts of a module what was done to it, where no call can be given that."""
    parts = {path: vars(part) for path, part in module.named_modules()}
    own, inside = own_of(module), parts_in(stages)
    objects = {slot: x for slot, x in altered.attributes.items() if slot not in altered.values}
    if wrong := [slot for slot, x in sorted(objects.items()) if not slot.path or not is_common(x, own)]:
        names = ", ".join(f"{slot.path}.{slot.key}".removeprefix(".") for slot in wrong)
        raise ModuleError(
            f"{names} of model.module was set or changed after the model was boosted, and is no number, string, tensor or "
            "None. A model in stages is copied part by part: set it before."
        )
    for slot, part in ((slot, part) for path, part in inside for slot in objects if slot.path == path):
        vars(part)[slot.key] = objects[slot]
    if any(parts[""][kind] for kind in _HOOKS):
        raise ModuleError(
            "hooks of model.module itself are not called: no stage has the whole model. Hook a part of it."
        )
    for path, part in (each for each in inside if each[0] in parts):
        own = parts[path]
        for kind in _ABOUT_HOOKS if path else ():
            held = vars(part)[kind]
            held.clear()
            held.update(own[kind])
        if path:
            vars(part)["_is_full_backward_hook"] = own["_is_full_backward_hook"]  # without it they are not called
