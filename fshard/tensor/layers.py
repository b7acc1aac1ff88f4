"""The layers around linear ones, in every mode: embedding, norms, dropout, attention, the MLP.

`x` is the device's shard of an activation of `mode`; weights are its shards of the layouts that the
mode names. Where they are replicated along the axes of tokens, their gradients are summed over
these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fshard.mesh.collectives.api import all_gather, axis_index, psum, psum_scatter, pvary
from fshard.mesh.layout import PyTree
from fshard.mesh.layout.arithmetic import WIDER
from fshard.tensor.linear_layers import linear, varying
from fshard.tensor.modes import Mode, shard_range


def embedding(ids: Tensor, weight: Tensor, mode: Mode, *, vocabulary: int | None = None) -> Tensor:
    """Look up ids, (tokens, ...), in rows that are sharded over devices: an activation of `mode`.

    The weight is of `mode.embedding`; ids are equal along the axes that do not shard tokens. Pass
    the global size of the `vocabulary` if the devices do not divide it.
    """
    axes = mode.vocabulary
    start, _ = shard_range(vocabulary, len(weight), axes, mode.size(axes), "vocabulary")
    if mode.tokens:
        ids = all_gather(ids, mode.tokens, dim=0)

    # Each device looks up the ids that it has rows of; all others give 0, so a sum has all.
    rows = ids - start
    is_elsewhere = (rows < 0) | (rows >= len(weight))
    y = F.embedding(rows.masked_fill(is_elsewhere, 0), weight)
    y = y.masked_fill(is_elsewhere[..., None], 0)
    if mode.tokens:
        return psum_scatter(y, mode.tokens, dim=0)
    return psum(y, axes) if axes else y


def feature_embedding(ids: Tensor, weight: Tensor, mode: Mode) -> Tensor:
    """Look up ids in a weight of `mode.features`, which has all rows.

    Only 1d communicates: an all-gather.
    """
    y = F.embedding(ids, varying(weight, mode.tokens))
    if mode.hidden:
        return y
    return all_gather(y, mode.axes, dim=-1, to="replicated")


def layer_norm(
    x: Tensor, weight: Tensor | None, mode: Mode, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Normalize activations over all features to mean 0 and variance 1.

    `weight` and `bias` are of `mode.norm`.
    """
    weight, bias = varying((weight, bias), mode.tokens)
    if not mode.hidden:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    y = x.to(WIDER.get(x.dtype, x.dtype))
    y = y - _mean(y, mode)
    y = y * (_mean(y.square(), mode) + eps).rsqrt()
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y.to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor | None, mode: Mode, eps: float = 1e-6) -> Tensor:
    """Normalize activations over all features to mean square 1; `weight` is of `mode.norm`."""
    weight = varying(weight, mode.tokens)
    if not mode.hidden:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    y = x.to(WIDER.get(x.dtype, x.dtype))
    y = y * (_mean(y.square(), mode) + eps).rsqrt()
    if weight is not None:
        y = y * weight
    return y.to(x.dtype)


def _mean(x: Tensor, mode: Mode) -> Tensor:
    """Average over all features; devices have equally many."""
    sums = psum(x.mean(-1, keepdim=True), mode.hidden)
    return pvary(sums, mode.hidden) / mode.size()


def dropout(x: Tensor, p: float, mode: Mode, *, features: int | None = None) -> Tensor:
    """Zero elements with probability `p` and divide the others by 1 - p.

    Whether an element is dropped depends only on its global index and one number from torch's
    default generator: masks are equal however the activation is sharded. Pass the global number of
    `features` where the devices do not divide it. In a loss function all devices along local axes
    draw one number; in `shard_map`, whose devices draw differently, call it within
    `fs.keyed_random(seed, step)`.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"dropout: p must be a probability; got {p!r}.")
    # On the host, whatever the default device: an accelerator's number would be waited for.
    key = int(torch.randint(1 << 62, (), device="cpu").item())
    size = x.shape[-1]
    first, total = shard_range(features, size, mode.hidden, mode.size(), "features")

    # The global index of each element, as if all dims but the last were one.
    rows = x.shape[:-1].numel()
    first_row = rows * (axis_index(mode.tokens) if mode.tokens else 0)
    row_starts = torch.arange(first_row, first_row + rows, device=x.device)[:, None] * total
    bits = _hash(row_starts + torch.arange(first, first + size, device=x.device), key)

    # Signed 64-bit numbers below -2^63 + p 2^64 are a share p of all. For p = 1 that is 2^63, which
    # int64 has not: the largest number itself is kept, with probability 2^-64.
    bound = min(int(p * 2.0**64) - (1 << 63), (1 << 63) - 1)
    y = x.masked_fill((bits < bound).view(x.shape), 0)
    return y / (1 - p) if p < 1 else y


def _hash(index: Tensor, key: int) -> Tensor:
    """Hash each index and a key to 64 bits, in place, by SplitMix64.

    Its last step, x ^ (x >> 31), is left out: it mixes the low bits only, and `dropout` compares
    numbers, which is a matter of the high ones.
    """
    index.mul_(_signed(0x9E3779B97F4A7C15)).add_(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        low_bits = (1 << (64 - shift)) - 1  # >> copies the sign into all others
        shifted = (index >> shift).bitwise_and_(low_bits)
        index.bitwise_xor_(shifted).mul_(_signed(factor))
    return index


def _signed(number: int) -> int:
    """Return the int64 of the same bits as an unsigned number from 2^63 on."""
    return number - (1 << 64)


def self_attention(
    x: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    mode: Mode,
    *,
    heads: int,
    kv_heads: int | None = None,
    qkv_bias: PyTree = None,
    out_bias: Tensor | None = None,
    causal: bool = False,
    attend: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Project to q, k and v, attend with the device's own heads, and project back: in `mode`.

    Args:
        x: an activation of `mode`, as the result.
        qkv: the weights of q, `mode.weight`, and of k and v, `mode.kv_weight(kv_heads)`.
        out: the weight of the last projection, of `mode.next`.
        mode: of x.
        heads: their global number, a multiple of the devices'.
        kv_heads: their global number, a divisor of `heads`. If the devices do not divide it, each
            computes those that its queries use.
        qkv_bias: the biases of `qkv`.
        out_bias: the bias of `out`.
        causal: a token sees only earlier ones and itself.
        attend: is called as attend(q, k, v, causal=causal) instead of torch's attention, with
            tensors (batch, heads, sequence, head dim), of which k and v may have a divisor of q's
            heads.
    """
    n = mode.next.size()
    if kv_heads is None:
        kv_heads = heads
    mode.check(heads=heads)
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"self_attention: kv_heads must divide heads, {heads}; got {kv_heads}.")

    local_heads = heads // n
    local_kv_heads = kv_heads // n
    kv_head_of_head: list[int] | None = None
    if kv_heads % n:  # then the weights of k and v have all heads, of which some are taken
        index = axis_index(mode.next.hidden)
        used, kv_head_of_head = kv_heads_of(index, local_heads, heads // kv_heads)
        local_kv_heads = len(used)
        k_weight, v_weight = _rows_of_heads(qkv[1:], used, kv_heads, mode)
        qkv = (qkv[0], k_weight, v_weight)
        if qkv_bias:
            qkv_bias = (qkv_bias[0], *_rows_of_heads(qkv_bias[1:], used, kv_heads, mode))

    q, k, v = linear(x, qkv, mode, qkv_bias)
    q = q.unflatten(-1, (local_heads, -1)).transpose(1, 2)
    k = k.unflatten(-1, (local_kv_heads, -1)).transpose(1, 2)
    v = v.unflatten(-1, (local_kv_heads, -1)).transpose(1, 2)
    if kv_head_of_head is not None and local_kv_heads > 1:
        k = k[:, kv_head_of_head]
        v = v[:, kv_head_of_head]
    if attend is not None:
        y = attend(q, k, v, causal=causal)
    else:
        is_grouped = q.shape[1] != k.shape[1]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=is_grouped)
    return linear(y.transpose(1, 2).flatten(2), out, mode.next, out_bias)


def kv_heads_of(index: int, heads: int, group: int) -> tuple[list[int], list[int]]:
    """Return the kv heads that a device uses, and which of them each of its query heads takes.

    Each kv head is shared by a group of query heads. Device 1 with 3 query heads, in groups of 4,
    has heads 3, 4, 5:

    >>> kv_heads_of(1, 3, 4)
    ([0, 1], [0, 1, 1])
    """
    first = index * heads
    kv_heads = [head // group for head in range(first, first + heads)]
    used = sorted(set(kv_heads))
    return used, [used.index(head) for head in kv_heads]


def _rows_of_heads(parameters: PyTree, used: list[int], kv_heads: int, mode: Mode) -> list[Any]:
    """Take the rows of consecutive heads from parameters that have those of all heads."""
    first = used[0]
    stop = used[-1] + 1
    rows: list[Any] = []
    for x in varying(parameters, mode.next.hidden):
        if x is None:
            rows.append(None)
        else:
            rows.append(x.unflatten(0, (kv_heads, -1))[first:stop].flatten(0, 1))
    return rows


def mlp(
    x: Tensor,
    up: Tensor | tuple[Tensor, Tensor],
    down: Tensor,
    mode: Mode,
    *,
    up_bias: PyTree = None,
    down_bias: Tensor | None = None,
    activation: Callable[[Tensor], Tensor] = F.gelu,
) -> Tensor:
    """Compute activation(x up) down.

    A pair up = (gate, up) gives activation(x gate) * (x up): swiglu with F.silu. `up` is of
    `mode.weight`, `down` of `mode.next.weight`, and their biases accordingly; that of a pair is a
    pair.
    """
    y = linear(x, up, mode, up_bias)
    y = activation(y) if isinstance(y, Tensor) else activation(y[0]) * y[1]
    return linear(y, down, mode.next, down_bias)
