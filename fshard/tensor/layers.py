"""Embedding, norms and dropout on local shards, in every mode.

Each takes its layouts from a `Mode`: the axes that shard features are summed over, and weights that are replicated along
the axes of tokens are marked by `pvary`, so their gradients are summed there.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fshard.mesh.collectives.api import all_gather, axis_index, psum, psum_scatter, pvary
from fshard.mesh.layout.arithmetic import WIDER
from fshard.tensor.linear import varying
from fshard.tensor.mode import Mode, own_range


def embedding(
    ids: Tensor,
    weight: Tensor,
    mode: Mode,
    *,
    sharded: Literal["vocabulary", "features"] = "vocabulary",
    vocabulary: int | None = None,
) -> Tensor:
    """Look up ids, sharded as the tokens of `mode`, in a sharded embedding: an activation of `mode`.

    Args:
        ids: this device's tokens, (tokens, ...), equal along the other axes.
        weight: its shard of the weight: `mode.embedding`, or `mode.features` if sharded="features".
        mode: the layouts.
        sharded: "vocabulary": each device looks up the ids in its rows, and results are summed. "features": each
            device has some features of all rows; only 1d communicates, an all-gather.
        vocabulary: the global number of rows, if the devices do not divide it.
    """
    if sharded not in ("vocabulary", "features"):
        raise ValueError(f'embedding: sharded must be "vocabulary" or "features"; got {sharded!r}.')
    if sharded == "features":
        found = F.embedding(ids, varying(weight, mode.tokens))
        return found if mode.hidden else all_gather(found, mode.axes, dim=-1, to="replicated")
    axes = mode.vocabulary
    start, _ = own_range(vocabulary, len(weight), axes, mode.size(axes), "vocabulary")
    rows = (all_gather(ids, mode.tokens, dim=0) if mode.tokens else ids) - start
    absent = (rows < 0) | (rows >= len(weight))
    found = F.embedding(rows.masked_fill(absent, 0), weight).masked_fill(absent[..., None], 0)
    return psum_scatter(found, mode.tokens, dim=0) if mode.tokens else psum(found, axes) if axes else found


def layer_norm(x: Tensor, weight: Tensor | None, mode: Mode, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Normalize activations over features to mean 0 and variance 1.

    Args:
        x: this device's shard of the activation.
        weight: its shard of the weight, `mode.norm`, or None.
        mode: the layouts.
        bias: its shard of the bias, `mode.norm`, or None.
        eps: is added to the variance.
    """
    if not mode.hidden:
        return F.layer_norm(x, x.shape[-1:], varying(weight, mode.tokens), varying(bias, mode.tokens), eps)
    centred = _wide(x)
    centred = centred - _mean(centred, mode)
    return _scaled(centred * (_mean(centred.square(), mode) + eps).rsqrt(), weight, bias, x, mode)


def rms_norm(x: Tensor, weight: Tensor | None, mode: Mode, eps: float = 1e-6) -> Tensor:
    """Normalize activations over features to mean square 1; arguments as of `layer_norm`."""
    if not mode.hidden:
        return F.rms_norm(x, x.shape[-1:], varying(weight, mode.tokens), eps)
    wide = _wide(x)
    return _scaled(wide * (_mean(wide.square(), mode) + eps).rsqrt(), weight, None, x, mode)


def _mean(x: Tensor, mode: Mode) -> Tensor:
    """Average over features, of which devices have equally many; the result is used with each device's own."""
    return pvary(psum(x.mean(-1, keepdim=True), mode.hidden), mode.hidden) / mode.size()


def _wide(x: Tensor) -> Tensor:
    return x.to(WIDER.get(x.dtype, x.dtype))


def _scaled(normal: Tensor, weight: Tensor | None, bias: Tensor | None, x: Tensor, mode: Mode) -> Tensor:
    if weight is not None:
        normal = normal * varying(weight, mode.tokens)
    if bias is not None:
        normal = normal + varying(bias, mode.tokens)
    return normal.to(x.dtype)


def dropout(x: Tensor, p: float, mode: Mode, *, features: int | None = None) -> Tensor:
    """Zero elements with probability `p` and divide the others by 1 - p.

    Each element's draw depends on its global index and one number from torch's default generator, so equal generators
    give equal masks however the activation is sharded. In a training step the number is drawn for each slice.

    Args:
        x: this device's shard of the activation.
        p: the probability, 0 <= p <= 1.
        mode: the layouts.
        features: the global number of features, if the devices do not divide it.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"dropout: p must be a probability; got {p!r}.")
    key = int(torch.randint(1 << 62, ()).item())
    first, total = own_range(features, x.shape[-1], mode.hidden, mode.size(), "features")
    rows = x[..., 0].numel()
    start = rows * (axis_index(mode.tokens) if mode.tokens else 0)
    index = torch.arange(start, start + rows, device=x.device)[:, None] * total
    drawn = _mixed(index + torch.arange(first, first + x.shape[-1], device=x.device), key)
    dropped = drawn < min(int(p * 2.0**64) - (1 << 63), (1 << 63) - 1)
    kept = x.masked_fill(dropped.view(x.shape), 0)
    return kept / (1 - p) if p < 1 else kept


def _mixed(index: Tensor, key: int) -> Tensor:
    """Hash each index to 64 bits: the finalizer of SplitMix64, keyed, in wrapping signed arithmetic."""
    bits = index.mul_(_signed(0x9E3779B97F4A7C15)).add_(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits.bitwise_xor_((bits >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(_signed(factor))
    return bits.bitwise_xor_((bits >> 31).bitwise_and_((1 << 33) - 1))


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
