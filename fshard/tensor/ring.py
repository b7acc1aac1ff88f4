"""Attention to keys that are sharded over devices, block by block.

    device 0   q0: k0 k2 k1      ring     a block is sent to the next device while it is used
    device 1   q1: k1 k0 k2      gather   all blocks are gathered first
    device 2   q2: k2 k1 k0      rows     keys around the ring, one softmax over a row of scores, values around the ring

The backward receives the blocks again: only tensors of the device are saved, 1/n of the serial run's. Higher derivatives,
torch.func and forward mode differentiate the formula on gathered blocks: there devices skip blocks, but no collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function

from fshard.mesh.collectives.api import all_gather, ppermute, psum_scatter
from fshard.mesh.collectives.autograd import Tensors, has_tangent, transformed
from fshard.mesh.collectives.moves import serving
from fshard.mesh.layout import Axes
from fshard.tensor.blocks import attend, attend_backward, merge, scores, weigh, widened

Seen = tuple[slice, slice, bool]
"""Queries, the keys of a block that they see, and if they see them causally."""


class BlockPlan(NamedTuple):
    """How the device at `index` of `n` receives the blocks of keys, and which it uses."""

    axis: Axes
    n: int
    index: int
    how: Literal["gather", "ring", "rows"]
    zigzag: bool
    causal: bool
    scale: float

    def send_on(self, xs: Tensors) -> Any:
        """Start to send tensors to the next device of the ring."""
        return ppermute.start(xs, self.axis, [(index, (index + 1) % self.n) for index in range(self.n)])

    def blocks(self, *xs: Tensor) -> Iterator[tuple[int, Sequence[Tensor]]]:
        """Yield the tensors of each device, sharded along dim 2, with its index; the own ones first."""
        order = [(self.index - step) % self.n for step in range(self.n)]
        if self.how == "gather":
            gathered = xs if self.n == 1 else all_gather(xs, self.axis, dim=2)
            yield from ((source, [x.chunk(self.n, 2)[source] for x in gathered]) for source in order)
            return
        for source in order:
            following = self.send_on(xs) if source != order[-1] else None
            yield source, xs
            xs = xs if following is None else following.wait()

    def visible(self, source: int, tokens: int) -> Seen | None:
        """Return which queries see which keys of a device.

        In zigzag order device i has chunks i and 2n-1-i: all queries see the first chunk of an earlier device, and only
        those of the second chunk see a later device.
        """
        every, half = slice(0, None), tokens // 2
        if not self.causal or source == self.index:
            return every, every, self.causal
        if source < self.index:
            return every, slice(half) if self.zigzag else every, False
        return (slice(half, None), every, False) if self.zigzag else None


def attend_blocks(plan: BlockPlan, q: Tensor, k: Tensor, v: Tensor, ids: Tensors) -> Tensor:
    """Return the attention of the local queries to the keys of all devices; shapes as in `blocks`.

    `ids` is empty, or of queries and keys, (batch, 1, tokens, 1): a query sees the keys with its own id.
    """
    if transformed() or has_tangent((q, k, v)):
        return _formula(plan, q, k, v, ids)
    return _BlockAttention.apply(plan, q, k, v, *ids)


class _BlockAttention(Function):
    @staticmethod
    def forward(ctx: Any, plan: BlockPlan, q: Tensor, k: Tensor, v: Tensor, *ids: Tensor) -> Tensor:
        out, lse = _rows(plan, q, k, v, ids) if plan.how == "rows" else _forward(plan, True, q, k, v, ids)
        out, ctx.plan = out.to(q.dtype), plan
        ctx.save_for_backward(q, k, v, out, lse, *ids)
        return out

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *ids = ctx.saved_tensors
        with serving("cotangents"):
            if torch.is_grad_enabled():  # a second derivative follows
                xs = [x.view_as(x) for x in (q, k, v)]  # k may depend on q; this derivative is partial
                used = [x for x in xs if x.requires_grad]
                found = iter(torch.autograd.grad(_formula(ctx.plan, *xs, ids), used, cotangent, create_graph=True))
                return None, *(next(found) if x.requires_grad else None for x in xs), *(None for _ in ids)
            delta = (widened(cotangent) * out).sum(-1, keepdim=True)
            found = _backward(ctx.plan, (q, out, lse, cotangent, delta), k, v, ids)
        return None, *(x.to(q.dtype) for x in found), *(None for _ in ids)


def _formula(plan: BlockPlan, q: Tensor, k: Tensor, v: Tensor, ids: Sequence[Tensor]) -> Tensor:
    return _forward(plan._replace(how="gather"), False, q, k, v, ids)[0].to(q.dtype)


def _forward(plan: BlockPlan, kernel: bool, q: Tensor, k: Tensor, v: Tensor, ids: Sequence[Tensor]) -> Tensors:
    """Return out and lse, merged over blocks."""
    results: Tensors = ()
    for source, (keys, values, *key_ids) in plan.blocks(k, v, *ids[1:]):
        if seen := plan.visible(source, q.shape[-2]):
            rows, columns, _ = seen
            ks, vs, mask = keys[..., columns, :], values[..., columns, :], _mask(seen, ids, key_ids)
            found = attend(q[..., rows, :], ks, vs, mask, plan.scale, kernel)
            if results:
                found = merge(*(x[..., rows, :] for x in results), *found)
                found = (torch.cat([x[..., : rows.start, :], y], -2) for x, y in zip(results, found, strict=True))
            results = tuple(found)
    return results


def _rows(plan: BlockPlan, q: Tensor, k: Tensor, v: Tensor, ids: Sequence[Tensor]) -> Tensors:
    """Return out and lse from full rows of scores: ring self-attention."""
    visible = [plan.visible(source, q.shape[-2]) for source in range(plan.n)]
    found = [
        scores(q, keys, _mask(seen, ids, key_ids), plan.scale)
        for source, (keys, *key_ids) in plan.blocks(k, *ids[1:])
        if (seen := visible[source])
    ]
    return weigh(found, [values for source, (values,) in plan.blocks(v) if visible[source]])


def _backward(plan: BlockPlan, saved: Tensors, k: Tensor, v: Tensor, ids: Sequence[Tensor]) -> Tensors:
    """Return the gradients of q, k, v. Those of a block follow it around the ring, to its own device."""
    shards, arriving = plan.n if plan.how == "gather" else 1, None
    dq = torch.zeros_like(widened(saved[0]))
    totals = tuple([widened(x).new_zeros(*x.shape[:2], shards * x.shape[2], x.shape[3]) for x in (k, v)])
    for source, (keys, values, *key_ids) in plan.blocks(k, v, *ids[1:]):
        seen, parts = plan.visible(source, dq.shape[-2]), ()
        if seen:
            rows, columns, _ = seen
            ks, vs, mask = keys[..., columns, :], values[..., columns, :], _mask(seen, ids, key_ids)
            part, *parts = attend_backward([x[..., rows, :] for x in saved], ks, vs, mask, plan.scale)
            dq[..., rows, :] += part
        totals = totals if arriving is None else arriving.wait()
        for total, part in zip(totals, parts, strict=False):
            total.chunk(shards, 2)[source % shards][..., columns, :] += part
        arriving = None if plan.how == "gather" else plan.send_on(totals)
    if arriving is not None:
        totals = arriving.wait()
    elif plan.n > 1:
        totals = psum_scatter(totals, plan.axis, dim=2)
    return dq, *totals


def _mask(seen: Seen, ids: Sequence[Tensor], key_ids: Sequence[Tensor]) -> Tensor | bool:
    """Return the mask of a block; queries see the keys with their own id."""
    rows, columns, causal = seen
    if not ids:
        return causal
    equal = ids[0][..., rows, :] == key_ids[0][..., columns, :].mT
    return equal.tril() if causal else equal
