"""Torch's fused attention, with the log-sum-exp of each row and a backward.

The backward accepts the log-sum-exp of all blocks together.

    cpu     flash attention: any floating dtype
    cuda    flash attention for 16 bits without a mask, else memory-efficient attention: 32 bits too

On CUDA torch decides what it has for the shapes, the dtype and the card, within
`torch.nn.attention.sdpa_kernel`. Where it has nothing, as for 64 bits, attention is computed by its
formula.

    q, out, cotangent   (batch, kv heads, group, queries, dim)
    lse                 (batch, kv heads, group, queries)
    k, v                (batch, kv heads, keys, dim)

A group of query heads shares a kv head. Flash attention takes all heads of groups in one call.
Memory-efficient attention has a call for each head of a group, with the same keys, so these are not
repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn import functional as F

_aten: Any = torch.ops.aten


_ALIGNMENT = 8
"""The dim that flash attention on CUDA takes is a multiple of it."""


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
        options = (0.0, self.causal)  # no dropout
        heads = q.flatten(1, 2)
        out, lse = attend(heads, k, v, *options, attn_mask=self.bias, scale=self.scale)
        return _grouped(out, k), _grouped(lse, k)

    def backward(
        self, cotangent: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v."""
        # In one call a CPU sums groups in 16 bits: for 8 heads that adds half to the error.
        heads = zip(cotangent.unbind(2), q.unbind(2), out.unbind(2), lse.unbind(2), strict=True)
        gradients = [self._backward_of_heads(g, x, k, v, y, z) for g, x, y, z in heads]
        dq, dk, dv = zip(*gradients, strict=True)
        return _stacked(dq), _widened_sum(dk), _widened_sum(dv)

    def _backward_of_heads(
        self, cotangent: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients from one query head of each group."""
        backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(
            cotangent, q, k, v, out, lse, 0.0, self.causal, attn_mask=self.bias, scale=self.scale
        )


class FlashAttention(FusedAttention):
    """Flash attention on CUDA, which takes no bias."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return out and lse."""
        dim = q.shape[-1]
        attend = _aten._scaled_dot_product_flash_attention
        tensors = [_aligned(x) for x in (q.flatten(1, 2), k, v)]
        out, lse, *_ = attend(*tensors, 0.0, self.causal, scale=self.scale)
        return _grouped(out[..., :dim], k), _grouped(lse, k)

    def backward(
        self, cotangent: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v."""
        dim = q.shape[-1]
        cotangent, q_heads, out, lse = [x.flatten(1, 2) for x in (cotangent, q, out, lse)]
        lse = lse.contiguous()  # the kernel is not given its strides
        tensors = [_aligned(x) for x in (cotangent, q_heads, k, v, out)]

        ranges = (None, None, q.shape[-2], k.shape[-2])  # no ragged batch; numbers of tokens
        seed = q.new_empty(2, dtype=torch.uint64)  # for dropout alone
        dropout = (0.0, self.causal, seed, seed[0])
        backward = _aten._scaled_dot_product_flash_attention_backward
        gradients = backward(*tensors, lse, *ranges, *dropout, scale=self.scale)
        dq, dk, dv = [x[..., :dim] for x in gradients]
        return _grouped(dq, k), dk, dv


class EfficientAttention(FusedAttention):
    """Memory-efficient attention on CUDA."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return out and lse, which the kernel pads."""
        attend = _aten._scaled_dot_product_efficient_attention
        bias = self._aligned_bias(k.shape[1])
        computes_lse = True
        outs: list[Tensor] = []
        lses: list[Tensor] = []
        for heads in q.unbind(2):
            options = (computes_lse, 0.0, self.causal)
            out, lse, *_ = attend(heads, k, v, bias, *options, scale=self.scale)
            outs.append(out)
            lses.append(lse[..., : q.shape[-2]])
        return _stacked(outs), _stacked(lses)

    def _backward_of_heads(
        self, cotangent: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients from one query head of each group."""
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
    if q.device.type in ("cpu", "meta"):  # an abstract mesh counts what a device would do
        return FusedAttention(bias, causal, scale)
    if q.device.type == "cuda":
        return fused_attention_of_cuda(q, k, v, bias, causal, scale)
    return None


def fused_attention_of_cuda(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> FusedAttention | None:
    """Return the fastest operation that torch has on CUDA for these tensors, None if there is none.

    Torch allows flash attention for any dim up to 256, since it pads dims itself, before it
    calls the operation: so does `FlashAttention`.
    """
    has_groups = True
    params = cuda.SDPAParams(q.flatten(1, 2), k, v, bias, 0.0, causal, has_groups)
    if cuda.can_use_flash_attention(params):
        return FlashAttention(bias, causal, scale)
    params = cuda.SDPAParams(q[:, :, 0], k, v, bias, 0.0, causal, False)
    if cuda.can_use_efficient_attention(params):
        return EfficientAttention(bias, causal, scale)
    return None


def _aligned(x: Tensor) -> Tensor:
    """Return a tensor whose dim is padded by zeros, which add nothing to a product."""
    missing = -x.shape[-1] % _ALIGNMENT
    return F.pad(x, (0, missing)) if missing else x


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """Return the results of query heads by kv heads and groups."""
    return x.unflatten(1, (k.shape[1], -1))


def _stacked(xs: Sequence[Tensor]) -> Tensor:
    """Stack the results of the query heads of a group; a view if there is one."""
    if len(xs) == 1:
        return xs[0].unsqueeze(2)
    return torch.stack([*xs], 2)


def _widened_sum(xs: Sequence[Tensor]) -> Tensor:
    """Return the sum over the query heads of a group, in float32 at least."""
    wide_dtype = torch.promote_types(xs[0].dtype, torch.float32)
    return sum([x.to(wide_dtype) for x in xs[1:]], xs[0].to(wide_dtype))
