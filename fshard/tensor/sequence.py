"""Sequences whose tokens are sharded over a mesh axis.

`shard_sequence` shards them at the model's entry, `attention` communicates, other layers need
nothing, and `token_mean` divides the loss by the global number of tokens.

    how         communication of attention
    "gather"    all_gather of k and v, again in the backward
    "ulysses"   all_to_all: from tokens to heads before it, back after it
    "ring"      k and v around the ring
    "zigzag"    the same for tokens in the order of `zigzag`, where causal attention costs each
                device equally much
    "rsa"       ring self-attention: k around the ring, a softmax over full rows of scores,
                v around the ring
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

_CALLER = "fs.tensor.attention"
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

    There are derivatives of any order; for the first only local tensors are saved. A token that
    sees none gets zeros.

    Args:
        q: (batch, heads, tokens, dim).
        k: the same, or with fewer heads, each of which several consecutive heads of q share.
        v: has as many heads as k.
        axis: shards the tokens.
        how: the algorithm. Results are equal.
        causal: a token sees only earlier ones and itself.
        scale: of scores; dim ** -0.5 by default.
        key_mask: (batch, tokens), False for padding, which no token sees.
        document_ids: (batch, tokens). A token sees those of its document.
    """
    group = require(_CALLER).called_group(axis, _CALLER)
    n = group.size
    index = group.index
    _validate(q, k, v, n, how, causal, key_mask, document_ids)
    ids = _ids(q, k, key_mask, document_ids)
    factor = q.shape[-1] ** -0.5 if scale is None else scale

    if how == "ulysses":
        repeats = n // gcd(n, k.shape[1])  # the fewest by which n divides the kv heads
        if repeats > 1:
            k = k.repeat_interleave(repeats, 1)
            v = v.repeat_interleave(repeats, 1)
        q, k, v = all_to_all((q, k, v), axis, split_dim=1, concat_dim=2)
        if ids:
            ids = all_gather(ids, axis, dim=2)
        # The device has all tokens of its heads: a block that no other device has a share of.
        n = 1
        index = 0

    is_zigzag = how == "zigzag"
    if is_zigzag:
        algorithm = "ring"
    elif how == "ulysses":
        algorithm = "gather"
    else:
        algorithm = how
    plan = BlockPlan(group, call_site(), n, index, algorithm, is_zigzag, causal, factor)
    q = q.unflatten(1, (k.shape[1], -1))
    out = attend_blocks(plan, q, k, v, ids).flatten(1, 2)
    if how == "ulysses":
        out = cast("Tensor", all_to_all(out, axis, split_dim=2, concat_dim=1))
    return out


def _ids(
    q: Tensor, k: Tensor, key_mask: Tensor | None, document_ids: Tensor | None
) -> tuple[Tensor, ...]:
    """Return the ids of queries and of keys, (batch, 1, tokens, 1); or () if there is no mask.

    A query sees the keys with its own id: of its document, or 0 without documents.
    """
    if key_mask is None and document_ids is None:
        return ()
    if document_ids is None:
        queries = torch.zeros(q.shape[0], q.shape[2], dtype=torch.int64, device=q.device)
        keys = torch.zeros(k.shape[0], k.shape[2], dtype=torch.int64, device=k.device)
    else:
        queries = document_ids.long()
        keys = queries
    if key_mask is not None:
        keys = keys.masked_fill(~key_mask, _PADDING)
    return queries[:, None, :, None], keys[:, None, :, None]


def _validate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    n: int,
    algorithm: str,
    causal: bool,
    key_mask: Tensor | None,
    document_ids: Tensor | None,
) -> None:
    """Raise one error with all arguments that are wrong."""
    if not (q.ndim == k.ndim == v.ndim == 4):
        raise ValueError(f"{_CALLER}: q, k, v must have 4 dims; got {q.ndim}, {k.ndim}, {v.ndim}.")
    batch, heads, queries, dim = q.shape
    kv_heads, keys = k.shape[1:3]

    errors: list[str] = []
    algorithms = get_args(Algorithm)
    if algorithm not in algorithms:
        errors.append(f"how must be one of {algorithms}; got {algorithm!r}")

    kv_shape = (batch, kv_heads, keys, dim)
    expected_shapes = [
        ("k", k, kv_shape),
        ("v", v, kv_shape),
        ("key_mask", key_mask, (batch, keys)),
        ("document_ids", document_ids, (batch, queries)),
    ]
    for name, x, shape in expected_shapes:
        if x is not None and x.shape != shape:
            errors.append(f"{name} must be {shape}; got {tuple(x.shape)}")

    dtypes = {q.dtype, k.dtype, v.dtype}
    if len(dtypes) > 1 or not q.is_floating_point():
        errors.append(f"q, k, v must have one floating dtype; got {dtypes}")
    if queries != keys and (causal or document_ids is not None):
        errors.append(
            f"causal and document_ids need as many queries as keys; got {queries} and {keys}"
        )
    if heads % kv_heads:
        errors.append(
            f"heads must be a multiple of kv heads; got {heads} and {kv_heads}. "
            f"Use {_nearest(heads, kv_heads)}"
        )
    if algorithm == "ulysses" and heads % n:
        errors.append(
            f"heads must be a multiple of {n} devices; got {heads}. Use {_nearest(heads, n)}"
        )
    if algorithm == "zigzag" and (queries % 2 or keys % 2):
        errors.append(
            f"tokens must be a multiple of {2 * n}; got {n} x {queries}. "
            f"Use {_nearest(n * queries, 2 * n)}"
        )
    if errors:
        raise ValueError(f"{_CALLER}: {'; '.join(errors)}.")


def _nearest(size: int, factor: int) -> str:
    """Return the multiples of a factor around a size.

    >>> _nearest(7, 4), _nearest(3, 4)
    ('4 or 8', '4')
    """
    lower = size - size % factor
    if lower == 0:
        return str(factor)
    return f"{lower} or {lower + factor}"


def shard_sequence(
    tree: PyTree, axis: Axes, *, dim: int = 1, how: Algorithm = "ring"
) -> tuple[PyTree, Tensor]:
    """Return the device's tokens of a replicated tree, and their global positions.

    The tree has what has a dim of tokens: inputs, labels, masks.

    >>> import torch, fshard as fs
    >>> shard = lambda: fs.tensor.shard_sequence(torch.arange(10, 18), "seq", dim=0, how="zigzag")
    >>> fs.run(shard, mesh=fs.make_mesh({"seq": 2}))[1]
    (tensor([12, 13, 14, 15]), tensor([2, 3, 4, 5]))
    """
    n = axis_size(axis)
    factor = 2 * n if how == "zigzag" else n
    paths, leaves, structure = flatten_with_paths(pvary(tree, axis))
    sizes = [x.shape[dim] for x in leaves]
    if len(set(sizes)) != 1 or sizes[0] % factor:
        pairs = zip(paths, sizes, strict=True)
        lengths = [f"{path} {size} (use {_nearest(size, factor)})" for path, size in pairs]
        raise ValueError(
            f"fs.tensor.shard_sequence: leaves must have equally many tokens, a multiple of "
            f"{factor}; got {', '.join(lengths)}."
        )

    positions = torch.arange(sizes[0], device=leaves[0].device)
    if how == "zigzag":
        positions = zigzag(positions, n, 0)
    positions = positions.chunk(n)[axis_index(axis)]
    shards = [x.index_select(dim, positions) for x in leaves]
    return unflatten(structure, shards), positions


def token_mean(loss: Tensor, mask: Tensor | None, axis: Axes) -> Tensor:
    """Return the mean of a loss per token where the mask is True, over the tokens of all devices.

    It is 0 if there are none. `axis` includes those of the batch: ("data", "seq").
    """
    if mask is None:
        mask = torch.ones_like(loss, dtype=torch.bool)
    wide_dtype = torch.promote_types(loss.dtype, torch.float32)
    masked = loss.to(wide_dtype).masked_fill(~mask, 0)
    total, count = psum(torch.stack([masked.sum(), mask.sum().to(wide_dtype)]), axis)
    return total / count.clamp(min=1)
