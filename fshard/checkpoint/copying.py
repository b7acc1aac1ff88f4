"""Copy the elements that two ranges of flattened blocks of one array have in common.

A range of a flattened block is a few boxes: part of a row, full rows, part of another. Here are the
elements 4 to 20 of a block of 4 rows and 6 columns:

    . . . . # #      box ((0, 1), (4, 6))
    # # # # # #      box ((1, 3), (0, 6))
    # # # # # #
    # # . . . .      box ((3, 4), (0, 2))

Both sides are strided in memory, so each common box is one strided copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

import torch
from torch import Tensor

from fshard.mesh.layout.arithmetic import strides

Block = tuple[tuple[int, int], ...]
"""A range of each dim."""


@dataclass(frozen=True)
class Span:
    """A range of the elements of a flattened block."""

    block: Block
    start: int
    stop: int

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        return tuple([stop - start for start, stop in self.block])

    @cached_property
    def strides(self) -> tuple[int, ...]:
        return strides(self.lengths)

    @cached_property
    def boxes(self) -> list[Block]:
        """The boxes of global indices that it consists of."""
        return [_moved(box, self._origin) for box in _boxes(self.start, self.stop, self.lengths)]

    @property
    def _origin(self) -> list[int]:
        return [start for start, _ in self.block]

    def index(self, box: Block) -> int:
        """Return the index, in this range, of the first element of a box."""
        index = -self.start
        for (start, _), (origin, _), stride in zip(box, self.block, self.strides, strict=True):
            index += (start - origin) * stride
        return index

    def clip(self, start: int, stop: int) -> Span:
        return Span(self.block, max(start, self.start), min(stop, self.stop))

    def moved(self, offset: Sequence[int]) -> Span:
        """Return the span with a block that begins further on by an offset."""
        if not any(offset):
            return self
        return Span(_moved(self.block, offset), self.start, self.stop)


def _moved(block: Block, offset: Sequence[int]) -> Block:
    pairs = zip(block, offset, strict=True)
    return tuple([(start + origin, stop + origin) for (start, stop), origin in pairs])


def full_span(shape: Sequence[int]) -> Span:
    """Return the span of a full array; a number has one dim of length 1."""
    block = tuple([(0, length) for length in shape]) or ((0, 1),)
    return Span(block, 0, prod(shape))


def _boxes(start: int, stop: int, lengths: Sequence[int]) -> Iterator[Block]:
    """Yield the boxes of a range of a flattened block, in the order of their elements.

    >>> [*_boxes(4, 20, (4, 6))]
    [((0, 1), (4, 6)), ((1, 3), (0, 6)), ((3, 4), (0, 2))]
    """
    if start >= stop:
        return
    if len(lengths) == 1:
        yield ((start, stop),)
        return

    row_length = prod(lengths[1:])
    first_row = -(-start // row_length)  # the first that begins in the range
    last_row = stop // row_length  # the first that does not end in it
    if first_row > last_row:  # the range begins and ends within one row
        row_start = last_row * row_length
        for box in _boxes(start - row_start, stop - row_start, lengths[1:]):
            yield ((last_row, last_row + 1), *box)
        return

    if start % row_length:
        for box in _boxes(start % row_length, row_length, lengths[1:]):
            yield ((first_row - 1, first_row), *box)
    if first_row < last_row:
        full_rows = [(0, length) for length in lengths[1:]]
        yield ((first_row, last_row), *full_rows)
    for box in _boxes(0, stop % row_length, lengths[1:]):
        yield ((last_row, last_row + 1), *box)


def _common_boxes(a: Span, b: Span) -> Iterator[Block]:
    for a_box, b_box in product(a.boxes, b.boxes):
        pairs = zip(a_box, b_box, strict=True)
        box = tuple([(max(i, j), min(m, n)) for (i, m), (j, n) in pairs])
        if all([start < stop for start, stop in box]):
            yield box


def overlap(a: Span, b: Span) -> tuple[int, int]:
    """Return the range, in the flattened block of `a`, that has all elements that both have.

    It is (0, 0) if there are none.
    """
    if a.block == b.block:
        common = a.clip(b.start, b.stop)
        return (common.start, common.stop) if common.start < common.stop else (0, 0)

    boxes = [*_common_boxes(a, b)]
    if not boxes:
        return 0, 0
    first_elements = [a.index(box) for box in boxes]
    last_elements: list[int] = []
    for box in boxes:
        last_elements.append(a.index(tuple([(stop - 1, stop) for _, stop in box])))
    return a.start + min(first_elements), a.start + max(last_elements) + 1


def copy(source: Span, values: Tensor, target: Span, memory: Tensor) -> None:
    """Copy the elements that two ranges have in common.

    `values` and `memory` are the elements of the source and the target, in their order.
    """
    if source.block == target.block:
        common = source.clip(target.start, target.stop)
        if common.start < common.stop:
            common_values = values[common.start - source.start : common.stop - source.start]
            memory[common.start - target.start : common.stop - target.start].copy_(common_values)
        return

    for box in _common_boxes(source, target):
        shape = [stop - start for start, stop in box]
        _view(memory, target, box, shape).copy_(_view(values, source, box, shape))


def _view(elements: Tensor, span: Span, box: Block, shape: Sequence[int]) -> Tensor:
    """Return the elements of a box as a view of those of a span."""
    offset = elements.storage_offset() + span.index(box)
    return torch.as_strided(elements, shape, span.strides, offset)
