"""Encode which elements of a row have changed, in about a byte for each that has.

A step of reinforcement learning changes a few of a hundred elements in 16 bits. A code is the
number of elements since the last changed one that have not changed; 255 of them are a code of their
own.

    changed elements    3, 4, 300 of a row
    codes               3    0    255    40        300 = 4 + 1 + 255 + 40
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_SKIP = 255
"""The code of 255 elements that have not changed, with none behind them that has."""
_HEADER = 8
"""Bytes of the number of codes, in front of them."""
_ALL = -1
"""In place of that number: all elements follow, since they are shorter than the changed ones."""


def bits(x: Tensor) -> Tensor:
    """Return the bits of a flat tensor's elements.  (n,) -> (n, integers of an element)"""
    return x.contiguous().view(torch.uint8).view(len(x), x.dtype.itemsize)


class Change(NamedTuple):
    """The positions of changed elements in a row, and their values."""

    positions: Tensor
    values: Tensor


def pack(change: Change, row: Tensor) -> Tensor:
    """Return a change of a row as bytes: the number of codes, the codes, the values.

    >>> row = torch.zeros(400)
    >>> packed = pack(Change(torch.tensor([3, 4, 300]), torch.tensor([1.0, 2.0, 3.0])), row)
    >>> packed[8:12].tolist(), len(packed)
    ([3, 0, 255, 40], 24)
    >>> len(pack(Change(torch.arange(400), row), row))  # all have changed: no codes
    1608
    """
    positions = change.positions
    gaps = positions.diff(prepend=positions.new_tensor([-1])) - 1
    skips = gaps // _SKIP
    ends = (skips + 1).cumsum(0)  # of the codes of each element: skips, then its own
    count = int(ends[-1]) if len(ends) else 0
    codes = torch.full((count,), _SKIP, dtype=torch.uint8, device=positions.device)
    codes[ends - 1] = (gaps - skips * _SKIP).to(torch.uint8)
    parts = [codes, change.values.contiguous().view(torch.uint8)]
    if count + change.values.nbytes > row.nbytes:
        count = _ALL
        parts = [row.contiguous().view(torch.uint8)]
    header = torch.tensor([count], device=positions.device).view(torch.uint8)
    return torch.cat([header, *parts])


def unpack(packed: Tensor, dtype: torch.dtype) -> Change:
    """Return the change with these bytes.

    >>> row = torch.zeros(700)
    >>> unpack(pack(Change(torch.tensor([600]), torch.tensor([1.0])), row), torch.float32)
    Change(positions=tensor([600]), values=tensor([1.]))
    """
    count = int(packed[:_HEADER].clone().view(torch.int64))
    if count == _ALL:
        values = packed[_HEADER:].clone().view(dtype)
        return Change(torch.arange(len(values), device=packed.device), values)
    codes = packed[_HEADER : _HEADER + count].to(torch.int64)
    has_element = codes != _SKIP
    ends = (codes + has_element).cumsum(0)  # elements up to each code, its own one among them
    positions = ends[has_element] - 1
    values = packed[_HEADER + count :].clone().view(dtype)  # cloned: aligned for the dtype
    return Change(positions, values)
