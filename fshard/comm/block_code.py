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
Codes = tuple[
    Tensor, Tensor
]  # packed into bytes; the scale of each block, which shows if it is not finite


class BlockCode(NamedTuple):
    """A code of blocks; 1 bit: the sign, with the mean size as scale; else the nearest multiple of the largest's part.

    `seed` rounds up or down at random, so that the mean of all draws is the number; None: to the nearest.
    """

    bits: Bits
    block: int
    seed: int | None = None

    @property
    def bytes_per_number(self) -> float:
        return (1 if self.bits == "fp8" else self.bits / 8) + 4 / self.block

    def padded(self, count: int, rows: int) -> int:
        return -(-count // (rows * self.block)) * rows * self.block

    def encode(self, x: Tensor, rows: int, draws: torch.Generator) -> Codes:
        """Encode numbers in rows, padded. (numbers,) -> codes (rows, bytes), scales (rows, blocks)"""
        padding = self.padded(len(x), rows) - len(x)
        blocks = (pad(x, (0, padding)) if padding else x).float().view(rows, -1, self.block)
        if self.bits == 1:
            return (_pack((blocks >= 0).byte(), 1), blocks.abs().mean(-1))
        largest = torch.finfo(_FP8).max if self.bits == "fp8" else float(2 ** (self.bits - 1) - 1)
        scales = torch.maximum(blocks.amax(-1), -blocks.amin(-1)) / largest
        parts = blocks / torch.where(scales > 0, scales, 1.0)[..., None]
        if self.bits == "fp8":
            return (parts.clamp_(-largest, largest).to(_FP8).view(torch.uint8).flatten(1), scales)
        shift = (
            0.5 if self.seed is None else torch.rand(parts.shape, generator=draws).to(parts.device)
        )
        return (_pack(parts.add_(shift + largest).clamp_(0, 2 * largest).byte(), self.bits), scales)

    def decode(self, codes: Codes) -> Tensor:
        """Decode rows. codes (rows, bytes), scales (rows, blocks) -> (rows, blocks * block)"""
        packed, scales = codes
        if self.bits == "fp8":
            parts = packed.view(_FP8).float()
        elif self.bits == 1:
            parts = _unpack(packed, 1).float().mul_(2).sub_(1)
        else:
            parts = _unpack(packed, self.bits).float().sub_(2 ** (self.bits - 1) - 1)
        return parts.view(*scales.shape, self.block).mul_(scales[..., None]).flatten(1)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes into bytes: of k codes in a byte, each is of another k-th of the row."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)[:, None]
    return (codes.view(len(codes), len(shifts), -1) << shifts).sum(1, dtype=torch.uint8)


def _unpack(packed: Tensor, bits: int) -> Tensor:
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)[:, None]
    return (packed[:, None] >> shifts & 2**bits - 1).flatten(1)
