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
from fshard.tensor.blocks import attend, attend_backward, merge, scores, weigh, widened


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

    def chunks(self, index: int) -> tuple[int, ...]:
        """Return the places of a device's chunks in the sequence."""
        return (index, 2 * self.n - 1 - index) if self.zigzag else (index,)

    def pairs(self, source: int) -> Iterator[tuple[int, int, bool]]:
        """Yield the pairs of own queries and a device's keys that are not masked, and if they are causal."""
        for row, own in enumerate(self.chunks(self.index)):
            for column, other in enumerate(self.chunks(source)):
                if not self.causal or other <= own:
                    yield row, column, self.causal and other == own

    def cut(self, *xs: Tensor) -> list[Tensors]:
        """Return the tensors of each chunk."""
        return list(zip(*(x.chunk(len(self.chunks(0)), -2) for x in xs), strict=True))


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
    rows, results = plan.cut(q, *ids[:1]), dict[int, Tensors]()
    for source, block in plan.blocks(k, v, *ids[1:]):
        columns = plan.cut(*block)
        for row, column, causal in plan.pairs(source):
            (own, *own_ids), (keys, values, *key_ids) = rows[row], columns[column]
            found = attend(own, keys, values, _mask(causal, own_ids, key_ids), plan.scale)
            results[row] = merge(*results[row], *found) if row in results else found
    return tuple([torch.cat(xs, -2) for xs in zip(*(results[row] for row in range(len(rows))), strict=True)])


def _rows(plan: BlockPlan, q: Tensor, k: Tensor, v: Tensor, ids: Tensors) -> Tensors:
    """Return out and lse from full rows of scores: ring self-attention."""
    found = [
        scores(q, keys, _mask(causal, ids[:1], key_ids), plan.scale)
        for source, (keys, *key_ids) in plan.blocks(k, *ids[1:])
        for _, _, causal in plan.pairs(source)
    ]
    return weigh(found, [values for source, (values,) in plan.blocks(v) for _ in plan.pairs(source)])


def _backward(plan: BlockPlan, saved: Tensors, k: Tensor, v: Tensor, ids: Tensors) -> Tensors:
    """Return the gradients of q, k, v. Those of a block follow it around the ring, to its own device."""
    rows, found, sums = plan.cut(*saved, *ids[:1]), dict[int, Tensors](), None
    dq = [torch.zeros_like(widened(q)) for q, *_ in rows]
    for source, block in plan.blocks(k, v, *ids[1:]):
        columns = plan.cut(*block)
        own = [[torch.zeros_like(widened(x)) for x in (keys, values)] for keys, values, *_ in columns]
        for row, column, causal in plan.pairs(source):
            keys, values, *key_ids = columns[column]
            mask = _mask(causal, rows[row][5:], key_ids)
            parts = attend_backward(rows[row][:5], keys, values, mask, plan.scale)
            for total, part in zip((dq[row], *own[column]), parts, strict=True):
                total += part
        ours = tuple([torch.cat(xs, -2) for xs in zip(*own, strict=True)])
        if plan.how == "gather":
            found[source] = ours
            continue
        if sums is not None:
            ours = tuple([x + y for x, y in zip(ours, sums.wait(), strict=True)])
        sums = plan.send_on(ours)
    if sums is not None:
        return torch.cat(dq, -2), *sums.wait()
    full = tuple([torch.cat(xs, -2) for xs in zip(*(found[source] for source in range(plan.n)), strict=True)])
    return torch.cat(dq, -2), *(full if plan.n == 1 else psum_scatter(full, plan.axis, dim=2))


def _formula(plan: BlockPlan, q: Tensor, k: Tensor, v: Tensor, ids: Tensors) -> Tensor:
    """Return the same from gathered keys: the same operations on every device, differentiable at any order."""
    k, v, *key_ids = plan.gathered((k, v, *ids[1:]))
    mask = _mask(False, ids[:1], key_ids)
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


def _mask(causal: bool, ids: Any, key_ids: Any) -> Tensor | bool:
    """Return the mask of a block; queries see the keys with their own id."""
    if not ids:
        return causal
    seen = ids[0] == key_ids[0].mT
    return seen.tril() if causal else seen
