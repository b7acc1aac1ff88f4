"""Rows of torch.nn.functional that are no single family: losses, batch normalization, dropout.

They are composed of other operations, so their gradients are right for any layout. A loss is
computed element by element, then reduced:

    F.mse_loss(x, y)    losses = F.mse_loss(x, y, reduction="none")    by the rule "...*->..."
                        losses.sum() / losses.numel()                  unreduced, then reduced
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch.autograd.function import Function
from torch.nn import _reduction as _Reduction
from torch.nn import functional as F

from fshard.array.algebra import elementwise
from fshard.array.along import as_dtype, summed_in
from fshard.array.communicate import with_spec
from fshard.array.create import bernoulli_like
from fshard.array.mode import array_mode
from fshard.array.rules import Rule, arrays_in, compose, rule
from fshard.errors import LayoutError
from fshard.mesh.collectives.autograd import has_tangent, transformed
from fshard.mesh.layout import P
from fshard.mesh.layout.sharded import Sharded


@compose("softmin")
def _softmin(x: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    return F.softmax(-x, dim=dim, dtype=dtype)


@compose("normalize")
def _normalize(x: Any, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Any:
    return x / torch.linalg.vector_norm(x, p, dim, keepdim=True).clamp_min(eps)


# Attention.


@compose("multi_head_attention_forward")
def _multi_head_attention(
    query: Any, key: Any, value: Any, embed_dim_to_check: int, num_heads: int, in_proj_weight: Any,
    in_proj_bias: Any, bias_k: Any, bias_v: Any, add_zero_attn: bool, dropout_p: float,
    out_proj_weight: Any, out_proj_bias: Any, training: bool = True, key_padding_mask: Any = None,
    need_weights: bool = True, attn_mask: Any = None, use_separate_proj_weight: bool = False,
    average_attn_weights: bool = True, is_causal: bool = False, **options: Any,
) -> Any:  # fmt: skip
    """Attend by (length, batch, width) arrays with one projection weight.

    `nn.MultiheadAttention` does so by default. `is_causal` is only a hint of `attn_mask`.
    """
    extras = (bias_k, bias_v, options.get("static_k"), options.get("static_v"))
    has_extras = add_zero_attn or any(x is not None for x in extras)
    if has_extras or use_separate_proj_weight or query.ndim != 3:
        return NotImplemented

    def project(x: Any, weight: Any, bias: Any) -> Any:
        """Return an array of (batch, heads, length, width of a head)."""
        return F.linear(x, weight, bias).unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3)

    q_bias = k_bias = v_bias = None
    if in_proj_bias is not None:
        q_bias, k_bias, v_bias = in_proj_bias.chunk(3)
    q_weight, k_weight, v_weight = in_proj_weight.chunk(3)
    q = project(query, q_weight, q_bias)
    k = project(key, k_weight, k_bias)
    v = project(value, v_weight, v_bias)

    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    if attn_mask is not None:
        if attn_mask.ndim == 3:  # of each batch and head
            attn_mask = attn_mask.unflatten(0, (-1, num_heads))
        scores = _masked(scores, attn_mask)
    if key_padding_mask is not None:
        scores = _masked(scores, key_padding_mask.unsqueeze(1).unsqueeze(1))
    weights = F.dropout(scores.softmax(-1), dropout_p, training)
    y = F.linear((weights @ v).permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)
    if not need_weights:
        return y, None
    if average_attn_weights:  # over heads
        weights = weights.mean(1)
    return y, weights


def _masked(scores: Any, mask: Any) -> Any:
    """Hide scores where a boolean mask is True; add any other mask."""
    if mask.dtype == torch.bool:
        return scores.masked_fill(mask, float("-inf"))
    return scores + mask


# Normalization.


@compose("batch_norm")
def _batch_norm(
    x: Any, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5, cudnn_enabled: bool = True,
) -> Any:  # fmt: skip
    """Normalize with the statistics of the global batch."""
    dtype = x.dtype
    x = as_dtype(x, summed_in(dtype))
    channels = (1, -1, *(1,) * (x.ndim - 2))  # a shape that broadcasts to that of x
    mean = running_mean
    var = running_var
    if training:
        dims = (0, *range(2, x.ndim))
        n = math.prod(x.shape[dim] for dim in dims)
        if n <= 1:
            raise ValueError(
                "Expected more than 1 value per channel when training, got input size "
                f"{tuple(x.shape)}"
            )
        mean = x.mean(dims)
        var = ((x - mean.reshape(channels)) ** 2).mean(dims)
        if running_mean is not None:
            with torch.no_grad():
                running_mean.lerp_(mean.detach().to(running_mean.dtype), momentum)
                # The variance of a sample: n - 1 in place of n.
                unbiased = var.detach() * (n / (n - 1))
                running_var.lerp_(unbiased.to(running_var.dtype), momentum)
                del unbiased  # it would live until the result is computed

    # (x - mean) / std * weight + bias, as one product and one sum of the size of x.
    scale = (var + eps).rsqrt()
    if weight is not None:
        scale = scale * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    y = x * scale.reshape(channels) + shift.reshape(channels)
    return as_dtype(y, dtype)


@compose("instance_norm")
def _instance_norm(
    x: Any, running_mean: Any = None, running_var: Any = None, *args: Any, **kwargs: Any
) -> Any:
    if running_mean is not None or running_var is not None:
        raise LayoutError(
            "instance_norm of arrays does not take running statistics. Use "
            "track_running_stats=False."
        )
    return NotImplemented


# Dropout.


def _dropout(
    ndim: int | None, x: Any, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    """Drop elements; with `ndim` given, channels of an array of that many dims."""
    if not 0 <= p <= 1:
        raise ValueError(f"dropout: p must be from 0 to 1; got {p}.")
    if not training or p == 0:
        return x
    if ndim not in (None, x.ndim):
        return NotImplemented
    if p == 1:
        return x * 0  # the scale 1 / (1 - p) would be infinite
    shape = x.shape if ndim is None else (*x.shape[:2], *(1,) * (x.ndim - 2))
    is_kept = bernoulli_like(x, shape, 1 - p, dtype=torch.bool)
    scale = 1 / (1 - p)
    has_own_derivatives = not transformed() and not has_tangent(x.shards)
    if is_kept.layout == x.layout and has_own_derivatives:
        pairs = zip(x.shards, is_kept.shards, strict=True)
        shards = [_KeptElements.apply(shard, mask, scale) for shard, mask in pairs]
        return Sharded(x.shape, x.layout, tuple(shards))
    return x * scale * is_kept


class _KeptElements(Function):
    """The elements of a mask, times a scale: one kernel each way, whose mask has one byte each."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return torch.ops.aten.native_dropout_backward(x, mask, scale)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (mask,) = ctx.saved_tensors
        return _KeptElements.apply(cotangents[0], mask, ctx.scale), None, None


compose("dropout")(partial(_dropout, None))
compose("dropout1d")(partial(_dropout, 3))
compose("dropout2d")(partial(_dropout, 4))
compose("dropout3d")(partial(_dropout, 5))


# Losses.


def _reduced(losses: Any, reduction: str, count: Any = None) -> Any:
    """Reduce elementwise losses; a mean is over all elements, or over `count`.

    The result is replicated, except along the axes of `explicit`: there it stays unreduced.
    """
    if reduction == "none":
        return losses
    if reduction not in ("mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    total = losses.sum(dtype=summed_in(losses.dtype))
    if reduction == "mean":
        if count is None:
            count = losses.numel()
        total = total / count
    mode = array_mode()
    if mode.explicit_axes != "all":
        spec = P()
        if mode.explicit_axes:
            unreduced = [axis for axis in total.spec.unreduced if axis in mode.explicit_axes]
            spec = P(unreduced=tuple(unreduced))
        total = with_spec(total, spec, "loss")
    return as_dtype(total, losses.dtype)


def _loss(
    func: Any,
    *args: Any,
    reduction: str = "mean",
    size_average: Any = None,
    reduce: Any = None,
    **kwargs: Any,
) -> Any:
    """Compute a loss from its elements."""
    if size_average is not None or reduce is not None:
        reduction = _Reduction.legacy_get_string(size_average, reduce)
    if reduction == "none":
        return NotImplemented
    losses = func(*args, reduction="none", **kwargs)
    if reduction == "batchmean":
        return _reduced(losses, "sum") / losses.shape[0]
    weight = kwargs.get("weight")
    if func is F.mse_loss and weight is not None:  # the others divide by the number of elements
        return _reduced(losses, reduction, weight.sum())
    return _reduced(losses, reduction)


def _rows(results: Any, *args: Any, weight: Any = None, **kwargs: Any) -> Rule:
    """Label the batch dim, where losses are sums over classes."""
    batch = "n" * results[0].ndim
    terms: list[str] = []
    for x in arrays_in(args, kwargs):
        term = batch + "C" * x.ndim
        terms.append(term[: x.ndim])
    return Rule(f"{','.join(terms)}->{batch}", broadcasts=False)


_ELEMENTWISE = """l1_loss mse_loss smooth_l1_loss huber_loss binary_cross_entropy
binary_cross_entropy_with_logits soft_margin_loss hinge_embedding_loss poisson_nll_loss
margin_ranking_loss kl_div"""
_BY_ROW = """multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss
cosine_embedding_loss triplet_margin_loss"""
elementwise(_ELEMENTWISE)
rule(_BY_ROW)(_rows)
for _name in (*_ELEMENTWISE.split(), *_BY_ROW.split()):
    compose(_name)(partial(_loss, getattr(F, _name)))


@compose("gaussian_nll_loss")
def _gaussian_nll_loss(
    input: Any,
    target: Any,
    var: Any,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Any:
    if isinstance(var, float):
        var = torch.full_like(input, var)
    if var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    # The gradient ignores the bound, as torch's does.
    var = var + (var.clamp_min(eps) - var).detach()
    constant = math.log(2 * math.pi) if full else 0
    losses = 0.5 * (var.log() + (input - target) ** 2 / var + constant)
    return _reduced(losses, reduction)


# Losses of classes.


def _class_weights(logs: Any, target: Any, weight: Any, ignore_index: int) -> tuple[Any, Any]:
    """Return the class of every row, and its weight: 0 for rows to ignore."""
    is_valid = target != ignore_index
    classes = torch.where(is_valid, target, 0)
    if weight is None:
        return classes, is_valid.to(logs.dtype)
    weights = F.embedding(classes, weight.unsqueeze(-1)).squeeze(-1)
    return classes, torch.where(is_valid, weights, 0)


@compose("nll_loss nll_loss2d nll_loss_nd")
def _nll_loss(
    input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean",
) -> Any:  # fmt: skip
    class_dim = 1 if input.ndim > 1 else 0
    if input.ndim - 1 != target.ndim:
        expected = (*input.shape[:1], *input.shape[2:])
        raise ValueError(
            f"nll_loss: expected target of shape {expected}; got {tuple(target.shape)}"
        )
    classes, weights = _class_weights(input, target, weight, ignore_index)
    losses = -input.gather(class_dim, classes.unsqueeze(class_dim)).squeeze(class_dim)
    # 0 times an infinite loss would be nan.
    losses = torch.where(target != ignore_index, losses * weights, 0)
    return _reduced(losses, reduction, weights.sum() if reduction == "mean" else None)


@compose("cross_entropy")
def _cross_entropy(
    input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    class_dim = 1 if input.ndim > 1 else 0
    logs = input.log_softmax(class_dim)
    n = input.shape[class_dim]
    scaled = logs
    if weight is not None:
        dims_after = (1,) * (input.ndim - class_dim - 1)
        scaled = logs * weight.reshape(n, *dims_after)

    if target.is_floating_point():  # probabilities of classes
        if label_smoothing:
            target = target * (1 - label_smoothing) + label_smoothing / n
        return _reduced(-(scaled * target).sum(class_dim), reduction)

    if not label_smoothing:
        return F.nll_loss(logs, target, weight, ignore_index=ignore_index, reduction=reduction)
    losses = F.nll_loss(logs, target, weight, ignore_index=ignore_index, reduction="none")
    smooth = torch.where(target != ignore_index, -scaled.sum(class_dim), 0)
    losses = (1 - label_smoothing) * losses + label_smoothing / n * smooth
    _, weights = _class_weights(logs, target, weight, ignore_index)
    return _reduced(losses, reduction, weights.sum() if reduction == "mean" else None)
