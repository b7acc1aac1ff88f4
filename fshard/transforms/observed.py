"""What calls of a module do to attributes: whether they read one before they set it, and so depend on the call before.

An attribute that a call has changed is watched in the next ones, until one reads it first: for as long as they last its class
has a descriptor in the place of the attribute, which notes who comes first.

    read, then set          a state: what a call leaves there, the next one reads
    set, then read          of one call alone, as an intermediate result that two methods share
    set, and not read       left behind, for whoever may look

What methods may do on some way through them is read off their code before, so that no call has to show it.
"""

from __future__ import annotations

import dis
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property, lru_cache
from inspect import getattr_static, unwrap
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from torch import nn

from fshard.transforms.kept import ABSENT

_OUTSIDE = ("__init__", "__repr__", "extra_repr")


class Watched:
    """Stands in a class for an attribute of some of its modules, and notes in their logs what is done to it first."""

    def __init__(self, kind: type, key: str) -> None:
        self.kind, self.key, self.logs = kind, key, dict[int, dict[str, str]]()
        self.own: Any = vars(kind).get(key, ABSENT)

    def _note(self, module: Any, done: str) -> str:
        log = self.logs.get(id(module))
        return done if log is None else log.setdefault(self.key, done)

    def __get__(self, module: Any, kind: type) -> Any:
        """Read it."""
        if module is not None:
            if self._note(module, "read") == "set":
                self.logs[id(module)][self.key] = "set, read"
            if self.key in vars(module):
                return vars(module)[self.key]
        if self.own is ABSENT:
            return getattr(super(self.kind, kind if module is None else module), self.key)
        return self.own.__get__(module, kind) if hasattr(self.own, "__get__") else self.own

    def __set__(self, module: Any, value: Any) -> None:
        """Set it."""
        self._note(module, "set")
        vars(module)[self.key] = value

    def __delete__(self, module: Any) -> None:
        """Delete it."""
        self._note(module, "set")
        if self.key not in vars(module):
            raise AttributeError(self.key)
        del vars(module)[self.key]


_lock = threading.Lock()


def watch(module: nn.Module, keys: Iterable[str], log: dict[str, str]) -> None:
    """Note from now on what is done to some attributes; not to those that a class has descriptors of its own for."""
    kind = type(module)
    with _lock:
        for key in keys:
            found = vars(kind).get(key, ABSENT)
            if not isinstance(found, Watched):
                if hasattr(type(getattr_static(kind, key, None)), "__set__") and not _is_watched(kind, key):
                    continue
                found = Watched(kind, key)
                with suppress(TypeError):  # of a class that is not Python's, whose modules nobody can watch
                    type.__setattr__(kind, key, found)
            found.logs[id(module)] = log


def unwatch(module: nn.Module, keys: Iterable[str]) -> None:
    """Note no more; the last one leaves the class as it was."""
    kind = type(module)
    with _lock:
        for key in keys:
            found = vars(kind).get(key)
            if isinstance(found, Watched):
                found.logs.pop(id(module), None)
                if not found.logs:
                    if found.own is ABSENT:
                        type.__delattr__(kind, key)
                    else:
                        type.__setattr__(kind, key, found.own)


def _is_watched(kind: type, key: str) -> bool:
    return isinstance(getattr_static(kind, key, None), Watched)


# -- what methods may do ----------------------------------------------------------------------------------------------


class Code(NamedTuple):
    """The attributes that a class's methods, as far as a forward reaches them, may read first of their own module.

    Further those that they read of other objects, those that they may read where no descriptor sees it, and those that any of
    its methods sets.
    """

    first: frozenset[str]
    others: frozenset[str]
    unseen: frozenset[str]
    written: frozenset[str]


@lru_cache(maxsize=4096)
def code_of(kind: type) -> Code:
    """Return what the methods of a class do."""
    members: dict[str, list[CodeType]] = {}
    for base in kind.__mro__:
        if base is not object and not base.__module__.startswith("torch."):
            for name, member in vars(base).items():
                members.setdefault(name, []).extend(_codes(member) if name not in _OUTSIDE else ())
    set_by = {name: frozenset.intersection(*map(_set_at_end, codes)) for name, codes in members.items() if codes}
    found, begun = dict[CodeType, _Read](), dict[CodeType, frozenset[str]]()
    left = [(code, _own(code), frozenset[str]()) for name in ("forward", "__call__") for code in members.get(name, ())]
    while left:
        code, own, known = left.pop()
        if code in begun and begun[code] <= known:
            continue
        begun[code] = begun.get(code, known) & known
        found[code] = read = _read_in(code, own, begun[code], members.keys(), set_by)
        left += [(inner, own, before) for inner, before in read.inner]
        left += [(other, _own(other), before) for name, before in read.calls for other in members[name]]
    every = _all_in(code for codes in members.values() for code in codes)
    written = {step.argval for code in every for step in dis.get_instructions(code) if step.opname in _WRITES}
    result = _Read(set(), set(), set(), [], [])
    for read in found.values():
        result.first.update(read.first)
        result.others.update(read.others)
        result.unseen.update(read.unseen)
    return Code(frozenset(result.first), frozenset(result.others), frozenset(result.unseen), frozenset(written))


class _Read(NamedTuple):
    """What a piece of code reads: see `Code`.  Which methods it calls, and functions it has within, after what was set."""

    first: set[str]
    others: set[str]
    unseen: set[str]
    calls: list[tuple[str, frozenset[str]]]
    inner: list[tuple[CodeType, frozenset[str]]]


def _read_in(
    code: CodeType,
    own: str | None,
    begun: frozenset[str],
    members: Collection[str],
    set_by: Mapping[str, frozenset[str]],
) -> _Read:
    """Return what a piece of code reads of the module that it calls `own`, of which some attributes have been set before."""
    words, names = {x for x in code.co_consts if isinstance(x, str)}, {*code.co_names}
    unseen = words if names & {"vars", "__dict__"} else set[str]()
    asked = words if unseen or names & {"getattr", "hasattr"} else set[str]()
    read, known = _Read({*asked}, {*asked}, {*unseen}, [], []), _set_before(code, own, begun, set_by)
    steps = [*dis.get_instructions(code)]
    for before, step in zip([steps[0], *steps], steps, strict=False):
        now, of_own = known.get(step.offset, frozenset[str]()), _loaded(before) == own
        if isinstance(step.argval, CodeType):
            read.inner.append((step.argval, now))
        elif step.opname in _READS:
            if step.argval in members:
                read.calls.append((step.argval, now if of_own else frozenset()))
            if not of_own:
                read.others.add(step.argval)
            elif step.argval not in now:
                read.first.add(step.argval)
    return read


_READS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
_WRITES = ("STORE_ATTR", "DELETE_ATTR")
_ENDS = ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE")
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))


def _set_before(
    code: CodeType, own: str | None, begun: frozenset[str], set_by: Mapping[str, frozenset[str]]
) -> dict[int, frozenset[str]]:
    """Return which attributes of a module have been set when an instruction is come to, on whatever way.

    Nothing is said of the handlers of errors, to which there is a way from anywhere.
    """
    steps = [*dis.get_instructions(code)]
    places, known = {step.offset: place for place, step in enumerate(steps)}, dict[int, frozenset[str]]()
    left = [(0, begun)]
    while left:
        place, before = left.pop()
        step = steps[place]
        now = known[step.offset] & before if step.offset in known else before
        if known.get(step.offset) == now:
            continue
        known[step.offset] = now
        of_own, after = bool(place) and _loaded(steps[place - 1]) == own, now
        if of_own and step.opname in _WRITES:
            after = now | {step.argval}
        elif of_own and step.opname in _READS:  # of a method, to call it
            after = now | set_by.get(step.argval, frozenset())
        if step.opcode in _JUMPS:
            left.append((places[step.argval], after))
        ends = step.opname in _ENDS or (step.opcode in _JUMPS and step.opname.startswith(("JUMP_FORWARD", "JUMP_BACK")))
        if not ends and place + 1 < len(steps):
            left.append((place + 1, after))
    return known


def _set_at_end(code: CodeType) -> frozenset[str]:
    """Return which attributes a method has set whenever it returns, without what it calls."""
    known = _set_before(code, _own(code), frozenset(), {})
    ends = [
        known[step.offset] for step in dis.get_instructions(code) if step.opname in _ENDS[:2] and step.offset in known
    ]
    return frozenset.intersection(*ends) if ends else frozenset()


def _own(code: CodeType) -> str | None:
    """Return what a method calls its module."""
    return code.co_varnames[0] if code.co_argcount else None


def _loaded(step: dis.Instruction) -> str | None:
    """Return the variable that an instruction has loaded last."""
    if not step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
        return None
    return step.argval[-1] if isinstance(step.argval, tuple) else step.argval


def _codes(member: Any) -> Iterator[CodeType]:
    """Yield the code of a method."""
    if isinstance(member, property | cached_property):
        member = member.fget if isinstance(member, property) else member.func
    if isinstance(member, staticmethod | classmethod):
        member = member.__func__
    if isinstance(member := unwrap(member), FunctionType):
        yield member.__code__


def _all_in(codes: Iterable[CodeType]) -> Iterator[CodeType]:
    """Yield code, and that of the functions within it."""
    found = [*codes]
    while found:
        code = found.pop()
        yield code
        found += [x for x in code.co_consts if isinstance(x, CodeType)]
