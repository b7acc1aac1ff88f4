"""Attention to keys that are sharded over devices, block by block.

    device 0   q0: k0 k2 k1      ring     a block is sent to the next device while it is used
    device 1   q1: k1 k0 k2      gather   all blocks are gathered first
    device 2   q2: k2 k1 k0      rsa      keys around the ring, one softmax over a row of scores,
                                          then values

The backward receives the blocks again: only tensors of the device are saved, 1/n of the serial
run's. Higher derivatives, torch.func and forward mode differentiate the formula on gathered blocks,
with collectives that no device skips.

    q, out   (batch, kv heads, group, queries, dim)
    lse      (batch, kv heads, group, queries, 1)
    k, v     (batch, kv heads, keys, dim)

A group of query heads shares a kv head, which is not repeated. `lse` is the log-sum-exp of a row of
scores; it and `out` are at least float32. `mask` is False for none, True for causal, or True where
a query sees a key: (batch, 1, queries, keys). A block is computed by torch's fused attention where
there is one (`kernels.py`), else by the formula.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from operator import attrgetter
from typing import Any, NamedTuple

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


class KeyBlock(NamedTuple):
    """The keys of one device, as the queries of this device see them.

    Args:
        source: the index of the device that the keys are of.
        rows: the queries that see some of the keys; None if none does: see Note [Blocks that no
            query sees].
        mask: see above.
        tensors: those keys, or their values too.
    """

    source: int
    rows: slice | None
    mask: Tensor | bool
    tensors: Tensors


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
        """Return a move along the ring.

        A backward may run outside the scope, so the move has the group, not the name of an axis.
        """
        return Bound(move, self.group, self.site, self.purpose)

    def send_on(self, xs: Tensors) -> list[Pending]:
        """Start to send tensors to the next device: all of one dtype in one message."""
        pairs = [(index, (index + 1) % self.n) for index in range(self.n)]
        ring = self.bound(Permute(tuple(pairs)))
        messages = [tuple(group) for _, group in groupby(xs, attrgetter("dtype"))]
        return [ring.start(message) for message in messages]

    # Note [Blocks that no query sees]
    # With a causal mask a device sees no keys of later devices. It must receive and send their
    # blocks all the same, and yield them with rows=None: the next device waits for them, and all
    # devices must call the same collectives. So its caller skips the computation, and never breaks
    # off the loop.
    def received(self, xs: Tensors) -> Iterator[tuple[int, Tensors]]:
        """Yield the tensors of each device, sharded along dim 2, with its index; own ones first."""
        sources = [(self.index - step) % self.n for step in range(self.n)]
        if self.algorithm == "gather":
            full = xs
            if self.n > 1:
                full = tuple([apply(self.bound(AllGather(2)), (x,))[0] for x in xs])
            for source in sources:
                yield source, tuple([x.chunk(self.n, 2)[source] for x in full])
            return

        for source in sources:
            # Sent before the block is used, so that it travels meanwhile.
            is_last = source == sources[-1]
            pending = [] if is_last else self.send_on(xs)
            yield source, xs
            xs = _waited(pending)

    def blocks(self, ids: Tensors, *xs: Tensor) -> Iterator[KeyBlock]:
        """Yield the block of each device: which of the own queries see which of its keys.

        In zigzag order device i has chunks i and 2n-1-i: all queries see the first chunk of an
        earlier device, and only those of the second chunk see a later device.
        """
        half = xs[0].shape[2] // 2
        key_ids = ids[1:]
        for source, received in self.received((*xs, *key_ids)):
            rows: slice | None = slice(0, None)
            columns = slice(0, None)
            is_earlier = self.causal and source < self.index
            is_later = self.causal and source > self.index
            if is_earlier and self.zigzag:
                columns = slice(0, half)
            elif is_later:
                rows = slice(half, None) if self.zigzag else None

            mask: Tensor | bool = self.causal and source == self.index
            if ids and rows is not None:
                query_ids = ids[0][..., rows, :]
                is_equal = query_ids == received[-1][..., columns, :].mT
                mask = is_equal.tril() if mask else is_equal
            tensors = tuple([x[..., columns, :] for x in received[: len(xs)]])
            yield KeyBlock(source, rows, mask, tensors)


def _waited(pending: Sequence[Pending]) -> Tensors:
    """Wait for the tensors of messages."""
    return tuple(chain.from_iterable([message.wait() for message in pending]))


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
        if plan.algorithm == "rsa":
            out, lse = _attend_to_rows(plan, q, k, v, ids)
        else:
            out, lse = _attend_and_merge(plan, True, q, k, v, ids)
        out = out.to(q.dtype)
        ctx.plan = plan
        ctx.save_for_backward(q, k, v, out, lse, *ids)
        return out

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (cotangent,) = cotangents
        q, k, v, out, lse, *ids = ctx.saved_tensors
        plan = replace(ctx.plan, purpose="cotangents")
        if torch.is_grad_enabled():  # a second derivative follows
            grads = _differentiable_backward(plan, (q, k, v), tuple(ids), cotangent)
        else:
            delta = (_widened(cotangent) * out).sum(-1, keepdim=True)
            grads = _backward(plan, (q, out, lse, cotangent, delta), k, v, tuple(ids))
        return None, *[grad.to(q.dtype) for grad in grads], *[None for _ in ids]


def _differentiable_backward(
    plan: BlockPlan, qkv: Tensors, ids: Tensors, cotangent: Tensor
) -> Tensors:
    """Return the gradients of q, k, v, as results that can be differentiated."""
    # Views, since this derivative is partial, though k may depend on q.
    xs: list[Tensor] = []
    for x in qkv:
        xs.append(x.view_as(x) if x.requires_grad else x.detach().requires_grad_())
    q, k, v = xs
    out = _formula(plan, q, k, v, ids)
    return torch.autograd.grad(out, xs, cotangent, create_graph=True)


def _formula(plan: BlockPlan, q: Tensor, k: Tensor, v: Tensor, ids: Tensors) -> Tensor:
    """Return the attention on gathered blocks, by operations that can be differentiated."""
    gathered = replace(plan, algorithm="gather")
    return _attend_and_merge(gathered, False, q, k, v, ids)[0].to(q.dtype)


def _attend_and_merge(
    plan: BlockPlan, allow_fused: bool, q: Tensor, k: Tensor, v: Tensor, ids: Tensors
) -> Tensors:
    """Return out and lse, merged over blocks."""
    results: Tensors = ()
    for _, rows, mask, (keys, values) in plan.blocks(ids, k, v):
        if rows is None:
            continue
        block = _attend(q[..., rows, :], keys, values, mask, plan.scale, allow_fused)
        if results:
            block = _merge_rows(results, block, rows.start)
        results = block
    return results


def _attend_to_rows(plan: BlockPlan, q: Tensor, k: Tensor, v: Tensor, ids: Tensors) -> Tensors:
    """Return out and lse from full rows of scores: ring self-attention."""
    # Comprehensions, whose variables do not keep the last block alive.
    key_blocks = plan.blocks(ids, k)
    value_blocks = plan.blocks((), v)
    scores = [
        _scores(q, block.tensors[0], block.mask, plan.scale)
        for block in key_blocks
        if block.rows is not None
    ]
    values = [block.tensors[0] for block in value_blocks if block.rows is not None]
    return _weigh(scores, values)


def _backward(plan: BlockPlan, saved: Tensors, k: Tensor, v: Tensor, ids: Tensors) -> Tensors:
    """Return the gradients of q, k, v.

    Those of a block's keys and values follow it around the ring, to its own device:

        device 0   block 0   2   1   grads of 1 are sent on      (ring of 3)
        device 1   block 1   0   2   and arrive at device 1, with the summands of all devices
        device 2   block 2   1   0

    With "gather" a device has the sums of all blocks, which a psum_scatter adds up.
    """
    # `totals` are the gradients of k and v: of the current block, or of all blocks.
    is_gathered = plan.algorithm == "gather"
    shards = plan.n if is_gathered else 1
    dq = torch.zeros_like(_widened(saved[0]))
    totals = tuple([_zeros_of_shards(x, shards) for x in (k, v)])
    arriving: list[Pending] = []
    for source, rows, mask, (keys, values) in plan.blocks(ids, k, v):
        grads_kv: list[Tensor] = []
        if rows is not None:
            saved_rows = [x[..., rows, :] for x in saved]
            grad, *grads_kv = _attend_backward(saved_rows, keys, values, mask, plan.scale)
            dq[..., rows, :] += grad
        if arriving:
            totals = _waited(arriving)
        if rows is not None:
            for total, grad in zip(totals, grads_kv, strict=True):
                # In zigzag order only the first half of the keys may be seen.
                block_total = total.chunk(shards, 2)[source % shards]
                block_total[..., : grad.shape[-2], :] += grad
        arriving = [] if is_gathered else plan.send_on(totals)

    if arriving:
        totals = _waited(arriving)
    elif plan.n > 1:
        totals = tuple([plan.bound(PsumScatter(2)).run((total,))[0] for total in totals])
    return dq, *totals


def _zeros_of_shards(x: Tensor, shards: int) -> Tensor:
    """Return zeros for the gradient of a shard of keys, or of the keys of several devices."""
    batch, heads, keys, dim = x.shape
    return _widened(x).new_zeros(batch, heads, shards * keys, dim)


# -- one block ------------------------------------------------------------------------------------


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | bool, scale: float, allow_fused: bool
) -> tuple[Tensor, Tensor]:
    """Return `out` and `lse` of one block; differentiable unless it is fused."""
    q, k, v = _dense(q, k, v)
    fused = None
    if allow_fused:
        fused = fused_attention(q, k, v, _bias(mask, q), mask is True, scale)
    if fused is None:
        return _weigh([_scores(q, k, mask, scale)], [v])

    out, lse = fused.forward(q, k, v)
    out = _widened(out)
    lse = _widened(lse).unsqueeze(-1)
    if isinstance(mask, bool):
        return out, lse
    # Of a row that sees no key the operation returns the mean of all values.
    sees_none = ~mask.any(-1, keepdim=True).unsqueeze(2)
    return out.masked_fill(sees_none, 0), lse.masked_fill(sees_none, MASKED)


def _attend_backward(
    rows: Sequence[Tensor], k: Tensor, v: Tensor, mask: Tensor | bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v from one block.

    `rows` are q, out and lse over all blocks, the cotangent of out, and the sum of cotangent * out
    over dim, delta. With weights w = exp(scores - lse) and g the cotangent:

        dv = w^T g      slopes = w * (g v^T - delta) * scale      dq = slopes k      dk = slopes^T q
    """
    q, out, lse, cotangent, delta = rows
    q, out, cotangent = _dense(q, out, cotangent)
    k, v = _dense(k, v)
    fused = fused_attention(q, k, v, _bias(mask, k), mask is True, scale)
    if fused is not None:
        # The operation computes weights by lse: with 0 those of a row that sees no key are
        # exp(-large) = 0, with MASKED they would be exp(+large).
        lse = lse[..., 0]
        lse = lse.masked_fill(lse == MASKED, 0)
        return fused.backward(cotangent, q, k, v, out, lse)

    q, lse, cotangent, delta = [_widened(x) for x in (q, lse, cotangent, delta)]
    weights = (_scores(q, k, mask, scale) - lse).exp()
    # One expression, since each name would keep a tensor of the size of the scores alive.
    slopes = (
        weights * (torch.einsum("bhgtd, bhsd -> bhgts", cotangent, _widened(v)) - delta) * scale
    )
    dq = torch.einsum("bhgts, bhsd -> bhgtd", slopes, _widened(k))
    dk = torch.einsum("bhgts, bhgtd -> bhsd", slopes, q)
    dv = torch.einsum("bhgts, bhgtd -> bhsd", weights, cotangent)
    return dq, dk, dv


def _scores(q: Tensor, k: Tensor, mask: Tensor | bool, scale: float) -> Tensor:
    """Return the scores of a block, minus infinity where a query does not see a key."""
    scores = torch.einsum("bhgtd, bhsd -> bhgts", _widened(q), _widened(k)) * scale
    if mask is False:
        return scores
    if mask is True:
        is_visible = torch.ones_like(scores, dtype=torch.bool).tril()
    else:
        is_visible = mask.unsqueeze(2)
    return scores.masked_fill(~is_visible, -torch.inf)


def _weigh(rows: list[Tensor], values: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return `out` and `lse` from the scores and the values of one or several blocks."""
    row = torch.cat(rows, -1)
    high = row.detach().amax(-1, keepdim=True).clamp(min=MASKED)
    weights = (row - high).exp()
    # The sum is at least 1, that of the highest score, or 0 in a row that sees no key.
    total = weights.sum(-1, keepdim=True).clamp(min=0.5)
    shares = (weights / total).split([v.shape[-2] for v in values], -1)
    outs: list[Tensor] = []
    for share, v in zip(shares, values, strict=True):
        outs.append(torch.einsum("bhgts, bhsd -> bhgtd", share, _widened(v)))
    return sum(outs[1:], outs[0]), total.log() + high


def _merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the results of a block into those of other blocks, by the log-sum-exps of both."""
    high = torch.maximum(lse, block_lse).detach()
    scale = (lse - high).exp()
    block_scale = (block_lse - high).exp()
    total = scale + block_scale
    out = out * (scale / total) + block_out * (block_scale / total)
    return out, high + total.log()


def _merge_rows(results: Tensors, block: Tensors, start: int) -> tuple[Tensor, Tensor]:
    """Merge the results of a block that only the rows from `start` on see."""
    out, lse = results
    merged = _merge(out[..., start:, :], lse[..., start:, :], *block)
    pairs = zip(results, merged, strict=True)
    out, lse = [torch.cat([x[..., :start, :], y], -2) for x, y in pairs]
    return out, lse


def _widened(x: Tensor) -> Tensor:
    """Return a tensor in the dtype that sums are computed in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _dense(*xs: Tensor) -> list[Tensor]:
    """Return tensors whose last dim is contiguous, as fused attention assumes."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in xs]


def _bias(mask: Tensor | bool, like: Tensor) -> Tensor | None:
    """Return a large negative number where a query does not see a key.

    It is finite, as not all kernels skip a row of -inf.
    """
    if isinstance(mask, bool):
        return None
    return like.new_zeros(mask.shape).masked_fill(~mask, torch.finfo(like.dtype).min)
