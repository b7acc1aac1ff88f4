"""Attention to keys that are sharded over devices, block by block.

    device 0   q0: k0 k2 k1      ring     a block is sent to the next device while it is used
    device 1   q1: k1 k0 k2      gather   all blocks are gathered first
    device 2   q2: k2 k1 k0      rsa      keys around the ring, one softmax over a row of scores, then values

The backward receives the blocks again: only tensors of the device are saved, 1/n of the serial run's. Higher derivatives,
torch.func and forward mode differentiate the formula on gathered blocks, with one collective that no device skips.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from fshard.mesh.collectives.autograd import Bound, Tensors, apply, has_tangent, transformed
from fshard.mesh.collectives.moves import AllGather, Move, Permute, PsumScatter, serving
from fshard.mesh.spmd.scope import Group, Pending
from fshard.source import Site
from fshard.tensor.blocks import attend, attend_backward, merge, scores, weigh, widened


@dataclass(frozen=True)
class BlockPlan:
    """How the device at `index` of `n` receives blocks of keys, and which it uses."""

    group: Group
    site: Site
    n: int
    index: int
    how: str
    zigzag: bool
    causal: bool
    scale: float

    def bound(self, move: Move) -> Bound:
        """Return a move along the ring. A backward may run outside the scope, so it names no axis."""
        return Bound(move, self.group, self.site)

    def send_on(self, xs: Tensors) -> list[Pending]:
        """Start to send tensors to the next device."""
        move = Permute(tuple([(index, (index + 1) % self.n) for index in range(self.n)]))
        return [self.bound(move).start((x,)) for x in xs]

    def received(self, xs: Tensors) -> Iterator[tuple[int, Tensors]]:
        """Yield the tensors of each device, sharded along dim 2, with its index; the own ones first."""
        order = [(self.index - step) % self.n for step in range(self.n)]
        if self.how == "gather":
            full = [x if self.n == 1 else apply(self.bound(AllGather(2)), (x,))[0] for x in xs]
            yield from ((source, tuple([x.chunk(self.n, 2)[source] for x in full])) for source in order)
            return
        for source in order:
            following = [] if source == order[-1] else self.send_on(xs)
            yield source, xs
            xs = tuple([one.wait()[0] for one in following])

    def blocks(self, ids: Tensors, *xs: Tensor) -> Iterator[tuple[int, slice | None, Tensor | bool, Tensors]]:
        """Yield for each device the own queries that see its keys, the mask (see `blocks`), and xs of the keys seen.

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
    """Return the attention of the local queries to the keys of all devices; shapes as in `blocks`.

    `ids` is empty, or of queries and keys, (batch, 1, tokens, 1): a query sees the keys with its own id.
    """
    if transformed() or has_tangent((q, k, v)):
        return _formula(plan, q, k, v, ids)
    return _BlockAttention.apply(plan, q, k, v, *ids)


class _BlockAttention(Function):
    @staticmethod
    def forward(ctx: Any, plan: BlockPlan, q: Tensor, k: Tensor, v: Tensor, *ids: Tensor) -> Tensor:
        out, lse = _rows(plan, q, k, v, ids) if plan.how == "rsa" else _forward(plan, True, q, k, v, ids)
        out, ctx.plan = out.to(q.dtype), plan
        ctx.save_for_backward(q, k, v, out, lse, *ids)
        return out

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (cotangent,) = cotangents
        q, k, v, out, lse, *ids = ctx.saved_tensors
        with serving("cotangents"):
            if torch.is_grad_enabled():  # a second derivative follows
                xs = [x.view_as(x) for x in (q, k, v)]  # k may depend on q; this derivative is partial
                used = [x for x in xs if x.requires_grad]
                found = iter(
                    torch.autograd.grad(_formula(ctx.plan, *xs, tuple(ids)), used, cotangent, create_graph=True)
                )
                return None, *(next(found) if x.requires_grad else None for x in xs), *(None for _ in ids)
            delta = (widened(cotangent) * out).sum(-1, keepdim=True)
            found = _backward(ctx.plan, (q, out, lse, cotangent, delta), k, v, tuple(ids))
        return None, *(x.to(q.dtype) for x in found), *(None for _ in ids)


def _formula(plan: BlockPlan, q: Tensor, k: Tensor, v: Tensor, ids: Tensors) -> Tensor:
    return _forward(replace(plan, how="gather"), False, q, k, v, ids)[0].to(q.dtype)


def _forward(plan: BlockPlan, kernel: bool, q: Tensor, k: Tensor, v: Tensor, ids: Tensors) -> Tensors:
    """Return out and lse, merged over blocks."""
    results: Tensors = ()
    for _, rows, mask, (keys, values) in plan.blocks(ids, k, v):
        if rows is None:
            continue
        found = attend(q[..., rows, :], keys, values, mask, plan.scale, kernel)
        if results:
            out, lse = results
            merged = merge(out[..., rows, :], lse[..., rows, :], *found)
            found = [torch.cat([x[..., : rows.start, :], y], -2) for x, y in zip(results, merged, strict=True)]
        results = tuple(found)
    return results


def _rows(plan: BlockPlan, q: Tensor, k: Tensor, v: Tensor, ids: Tensors) -> Tensors:
    """Return out and lse from full rows of scores: ring self-attention."""
    found = [scores(q, keys, mask, plan.scale) for _, rows, mask, (keys,) in plan.blocks(ids, k) if rows]
    return weigh(found, [values for _, rows, _, (values,) in plan.blocks((), v) if rows])


def _backward(plan: BlockPlan, saved: Tensors, k: Tensor, v: Tensor, ids: Tensors) -> Tensors:
    """Return the gradients of q, k, v. Those of a block follow it around the ring, to its own device."""
    shards, arriving = plan.n if plan.how == "gather" else 1, list[Pending]()
    dq = torch.zeros_like(widened(saved[0]))
    totals = tuple([widened(x).new_zeros(*x.shape[:2], shards * x.shape[2], x.shape[3]) for x in (k, v)])
    for source, rows, mask, (keys, values) in plan.blocks(ids, k, v):
        parts: Tensors = ()
        if rows is not None:
            part, *parts = attend_backward([x[..., rows, :] for x in saved], keys, values, mask, plan.scale)
            dq[..., rows, :] += part
        totals = tuple([one.wait()[0] for one in arriving]) or totals
        for total, part in zip(totals, parts, strict=False):
            total.chunk(shards, 2)[source % shards][..., : part.shape[-2], :] += part
        arriving = [] if plan.how == "gather" else plan.send_on(totals)
    if arriving or plan.n == 1:
        return dq, *(tuple([one.wait()[0] for one in arriving]) or totals)
    return dq, *(plan.bound(PsumScatter(2)).run((total,))[0] for total in totals)
