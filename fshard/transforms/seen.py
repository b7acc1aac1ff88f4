"""What the calls of a module have been seen to do to its attributes, and what they have left there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from fshard.mesh.scope import here
from fshard.transforms.holders import has_graph, tensors_of
from fshard.transforms.kept import Slot
from fshard.transforms.late import Late


class Seen:
    """What the calls of a module have been seen to do to attributes; replicas share it."""

    def __init__(self) -> None:
        self.changed: set[Slot] = set()
        self.states: set[Slot] = set()
        self.unread: set[Slot] = set()
        self.lost: set[Slot] = set()
        self.given: dict[Slot, Any] = {}
        self._left: dict[int | None, dict[Slot, Any]] = {}
        self._graphs: dict[Slot, Any] | None = None
        self.late: Late | None = None

    def shown(self, *, hold: bool) -> Seen:
        """Keep from now on what calls leave with its graph, and look at what backwards do, until it is taken; see `Late`."""
        self._graphs, self.late = {}, Late(hold=hold)
        return self

    def keep_graph(self, slot: Slot, x: Any) -> bool:
        """Keep what a call has left, if it has a graph and anybody wants it; return whether it is kept."""
        if self._graphs is None or not any(map(has_graph, tensors_of(x))):
            return False
        self._graphs[slot] = x
        return True

    def taken_graphs(self) -> dict[Slot, Any]:
        """Return what the last calls have left with its graph, and let it go."""
        graphs, self._graphs = self._graphs or {}, {}
        return graphs

    @property
    def left(self) -> dict[Slot, Any]:
        """What the calling device's last calls have left behind."""
        scope = here()
        return self._left.setdefault(None if scope is None else scope.device, {})

    @property
    def left_by_all(self) -> dict[Slot, Any]:
        """What the last calls of all devices have left behind; of one that has a module for itself, its own."""
        return {slot: x for left in self._left.values() for slot, x in left.items()}

    def give(self, values: Mapping[Slot, Any], instead_of: Iterable[Slot]) -> None:
        """Let all calls find some values from now on, until they change them; and not what others have left there."""
        for slot in instead_of:
            self.given.pop(slot, None)
            for left in self._left.values():
                left.pop(slot, None)
        self.given |= values


_seen: WeakKeyDictionary[nn.Module, Seen] = WeakKeyDictionary()


def seen_together(module: nn.Module) -> Seen:
    """Let all functions that are made of a module from now on see what each other's calls do."""
    return _seen.setdefault(module, Seen())


def seen_of(module: nn.Module) -> Seen:
    """Return what is to be known of the calls of a function that is made of a module."""
    return _seen.get(module) or Seen()
