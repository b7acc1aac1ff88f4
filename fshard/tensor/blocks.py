"""Attention to keys that are sharded over devices, block by block.

    device 0   q0: k0 k2 k1      ring     a block is sent to the next device while it is used
    device 1   q1: k1 k0 k2      gather   all blocks are gathered first
    device 2   q2: k2 k1 k0      rsa      keys around the ring, one softmax over a row of scores, then values

The backward receives the blocks again: only tensors of the device are saved, 1/n of the serial run's. Higher derivatives,
torch.func and forward mode differentiate the formula on gathered blocks, with collectives that no device skips.

    q, out (batch, kv heads, group, queries, dim)   k, v (batch, kv heads, keys, dim)   lse (batch, kv heads, group, queries, 1)

A group of query heads shares a kv head, which is not repeated. `lse` is the log-sum-exp of a row of scores; it and `out`
are at least float32. `mask` is False for none, True for causal, or True where a query sees a key: (batch, 1, queries,
keys). A block is computed by torch's fused attention where there is one (`kernels.py`), else by the formula.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from fshard.mesh.collectives.autograd import Bound, Tensors, apply, has_tangent, transformed
from fshard.mesh.collectives.moves import AllGather, Move, Permute, PsumScatter, Purpose
from fshard.mesh.spmd.scope import Group, Pending
from fshard.source import Site
from fshard.tensor.kernels import fused_attention

MASKED = -1e30
"""The log-sum-exp of a row that sees no key: finite, so that merging gives no NaN."""


@dataclass(frozen=True)
class BlockPlan:
    """The blocks of keys that the device at `index` of `n` receives and uses, by an algorithm."""

    group: Group
    site: Site
    n: int
    index: int
    algorithm: str
    zigzag: bool
    causal: bool
    scale: float
    purpose: Purpose = "values"

    def bound(self, move: Move) -> Bound:
        """Return a move along the ring. A backward may run outside the scope, so it names no axis."""
        return Bound(move, self.group, self.site, self.purpose)

    def send_on(self, xs: Tensors) -> list[Pending]:
        """Start to send tensors to the next device."""
        move = Permute(tuple([(index, (index + 1) % self.n) for index in range(self.n)]))
        return [self.bound(move).start((x,)) for x in xs]

    def received(self, xs: Tensors) -> Iterator[tuple[int, Tensors]]:
        """Yield the tensors of each device, sharded along dim 2, with its index; the own ones first."""
        order = [(self.index - step) % self.n for step in range(self.n)]
        if self.algorithm == "gather":
            full = [x if self.n == 1 else apply(self.bound(AllGather(2)), (x,))[0] for x in xs]
            yield from (
                (source, tuple([x.chunk(self.n, 2)[source] for x in full])) for source in order
            )
            return
        for source in order:
            following = [] if source == order[-1] else self.send_on(xs)
            yield source, xs
            xs = tuple([pending.wait()[0] for pending in following])

    def blocks(
        self, ids: Tensors, *xs: Tensor
    ) -> Iterator[tuple[int, slice | None, Tensor | bool, Tensors]]:
        """Yield for each device the own queries that see its keys, the mask, and xs of the keys seen.

        In zigzag order device i has chunks i and 2n-1-i: all queries see the first chunk of an earlier device, and only
        those of the second chunk see a later device.
        """
        half = xs[0].shape[2] // 2
        for source, received in self.received((*xs, *ids[1:])):
            rows = columns = slice(0, None)
            mask: Tensor | bool = self.causal and source == self.index
            if self.causal and source < self.index and self.zigzag:
                columns = slice(0, half)
            elif self.causal and source > self.index:
                rows = slice(half, None) if self.zigzag else None
            if ids and rows is not None:
                equal = ids[0][..., rows, :] == received[-1][..., columns, :].mT
                mask = equal.tril() if mask else equal
            yield source, rows, mask, tuple([x[..., columns, :] for x in received[: len(xs)]])


def attend_blocks(plan: BlockPlan, q: Tensor, k: Tensor, v: Tensor, ids: Tensors) -> Tensor:
    """Return the attention of the local queries to the keys of all devices; shapes as above.

    `ids` is empty, or of queries and keys, (batch, 1, tokens, 1): a query sees the keys with its own id.
    """
    if transformed() or has_tangent((q, k, v)):
        return _formula(plan, q, k, v, ids)
    return _BlockAttention.apply(plan, q, k, v, *ids)


class _BlockAttention(Function):
    @staticmethod
    def forward(ctx: Any, plan: BlockPlan, q: Tensor, k: Tensor, v: Tensor, *ids: Tensor) -> Tensor:
        out, lse = (
            _rows(plan, q, k, v, ids)
            if plan.algorithm == "rsa"
            else _forward(plan, True, q, k, v, ids)
        )
        out, ctx.plan = out.to(q.dtype), plan
        ctx.save_for_backward(q, k, v, out, lse, *ids)
        return out

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (cotangent,) = cotangents
        q, k, v, out, lse, *ids = ctx.saved_tensors
        plan = replace(ctx.plan, purpose="cotangents")
        if (
            torch.is_grad_enabled()
        ):  # a second derivative follows; this one is partial, though k may depend on q
            xs = [
                x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in (q, k, v)
            ]
            out = _formula(plan, xs[0], xs[1], xs[2], tuple(ids))
            grads = torch.autograd.grad(out, xs, cotangent, create_graph=True)
        else:
            delta = (_widened(cotangent) * out).sum(-1, keepdim=True)
            grads = _backward(plan, (q, out, lse, cotangent, delta), k, v, tuple(ids))
        return None, *(x.to(q.dtype) for x in grads), *(None for _ in ids)


def _formula(plan: BlockPlan, q: Tensor, k: Tensor, v: Tensor, ids: Tensors) -> Tensor:
    return _forward(replace(plan, algorithm="gather"), False, q, k, v, ids)[0].to(q.dtype)


def _forward(
    plan: BlockPlan, kernel: bool, q: Tensor, k: Tensor, v: Tensor, ids: Tensors
) -> Tensors:
    """Return out and lse, merged over blocks."""
    results: Tensors = ()
    for _, rows, mask, (keys, values) in plan.blocks(ids, k, v):
        if rows is None:
            continue
        block = _attend(q[..., rows, :], keys, values, mask, plan.scale, kernel)
        if results:
            out, lse = results
            merged = _merge(out[..., rows, :], lse[..., rows, :], *block)
            block = [
                torch.cat([x[..., : rows.start, :], y], -2)
                for x, y in zip(results, merged, strict=True)
            ]
        results = tuple(block)
    return results


def _rows(plan: BlockPlan, q: Tensor, k: Tensor, v: Tensor, ids: Tensors) -> Tensors:
    """Return out and lse from full rows of scores: ring self-attention."""
    scores = [
        _scores(q, keys, mask, plan.scale) for _, rows, mask, (keys,) in plan.blocks(ids, k) if rows
    ]
    return _weigh(scores, [values for _, rows, _, (values,) in plan.blocks((), v) if rows])


def _backward(plan: BlockPlan, saved: Tensors, k: Tensor, v: Tensor, ids: Tensors) -> Tensors:
    """Return the gradients of q, k, v. Those of a block follow it around the ring, to its own device."""
    shards, arriving = plan.n if plan.algorithm == "gather" else 1, list[Pending]()
    dq = torch.zeros_like(_widened(saved[0]))
    totals = tuple(
        [_widened(x).new_zeros(*x.shape[:2], shards * x.shape[2], x.shape[3]) for x in (k, v)]
    )
    for source, rows, mask, (keys, values) in plan.blocks(ids, k, v):
        dkv: Sequence[Tensor] = ()
        if rows is not None:
            grad, *dkv = _attend_backward(
                [x[..., rows, :] for x in saved], keys, values, mask, plan.scale
            )
            dq[..., rows, :] += grad
        totals = tuple([pending.wait()[0] for pending in arriving]) or totals
        for total, grad in zip(totals, dkv, strict=False):
            total.chunk(shards, 2)[source % shards][..., : grad.shape[-2], :] += grad
        arriving = [] if plan.algorithm == "gather" else plan.send_on(totals)
    if arriving or plan.n == 1:
        return dq, *(tuple([pending.wait()[0] for pending in arriving]) or totals)
    return dq, *(plan.bound(PsumScatter(2)).run((total,))[0] for total in totals)


# -- one block --------------------------------------------------------------------------------------------------------


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | bool, scale: float, allow_fused: bool
) -> tuple[Tensor, Tensor]:
    """Return `out` and `lse` of one block; differentiable unless it is fused."""
    q, k, v = _dense(q, k, v)
    fused = (
        fused_attention(q[:, :, 0], k, v, _bias(mask, q), mask is True, scale)
        if allow_fused
        else None
    )
    if fused is None:
        return _weigh([_scores(q, k, mask, scale)], [v])
    outputs = [fused.forward(x, k, v) for x in q.unbind(2)]
    out, lse = (_stacked(xs) for xs in zip(*outputs, strict=True))
    lse = lse.unsqueeze(-1)
    if isinstance(mask, bool):
        return out, lse
    sees_none = ~mask.any(-1, keepdim=True).unsqueeze(2)
    return out.masked_fill(sees_none, 0), lse.masked_fill(sees_none, MASKED)


def _attend_backward(
    rows: Sequence[Tensor], k: Tensor, v: Tensor, mask: Tensor | bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v from one block.

    `rows` are q, out and lse over all blocks, the cotangent of out, and the sum of cotangent * out over dim.
    """
    q, out, lse, cotangent, delta = rows
    (q, out, cotangent), (k, v) = _dense(q, out, cotangent), _dense(k, v)
    fused = fused_attention(q[:, :, 0], k, v, _bias(mask, k), mask is True, scale)
    if fused is not None:
        lse = lse[..., 0].masked_fill(
            lse[..., 0] == MASKED, 0
        )  # so that all weights of these rows are exp(-large) = 0
        groups = zip(*(x.unbind(2) for x in (cotangent, q, out, lse)), strict=True)
        grads = [fused.backward(cotangent, q, k, v, out, lse) for cotangent, q, out, lse in groups]
        dq, dk, dv = zip(*grads, strict=True)
        return (
            _stacked(dq),
            sum(map(_widened, dk[1:]), _widened(dk[0])),
            sum(map(_widened, dv[1:]), _widened(dv[0])),
        )
    q, lse, cotangent, delta = map(_widened, (q, lse, cotangent, delta))
    weights = (_scores(q, k, mask, scale) - lse).exp()
    slopes = (
        weights * (torch.einsum("bhgtd, bhsd -> bhgts", cotangent, _widened(v)) - delta) * scale
    )
    dq = torch.einsum("bhgts, bhsd -> bhgtd", slopes, _widened(k))
    dk, dv = (
        torch.einsum("bhgts, bhgtd -> bhsd", *xs) for xs in ((slopes, q), (weights, cotangent))
    )
    return dq, dk, dv


def _scores(q: Tensor, k: Tensor, mask: Tensor | bool, scale: float) -> Tensor:
    """Return the scores of a block, minus infinity where a query does not see a key."""
    scores = torch.einsum("bhgtd, bhsd -> bhgts", _widened(q), _widened(k)) * scale
    if mask is False:
        return scores
    visible = (
        torch.ones_like(scores, dtype=torch.bool).tril()
        if isinstance(mask, bool)
        else mask.unsqueeze(2)
    )
    return scores.masked_fill(~visible, -torch.inf)


def _weigh(rows: list[Tensor], values: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return `out` and `lse` from the scores and the values of one or several blocks."""
    row = torch.cat(rows, -1)
    high = row.detach().amax(-1, keepdim=True).clamp(min=MASKED)
    weights = (row - high).exp()
    total = weights.sum(-1, keepdim=True).clamp(
        min=0.5
    )  # it is at least 1, or 0 in a row that sees no key
    shares = (weights / total).split([v.shape[-2] for v in values], -1)
    outs = [
        torch.einsum("bhgts, bhsd -> bhgtd", share, _widened(v))
        for share, v in zip(shares, values, strict=True)
    ]
    return sum(outs[1:], outs[0]), total.log() + high


def _merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the results of a block into those of other blocks, by the log-sum-exps of both."""
    high = torch.maximum(lse, block_lse).detach()
    scale, block_scale = (lse - high).exp(), (block_lse - high).exp()
    total = scale + block_scale
    return out * (scale / total) + block_out * (block_scale / total), high + total.log()


def _widened(x: Tensor) -> Tensor:
    """Return a tensor in the dtype that sums are computed in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _dense(*xs: Tensor) -> list[Tensor]:
    """Return tensors whose last dim is contiguous, as fused attention assumes."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in xs]


def _bias(mask: Tensor | bool, like: Tensor) -> Tensor | None:
    """Return a large negative number where a query does not see a key; finite, as not all kernels skip a row of -inf."""
    if isinstance(mask, bool):
        return None
    return like.new_zeros(mask.shape).masked_fill(~mask, torch.finfo(like.dtype).min)


def _stacked(xs: Sequence[Tensor]) -> Tensor:
    return _widened(xs[0].unsqueeze(2) if len(xs) == 1 else torch.stack(tuple(xs), 2))
