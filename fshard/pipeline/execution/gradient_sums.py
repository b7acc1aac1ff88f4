"""Sums over microbatches: in the order of arrival, or in one fixed tree.

The tree of five microbatches is ((0 + 1) + (2 + 3)) + 4, in whatever order they arrive: a schedule
changes the order of arrival, and so the rounding of a running sum.

A parameter that a microbatch has not used has no gradient there, which adds nothing; an unused one
has none at all.
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
                # Without zeros autograd would take the first gradient as `.grad`, which may keep
                # alive the larger memory that it is a view of.
                weight.grad = torch.zeros_like(weight)
                self._accumulators.append(weight.grad)
        return True

    def add(
        self, microbatch: int, gs: Gradients, dtypes: Sequence[torch.dtype] | None = None
    ) -> None:
        """Add the gradients of a microbatch, to sums of these dtypes; by default their own."""
        if not self._sums:
            self._sums = [None] * len(gs)
        for index, g in enumerate(gs):
            if g is None:
                continue
            total = self._sums[index]
            if total is None:
                # A copy: the memory of a gradient may be that of another tensor, too.
                dtype = g.dtype if dtypes is None else dtypes[index]
                self._sums[index] = g.to(dtype, copy=True)
            else:
                total.add_(g)

    def result(self) -> list[Tensor | None]:
        """Return the sum; None where nothing was added."""
        # Autograd adds in place, which counts the version of a tensor up from 0.
        accumulated = [g if g._version > 0 else None for g in self._accumulators]
        if self._sums and accumulated:
            return [add_gradients(a, b) for a, b in zip(self._sums, accumulated, strict=True)]
        return self._sums or accumulated

    sums = result  # nothing is divided


class OrderedSum:
    """The weighted sum over microbatches in the fixed tree.

    It is accumulated in at least 32 bits, and divided at the end.

    >>> total = OrderedSum([2.0, 1.0, 1.0])
    >>> for microbatch in (2, 0, 1):
    ...     total.add(microbatch, [torch.tensor(float(microbatch))])
    >>> total.result()
    [tensor(0.7500)]
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = weights
        # The sums that wait for their siblings, by height and index in the tree:
        #
        #     height 2          0
        #     height 1     0         1
        #     height 0   0   1     2   3     the microbatches
        self._nodes: dict[tuple[int, int], list[Tensor | None]] = {}
        self._dtypes: list[torch.dtype | None] = []

    def add(self, microbatch: int, gs: Gradients) -> None:
        """Add the gradients of a microbatch, and all sums in the tree that are complete then."""
        self._record_dtypes(gs)
        weight = self._weights[microbatch]
        sums = [_weighted(g, weight) for g in gs]

        height = 0
        index = microbatch
        count = len(self._weights)  # of the nodes of this height
        while count > 1:
            sibling = index ^ 1
            if sibling < count:  # the last of an odd number of nodes has none, and rises alone
                if (height, sibling) not in self._nodes:
                    break
                other_sums = self._nodes.pop((height, sibling))
                if sibling < index:
                    sums = _add_in_tree(other_sums, sums)
                else:
                    sums = _add_in_tree(sums, other_sums)
            height += 1
            index //= 2
            count = (count + 1) // 2
        self._nodes[height, index] = sums

    def _record_dtypes(self, gs: Gradients) -> None:
        if not self._dtypes:
            self._dtypes = [None] * len(gs)
        for index, g in enumerate(gs):
            if g is not None:
                self._dtypes[index] = g.dtype

    def sums(self) -> list[Tensor | None]:
        """Return the sum before the division."""
        return next(iter(self._nodes.values()), [])

    def result(self) -> list[Tensor | None]:
        """Return the sum, divided by all weights."""
        divisor = sum(self._weights)
        means: list[Tensor | None] = []
        for total, dtype in zip(self.sums(), self._dtypes, strict=True):
            if total is None or dtype is None:
                means.append(None)
                continue
            mean = total if divisor == 1.0 else total / divisor
            means.append(mean.to(dtype))
        return means


def _weighted(g: Tensor | None, weight: float) -> Tensor | None:
    if g is None:
        return None
    if not g.is_complex():
        g = g.to(torch.promote_types(g.dtype, torch.float32))
    return g if weight == 1.0 else g * weight


def _add_in_tree(left: Gradients, right: Gradients) -> list[Tensor | None]:
    return [add_gradients(a, b, missing=0.0) for a, b in zip(left, right, strict=True)]


def add_gradients(
    a: Tensor | None, b: Tensor | None, missing: float | None = None
) -> Tensor | None:
    """Add two gradients; without one of them, return the other.

    With `missing=0.0`, one that is None counts as zeros, which turn -0.0 into 0.0.
    """
    if a is not None and b is not None:
        return a + b
    summand = b if a is None else a
    if summand is None or missing is None:
        return summand
    return summand + missing


def tree_mean(rows: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the mean of numbers in 64 bits, added in the fixed tree.

    Rows of weight 0 may be nan.
    """
    stack = torch.stack([*rows]).double()
    factors = torch.tensor(weights, dtype=stack.dtype, device=stack.device)
    factors = factors.reshape(-1, *[1] * (stack.ndim - 1))
    # Not a product alone: nan * 0 is nan.
    weighted = torch.where(factors > 0, stack * factors, 0.0)
    return tree_sum([*weighted]) / sum(weights)
