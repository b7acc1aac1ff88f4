"""Codes of a few bits per number, with one scale for each block of numbers.

x       0.3 -1.2  0.0  0.7 | ...        a block
scale   1.2 / 7                         of 4 bits: codes -7 to 7
codes   2  -7  0  4                     two in a byte
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Bits = Literal[8, 4, 2, 1, "fp8"]
_FP8 = torch.float8_e4m3fn


class Codes(NamedTuple):
    """Codes, packed into bytes, and the scale of each block."""

    packed: Tensor
    scales: Tensor


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

    @property
    def largest(self) -> float:
        """The largest code."""
        return torch.finfo(_FP8).max if self.bits == "fp8" else float(2 ** (self.bits - 1) - 1)

    def encode(self, x: Tensor, generator: torch.Generator | None = None) -> Codes:
        """Encode the rows of a matrix. (rows, blocks * block) -> codes (rows, bytes), scales (rows, blocks)"""
        blocks = x.float().view(len(x), -1, self.block)
        size = blocks.abs()
        if self.bits == 1:
            return Codes(self._pack((blocks >= 0).to(torch.uint8).flatten(1)), size.mean(-1))
        scales = size.amax(-1) / self.largest
        parts = torch.where(scales[..., None] > 0, blocks / scales[..., None], torch.zeros(()))
        if self.bits == "fp8":
            return Codes(parts.to(_FP8).view(torch.uint8).flatten(1), scales)
        if generator is not None:
            parts = (parts + torch.rand(parts.shape, generator=generator).to(parts.device)).floor()
        codes = parts.round().clamp(-self.largest, self.largest) + self.largest
        return Codes(self._pack(codes.to(torch.uint8).flatten(1)), scales)

    def decode(self, codes: Codes) -> Tensor:
        """Decode rows. codes (rows, bytes), scales (rows, blocks) -> (rows, blocks * block)"""
        if self.bits == "fp8":
            parts = codes.packed.view(_FP8).float()
        elif self.bits == 1:
            parts = self._unpack(codes.packed).float() * 2 - 1
        else:
            parts = self._unpack(codes.packed).float() - self.largest
        return (parts.view(len(parts), -1, self.block) * codes.scales[..., None]).flatten(1)

    def _pack(self, codes: Tensor) -> Tensor:
        each, bits = 8 // int(self.bits), int(self.bits)
        if each == 1:
            return codes
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
        return (codes.view(len(codes), -1, each) << shifts).sum(-1, dtype=torch.uint8)

    def _unpack(self, packed: Tensor) -> Tensor:
        bits = int(self.bits)
        if bits == 8:
            return packed
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
        return ((packed[..., None] >> shifts) & (2**bits - 1)).flatten(1)
