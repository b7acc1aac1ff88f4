"""Rows of reductions, and of operations along a dim.

A sum over a sharded dim is unreduced. Others run locally where their dims are unsharded; elsewhere they are composed of
sums, and of maxima over the devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fshard.array.communicate import largest, with_spec
from fshard.array.rules import TABLE, Labels, Row, Rule, as_dims, compose, letters, reduced, rule, tensors_in, words
from fshard.array.views import along
from fshard.mesh.collectives.autograd import recorded, transformed
from fshard.mesh.layout import P
from fshard.mesh.layout.sharded import Sharded


def is_sharded(x: Any, dims: Sequence[int]) -> bool:
    """Return True if some of these dims are sharded."""
    if not isinstance(x, Sharded) or x.spec.is_flat or x.spec.at:
        return False
    axes = x.spec.dims(x.ndim)
    return any(axes[dim] for dim in dims) if x.ndim else False


def probed(func: Any, x: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[int, ...], list[Labels]]:
    """Return the dims that a function reduces, and the labels of its results: a dim of an unusual length is kept."""
    lengths = [101 + 2 * dim for dim in range(x.ndim)]
    like = torch.empty(lengths, dtype=x.dtype, device="meta")
    names = {length: f"d{dim}" for dim, length in enumerate(lengths)}
    found = [tuple(names.get(length) for length in y.shape) for y in tensors_in(func(like, *args, **kwargs))]
    return tuple(dim for dim in range(x.ndim) if f"d{dim}" not in found[0]), found


def _reduction_rule(func: Any, *, is_sum: bool = False, is_linear: bool = False) -> Callable[..., Rule]:
    def rule_of(x: Any, *args: Any, **kwargs: Any) -> Rule:
        dims, found = probed(func, x, args, kwargs)
        summed = frozenset(f"d{dim}" for dim in dims if is_sum)
        own = letters(x) if is_sum else letters(x, *dims)
        flat = is_sum and not args and not kwargs.keys() - {"dtype"}
        return Rule([(x, own)], found, linear=[(x,)] if is_linear else (), summed=summed, is_elementwise=flat)

    return rule_of


for _name in words(
    "prod amax amin max min argmax argmin all any logsumexp median nanmedian mode std var norm aminmax kthvalue"
):
    TABLE[_name] = Row(_reduction_rule(getattr(Tensor, _name)))
for _name in words("var_mean std_mean"):
    TABLE[_name] = Row(_reduction_rule(getattr(torch, _name)))
TABLE["linalg_vector_norm"] = Row(_reduction_rule(torch.linalg.vector_norm))
TABLE["sum"] = Row(_reduction_rule(Tensor.sum, is_sum=True, is_linear=True))
TABLE["nansum"] = Row(_reduction_rule(Tensor.nansum, is_sum=True))
TABLE["count_nonzero"] = Row(_reduction_rule(Tensor.count_nonzero, is_sum=True))

Composed = Callable[..., Any]


def _where_sharded(names: str) -> Callable[[Composed], Composed]:
    """Compose a reduction where its dims are sharded: the function gets (x, dims, keepdim, args, kwargs)."""

    def add(function: Composed) -> Composed:
        for name in names.split():
            func = torch.linalg.vector_norm if name == "linalg_vector_norm" else getattr(Tensor, name)

            def composed(x: Any, *args: Any, _func: Any = func, **kwargs: Any) -> Any:
                dims, found = probed(_func, x, args, kwargs)
                if len(found) > 1 or not is_sharded(x, dims):
                    return NotImplemented
                return function(x, dims, len(found[0]) == x.ndim, args, kwargs)

            compose(name)(composed)
        return function

    return add


@compose("sum")
def _sum(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, **kwargs: Any) -> Any:
    """Drop the dims of a full sum, so that it works on flat shards."""
    if dim is None or keepdim or kwargs or len(as_dims(x, dim)) < x.ndim:
        return NotImplemented
    return torch.sum(x, dtype=dtype)


@compose("mean")
def _mean(
    x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, axis: Any = None, out: Any = None
) -> Any:
    dims = as_dims(x, dim if axis is None else axis)
    dtype = x.dtype if dtype is None else dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        raise RuntimeError(f"mean(): the dtype must be floating point or complex; got {dtype}.")
    if len(dims) == x.ndim and not keepdim:
        return torch.sum(x, dtype=dtype) / math.prod(x.shape)
    return torch.sum(x, dims, keepdim, dtype=dtype) / math.prod(x.shape[dim] for dim in dims)


@compose("nanmean")
def _nanmean(x: Any, *args: Any, **kwargs: Any) -> Any:
    return torch.nansum(x, *args, **kwargs) / torch.sum(~torch.isnan(x), *args, **kwargs)


def peak(x: Any, dims: Sequence[int], *, is_max: bool = True) -> Any:
    """Return the maximum over dims, kept with length 1, without a gradient."""
    x = with_spec(x.detach(), P(*x.spec.entries), "amax" if is_max else "amin")
    axes = tuple(axis for dim in dims for axis in x.spec.dims(x.ndim)[dim])
    spec = P(*(() if dim in dims else own for dim, own in enumerate(x.spec.dims(x.ndim))))
    shards = tuple(shard.amax(dims, True) if is_max else shard.amin(dims, True) for shard in x.shards)
    shape = tuple(1 if dim in dims else length for dim, length in enumerate(x.shape))
    return largest(Sharded(shape, x.layout.with_spec(spec), shards), axes, "amax" if is_max else "amin", is_max=is_max)


def _extreme(is_max: bool) -> Composed:
    def composed(x: Any, dims: Sequence[int], keepdim: bool, args: Any, kwargs: Any) -> Any:
        if x.dtype == torch.bool:
            return (x.any if is_max else x.all)(tuple(dims), keepdim)
        y = peak(x, dims, is_max=is_max)
        if transformed() or recorded(x.shards):  # the gradient is divided among equal elements
            equal = x == y
            y = x.masked_fill(~equal, 0).sum(dims, True) / equal.sum(dims, True)
        return y if keepdim else y.squeeze(tuple(dims))

    return composed


_where_sharded("amax max")(_extreme(True))
_where_sharded("amin min")(_extreme(False))
_max_of_one, _min_of_one = TABLE["max"].compose, TABLE["min"].compose


@compose("max")
def _max(x: Any, other: Any = None, *args: Any, **kwargs: Any) -> Any:
    if isinstance(other, Sharded):
        return torch.maximum(x, other)  # pyright: ignore[reportArgumentType]
    return NotImplemented if other is not None or kwargs else _max_of_one(x)  # pyright: ignore[reportOptionalCall]


@compose("min")
def _min(x: Any, other: Any = None, *args: Any, **kwargs: Any) -> Any:
    if isinstance(other, Sharded):
        return torch.minimum(x, other)  # pyright: ignore[reportArgumentType]
    return NotImplemented if other is not None or kwargs else _min_of_one(x)  # pyright: ignore[reportOptionalCall]


@_where_sharded("any")
def _any(x: Any, dims: Sequence[int], keepdim: bool, args: Any, kwargs: Any) -> Any:
    return (x != 0).sum(dims, keepdim) > 0


@_where_sharded("all")
def _all(x: Any, dims: Sequence[int], keepdim: bool, args: Any, kwargs: Any) -> Any:
    return (x == 0).sum(dims, keepdim) == 0


@_where_sharded("logsumexp")
def _logsumexp(x: Any, dims: Sequence[int], keepdim: bool, args: Any, kwargs: Any) -> Any:
    top = peak(x, dims)
    top = torch.where(top.isfinite(), top, 0)
    y = (x - top).exp().sum(dims, True).log() + top
    return y if keepdim else y.squeeze(tuple(dims))


def root(x: Any) -> Any:
    """Return the square root, whose gradient is 0 at 0."""
    return torch.where(x == 0, 0, torch.where(x == 0, 1, x).sqrt())


@_where_sharded("var")
def _var(x: Any, dims: Sequence[int], keepdim: bool, args: Any, kwargs: Any) -> Any:
    unbiased = [one for one in (*args, kwargs.get("unbiased")) if isinstance(one, bool)]
    correction = kwargs.get("correction", int(unbiased[0]) if unbiased else 1)
    n = math.prod(x.shape[dim] for dim in dims)
    squares = ((x - x.mean(dims, True)) ** 2).sum(dims, keepdim)
    return squares / max(0, n - correction) if n - correction > 0 else squares * float("nan")


@_where_sharded("std")
def _std(x: Any, dims: Sequence[int], keepdim: bool, args: Any, kwargs: Any) -> Any:
    return root(_var(x, dims, keepdim, args, kwargs))


@_where_sharded("norm linalg_vector_norm")
def _norm(x: Any, dims: Sequence[int], keepdim: bool, args: Any, kwargs: Any) -> Any:
    p = kwargs.get("p", kwargs.get("ord", args[0] if args else 2))
    p = 2.0 if p in ("fro", None) else p
    if not isinstance(p, int | float) or kwargs.get("dtype") is not None or x.is_complex() or p <= 0:
        return NotImplemented
    if math.isinf(p):
        return x.abs().amax(dims, keepdim)
    if p == 1:
        return x.abs().sum(dims, keepdim)
    return root((x * x).sum(dims, keepdim)) if p == 2 else NotImplemented


# Along a dim.


def _along_rule(default: int | None, is_linear: bool) -> Callable[..., Rule]:
    def rule_of(x: Any, *args: Any, **kwargs: Any) -> Rule:
        given = [one for one in args if isinstance(one, int) and not isinstance(one, bool)]
        dim = kwargs.get("dim", kwargs.get("axis", given[0] if given else default))
        return along(x, *as_dims(x, dim), is_linear=is_linear)

    return rule_of


for _name in words("cumsum diff"):
    TABLE[_name] = Row(_along_rule(-1, True))
for _name in words("cumprod cummax cummin logcumsumexp softmax log_softmax softmin sort argsort msort glu normalize"):
    TABLE[_name] = Row(_along_rule({"glu": -1, "normalize": 1, "msort": 0}.get(_name, -1), False))


@rule("diff")
def _diff(x: Any, n: int = 1, dim: int = -1) -> Rule:
    return along(x, dim)


@rule("normalize")
def _normalize(input: Any, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None) -> Rule:
    return along(input, dim, is_linear=False)


@rule("topk")
def _topk(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Rule:
    return along(x, dim, is_linear=False)


@rule("kthvalue")
def _kthvalue(x: Any, k: int, dim: int = -1, keepdim: bool = False) -> Rule:
    own = letters(x, dim)
    return Rule([(x, own)], [reduced(own, as_dims(x, dim), keepdim)])


@rule("renorm quantile nanquantile cov corrcoef trace")
def _all_local(x: Any, *args: Any, **kwargs: Any) -> Rule:
    return Rule([], [])


@compose("softmax special_softmax")
def _softmax(x: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    dtype = _stacklevel if isinstance(_stacklevel, torch.dtype) else dtype
    if dim is None or not is_sharded(x, as_dims(x, dim)):
        return NotImplemented
    x = x if dtype is None else x.to(dtype)
    e = (x - peak(x, as_dims(x, dim))).exp()
    return e / e.sum(dim, True)


@compose("softmin")
def _softmin(x: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    return torch.nn.functional.softmax(-x, dim, _stacklevel, dtype)


@compose("log_softmax special_log_softmax")
def _log_softmax(x: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    dtype = _stacklevel if isinstance(_stacklevel, torch.dtype) else dtype
    if dim is None or not is_sharded(x, as_dims(x, dim)):
        return NotImplemented
    x = x if dtype is None else x.to(dtype)
    x = x - peak(x, as_dims(x, dim))
    return x - x.exp().sum(dim, True).log()


@compose("normalize")
def _normalized(x: Any, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None) -> Any:
    return (
        x / torch.linalg.vector_norm(x, p, dim, True).clamp_min(eps)
        if is_sharded(x, as_dims(x, dim))
        else NotImplemented
    )


TABLE["special_softmax"] = TABLE["special_softmax"]._replace(rule=TABLE["softmax"].rule)
TABLE["special_log_softmax"] = TABLE["special_log_softmax"]._replace(rule=TABLE["log_softmax"].rule)
