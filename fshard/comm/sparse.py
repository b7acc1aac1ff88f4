"""Compressors that send a few of the numbers, a few bits of each, or both.

           numbers           reduction
random_k   drawn alike       psum of the numbers; their indices are not sent
top_k      the largest       all_gather of numbers and indices; each device adds them up
codes      all               all_to_all; each device adds its part up and encodes the sum; all_gather
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fshard.comm.block_code import Bits, BlockCode, Codes
from fshard.comm.compressor import Compressor, FlatLeaf, Phases, compressor
from fshard.mesh.collectives.api import all_gather, all_to_all, axis_index, axis_size, psum
from fshard.mesh.layout import Axes
from fshard.optim.arguments import validate, within


class Selection(NamedTuple):
    """A fraction of a leaf's numbers: the largest, or with a seed drawn ones."""

    fraction: float
    seed: int | None = None

    def count(self, numel: int) -> int:
        return min(numel, ceil(self.fraction * numel))

    def indices(self, leaf: FlatLeaf) -> Tensor:
        count = self.count(leaf.x.numel())
        if self.seed is not None:
            return torch.randperm(leaf.x.numel(), generator=leaf.generator(self.seed))[:count].to(leaf.x.device)
        return leaf.x.abs().topk(count, sorted=False).indices


class Encoding(NamedTuple):
    """The form in which a leaf is sent: a selection of its numbers, a code of them, or a code of a selection."""

    selection: Selection | None = None
    code: BlockCode | None = None

    def bytes_sent(self, x: Tensor, n: int) -> float:
        """Return the bytes that each of n devices sends of a leaf."""
        count = x.numel() if self.selection is None else self.selection.count(x.numel())
        each, is_gathered = float(x.element_size()), self.selection is not None and self.selection.seed is None
        if self.code is not None:
            each = self.code.bytes_per_number
            count = _padded(count, self.code.block * (1 if is_gathered else n))
        return (n - 1) * count * (each + _index_dtype(x).itemsize) if is_gathered else 2 * (n - 1) / n * count * each


def top_k(fraction: float) -> Compressor:
    """Send the largest numbers of each leaf, and their indices.  Sends 8 k (n-1) bytes of k numbers in float32."""
    validate("top_k", within("(0, 1]", fraction=fraction))
    return _compressor(Encoding(Selection(fraction)))


def random_k(fraction: float, *, seed: int = 0) -> Compressor:
    """Send numbers that all devices draw alike, others in each step.  Sends 8 k (n-1)/n bytes of k numbers in float32.

    They are not scaled up by 1 / fraction: with `error_feedback` what is not drawn is sent later.
    """
    validate("random_k", within("(0, 1]", fraction=fraction))
    return _compressor(Encoding(Selection(fraction, seed)))


def quantized(
    bits: Literal[8, 4, 2, "fp8"], *, block: int = 256, stochastic: bool = False, seed: int = 0
) -> Compressor:
    """Send codes of a few bits, with a scale for each block.  Sends 2 (n-1)/n (bits/8 + 4/block) bytes per number.

    Args:
        bits: of each code; 2: -1, 0 and 1; "fp8": float8_e4m3fn.
        block: numbers that share a scale.
        stochastic: round up or down at random, so that the result is right on average.
        seed: of these draws.
    """
    if bits not in (8, 4, 2, "fp8"):
        raise ValueError(f'quantized: bits must be 8, 4, 2 or "fp8"; got {bits!r}.')
    if stochastic and bits == "fp8":
        raise ValueError('quantized: stochastic must be False for "fp8", whose steps differ in size; got True.')
    return _compressor(Encoding(None, _block_code("quantized", bits, block, seed if stochastic else None)))


def sign(*, block: int = 256) -> Compressor:
    """Send the sign of each number and the mean size of each block.  Sends 2 (n-1)/n (1/8 + 4/block) bytes per number."""
    return _compressor(Encoding(None, _block_code("sign", 1, block, None)))


def chain(first: Compressor, second: Compressor) -> Compressor:
    """Return a compressor that encodes what the first one selects by the second: `chain(top_k(0.01), quantized(4))`."""
    selection, code = first.encoding, second.encoding
    if not (isinstance(selection, Encoding) and isinstance(code, Encoding)) or (selection.code or code.selection):
        raise ValueError(
            "chain: the compressors must be top_k or random_k, and then quantized or sign. Combinators go around a chain: "
            "error_feedback(chain(...))."
        )
    return _compressor(Encoding(selection.selection, code.code))


def _block_code(function: str, bits: Bits, block: int, seed: int | None) -> BlockCode:
    validate(function, within("[8, inf)", integer=True, block=block))
    if block % 8:
        raise ValueError(f"{function}: block must be a multiple of 8; got {block}.")
    return BlockCode(bits, block, seed)


def _padded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _index_dtype(x: Tensor) -> torch.dtype:
    return torch.int32 if x.numel() < 1 << 31 else torch.int64


def _compressor(encoding: Encoding) -> Compressor:
    selection, code = encoding

    def leaf_phases(leaves: Sequence[FlatLeaf], axis: Axes) -> Phases:
        if selection is None:
            assert code is not None
            return (yield from _reduce_codes(leaves, code, axis))
        indices = [selection.indices(leaf) for leaf in leaves]
        chosen = [leaf._replace(x=leaf.x[index]) for leaf, index in zip(leaves, indices, strict=True)]
        if selection.seed is None:
            return (yield from _gather_sum(leaves, chosen, indices, code, axis))
        if code is not None:
            totals, sent = yield from _reduce_codes(chosen, code, axis)
        else:
            sent = [leaf.x for leaf in chosen]
            totals = yield psum.start(sent, axis)
        return _scattered(leaves, indices, totals), _scattered(leaves, indices, sent)

    return compressor(encoding.bytes_sent, leaf_phases, encoding)


def _scattered(leaves: Sequence[FlatLeaf], indices: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
    """Return leaves that are zero but for these values; those of one index are added up."""
    return [
        torch.zeros_like(leaf.x, dtype=x.dtype).index_add_(0, index, x)
        for leaf, index, x in zip(leaves, indices, values, strict=True)
    ]


def _gather_sum(
    leaves: Sequence[FlatLeaf],
    chosen: Sequence[FlatLeaf],
    indices: Sequence[Tensor],
    code: BlockCode | None,
    axis: Axes,
) -> Phases:
    """All-gather the chosen numbers of each device with their indices, and add them up."""
    n, counts = axis_size(axis), [len(index) for index in indices]
    short = [index.to(_index_dtype(leaf.x)) for leaf, index in zip(leaves, indices, strict=True)]
    if code is None:
        sent = [leaf.x for leaf in chosen]
        values, gathered = yield all_gather.start((sent, short), axis, to="replicated")
    else:
        codes = [code.encode(*_rows(leaf, code, axis, 1)) for leaf in chosen]
        sent = [
            code.decode(each)[0, :count].to(leaf.x.dtype)
            for leaf, each, count in zip(leaves, codes, counts, strict=True)
        ]
        codes, gathered = yield all_gather.start((codes, short), axis, to="replicated")
        values = [code.decode(each)[:, :count].flatten() for each, count in zip(codes, counts, strict=True)]
    wide = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in values]
    totals = _scattered(
        leaves, [index.view(n * count).long() for index, count in zip(gathered, counts, strict=True)], wide
    )
    return totals, _scattered(leaves, indices, sent)


def _rows(leaf: FlatLeaf, code: BlockCode, axis: Axes, rows: int) -> tuple[Tensor, torch.Generator | None]:
    """Return a leaf, padded to rows of full blocks, and the generator of its code."""
    x = torch.nn.functional.pad(leaf.x, (0, _padded(leaf.x.numel(), rows * code.block) - leaf.x.numel()))
    generator = None if code.seed is None else leaf.generator(code.seed, device=axis_index(axis))
    return x.view(rows, -1), generator


def _reduce_codes(leaves: Sequence[FlatLeaf], code: BlockCode, axis: Axes) -> Phases:
    """Send a row of codes to each device, which adds its rows up; all-gather the codes of the sums.

    The error of a sum's code counts as not sent by the device that has encoded it.
    """
    n, index = axis_size(axis), axis_index(axis)
    rows = [_rows(leaf, code, axis, n) for leaf in leaves]
    codes = [code.encode(*each) for each in rows]
    received = yield all_to_all.start(codes, axis)
    sums = [code.decode(Codes(*each)).sum(0, keepdim=True) for each in received]
    sum_codes = [code.encode(x, generator) for x, (_, generator) in zip(sums, rows, strict=True)]
    gathered = yield all_gather.start(sum_codes, axis, to="replicated")
    totals = [code.decode(Codes(*each)).flatten() for each in gathered]
    sent = [code.decode(each) for each in codes]
    for x, total, encoded in zip(sent, sums, sum_codes, strict=True):
        x[index] -= (total - code.decode(encoded))[0]
    lengths = [leaf.x.numel() for leaf in leaves]
    return (
        [x[:length] for x, length in zip(totals, lengths, strict=True)],
        [x.flatten()[:length] for x, length in zip(sent, lengths, strict=True)],
    )
