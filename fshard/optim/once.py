"""The norm of a step's gradients, taken once however many ask for it.

`train_step` watches the gradients while it steps.  Who asks for their norm meanwhile, `clip_by_global_norm` say, gets the
one that is known, or leaves it here; what made other tensors of the gradients says so.  They are known by identity.

    gradients, watched ─> loss_scaled: x / scale, said ─> clip: global_norm, asked ─┐
    metrics["grad_norm"] <──────────────────────── x scale ─────────────────────────┘
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from operator import is_

from torch import Tensor

from fshard.optim.leaves import Leaf, firsts_of, shards_of, version_of


class Watched:
    """Gradients, and their norm if somebody has asked for it; `precision`: how exact that is, more is better."""

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self.norm: Tensor | None = None
        self.precision = -1
        self._known = [(_marks(leaves), 1.0)]

    def times(self, leaves: Sequence[Leaf]) -> float | None:
        """Return how many times the norm of some leaves these gradients' is; None: they are others."""
        shards = _shards(leaves)
        for marks, times in self._known:
            if len(marks) == len(shards) and all(
                ref() is x and version == version_of(x) for (ref, version), x in zip(marks, shards, strict=True)
            ):
                return times
        return None

    def also(self, leaves: Sequence[Leaf], others: Sequence[Leaf], times: float) -> None:
        """Note that other leaves stand for some, which are so many times theirs."""
        known = self.times(leaves)
        if known is not None:
            self._known.append((_marks(others), known * times))


def _shards(leaves: Sequence[Leaf]) -> list[Tensor]:
    return [
        x
        for i, (leaf, first) in enumerate(zip(leaves, firsts_of(leaves), strict=True))
        if i == first
        for x in shards_of(leaf)
    ]


def _marks(leaves: Sequence[Leaf]) -> list[tuple[weakref.ref[Tensor], int]]:
    return [(weakref.ref(x), version_of(x)) for x in _shards(leaves)]


class _Here(threading.local):
    watched: Watched | None = None


_here = _Here()


def watched() -> Watched | None:
    """Return the gradients that the calling thread watches."""
    return _here.watched


@contextmanager
def watching(leaves: Sequence[Leaf]) -> Generator[Watched]:
    """Watch gradients for a while."""
    before, _here.watched = _here.watched, Watched(leaves)
    try:
        yield _here.watched
    finally:
        _here.watched = before


def stand_for(others: Sequence[Leaf], leaves: Sequence[Leaf], times: float = 1.0) -> None:
    """Say that some leaves were made of others, which are so many times as large, and else the same."""
    if _here.watched is not None and not (times == 1 and all(map(is_, others, leaves))):
        _here.watched.also(others, leaves, times)
