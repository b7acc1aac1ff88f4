"""Rows of operations along some dims: reductions, softmax, sorting, windows, statistics.

They run locally where these dims are unsharded. Sums over a sharded dim are unreduced. A few others
are composed of sums, and of maxima over the devices, where their dims are sharded. On a mesh whose
axis "data" has two devices:

    operation        x               result                how
    x.softmax(1)     f32[8@data, 4]  f32[8@data, 4]        local, by the rule "aD->aD"
    x.sum(0)         f32[8@data, 4]  f32[4]{U:data}        local, by the rule "ab->b"
    x.softmax(0)     f32[8@data, 4]  f32[8@data, 4]        a maximum and a sum over the devices
    x.sort(0)        f32[8@data, 4]  f32[8, 4@data]        an all_to_all, by the rule "Db->Db"
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from inspect import isroutine
from typing import Any

import torch
from torch import Tensor

from fshard.array.communicate import extreme_over_devices, spec_like, with_spec
from fshard.array.rules import TABLE, Rule, arrays_in, as_dims, compose, map_arrays, rule, spell
from fshard.mesh.collectives.autograd import recorded, transformed
from fshard.mesh.layout import Layout, P
from fshard.mesh.layout.sharded import Sharded

DimsOf = Callable[..., Any]
"""A function of a call's arguments: the dims of its first array that it works along.

None means all.
"""


def along(
    names: str,
    dims_of: DimsOf,
    *,
    is_linear: bool = False,
    is_sum: bool = False,
    is_view: bool = False,
) -> None:
    """Add rows of operations that need all elements along some dims.

    A result has the other dims; these dims too, of any length, unless they are reduced.

    Args:
        names: of the operations.
        dims_of: the dims, given the arguments.
        is_linear: the operation is linear in its array, if it has only one.
        is_sum: dims may be sharded, and are summed.
        is_view: torch's result is a view.
    """

    def make_rule(results: Sequence[Any], x: Any, *args: Any, **kwargs: Any) -> Rule:
        linear = "each" if is_linear and not arrays_in(args, kwargs) else ()
        has_options = args or kwargs.keys() - {"dtype"}
        if is_sum and not has_options:
            return Rule("...->", linear)

        dims = as_dims(x, dims_of(x, *args, **kwargs))
        term = spell(x.ndim, dict.fromkeys(dims, "D"))
        reduced = "".join(letter for dim, letter in enumerate(term) if dim not in dims)
        # Results differ by their number of dims. Of "aDc", along dim 1: "ac" is a reduction, "aDcD"
        # has windows in a dim of their own, as `unfold`, "aDc" is anything else, as `sort`.
        result_terms = {x.ndim - len(dims): reduced, x.ndim + 1: f"{term}D", x.ndim: term}
        terms = ",".join(result_terms.get(y.ndim, "") for y in results)
        input_term = spell(x.ndim) if is_sum else term
        return Rule(f"{input_term}->{terms}", linear)

    rule(names, is_view=is_view)(make_rule)


# The dims of a call.


def dim_argument(position: int, default: Any) -> DimsOf:
    """Return a function that finds the argument `dim`.

    Args:
        position: of the argument, after the array.
        default: of the argument.
    """

    def dims_of(x: Any, *args: Any, **kwargs: Any) -> Any:
        dim = args[position] if len(args) > position else default
        for name in ("dim", "axis", "dims", "dimension"):
            if kwargs.get(name) is not None:
                dim = kwargs[name]
                break
        if isinstance(dim, bool):  # var(x, unbiased)
            return default
        return dim

    return dims_of


def last_dims(count: int) -> DimsOf:
    """Return a function that returns the last dims."""
    return lambda x, *args, **kwargs: range(x.ndim - count, x.ndim)


def dims_from(first: int) -> DimsOf:
    """Return a function that returns the dims from a number on."""
    return lambda x, *args, **kwargs: range(first, x.ndim)


def _normalized_dims(x: Any, normalized_shape: Sequence[int], *args: Any, **kwargs: Any) -> Any:
    return range(x.ndim - len(normalized_shape), x.ndim)


def _padded_dims(x: Any, pad: Sequence[int], mode: str = "constant", value: Any = None) -> Any:
    """Return the dims that get longer: `pad` has two widths for each dim, from the last one on."""
    dims: list[int] = []
    for index, width in enumerate(pad):
        if width or mode != "constant":
            dims.append(x.ndim - 1 - index // 2)
    return dims or x.ndim - 1  # no dims would be all


def _flipped_dims(x: Any, *dims: Any, **kwargs: Any) -> Any:
    """Return the dims of `x.flip(0, 1)`, `x.flip((0, 1))` or `x.flip(dims=(0, 1))`."""
    if len(dims) > 1:
        return dims
    return dim_argument(0, None)(x, *dims, **kwargs)


# The rows.

_REDUCTIONS = """prod amax amin max min argmax argmin all any logsumexp median nanmedian std var
std_mean var_mean aminmax"""
_SCANS = """mode cumprod cummax cummin logcumsumexp softmax log_softmax special_softmax
special_log_softmax"""

along(_REDUCTIONS, dim_argument(0, None))
along(_SCANS, dim_argument(0, -1))
along("sort argsort glu", dim_argument(0, -1))
along("topk kthvalue", dim_argument(1, -1))
along("norm linalg_vector_norm", dim_argument(1, None))
along("msort fliplr flipud rot90 renorm trace quantile nanquantile", dims_from(0))
along("pad", _padded_dims)
along("layer_norm rms_norm", _normalized_dims)
along("group_norm instance_norm", dims_from(1))
along("interpolate upsample", dims_from(2))

along("cumsum", dim_argument(0, -1), is_linear=True)
along("diff", dim_argument(1, -1), is_linear=True)
along("roll repeat_interleave", dim_argument(1, None), is_linear=True)
along("flip", _flipped_dims, is_linear=True)
along("tril triu", last_dims(2), is_linear=True)
along("pixel_shuffle pixel_unshuffle channel_shuffle", last_dims(3), is_linear=True)

along("split split_with_sizes tensor_split", dim_argument(1, 0), is_linear=True, is_view=True)
along("narrow unfold", dim_argument(0, 0), is_linear=True, is_view=True)

along("sum", dim_argument(0, None), is_linear=True, is_sum=True)
along("nansum count_nonzero", dim_argument(0, None), is_sum=True)

along("max_pool1d avg_pool1d adaptive_avg_pool1d adaptive_max_pool1d lp_pool1d", last_dims(1))
along("max_pool2d avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d lp_pool2d", last_dims(2))
along("max_pool3d avg_pool3d adaptive_avg_pool3d adaptive_max_pool3d lp_pool3d", last_dims(3))


# On unsharded arrays.

_MATRICES = """det logdet slogdet inverse pinverse cholesky cholesky_inverse cholesky_solve qr svd
matrix_exp matrix_power chain_matmul lu_solve cross kron cov corrcoef diag diag_embed diagflat
block_diag"""
_DISCRETE = ("nonzero", "argwhere", "histc", "bincount", "unique", "unique_consecutive")
"""Functions whose results are replicated: their shapes depend on values, but for that of histc."""


def _compute_unsharded(func: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Compute on unsharded arrays.

    Results are sharded like the first array, unless their shapes depend on values.
    """
    first = arrays_in(args, kwargs)[0]
    full = map_arrays(lambda x: with_spec(x, P(), name), (args, kwargs))
    results: list[Any] = []
    for number in range(len(first.shards)):
        local_args, local_kwargs = _shards_of(number, full)
        results.append(func(*local_args, **local_kwargs))

    is_single = isinstance(results[0], Tensor)
    columns = [tuple(results)] if is_single else zip(*results, strict=True)
    arrays: list[Sharded] = []
    for column in columns:
        y = Sharded(tuple(column[0].shape), Layout(first.mesh), column)
        if name not in _DISCRETE:
            y = with_spec(y, spec_like(first, y.shape), name)
        arrays.append(y)
    return arrays[0] if is_single else type(results[0])(arrays)


def _shards_of(number: int, arguments: Any) -> Any:
    """Return arguments with the shards of one device in place of arrays."""
    return map_arrays(lambda x: x.shards[number], arguments)


def _add_unsharded(name: str, func: Any) -> None:
    if name not in TABLE:
        compose(name)(partial(_compute_unsharded, func, name))


for _name in (*_MATRICES.split(), *_DISCRETE):
    _add_unsharded(_name, getattr(torch, _name))
for _name, _func in vars(torch.linalg).items():
    if isroutine(_func):
        _add_unsharded(f"linalg_{_name}", _func)


@compose("masked_select")
def _masked_select(x: Any, mask: Any) -> Any:
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    return x.expand(shape)[mask.expand_as(x)]


# Over sharded dims: sums and maxima.

Formula = Callable[..., Any]
"""A function of (x, dims, *args, **kwargs) that computes an operation and keeps the dims."""


def where_sharded(
    names: str, dims_of: DimsOf, *, is_reduction: bool = True
) -> Callable[[Formula], None]:
    """Return the function that adds a composition for sharded dims: a formula."""

    def add(formula: Formula) -> None:
        compute = _reduce_sharded if is_reduction else _map_sharded
        for name in names.split():
            compose(name)(partial(compute, name, formula, dims_of))

    return add


def _map_sharded(
    name: str, formula: Formula, dims_of: DimsOf, x: Any, *args: Any, **kwargs: Any
) -> Any:
    """Compute an operation along sharded dims, whose result has the shape of x."""
    dims = as_dims(x, dims_of(x, *args, **kwargs))
    if not _is_sharded_along(x, dims):
        return NotImplemented
    dtype = kwargs.get("dtype") or x.dtype
    return _in_wide_dtype(formula, dtype, x, dims, *args, **kwargs)


def _reduce_sharded(
    name: str, formula: Formula, dims_of: DimsOf, x: Any, *args: Any, **kwargs: Any
) -> Any:
    """Compute a reduction over sharded dims."""
    dims = as_dims(x, dims_of(x, *args, **kwargs))
    if not _is_sharded_along(x, dims):
        return NotImplemented

    func: Any = torch.linalg.vector_norm
    if name != "linalg_vector_norm":
        func = getattr(torch, name)
    expected = func(torch.empty(x.shape, dtype=x.dtype, device="meta"), *args, **kwargs)
    if not isinstance(expected, Tensor):  # max along a dim has indices too
        return NotImplemented
    y = _in_wide_dtype(formula, expected.dtype, x, dims, *args, **kwargs)
    if y is NotImplemented or expected.ndim == x.ndim:
        return y
    return y.squeeze(dims)


def _is_sharded_along(x: Any, dims: Sequence[int]) -> bool:
    if not x.shape or not x.numel() or x.spec.is_flat:
        return False
    entries = x.spec.dims(x.ndim)
    return any(entries[dim] for dim in dims)


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values are summed.

    For float16 that has 32 bits, since its squares and sums overflow.
    """
    return torch.float32 if dtype is torch.float16 else dtype


def as_dtype(x: Any, dtype: torch.dtype) -> Any:
    """Cast an array, if it has another dtype."""
    return x if x.dtype is dtype else x.to(dtype)


def _in_wide_dtype(
    formula: Formula, dtype: torch.dtype, x: Any, dims: Sequence[int], /, *args: Any, **kwargs: Any
) -> Any:
    """Compute a formula, whose result has a dtype, without overflows in float16 or in integers."""
    is_integer = not (x.is_floating_point() or x.is_complex())
    wide = dtype if is_integer and dtype.is_floating_point else summed_in(x.dtype)
    y = formula(as_dtype(x, wide), dims, *args, **kwargs)
    return y if y is NotImplemented else as_dtype(y, dtype)


# Maxima and minima.


def extreme_over_dims(x: Any, dims: Sequence[int], *, is_max: bool = True) -> Any:
    """Return the maximum (or minimum) over dims, kept with length 1, without a gradient."""
    operation = "amax" if is_max else "amin"
    x = with_spec(x.detach(), P(*x.spec.entries), operation)  # its spec, reduced
    if is_max:
        shards = tuple(shard.amax(dims, True) for shard in x.shards)
    else:
        shards = tuple(shard.amin(dims, True) for shard in x.shards)

    shape = list(x.shape)
    entries = [*x.spec.dims(x.ndim)]
    axes: list[str] = []
    for dim in dims:
        axes += entries[dim]
        entries[dim] = ()
        shape[dim] = 1
    local_extremes = Sharded(tuple(shape), x.layout.with_spec(P(*entries)), shards)
    return extreme_over_devices(local_extremes, tuple(axes), operation, is_max=is_max)


def _extreme(is_max: bool, x: Any, dims: Sequence[int], *args: Any, **kwargs: Any) -> Any:
    if x.dtype == torch.bool:
        return NotImplemented
    y = extreme_over_dims(x, dims, is_max=is_max)
    if transformed() or recorded(x.shards):  # the gradient is divided among equal elements
        equal = x == y
        y = x.masked_fill(~equal, 0).sum(dims, True) / equal.sum(dims, True)
    return y


where_sharded("amax max", dim_argument(0, None))(partial(_extreme, True))
where_sharded("amin min", dim_argument(0, None))(partial(_extreme, False))


def _add_comparison(name: str, compare: Any) -> None:
    """Let `torch.max(x, y)` compare two arrays; the function reduces a single one."""
    reduce: Any = TABLE[name].compose

    def compare_or_reduce(x: Any, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], Sharded):
            return compare(x, *args)
        return reduce(x, *args, **kwargs)

    compose(name)(compare_or_reduce)


_add_comparison("max", torch.maximum)
_add_comparison("min", torch.minimum)


# Sums and means.


@compose("sum")
def _sum(
    x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, **kwargs: Any
) -> Any:
    """Drop the dims of a sum over all of them: without dims it works on flat shards."""
    if dim is None or keepdim or kwargs or len(as_dims(x, dim)) < x.ndim:
        return NotImplemented
    return torch.sum(x, dtype=dtype)


@compose("mean")
def _mean(
    x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, axis: Any = None
) -> Any:
    dims = as_dims(x, dim if axis is None else axis)
    if dtype is None:
        dtype = x.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        raise RuntimeError(f"mean(): the dtype must be floating point or complex; got {dtype}.")
    count = math.prod(x.shape[dim] for dim in dims)
    mean = torch.sum(x, dims, keepdim, dtype=summed_in(dtype)) / count
    return as_dtype(mean, dtype)


@compose("nanmean")
def _nanmean(x: Any, *args: Any, **kwargs: Any) -> Any:
    return torch.nansum(x, *args, **kwargs) / torch.sum(~x.isnan(), *args, **kwargs)


@compose("diff")
def _diff(x: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Any:
    arrays = [y for y in (prepend, x, append) if y is not None]
    if len(arrays) == 1:
        return NotImplemented
    return torch.diff(torch.cat(arrays, dim), n, dim)


@where_sharded("logsumexp", dim_argument(0, None))
def _logsumexp(x: Any, dims: Sequence[int], *args: Any, **kwargs: Any) -> Any:
    """Subtract the maximum, so that no exponential overflows; an infinite one would leave nan."""
    top = extreme_over_dims(x, dims)
    top = torch.where(top.isfinite(), top, 0)
    return (x - top).exp().sum(dims, True).log() + top


# Statistics.


def _var(
    x: Any,
    dims: Sequence[int],
    *args: Any,
    correction: Any = None,
    unbiased: bool = True,
    **kwargs: Any,
) -> Any:
    for arg in args:
        if isinstance(arg, bool):  # var(x, unbiased), var(x, dim, unbiased)
            unbiased = arg
            break
    if correction is None:
        correction = int(unbiased)
    count = math.prod(x.shape[dim] for dim in dims)
    divisor = max(count - correction, 0)  # divided by 0 it is inf, as torch's

    differences = x - x.mean(dims, True)
    if x.is_complex():
        differences = differences.abs()
    squares = (differences**2).sum(dims, True)
    return squares / divisor


where_sharded("var", dim_argument(0, None))(_var)


@where_sharded("std", dim_argument(0, None))
def _std(x: Any, dims: Sequence[int], *args: Any, **kwargs: Any) -> Any:
    return _root(_var(x, dims, *args, **kwargs))


def _root(x: Any) -> Any:
    """Return the square root, whose gradient is 0 at 0."""
    is_zero = x == 0
    # The root of 1 in place of 0: else the gradient, inf at 0, would be nan times the 0 of `where`.
    return torch.where(is_zero, 0, torch.where(is_zero, 1, x).sqrt())


@where_sharded("norm linalg_vector_norm", dim_argument(1, None))
def _norm(x: Any, dims: Sequence[int], *args: Any, **kwargs: Any) -> Any:
    order = args[0] if args else 2
    order = kwargs.get("ord", order)
    order = kwargs.get("p", order)
    if order in ("fro", None):
        order = 2
    if kwargs.get("dtype") is not None or x.is_complex() or order not in (1, 2, math.inf):
        return NotImplemented
    if order == 2:
        return _root((x * x).sum(dims, True))
    if order == 1:
        return x.abs().sum(dims, True)
    return x.abs().amax(dims, True)


# Softmax and norms.


@where_sharded("softmax", dim_argument(0, None), is_reduction=False)
def _softmax(x: Any, dims: Sequence[int], *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
    if dtype is not None:
        x = x.to(dtype)
    exps = (x - extreme_over_dims(x, dims)).exp()
    return exps / exps.sum(dims, True)


@where_sharded("log_softmax", dim_argument(0, None), is_reduction=False)
def _log_softmax(x: Any, dims: Sequence[int], *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
    if dtype is not None:
        x = x.to(dtype)
    x = x - extreme_over_dims(x, dims)
    return x - x.exp().sum(dims, True).log()


@where_sharded("layer_norm", _normalized_dims, is_reduction=False)
def _layer_norm(
    x: Any, dims: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Any:
    y = _normalized(x - x.mean(dims, True), dims, eps, weight)
    if bias is None:
        return y
    return y + bias


@where_sharded("rms_norm", _normalized_dims, is_reduction=False)
def _rms_norm(x: Any, dims: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    if eps is None:
        eps = torch.finfo(x.dtype).eps
    return _normalized(x, dims, eps, weight)


def _normalized(x: Any, dims: Sequence[int], eps: float, weight: Any) -> Any:
    """Return x divided by the root of its mean square, times a weight."""
    y = x * ((x * x).mean(dims, True) + eps).rsqrt()
    if weight is None:
        return y
    return y * weight
