"""Number the elements of all source weights, and keep the numbers beside the memory of tensors.

All elements of all sources are in one row. A cast gives a source another range of the row, so one
number names the weight, its element, and the dtypes that the element was cast to:

    range     source    dtypes
    0:6       q (2, 3)  float32
    6:12      k (2, 3)  float32
    12:18     q (2, 3)  float32, bfloat16        made by the first cast of q

A shadow has the number of each element of one storage. Views share a storage, so they need no
shadow of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

UNWRITTEN = -1
"""The number of an element that is neither of a source nor a constant: it is as before the load."""
CONSTANT = -2
"""The number of an element that the loader set without a source, such as a zero of padding."""

CHUNK = 1 << 16
"""Elements that are computed at a time: temporaries of 512 KiB, which stay in a cache."""


class Weight(NamedTuple):
    """The name, shape and dtype of a source weight.

    Args:
        names: its name, then the others of tied weights.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return self.names[0]


class Range(NamedTuple):
    """A range of the row of numbers: a source and the dtypes that it was cast to."""

    first: int
    source: int
    dtypes: tuple[torch.dtype, ...]


class ElementNumbers:
    """The row of numbers, which grows with each new cast."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        self.weights = weights
        self.ranges: list[Range] = []
        self._index: dict[tuple[int, tuple[torch.dtype, ...]], int] = {}
        self._firsts = torch.empty(0, dtype=torch.int64)
        self._end = 0
        for source, weight in enumerate(weights):
            self._range_of(source, (weight.dtype,))

    def _range_of(self, source: int, dtypes: tuple[torch.dtype, ...]) -> Range:
        key = (source, dtypes)
        if key not in self._index:
            self._index[key] = len(self.ranges)
            self.ranges.append(Range(self._end, source, dtypes))
            self._firsts = torch.tensor([range_.first for range_ in self.ranges])
            self._end += max(1, prod(self.weights[source].shape))  # an empty one has a first too
        return self.ranges[self._index[key]]

    def range_indices(self, numbers: Tensor) -> Tensor:
        """Return the index of the range of each number; of a negative one it is -1."""
        return torch.searchsorted(self._firsts, numbers.contiguous(), right=True) - 1

    def sources_in(self, numbers: Tensor) -> list[str]:
        """Return the names of the sources that some numbers are of."""
        indices = self.range_indices(numbers).unique().tolist()
        sources = sorted({self.ranges[index].source for index in indices if index >= 0})
        return [self.weights[source].name for source in sources]

    def cast(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the numbers of elements after a cast."""
        if numbers.numel() == 0:
            return numbers
        ends = self.range_indices(torch.stack(numbers.aminmax()))
        if ends[0] == ends[1] >= 0:
            indices = ends[0]  # of all elements: most casts are of one source
        else:
            indices = self.range_indices(numbers)
        result = numbers
        for index in indices.unique().tolist():
            if index < 0:
                continue
            before = self.ranges[index]
            after = self._range_of(before.source, _after_cast(before.dtypes, dtype))
            if after.first != before.first:
                shift = after.first - before.first
                result = torch.where(indices == index, numbers + shift, result)
        return result


def _after_cast(dtypes: tuple[torch.dtype, ...], dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Append a cast to others, and remove those that change no value.

    float16 -> float32 -> float16 is no cast, and float16 -> float32 -> bfloat16 is one.
    """
    result = [*dtypes]
    if dtype != result[-1]:
        result.append(dtype)
    while len(result) > 2 and _holds(result[-2], result[-3]):
        del result[-2]
        if result[-1] == result[-2]:
            del result[-1]
    return tuple(result)


def _holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Return True if a dtype has all values of another one."""
    if dtype.is_floating_point and other.is_floating_point:
        a = torch.finfo(dtype)
        b = torch.finfo(other)
        return a.max >= b.max and a.eps <= b.eps and a.tiny * a.eps <= b.tiny * b.eps
    if dtype.is_floating_point or dtype.is_complex or other.is_floating_point or other.is_complex:
        return False
    if torch.bool in (dtype, other):
        return other == torch.bool
    a = torch.iinfo(dtype)
    b = torch.iinfo(other)
    return a.max >= b.max and a.min <= b.min


# Note [Runs of equal steps]
# Numbers in order are cut into runs, in which each differs from the one before by the same step. A
# run takes what it can, from the left:
#
#     numbers            0 1 2 3 | 8 9 | 4 6 | 5
#     continues            - - +   -  -  -  -  -      the step is that before: 2 -> 3 as 1 -> 2
#     begins a run       +       | +   | +   | +
#
# The second element of a run has any step. So an element begins a run unless it continues one, or
# the element before begins one: between elements whose answer is known, the two alternate.


def run_begins(continues: np.ndarray, breaks: np.ndarray) -> np.ndarray:
    """Return which elements begin a run: see Note [Runs of equal steps].

    Args:
        continues: which elements have the step of the element before; never one that breaks.
        breaks: which elements cannot follow the one before; the first one cannot.
    """
    index = np.arange(len(breaks))
    is_known = breaks | continues
    last_known = np.maximum.accumulate(np.where(is_known, index, 0))
    distance_is_odd = (index - last_known) % 2 == 1
    return breaks[last_known] ^ distance_is_odd


class _Encoded(NamedTuple):
    """Numbers as runs of equal steps."""

    first: Tensor
    step: Tensor
    length: Tensor

    @classmethod
    def of(cls, numbers: Tensor) -> _Encoded:
        parts = [cls._of_chunk(chunk.numpy()) for chunk in numbers.split(CHUNK)]
        first, step, length = zip(*parts, strict=True)
        return cls(torch.cat(first), torch.cat(step), torch.cat(length))

    @classmethod
    def _of_chunk(cls, values: np.ndarray) -> _Encoded:
        steps = np.diff(values, prepend=0)
        continues = np.zeros(len(values), bool)
        continues[2:] = steps[2:] == steps[1:-1]
        breaks = np.zeros(len(values), bool)
        breaks[:1] = True
        begins = np.flatnonzero(run_begins(continues, breaks))
        length = np.diff(begins, append=len(values))
        second = np.minimum(begins + 1, len(values) - 1)
        arrays = (values[begins], steps[second], length)
        return cls(*map(torch.from_numpy, arrays))

    def decoded(self) -> Tensor:
        begins = self.length.cumsum(0) - self.length
        position = torch.arange(int(self.length.sum()))
        position -= begins.repeat_interleave(self.length)
        position *= self.step.repeat_interleave(self.length)
        return position.add_(self.first.repeat_interleave(self.length))


@dataclass
class Shadow:
    """The numbers of the elements of one storage.

    Args:
        length: elements of the storage.
        itemsize: bytes of an element.
        first: the number of the first element.
        step: of the numbers: 1 for the elements of a source, else 0.
        is_target: whether the storage is of a target, which a load does not write.
    """

    length: int
    itemsize: int
    first: int = UNWRITTEN
    step: int = 0
    is_target: bool = False
    dense: Tensor | None = None
    encoded: _Encoded | None = None

    @property
    def is_written(self) -> bool:
        """True if the numbers may be others than those from `first` on."""
        return self.dense is not None or self.encoded is not None

    @property
    def numbers(self) -> Tensor:
        """All numbers, to read and to write."""
        if self.dense is not None:
            return self.dense
        if self.encoded is not None:
            self.dense = self.encoded.decoded()
            self.encoded = None
        elif self.step:
            self.dense = torch.arange(self.first, self.first + self.length)
        else:
            self.dense = torch.full((self.length,), self.first)
        return self.dense

    def encode(self) -> None:
        """Replace the numbers by runs, unless these need more memory."""
        if self.dense is None:
            return
        encoded = _Encoded.of(self.dense)
        if 3 * len(encoded.first) < self.length:
            self.encoded = encoded
            self.dense = None


# Note [When numbers are encoded]
# Numbers need 8 bytes an element, more than weights. When all in use are more than a limit, those
# not used of late are encoded. A loader may write one stack of experts by turns with another, and
# each write decodes, so time is counted in elements: a shadow of n elements is encoded when, since
# its last use, n elements of others were used. Then encoding at most doubles the work.


class Shadows:
    """The shadows of storages, found by a tensor: see Note [When numbers are encoded]."""

    def __init__(self, limit: int = 1 << 27) -> None:
        self.limit = limit
        self._entries: dict[int, tuple[StorageWeakRef, Shadow]] = {}
        self._last_use: dict[int, int] = {}  # of shadows with numbers, in order
        self._time = 0  # elements used until now
        self._next_trim = limit

    def find(self, x: Tensor) -> Shadow | None:
        """Return the shadow of a tensor's storage; None if its elements are unknown."""
        if x.layout != torch.strided:
            return None
        entry = self._entries.get(storage_key(x))
        return None if entry is None else entry[1]

    def add(self, x: Tensor, first: int = UNWRITTEN, step: int = 0, itemsize: int = 0) -> Shadow:
        """Make the shadow of a tensor's storage, with numbers from `first` on.

        `itemsize`: bytes of an element; by default as of the tensor.
        """
        storage = x.untyped_storage()
        itemsize = itemsize or x.itemsize
        shadow = Shadow(storage.nbytes() // itemsize, itemsize, first, step)
        # The weak reference keeps the key from being that of another storage.
        self._entries[storage_key(x)] = (StorageWeakRef(storage), shadow)
        return shadow

    def read(self, x: Tensor) -> Tensor:
        """Return the numbers of a tensor's elements, not to be written."""
        shadow = self.find(x)
        if shadow is None:
            return torch.tensor(UNWRITTEN).expand(x.shape)
        if shadow.is_written:
            return self.view(x)
        # Of a source most ranks read a slice: its numbers are computed, and no others.
        numbers = torch.tensor(shadow.first + shadow.step * x.storage_offset())
        for length, stride in zip(x.shape, x.stride(), strict=True):
            numbers = numbers[..., None] + torch.arange(length) * (stride * shadow.step)
        return numbers

    def view(self, x: Tensor) -> Tensor:
        """Return the numbers of a tensor that has a shadow; writes to them are of the shadow."""
        shadow = self.find(x)
        assert shadow is not None
        key = storage_key(x)
        self._time += x.numel()
        self._last_use.pop(key, None)
        self._last_use[key] = self._time
        return shadow.numbers.as_strided(x.shape, x.stride(), x.storage_offset())

    def trim(self) -> None:
        """Drop the shadows of freed storages, and encode those not used of late."""
        if self._time < self._next_trim:
            return
        self._next_trim = self._time + self.limit // 8

        freed = [key for key, (storage, _) in self._entries.items() if storage.expired()]
        for key in freed:
            del self._entries[key]
            self._last_use.pop(key, None)

        used = {key: self._entries[key][1] for key in self._last_use}
        total = sum([shadow.length for shadow in used.values()])
        for key, shadow in used.items():
            is_recent = self._time - self._last_use[key] < shadow.length
            if total > self.limit and not is_recent:
                shadow.encode()
                total -= shadow.length
                del self._last_use[key]


def storage_key(x: Tensor) -> int:
    """Return a number that tensors of one storage have."""
    return x.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
