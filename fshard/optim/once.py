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

from fshard.optim.leaves import Leaf, firsts_of, shards_of


class Watched:
    """Gradients, each once, and their norm if somebody has asked for it; `precision`: how exact that is, more is better."""

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self.norm: Tensor | None = None
        self.precision = -1
        shards = _shards(leaves)
        self._own, self._versions = shards, [x._version for x in shards]
        self._others: list[tuple[list[weakref.ref[Tensor]], float]] = []

    def times(self, leaves: Sequence[Leaf]) -> float | None:
        """Return how many times the norm of some leaves, each once, these gradients' is; None: they are others."""
        shards = _shards(leaves)
        if _same(shards, self._own) and [x._version for x in shards] == self._versions:
            return 1.0
        return next((times for marks, times in self._others if _same(shards, [mark() for mark in marks])), None)

    def also(self, leaves: Sequence[Leaf], others: Sequence[Leaf], times: float) -> None:
        """Note that other leaves stand for some, which are so many times theirs."""
        known = self.times(_once(leaves))
        if known is not None:
            self._others.append(([weakref.ref(x) for x in _shards(_once(others))], known * times))


def _once(leaves: Sequence[Leaf]) -> list[Leaf]:
    return [leaf for i, (leaf, first) in enumerate(zip(leaves, firsts_of(leaves), strict=True)) if i == first]


def _shards(leaves: Sequence[Leaf]) -> list[Tensor]:
    return [x for leaf in leaves for x in shards_of(leaf)]


def _same(xs: Sequence[Tensor], ys: Sequence[Tensor | None]) -> bool:
    return len(xs) == len(ys) and all(map(is_, xs, ys))


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
