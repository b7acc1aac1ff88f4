"""Torch's fused attention, with the log-sum-exp of each row and a backward that accepts that of all blocks together.

    cpu     flash attention: any floating dtype
    cuda    flash attention for 16 bits without a mask, else memory-efficient attention: 32 bits too

On CUDA torch decides what it has for the shapes, the dtype and the card, within `torch.nn.attention.sdpa_kernel`. Where
it has nothing, as for 64 bits, attention is computed by its formula.

    q, out, cotangent (batch, heads, queries, dim)   k, v (batch, heads, keys, dim)   lse (batch, heads, queries)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn import functional as F

_aten: Any = torch.ops.aten


class FusedAttention(NamedTuple):
    """`forward(q, k, v, bias, causal, scale)` returns out and lse, `backward(cotangent, q, k, v, out, lse, ...)` gradients.

    `bias`, (batch, 1, queries, keys), is added to scores.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def fused_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> FusedAttention | None:
    """Return the fastest operation that takes these tensors, None if there is none."""
    if q.device.type != "cuda":
        return CPU if q.device.type == "cpu" else None
    params = cuda.SDPAParams(q, k, v, bias, 0.0, causal, False)
    if cuda.can_use_flash_attention(params):
        return FLASH
    return EFFICIENT if cuda.can_use_efficient_attention(params) else None


def _cpu(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)


def _cpu_backward(
    cotangent: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(cotangent, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale)


def _flash(q: Tensor, k: Tensor, v: Tensor, bias: None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]


def _flash_backward(
    cotangent: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, seed = (q.shape[2], k.shape[2]), q.new_empty(2, dtype=torch.uint64)  # of dropout, which there is none
    backward, lse = _aten._scaled_dot_product_flash_attention_backward, lse.contiguous()
    return backward(cotangent, q, k, v, out, lse, None, None, *tokens, 0.0, causal, seed, seed[0], scale=scale)


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    bias = _aligned(bias, q.shape[1])
    out, lse, *_ = _aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, causal, scale=scale)
    return out, lse[..., : q.shape[2]]


def _efficient_backward(
    cotangent: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    out = out.transpose(1, 2).contiguous().transpose(1, 2)  # the kernel assumes the strides that its forward returns,
    lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)  # and reads 32 rows at a time
    seed, wanted = lse.new_empty((), dtype=torch.int64), [True, True, True, False]
    backward, bias = _aten._scaled_dot_product_efficient_attention_backward, _aligned(bias, q.shape[1])
    return backward(cotangent, q, k, v, bias, out, lse, seed, seed, 0.0, wanted, causal, scale=scale)[:3]


def _aligned(bias: Tensor | None, heads: int) -> Tensor | None:
    """Return a bias of all heads whose rows begin at multiples of 16 elements."""
    if bias is None:
        return None
    keys = bias.shape[-1]
    return F.pad(bias, (0, -keys % 16))[..., :keys].expand(-1, heads, -1, -1)


CPU = FusedAttention(_cpu, _cpu_backward)
FLASH = FusedAttention(_flash, _flash_backward)
EFFICIENT = FusedAttention(_efficient, _efficient_backward)
