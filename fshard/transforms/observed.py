"""What calls of a module do to attributes: whether they read one before they set it, and so depend on the call before.

An attribute that a call has changed is watched from then on: its module is given a class with a descriptor in the place of
the attribute, which notes who comes first.

    read, then set          a state: what a call leaves there, the next one reads
    set, then read          of one call alone, as an intermediate result that two methods share
    set, and not read       nobody knows yet: a method that a forward calls may do so in another branch

What methods may do is read off their code.
"""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from inspect import getattr_static, unwrap
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from torch import nn

_OUTSIDE = ("__init__", "__repr__", "extra_repr")
_ABSENT = object()


class Watched:
    """Stands in a module's class for an attribute of it, and notes in `log` what is done to it first."""

    def __init__(self, key: str, log: dict[str, str]) -> None:
        self._key, self._log = key, log

    def __get__(self, module: Any, kind: type) -> Any:
        """Read it."""
        if module is None:
            return self
        done = self._log.setdefault(self._key, "read")
        if done == "set":
            self._log[self._key] = "set, read"
        own = vars(module)
        if self._key in own:
            return own[self._key]
        found = getattr_static(kind.__mro__[1], self._key, _ABSENT)
        if found is _ABSENT:
            raise AttributeError(f"'{kind.__name__}' object has no attribute '{self._key}'")
        return found.__get__(module, kind) if hasattr(found, "__get__") else found

    def __set__(self, module: Any, value: Any) -> None:
        """Set it."""
        self._log.setdefault(self._key, "set")
        vars(module)[self._key] = value

    def __delete__(self, module: Any) -> None:
        """Delete it."""
        self._log.setdefault(self._key, "set")
        del vars(module)[self._key]


def watch(module: nn.Module, keys: Iterable[str], log: dict[str, str]) -> None:
    """Note from now on what is done to some attributes."""
    kind = type(module)
    kind = kind.__mro__[1] if isinstance(vars(kind).get("_watched"), dict) else kind
    members: dict[str, Any] = {key: Watched(key, log) for key in keys}
    own: Any = module
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    made = type(kind.__name__, (kind,), {"_watched": log, "__slots__": (), **names, **members})
    with suppress(TypeError):  # where a class has another layout nothing is noted, and all that may be read is kept
        own.__class__ = made


# -- what methods may do ----------------------------------------------------------------------------------------------


class Code(NamedTuple):
    """The attributes that a forward may read, those that it may read first, and those that any method sets."""

    read: frozenset[str]
    read_first: frozenset[str]
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
    read, read_first = ([each[place] for each in reached] for place in (0, 1))
    return Code(*(frozenset[str]().union(*each) for each in (read, read_first, written)))


def _names_in(code: CodeType) -> Code:
    """Return what a piece of code does, as far as it is known by its order: a branch may leave out what comes before."""
    first = (
        {x for x in code.co_consts if isinstance(x, str)} if {"getattr", "hasattr"} & {*code.co_names} else set[str]()
    )
    read, written = {*first}, set[str]()
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            read.add(step.argval)
            first |= {step.argval} - written
        elif step.opname in ("STORE_ATTR", "DELETE_ATTR"):
            written.add(step.argval)
    return Code(frozenset(read), frozenset(first), frozenset(written))


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
