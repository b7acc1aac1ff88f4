"""A small transformer on one device, and the same of `fs.tensor`'s functions on shards."""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

import fshard as fs
from fshard import P

T = fs.tensor
IGNORED = -100


@dataclass(frozen=True)
class Sizes:
    batch: int
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int

    @staticmethod
    def of(mode, kv_heads=None):
        """Return sizes that the devices divide."""
        n = mode.next.size()
        return Sizes(2 * mode.size(mode.tokens), 4 * n * n, 2 * n, n if kv_heads is None else kv_heads, 6 * n * n)


def params(sizes, randn):
    h, kv = sizes.hidden, sizes.hidden // sizes.heads * sizes.kv_heads
    shapes = {
        "norm norm_bias rms q_bias out_bias": (h,),
        "v_bias": (kv,),
        "embedding head": (sizes.vocabulary, h),
        "q out": (h, h),
        "k v": (kv, h),
        "gate up": (2 * h, h),
        "down": (h, 2 * h),
    }
    named = {name: shape for names, shape in shapes.items() for name in names.split()}
    return {name: randn(*shape, seed=i) / shape[-1] ** 0.5 for i, (name, shape) in enumerate(named.items())}


def specs(mode, sizes):
    kv = mode.kv_weight(sizes.kv_heads)
    layouts = {
        "norm norm_bias rms": mode.norm,
        "q_bias": mode.bias,
        "v_bias": mode.bias if kv == mode.weight else P(),
        "out_bias": mode.next.bias,
        "embedding": mode.embedding,
        "q gate up head": mode.weight,
        "k v": kv,
        "out down": mode.next.weight,
    }
    return {name: spec for names, spec in layouts.items() for name in names.split()}


def batch(sizes, length=3):
    generator = torch.Generator().manual_seed(5)
    ids, labels = torch.randint(sizes.vocabulary, (2, sizes.batch, length), generator=generator).unbind()
    return ids, labels.masked_fill((ids % 3 == 0) & (torch.arange(sizes.batch)[:, None] > 0), IGNORED)


def attend(q, k, v, causal):
    """Attention that can be differentiated twice."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1) if causal else torch.tensor(False)
    return scores.masked_fill(later, -torch.inf).softmax(-1) @ v


def serial_loss(p, ids, labels, sizes):
    x = F.embedding(ids, p["embedding"])
    h = F.layer_norm(x, x.shape[-1:], p["norm"], p["norm_bias"])
    projected = F.linear(h, p["q"], p["q_bias"]), F.linear(h, p["k"]), F.linear(h, p["v"], p["v_bias"])
    head = sizes.hidden // sizes.heads
    q, k, v = (y.unflatten(-1, (-1, head)).transpose(1, 2) for y in projected)
    x = x + F.linear(attend(q, k, v, True).transpose(1, 2).flatten(2), p["out"], p["out_bias"])
    h = F.rms_norm(x, x.shape[-1:], p["rms"], 1e-6)
    x = x + F.linear(F.silu(F.linear(h, p["gate"])) * F.linear(h, p["up"]), p["down"])
    return F.cross_entropy(F.linear(x, p["head"]).flatten(0, -2), labels.flatten(), ignore_index=IGNORED)


def sharded_loss(p, ids, labels, mode, sizes, also=()):
    x = T.embedding(ids, p["embedding"], mode)
    h = T.layer_norm(x, p["norm"], mode, p["norm_bias"])
    x = x + T.self_attention(
        h,
        (p["q"], p["k"], p["v"]),
        p["out"],
        mode,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        qkv_bias=(p["q_bias"], None, p["v_bias"]),
        out_bias=p["out_bias"],
        causal=True,
        attend=attend,
    )
    h = T.rms_norm(x, p["rms"], mode)
    x = x + T.mlp(h, (p["gate"], p["up"]), p["down"], mode, activation=F.silu)
    return T.cross_entropy(T.linear(x, p["head"], mode), T.to_next(labels, mode), mode.next, also=also)


def shard_of(x, spec):
    """Return this device's shard of a full tensor, for parameters that arrive unsharded."""
    for dim, axes in enumerate(spec.dims(x.ndim)):
        if axes:
            x = x.chunk(fs.axis_size(axes), dim)[fs.axis_index(axes)]
    return x
