"""The two halves of a transformer's block: attention by heads, and the MLP. Both map activations of a mode to itself."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

from fshard.mesh.collectives.api import axis_index
from fshard.mesh.layout import PyTree
from fshard.tensor.linear import linear, varying
from fshard.tensor.mode import Mode

Optional3 = tuple[Tensor | None, Tensor | None, Tensor | None]


def self_attention(
    x: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    mode: Mode,
    *,
    heads: int,
    kv_heads: int | None = None,
    qkv_bias: Optional3 = (None, None, None),
    out_bias: Tensor | None = None,
    causal: bool = False,
    attend: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Project to q, k and v, attend by the device's own heads, and project back.

    Args:
        x: this device's shard of the activation, (batch, sequence, features).
        qkv: its shards of the weights of q, `mode.weight`, and of k and v, `mode.kv_weight(kv_heads)`.
        out: its shard of the output's weight, `mode.next.weight`.
        mode: the layouts.
        heads: the global number of query heads; the devices must divide it.
        kv_heads: the global number of heads of k and v, a divisor of `heads`; by default `heads`. Devices that do not
            divide it each compute those that their queries use.
        qkv_bias: the biases of q, k and v, replicated where heads of the weights are.
        out_bias: the bias of the output, `mode.next.bias`.
        causal: let positions attend only to earlier ones and themselves.
        attend: called as attend(q, k, v, causal=causal) instead of torch's attention, with tensors (batch, heads,
            sequence, head dim); k and v may have a divisor of q's heads.
    """
    kv_heads, n = kv_heads or heads, mode.next.size()
    mode.check(heads=heads)
    if heads % kv_heads:
        raise ValueError(f"self_attention: kv_heads must divide the number of heads, {heads}; got {kv_heads}.")
    used, repeats = range(kv_heads // n), None
    if kv_heads % n:
        used, repeats = kv_heads_of(axis_index(mode.next.hidden), heads // n, heads // kv_heads)
        qkv = qkv[0], *_rows(qkv[1:], used, kv_heads, mode)
        qkv_bias = qkv_bias[0], *_rows(qkv_bias[1:], used, kv_heads, mode)
    q, k, v = linear(x, qkv, mode, qkv_bias)
    q = q.unflatten(-1, (heads // n, -1)).transpose(1, 2)
    k, v = (y.unflatten(-1, (len(used), -1)).transpose(1, 2) for y in (k, v))
    if repeats is not None:
        k, v = k[:, repeats], v[:, repeats]
    y = (attend or _attend)(q, k, v, causal=causal)
    return linear(y.transpose(1, 2).flatten(2), out, mode.next, out_bias)


def kv_heads_of(index: int, heads: int, group: int) -> tuple[range, list[int] | None]:
    """Return the kv heads that a device with `heads` query heads uses, and which of them each of its heads takes.

    That is None where every kv head has equally many. `group`: the number of query heads of a kv head.

    >>> [kv_heads_of(index, heads=2, group=3) for index in range(3)]
    [(range(0, 1), None), (range(0, 2), None), (range(1, 2), None)]
    >>> kv_heads_of(0, heads=3, group=2)
    (range(0, 2), [0, 0, 1])
    """
    taken = [head // group for head in range(index * heads, (index + 1) * heads)]
    used = range(taken[0], taken[-1] + 1)
    equal = len({taken.count(head) for head in used}) == 1
    return used, None if equal else [head - used.start for head in taken]


def _rows(parameters: tuple[Tensor | None, ...], used: range, kv_heads: int, mode: Mode) -> tuple[Tensor | None, ...]:
    """Take the rows of some heads from parameters of all, which are replicated along the heads' axes."""
    return tuple(
        x if x is None else x.unflatten(0, (kv_heads, -1))[used.start : used.stop].flatten(0, 1)
        for x in varying(parameters, mode.next.hidden)
    )


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


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
    """Compute activation(x up) down, or with a pair (gate, up) activation(x gate) * (x up) down: swiglu with F.silu.

    `up` has the layout `mode.weight`, `up_bias` (a pair too) `mode.bias`, `down` `mode.next.weight`, and `down_bias`
    `mode.next.bias`.
    """
    y = linear(x, up, mode, up_bias)
    y = activation(y) if isinstance(y, Tensor) else activation(y[0]) * y[1]
    return linear(y, down, mode.next, down_bias)
