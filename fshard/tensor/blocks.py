"""Attention of queries to one block of keys, and its gradient.

    q, out (batch, kv heads, group, queries, dim)   k, v (batch, kv heads, keys, dim)   lse (batch, kv heads, group, queries, 1)

A group of query heads shares a kv head, which is not repeated. `lse` is the log-sum-exp of a row of scores; it and `out`
are at least float32. `mask` is False for none, True for causal, or True where a query sees a key: (batch, 1, queries,
keys). Torch's kernel is used on the CPU, the formula elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MASKED = -1e30
"""The log-sum-exp of a row that sees no key: finite, so that merging gives no NaN."""

_kernel: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_kernel_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return `out` and `lse` of one block."""
    if not has_kernel(q):
        return weigh([scores(q, k, mask, scale)], [v])
    found = [_kernel(x, k, v, 0.0, mask is True, attn_mask=_bias(mask, q), scale=scale) for x in q.unbind(2)]
    out, lse = (widened(torch.stack(xs, 2)) for xs in zip(*found, strict=True))
    if not isinstance(mask, bool):
        lse = lse.masked_fill(~mask.any(-1).unsqueeze(2), MASKED)
    return out, lse.unsqueeze(-1)


def attend_backward(
    rows: tuple[Tensor, ...], k: Tensor, v: Tensor, mask: Tensor | bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v from one block.

    `rows` are q, out and lse over all blocks, the cotangent of out, and the sum of cotangent * out over dim.
    """
    if has_kernel(k):
        each = zip(*(x.unbind(2) for x in rows), strict=True)
        found = [
            _kernel_backward(g, q, k, v, out, lse[..., 0], 0.0, mask is True, attn_mask=_bias(mask, q), scale=scale)
            for q, out, lse, g, _ in each
        ]
        dq, dk, dv = (widened(torch.stack(xs, 2)) for xs in zip(*found, strict=True))
        return dq, dk.sum(2), dv.sum(2)
    q, _, lse, cotangent, delta = map(widened, rows)
    weights = (scores(q, k, mask, scale) - lse).exp()
    slopes = weights * (_by_group(cotangent, widened(v).mT) - delta) * scale
    dk = slopes.flatten(2, 3).mT @ q.flatten(2, 3)
    return _by_group(slopes, widened(k)), dk, weights.flatten(2, 3).mT @ cotangent.flatten(2, 3)


def scores(q: Tensor, k: Tensor, mask: Tensor | bool, scale: float) -> Tensor:
    """Return the scores of a block, minus infinity where a query does not see a key."""
    found = _by_group(widened(q), widened(k).mT) * scale
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
    outs = [_by_group(share, widened(v)) for share, v in zip(shares, values, strict=True)]
    return sum(outs[1:], start=outs[0]), total.log() + high


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the results of two sets of blocks by their log-sum-exps."""
    total = torch.logaddexp(lse, block_lse)
    return out * (lse - total).exp() + block_out * (block_lse - total).exp(), total


def has_kernel(x: Tensor) -> bool:
    """Return True if torch has a kernel that returns `lse` and accepts one over all blocks in its backward."""
    return x.is_cpu


def widened(x: Tensor) -> Tensor:
    """Return a tensor in the dtype that sums are computed in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _bias(mask: Tensor | bool, q: Tensor) -> Tensor | None:
    return None if isinstance(mask, bool) else q.new_zeros(mask.shape).masked_fill(~mask, -torch.inf)


def _by_group(x: Tensor, y: Tensor) -> Tensor:
    """Multiply (batch, heads, group, m, n) by (batch, heads, n, p)."""
    return (x.flatten(2, 3) @ y).unflatten(2, x.shape[2:4])
