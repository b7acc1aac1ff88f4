"""Torch's fused attention, with the log-sum-exp of each row and a backward.

The backward accepts the log-sum-exp of all blocks together.

    cpu     flash attention: any floating dtype
    cuda    flash attention for 16 bits without a mask, else memory-efficient attention: 32 bits too

On CUDA torch decides what it has for the shapes, the dtype and the card, within
`torch.nn.attention.sdpa_kernel`. Where it has nothing, as for 64 bits, attention is computed by its
formula.

    q, out, cotangent   (batch, heads, queries, dim)
    lse                 (batch, heads, queries)
    k, v                (batch, heads, keys, dim)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn import functional as F

_aten: Any = torch.ops.aten


@dataclass(frozen=True)
class FusedAttention:
    """An operation of torch: flash attention on the CPU, which those of CUDA replace.

    Args:
        bias: (batch, 1, queries, keys) is added to scores.
        causal: whether a query sees only keys up to its own index.
        scale: of scores.
    """

    bias: Tensor | None
    causal: bool
    scale: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return out and lse."""
        attend = _aten._scaled_dot_product_flash_attention_for_cpu
        return attend(q, k, v, 0.0, self.causal, attn_mask=self.bias, scale=self.scale)

    def backward(
        self, cotangent: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v."""
        backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(
            cotangent, q, k, v, out, lse, 0.0, self.causal, attn_mask=self.bias, scale=self.scale
        )


class FlashAttention(FusedAttention):
    """Flash attention on CUDA, which takes no bias."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return out and lse."""
        attend = _aten._scaled_dot_product_flash_attention
        out, lse, *_ = attend(q, k, v, 0.0, self.causal, scale=self.scale)
        return out, lse

    def backward(
        self, cotangent: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v."""
        lse = lse.contiguous()  # the kernel is not given its strides
        ranges = (None, None, q.shape[2], k.shape[2])  # no ragged batch; numbers of tokens
        seed = q.new_empty(2, dtype=torch.uint64)  # for dropout alone
        dropout = (0.0, self.causal, seed, seed[0])
        backward = _aten._scaled_dot_product_flash_attention_backward
        return backward(cotangent, q, k, v, out, lse, *ranges, *dropout, scale=self.scale)


class EfficientAttention(FusedAttention):
    """Memory-efficient attention on CUDA."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return out and lse, which the kernel pads."""
        attend = _aten._scaled_dot_product_efficient_attention
        bias = self._aligned_bias(q.shape[1])
        computes_lse = True
        out, lse, *_ = attend(q, k, v, bias, computes_lse, 0.0, self.causal, scale=self.scale)
        return out, lse[..., : q.shape[2]]

    def backward(
        self, cotangent: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v."""
        # The kernel assumes the strides of out that its forward returns, and reads 32 rows of lse
        # at a time.
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
        bias = self._aligned_bias(q.shape[1])
        seed = lse.new_empty((), dtype=torch.int64)  # for dropout alone
        gradients = [True, True, True, False]  # of q, k, v, and not of the bias
        options = (seed, seed, 0.0, gradients, self.causal)
        backward = _aten._scaled_dot_product_efficient_attention_backward
        dq, dk, dv, _ = backward(cotangent, q, k, v, bias, out, lse, *options, scale=self.scale)
        return dq, dk, dv

    def _aligned_bias(self, heads: int) -> Tensor | None:
        """Return the bias of all heads, whose rows begin at multiples of 16 elements."""
        if self.bias is None:
            return None
        keys = self.bias.shape[-1]
        padded = F.pad(self.bias, (0, -keys % 16))
        return padded[..., :keys].expand(-1, heads, -1, -1)


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> FusedAttention | None:
    """Return the fastest operation that takes these tensors, None if there is none."""
    if q.device.type == "cpu":
        return FusedAttention(bias, causal, scale)
    if q.device.type != "cuda":
        return None
    params = cuda.SDPAParams(q, k, v, bias, 0.0, causal, False)
    if cuda.can_use_flash_attention(params):
        return FlashAttention(bias, causal, scale)
    if cuda.can_use_efficient_attention(params):
        return EfficientAttention(bias, causal, scale)
    return None
