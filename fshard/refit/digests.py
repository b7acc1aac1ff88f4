"""Digests of elements that do not depend on how they are stored.

A digest is the sum of the bits of each element, as an integer, times a weight that its number in
the full tensor has, modulo 2^64. So two devices that store the same elements in other layouts and
orders have equal digests. Weights are odd, so that any change of one element changes the digest;
and without a pattern, so that swapped elements do, but for one case in 2^30 or fewer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fshard.mesh.layout.arithmetic import strides
from fshard.mesh.reshard.exchange import Box
from fshard.mesh.reshard.regions import Numbers

_CHUNK = 1 << 15
"""Elements that are hashed at a time: a row of 8 bytes each stays in a processor's cache."""
_FACTOR = -7046029254386353131
"""An odd number without a pattern in its bits: 2^64 over the golden ratio, as a signed integer."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def digest(
    shape: Sequence[int],
    parts: Sequence[tuple[Numbers, Tensor, Box]],
    dtype: torch.dtype,
    *,
    is_cast: bool = False,
) -> Tensor:
    """Return the digest of some boxes of a tensor, as one int64.

    Args:
        shape: of the full tensor.
        parts: boxes of global indices, each with the shard that stores it and its box in there.
        dtype: to which values are cast first.
        is_cast: some device casts the values: any NaN is as good as another then, since casts of
            one and of many give it other bits.
    """
    steps = strides(shape)
    total = torch.zeros((), dtype=torch.int64)
    for region, shard, box in parts:
        values = shard.as_strided(box.lengths, box.strides, shard.storage_offset() + box.offset)
        total = total.to(values.device)
        begins = region[:, 0].tolist()
        first = sum([begin * step for begin, step in zip(begins, steps, strict=True)])
        for numbers, chunk in _chunks(values, steps, first):
            weights = numbers.mul_(_FACTOR)
            weights ^= weights >> 32
            chunk = chunk.to(dtype)
            hashes = bits_of(chunk)
            if is_cast:
                hashes.masked_fill_(chunk.isnan(), _FACTOR)
            total += hashes.sum()  # times 2 w + 1 in all, which is odd
            total += 2 * hashes.mul_(weights).sum()
    return total


def _chunks(values: Tensor, steps: Sequence[int], first: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the values of a box in chunks, each with the numbers of its elements."""
    if values.numel() > _CHUNK:
        row_size = values.numel() // len(values)
        rows = max(1, _CHUNK // row_size)
        for start in range(0, len(values), rows):
            part = values[start : start + rows]
            begin = first + start * steps[0]
            if rows == 1:  # a row may be longer than a chunk
                yield from _chunks(part[0], steps[1:], begin)
            else:
                yield from _chunks(part, steps, begin)
        return

    numbers = torch.tensor(first, device=values.device)
    for length, step in zip(values.shape, steps, strict=True):
        numbers = numbers[..., None] + torch.arange(length, device=values.device) * step
    yield numbers.reshape(-1), values.reshape(-1)


def bits_of(x: Tensor) -> Tensor:
    """Return the bits of each element of a flat tensor as an int64, in memory of its own."""
    size = x.dtype.itemsize
    if size < 8:
        return x.contiguous().view(_INTEGERS[size]).to(torch.int64)
    if size == 8:
        # The difference of two weights is even. Times the highest bit, a sign, it would be 0.
        values = x.contiguous().view(torch.int64)
        return values ^ (values >> 32)
    pairs = torch.view_as_real(x).contiguous().view(torch.int64)  # complex128
    return pairs[:, 0] * _FACTOR + pairs[:, 1]
