"""Attention to keys that are sharded over devices, block by block.

    device 0   q0: k0 k2 k1      ring     a block is sent to the next device while it is used
    device 1   q1: k1 k0 k2      gather   all blocks are gathered first
    device 2   q2: k2 k1 k0      rows     keys around the ring, one softmax over a row of scores, values around the ring

The backward receives the blocks again: q, k, v, out and lse of the device are saved, 1/n of the serial run's. Higher
derivatives, torch.func and forward mode use one formula on gathered keys instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function

from fshard.mesh.collectives.api import all_gather, ppermute, psum_scatter
from fshard.mesh.collectives.autograd import Tensors, has_tangent, transformed
from fshard.mesh.collectives.moves import serving
from fshard.mesh.layout import Axes
from fshard.tensor.blocks import attend, attend_backward, merge_, scores, weigh, widened


class BlockPlan(NamedTuple):
    """How the device at `index` of `n` receives blocks of keys, and which of their chunks it uses."""

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

    def blocks(self, *xs: Tensor) -> Iterator[tuple[int, Tensors]]:
        """Yield the tensors of each device, sharded along dim 2, with its index; the own ones first."""
        order = [(self.index - step) % self.n for step in range(self.n)]
        if self.how == "gather":
            shards = [x.chunk(self.n, 2) for x in self.gathered(xs)]
            yield from ((source, tuple([shard[source] for shard in shards])) for source in order)
            return
        for source in order:
            following = self.send_on(xs) if source != order[-1] else None
            yield source, xs
            xs = xs if following is None else following.wait()

    def gathered(self, xs: Tensors) -> Tensors:
        """Return the tensors of all devices, in the order of devices."""
        return xs if self.n == 1 else all_gather(xs, self.axis, dim=2)

    def visible(self, source: int, tokens: int) -> tuple[slice, slice, bool] | None:
        """Return the queries that see keys of a device, those keys, and if they see them causally; None: no query does.

        In zigzag order device i has chunks i and 2n-1-i: all queries see the first chunk of an earlier device, and only
        those of the second chunk see a later device.
        """
        every, half = slice(None), tokens // 2
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
    """Attention that saves no block of another device."""

    @staticmethod
    def forward(ctx: Any, plan: BlockPlan, q: Tensor, k: Tensor, v: Tensor, *ids: Tensor) -> Tensor:
        out, lse = (_rows if plan.how == "rows" else _forward)(plan, q, k, v, ids)
        out, ctx.plan = out.to(q.dtype), plan
        ctx.save_for_backward(q, k, v, out, lse, *ids)
        return out

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *ids = ctx.saved_tensors
        with serving("cotangents"):
            if torch.is_grad_enabled():  # a graph of the gradient is wanted
                copies = [x.view_as(x) for x in (q, k, v)]  # the gradient of k is not to include a path from q to k
                needed = [x for x in copies if x.requires_grad]
                found = iter(torch.autograd.grad(_formula(ctx.plan, *copies, tuple(ids)), needed, cotangent, create_graph=True))
                return None, *(next(found) if x.requires_grad else None for x in copies), *(None for _ in ids)
            delta = (widened(cotangent) * out).sum(-1, keepdim=True)
            found = _backward(ctx.plan, (q, out, lse, cotangent, delta), k, v, tuple(ids))
        return None, *(x.to(q.dtype) for x in found), *(None for _ in ids)


def _forward(plan: BlockPlan, q: Tensor, k: Tensor, v: Tensor, ids: Tensors) -> Tensors:
    """Return out and lse, merged over blocks."""
    results: Tensors = ()
    for source, (keys, values, *key_ids) in plan.blocks(k, v, *ids[1:]):
        if seen := plan.visible(source, q.shape[-2]):
            rows, columns, _ = seen
            mask = _mask(seen, ids, key_ids)
            found = attend(q[..., rows, :], keys[..., columns, :], values[..., columns, :], mask, plan.scale)
            if results:
                merge_(*(x[..., rows, :] for x in results), *found)
            results = results or found
    return results


def _rows(plan: BlockPlan, q: Tensor, k: Tensor, v: Tensor, ids: Tensors) -> Tensors:
    """Return out and lse from full rows of scores: ring self-attention."""
    visible = [plan.visible(source, q.shape[-2]) for source in range(plan.n)]
    found = [
        scores(q, keys, _mask(seen, ids, key_ids), plan.scale)
        for source, (keys, *key_ids) in plan.blocks(k, *ids[1:])
        if (seen := visible[source])
    ]
    return weigh(found, [values for source, (values,) in plan.blocks(v) if visible[source]])


def _backward(plan: BlockPlan, saved: Tensors, k: Tensor, v: Tensor, ids: Tensors) -> Tensors:
    """Return the gradients of q, k, v. Those of a block follow it around the ring, to its own device."""
    shards, arriving = plan.n if plan.how == "gather" else 1, None
    dq, *totals = (torch.zeros_like(widened(x)) for x in (saved[0], k, v))
    totals = tuple(x.repeat(1, 1, shards, 1) for x in totals)
    for source, (keys, values, *key_ids) in plan.blocks(k, v, *ids[1:]):
        seen, parts = plan.visible(source, dq.shape[-2]), ()
        if seen:
            rows, columns, _ = seen
            mask, queries = _mask(seen, ids, key_ids), [x[..., rows, :] for x in saved]
            part, *parts = attend_backward(queries, keys[..., columns, :], values[..., columns, :], mask, plan.scale)
            dq[..., rows, :] += part
        totals = totals if arriving is None else arriving.wait()
        for total, part in zip(totals, parts, strict=False):
            total.chunk(shards, 2)[source % shards][..., seen[1], :] += part
        arriving = None if plan.how == "gather" else plan.send_on(totals)
    if arriving is not None:
        return dq, *arriving.wait()
    return dq, *(totals if plan.n == 1 else psum_scatter(totals, plan.axis, dim=2))


def _formula(plan: BlockPlan, q: Tensor, k: Tensor, v: Tensor, ids: Tensors) -> Tensor:
    """Return the same from gathered keys: the same operations on every device, differentiable at any order."""
    k, v, *key_ids = plan.gathered((k, v, *ids[1:]))
    mask = _mask((slice(None), slice(None), False), ids, key_ids)
    if plan.causal:
        every = positions(plan.n, k.shape[2], plan.zigzag, q.device)
        own = every.chunk(plan.n)[plan.index]
        mask = (own[:, None] >= every)[None, None] & torch.as_tensor(True if mask is False else mask, device=q.device)
    return weigh([scores(q, k, mask, plan.scale)], [v])[0].to(q.dtype)


def positions(n: int, tokens: int, zigzag: bool, device: torch.device) -> Tensor:
    """Return the positions of all tokens, in the order in which n devices have them."""
    order = torch.arange(tokens, device=device)
    if not zigzag:
        return order
    chunks = order.chunk(2 * n)
    return torch.cat([chunks[place] for index in range(n) for place in (index, 2 * n - 1 - index)])


def _mask(seen: tuple[slice, slice, bool], ids: Any, key_ids: Any) -> Tensor | bool:
    """Return the mask of a block; queries see the keys with their own id."""
    rows, columns, causal = seen
    if not ids:
        return causal
    equal = ids[0][..., rows, :] == key_ids[0][..., columns, :].mT
    return equal.tril() if causal else equal
