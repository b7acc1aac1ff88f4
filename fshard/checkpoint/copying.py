"""Copy the elements that two ranges of flattened blocks of one array have in common.

A range of a flattened block is a few boxes: part of a row, full rows, part of another. Both sides are strided in memory, so
each common box is one strided copy.
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
    def boxes(self) -> list[Block]:
        """The boxes of global indices that it consists of."""
        return [
            tuple(
                [
                    (start + origin, stop + origin)
                    for (start, stop), (origin, _) in zip(box, self.block, strict=True)
                ]
            )
            for box in _boxes(self.start, self.stop, self.lengths)
        ]

    def index(self, box: Block) -> int:
        """Return the index, in this range, of the first element of a box."""
        corner = [start - origin for (start, _), (origin, _) in zip(box, self.block, strict=True)]
        return (
            sum(i * stride for i, stride in zip(corner, strides(self.lengths), strict=True))
            - self.start
        )

    def clip(self, start: int, stop: int) -> Span:
        return Span(self.block, max(start, self.start), min(stop, self.stop))


def full_span(shape: Sequence[int]) -> Span:
    """Return the span of a full array."""
    return Span(tuple([(0, length) for length in shape]) or ((0, 1),), 0, prod(shape))


def _boxes(start: int, stop: int, lengths: Sequence[int]) -> Iterator[Block]:
    """Yield the boxes of a range of a flattened block.

    >>> [*_boxes(4, 8, (4, 6))]
    [((0, 1), (4, 6)), ((1, 2), (0, 2))]
    """
    if start >= stop:
        return
    if len(lengths) == 1:
        yield ((start, stop),)
        return
    each = prod(lengths[1:])
    top, bottom = -(-start // each), stop // each
    if top > bottom:  # within one row
        for box in _boxes(start - bottom * each, stop - bottom * each, lengths[1:]):
            yield ((bottom, bottom + 1), *box)
        return
    for box in _boxes(start - (top - 1) * each, each, lengths[1:]) if start % each else ():
        yield ((top - 1, top), *box)
    if top < bottom:
        yield ((top, bottom), *((0, length) for length in lengths[1:]))
    for box in _boxes(0, stop - bottom * each, lengths[1:]):
        yield ((bottom, bottom + 1), *box)


def _common_boxes(a: Span, b: Span) -> Iterator[Block]:
    for pair in product(a.boxes, b.boxes):
        box = tuple([(max(i, j), min(m, n)) for (i, m), (j, n) in zip(*pair, strict=True)])
        if all(start < stop for start, stop in box):
            yield box


def overlap(a: Span, b: Span) -> tuple[int, int]:
    """Return the range, in the flattened block of `a`, that has all elements that both have; (0, 0) if there are none."""
    if a.block == b.block:
        start, stop = max(a.start, b.start), min(a.stop, b.stop)
        return (start, stop) if start < stop else (0, 0)
    common = [*_common_boxes(a, b)]
    if not common:
        return 0, 0
    ends = [tuple([(stop - 1, stop) for _, stop in box]) for box in common]
    return min(map(a.index, common)) + a.start, max(map(a.index, ends)) + a.start + 1


def copy(source: Span, values: Tensor, target: Span, memory: Tensor) -> None:
    """Copy what two ranges have in common; `values` and `memory` are the elements of each in order."""
    if source.block == target.block:
        start, stop = max(source.start, target.start), min(source.stop, target.stop)
        if start < stop:
            memory[start - target.start : stop - target.start].copy_(
                values[start - source.start : stop - source.start]
            )
        return
    for box in _common_boxes(source, target):
        shape = [stop - start for start, stop in box]
        views = [
            torch.as_strided(x, shape, strides(span.lengths), x.storage_offset() + span.index(box))
            for span, x in ((target, memory), (source, values))
        ]
        views[0].copy_(views[1])
