"""The norm of a step's gradients, taken once however many ask for it.

`train_step` watches the gradients while it steps.  Who asks for their norm meanwhile, `clip_by_global_norm` say, gets the
one that is known, or leaves it here; what made other tensors of the gradients says so.  They are known by identity.

    gradients, watched ─> loss_scaled: x / scale, said ─> clip: global_norm, asked ─┐
    metrics["grad_norm"] <──────────────────────── x scale ─────────────────────────┘

Sums of float64 numbers whose bits depend neither on their order nor on where they are cut.

A number that is not negative is written in digits of 20 bits, on one grid for all numbers: column c counts 2^(20 c - 1074).
Each column is added up by itself.  Its sums are whole numbers below 2^53 for up to 2^33 summands, hence exact in any order,
whoever adds.  Only what is at least one of the five columns from the largest digit down counts in the end.

    column        ...  54  53  52  51  50  49  48  ...
    one device             a   a   a   a   a               it writes five, from its own largest digit down
    another                        b   b   b   b   b
    sum                    a   a  a+b a+b a+b  .           what one of them may not have written is below what counts
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from operator import is_

import torch
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


_BITS, _DIGITS, _LOWEST = 20, 5, -1074
_COLUMNS = (1024 - _LOWEST) // _BITS + 1
_BLOCK = 2**16  # elements at a time, which stay in a cache

WIDTH = _COLUMNS + 1
"""Columns, and one for a sum that is not finite."""


def digits_of(x: Tensor) -> Tensor:
    """Return the sum of a float64 tensor without negative elements, as columns that may be added up."""
    return _summed(x, lambda block: block)


def digits_of_squares(x: Tensor) -> Tensor:
    """Return the sum of the squares of a real tensor, as columns; no more than a block of it is ever made float64."""
    return _summed(x, lambda block: block.double().square())


def _summed(x: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    columns = torch.zeros(WIDTH, dtype=torch.float64, device=x.device)
    for block in x.reshape(-1).split(_BLOCK) if x.numel() else ():
        columns += _digits_of_block(f(block))
    return columns


def number_of(columns: Tensor) -> Tensor:
    """Return the numbers that columns, the last dim, stand for.

    >>> number_of(digits_of(torch.tensor([2.0**60, 1.0, 0.25]).double()) + digits_of(torch.tensor([0.5]).double()))
    tensor(1.1529e+18, dtype=torch.float64)
    """
    digits, strange = columns[..., :-1], columns[..., -1]
    place = torch.arange(_COLUMNS, device=columns.device)
    largest = torch.where(digits > 0, place, -1).amax(-1, keepdim=True)
    counted = torch.where(place > largest - _DIGITS, digits * _unit(place, columns), 0.0)
    return counted.sum(-1) + strange


def _digits_of_block(x: Tensor) -> Tensor:
    most = x.amax()
    finite = most.isfinite()
    top = (torch.frexp(torch.where(finite, most, 0.0)).exponent - 1 - _LOWEST) // _BITS
    sums, rest = list[Tensor](), x / _unit(top, x)
    for _ in range(_DIGITS):
        digit = rest.floor()
        sums.append(digit.sum())
        rest.sub_(digit).mul_(2.0**_BITS)
    places = (top - torch.arange(_DIGITS, device=x.device)).clamp(min=0)  # below the lowest there are zeros only
    columns = x.new_zeros(WIDTH).index_add_(0, places, torch.stack(sums))
    columns = torch.where(finite, columns, 0.0)
    columns[-1] = torch.where(finite, 0.0, most)
    return columns


def _unit(place: Tensor, like: Tensor) -> Tensor:
    """Return what a one in a column counts."""
    return torch.ldexp(torch.ones_like(place, dtype=like.dtype), place * _BITS + _LOWEST)
