"""Describe the origins of a target's elements, as boxes of the target and of its sources.

A box of a target is a box of one source: a step along a dim of the target is a step along one dim
of the source, or along none where an element is repeated. Of a weight (4, 6) whose transpose is
stored, rows 2:4 first:

    target                  source           target dim 0 is    target dim 1 is
    [0:6, 0:2]              from [2, 0]      source dim 1       source dim 0
    [0:6, 2:4]              from [0, 0]      source dim 1       source dim 0

No two dims of a box are along the same dim of the source. So the elements of a box that a block of
the source has are a box too, and regions of layouts intersect with these boxes.

Legend: k boxes, d dims of the target, e dims of the source with most dims; sources with fewer dims
have zeros behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fshard.mesh.layout.arithmetic import strides
from fshard.refit.numbers import CONSTANT, UNWRITTEN, ElementNumbers, Range, Weight, run_begins

Numbers = npt.NDArray[np.int64]
_CHUNK = 1 << 19
"""Elements whose coordinates are computed at a time: 4 MiB for each dim."""


class SourceBox(NamedTuple):
    """A box of a target, and the box of a source that is the origin of its elements.

    Args:
        target: slices of the target.
        source: the name of the source.
        begin: the coordinates in the source of the first element.
        along: for each dim of the target the dim of the source, or -1 where the source's
            coordinates do not change.
        steps: for each dim of the target the step along the dim of the source.
        dtypes: the dtype of the source, then those of casts, one after another.
    """

    target: tuple[slice, ...]
    source: str
    begin: tuple[int, ...]
    along: tuple[int, ...]
    steps: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]

    def read(self, weight: Tensor) -> Tensor:
        """Return the elements of the box, from the source and cast, in the shape of the target's."""
        lengths = [side.stop - side.start for side in self.target]
        position = weight.storage_offset()
        for index, stride in zip(self.begin, weight.stride(), strict=True):
            position += index * stride
        jumps: list[int] = []
        for dim, step in zip(self.along, self.steps, strict=True):
            jumps.append(step * weight.stride(dim) if dim >= 0 else 0)
        if any(jump < 0 for jump in jumps):
            return self._read_flipped(weight, lengths)
        x = weight.as_strided(lengths, jumps, position)
        for dtype in self.dtypes[1:]:
            x = x.to(dtype)
        return x

    def _read_flipped(self, weight: Tensor, lengths: Sequence[int]) -> Tensor:
        """Read a box with negative steps, which strides cannot have: from its other end."""
        begin = [*self.begin]
        flipped: list[int] = []
        steps = [*self.steps]
        for number, (dim, step) in enumerate(zip(self.along, self.steps, strict=True)):
            if step < 0:
                begin[dim] += step * (lengths[number] - 1)
                steps[number] = -step
                flipped.append(number)
        box = self._replace(begin=tuple(begin), steps=tuple(steps))
        return box.read(weight).flip(flipped)


class Origins(NamedTuple):
    """The origins of a target's elements, as arrays of k boxes.

    Args:
        range_index: of the source and its casts, in the ranges of a numbering.  (k,)
        target: (start, stop) along each dim.  (k, d, 2)
        begin: the coordinates in the source of the first element.  (k, e)
        along: the dim of the source that each dim of the target is along, or -1.  (k, d)
        steps: the step along it.  (k, d)
        constants: other boxes of the target, whose elements the loader set without a source.
            (j, d, 2)
    """

    range_index: Numbers
    target: Numbers
    begin: Numbers
    along: Numbers
    steps: Numbers
    constants: Numbers

    @property
    def sizes(self) -> Numbers:
        """The number of elements of each box.  (k,)"""
        return _volumes(self.target)

    @property
    def constant_count(self) -> int:
        """The number of elements that are constants."""
        return int(_volumes(self.constants).sum())

    def boxes(self, ranges: Sequence[Range], weights: Sequence[Weight]) -> Iterator[SourceBox]:
        """Yield the boxes one by one."""
        for index in range(len(self.range_index)):
            range_ = ranges[self.range_index[index]]
            weight = weights[range_.source]
            yield SourceBox(
                _slices(self.target[index]),
                weight.name,
                tuple(self.begin[index, : len(weight.shape)].tolist()),
                tuple(self.along[index].tolist()),
                tuple(self.steps[index].tolist()),
                range_.dtypes,
            )


def origins_of(numbers: Tensor, numbering: ElementNumbers) -> Origins:
    """Return the boxes of a target with these numbers; unwritten elements are in none.

    Runs along the last dim are joined along the dim before, and so on: see `_joined`.
    """
    dims = numbers.ndim
    if dims == 0:
        numbers = numbers[None]
    coordinates = _Coordinates(numbering)
    last_dim = numbers.ndim - 1
    row_length = numbers.shape[last_dim]
    rows = numbers.reshape(-1, row_length) if row_length else numbers.new_empty(0, 1)

    rows_at_once = max(1, _CHUNK // max(1, row_length))
    parts = [_no_boxes(numbers.ndim, coordinates.dims)]
    for first_row in range(0, len(rows), rows_at_once):
        runs = _runs_of(rows[first_row : first_row + rows_at_once], coordinates)
        runs = runs._replace(position=runs.position + first_row * row_length)
        parts += _boxes_of_runs(runs, numbers.shape, coordinates)
    boxes = _Boxes(*map(np.concatenate, zip(*parts, strict=True)))
    for dim in reversed(range(last_dim)):
        boxes = _joined(boxes, dim)

    # In the order of their first elements in the target.
    boxes = boxes.take(np.lexsort(boxes.start.T[::-1]))
    is_constant = boxes.range_index < 0
    target = np.stack([boxes.start, boxes.start + boxes.length], -1)[:, :dims]
    of_sources = boxes.take(np.flatnonzero(~is_constant))
    return Origins(
        of_sources.range_index,
        target[~is_constant],
        of_sources.begin,
        of_sources.along[:, :dims],
        of_sources.steps[:, :dims],
        target[is_constant],
    )


class _Boxes(NamedTuple):
    """Boxes that are being joined: see `Origins`; start and length are of the target."""

    range_index: Numbers
    start: Numbers
    length: Numbers
    begin: Numbers
    along: Numbers
    steps: Numbers

    def take(self, index: Numbers) -> _Boxes:
        return _Boxes(*[array[index] for array in self])


def _no_boxes(dims: int, source_dims: int) -> _Boxes:
    wide = np.empty((0, dims), np.int64)
    begin = np.empty((0, source_dims), np.int64)
    return _Boxes(np.empty(0, np.int64), wide, wide, begin, wide, wide)


class _Coordinates:
    """The shapes of all ranges as arrays, which convert numbers to coordinates of their sources."""

    def __init__(self, numbering: ElementNumbers) -> None:
        self.numbering = numbering
        shapes = [numbering.weights[range_.source].shape for range_ in numbering.ranges]
        self.dims = max([1, *map(len, shapes)])
        self.firsts = np.array([range_.first for range_ in numbering.ranges])
        self.sizes = np.ones((len(shapes), self.dims), np.int64)
        self.strides = np.ones((len(shapes), self.dims), np.int64)
        for index, shape in enumerate(shapes):
            self.sizes[index, : len(shape)] = shape
            self.strides[index, : len(shape)] = strides(shape)

    def range_index(self, numbers: Numbers) -> Numbers:
        """Return the index of the range of each number; of constants it is -1."""
        return np.searchsorted(self.firsts, numbers, side="right") - 1

    def of(self, numbers: Numbers, range_index: Numbers) -> Numbers:
        """Return the coordinates of numbers in their sources; of constants zeros.  (n, e)"""
        offset = np.where(range_index < 0, 0, numbers - self.firsts[range_index])
        return offset[:, None] // self.strides[range_index] % self.sizes[range_index]


class _Runs(NamedTuple):
    """Runs of equal steps in the rows of a target.

    Args:
        position: of the first element of each run, in the flattened target.  (r,)
        first: its number.  (r,)
        step: from number to number.  (r,)
        length: elements.  (r,)
    """

    position: Numbers
    first: Numbers
    step: Numbers
    length: Numbers

    def take(self, index: Numbers) -> _Runs:
        return _Runs(*[array[index] for array in self])

    def elements(self) -> _Runs:
        """Return runs of one element each."""
        begins = self.length.cumsum() - self.length
        within = np.arange(self.length.sum()) - np.repeat(begins, self.length)
        position = np.repeat(self.position, self.length) + within
        first = np.repeat(self.first, self.length) + within * np.repeat(self.step, self.length)
        return _Runs(position, first, np.zeros_like(first), np.ones_like(first))


def _runs_of(rows: Tensor, coordinates: _Coordinates) -> _Runs:
    """Return the runs of rows of numbers; most rows are one."""
    row_length = rows.shape[1]
    steps = rows.diff(dim=1)
    is_run = (steps == steps[:, :1]).all(1).numpy()
    numbers = rows.numpy()
    row_steps = steps[:, 0].numpy() if row_length > 1 else np.zeros(len(numbers), np.int64)

    index = np.flatnonzero(is_run)
    length = np.full(len(index), row_length)
    full_rows = _Runs(index * row_length, numbers[index, 0], row_steps[index], length)
    index = np.flatnonzero(~is_run)
    if len(index) == 0:
        return full_rows

    # The other rows in one, in which each row and each other source begins a run.
    values = numbers[index].reshape(-1)
    step = np.diff(values, prepend=0)
    source = np.where(values < 0, values, coordinates.range_index(values))
    breaks = np.diff(source, prepend=0) != 0
    breaks[::row_length] = True
    continues = np.zeros(len(values), bool)
    continues[2:] = (step[2:] == step[1:-1]) & ~breaks[2:] & ~breaks[1:-1]
    begins = np.flatnonzero(run_begins(continues, breaks))
    length = np.diff(begins, append=len(values))
    second = np.minimum(begins + 1, len(values) - 1)
    position = index[begins // row_length] * row_length + begins % row_length
    run_step = np.where(length > 1, step[second], 0)
    others = _Runs(position, values[begins], run_step, length)
    return _Runs(*map(np.concatenate, zip(full_rows, others, strict=True)))


def _boxes_of_runs(
    runs: _Runs, shape: Sequence[int], coordinates: _Coordinates
) -> Iterator[_Boxes]:
    """Yield boxes of one row each. Unwritten elements are in none.

    A run that turns from one row of a source to the next, or from one source to another, is cut
    into elements, and these are joined again where they can be.
    """
    last = runs.first + runs.step * (runs.length - 1)
    range_index = coordinates.range_index(runs.first)
    begin = coordinates.of(runs.first, range_index)
    second = coordinates.of(runs.first + runs.step, range_index)
    end = coordinates.of(last, range_index)
    difference = np.where(runs.length[:, None] > 1, second - begin, 0)
    moved_dims = (difference != 0).sum(1)
    is_straight = (end - begin == difference * (runs.length[:, None] - 1)).all(1)
    is_straight &= (moved_dims <= 1) & (coordinates.range_index(last) == range_index)
    is_straight |= runs.length == 1
    is_written = runs.first != UNWRITTEN

    index = np.flatnonzero(is_straight & is_written)
    straight = runs.take(index)
    start = straight.position[:, None] // np.array(strides(shape)) % np.array(shape)
    boxes = _Boxes(
        range_index[index],
        start,
        np.ones_like(start),
        begin[index],
        np.full_like(start, -1),
        np.zeros_like(start),
    )
    source_dim = (difference[index] != 0).argmax(1)
    is_moved = moved_dims[index] > 0
    boxes.length[:, -1] = straight.length
    boxes.along[:, -1] = np.where(is_moved, source_dim, -1)
    boxes.steps[:, -1] = difference[index].sum(1)
    yield boxes

    elements = runs.take(np.flatnonzero(~is_straight)).elements()
    if len(elements.first):
        for single in _boxes_of_runs(elements, shape, coordinates):
            yield _joined(single, len(shape) - 1)


def _joined(boxes: _Boxes, dim: int) -> _Boxes:
    """Join boxes that follow each other along a dim, as runs of equal steps in their source.

    All of them have the length 1 along it.
    """
    if len(boxes.range_index) == 0:
        return boxes
    others = [number for number in range(boxes.start.shape[1]) if number != dim]
    keys = [boxes.start[:, dim], *[boxes.start[:, number] for number in reversed(others)]]
    boxes = boxes.take(np.lexsort(keys))

    # Which boxes are beside the one before, and like it?
    follows = np.zeros(len(boxes.range_index), bool)
    follows[1:] = boxes.start[1:, dim] == boxes.start[:-1, dim] + 1
    follows[1:] &= boxes.range_index[1:] == boxes.range_index[:-1]
    follows[1:] &= (boxes.start[1:, others] == boxes.start[:-1, others]).all(1)
    for array in (boxes.length, boxes.along, boxes.steps):
        follows[1:] &= (array[1:] == array[:-1]).all(1)

    # Its step must be along one dim of the source, along which no other dim of the box is.
    difference = np.zeros_like(boxes.begin)
    difference[1:] = boxes.begin[1:] - boxes.begin[:-1]
    moved_dims = (difference != 0).sum(1)
    source_dim = np.where(moved_dims > 0, (difference != 0).argmax(1), -1)
    step = np.take_along_axis(difference, np.maximum(source_dim, 0)[:, None], 1)[:, 0]
    is_taken = ((boxes.along == source_dim[:, None]) & (boxes.length > 1)).any(1)
    follows &= (moved_dims <= 1) & ~(is_taken & (source_dim >= 0))

    continues = np.zeros_like(follows)
    continues[2:] = follows[2:] & follows[1:-1]
    continues[2:] &= (source_dim[2:] == source_dim[1:-1]) & (step[2:] == step[1:-1])
    begins = np.flatnonzero(run_begins(continues, ~follows))
    count = np.diff(begins, append=len(follows))

    joined = boxes.take(begins)
    second = np.minimum(begins + 1, len(follows) - 1)
    is_long = count > 1
    joined.length[:, dim] = count
    joined.along[:, dim] = np.where(is_long, source_dim[second], -1)
    joined.steps[:, dim] = np.where(is_long, step[second], 0)
    return joined


def numbers_of(origins: Origins, shape: Sequence[int], numbering: ElementNumbers) -> Tensor:
    """Return the numbers of a target with these boxes."""
    numbers = torch.full([*shape], UNWRITTEN)
    for target in origins.constants:
        numbers[_slices(target)] = CONSTANT

    coordinates = _Coordinates(numbering)
    for index, range_index in enumerate(origins.range_index.tolist()):
        jumps = coordinates.strides[range_index]
        first = coordinates.firsts[range_index] + origins.begin[index] @ jumps
        box = torch.tensor(int(first))
        for dim, (start, stop) in enumerate(origins.target[index].tolist()):
            source_dim = origins.along[index, dim]
            jump = origins.steps[index, dim] * jumps[source_dim] if source_dim >= 0 else 0
            side = torch.arange(stop - start) * int(jump)
            box = box[..., None] + side
        numbers[_slices(origins.target[index])] = box
    return numbers


def _slices(target: Numbers) -> tuple[slice, ...]:
    return tuple([slice(start, stop) for start, stop in target.tolist()])


def _volumes(target: Numbers) -> Numbers:
    return (target[..., 1] - target[..., 0]).prod(1)
