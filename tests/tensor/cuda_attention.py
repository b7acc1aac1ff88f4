"""The attention operations that torch has on CUDA only, by their formula, with the rules that their
source states.
"""

from contextlib import contextmanager

import torch
from torch.library import _scoped_library


@contextmanager
def operations_of_cuda():
    """Run them on CPU tensors too."""
    with _scoped_library("aten", "IMPL") as library:
        for name, function in {
            "flash_attention": flash,
            "flash_attention_backward": flash_backward,
            "efficient_attention": efficient,
            "efficient_attention_backward": efficient_backward,
        }.items():
            library.impl(f"_scaled_dot_product_{name}", function, "CPU")
        yield


def can_use_flash(params):
    """Torch's answer for flash attention: any equal dims up to 256, and kv heads that share groups
    if they may.
    """
    q, k, v = params.query, params.key, params.value
    has_equal_heads = q.shape[1] == k.shape[1] == v.shape[1]
    may_share = params.enable_gqa and k.shape[1] == v.shape[1] and q.shape[1] % k.shape[1] == 0
    return (
        q.dtype.itemsize == 2
        and params.attn_mask is None
        and q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256
        and (has_equal_heads or may_share)
    )


def can_use_efficient(params):
    """Torch's answer for memory-efficient attention: aligned dims, and as many kv heads as heads."""
    q, k, v = params.query, params.key, params.value
    alignment = 8 if q.dtype.itemsize == 2 else 4
    return (
        q.dtype.itemsize <= 4
        and all(x.shape[-1] % alignment == 0 for x in (q, k, v))
        and q.shape[1] == k.shape[1] == v.shape[1]
    )


def scores(q, k, bias, causal, scale):
    """Return scores in float32, as the kernels have them."""
    result = q.float() @ k.float().mT * scale
    if bias is not None:
        assert bias.dtype == q.dtype and bias.shape == result.shape
        assert bias.stride(-1) == 1 and all(stride % 8 == 0 for stride in bias.stride()[:-1])
        result = result + bias.float()
    return (
        result.masked_fill(~torch.ones_like(result, dtype=torch.bool).tril(), -torch.inf)
        if causal
        else result
    )


def attend(q, k, v, bias, causal, scale):
    """Return out, in the memory order (batch, tokens, heads, dim), and lse."""
    aligned = 8 if q.dtype.itemsize == 2 else 4
    assert all(x.stride(-1) == 1 and x.shape[-1] % aligned == 0 for x in (q, k, v))
    assert q.shape[1] == k.shape[1]
    rows = scores(q, k, bias, causal, scale)
    out = (rows.softmax(-1) @ v.float()).to(q.dtype)
    return out.transpose(1, 2).contiguous().transpose(1, 2), rows.logsumexp(-1)


def pull_back(cotangent, q, k, v, out, lse, bias, causal, scale):
    """Return the gradients of q, k, v."""
    assert all(x.stride(-1) == 1 for x in (q, k, v, out)) and lse.dtype == torch.float32
    assert all(x.shape[-1] % (8 if q.dtype.itemsize == 2 else 4) == 0 for x in (q, k, v, out))
    weights = (scores(q, k, bias, causal, scale) - lse.unsqueeze(-1)).exp()
    assert weights.isfinite().all()
    cotangent, delta = cotangent.float(), (cotangent.float() * out.float()).sum(-1, keepdim=True)
    slopes = weights * (cotangent @ v.float().mT - delta) * scale
    return [
        x.to(q.dtype) for x in (slopes @ k.float(), slopes.mT @ q.float(), weights.mT @ cotangent)
    ]


def repeated(x, heads):
    """Return kv heads for as many query heads: neighbours share one."""
    assert heads % x.shape[1] == 0
    return x.repeat_interleave(heads // x.shape[1], 1)


def flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    """16 bits, without a mask."""
    assert q.dtype.itemsize == 2 and not dropout_p and not return_debug_mask
    k, v = (repeated(x, q.shape[1]) for x in (k, v))
    out, lse = attend(q, k, v, None, is_causal, scale)
    none = q.new_empty(0)
    seed = torch.empty(2, dtype=torch.uint64)
    return out, lse, none, none, q.shape[2], k.shape[2], seed, seed[0], none


def flash_backward(
    grad_out,
    q,
    k,
    v,
    out,
    lse,
    cum_q,
    cum_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    seed,
    offset,
    *,
    scale=None,
):
    """Lse is contiguous: the kernel is not given its strides."""
    assert (max_q, max_k) == (q.shape[2], k.shape[2]) and cum_q is cum_k is None and not dropout_p
    assert (
        lse.is_contiguous()
        and lse.shape == q.shape[:3]
        and seed.dtype == offset.dtype == torch.uint64
    )
    kv_heads = k.shape[1]
    k, v = (repeated(x, q.shape[1]) for x in (k, v))
    dq, *grads = pull_back(grad_out, q, k, v, out, lse, None, is_causal, scale)
    return dq, *(x.unflatten(1, (kv_heads, -1)).sum(2) for x in grads)


def efficient(q, k, v, bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
    """Lse has a multiple of 32 rows."""
    assert compute_log_sumexp and not dropout_p and q.dtype.itemsize <= 4
    out, lse = attend(q, k, v, bias, is_causal, scale)
    padded = lse.new_full((*lse.shape[:2], -(-lse.shape[2] // 32) * 32), torch.inf)
    padded[..., : lse.shape[2]] = lse
    seed = torch.empty((), dtype=torch.int64)
    return out, padded, seed, seed.clone()


def efficient_backward(
    grad_out,
    q,
    k,
    v,
    bias,
    out,
    lse,
    seed,
    offset,
    dropout_p,
    wanted,
    is_causal=False,
    *,
    scale=None,
):
    """Rows of out are adjacent in memory, heads within a row; lse has a multiple of 32 rows."""
    assert list(wanted) == [True, True, True, False] and not dropout_p and seed.dtype == torch.int64
    assert out.transpose(1, 2).is_contiguous()
    assert lse.shape[2] % 32 == 0 and (lse[..., q.shape[2] :] == torch.inf).all()
    grads = pull_back(grad_out, q, k, v, out, lse[..., : q.shape[2]], bias, is_causal, scale)
    return *grads, q.new_empty(0)
