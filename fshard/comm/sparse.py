"""Compressors that send a few of the numbers, a few bits of each, or both.

           numbers           reduction
random_k   drawn alike       psum of the numbers; their indices are not sent
top_k      the largest       all_gather of numbers and indices; each device adds them up
codes      all               all_to_all; each device adds its part up, and encodes the sum;
                             all_gather
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.comm.block_code import Bits, BlockCode
from fshard.comm.compressor import Compressor, FlatLeaf, Phases, compressor
from fshard.mesh.collectives.api import all_gather, all_to_all, axis_index, axis_size, psum
from fshard.mesh.layout import Axes
from fshard.optim.arguments import validate, within


class Encoding(NamedTuple):
    """The form in which a leaf is sent.

    Args:
        fraction: of the numbers that are sent, None for all.
        seed: of the draws of these numbers; None for the largest.
        code: of the numbers, None for themselves.
    """

    fraction: float | None = None
    seed: int | None = None
    code: BlockCode | None = None

    @property
    def is_gathered(self) -> bool:
        """True if devices select different numbers, so that they send indices too."""
        return self.fraction is not None and self.seed is None

    def count(self, x: Tensor) -> int:
        """Return how many numbers of a leaf are sent."""
        if self.fraction is None:
            return x.numel()
        return min(x.numel(), ceil(self.fraction * x.numel()))

    def indices(self, leaf: FlatLeaf) -> Tensor | None:
        """Return the indices of the numbers that are sent; None for all."""
        if self.fraction is None:
            return None
        count = self.count(leaf.x)
        if self.seed is None:
            return _largest(leaf.x.abs(), count)
        draws = leaf.generator(self.seed)
        order = torch.randperm(len(leaf.x), generator=draws, device=draws.device)
        # A copy: a view would keep the order of all numbers until the end of the reduction.
        return order[:count].clone().to(leaf.x.device)

    def bytes_sent(self, x: Tensor, n: int) -> float:
        """Return the bytes that each of n devices sends of a leaf."""
        count = self.count(x)
        size = float(x.element_size())
        if self.code is not None:
            # Of codes that are added up, each device has its part of the blocks.
            rows = 1 if self.is_gathered else n
            count = self.code.padded_count(count, rows)
            size = self.code.bytes_per_number
        if self.is_gathered:
            return count * ((n - 1) * (size + index_dtype(x).itemsize))
        return count * (2 * (n - 1) / n * size)


def top_k(fraction: float) -> Compressor:
    """Send the largest numbers of each leaf, and their indices.

    Sends 8 k (n-1) bytes of k numbers in float32.
    """
    validate("top_k", within("(0, 1]", fraction=fraction))
    return _compressor(Encoding(fraction))


def random_k(fraction: float, *, seed: int = 0) -> Compressor:
    """Send numbers that all devices draw alike, others in each step.

    They are not scaled up by 1 / fraction: with `error_feedback` what is not drawn is sent later.
    Sends 8 k (n-1)/n bytes of k numbers in float32. GPUs of two models draw differently, so those
    along the axis must be of one.
    """
    validate("random_k", within("(0, 1]", fraction=fraction))
    return _compressor(Encoding(fraction, seed))


def quantized(
    bits: Bits, *, block: int = 256, stochastic: bool = False, seed: int = 0
) -> Compressor:
    """Send codes of a few bits, with a scale for each block.

    Sends 2 (n-1)/n (bits/8 + 4/block) bytes per number.

    Args:
        bits: of each code, 8, 4, 2 or 1; 2: -1, 0 and 1; 1: see `sign`; "fp8": float8_e4m3fn.
        block: numbers that share a scale.
        stochastic: round up or down at random, so that the result is right on average.
        seed: of these draws.
    """
    validate("quantized", within("[8, inf)", integer=True, block=block))
    if block % 8:
        raise ValueError(f"quantized: block must be a multiple of 8; got {block}.")
    if bits not in (8, 4, 2, 1, "fp8"):
        raise ValueError(f'quantized: bits must be 8, 4, 2, 1 or "fp8"; got {bits!r}.')
    if stochastic and bits in (1, "fp8"):
        raise ValueError(
            f"quantized: stochastic must be False for {bits!r}, whose steps differ in size; "
            "got True."
        )
    code = BlockCode(bits, block, seed if stochastic else None)
    return _compressor(Encoding(code=code))


def sign(*, block: int = 256) -> Compressor:
    """Send the sign of each number and the mean size of each block.

    Sends 2 (n-1)/n (1/8 + 4/block) bytes per number.
    """
    return quantized(1, block=block)


def chain(first: Compressor, second: Compressor) -> Compressor:
    """Return a compressor that encodes what the first one selects by the second.

    For example `chain(top_k(0.01), quantized(4))`.
    """
    numbers = first.encoding
    codes = second.encoding
    if not numbers or not codes or numbers.code or not codes.code:
        raise ValueError(
            "chain: the compressors must be top_k or random_k, then quantized or sign. "
            "Combinators go around."
        )
    return _compressor(numbers._replace(code=codes.code))


LeafPhases = Generator[Any, Any, None]
"""The reduction of one leaf: yields the input of each collective, and receives its result.

At last it yields the total, and what this device sent of it."""


def _compressor(encoding: Encoding) -> Compressor:
    """Return the compressor of an encoding: each collective is of all leaves together."""
    gather = partial(all_gather.start, to="replicated")
    if encoding.is_gathered:
        reduction = _gather_sum
        collectives = [gather]
    elif encoding.code is None:
        reduction = _sum
        collectives = [psum.start]
    else:
        reduction = _sum_of_codes
        collectives = [all_to_all.start, gather]

    def leaf_phases(leaves: Sequence[FlatLeaf], axis: Axes) -> Phases:
        reductions = [reduction(leaf, encoding, axis) for leaf in leaves]
        values = [next(each) for each in reductions]
        for start in collectives:
            results = yield start(values, axis)
            pairs = zip(reductions, results, strict=True)
            values = [each.send(result) for each, result in pairs]
        return [total for total, _ in values], [sent for _, sent in values]

    return compressor(encoding.bytes_sent, leaf_phases, encoding)


def _sum(leaf: FlatLeaf, encoding: Encoding, axis: Axes) -> LeafPhases:
    """Add up numbers of the same indices on all devices."""
    index = encoding.indices(leaf)
    sent = _selected(leaf, index)
    total = yield sent
    yield sparse(leaf, index, total), sparse(leaf, index, sent)


def _sum_of_codes(leaf: FlatLeaf, encoding: Encoding, axis: Axes) -> LeafPhases:
    """Add up codes of numbers of the same indices, a row of blocks on each device.

    The error of a sum's code counts as not sent by the device that encodes the sum.
    """
    code = encoding.code
    assert code is not None
    index = encoding.indices(leaf)
    x = _selected(leaf, index)
    device = axis_index(axis)
    draws = leaf.generator(code.seed or 0, device=device)
    codes = code.encode(x, axis_size(axis), draws)

    codes_of_row = yield codes
    sums = code.decode(codes_of_row).sum(0)
    codes_of_sums = yield code.encode(sums, 1, draws)

    total = code.decode(codes_of_sums)
    sent = code.decode(codes)
    sent[device] += total[device] - sums
    total = total.view(-1)[: len(x)]
    sent = sent.view(-1)[: len(x)]
    yield sparse(leaf, index, total), sparse(leaf, index, sent)


def _selected(leaf: FlatLeaf, index: Tensor | None) -> Tensor:
    """Return the numbers of a leaf at some indices, None for all.

    If any number of the leaf is not finite, all of them are NaN: the total shows it, whether that
    number is drawn or not.
    """
    if index is None:
        return leaf.x
    return leaf.x[index] + (leaf.x * 0).sum()


def _gather_sum(leaf: FlatLeaf, encoding: Encoding, axis: Axes) -> LeafPhases:
    """All-gather the largest numbers of each device with their indices, and add them up."""
    index = encoding.indices(leaf)
    code = encoding.code
    assert index is not None
    x = leaf.x[index]
    if code is None:
        codes = sent = x
    else:
        draws = leaf.generator(code.seed or 0, device=axis_index(axis))
        codes = code.encode(x, 1, draws)
        sent = code.decode(codes).view(-1)[: len(x)]

    gathered, indices = yield codes, index.to(index_dtype(leaf.x))
    values = gathered if code is None else code.decode(gathered)
    indices_of_devices = indices.view(-1, len(x))
    values_of_devices = values.view(axis_size(axis), -1)

    # An index_add of duplicate indices may add in any order; device by device they differ.
    total = torch.zeros_like(leaf.x, dtype=torch.promote_types(x.dtype, torch.float32))
    for device_index, y in zip(indices_of_devices, values_of_devices, strict=True):
        total.index_add_(0, device_index.long(), y[: len(x)].to(total.dtype))
    yield total, sparse(leaf, index, sent)


def sparse(leaf: FlatLeaf, index: Tensor | None, values: Tensor) -> Tensor:
    """Return a leaf of zeros but for values at some indices, None for the values alone."""
    if index is None:
        return values
    zeros = torch.zeros_like(leaf.x, dtype=values.dtype)
    return zeros.index_copy_(0, index, values)


def index_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of the indices of a leaf."""
    return torch.int32 if x.numel() < 1 << 31 else torch.int64


def _largest(sizes: Tensor, count: int) -> Tensor:
    """Return the indices of the largest numbers.

    The row is cut into 8 ranges; number i of each range is column i. The `count` largest numbers
    are in the `count` columns with the largest maxima: each other column has a maximum that is no
    larger than `count` numbers, one of each of these columns. So topk reads an eighth of the row,
    and then 8 numbers of each such column.
    """
    length = len(sizes) // 8
    # Then the candidates are more than a quarter of the row. The limit itself is not measured.
    if 4 * count > length:
        return sizes.topk(count, sorted=False).indices

    maxima = sizes[: 8 * length].view(8, length).amax(0)
    columns = maxima.topk(count, sorted=False).indices
    remainder = torch.arange(8 * length, len(sizes), device=sizes.device)
    candidates = torch.cat([remainder, *[columns + length * row for row in range(8)]])
    return candidates[sizes[candidates].topk(count, sorted=False).indices]
