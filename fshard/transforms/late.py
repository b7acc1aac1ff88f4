"""What a backward does to the attributes of modules: in hooks of tensors and layers, in functions of one's own.

    def hook(g): self.gradient = g                     Grad-CAM;  self.steps += 1
    y.register_hook(hook)

By then the call has ended, and what it ran in, a replica, has been left to the graph that refers to it.  So it is noted what
such a replica had when its call ended, without holding anything that has a graph, and looked at once the backward is over.
What forwards set as well, a checkpoint that runs a part again may have set: that counts once, when it was a forward.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import Any
from weakref import ref

from torch import Tensor, nn

from fshard.transforms.holders import CONTAINERS, INTERNAL, items_of, stays
from fshard.transforms.kept import ABSENT, Slot

_MOST = 16
"""Calls of a step that are looked at: of more, some are evaluations that forgot to say so."""


class Late:
    """The replicas that a step's graphs refer to."""

    def __init__(self, *, hold: bool) -> None:
        self._hold, self._noted = hold, deque[list[_Noted]]()

    def note(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Note what a replica's modules have, whose call has ended; with `hold` they last until it is looked at them."""
        self._noted.append([_Noted(path, module, hold=self._hold) for path, module in modules])
        while len(self._noted) > _MOST and not self._hold:
            self._let_go(self._noted.popleft())

    def held(self) -> list[Any]:
        """Return what is to be held while a backward lets go of its graph."""
        return [one.module() for each in self._noted for one in each]

    def taken(self, by_forwards: Collection[Slot]) -> dict[Slot, Any]:
        """Return what has been set since it was last looked at; warn of what is lost."""
        changed = [change for each in self._noted for one in each for change in one.changes(by_forwards)]
        lost = {f"{slot.path}.{slot.key}".removeprefix(".") for slot, x in changed if not stays(x)}
        if lost:
            warnings.warn(
                f"A backward has changed {', '.join(sorted(lost))}, where nobody finds it: a call has lists and "
                "objects for itself, and has ended. Attributes that are set, to tensors or numbers, are kept.",
                stacklevel=2,
            )
        return {slot: x.detach() if isinstance(x, Tensor) else x for slot, x in changed if stays(x)}

    def forget(self) -> None:
        """Look no more at what there is: its step is over."""
        while self._noted:
            self._let_go(self._noted.popleft())

    def _let_go(self, noted: Iterable[_Noted]) -> None:
        """Cut replicas off from their graphs: a tensor there whose hook leads to the replica is a cycle that nobody finds."""
        for one in noted:
            own = vars(one.module() or one)
            own.update({key: x.detach() for key, x in own.items() if isinstance(x, Tensor) and x.grad_fn is not None})


class _Noted:
    """The attributes of one module when a call has ended."""

    def __init__(self, path: str, module: nn.Module, *, hold: bool) -> None:
        self._path, self.module = path, (lambda: module) if hold else ref(module)
        self._note(module)

    def _note(self, module: nn.Module) -> None:
        own = vars(module)
        self._were = {key: ref(x) if isinstance(x, Tensor) else x for key, x in own.items() if key not in INTERNAL}
        self._within = {key: _ids(x) for key, x in self._were.items() if isinstance(x, CONTAINERS)}

    def changes(self, by_forwards: Collection[Slot]) -> Iterator[tuple[Slot, Any]]:
        """Yield which attributes are others now, or hold others; of those that forwards change, only what was None."""
        module = self.module()
        if module is None:
            return
        own = vars(module)
        for key in dict.fromkeys((*self._were, *own)):
            was, x = self._were.get(key, ABSENT), own.get(key, ABSENT)
            again = was is not None and Slot(self._path, key) in by_forwards
            if (
                key not in INTERNAL
                and not again
                and ((was() if isinstance(was, ref) else was) is not x or self._holds_others(key, x))
            ):
                yield Slot(self._path, key), x
        self._note(module)

    def _holds_others(self, key: str, x: Any) -> bool:
        return key in self._within and _ids(x) != self._within[key]


def _ids(x: Any) -> list[int]:
    return [*map(id, items_of(x))]
