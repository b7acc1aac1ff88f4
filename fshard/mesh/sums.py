"""Sums over devices, in one fixed binary tree: ((0 + 1) + (2 + 3)) + 4.

The order of additions is part of what a sum means here.  Then its bits depend on nothing but the summands: not on who
adds, nor on how many devices there are, since the tree over slices within a device continues in the tree over devices.
What would round too soon is added in a wider dtype and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

_FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
WIDER: dict[torch.dtype, torch.dtype] = {
    **{getattr(torch, name): torch.float32 for name in ("float16", "bfloat16", *_FLOAT8) if hasattr(torch, name)},
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
}
"""What is added and compared in a wider dtype: floats that round too soon, and integers that torch cannot add."""


MANY, FEW = 8, 4096
"""From how many tensors on, of up to how many elements, a level of the tree is one call."""


class Combine(Protocol):
    """torch.add, torch.maximum or torch.minimum."""

    def __call__(self, input: Tensor, other: Tensor, /, *, out: Tensor | None = None) -> Tensor: ...


def tree_sum(xs: Sequence[Tensor]) -> Tensor:
    """Sum in the fixed tree.

    >>> tree_sum([torch.tensor(1.0), torch.tensor(2.0), torch.tensor(4.0)])
    tensor(7.)
    """
    return tree_of(xs, torch.add)


def tree_of(xs: Sequence[Tensor], combine: Combine) -> Tensor:
    """Combine in the fixed tree, in the wider dtype if there is one, and round once."""
    dtype = xs[0].dtype
    wide = WIDER.get(dtype)
    return _tree(list(xs), combine) if wide is None else _tree([x.to(wide) for x in xs], combine).to(dtype)


def _tree(xs: list[Tensor], combine: Combine) -> Tensor:
    if len(xs) >= MANY and xs[0].numel() <= FEW:
        return _level_by_level(torch.stack(xs), combine)
    while len(xs) > 1:
        paired = [combine(xs[place], xs[place + 1]) for place in range(0, len(xs) - 1, 2)]
        xs = paired + xs[2 * len(paired) :]
    return xs[0]


def _level_by_level(rows: Tensor, combine: Combine) -> Tensor:
    """Combine many small tensors, one call for each level of the tree.  (n, ...) -> (...)"""
    while len(rows) > 1:
        even = len(rows) // 2 * 2
        paired = combine(rows[0:even:2], rows[1:even:2])
        rows = paired if even == len(rows) else torch.cat([paired, rows[even:]])
    return rows[0].clone()


def combined(xs: list[Tensor], combine: Combine, kept: Tensor | None, out: Tensor) -> Tensor:
    """Combine two or more tensors in the fixed tree into `out`, using up the memory of all but the one that is kept."""
    wide = WIDER.get(out.dtype)
    once = wide is not None and wide.is_floating_point and out.element_size() > 1  # so a sum of two is rounded once
    if wide is not None and (len(xs) > 2 or not once):
        return out.copy_(_tree([x.to(wide) for x in xs], combine))
    while len(xs) > 2:
        pairs = [(xs[place], xs[place + 1]) for place in range(0, len(xs) - 1, 2)]
        xs = [combine(a, b, out=b if a is kept else a) for a, b in pairs] + xs[2 * len(pairs) :]
    return combine(xs[0], xs[1], out=out)
