"""Shard arithmetic: which elements of a global tensor a device stores, and sums in a fixed tree.

Legend: `sizes` are those of the axes that split something, major to minor; `coordinates` a device's
along them; `index` the coordinates as one number. A dim and a flat tensor are split into ranges of
ceil(total / parts) elements, of which the last may be shorter or empty; only dims of parameters may
be uneven.

    10 elements over 4 devices, flat:   [0 1 2] [3 4 5] [6 7 8] [9]
     4 elements over 3 devices, flat:   [0 1] [2 3] []

Sums over devices use one fixed binary tree, ((0 + 1) + (2 + 3)) + 4, so their bits depend only on
the summands, not on the number of devices. 16-bit floats are added in a wider dtype and rounded
once.
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

    Along axes of sizes 2 and 4, coordinates (1, 2) are index 1 * 4 + 2.

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
    """Return the range of part `index` where lengths differ by one at most.

    Parts of parts are the same: two of four parts have the range of one of two. For
    i * total // parts is equal for i of parts and for 2 i of 2 parts.

    >>> [balanced_range(5, 4, index) for index in range(4)]
    [(0, 1), (1, 2), (2, 3), (3, 5)]
    >>> [balanced_range(5, 2, index) for index in range(2)]
    [(0, 2), (2, 5)]
    """
    start = index * total // parts
    stop = (index + 1) * total // parts
    return start, stop


def chunk(total: int, parts: int) -> int:
    """Return the length of every flat range but the last ones: ceil(total / parts)."""
    return -(-total // parts)


def flat_range(total: int, parts: int, index: int) -> Range:
    """Return the flat range of part `index`: the last parts may be shorter, or empty.

    >>> [flat_range(4, 3, index) for index in range(3)]
    [(0, 2), (2, 4), (4, 4)]
    """
    length = chunk(total, parts)
    start = min(index * length, total)
    stop = min((index + 1) * length, total)
    return start, stop


def zigzag(x: Tensor, n: int, dim: int = 1, *, inverse: bool = False) -> Tensor:
    """Reorder a dim so that the shard of device i of n has chunks i and 2n-1-i, of 2n.

    `inverse` undoes it.

    >>> zigzag(torch.arange(8), 2, dim=0)
    tensor([0, 1, 6, 7, 2, 3, 4, 5])
    """
    size = x.shape[dim]
    chunks = 2 * n
    remainder = size % chunks
    if remainder:
        smaller = size - remainder
        larger = smaller + chunks
        advice = f"{smaller} or {larger}" if smaller else f"{larger}"
        raise ValueError(
            f"fs.tensor.zigzag: tokens must be a multiple of {chunks}; got {size}. Use {advice}."
        )

    # Computed on the device: the copy of a list would wait for an accelerator.
    first = torch.arange(n, device=x.device)
    order = torch.stack([first, chunks - 1 - first], 1).flatten()
    if inverse:
        order = order.argsort()

    dim %= x.ndim  # `unflatten` adds a dim, so that a negative number would mean another one
    return x.unflatten(dim, (chunks, -1)).index_select(dim, order).flatten(dim, dim + 1)


_SMALL_FLOATS = (
    "float16", "bfloat16",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
)  # fmt: skip
WIDER: dict[torch.dtype, torch.dtype] = {
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
}
"""Dtypes that are added and compared in a wider one.

These are floats that round too soon, and integers that torch cannot add.
"""
for _name in _SMALL_FLOATS:
    if hasattr(torch, _name):  # not every build of torch has all of them
        WIDER[getattr(torch, _name)] = torch.float32


# A level of the tree is one call where it would be many calls of little work each. No measurement
# of these two numbers is known.
_MANY_TENSORS = 8
"""Minimal number of tensors for which a tree level is one call."""
_SMALL_TENSOR = 4096
"""Maximal number of elements of a tensor for which a tree level is one call."""


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
        # Its wider dtype is int64, in which 2^63 and more are negative: an order to be kept.
        return flipped(tree_of([flipped(x) for x in xs], combine))

    wide = WIDER.get(dtype)
    if wide is None:
        return _combine_in_tree([*xs], combine)
    return _combine_in_tree([x.to(wide) for x in xs], combine).to(dtype)


def flipped(x: Tensor) -> Tensor:
    """Convert uint64 to int64 in the same order, by flipping the highest bit, or back.

    >>> flipped(torch.tensor([0, 2**63], dtype=torch.uint64))
    tensor([-9223372036854775808,                    0])
    """
    dtype = torch.int64 if x.dtype == torch.uint64 else torch.uint64
    return (x.view(torch.int64) ^ torch.iinfo(torch.int64).min).view(dtype)


# Note [The tree of a sum]
# Each level adds neighbors, 0 + 1, 2 + 3, ..., and a last one without a neighbor waits for the next
# level. So the tree depends on the number of summands alone, and `_combine_in_tree` and `combined`
# have the same bits as any transport that adds so.
#
#     0   1   2   3   4
#      \ /     \ /    |
#      0+1     2+3    4
#         \   /       |
#       (0+1)+(2+3)   4
#                \   /
#           ((0+1)+(2+3))+4


def _combine_in_tree(xs: list[Tensor], combine: Combine) -> Tensor:
    """Combine tensors of one dtype: see Note [The tree of a sum]. `xs` is not changed."""
    if len(xs) >= _MANY_TENSORS and xs[0].numel() <= _SMALL_TENSOR:
        return _combine_rows_in_tree(torch.stack(xs), combine)

    while len(xs) > 1:
        pairs = [combine(xs[i], xs[i + 1]) for i in range(0, len(xs) - 1, 2)]
        xs = pairs + xs[2 * len(pairs) :]
    return xs[0]


def _combine_rows_in_tree(rows: Tensor, combine: Combine) -> Tensor:
    """Combine the rows of a tensor, each level of the tree in one call."""
    while len(rows) > 1:
        even = len(rows) // 2 * 2
        pairs = combine(rows[0:even:2], rows[1:even:2])
        rows = pairs if even == len(rows) else torch.cat([pairs, rows[even:]])
    return rows[
        0
    ].clone()  # no reason known: `rows` has one row, so a view would keep no other alive


def combined(xs: list[Tensor], combine: Combine, buffer: Tensor | None, out: Tensor) -> Tensor:
    """Combine two or more tensors into `out`: see Note [The tree of a sum].

    Partial results are in the memory of `xs`, except that of `buffer`, which is not changed.
    """
    wide = WIDER.get(out.dtype)
    # torch adds two 16-bit floats in float32 and rounds once, as the tree does. It cannot add 8-bit
    # floats, nor the integers of the table.
    rounds_once = (
        wide is not None and len(xs) == 2 and wide.is_floating_point and out.element_size() > 1
    )
    if wide is not None and not rounds_once:
        return out.copy_(tree_of(xs, combine))

    while len(xs) > 2:
        pairs: list[Tensor] = []
        for index in range(0, len(xs) - 1, 2):
            left = xs[index]
            right = xs[index + 1]
            pairs.append(combine(left, right, out=right if left is buffer else left))
        xs = pairs + xs[2 * len(pairs) :]
    return combine(xs[0], xs[1], out=out)
