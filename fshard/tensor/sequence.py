"""Sequences sharded over a mesh axis: attention, the order of tokens, means over tokens, Megatron's two collectives.

`shard_sequence` shards the tokens at the model's entry. All layers but attention then work on local tokens, and
`token_mean` divides the loss by the global number of tokens.

    how         communication of attention
    "gather"    all_gather of k and v, again in the backward
    "ulysses"   all_to_all: from tokens to heads before attention, back after it
    "ring"      k and v around the ring
    "zigzag"    the same; tokens are in the order of `zigzag`, so that causal attention costs each device equally much
    "rsa"       ring self-attention: k around the ring, one softmax over full rows of scores, v around the ring
"""

from __future__ import annotations

from math import gcd
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from fshard.mesh.collectives.api import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    psum,
    psum_scatter,
    pvary,
)
from fshard.mesh.layout import Axes, PyTree, flatten_with_paths, unflatten
from fshard.tensor.ring import BlockPlan, attend_blocks

How = Literal["gather", "ulysses", "ring", "zigzag", "rsa"]

_HIDDEN = torch.iinfo(torch.int64).min
"""The id of a padding key, which no query has."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: Axes,
    how: How = "ring",
    *,
    causal: bool = False,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
) -> Tensor:
    """Attend over a sequence that is sharded along `axis`; all tensors are local.

    Args:
        q: (batch, heads, tokens / n, dim).
        k: (batch, kv heads, tokens / n, dim); each kv head serves heads / kv heads consecutive heads.
        v: like k.
        axis: the mesh axis of the tokens.
        how: the algorithm, see the module. All give equal results.
        causal: True hides later tokens.
        scale: of the scores; dim ** -0.5 by default.
        key_mask: bool (batch, tokens / n), False at padding, which no query sees.
        document_ids: integers (batch, tokens / n): tokens see those of their own document only.

    A row that sees no key is 0. Derivatives of any order are defined; nothing of other devices is saved for them, except
    under torch.func and in forward mode.
    """
    n = axis_size(axis)
    _validate(q, k, v, n, how, causal, key_mask, document_ids)
    ids = _ids(q, k, key_mask, document_ids)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if how == "ulysses":
        plan = BlockPlan(axis, 1, 0, "gather", False, causal, scale)
        return _by_heads(plan, q, k, v, ids, n)
    blocks: Any = {"gather": "gather", "rsa": "rows"}.get(how, "ring")
    plan = BlockPlan(axis, n, axis_index(axis), blocks, how == "zigzag", causal, scale)
    return _grouped(plan, q, k, v, ids)


def _by_heads(plan: BlockPlan, q: Tensor, k: Tensor, v: Tensor, ids: tuple[Tensor, ...], n: int) -> Tensor:
    """Attend on all tokens of some heads. kv heads are repeated until n divides their number."""
    repeats = n // gcd(n, k.shape[1])
    if repeats > 1:
        k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
    q, k, v = all_to_all((q, k, v), plan.axis, split_dim=1, concat_dim=2)
    ids = all_gather(ids, plan.axis, dim=2) if ids else ids
    return cast("Tensor", all_to_all(_grouped(plan, q, k, v, ids), plan.axis, split_dim=2, concat_dim=1))


def _grouped(plan: BlockPlan, q: Tensor, k: Tensor, v: Tensor, ids: tuple[Tensor, ...]) -> Tensor:
    heads = k.shape[1]
    return attend_blocks(plan, q.unflatten(1, (heads, q.shape[1] // heads)), k, v, ids).flatten(1, 2)


def _ids(q: Tensor, k: Tensor, key_mask: Tensor | None, document_ids: Tensor | None) -> tuple[Tensor, ...]:
    """Return the ids of queries and keys, (batch, 1, tokens, 1): a query sees the keys with its own id."""
    if key_mask is None and document_ids is None:
        return ()
    batch, _, queries, _ = q.shape
    own = q.new_zeros(batch, queries, dtype=torch.int64) if document_ids is None else document_ids.to(torch.int64)
    keys = k.new_zeros(batch, k.shape[2], dtype=torch.int64) if document_ids is None else own
    keys = keys if key_mask is None else keys.masked_fill(~key_mask, _HIDDEN)
    return own[:, None, :, None], keys[:, None, :, None]


def _validate(
    q: Tensor, k: Tensor, v: Tensor, n: int, how: str, causal: bool, key_mask: Tensor | None, ids: Tensor | None
) -> None:
    """Raise one error with all that is wrong."""
    if how not in get_args(How):
        raise ValueError(f"fs.tensor.attention: how must be one of {', '.join(get_args(How))}; got {how!r}.")
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if any(x.ndim != 4 for x in (q, k, v)):
        raise ValueError(f"fs.tensor.attention: q, k and v must be (batch, heads, tokens, dim); got {shapes}.")
    (batch, heads, queries, _), (kv_heads, keys) = q.shape, k.shape[1:3]
    wrong: list[str] = []
    if k.shape != v.shape or (batch, q.shape[3]) != (k.shape[0], k.shape[3]):
        wrong.append(f"batch and dim must be equal, and k and v of one shape; got {shapes}")
    if len({x.dtype for x in (q, k, v)}) > 1 or not q.is_floating_point():
        wrong.append(f"q, k and v must have one floating dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
    if heads % kv_heads:
        wrong.append(f"heads must be a multiple of kv heads; got {heads} and {kv_heads}: use {nearest(heads, kv_heads)}")
    if how == "ulysses" and heads % n:
        wrong.append(f"heads must be a multiple of the {n} devices; got {heads}: use {nearest(heads, n)}, or another how")
    if how == "zigzag" and (queries % 2 or keys % 2):
        used = f"{nearest(n * queries, 2 * n)} tokens in all"
        wrong.append(f"zigzag tokens must be a multiple of 2 x {n} devices; got {n} x {queries}: use {used}")
    if (causal or ids is not None) and queries != keys:
        wrong.append(f"causal and document_ids need as many queries as keys; got {queries} and {keys}")
    for name, mask, tokens in (("key_mask", key_mask, keys), ("document_ids", ids, queries)):
        if mask is not None and tuple(mask.shape) != (batch, tokens):
            wrong.append(f"{name} must have shape {(batch, tokens)}; got {tuple(mask.shape)}")
    if key_mask is not None and key_mask.dtype != torch.bool:
        wrong.append(f"key_mask must be bool; got {key_mask.dtype}")
    if ids is not None and (ids.is_floating_point() or ids.dtype == torch.bool):
        wrong.append(f"document_ids must be integers; got {ids.dtype}")
    if wrong:
        raise ValueError("fs.tensor.attention: " + "; ".join(wrong) + ".")


def nearest(size: int, factor: int) -> str:
    """Return the nearest legal sizes: the multiples of a factor around a size."""
    below = size - size % factor
    return f"{below} or {below + factor}" if below else str(factor)


# -- the order of tokens --------------------------------------------------------------------------------------------


def zigzag(x: Tensor, n: int, dim: int = 1, *, inverse: bool = False) -> Tensor:
    """Reorder tokens so that the shard of device i of n has chunks i and 2n-1-i, of 2n; `inverse` undoes it.

    >>> zigzag(torch.arange(8), 2, dim=0)
    tensor([0, 1, 6, 7, 2, 3, 4, 5])
    """
    if x.shape[dim] % (2 * n):
        given = f"got {x.shape[dim]}. Use {nearest(x.shape[dim], 2 * n)}"
        raise ValueError(f"fs.tensor.zigzag: tokens must be a multiple of 2 x {n} devices; {given}.")
    order = torch.tensor([chunk for index in range(n) for chunk in (index, 2 * n - 1 - index)], device=x.device)
    dim %= x.ndim
    order = order.argsort() if inverse else order
    return x.unflatten(dim, (2 * n, -1)).index_select(dim, order).flatten(dim, dim + 1)


def shard_sequence(tree: PyTree, axis: Axes, *, dim: int = 1, how: How = "ring") -> tuple[PyTree, Tensor]:
    """Return the local tokens of a replicated batch, and their global positions.

    Args:
        tree: tensors with all tokens along `dim`, such as inputs, labels and masks.
        axis: the mesh axis to shard tokens along.
        dim: the dim of tokens.
        how: of `attention`; for "zigzag" tokens are in that order.

    >>> import torch, fshard as fs
    >>> shard = lambda: fs.tensor.shard_sequence(torch.arange(10, 18)[None], "seq", how="zigzag")
    >>> fs.run(shard, mesh=fs.make_mesh({"seq": 2}))[1]
    (tensor([[12, 13, 14, 15]]), tensor([2, 3, 4, 5]))
    """
    n, index = axis_size(axis), axis_index(axis)
    paths, leaves, structure = flatten_with_paths(pvary(tree, axis))
    factor = 2 * n if how == "zigzag" else n
    sizes = {path: leaf.shape[dim] for path, leaf in zip(paths, leaves, strict=True)}
    if len({*sizes.values()}) != 1 or any(size % factor for size in sizes.values()):
        shown = ", ".join(f"{path} {size} (use {nearest(size, factor)})" for path, size in sizes.items())
        raise ValueError(f"fs.tensor.shard_sequence: all leaves must have tokens, a multiple of {factor}; got {shown}.")
    positions = torch.arange(next(iter(sizes.values())), device=leaves[0].device)
    positions = (zigzag(positions, n, 0) if how == "zigzag" else positions).chunk(n)[index]
    return unflatten(structure, [leaf.index_select(dim, positions) for leaf in leaves]), positions


# -- losses, and sequences that are sharded between layers ----------------------------------------------------------


def token_mean(loss: Tensor, mask: Tensor | None, axis: Axes) -> Tensor:
    """Return the mean of a loss over the tokens of all devices along `axis` for which the mask is True; 0 if none is.

    Name the axes of the batch too: ("data", "seq"). A mean of the devices' means is wrong where their counts differ.
    """
    wide = torch.promote_types(loss.dtype, torch.float32)
    mask = torch.ones_like(loss, dtype=torch.bool) if mask is None else mask
    sums = torch.stack([loss.to(wide).masked_fill(~mask, 0).sum(), mask.sum().to(wide)])
    total, count = psum(sums, axis)
    return total / count.clamp(min=1)


def gather_sequence(x: Tensor, axis: Axes, dim: int = 1) -> Tensor:
    """All-gather the tokens before a column-parallel layer; backward: psum_scatter. Along the layer's own axis."""
    return cast("Tensor", all_gather(x, axis, dim=dim))


def scatter_sequence(x: Tensor, axis: Axes, dim: int = 1) -> Tensor:
    """Sum the results of a row-parallel layer and shard their tokens: psum_scatter; backward: all_gather."""
    return cast("Tensor", psum_scatter(x, axis, dim=dim))
