"""Rows of views and of indexing: results whose elements are elements of the input, in another shape or order.

Labels of strided views are found by torch itself: the stride of an output dim names the input dim that it is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from math import prod
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fshard.array.dispatch import DIRECT, operate, write
from fshard.array.rules import ROWS, Rule, Where, arrays_in, compose, map_arrays, rule, spell
from fshard.errors import LayoutError
from fshard.mesh.layout.arithmetic import flat_range
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.reshard.device_put import spread


def strided(x: Any, view: Callable[[Any], Any]) -> str:
    """Return the equation of an input and its views: dims that a view keeps in full are alike."""
    steps = [
        (1 << (5 * (dim + 1))) + 7 * dim for dim in range(x.ndim)
    ]  # a step of a slice is no other dim's stride
    like = torch.empty_strided(x.shape, steps, device="meta")
    names = dict(zip(zip(steps, x.shape, strict=True), spell(x.ndim), strict=True))
    view_labels = [
        [names.get(pair, "D") for pair in zip(y.stride(), y.shape, strict=True)]
        for y in arrays_in(view(like))
    ]
    keep = {
        a
        for a, n in zip(spell(x.ndim), x.shape, strict=True)
        if n > 1 and all(y.count(a) == 1 for y in view_labels)
    }
    terms = (
        "".join(label if label in keep else "D" for label in labels)
        for labels in (spell(x.ndim), *view_labels)
    )
    return next(terms) + "->" + ",".join(terms)


def _strided_rule(func: Any, local: Any = None) -> Callable[..., Rule]:
    return lambda results, x, *args, **kwargs: Rule(
        strided(x, lambda y: func(y, *args, **kwargs)), "each", local
    )


_TENSOR: Any = Tensor
_METHODS = "permute transpose t movedim moveaxis swapaxes swapdims adjoint unsqueeze select unbind diagonal chunk"
for _name in _METHODS.split():
    rule(_name, is_view=True)(_strided_rule(getattr(_TENSOR, _name)))
for _name in ("T", "mT", "H", "mH"):
    rule(f".{_name}", is_view=True)(_strided_rule(attrgetter(_name)))


def _to_local_shape(where: Where, func: Any, args: Any, kwargs: Any) -> Any:
    return args[0].reshape(where.shapes[0])


rule("squeeze", is_view=True)(
    _strided_rule(_TENSOR.squeeze, _to_local_shape)
)  # a shard may have more dims of length 1


def reshaped(before: Sequence[int], after: Sequence[int]) -> str:
    """Return the equation of a reshape: dims that are merged or split keep the label of the major one.

    >>> reshaped((4, 3, 5), (12, 5))
    'aDb->ab'
    """
    start, stop = ["D"] * len(before), ["D"] * len(after)
    labels = iter("abcdefghij")
    i = j = 0
    while prod(before) and i < len(before) and j < len(after):
        first, second = [i], [j]
        while (first_size := prod(before[d] for d in first)) != (
            second_size := prod(after[d] for d in second)
        ):
            dims = first if first_size < second_size else second
            dims.append(dims[-1] + 1)
        i, j = first[-1] + 1, second[-1] + 1
        if first_size > 1:
            major = next(d for d in first if before[d] > 1), next(d for d in second if after[d] > 1)
            start[major[0]] = stop[major[1]] = next(labels)
    return f"{''.join(start)}->{''.join(stop)}"


@rule("reshape view unflatten flatten ravel", is_view=True)
def _reshape(results: Any, x: Any, *args: Any, **kwargs: Any) -> Rule:
    if arrays_in(args) or any(isinstance(arg, torch.dtype) for arg in (*args, *kwargs.values())):
        return Rule("->")
    return Rule(reshaped(x.shape, results[0].shape), "each", _to_local_shape)


def _repeated(results: Any, x: Any) -> str:
    """Return the equation of an operation that repeats some dims, and may add dims in front."""
    new = results[0].ndim - x.ndim
    dims = zip(spell(x.ndim), x.shape, results[0].shape[new:], strict=True)
    term = "".join(letter if n == m and n else "N" for letter, n, m in dims)
    return f"{term}->{'N' * new}{term}"


rule("expand broadcast_to", is_view=True)(
    lambda results, x, *_, **__: Rule(
        _repeated(results, x), "each", lambda where, _, xs, __: xs[0].expand(where.shapes[0])
    )
)
rule("repeat tile")(lambda results, x, *_, **__: Rule(_repeated(results, x), "each"))
compose("view_as reshape_as")(lambda x, like: x.reshape(like.shape))
compose("expand_as")(lambda x, like: x.expand(like.shape))


compose("broadcast_tensors")(
    lambda *xs: tuple(
        x.expand(torch.broadcast_shapes(*(y.shape for y in arrays_in(xs)))) for x in arrays_in(xs)
    )
)


@rule("cat concat concatenate")
def _cat(results: Any, tensors: Sequence[Any], dim: int = 0) -> Rule:
    term = spell(results[0].ndim, {dim: "D"})
    return Rule(
        f"{term}*->{term}" if all(x.ndim == len(term) for x in tensors) else "->", "all", exact=True
    )


@compose("cat concat concatenate")
def _without_empty(tensors: Sequence[Any], dim: int = 0) -> Any:
    """Leave tensors of shape (0,) out, as torch does: an empty cache is one."""
    nonempty = [x for x in tensors if tuple(x.shape) != (0,)]
    if len(nonempty) == 1:
        return nonempty[0].clone()
    return torch.cat(nonempty, dim) if nonempty and len(nonempty) < len(tensors) else NotImplemented


@rule("stack")
def _stack(results: Any, tensors: Sequence[Any], dim: int = 0) -> Rule:
    term = spell(results[0].ndim, {dim: "N"})
    return Rule(f"{term.replace('N', '')}*->{term}", "all")


# Indexing.


@rule("getitem", is_view=True)
def _getitem(results: Any, x: Any, index: Any) -> Rule:
    """Label the dims that an index keeps in full, and those of index arrays."""
    term, out = _label_index(x, index)
    count = len(arrays_in(index))
    return Rule(f"{term}{',...' * count}->{out}", [(0,)] if count else "each")


def _label_index(x: Any, index: Any) -> tuple[str, str]:
    """Return the terms of an array and of its elements at an index; dots are the dims of index arrays."""
    items = index if isinstance(index, tuple) else (index,)
    like = x.new_empty([max(length, 1) for length in x.shape])
    equation = strided(
        like, lambda like: like[tuple([0 if isinstance(item, Tensor) else item for item in items])]
    )
    term, out = equation.split("->")
    if not arrays_in(items):
        return term, out
    mark = torch.empty(1 + max(x.shape), dtype=torch.long, device="meta")  # no dim of x is as long
    front = x[tuple([mark if isinstance(item, Tensor) else item for item in items])].shape.index(
        len(mark)
    )
    return term, f"{out[:front]}...{out[front:]}"


def _resolve_index(x: Any, index: Any) -> Any:
    """Return an index with arrays in place of lists, numbers of 0-d arrays, and the indices of masks' True elements."""
    plain_items, resolved, false = (
        index if isinstance(index, tuple) else (index,),
        list[Any](),
        torch.tensor(False),
    )
    items: list[Any] = [*plain_items]
    for position, item in enumerate(items):
        if isinstance(item, list | range) and isinstance(x, Sharded):
            indices = torch.tensor(item, dtype=None if len(item) else torch.long)
            items[position] = spread(indices, x.layout)
    if any(map(_is_mask, items)):  # raise for masks of other shapes
        false.expand(x.shape)[
            map_arrays(
                lambda y: false.expand(y.shape) if _is_mask(y) else slice(None), tuple(items)
            )
        ]
    for item in items:
        number = item.item() if isinstance(item, Sharded) and not item.ndim else item
        resolved += item.nonzero().unbind(1) if _is_mask(item) else [number]
    return index if all(map(operator.is_, plain_items, resolved)) else tuple(resolved)


def _is_mask(item: Any) -> bool:
    return isinstance(item, Sharded) and item.dtype in (torch.bool, torch.uint8) and item.ndim > 0


compose("getitem")(
    lambda x, index: (
        NotImplemented if (resolved := _resolve_index(x, index)) is index else x[resolved]
    )
)


def set_items(x: Any, index: Any, value: Any) -> Any:
    """Return a copy of a tensor with some elements replaced."""
    y = x.clone()
    y[index] = value
    return y


@rule("set_items")
def _set_items(results: Any, x: Any, index: Any, value: Any) -> Rule:
    term, out = _label_index(x, index)
    terms = ["N" * array.ndim for array in arrays_in(index)]
    if not isinstance(value, Tensor):
        return Rule(f"{','.join([term, *terms])}->{term}", [(0,)] if value == 0 else ())
    out = "N" * value.ndim + out.replace("...", max(terms, default=""))
    return Rule(
        f"{','.join([term, *terms, out[len(out) - value.ndim :]])}->{term}", [(0, 1 + len(terms))]
    )


def _assign(x: Any, index: Any, value: Any) -> None:
    if _is_mask(index) and index.shape == x.shape[: index.ndim] and not isinstance(value, Sharded):
        y = x.masked_fill(index.reshape(*index.shape, *(1,) * (x.ndim - index.ndim)), value)
    else:
        index = _resolve_index(x, index)
        y = operate(
            set_items, (x, index, value.to(x.dtype) if isinstance(value, Sharded) else value), {}
        )
    write(x, y, "x[index] = y")


DIRECT["setitem"] = _assign


def _own_rows(where: Where, index: Tensor, total: int) -> tuple[Tensor, Tensor, int]:
    """Return indices into the rows that a device holds, which of them it holds, and its first row."""
    if index.is_cpu and bool(((index < 0) | (index >= total)).any()):
        raise IndexError(f"an index must be in 0..{total - 1}; got {index.min()} to {index.max()}.")
    number, count = where.positions[ROWS]
    start, stop = flat_range(total, count, number)
    return (
        (index - start).clamp(0, max(stop - start - 1, 0)),
        (index >= start) & (index < stop),
        start,
    )


@rule("gather take_along_dim")
def _gather(results: Any, x: Any, *args: Any, dim: Any = None, **kwargs: Any) -> Rule:
    """Return the rule of a gather; over a sharded dim each device takes what it holds, and the rest are zeros."""
    (index,) = arrays_in(args, kwargs)
    dims = [arg for arg in (*args, dim) if isinstance(arg, int)]
    if not dims or not x.ndim or x.ndim != index.ndim:
        return Rule("->", [(0,)])
    axis, total = dims[0], x.shape[dims[0]]

    def take(where: Where, func: Any, args: Any, kwargs: Any) -> Any:
        if ROWS not in where.positions:
            return func(*args, **kwargs)
        shard, index = arrays_in(args, kwargs)
        index, is_local, _ = _own_rows(where, index, total)
        return torch.where(is_local, shard.gather(axis, index), 0)

    out = spell(x.ndim, {axis: "k"})
    return Rule(f"{out.replace('k', 'v')},{out}->{out}", [(0,)], take, exact=True)


@rule("scatter scatter_add scatter_reduce index_add index_copy index_fill index_reduce")
def _scatter(results: Any, x: Any, dim: int, index: Any, *args: Any, **kwargs: Any) -> Rule:
    term = spell(x.ndim, {dim: "D"})
    more = arrays_in(args, kwargs)
    terms = [term if array.ndim == x.ndim else "D" * array.ndim for array in (x, index, *more)]
    is_sum = (
        len(more) == 1 and index.ndim == x.ndim and kwargs.get("reduce") is None and len(args) < 2
    )
    return Rule(f"{','.join(terms)}->{term}", [(0, 2)] if is_sum else (), exact=True)


@rule("index_select")
def _index_select(results: Any, x: Any, dim: int, index: Any) -> Rule:
    out = spell(x.ndim, {dim: "k"})
    return Rule(f"{out.replace('k', 'D')},{'k' * index.ndim}->{out}", [(0,)])


rule("take")(lambda results, x, index: Rule(f"{'D' * x.ndim},...->...", [(0,)]))
rule("searchsorted")(lambda results, *_, **__: Rule("->"))


@rule("embedding")
def _embedding(
    results: Any, input: Any, weight: Any, padding_idx: int | None = None, max_norm: Any = None, norm_type: float = 2.0,
    scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Rule:  # fmt: skip
    """Rows may be sharded too: every device looks up those that it has, and the rest are zeros."""
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise LayoutError(
            "embedding of arrays does not take max_norm, scale_grad_by_freq and sparse."
        )
    rows = len(weight)

    def look_up(where: Where, func: Any, args: Any, kwargs: Any) -> Any:
        if ROWS not in where.positions:
            return func(*args, **kwargs)
        index, shard = arrays_in(args, kwargs)
        index, is_local, start = _own_rows(where, index, rows)
        padding = None if padding_idx is None else padding_idx % rows - start
        local_padding = padding if padding is not None and 0 <= padding < len(shard) else None
        return F.embedding(index, shard, local_padding) * is_local.unsqueeze(-1)

    return Rule("...,vw->...w", [(1,)], look_up)
