"""Shard arithmetic: which elements of a global tensor a device stores. Pure integers: no tensors, no mesh.

Legend: `sizes` are those of the axes that split something, major to minor; `coordinates` a device's along them;
`index` the coordinates as one number. A dim and a flat tensor are split into ranges of ceil(total / parts) elements, of
which the last may be shorter or empty; only dims of parameters may be uneven.

    10 elements over 4 devices, flat:   [0 1 2] [3 4 5] [6 7 8] [9]
     4 elements over 3 devices, flat:   [0 1] [2 3] []

Sums over devices use one fixed binary tree, ((0 + 1) + (2 + 3)) + 4, so their bits depend only on the summands, not on
the number of devices. 16-bit floats are added in a wider dtype and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Protocol

import torch
from torch import Tensor

Range = tuple[int, int]
"""From the first element to one past the last."""


def ravel(coordinates: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the index of a device from its coordinates, major to minor.

    >>> ravel((1, 2), (2, 4))
    6
    """
    index = 0
    for coordinate, size in zip(coordinates, sizes, strict=True):
        index = index * size + coordinate
    return index


def unravel(index: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the coordinates of a device from its index, major to minor.

    >>> unravel(6, (2, 4))
    (1, 2)
    """
    coordinates: list[int] = []
    for size in reversed(sizes):
        index, coordinate = divmod(index, size)
        coordinates.append(coordinate)
    return tuple(reversed(coordinates))


def strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the stride of each axis: (12, 3, 1) for (2, 4, 3)."""
    return tuple(prod(sizes[axis + 1 :]) for axis in range(len(sizes)))


def balanced_range(total: int, parts: int, index: int) -> Range:
    """Return the range of part `index` where lengths differ by one at most; parts of parts are the same.

    >>> [balanced_range(5, 4, index) for index in range(4)], [balanced_range(5, 2, index) for index in range(2)]
    ([(0, 1), (1, 2), (2, 3), (3, 5)], [(0, 2), (2, 5)])
    """
    return index * total // parts, (index + 1) * total // parts


def chunk(total: int, parts: int) -> int:
    """Return the length of every flat range but the last ones."""
    return -(-total // parts)


def flat_range(total: int, parts: int, index: int) -> Range:
    """Return the flat range of part `index`: the last parts may be shorter, or empty.

    >>> [flat_range(4, 3, index) for index in range(3)]
    [(0, 2), (2, 4), (4, 4)]
    """
    each = chunk(total, parts)
    return min(index * each, total), min((index + 1) * each, total)


def zigzag(x: Tensor, n: int, dim: int = 1, *, inverse: bool = False) -> Tensor:
    """Reorder a dim so that the shard of device i of n has chunks i and 2n-1-i, of 2n; `inverse` undoes it.

    >>> zigzag(torch.arange(8), 2, dim=0)
    tensor([0, 1, 6, 7, 2, 3, 4, 5])
    """
    size, chunks = x.shape[dim], 2 * n
    if size % chunks:
        nearest = [
            multiple
            for multiple in (size - size % chunks, size - size % chunks + chunks)
            if multiple
        ]
        raise ValueError(
            f"fs.tensor.zigzag: tokens must be a multiple of {chunks}; got {size}. Use {' or '.join(map(str, nearest))}."
        )
    order = torch.tensor(
        [chunk for index in range(n) for chunk in (index, chunks - 1 - index)], device=x.device
    )
    dim %= x.ndim
    return (
        x.unflatten(dim, (chunks, -1))
        .index_select(dim, order.argsort() if inverse else order)
        .flatten(dim, dim + 1)
    )


_FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
WIDER: dict[torch.dtype, torch.dtype] = {
    **{
        getattr(torch, name): torch.float32
        for name in ("float16", "bfloat16", *_FLOAT8)
        if hasattr(torch, name)
    },
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
}
"""Dtypes that are added and compared in a wider one: floats that round too soon, and integers that torch cannot add."""


MANY, FEW = 8, 4096
"""Minimal number of tensors, and maximal size of each, for which a tree level is one call."""


class Combine(Protocol):
    """torch.add, torch.maximum or torch.minimum."""

    def __call__(self, input: Tensor, other: Tensor, /, *, out: Tensor | None = None) -> Tensor: ...


def tree_sum(xs: Sequence[Tensor]) -> Tensor:
    """Sum in the fixed tree."""
    return tree_of(xs, torch.add)


def tree_of(xs: Sequence[Tensor], combine: Combine) -> Tensor:
    """Combine in the fixed tree, in the wider dtype if there is one, and round once."""
    dtype = xs[0].dtype
    if dtype == torch.uint64 and combine is not torch.add:
        return flipped(tree_of([flipped(x) for x in xs], combine))
    wide = WIDER.get(dtype)
    return (
        _combine_in_tree([*xs], combine)
        if wide is None
        else _combine_in_tree([x.to(wide) for x in xs], combine).to(dtype)
    )


def flipped(x: Tensor) -> Tensor:
    """Convert uint64 to int64 in the same order, by flipping the highest bit, or back.

    >>> flipped(torch.tensor([0, 2**63], dtype=torch.uint64))
    tensor([-9223372036854775808,                    0])
    """
    dtype = torch.int64 if x.dtype == torch.uint64 else torch.uint64
    return (x.view(torch.int64) ^ torch.iinfo(torch.int64).min).view(dtype)


def _combine_in_tree(xs: list[Tensor], combine: Combine) -> Tensor:
    if len(xs) >= MANY and xs[0].numel() <= FEW:  # small tensors: one call for each level
        rows = torch.stack(xs)
        while len(rows) > 1:
            even = len(rows) // 2 * 2
            paired = combine(rows[0:even:2], rows[1:even:2])
            rows = paired if even == len(rows) else torch.cat([paired, rows[even:]])
        return rows[0].clone()
    while len(xs) > 1:
        pairs = [combine(xs[i], xs[i + 1]) for i in range(0, len(xs) - 1, 2)]
        xs = pairs + xs[2 * len(pairs) :]
    return xs[0]


def combined(xs: list[Tensor], combine: Combine, buffer: Tensor | None, out: Tensor) -> Tensor:
    """Sum (or combine) two or more tensors in the fixed tree into `out`, in the memory of all but the one to keep."""
    wide = WIDER.get(out.dtype)
    is_exact = wide is None or (
        len(xs) == 2 and wide.is_floating_point and out.element_size() > 1
    )  # rounded once
    if not is_exact:
        return out.copy_(tree_of(xs, combine))
    while len(xs) > 2:
        pairs = [(xs[i], xs[i + 1]) for i in range(0, len(xs) - 1, 2)]
        xs = [combine(a, b, out=b if a is buffer else a) for a, b in pairs] + xs[2 * len(pairs) :]
    return combine(xs[0], xs[1], out=out)
