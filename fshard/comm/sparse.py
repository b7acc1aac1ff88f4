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
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fshard.comm.block_code import Bits, BlockCode
from fshard.comm.compressor import Compressor, FlatLeaf, Phases, compressor
from fshard.mesh.collectives.api import all_gather, all_to_all, axis_index, axis_size, psum
from fshard.mesh.layout import Axes
from fshard.optim.arguments import validate, within

LeafPhases = Generator[Any, Any, tuple[Tensor, Tensor]]
"""Yields what goes into each collective, is resumed with its result, and returns the total and what this device sent."""


class Selection(NamedTuple):
    """A fraction of a leaf's numbers: the largest, or with a seed drawn ones."""

    fraction: float
    seed: int | None = None

    def count(self, numel: int) -> int:
        return min(numel, ceil(self.fraction * numel))

    def indices(self, leaf: FlatLeaf) -> Tensor:
        count = self.count(leaf.x.numel())
        if self.seed is None:
            return _largest(leaf.x.abs(), count)
        return torch.randperm(leaf.x.numel(), generator=leaf.generator(self.seed))[:count].to(leaf.x.device)


class Encoding(NamedTuple):
    """The form in which a leaf is sent: a selection of its numbers, a code of them, or a code of a selection."""

    selection: Selection | None = None
    code: BlockCode | None = None

    @property
    def is_gathered(self) -> bool:
        """True if devices select different numbers, so that indices are sent and nothing is added up on the way."""
        return self.selection is not None and self.selection.seed is None

    def bytes_sent(self, x: Tensor, n: int) -> float:
        """Return the bytes that each of n devices sends of a leaf."""
        count = x.numel() if self.selection is None else self.selection.count(x.numel())
        size = float(x.element_size())
        if self.code is not None:
            size = self.code.bytes_per_number
            count = _padded(count, self.code.block * (1 if self.is_gathered else n))
        if self.is_gathered:
            return (n - 1) * count * (size + _index_dtype(x).itemsize)
        return 2 * (n - 1) / n * count * size


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


def _largest(sizes: Tensor, count: int) -> Tensor:
    """Return the indices of the largest numbers: they are in those columns of 8 numbers whose largest are the largest."""
    columns = len(sizes) // 8
    if 4 * count > columns:
        return sizes.topk(count, sorted=False).indices
    heads = sizes[: 8 * columns].view(8, columns).amax(0).topk(count, sorted=False).indices
    rows = torch.arange(0, 8 * columns, columns, device=sizes.device)
    rest = torch.arange(8 * columns, len(sizes), device=sizes.device)
    candidates = torch.cat([(rows[:, None] + heads).flatten(), rest])
    return candidates[sizes[candidates].topk(count, sorted=False).indices]


def _compressor(encoding: Encoding) -> Compressor:
    selection, code = encoding
    gather = partial(all_gather.start, to="replicated")
    collectives = [gather] if encoding.is_gathered else [psum.start] if code is None else [all_to_all.start, gather]

    def phases_of(leaf: FlatLeaf, axis: Axes) -> LeafPhases:
        if selection is None:
            return _sum(leaf, code, axis)
        return (_gather_sum if encoding.is_gathered else _sum_drawn)(leaf, selection.indices(leaf), code, axis)

    def leaf_phases(leaves: Sequence[FlatLeaf], axis: Axes) -> Phases:
        phases, values = [phases_of(leaf, axis) for leaf in leaves], [None] * len(leaves)
        for start in collectives:  # each is of all leaves
            values = yield start([*map(_resume, phases, values)], axis)
        results = [*map(_resume, phases, values)]
        return [total for total, _ in results], [sent for _, sent in results]

    return compressor(encoding.bytes_sent, leaf_phases, encoding)


def _resume(phases: LeafPhases, value: Any) -> Any:
    try:
        return phases.send(value)
    except StopIteration as end:
        return end.value


def _sum(leaf: FlatLeaf, code: BlockCode | None, axis: Axes) -> LeafPhases:
    """Send a row of codes to each device, which adds its rows up; all-gather the codes of the sums.

    The error of a sum's code counts as not sent by the device that has encoded it.
    """
    if code is None:
        return (yield leaf.x), leaf.x
    rows, generator = _rows(leaf, code, axis, axis_size(axis))
    codes, index = code.encode(rows, generator), axis_index(axis)
    sums = code.decode((yield codes)).sum(0, keepdim=True)
    total, sent = code.decode((yield code.encode(sums, generator))), code.decode(codes)
    sent[index] += total[index] - sums[0]
    return total.flatten()[: len(leaf.x)], sent.flatten()[: len(leaf.x)]


def _sum_drawn(leaf: FlatLeaf, index: Tensor, code: BlockCode | None, axis: Axes) -> LeafPhases:
    """Reduce the numbers that all devices have drawn. One that is not finite makes them so, drawn or not."""
    chosen = leaf._replace(x=leaf.x[index] + (leaf.x * 0).sum())
    total, sent = yield from _sum(chosen, code, axis)
    return _at(leaf, index, total), _at(leaf, index, sent)


def _gather_sum(leaf: FlatLeaf, index: Tensor, code: BlockCode | None, axis: Axes) -> LeafPhases:
    """All-gather the numbers of each device with their indices, and add them up, device by device."""
    x = leaf.x[index]
    codes = x[None] if code is None else code.encode(*_rows(leaf._replace(x=x), code, axis, 1))
    gathered, indices = yield codes, index[None].to(_index_dtype(leaf.x))
    values = gathered if code is None else code.decode(gathered)[:, : len(x)]
    total = torch.zeros_like(leaf.x, dtype=torch.promote_types(x.dtype, torch.float32))
    for index_of_device, numbers in zip(indices, values, strict=True):
        total.index_add_(0, index_of_device.long(), numbers.to(total.dtype))
    sent = x if code is None else code.decode(codes)[0, : len(x)]
    return total, _at(leaf, index, sent)


def _at(leaf: FlatLeaf, index: Tensor, x: Tensor) -> Tensor:
    """Return a leaf that is zero but for some numbers."""
    return torch.zeros_like(leaf.x, dtype=x.dtype).index_copy_(0, index, x)


def _rows(leaf: FlatLeaf, code: BlockCode, axis: Axes, rows: int) -> tuple[Tensor, torch.Generator | None]:
    """Return a leaf, padded to rows of full blocks, and the generator of its code."""
    missing = _padded(len(leaf.x), rows * code.block) - len(leaf.x)
    generator = None if code.seed is None else leaf.generator(code.seed, device=axis_index(axis))
    return (pad(leaf.x, (0, missing)) if missing else leaf.x).view(rows, -1), generator
