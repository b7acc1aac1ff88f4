"""Sums over microbatches: as they come, or in one fixed tree, ((0 + 1) + (2 + 3)) + 4, whatever the order of arrival.

A parameter that a microbatch has not used has no gradient there, which adds nothing; an unused one has none at all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fshard.mesh.layout.arithmetic import tree_sum

Gradients = Sequence[Tensor | None]


class RunningSum:
    """The sum in the order of arrival, in its own memory.

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
        self._accumulators: list[Tensor] = []

    def let_accumulate(self, weights: Sequence[Tensor]) -> bool:
        """Let autograd add to the `.grad` of the weights, which is counted in the sum."""
        if not self._accumulators:
            for weight in weights:
                weight.grad = torch.zeros_like(
                    weight
                )  # autograd would keep a first gradient, memory of others included
            self._accumulators = [weight.grad for weight in weights if weight.grad is not None]
        return True

    def add(
        self, microbatch: int, gs: Gradients, dtypes: Sequence[torch.dtype] | None = None
    ) -> None:
        """Add the gradients of a microbatch, to sums of these dtypes; by default their own."""
        sums = self._sums = self._sums or [None] * len(gs)
        for index, (g, dtype) in enumerate(zip(gs, dtypes or [None] * len(gs), strict=True)):
            if g is not None:
                total = sums[
                    index
                ]  # the first gradient is copied, since its memory may be another's too
                sums[index] = g.to(dtype or g.dtype, copy=True) if total is None else total.add_(g)

    def result(self) -> list[Tensor | None]:
        """Return the sum; None where nothing was added."""
        accumulated = [g if g._version else None for g in self._accumulators]
        if self._sums and accumulated:
            return [*map(add_gradients, self._sums, accumulated)]
        return self._sums or accumulated

    sums = result  # nothing is divided


class OrderedSum:
    """The weighted sum over microbatches in the fixed tree, accumulated in at least 32 bits and divided at the end.

    >>> total = OrderedSum([2.0, 1.0, 1.0])
    >>> for microbatch in (2, 0, 1):
    ...     total.add(microbatch, [torch.tensor(float(microbatch))])
    >>> total.result()
    [tensor(0.7500)]
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = weights
        self._nodes: dict[
            tuple[int, int], list[Tensor | None]
        ] = {}  # sums by height and index in the tree
        self._dtypes: list[torch.dtype | None] = []

    def add(self, microbatch: int, gs: Gradients) -> None:
        """Add the gradients of a microbatch, and all sums in the tree that are complete then."""
        dtypes = self._dtypes or [None] * len(gs)
        self._dtypes = [
            dtype if g is None else g.dtype for dtype, g in zip(dtypes, gs, strict=True)
        ]
        sums, index, count = (
            [self._weighted(g, self._weights[microbatch]) for g in gs],
            microbatch,
            len(self._weights),
        )
        height = 0
        while count > 1:
            sibling = index ^ 1
            if sibling < count:
                if (height, sibling) not in self._nodes:
                    break
                neighbours = self._nodes.pop((height, sibling))
                pair = (neighbours, sums) if sibling < index else (sums, neighbours)
                sums = [add_gradients(a, b, missing=0.0) for a, b in zip(*pair, strict=True)]
            height, index, count = height + 1, index // 2, -(-count // 2)
        self._nodes[height, index] = sums

    def sums(self) -> list[Tensor | None]:
        """Return the sum before the division."""
        return next(iter(self._nodes.values()), [])

    def result(self) -> list[Tensor | None]:
        """Return the sum, divided by all weights."""
        divisor = sum(self._weights)
        return [
            None if g is None or dtype is None else (g if divisor == 1.0 else g / divisor).to(dtype)
            for g, dtype in zip(self.sums(), self._dtypes, strict=True)
        ]

    @staticmethod
    def _weighted(g: Tensor | None, weight: float) -> Tensor | None:
        if g is None:
            return None
        g = g if g.is_complex() else g.to(torch.promote_types(g.dtype, torch.float32))
        return g if weight == 1.0 else g * weight


def add_gradients(
    a: Tensor | None, b: Tensor | None, missing: float | None = None
) -> Tensor | None:
    """Add two gradients. With `missing=0.0`, one that is None counts as zeros, which turn -0.0 into 0.0."""
    if a is None or b is None:
        summand = b if a is None else a
        return summand if summand is None or missing is None else summand + missing
    return a + b


def tree_mean(rows: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the mean of numbers in 64 bits, added in the fixed tree; rows of weight 0 may be no numbers."""
    stack = torch.stack([*rows]).double()
    factors = torch.tensor(weights, dtype=stack.dtype, device=stack.device)
    factors = factors.reshape(-1, *[1] * (stack.ndim - 1))
    weighted = torch.where(factors > 0, stack * factors, 0.0)
    return tree_sum([*weighted]) / sum(weights)
