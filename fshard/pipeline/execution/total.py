"""Sums over microbatches: as they come, or in one fixed tree, ((0 + 1) + (2 + 3)) + 4, whatever the order in which they come.

A parameter that a microbatch has not used has no gradient there, which adds nothing; one that none has used has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_torch: Any = torch  # its stubs do not know _foreach_add_
Gradients = Sequence[Tensor | None]


class RunningSum:
    """The sum in the order in which summands come; it takes the memory of one.

    >>> total = RunningSum()
    >>> w = torch.zeros(2, requires_grad=True)
    >>> if total.let_accumulate([w]):
    ...     w.sum().backward()
    >>> total.add(1, [torch.ones(2)])
    >>> total.result()
    [tensor([2., 2.])]
    """

    def __init__(self) -> None:
        self._sums: list[Tensor | None] = []
        self._own: list[bool] = []
        self._accumulators: Sequence[Tensor] = ()

    def let_accumulate(self, weights: Sequence[Tensor]) -> bool:
        """Let the `.grad` of the weights be the sums from now on, for autograd to add to them; called before it does."""
        if not self._accumulators:
            self._begin(len(weights))
            self._accumulators = weights
            self._set()
        self._take_back()
        return True

    def _begin(self, count: int) -> None:
        if not self._sums:
            self._sums, self._own = [None] * count, [False] * count

    def _set(self) -> None:
        for place, weight in enumerate(self._accumulators):
            total = self._sums[place]
            if total is not None and not self._own[place]:
                self._sums[place], self._own[place] = total.clone(), True
            weight.grad = self._sums[place]

    def _take_back(self) -> None:
        """Copy gradients that autograd stored but that share memory with another tensor."""
        for place, weight in enumerate(() if all(self._own) else self._accumulators):
            if weight.grad is not None and not self._own[place]:
                if weight.grad.is_sparse:
                    weight.grad = weight.grad.to_dense()
                elif not _is_alone(weight.grad):
                    weight.grad = weight.grad.clone()
                self._sums[place], self._own[place] = weight.grad, True

    def add(self, microbatch: int, gs: Gradients) -> None:
        """Add those of a microbatch, in place where the sum owns its memory."""
        self._begin(len(gs))
        self._take_back()
        owned: list[Tensor] = []
        added: list[Tensor] = []
        for place, (known, g, own) in enumerate(zip(self._sums, gs, self._own, strict=True)):
            if g is None:
                continue
            if known is None:
                self._sums[place] = g
            elif own:
                owned.append(known)
                added.append(g)
            else:
                self._sums[place], self._own[place] = known + g, True
        if owned:
            _torch._foreach_add_(owned, added)
        self._set()

    def result(self) -> list[Tensor | None]:
        """Return the sum; None if nothing was added."""
        self._take_back()
        return self._sums


def _is_alone(x: Tensor) -> bool:
    """Return True if no other tensor shares the memory of this one, and it has no excess memory."""
    memory = x.untyped_storage()
    return memory.nbytes() == x.nbytes and _users(memory) <= _ALONE


def _users(memory: Any) -> int:
    """Return the number of references to a storage, the caller's included."""
    return _torch._C._storage_Use_Count(memory._cdata)


_one = torch.zeros(1)
_ALONE = _users(_one.untyped_storage())


class Ordered:
    """The weighted sum over microbatches in the fixed tree, accumulated in at least 32 bits and divided at the end.

    >>> total = Ordered([2.0, 1.0, 1.0])
    >>> for microbatch in (2, 0, 1):
    ...     total.add(microbatch, [torch.tensor(float(microbatch))])
    >>> total.result()
    [tensor(0.7500)]
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = weights
        self._trees: dict[tuple[int, int], list[Tensor | None]] = {}
        self._dtypes: list[torch.dtype | None] = []

    def add(self, microbatch: int, gs: Gradients) -> None:
        """Add those of a microbatch to their sibling in the tree, as far as it is there."""
        known = self._dtypes or [None] * len(gs)
        self._dtypes = [dtype if g is None else g.dtype for dtype, g in zip(known, gs, strict=True)]
        tree, at, count = [self._weighted(g, self._weights[microbatch]) for g in gs], microbatch, len(self._weights)
        height = 0
        while count > 1:
            beside = at ^ 1
            if beside < count:
                if (height, beside) not in self._trees:
                    break
                other = self._trees.pop((height, beside))
                tree = [_sum(*(pair if at < beside else pair[::-1])) for pair in zip(tree, other, strict=True)]
            height, at, count = height + 1, at // 2, -(-count // 2)
        self._trees[height, at] = tree

    def sums(self) -> list[Tensor | None]:
        """Return the sum, not divided yet."""
        return next(iter(self._trees.values()), [])

    def result(self) -> list[Tensor | None]:
        """Return the sum, divided by all weights."""
        tree, divisor = self.sums(), sum(self._weights)
        return [
            None if g is None or dtype is None else (g if divisor == 1.0 else g / divisor).to(dtype)
            for g, dtype in zip(tree, self._dtypes, strict=True)
        ]

    @staticmethod
    def _weighted(g: Tensor | None, weight: float) -> Tensor | None:
        if g is None:
            return None
        g = g if g.is_complex() else g.to(torch.promote_types(g.dtype, torch.float32))
        return g if weight == 1.0 else g * weight


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        found = b if a is None else a
        return None if found is None else found + 0.0  # as with zeros: -0.0 becomes 0.0
    return a + b


Total = RunningSum | Ordered
"""A sum of gradients that come one microbatch after the other."""


def tree_mean(rows: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the mean of numbers in 64 bits, added in the fixed tree."""
    left = torch.stack([*rows]).double()
    left = left * torch.tensor(weights, dtype=left.dtype, device=left.device).reshape(-1, *[1] * (left.ndim - 1))
    while len(left) > 1:
        even, odd = left[0::2], left[1::2]
        left = even + odd if len(even) == len(odd) else torch.cat([even[:-1] + odd, even[-1:]])
    return left[0] / sum(weights)
