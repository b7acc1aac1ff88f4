"""Sums of float64 numbers whose bits depend neither on their order nor on their sharding.

A non-negative number is written in digits of 20 bits, on one grid for all numbers: column c counts
2^(20 c - 1074). Each column is summed separately. The sums are integers below 2^53 for up to 2^33
summands, hence exact in any order. In the end only the five columns from the largest digit down
count.

    column        ...  54  53  52  51  50  49  48  ...
    one device             a   a   a   a   a           five, from the largest digit of its own down
    another                        b   b   b   b   b
    sum                    a   a  a+b a+b a+b  .       omitted digits are below those that count
"""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = 20  # of a digit: sums of 2^33 digits are below the 2^53 that float64 counts exactly
_DIGITS = 5  # with one bit in the first digit, 81 bits in all: more than float64's 53
_LOWEST = -1074  # the exponent of the smallest number of float64
_COLUMNS = (1024 - _LOWEST) // _BITS + 1  # all exponents, up to that of the largest number
_BLOCK = 2**16  # elements at a time, which stay in a cache

WIDTH = _COLUMNS + 1
"""Columns, and one for a sum that is not finite."""


def columns_of(x: Tensor, *, squared: bool = False) -> Tensor:
    """Return the sum of non-negative float64 numbers, as columns that may be added up.

    With `squared`, the sum of the squares of any real tensor; no more than a block of it is ever
    made float64.
    """
    columns = x.new_zeros(WIDTH, dtype=torch.float64)
    if not x.numel():
        return columns
    for block in x.reshape(-1).split(_BLOCK):
        columns += _columns_of_block(block.double().square() if squared else block)
    return columns


def number_of(columns: Tensor) -> Tensor:
    """Return the numbers of columns (the last dim).

    >>> x = columns_of(torch.tensor([2.0**60, 1.0, 0.25]).double())
    >>> y = columns_of(torch.tensor([0.5]).double())
    >>> number_of(x + y)
    tensor(1.1529e+18, dtype=torch.float64)
    """
    digits = columns[..., :-1]
    nonfinite = columns[..., -1]
    column = _range(_COLUMNS, columns)
    largest = torch.where(digits > 0, column, -1).amax(-1, keepdim=True)
    counted = torch.where(column > largest - _DIGITS, digits * _unit(column, columns), 0.0)
    return counted.sum(-1) + nonfinite


def _columns_of_block(x: Tensor) -> Tensor:
    """Return the columns of the sum of a block of float64 numbers."""
    most = x.amax()
    is_finite = most.isfinite()
    # The column of the largest digit: most = fraction 2^exponent, with 1/2 <= fraction < 1.
    exponent = torch.frexp(torch.where(is_finite, most, 0.0)).exponent
    top = (exponent - 1 - _LOWEST) // _BITS

    sums: list[Tensor] = []
    remainder = x / _unit(top, x)
    for _ in range(_DIGITS):
        digit = remainder.floor()
        sums.append(digit.sum())
        remainder.sub_(digit).mul_(2.0**_BITS)
    indices = (top - _range(_DIGITS, x)).clamp(min=0)  # below the lowest there are zeros only
    columns = x.new_zeros(WIDTH).index_add_(0, indices, torch.stack(sums))
    columns = torch.where(is_finite, columns, 0.0)
    columns[-1] = torch.where(is_finite, 0.0, most)
    return columns


def _range(n: int, like: Tensor) -> Tensor:
    """Return the integers from 0 to n - 1, in the memory of a tensor."""
    return like.new_ones(n, dtype=torch.int64).cumsum(0) - 1


def _unit(column: Tensor, like: Tensor) -> Tensor:
    """Return the value of a unit in a column."""
    return torch.ldexp(torch.ones_like(column, dtype=like.dtype), column * _BITS + _LOWEST)
