"""The layers around linear ones, in every mode: embedding, norms, dropout, attention by heads and the MLP.

`x` is the device's shard of an activation of `mode`; weights are its shards of the layouts that the mode names. Where
they are replicated along the axes of tokens, their gradients are summed over these.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from fshard.mesh.collectives.api import all_gather, axis_index, psum, psum_scatter, pvary
from fshard.mesh.layout import PyTree
from fshard.mesh.layout.arithmetic import WIDER
from fshard.tensor.linear_layers import linear, varying
from fshard.tensor.modes import Mode, own_range


def embedding(ids: Tensor, weight: Tensor, mode: Mode, *, vocabulary: int | None = None) -> Tensor:
    """Look up ids, (tokens, ...), in rows that are sharded over devices: an activation of `mode`.

    The weight is of `mode.embedding`; ids are equal along the axes that do not shard tokens. Pass the global size of the
    `vocabulary` if the devices do not divide it.
    """
    axes, tokens = mode.vocabulary, mode.tokens
    start, _ = own_range(vocabulary, len(weight), axes, mode.size(axes), "vocabulary")
    rows = (all_gather(ids, tokens, dim=0) if tokens else ids) - start
    absent = (rows < 0) | (rows >= len(weight))
    y = F.embedding(rows.masked_fill(absent, 0), weight).masked_fill(absent[..., None], 0)
    return psum_scatter(y, tokens, dim=0) if tokens else psum(y, axes) if axes else y


def feature_embedding(ids: Tensor, weight: Tensor, mode: Mode) -> Tensor:
    """Look up ids in a weight of `mode.features`, which has all rows. Only 1d communicates: an all-gather."""
    y = F.embedding(ids, varying(weight, mode.tokens))
    return y if mode.hidden else all_gather(y, mode.axes, dim=-1, to="replicated")


def layer_norm(
    x: Tensor, weight: Tensor | None, mode: Mode, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Normalize activations over all features to mean 0 and variance 1; `weight` and `bias` are of `mode.norm`."""
    weight, bias = varying((weight, bias), mode.tokens)
    if not mode.hidden:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    y = x.to(WIDER.get(x.dtype, x.dtype))
    y = y - _mean(y, mode)
    y = y * (_mean(y.square(), mode) + eps).rsqrt()
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor | None, mode: Mode, eps: float = 1e-6) -> Tensor:
    """Normalize activations over all features to mean square 1; `weight` is of `mode.norm`."""
    weight = varying(weight, mode.tokens)
    if not mode.hidden:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    y = x.to(WIDER.get(x.dtype, x.dtype))
    y = y * (_mean(y.square(), mode) + eps).rsqrt()
    return (y if weight is None else y * weight).to(x.dtype)


def _mean(x: Tensor, mode: Mode) -> Tensor:
    """Average over all features; devices have equally many."""
    return pvary(psum(x.mean(-1, keepdim=True), mode.hidden), mode.hidden) / mode.size()


def dropout(x: Tensor, p: float, mode: Mode, *, features: int | None = None) -> Tensor:
    """Zero elements with probability `p` and divide the others by 1 - p.

    Whether an element is dropped depends only on its global index and one number from torch's default generator:
    masks are equal however the activation is sharded. Pass the global number of `features` where the devices do not
    divide it. In a loss function all devices along local axes draw one number; in `shard_map`, whose devices draw
    differently, call it within `fs.keyed_random(seed, step)`.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"dropout: p must be a probability; got {p!r}.")
    key, size = int(torch.randint(1 << 62, ()).item()), x.shape[-1]
    first, total = own_range(features, size, mode.hidden, mode.size(), "features")
    rows = x.shape[:-1].numel()
    start = rows * (axis_index(mode.tokens) if mode.tokens else 0)
    index = torch.arange(start, start + rows, device=x.device)[:, None] * total
    bits = _mixed(index + torch.arange(first, first + size, device=x.device), key)
    y = x.masked_fill((bits < min(int(p * 2.0**64) - (1 << 63), (1 << 63) - 1)).view(x.shape), 0)
    return y / (1 - p) if p < 1 else y


def _mixed(index: Tensor, key: int) -> Tensor:
    """Hash each index and a key to 64 bits, in place: SplitMix64 for the high bits."""
    index.mul_(0x9E3779B97F4A7C15 - (1 << 64)).add_(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        index.bitwise_xor_((index >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(
            factor - (1 << 64)
        )
    return index


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
    """Project to q, k and v, attend with the device's own heads, and project back: from `mode` to `mode`.

    `qkv` has the weights of q, `mode.weight`, and of k and v, `mode.kv_weight(kv_heads)`, and `qkv_bias` their biases; `out`
    and `out_bias` are of `mode.next`. The global number of `heads` must be a multiple of the devices', that of `kv_heads`
    a divisor of it. If the devices do not divide `kv_heads`, each computes those that its queries use.

    `attend` is called as attend(q, k, v, causal=causal) instead of torch's attention, with tensors (batch, heads, sequence,
    head dim), of which k and v may have a divisor of q's heads.
    """
    n, kv_heads = mode.next.size(), heads if kv_heads is None else kv_heads
    mode.check(heads=heads)
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"self_attention: kv_heads must divide heads, {heads}; got {kv_heads}.")
    used, repeats = list(range(kv_heads // n)), None
    if kv_heads % n:
        used, repeats = kv_heads_of(axis_index(mode.next.hidden), heads // n, heads // kv_heads)
        qkv = qkv[0], *_rows(qkv[1:], used, kv_heads, mode)
        qkv_bias = qkv_bias and (qkv_bias[0], *_rows(qkv_bias[1:], used, kv_heads, mode))
    q, k, v = (
        y.unflatten(-1, (count, -1)).transpose(1, 2)
        for y, count in zip(
            linear(x, qkv, mode, qkv_bias), (heads // n, len(used), len(used)), strict=True
        )
    )
    if repeats is not None and len(used) > 1:
        k, v = k[:, repeats], v[:, repeats]
    if attend is not None:
        y = attend(q, k, v, causal=causal)
    else:
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
        )
    return linear(y.transpose(1, 2).flatten(2), out, mode.next, out_bias)


def kv_heads_of(index: int, heads: int, group: int) -> tuple[list[int], list[int]]:
    """Return the kv heads that the device with `heads` query heads uses, and which of them each query head takes."""
    kv_heads = [head // group for head in range(index * heads, (index + 1) * heads)]
    used = sorted(set(kv_heads))
    return used, [used.index(head) for head in kv_heads]


def _rows(parameters: PyTree, used: list[int], kv_heads: int, mode: Mode) -> PyTree:
    """Take the rows of some heads from parameters that are replicated along the axes of heads."""
    return [
        x if x is None else x.unflatten(0, (kv_heads, -1))[used[0] : used[-1] + 1].flatten(0, 1)
        for x in varying(parameters, mode.next.hidden)
    ]


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
    """Compute activation(x up) down. A pair up = (gate, up) gives activation(x gate) * (x up): swiglu with F.silu.

    `up` is of `mode.weight`, `down` of `mode.next.weight`, and their biases accordingly; that of a pair is a pair.
    """
    y = linear(x, up, mode, up_bias)
    y = activation(y) if isinstance(y, Tensor) else activation(y[0]) * y[1]
    return linear(y, down, mode.next, down_bias)
