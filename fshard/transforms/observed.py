"""What calls of a module do to attributes: whether they read one before they set it, and so depend on the call before.

An attribute that a call has changed is watched in the next ones, until one reads it first: for as long as they last its class
has a descriptor in the place of the attribute, which notes who comes first.

    read, then set          a state: what a call leaves there, the next one reads
    set, then read          of one call alone, as an intermediate result that two methods share
    set, and not read       left behind, for whoever may look

What methods may do is read off their code before, so that no call has to show it: see `methods`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import suppress
from inspect import getattr_static
from typing import Any

from torch import nn

from fshard.transforms.kept import ABSENT


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
