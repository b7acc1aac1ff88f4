"""Compressors that send a few of the numbers, a few bits of each, or both.

           numbers           reduction
random_k   drawn alike       psum of the numbers; their indices are not sent
top_k      the largest       all_gather of numbers and indices; each device adds them up
codes      all               all_to_all; each device adds its part up and encodes the sum; all_gather
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
    """The form in which a leaf is sent: the largest numbers, or with a seed drawn ones, and the code of numbers."""

    fraction: float | None = None
    seed: int | None = None
    code: BlockCode | None = None

    @property
    def is_gathered(self) -> bool:  # devices select different numbers, so they send indices
        return self.fraction is not None and self.seed is None

    def count(self, x: Tensor) -> int:
        return (
            x.numel() if self.fraction is None else min(x.numel(), ceil(self.fraction * x.numel()))
        )

    def indices(self, leaf: FlatLeaf) -> Tensor | None:
        """Return the indices of the numbers that are sent; None for all."""
        if self.fraction is None:
            return None
        if self.seed is None:
            return _largest(leaf.x.abs(), self.count(leaf.x))
        order = torch.randperm(len(leaf.x), generator=leaf.generator(self.seed))
        return order[: self.count(leaf.x)].to(leaf.x.device)

    def bytes_sent(self, x: Tensor, n: int) -> float:
        """Return the bytes that each of n devices sends of a leaf."""
        count, size = self.count(x), float(x.element_size())
        if self.code is not None:
            count, size = (
                self.code.padded(count, 1 if self.is_gathered else n),
                self.code.bytes_per_number,
            )
        return count * (
            (n - 1) * (size + index_dtype(x).itemsize)
            if self.is_gathered
            else 2 * (n - 1) / n * size
        )


def top_k(fraction: float) -> Compressor:
    """Send the largest numbers of each leaf, and their indices.  Sends 8 k (n-1) bytes of k numbers in float32."""
    validate("top_k", within("(0, 1]", fraction=fraction))
    return _compressor(Encoding(fraction))


def random_k(fraction: float, *, seed: int = 0) -> Compressor:
    """Send numbers that all devices draw alike, others in each step.  Sends 8 k (n-1)/n bytes of k numbers in float32.

    They are not scaled up by 1 / fraction: with `error_feedback` what is not drawn is sent later.
    """
    validate("random_k", within("(0, 1]", fraction=fraction))
    return _compressor(Encoding(fraction, seed))


def quantized(
    bits: Bits, *, block: int = 256, stochastic: bool = False, seed: int = 0
) -> Compressor:
    """Send codes of a few bits, with a scale for each block.  Sends 2 (n-1)/n (bits/8 + 4/block) bytes per number.

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
            f"quantized: stochastic must be False for {bits!r}, whose steps differ in size; got True."
        )
    return _compressor(Encoding(code=BlockCode(bits, block, seed if stochastic else None)))


def sign(*, block: int = 256) -> Compressor:
    """Send the sign of each number and the mean size of each block.  Sends 2 (n-1)/n (1/8 + 4/block) bytes per number."""
    return quantized(1, block=block)


def chain(first: Compressor, second: Compressor) -> Compressor:
    """Return a compressor that encodes what the first one selects by the second: `chain(top_k(0.01), quantized(4))`."""
    numbers, codes = first.encoding, second.encoding
    if not numbers or not codes or numbers.code or not codes.code:
        raise ValueError(
            "chain: the compressors must be top_k or random_k, then quantized or sign. Combinators go around."
        )
    return _compressor(numbers._replace(code=codes.code))


def _compressor(encoding: Encoding) -> Compressor:
    phases_of, gather = (
        (_gather_sum if encoding.is_gathered else _sum),
        partial(all_gather.start, to="replicated"),
    )
    collectives = [psum.start] if encoding.code is None else [all_to_all.start, gather]

    def leaf_phases(leaves: Sequence[FlatLeaf], axis: Axes) -> Phases:
        # a leaf's phases yield the input of each collective, receive its result, and last yield the total and what was sent
        phases = [phases_of(leaf, encoding, axis) for leaf in leaves]
        values = [next(each) for each in phases]
        for start in [gather] if encoding.is_gathered else collectives:  # each is of all leaves
            results = yield start(values, axis)
            values = [each.send(result) for each, result in zip(phases, results, strict=True)]
        return [total for total, _ in values], [sent for _, sent in values]

    return compressor(encoding.bytes_sent, leaf_phases, encoding)


def _sum(leaf: FlatLeaf, encoding: Encoding, axis: Axes) -> Generator[Any, Any, None]:
    """Add up numbers of the same indices. The error of a sum's code counts as not sent by the device that encodes it."""
    x, index, code = leaf.x, encoding.indices(leaf), encoding.code
    if index is not None:
        x = x[index] + (x * 0).sum()  # a number that is not finite makes them so, drawn or not
    if code is None:
        total, sent = (yield x), x
    else:
        device = axis_index(axis)
        draws = leaf.generator(code.seed or 0, device=device)
        codes = code.encode(x, axis_size(axis), draws)
        sums = code.decode((yield codes)).sum(0)
        total, sent = code.decode((yield code.encode(sums, 1, draws))), code.decode(codes)
        sent[device] += total[device] - sums
        total, sent = total.view(-1)[: len(x)], sent.view(-1)[: len(x)]
    yield sparse(leaf, index, total), sparse(leaf, index, sent)


def _gather_sum(leaf: FlatLeaf, encoding: Encoding, axis: Axes) -> Generator[Any, Any, None]:
    """All-gather the largest numbers of each device with their indices, and add them up, device by device."""
    index, code = encoding.indices(leaf), encoding.code
    assert index is not None
    x = sent = codes = leaf.x[index]
    if code is not None:
        codes = code.encode(x, 1, leaf.generator(code.seed or 0, device=axis_index(axis)))
        sent = code.decode(codes).view(-1)[: len(x)]
    gathered, indices = yield codes, index.to(index_dtype(leaf.x))
    values = gathered if code is None else code.decode(gathered)
    total = torch.zeros_like(leaf.x, dtype=torch.promote_types(x.dtype, torch.float32))
    for i, y in zip(indices.view(-1, len(x)), values.view(axis_size(axis), -1), strict=True):
        total.index_add_(0, i.long(), y[: len(x)].to(total.dtype))
    yield total, sparse(leaf, index, sent)


def sparse(leaf: FlatLeaf, index: Tensor | None, values: Tensor) -> Tensor:
    """Return a leaf of zeros but for these values, or of the values alone."""
    return (
        values
        if index is None
        else torch.zeros_like(leaf.x, dtype=values.dtype).index_copy_(0, index, values)
    )


def index_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of the indices of a leaf."""
    return torch.int32 if x.numel() < 1 << 31 else torch.int64


def _largest(sizes: Tensor, count: int) -> Tensor:
    """Return the indices of the largest numbers: they are in those columns of 8 numbers whose largest are the largest."""
    columns = len(sizes) // 8
    if 4 * count > columns:
        return sizes.topk(count, sorted=False).indices
    heads = sizes[: 8 * columns].view(8, columns).amax(0).topk(count, sorted=False).indices
    remainder = torch.arange(8 * columns, len(sizes), device=sizes.device)
    candidates = torch.cat([remainder, *(heads + columns * row for row in range(8))])
    return candidates[sizes[candidates].topk(count, sorted=False).indices]
