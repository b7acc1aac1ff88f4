"""Rows of operations along some dims: reductions, softmax, sorting, windows, statistics.

They run locally where these dims are unsharded. Sums over a sharded dim are unreduced. A few others are composed of
sums, and of maxima over the devices, where their dims are sharded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from inspect import isroutine
from typing import Any

import torch
from torch import Tensor

from fshard.array.communicate import largest, spec_like, with_spec
from fshard.array.rules import TABLE, Rule, arrays_in, as_dims, compose, map_arrays, rule, spell
from fshard.mesh.collectives.autograd import recorded, transformed
from fshard.mesh.layout import Layout, P
from fshard.mesh.layout.sharded import Sharded

DimsOf = Callable[..., Any]
"""A function of a call's arguments that returns the dims of its first array which it works along; None means all."""


def along(dims_of: DimsOf, *, is_linear: bool = False, is_sum: bool = False) -> Callable[..., Rule]:
    """Return the rule of operations that need all elements along some dims.

    The results have the other dims; these dims too, of any length, unless they are reduced.
    """

    def rule_of(results: Sequence[Any], x: Any, *args: Any, **kwargs: Any) -> Rule:
        dims = as_dims(x, dims_of(x, *args, **kwargs))
        linear = "each" if is_linear and not arrays_in(args, kwargs) else ()
        if is_sum and not args and not kwargs.keys() - {"dtype"}:
            return Rule("...->", linear)
        full = spell(x.ndim, dict.fromkeys(dims, "D"))
        reduced = "".join(letter for dim, letter in enumerate(full) if dim not in dims)
        by_ndim = {x.ndim - len(dims): reduced, x.ndim + 1: f"{full}D", x.ndim: full}
        return Rule(
            f"{spell(x.ndim) if is_sum else full}->{','.join(by_ndim.get(y.ndim, '') for y in results)}",
            linear,
        )

    return rule_of


def dim_argument(position: int, default: Any) -> DimsOf:
    """Return a function that finds the argument `dim`, by its position after the array and its default."""

    def dims_of(x: Any, *args: Any, **kwargs: Any) -> Any:
        dims = [
            kwargs[name]
            for name in ("dim", "axis", "dims", "dimension")
            if kwargs.get(name) is not None
        ]
        dim = dims[0] if dims else args[position] if len(args) > position else default
        return default if isinstance(dim, bool) else dim  # var(x, unbiased)

    return dims_of


def last_dims(count: int) -> DimsOf:
    """Return a function that returns the last dims."""
    return lambda x, *args, **kwargs: range(x.ndim - count, x.ndim)


def dims_from(first: int) -> DimsOf:
    """Return a function that returns the dims from a number on."""
    return lambda x, *args, **kwargs: range(first, x.ndim)


def _shape(x: Any, normalized_shape: Sequence[int], *args: Any, **kwargs: Any) -> Any:
    return range(x.ndim - len(normalized_shape), x.ndim)


def _padded(x: Any, pad: Sequence[int], mode: str = "constant", value: Any = None) -> Any:
    return [
        x.ndim - 1 - index // 2 for index, width in enumerate(pad) if width or mode != "constant"
    ] or x.ndim - 1


def _flipped(x: Any, *dims: Any, **kwargs: Any) -> Any:
    return dim_argument(0, None)(x, *dims, **kwargs) if kwargs or len(dims) == 1 else dims


_REDUCTIONS = "prod amax amin max min argmax argmin all any logsumexp median nanmedian std var std_mean var_mean aminmax"
for _names, _dims_of in {
    _REDUCTIONS: dim_argument(0, None),
    "mode cumprod cummax cummin logcumsumexp softmax log_softmax special_softmax special_log_softmax": dim_argument(
        0, -1
    ),
    "sort argsort glu": dim_argument(0, -1),
    "topk kthvalue": dim_argument(1, -1),
    "norm linalg_vector_norm": dim_argument(1, None),
    "msort fliplr flipud rot90 renorm trace quantile nanquantile": dims_from(0),
    "pad": _padded,
    "layer_norm rms_norm": _shape,
    "group_norm instance_norm": dims_from(1),
    "interpolate upsample": dims_from(2),
}.items():
    rule(_names)(along(_dims_of))
for _names, _dims_of in {
    "cumsum": dim_argument(0, -1),
    "diff": dim_argument(1, -1),
    "roll repeat_interleave": dim_argument(1, None),
    "flip": _flipped,
    "tril triu": last_dims(2),
    "pixel_shuffle pixel_unshuffle channel_shuffle": last_dims(3),
}.items():
    rule(_names)(along(_dims_of, is_linear=True))
rule("split split_with_sizes tensor_split", is_view=True)(along(dim_argument(1, 0), is_linear=True))
rule("narrow unfold", is_view=True)(along(dim_argument(0, 0), is_linear=True))
rule("sum")(along(dim_argument(0, None), is_linear=True, is_sum=True))
rule("nansum count_nonzero")(along(dim_argument(0, None), is_sum=True))
for _count in (1, 2, 3):
    _kinds = ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "lp_pool")
    rule(" ".join(f"{kind}{_count}d" for kind in _kinds))(along(last_dims(_count)))


# On unsharded arrays.

_MATRICES = """det logdet slogdet inverse pinverse cholesky cholesky_inverse cholesky_solve qr svd matrix_exp matrix_power
chain_matmul lu_solve cross kron cov corrcoef diag diag_embed diagflat block_diag"""
_DISCRETE = ("nonzero", "argwhere", "histc", "bincount", "unique", "unique_consecutive")
"""Names of functions whose results are replicated: their shapes depend on values, but for that of histc."""


def _compute_unsharded(func: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Compute on unsharded arrays; results are sharded like the first of them, unless their shapes depend on values."""
    full, like = (
        map_arrays(lambda x: with_spec(x, P(), name), (args, kwargs)),
        arrays_in(args, kwargs)[0],
    )
    calls = [
        map_arrays(lambda x, number=number: x.shards[number], full)
        for number in range(len(like.shards))
    ]
    results = [func(*positional, **named) for positional, named in calls]
    is_single = isinstance(results[0], Tensor)
    columns = zip(*([y] if is_single else y for y in results), strict=True)
    arrays = [Sharded(tuple(column[0].shape), Layout(like.mesh), column) for column in columns]
    arrays = [
        y if name in _DISCRETE else with_spec(y, spec_like(like, y.shape), name) for y in arrays
    ]
    return (
        arrays[0]
        if is_single
        else tuple(arrays)
        if type(results[0]) is tuple
        else type(results[0])(arrays)
    )


_UNSHARDED = {n: getattr(torch, n) for n in (*_MATRICES.split(), *_DISCRETE)}
for _name, _func in {
    **_UNSHARDED,
    **{f"linalg_{n}": f for n, f in vars(torch.linalg).items() if isroutine(f)},
}.items():
    if _name not in TABLE:
        compose(_name)(partial(_compute_unsharded, _func, _name))
compose("masked_select")(
    lambda x, mask: x.expand(torch.broadcast_shapes(x.shape, mask.shape))[mask.expand_as(x)]
)


# Over sharded dims: sums and maxima.

Formula = Callable[..., Any]


def where_sharded(
    names: str, dims_of: DimsOf, *, is_reduction: bool = True
) -> Callable[[Formula], None]:
    """Return the function that adds a composition for sharded dims: a function of (x, dims, ...) that keeps the dims."""

    def composed(name: str, formula: Formula, x: Any, *args: Any, **kwargs: Any) -> Any:
        dims = as_dims(x, dims_of(x, *args, **kwargs))
        if (
            not x.numel()
            or not x.shape
            or x.spec.is_flat
            or not any(x.spec.dims(x.ndim)[dim] for dim in dims)
        ):
            return NotImplemented
        if not is_reduction:
            return _in_wide_dtype(formula, kwargs.get("dtype") or x.dtype, x, dims, *args, **kwargs)
        func: Any = (
            torch.linalg.vector_norm if name == "linalg_vector_norm" else getattr(torch, name)
        )
        wanted = func(torch.empty(x.shape, dtype=x.dtype, device="meta"), *args, **kwargs)
        if not isinstance(wanted, Tensor):
            return NotImplemented
        y = _in_wide_dtype(formula, wanted.dtype, x, dims, *args, **kwargs)
        return y if y is NotImplemented or wanted.ndim == x.ndim else y.squeeze(dims)

    def add(formula: Formula) -> None:
        for name in names.split():
            compose(name)(partial(composed, name, formula))

    return add


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values are summed: float16 in 32 bits, since its squares and sums overflow."""
    return torch.float32 if dtype is torch.float16 else dtype


def _in_wide_dtype(
    formula: Formula, dtype: torch.dtype, x: Any, dims: Sequence[int], /, *args: Any, **kwargs: Any
) -> Any:
    """Compute a formula, whose result has a dtype, without overflows in float16 or in integers."""
    is_integer = not (x.is_floating_point() or x.is_complex())
    wide = dtype if is_integer and dtype.is_floating_point else summed_in(x.dtype)
    y = formula(x if wide is x.dtype else x.to(wide), dims, *args, **kwargs)
    return y if y is NotImplemented or y.dtype is dtype else y.to(dtype)


def peak(x: Any, dims: Sequence[int], *, is_max: bool = True) -> Any:
    """Return the maximum over dims, kept with length 1, without a gradient."""
    x = with_spec(x.detach(), P(*x.spec.entries), "amax" if is_max else "amin")
    entries = x.spec.dims(x.ndim)
    shards = tuple(
        shard.amax(dims, True) if is_max else shard.amin(dims, True) for shard in x.shards
    )
    shape = tuple(1 if dim in dims else length for dim, length in enumerate(x.shape))
    y = Sharded(
        shape,
        x.layout.with_spec(P(*(() if dim in dims else axes for dim, axes in enumerate(entries)))),
        shards,
    )
    return largest(
        y,
        tuple(axis for dim in dims for axis in entries[dim]),
        "amax" if is_max else "amin",
        is_max=is_max,
    )


def _compare(func: Any, reduce: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute max(x, y) of two arrays elementwise, and others as the reduction."""
    return func(x, *args) if args and isinstance(args[0], Sharded) else reduce(x, *args, **kwargs)


def _extreme(is_max: bool, x: Any, dims: Sequence[int], *args: Any, **kwargs: Any) -> Any:
    if x.dtype == torch.bool:
        return NotImplemented
    y = peak(x, dims, is_max=is_max)
    if transformed() or recorded(x.shards):  # the gradient is divided among equal elements
        equal = x == y
        y = x.masked_fill(~equal, 0).sum(dims, True) / equal.sum(dims, True)
    return y


where_sharded("amax max", dim_argument(0, None))(partial(_extreme, True))
where_sharded("amin min", dim_argument(0, None))(partial(_extreme, False))
for _name, _func, _reduce in (
    ("max", torch.maximum, TABLE["max"].compose),
    ("min", torch.minimum, TABLE["min"].compose),
):
    compose(_name)(partial(_compare, _func, _reduce))


@compose("sum")
def _sum(
    x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, **kwargs: Any
) -> Any:
    """Drop the dims of a full sum, so that it works on flat shards."""
    is_plain = dim is None or keepdim or kwargs or len(as_dims(x, dim)) < x.ndim
    return NotImplemented if is_plain else torch.sum(x, dtype=dtype)


@compose("mean")
def _mean(
    x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, axis: Any = None
) -> Any:
    dims, dtype = as_dims(x, dim if axis is None else axis), x.dtype if dtype is None else dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        raise RuntimeError(f"mean(): the dtype must be floating point or complex; got {dtype}.")
    mean = torch.sum(x, dims, keepdim, dtype=summed_in(dtype)) / math.prod(
        x.shape[dim] for dim in dims
    )
    return mean if mean.dtype is dtype else mean.to(dtype)


@compose("diff")
def _diff(x: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Any:
    arrays = [y for y in (prepend, x, append) if y is not None]
    return torch.diff(torch.cat(arrays, dim), n, dim) if len(arrays) > 1 else NotImplemented


compose("nanmean")(
    lambda x, *args, **more: torch.nansum(x, *args, **more) / torch.sum(~x.isnan(), *args, **more)
)


@where_sharded("logsumexp", dim_argument(0, None))
def _logsumexp(x: Any, dims: Sequence[int], *args: Any, **kwargs: Any) -> Any:
    top = peak(x, dims)
    top = torch.where(top.isfinite(), top, 0)
    return (x - top).exp().sum(dims, True).log() + top


def _var(
    x: Any,
    dims: Sequence[int],
    *args: Any,
    correction: Any = None,
    unbiased: bool = True,
    **kwargs: Any,
) -> Any:
    unbiased = next((arg for arg in args if isinstance(arg, bool)), unbiased)
    n = math.prod(x.shape[dim] for dim in dims) - (
        int(unbiased) if correction is None else correction
    )
    differences = x - x.mean(dims, True)
    squares = ((differences.abs() if x.is_complex() else differences) ** 2).sum(dims, True)
    return squares / n if n > 0 else squares * float("nan")


def _root(x: Any) -> Any:
    """Return the square root, whose gradient is 0 at 0."""
    return torch.where(x == 0, 0, torch.where(x == 0, 1, x).sqrt())


where_sharded("var", dim_argument(0, None))(_var)
where_sharded("std", dim_argument(0, None))(
    lambda x, dims, *args, **kwargs: _root(_var(x, dims, *args, **kwargs))
)


@where_sharded("norm linalg_vector_norm", dim_argument(1, None))
def _norm(x: Any, dims: Sequence[int], *args: Any, **kwargs: Any) -> Any:
    p = kwargs.get("p", kwargs.get("ord", args[0] if args else 2))
    p = 2 if p in ("fro", None) else p
    if kwargs.get("dtype") is not None or x.is_complex() or p not in (1, 2, math.inf):
        return NotImplemented
    if p == 2:
        return _root((x * x).sum(dims, True))
    return x.abs().sum(dims, True) if p == 1 else x.abs().amax(dims, True)


@where_sharded("softmax", dim_argument(0, None), is_reduction=False)
def _softmax(x: Any, dims: Sequence[int], *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
    x = x if dtype is None else x.to(dtype)
    e = (x - peak(x, dims)).exp()
    return e / e.sum(dims, True)


@where_sharded("log_softmax", dim_argument(0, None), is_reduction=False)
def _log_softmax(x: Any, dims: Sequence[int], *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
    x = x if dtype is None else x.to(dtype)
    x = x - peak(x, dims)
    return x - x.exp().sum(dims, True).log()


def _scaled(x: Any, dims: Sequence[int], eps: float, weight: Any) -> Any:
    y = x * ((x * x).mean(dims, True) + eps).rsqrt()
    return y if weight is None else y * weight


@where_sharded("layer_norm", _shape, is_reduction=False)
def _layer_norm(
    x: Any, dims: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Any:
    y = _scaled(x - x.mean(dims, True), dims, eps, weight)
    return y if bias is None else y + bias


@where_sharded("rms_norm", _shape, is_reduction=False)
def _rms_norm(x: Any, dims: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    return _scaled(x, dims, torch.finfo(x.dtype).eps if eps is None else eps, weight)
