"""Attention on one device, the oracle: one formula, without blocks; and the same call on a mesh."""

import torch
from torch.nn import functional as F

import fshard as fs
from fshard import P

HOWS = ("gather", "ulysses", "ring", "zigzag", "rsa")


def serial(q, k, v, *, causal=False, scale=None, key_mask=None, document_ids=None, torchs=False):
    """Attend with repeated kv heads; rows that see no key are 0. `torchs`: by torch's function."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    seen = torch.ones(q.shape[0], 1, q.shape[2], k.shape[2], dtype=torch.bool)
    if causal:
        seen = seen.tril()
    if key_mask is not None:
        seen = seen & key_mask[:, None, None, :]
    if document_ids is not None:
        seen = seen & (document_ids[:, None, :, None] == document_ids[:, None, None, :])
    if torchs:
        return F.scaled_dot_product_attention(q, k, v, seen, scale=scale)
    scores = (q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)).masked_fill(
        ~seen, -1e30
    )
    return (scores.softmax(-1) * seen) @ v


def sharded(mesh, how, q, k, v, *, causal=False, scale=None, key_mask=None, document_ids=None):
    """Call `fs.tensor.attention` on the devices of a mesh; global tensors in and out."""
    n = mesh.shape["seq"]

    def order(x, dim, inverse=False):
        return (
            fs.tensor.zigzag(x, n, dim, inverse=inverse) if how == "zigzag" and x is not None else x
        )

    def local(q, k, v):
        masks = {"key_mask": order(key_mask, 1), "document_ids": order(document_ids, 1)}
        own = {
            name: x.chunk(n, 1)[fs.axis_index("seq")] for name, x in masks.items() if x is not None
        }
        return fs.tensor.attention(q, k, v, "seq", how, causal=causal, scale=scale, **own)

    tokens = P(None, None, "seq")
    run = fs.shard_map(local, mesh=mesh, in_specs=tokens, out_specs=tokens)
    return order(fs.unshard(run(*(order(x, 2) for x in (q, k, v)))), 2, inverse=True)


def derivatives(attend, q, k, v, weights, second=True):
    """Return the output, the gradients of q, k, v, and those of a function of these gradients."""
    xs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = attend(*xs)
    first = torch.autograd.grad((out * weights).sum(), xs, create_graph=second)
    again = torch.autograd.grad(sum(x.square().sum() for x in first), xs) if second else ()
    return [x.detach() for x in (out, *first, *again)]
