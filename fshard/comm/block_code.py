"""Codes of a few bits per number, with one scale for each block of numbers.

x       0.3 -1.2  0.0  0.7 | ...        a block
scale   1.2 / 7                         of 4 bits: codes -7 to 7
codes   2  -7  0  4                     two in a byte
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

Bits = Literal[8, 4, 2, 1, "fp8"]
_FP8 = torch.float8_e4m3fn
Codes = tuple[Tensor, Tensor]
"""Codes, packed into bytes, and the scale of each block. The scale is not finite if a number of the
block is not, which codes cannot show."""


class BlockCode(NamedTuple):
    """A code of numbers in blocks that share a scale.

    Args:
        bits: of each code. 1: the sign, with the mean size of the block as its scale. "fp8": a
            float of 8 bits. Others: an integer, whose largest is for the largest size.
        block: the numbers of a block.
        seed: round integers up or down at random, so that the mean of all draws is the number;
            None: round to the nearest.
    """

    bits: Bits
    block: int
    seed: int | None = None

    @property
    def bytes_per_number(self) -> float:
        """The bytes of a code, and its part of a scale in float32."""
        bytes_of_code = 1 if self.bits == "fp8" else self.bits / 8
        return bytes_of_code + 4 / self.block

    @property
    def _largest(self) -> float:
        """The largest code, such as 7 of 4 bits: integers have equally many on both sides of 0."""
        if self.bits == "fp8":
            return torch.finfo(_FP8).max
        return float(2 ** (self.bits - 1) - 1)

    def padded_count(self, count: int, rows: int) -> int:
        """Return the padded length of a number of elements: rows of full blocks."""
        numbers_of_row_blocks = rows * self.block
        return -(-count // numbers_of_row_blocks) * numbers_of_row_blocks

    def encode(self, x: Tensor, rows: int, draws: torch.Generator) -> Codes:
        """Encode numbers in rows, padded. (numbers,) -> codes (rows, bytes), scales (rows, blocks)

        Args:
            draws: of random rounding.
        """
        padding = self.padded_count(len(x), rows) - len(x)
        if padding:
            x = pad(x, (0, padding))
        blocks = x.float().view(rows, -1, self.block)
        del x  # in another dtype it is a copy that nothing reads any more
        if self.bits == 1:
            return _pack((blocks >= 0).byte(), 1), blocks.abs().mean(-1)

        largest = self._largest
        scales = torch.maximum(blocks.amax(-1), -blocks.amin(-1)) / largest
        codes = blocks / torch.where(scales > 0, scales, 1.0)[..., None]  # of zeros, scales are 0
        if self.bits == "fp8":
            codes = codes.clamp_(-largest, largest).to(_FP8)
            return codes.view(torch.uint8).flatten(1), scales

        # Codes are stored from 0 to 2 * largest. Bytes are rounded down: a shift of 0.5 rounds to
        # the nearest, a random one in [0, 1) up with the probability of the fraction.
        shift: Tensor | float = 0.5
        if self.seed is not None:
            shift = torch.rand(codes.shape, generator=draws, device=draws.device)
            shift = shift.to(codes.device)  # without values on an abstract mesh
        codes.add_(shift + largest).clamp_(0, 2 * largest)
        return _pack(codes.byte(), self.bits), scales

    def decode(self, codes: Codes) -> Tensor:
        """Decode rows. codes (rows, bytes), scales (rows, blocks) -> (rows, blocks * block)"""
        packed, scales = codes
        if self.bits == "fp8":
            numbers = packed.view(_FP8).float()
        elif self.bits == 1:
            numbers = _unpack(packed, 1).float().mul_(2).sub_(1)  # 0 and 1 are -1 and 1
        else:
            numbers = _unpack(packed, self.bits).float().sub_(self._largest)
        return numbers.view(*scales.shape, self.block).mul_(scales[..., None]).flatten(1)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes into bytes: of k codes in a byte, each is from another k-th of the row.

    In 4 bits each, the row 1 2 3 4 becomes the bytes (1, 3) (2, 4).
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)[:, None]
    return (codes.view(len(codes), len(shifts), -1) << shifts).sum(1, dtype=torch.uint8)


def _unpack(packed: Tensor, bits: int) -> Tensor:
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)[:, None]
    mask = 2**bits - 1
    return (packed[:, None] >> shifts & mask).flatten(1)
