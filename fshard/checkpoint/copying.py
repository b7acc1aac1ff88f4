"""Copy elements between flattened blocks of one array, as far as both have them.

A range of a flattened block is a few boxes: part of a row, full rows, part of another. Both sides are strided in memory, so
each common box is one strided copy.
"""

from __future__ import annotations

from collections import Counter
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
_MOST_DIVIDED = 8
"""Dims along which the blocks of an array may be parts: each doubles the work of `are_tiles`."""


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
        inner = _boxes(self.start, self.stop, self.lengths)
        origin = [start for start, _ in self.block]
        return [tuple([(a + at, b + at) for (a, b), at in zip(box, origin, strict=True)]) for box in inner]

    def at(self, box: Block) -> int:
        """Return the index, in this range, of the first element of a box."""
        steps = strides(self.lengths)
        places = [a - start for (a, _), (start, _) in zip(box, self.block, strict=True)]
        return sum(place * step for place, step in zip(places, steps, strict=True)) - self.start

    def part(self, start: int, stop: int) -> Span:
        return Span(self.block, max(start, self.start), min(stop, self.stop))


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


def overlap(a: Span, b: Span) -> tuple[int, int]:
    """Return the range, in the flattened block of `a`, that has all elements that both have; (0, 0) if there are none."""
    if a.block == b.block:
        start, stop = max(a.start, b.start), min(a.stop, b.stop)
        return (start, stop) if start < stop else (0, 0)
    common = [box for one in a.boxes for other in b.boxes if (box := _meet(one, other))]
    if not common:
        return 0, 0
    last = [tuple([(stop - 1, stop) for _, stop in box]) for box in common]
    return min(map(a.at, common)) + a.start, max(map(a.at, last)) + a.start + 1


def copy(source: Span, values: Tensor, target: Span, into: Tensor) -> None:
    """Copy what two ranges have in common; `values` and `into` are the elements of each in order."""
    if source.block == target.block:
        start, stop = max(source.start, target.start), min(source.stop, target.stop)
        if start < stop:
            into[start - target.start : stop - target.start].copy_(values[start - source.start : stop - source.start])
        return
    for one in source.boxes:
        for other in target.boxes:
            if box := _meet(one, other):
                shape = [stop - start for start, stop in box]
                to = torch.as_strided(into, shape, strides(target.lengths), into.storage_offset() + target.at(box))
                from_ = torch.as_strided(
                    values, shape, strides(source.lengths), values.storage_offset() + source.at(box)
                )
                to.copy_(from_)


def are_tiles(blocks: Sequence[Block], lengths: Sequence[int]) -> bool:
    """Return True if blocks are disjoint and cover an array of these lengths.

    The corners of blocks, with alternating signs, determine how many of them cover each element.

    >>> are_tiles([((0, 2), (0, 1)), ((0, 2), (1, 3))], (2, 3)), are_tiles([((0, 2),), ((0, 2),)], (4,))
    (True, False)
    """
    full = tuple([(0, length) for length in lengths])
    blocks = [block for block in blocks if all(start < stop for start, stop in block)]
    dims = [dim for dim, ends in enumerate(full) if any(block[dim] != ends for block in blocks)]
    if not blocks:
        return not prod(lengths)
    if len(dims) > _MOST_DIVIDED:
        return False
    corners = Counter[tuple[int, ...]]()
    for sign, block in [(-1, full), *((1, block) for block in blocks)]:
        for sides in product((0, 1), repeat=len(dims)):
            corners[tuple([block[dim][side] for dim, side in zip(dims, sides, strict=True)])] += sign * (-1) ** sum(
                sides
            )
    return not any(corners.values())


def _meet(one: Block, other: Block) -> Block | None:
    box = tuple([(max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True)])
    return box if all(start < stop for start, stop in box) else None
