"""Attention of queries to one block of keys, and its gradient.

    q, out (batch, kv heads, group, queries, dim)   k, v (batch, kv heads, keys, dim)   lse (batch, kv heads, group, queries, 1)

A group of query heads shares a kv head, which is not repeated. `lse` is the log-sum-exp of a row of scores; it and `out`
are at least float32. `mask` is False for none, True for causal, or True where a query sees a key: (batch, 1, queries,
keys). Torch's kernel is used on the CPU, the formula elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

KERNEL_DEVICES = {"cpu"}
"""Where torch has a kernel that returns `lse`, and whose backward accepts that of all blocks."""
MASKED = -1e30
"""The log-sum-exp of a row that sees no key: finite, so that merging gives no NaN."""

_kernel: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_kernel_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | bool, scale: float, kernel: bool) -> tuple[Tensor, Tensor]:
    """Return `out` and `lse` of one block; differentiable without `kernel`."""
    if not kernel or q.device.type not in KERNEL_DEVICES:
        return weigh([scores(q, k, mask, scale)], [v])
    found = [_kernel(x, k, v, 0.0, mask is True, attn_mask=_bias(mask, q), scale=scale) for x in q.unbind(2)]
    out, lse = (_stacked(xs) for xs in zip(*found, strict=True))
    lse = lse if isinstance(mask, bool) else lse.masked_fill(~mask.any(-1).unsqueeze(2), MASKED)
    return out, lse.unsqueeze(-1)


def attend_backward(
    rows: Sequence[Tensor], k: Tensor, v: Tensor, mask: Tensor | bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v from one block.

    `rows` are q, out and lse over all blocks, the cotangent of out, and the sum of cotangent * out over dim.
    """
    if k.device.type in KERNEL_DEVICES:
        options = {"attn_mask": _bias(mask, k), "scale": scale}
        groups = zip(*(x.unbind(2) for x in rows), strict=True)
        found = [
            _kernel_backward(cotangent, q, k, v, out, lse[..., 0], 0.0, mask is True, **options)
            for q, out, lse, cotangent, _ in groups
        ]
        dq, dk, dv = zip(*found, strict=True)
        return _stacked(dq), sum(map(widened, dk[1:]), widened(dk[0])), sum(map(widened, dv[1:]), widened(dv[0]))
    q, _, lse, cotangent, delta = map(widened, rows)
    weights = (scores(q, k, mask, scale) - lse).exp()
    slopes = weights * (torch.einsum("bhgtd, bhsd -> bhgts", cotangent, widened(v)) - delta) * scale
    dq = torch.einsum("bhgts, bhsd -> bhgtd", slopes, widened(k))
    dk, dv = (torch.einsum("bhgts, bhgtd -> bhsd", *xs) for xs in ((slopes, q), (weights, cotangent)))
    return dq, dk, dv


def scores(q: Tensor, k: Tensor, mask: Tensor | bool, scale: float) -> Tensor:
    """Return the scores of a block, minus infinity where a query does not see a key."""
    found = torch.einsum("bhgtd, bhsd -> bhgts", widened(q), widened(k)) * scale
    if mask is False:
        return found
    seen = torch.ones_like(found, dtype=torch.bool).tril() if isinstance(mask, bool) else mask.unsqueeze(2)
    return found.masked_fill(~seen, -torch.inf)


def weigh(rows: list[Tensor], values: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return `out` and `lse` from the scores and the values of one or several blocks."""
    row = torch.cat(rows, -1)
    high = row.detach().amax(-1, keepdim=True).clamp(min=MASKED)
    weights = (row - high).exp()
    total = weights.sum(-1, keepdim=True).clamp(min=0.5)  # it is at least 1, or 0 in a row that sees no key
    shares = (weights / total).split([v.shape[-2] for v in values], -1)
    outs = [torch.einsum("bhgts, bhsd -> bhgtd", share, widened(v)) for share, v in zip(shares, values, strict=True)]
    return sum(outs[1:], outs[0]), total.log() + high


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the results of a block into those of other blocks, by the log-sum-exps of both."""
    high = torch.maximum(lse, block_lse).detach()
    own, other = (lse - high).exp(), (block_lse - high).exp()
    total = own + other
    return out * (own / total) + block_out * (other / total), high + total.log()


def widened(x: Tensor) -> Tensor:
    """Return a tensor in the dtype that sums are computed in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _bias(mask: Tensor | bool, like: Tensor) -> Tensor | None:
    return None if isinstance(mask, bool) else like.new_zeros(mask.shape).masked_fill(~mask, -torch.inf)


def _stacked(xs: Sequence[Tensor]) -> Tensor:
    return widened(xs[0].unsqueeze(2) if len(xs) == 1 else torch.stack(tuple(xs), 2))
