"""What calls of a module do to attributes: whether they read one before they set it, and so depend on the call before.

An attribute that a call has changed is watched in the next ones, until one reads it first: for as long as they last its class
has a descriptor in the place of the attribute, which notes who comes first.

    read, then set          a state: what a call leaves there, the next one reads
    set, then read          of one call alone, as an intermediate result that two methods share; as far as anybody knows
    set, and not read       nobody knows yet: a method that a forward calls may do so in another branch

What methods may do is read off their code.
"""

from __future__ import annotations

import dis
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
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
    """The attributes that a forward may read, those that it may read first or unseen, and those that any method sets."""

    read: frozenset[str]
    read_first: frozenset[str]
    read_unseen: frozenset[str]
    written: frozenset[str]


def code_of(kinds: Iterable[type]) -> Code:
    """Return what the methods of some classes do."""
    return Code(*(frozenset[str]().union(*each) for each in zip(*map(_code_of, kinds), strict=True)))


@lru_cache(maxsize=4096)
def _code_of(kind: type) -> Code:
    members: dict[str, list[CodeType]] = {}
    for base in kind.__mro__:
        if base is not object and not base.__module__.startswith("torch."):
            for name, member in vars(base).items():
                members.setdefault(name, []).extend(_codes(member) if name not in _OUTSIDE else ())
    done = {name: [_names_in(code) for code in codes] for name, codes in members.items()}
    reached, left = list[Code](), ["forward", "__call__"]
    while left:
        own = done.pop(left.pop(), [])
        reached += own
        left += [other for each in own for other in each.read]
    written = [each.written for each in (*reached, *(each for own in done.values() for each in own))]
    columns = ([each[place] for each in reached] for place in range(3))
    return Code(*(frozenset[str]().union(*each) for each in (*columns, written)))


def _names_in(code: CodeType) -> Code:
    """Return what a piece of code does: it may read first what has not been set on every way there."""
    words, names = {x for x in code.co_consts if isinstance(x, str)}, {*code.co_names}
    unseen = words if names & {"vars", "__dict__"} else set[str]()
    first = words if unseen or names & {"getattr", "hasattr"} else set[str]()
    read, written, known = {*first}, set[str](), _set_before(code)
    for step in dis.get_instructions(code):
        if step.opname in _READS:
            read.add(step.argval)
            first |= {step.argval} - known.get(step.offset, frozenset())
        elif step.opname in _WRITES:
            written.add(step.argval)
    return Code(frozenset(read), frozenset(first), frozenset(unseen), frozenset(written))


_READS = ("LOAD_ATTR", "LOAD_METHOD")
_WRITES = ("STORE_ATTR", "DELETE_ATTR")
_ENDS = ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE")


def _set_before(code: CodeType) -> dict[int, frozenset[str]]:
    """Return which attributes of a module its method has set when it comes to an instruction, on whatever way.

    Nothing is said of the handlers of errors, to which there is a way from anywhere.
    """
    steps, own = [*dis.get_instructions(code)], code.co_varnames[:1]
    places, known = {step.offset: place for place, step in enumerate(steps)}, dict[int, frozenset[str]]()
    left = [(0, frozenset[str]())]
    while left:
        place, before = left.pop()
        step = steps[place]
        now = known[step.offset] & before if step.offset in known else before
        if known.get(step.offset) == now:
            continue
        known[step.offset] = now
        set_here = step.opname in _WRITES and _loaded(steps[place - 1]) in own
        after = now | {step.argval} if set_here else now
        if step.opcode in _JUMPS:
            left.append((places[step.argval], after))
        ends = step.opname in _ENDS or (step.opcode in _JUMPS and step.opname.startswith(("JUMP_FORWARD", "JUMP_BACK")))
        if not ends and place + 1 < len(steps):
            left.append((place + 1, after))
    return known


_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))


def _loaded(step: dis.Instruction) -> str | None:
    """Return the variable that an instruction has loaded last."""
    if not step.opname.startswith("LOAD_FAST"):
        return None
    return step.argval[-1] if isinstance(step.argval, tuple) else step.argval


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
