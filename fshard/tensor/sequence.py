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
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from fshard.mesh.collectives.api import all_gather, all_to_all, axis_index, axis_size, psum, psum_scatter, pvary
from fshard.mesh.layout import Axes, PyTree, flatten_with_paths, unflatten
from fshard.tensor.blocks import widened
from fshard.tensor.ring import BlockPlan, attend_blocks

How = Literal["gather", "ulysses", "ring", "zigzag", "rsa"]

_PADDING = torch.iinfo(torch.int64).min
"""The id of a padding key: no query has it."""


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
    """Attend over a sequence whose tokens are sharded along `axis`: q, k, v and the result are local.

    Args:
        q: (batch, heads, tokens, dim).
        k: (batch, kv heads, tokens, dim); consecutive heads share a kv head.
        v: like k.
        axis: of the mesh.
        how: the algorithm, see above; the results are equal.
        causal: whether a token sees only earlier ones and itself.
        scale: of the scores, by default dim ** -0.5.
        key_mask: (batch, tokens) of bools, False for padding, which no token sees.
        document_ids: (batch, tokens) of integers: a token sees those of its document.

    A token that sees none gets zeros. There are derivatives of any order; for the first only local tensors are saved.
    """
    n, kv_heads = axis_size(axis), k.shape[1]
    _validate(q, k, v, n, how, causal, key_mask, document_ids)
    ids = () if key_mask is None and document_ids is None else _ids(q, k, key_mask, document_ids)
    if how == "ulysses":
        repeats = n // gcd(n, kv_heads)  # the fewest by which n divides the kv heads
        k, v = (x.repeat_interleave(repeats, 1) if repeats > 1 else x for x in (k, v))
        q, k, v = all_to_all((q, k, v), axis, split_dim=1, concat_dim=2)
        ids = all_gather(ids, axis, dim=2) if ids else ids
    blocks: Any = {"rsa": "rows", "gather": "gather", "ulysses": "gather"}.get(how, "ring")
    place = (1, 0) if how == "ulysses" else (n, axis_index(axis))
    plan = BlockPlan(axis, *place, blocks, how == "zigzag", causal, q.shape[-1] ** -0.5 if scale is None else scale)
    out = attend_blocks(plan, q.unflatten(1, (k.shape[1], -1)), k, v, ids).flatten(1, 2)
    return cast("Tensor", all_to_all(out, axis, split_dim=2, concat_dim=1)) if how == "ulysses" else out


def _ids(q: Tensor, k: Tensor, key_mask: Tensor | None, document_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the ids of queries and keys, (batch, 1, tokens, 1): a query sees the keys with its own id."""
    queries, keys = (
        x.new_zeros(x.shape[0], x.shape[2], dtype=torch.int64) if document_ids is None else document_ids.long()
        for x in (q, k)
    )
    keys = keys if key_mask is None else keys.masked_fill(~key_mask, _PADDING)
    return queries[:, None, :, None], keys[:, None, :, None]


def _validate(
    q: Tensor, k: Tensor, v: Tensor, n: int, how: str, causal: bool, key_mask: Tensor | None, ids: Tensor | None
) -> None:
    """Raise one error with all that is wrong."""
    shapes = f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if any(x.ndim != 4 for x in (q, k, v)):
        raise ValueError(f"fs.tensor.attention: q, k and v must be (batch, heads, tokens, dim); {shapes}.")
    (batch, heads, queries, dim), (kv_heads, keys) = q.shape, k.shape[1:3]
    dtypes = q.dtype, k.dtype, v.dtype
    tokens = f"{n} x {queries}: use {_nearest(n * queries, 2 * n)} in all"
    masks = [("key_mask", key_mask, (batch, keys)), ("document_ids", ids, (batch, queries))]
    checks = {
        f"how must be one of {', '.join(get_args(How))}; got {how!r}": how in get_args(How),
        f"k and v must have one shape, and the batch and dim of q; {shapes}": k.shape
        == v.shape
        == (batch, kv_heads, keys, dim),
        f"q, k and v must have one floating dtype; got {dtypes}": len({*dtypes}) == 1 and q.is_floating_point(),
        f"heads must be a multiple of kv heads; got {heads}, {kv_heads}: use {_nearest(heads, kv_heads)}": heads
        % kv_heads
        == 0,
        f"heads must be a multiple of {n} devices; got {heads}: use {_nearest(heads, n)}": how != "ulysses"
        or heads % n == 0,
        f"zigzag tokens must be a multiple of 2 x {n} devices; got {tokens}": how != "zigzag"
        or queries % 2 == keys % 2 == 0,
        f"causal and document_ids need as many queries as keys; got {queries}, {keys}": queries == keys
        or not (causal or ids is not None),
        **{
            f"{name} must be {shape}; got {tuple(x.shape)}": x.shape == shape
            for name, x, shape in masks
            if x is not None
        },
    }
    if wrong := [text for text, is_right in checks.items() if not is_right]:
        raise ValueError(f"fs.tensor.attention: {'; '.join(wrong)}.")


def _nearest(size: int, factor: int) -> str:
    """Return the multiples of a factor around a size."""
    below = size - size % factor
    return f"{below} or {below + factor}" if below else str(factor)


def zigzag(x: Tensor, n: int, dim: int = 1, *, inverse: bool = False) -> Tensor:
    """Reorder tokens so that the shard of device i of n has chunks i and 2n-1-i, of 2n; `inverse` undoes it.

    >>> zigzag(torch.arange(8), 2, dim=0)
    tensor([0, 1, 6, 7, 2, 3, 4, 5])
    """
    size = x.shape[dim]
    if size % (2 * n):
        raise ValueError(
            f"fs.tensor.zigzag: tokens must be a multiple of {2 * n}; got {size}. Use {_nearest(size, 2 * n)}."
        )
    order = torch.tensor([chunk for index in range(n) for chunk in (index, 2 * n - 1 - index)], device=x.device)
    dim %= x.ndim
    return x.unflatten(dim, (2 * n, -1)).index_select(dim, order.argsort() if inverse else order).flatten(dim, dim + 1)


def shard_sequence(tree: PyTree, axis: Axes, *, dim: int = 1, how: How = "ring") -> tuple[PyTree, Tensor]:
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
        wrong = ", ".join(
            f"{path} {size} (use {_nearest(size, factor)})" for path, size in zip(paths, sizes, strict=True)
        )
        raise ValueError(
            f"fs.tensor.shard_sequence: leaves must have equally many tokens, a multiple of {factor}; got {wrong}."
        )
    positions = torch.arange(sizes[0], device=leaves[0].device)
    positions = (zigzag(positions, n, 0) if how == "zigzag" else positions).chunk(n)[index]
    return unflatten(structure, [x.index_select(dim, positions) for x in leaves]), positions


def token_mean(loss: Tensor, mask: Tensor | None, axis: Axes) -> Tensor:
    """Return the mean of a loss per token where the mask is True, over the tokens of all devices; 0 if there are none.

    `axis` includes those of the batch: ("data", "seq").
    """
    mask = torch.ones_like(loss, dtype=torch.bool) if mask is None else mask
    total, count = psum(
        torch.stack([widened(loss).masked_fill(~mask, 0).sum(), widened(mask * loss.new_ones(())).sum()]), axis
    )
    return total / count.clamp(min=1)


def gather_sequence(x: Tensor, axis: Axes, dim: int = 1) -> Tensor:
    """All-gather the tokens that a column-parallel layer needs, along its axis; backward: psum_scatter."""
    return cast("Tensor", all_gather(x, axis, dim=dim))


def scatter_sequence(x: Tensor, axis: Axes, dim: int = 1) -> Tensor:
    """Sum the results of a row-parallel layer, and shard their tokens along its axis; backward: all_gather."""
    return cast("Tensor", psum_scatter(x, axis, dim=dim))
