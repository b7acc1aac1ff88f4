"""Rows of torch.nn.functional: normalization, losses, pooling, dropout.

A loss is computed element by element, then reduced by rows of its own; so its gradient is right for any layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import _reduction as _Reduction
from torch.nn import functional as F

from fshard.array.communicate import state, with_spec
from fshard.array.contractions import attention_with_dropout
from fshard.array.create import bernoulli_like
from fshard.array.reductions import is_sharded
from fshard.array.rules import TABLE, Labels, Row, Rule, all_letters, broadcast, compose, rule, tensors_in
from fshard.array.views import along
from fshard.errors import LayoutError
from fshard.mesh.layout import P

# Normalization.


@rule("layer_norm rms_norm")
def _layer_norm(
    input: Any, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None, eps: Any = None
) -> Rule:
    return along(input, *range(input.ndim - len(normalized_shape), input.ndim), is_linear=False)


def _affine(x: Any, weight: Any, bias: Any) -> Any:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


@compose("layer_norm")
def _layer_norm_of_sharded(
    x: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    dims = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    if not is_sharded(x, dims):
        return NotImplemented
    x = x - x.mean(dims, True)
    return _affine(x * ((x * x).mean(dims, True) + eps).rsqrt(), weight, bias)


@compose("rms_norm")
def _rms_norm_of_sharded(x: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    dims = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    if not is_sharded(x, dims):
        return NotImplemented
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return _affine(x * ((x * x).mean(dims, True) + eps).rsqrt(), weight, None)


@compose("batch_norm")
def _batch_norm(
    x: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    """Normalize with the statistics of the global batch."""
    dims, shape = (0, *range(2, x.ndim)), (1, -1, *(1,) * (x.ndim - 2))
    if training:
        n = math.prod(x.shape[dim] for dim in dims)
        if n <= 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")
        mean = x.mean(dims)
        var = ((x - mean.reshape(shape)) ** 2).mean(dims)
        if running_mean is not None:
            with torch.no_grad():
                running_mean.lerp_(mean.detach(), momentum)
                running_var.lerp_(var.detach() * (n / (n - 1)), momentum)
    else:
        mean, var = running_mean, running_var
    y = (x - mean.reshape(shape)) * (var + eps).rsqrt().reshape(shape)
    return _affine(y, *(None if one is None else one.reshape(shape) for one in (weight, bias)))


@rule("group_norm")
def _group_norm(
    input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *rest: Any
) -> Rule:
    return along(input, *range(1, input.ndim), is_linear=False)


@rule("instance_norm")
def _instance_norm(input: Any, running_mean: Any = None, running_var: Any = None, *args: Any, **kwargs: Any) -> Rule:
    if running_mean is not None or running_var is not None:
        raise LayoutError("instance_norm of arrays does not take running statistics. Use track_running_stats=False.")
    own: Labels = ("n", "c", *(None,) * (input.ndim - 2))
    vectors = [x for x in tensors_in([*args, kwargs]) if x.ndim == 1]
    return Rule([(input, own), *((x, ("c",)) for x in vectors)], [own])


# Windows over space: batch and channels are shardable.


def _window_rule(spatial: int) -> Callable[..., Rule]:
    def rule_of(input: Any, *args: Any, **kwargs: Any) -> Rule:
        own = (*(f"d{d}" for d in range(input.ndim - spatial)), *(None,) * spatial)
        return Rule([(input, own)], [own])

    return rule_of


for _d in (1, 2, 3):
    for _name in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "lp_pool"):
        TABLE[f"{_name}{_d}d"] = Row(_window_rule(_d))


@rule("interpolate upsample")
def _interpolate(input: Any, *args: Any, **kwargs: Any) -> Rule:
    return Rule([(input, own := ("n", "c", *(None,) * (input.ndim - 2)))], [own])


@rule("cosine_similarity pairwise_distance")
def _similarity(x1: Any, x2: Any, *args: Any, **kwargs: Any) -> Rule:
    name_dim = kwargs.get("dim", args[0] if args and isinstance(args[0], int) else None)
    full, labels = broadcast(x1.shape, x2.shape)
    dim = (name_dim if name_dim is not None else 1) % len(full)
    lost = f"d{dim}"
    own = [tuple(None if label == lost else label for label in labelled) for labelled in labels]
    return Rule(list(zip((x1, x2), own, strict=True)), [tuple(a for a in all_letters(full) if a != lost)])


@rule("cdist")
def _cdist(x1: Any, x2: Any, *args: Any, **kwargs: Any) -> Rule:
    full, (first, second) = broadcast(x1.shape[:-2], x2.shape[:-2])
    return Rule([(x1, (*first, "i", None)), (x2, (*second, "j", None))], [(*all_letters(full), "i", "j")])


# Dropout.


@compose("dropout")
def _dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if not training or p == 0:
        return x
    return x * 0 if p == 1 else x * (bernoulli_like(x, x.shape, 1 - p) / (1 - p))


@compose("alpha_dropout feature_alpha_dropout")
def _other_dropout(x: Any, p: float = 0.5, training: bool = False, inplace: bool = False) -> Any:
    return x if not training or p == 0 else NotImplemented


@compose("dropout1d dropout2d dropout3d feature_dropout")
def _channel_dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if not training or p == 0:
        return x
    if p == 1:
        return x * 0
    shape = (*x.shape[:2], *(1,) * (x.ndim - 2))
    return x * (bernoulli_like(x, shape, 1 - p) / (1 - p))


@compose("scaled_dot_product_attention")
def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    if dropout_p == 0:
        return NotImplemented
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    return attention_with_dropout(query, key, value, attn_mask, dropout_p, is_causal, scale)


@compose("multi_head_attention_forward")
def _multi_head_attention(
    query: Any, key: Any, value: Any, embed_dim_to_check: int, num_heads: int, in_proj_weight: Any, in_proj_bias: Any,
    bias_k: Any, bias_v: Any, add_zero_attn: bool, dropout_p: float, out_proj_weight: Any, out_proj_bias: Any,
    training: bool = True, key_padding_mask: Any = None, need_weights: bool = True, attn_mask: Any = None,
    use_separate_proj_weight: bool = False, average_attn_weights: bool = True, is_causal: bool = False, **rest: Any,
) -> Any:  # fmt: skip
    others = [one for name, one in rest.items() if name in ("static_k", "static_v")]
    if (
        use_separate_proj_weight
        or add_zero_attn
        or query.ndim != 3
        or any(x is not None for x in (bias_k, bias_v, *others))
    ):
        return NotImplemented
    biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    projected = zip((query, key, value), in_proj_weight.chunk(3), biases, strict=True)
    q, k, v = (F.linear(x, w, b).unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3) for x, w, b in projected)
    mask = None if attn_mask is None else _additive(attn_mask, q)
    if mask is not None and mask.ndim == 3:
        mask = mask.unflatten(0, (-1, num_heads))
    if key_padding_mask is not None:
        padding = _additive(key_padding_mask, q).unsqueeze(1).unsqueeze(1)
        mask = padding if mask is None else mask + padding
    p = dropout_p if training else 0.0
    weights = None
    if need_weights:
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), p)
        y = weights @ v
        weights = weights.mean(1) if average_attn_weights else weights
    else:
        y = F.scaled_dot_product_attention(q, k, v, mask, p, is_causal and mask is None)
    return F.linear(y.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias), weights


def _additive(mask: Any, x: Any) -> Any:
    """Return a mask that is added to scores; in a boolean one True hides."""
    return torch.zeros_like(mask, dtype=x.dtype).masked_fill(mask, float("-inf")) if mask.dtype == torch.bool else mask


# Losses.


def _reduced(losses: Any, reduction: str, count: Any = None) -> Any:
    """Reduce elementwise losses; a mean is over all elements, or over `count`. The result is replicated."""
    if reduction == "none":
        return losses
    if reduction not in ("mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    total = losses.sum()
    if reduction == "mean":
        total = (
            total / (math.prod(losses.shape) if count is None else count)
            if count is not None or losses.numel()
            else total * float("nan")
        )
    return total if state.explicit else with_spec(total, P(), "loss")


def _loss(name: str) -> Callable[..., Any]:
    func: Any = getattr(F, name)

    def loss(*args: Any, reduction: str = "mean", size_average: Any = None, reduce: Any = None, **kwargs: Any) -> Any:
        if size_average is not None or reduce is not None:
            reduction = _Reduction.legacy_get_string(size_average, reduce)
        if reduction == "none":
            return NotImplemented
        return _reduced(func(*args, reduction="none", **kwargs), reduction)

    return loss


_ELEMENTWISE = (
    "l1_loss mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits soft_margin_loss "
    "hinge_embedding_loss poisson_nll_loss margin_ranking_loss"
)
_BY_ROW = (
    "multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss cosine_embedding_loss triplet_margin_loss"
)


def _elementwise_rule(*args: Any, **kwargs: Any) -> Rule:
    arrays = tensors_in([list(args), kwargs])
    full, labels = broadcast(*(x.shape for x in arrays))
    return Rule(list(zip(arrays, labels, strict=True)), [all_letters(full)], is_elementwise=True)


def _by_row_rule(*args: Any, **kwargs: Any) -> Rule:
    arrays = [x for x in tensors_in([list(args), kwargs]) if x is not kwargs.get("weight")]
    batch = args[0].ndim > 1
    named = [(x, (("n",) if batch else (None,)) + (None,) * (x.ndim - 1)) for x in arrays if x.ndim]
    return Rule(named, [("n",) if batch else ()])


for _name in _ELEMENTWISE.split():
    TABLE[_name] = Row(_elementwise_rule, _loss(_name))
for _name in _BY_ROW.split():
    TABLE[_name] = Row(_by_row_rule, _loss(_name))


@compose("kl_div")
def _kl_div(
    input: Any,
    target: Any,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Any:
    losses = target.exp() * (target - input) if log_target else torch.xlogy(target, target) - target * input
    if reduction == "batchmean":
        return _reduced(losses, "sum") / input.shape[0]
    return _reduced(losses, reduction)


@compose("gaussian_nll_loss")
def _gaussian_nll_loss(
    input: Any, target: Any, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Any:
    if not isinstance(var, float) and var.ndim == input.ndim - 1 and var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    var = torch.full_like(input, var) if isinstance(var, float) else var
    var = var + (var.clamp_min(eps) - var).detach()  # the gradient ignores the bound, as torch's does
    losses = 0.5 * (var.log() + (input - target) ** 2 / var + (math.log(2 * math.pi) if full else 0))
    return _reduced(losses, reduction)


@compose("nll_loss nll_loss2d nll_loss_nd")
def _nll_loss(
    input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100, reduce: Any = None,
    reduction: str = "mean",
) -> Any:  # fmt: skip
    classes = 1 if input.ndim > 1 else 0
    if input.ndim - 1 != target.ndim:
        raise ValueError(
            f"nll_loss: expected target of shape {(*input.shape[:1], *input.shape[2:])}; got {tuple(target.shape)}"
        )
    valid = target != ignore_index
    index = torch.where(valid, target, 0)
    losses = -input.gather(classes, index.unsqueeze(classes)).squeeze(classes)
    weights = valid.to(input.dtype) if weight is None else torch.where(valid, _looked_up(weight, index), 0)
    losses = torch.where(valid, losses * weights, 0)
    return _reduced(losses, reduction, weights.sum() if reduction == "mean" else None)


def _looked_up(weight: Any, index: Any) -> Any:
    return F.embedding(index, weight.unsqueeze(-1)).squeeze(-1)


@compose("cross_entropy")
def _cross_entropy(
    input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100, reduce: Any = None,
    reduction: str = "mean", label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    classes = 1 if input.ndim > 1 else 0
    logs, n = input.log_softmax(classes), input.shape[classes]
    shape = (n, *(1,) * (input.ndim - classes - 1))
    if target.is_floating_point():
        target = target * (1 - label_smoothing) + label_smoothing / n if label_smoothing else target
        losses = -(logs * target if weight is None else logs * target * weight.reshape(shape)).sum(classes)
        return _reduced(losses, reduction, math.prod(losses.shape) if reduction == "mean" else None)
    plain = F.nll_loss(
        logs, target, weight, ignore_index=ignore_index, reduction="sum" if reduction == "mean" else reduction
    )
    if reduction == "mean" or label_smoothing:
        valid = target != ignore_index
        counts = (
            valid.to(input.dtype)
            if weight is None
            else torch.where(valid, _looked_up(weight, torch.where(valid, target, 0)), 0)
        )
    count = counts.sum() if reduction == "mean" else 1  # pyright: ignore[reportPossiblyUnboundVariable]
    if not label_smoothing:
        return plain / count if reduction == "mean" else plain
    smooth = -(logs if weight is None else logs * weight.reshape(shape)).sum(classes)
    smooth = _reduced(torch.where(valid, smooth, 0), "sum" if reduction == "mean" else reduction)  # pyright: ignore[reportPossiblyUnboundVariable]
    return ((1 - label_smoothing) * plain + label_smoothing / n * smooth) / count
