"""Sequences whose tokens are sharded over a mesh axis.

`shard_sequence` shards them at the model's entry, `attention` communicates, other layers need nothing, and `token_mean`
divides the loss by the global number of tokens.

    how         communication of attention
    "gather"    all_gather of k and v, again in the backward
    "ulysses"   all_to_all: from tokens to heads before it, back after it
    "ring"      k and v around the ring
    "zigzag"    the same for tokens in the order of `zigzag`: causal attention then costs each device equally much
    "rsa"       ring self-attention: k around the ring, a softmax over full rows of scores, v around the ring
"""

from __future__ import annotations

from math import gcd
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from fshard.mesh.collectives.api import all_gather, all_to_all, axis_index, axis_size, psum, pvary
from fshard.mesh.layout import Axes, PyTree, flatten_with_paths, unflatten
from fshard.mesh.layout.arithmetic import zigzag
from fshard.mesh.spmd.scope import require
from fshard.source import call_site
from fshard.tensor.blocks import BlockPlan, attend_blocks

Algorithm = Literal["gather", "ulysses", "ring", "zigzag", "rsa"]

_PADDING = torch.iinfo(torch.int64).min
"""The id of a padding key: no query has it."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: Axes,
    how: Algorithm = "ring",
    *,
    causal: bool = False,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
) -> Tensor:
    """Attend over a sequence whose tokens are sharded along `axis`; all tensors are local.

    q is (batch, heads, tokens, dim); k and v have as many heads, or fewer that consecutive heads share. `causal`: a
    token sees only earlier ones and itself. `key_mask` (batch, tokens) is False for padding, which no token sees; with
    `document_ids` (batch, tokens) a token sees those of its document. A token that sees none gets zeros. `scale` is dim
    ** -0.5 by default, `how` the algorithm: results are equal. There are derivatives of any order; for the first only
    local tensors are saved.
    """
    group = require("fs.tensor.attention").called_group(axis, "fs.tensor.attention")
    n, index = group.size, group.index
    _validate(q, k, v, n, how, causal, key_mask, document_ids)
    ids = _ids(q, k, key_mask, document_ids)
    if how == "ulysses":
        repeats = n // gcd(n, k.shape[1])  # the fewest by which n divides the kv heads
        k, v = (x.repeat_interleave(repeats, 1) if repeats > 1 else x for x in (k, v))
        q, k, v = all_to_all((q, k, v), axis, split_dim=1, concat_dim=2)
        ids, n, index = all_gather(ids, axis, dim=2) if ids else (), 1, 0
    transport = {"ulysses": "gather", "zigzag": "ring"}.get(how, how)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    plan = BlockPlan(group, call_site(), n, index, transport, how == "zigzag", causal, factor)
    out = attend_blocks(plan, q.unflatten(1, (k.shape[1], -1)), k, v, ids).flatten(1, 2)
    return (
        cast("Tensor", all_to_all(out, axis, split_dim=2, concat_dim=1))
        if how == "ulysses"
        else out
    )


def _ids(
    q: Tensor, k: Tensor, key_mask: Tensor | None, document_ids: Tensor | None
) -> tuple[Tensor, ...]:
    """Return none, or the ids of queries and keys, (batch, 1, tokens, 1): a query sees the keys with its own id."""
    if key_mask is None and document_ids is None:
        return ()
    zeros = (
        torch.zeros(x.shape[0], x.shape[2], dtype=torch.int64, device=x.device) for x in (q, k)
    )
    queries, keys = zeros if document_ids is None else (document_ids.long(),) * 2
    keys = keys if key_mask is None else keys.masked_fill(~key_mask, _PADDING)
    return queries[:, None, :, None], keys[:, None, :, None]


def _validate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    n: int,
    algorithm: str,
    causal: bool,
    key_mask: Tensor | None,
    ids: Tensor | None,
) -> None:
    """Raise one error with all that is wrong."""
    if any(x.ndim != 4 for x in (q, k, v)):
        raise ValueError(
            f"fs.tensor.attention: q, k, v must have 4 dims; got {q.ndim}, {k.ndim}, {v.ndim}."
        )
    (batch, heads, queries, dim), (kv_heads, keys) = q.shape, k.shape[1:3]
    shape, dtypes = (batch, kv_heads, keys, dim), {q.dtype, k.dtype, v.dtype}
    errors = [f"how must be one of {get_args(Algorithm)}; got {algorithm!r}"] * (
        algorithm not in get_args(Algorithm)
    )
    for name, x, right in (
        ("k", k, shape), ("v", v, shape), ("key_mask", key_mask, (batch, keys)), ("document_ids", ids, (batch, queries))
    ):  # fmt: skip
        errors += [
            f"{name} must be {right}; got {tuple(x.shape)}"
            for x in (x,)
            if x is not None and x.shape != right
        ]
    if len(dtypes) > 1 or not q.is_floating_point():
        errors += [f"q, k, v must have one floating dtype; got {dtypes}"]
    if queries != keys and (causal or ids is not None):
        errors += [
            f"causal and document_ids need as many queries as keys; got {queries} and {keys}"
        ]
    if heads % kv_heads:
        errors += [
            f"heads must be a multiple of kv heads; got {heads} and {kv_heads}. Use {_nearest(heads, kv_heads)}"
        ]
    if algorithm == "ulysses" and heads % n:
        errors += [
            f"heads must be a multiple of {n} devices; got {heads}. Use {_nearest(heads, n)}"
        ]
    if algorithm == "zigzag" and (queries % 2 or keys % 2):
        errors += [
            f"tokens must be a multiple of {2 * n}; got {n} x {queries}. Use {_nearest(n * queries, 2 * n)}"
        ]
    if errors:
        raise ValueError(f"fs.tensor.attention: {'; '.join(errors)}.")


def _nearest(size: int, factor: int) -> str:
    """Return the multiples of a factor around a size."""
    lower = size - size % factor
    return f"{lower} or {lower + factor}" if lower else str(factor)


def shard_sequence(
    tree: PyTree, axis: Axes, *, dim: int = 1, how: Algorithm = "ring"
) -> tuple[PyTree, Tensor]:
    """Return the device's tokens of a replicated tree, such as inputs, labels and masks, and their global positions.

    >>> import torch, fshard as fs
    >>> shard = lambda: fs.tensor.shard_sequence(torch.arange(10, 18), "seq", dim=0, how="zigzag")
    >>> fs.run(shard, mesh=fs.make_mesh({"seq": 2}))[1]
    (tensor([12, 13, 14, 15]), tensor([2, 3, 4, 5]))
    """
    n, index = axis_size(axis), axis_index(axis)
    paths, leaves, structure = flatten_with_paths(pvary(tree, axis))
    sizes, factor = [x.shape[dim] for x in leaves], 2 * n if how == "zigzag" else n
    if len({*sizes}) != 1 or sizes[0] % factor:
        lengths = ", ".join(
            f"{path} {size} (use {_nearest(size, factor)})"
            for path, size in zip(paths, sizes, strict=True)
        )
        raise ValueError(
            f"fs.tensor.shard_sequence: leaves must have equally many tokens, a multiple of {factor}; got {lengths}."
        )
    positions = torch.arange(sizes[0], device=leaves[0].device)
    positions = (zigzag(positions, n, 0) if how == "zigzag" else positions).chunk(n)[index]
    return unflatten(structure, [x.index_select(dim, positions) for x in leaves]), positions


def token_mean(loss: Tensor, mask: Tensor | None, axis: Axes) -> Tensor:
    """Return the mean of a loss per token where the mask is True, over the tokens of all devices; 0 if there are none.

    `axis` includes those of the batch: ("data", "seq").
    """
    mask = torch.ones_like(loss, dtype=torch.bool) if mask is None else mask
    masked = loss.to(torch.promote_types(loss.dtype, torch.float32)).masked_fill(~mask, 0)
    total, count = psum(torch.stack([masked.sum(), mask.sum().to(masked.dtype)]), axis)
    return total / count.clamp(min=1)
