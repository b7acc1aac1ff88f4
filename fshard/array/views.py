"""Rows of views and of indexing: results whose elements are elements of the input, in another shape or order.

Labels of strided views are found by torch itself: the stride of an output dim names the input dim that it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fshard.array.dispatch import DIRECT, operate, write
from fshard.array.rules import Labels, Rule, Where, alike, arrays_in, compose, product, rule, spell
from fshard.errors import LayoutError
from fshard.mesh.layout.sharded import Sharded


def strided(x: Any, view: Callable[[Any], Any]) -> tuple[Labels, list[Labels]]:
    """Return the labels of an input and of its views: dims that a view keeps in full are alike."""
    steps = [(1 << (5 * (dim + 1))) + 7 * dim for dim in range(x.ndim)]  # a step of a slice is no other dim's stride
    like = torch.empty_strided(x.shape, steps, device="meta")
    names = dict(zip(zip(steps, x.shape, strict=True), spell(x.ndim), strict=True))
    found = [
        tuple(names.get(pair) if pair[1] != 1 else None for pair in zip(y.stride(), y.shape, strict=True))
        for y in arrays_in(view(like))
    ]
    keep = {label for label in spell(x.ndim) if found and all(labels.count(label) == 1 for labels in found)}
    return (
        tuple(label if label in keep else None for label in spell(x.ndim)),
        [tuple(label if label in keep else None for label in labels) for labels in found],
    )


def _strided_rule(func: Any) -> Callable[..., Rule]:
    def rule_of(results: Any, x: Any, *args: Any, **kwargs: Any) -> Rule:
        own, outputs = strided(x, lambda like: func(like, *args, **kwargs))
        return Rule([(x, own)], outputs, linear=[(x,)])

    return rule_of


_TENSOR: Any = Tensor
for _name in "permute transpose t movedim moveaxis swapaxes swapdims adjoint unsqueeze select unbind diagonal chunk".split():
    rule(_name, is_view=True)(_strided_rule(getattr(_TENSOR, _name)))
for _name in "T mT H mH".split():
    rule(f".{_name}", is_view=True)(_strided_rule(attrgetter(_name)))


def _to_local_shape(where: Where, func: Any, args: Any, kwargs: Any) -> Any:
    return args[0].reshape(where.shapes[0])


@rule("squeeze", is_view=True)
def _squeeze(results: Any, x: Any, *args: Any, **kwargs: Any) -> Rule:
    own, outputs = strided(x, lambda like: like.squeeze(*args, **kwargs))
    return Rule([(x, own)], outputs, linear=[(x,)], local=_to_local_shape)  # a shard may have more dims of length 1


def reshaped(before: Sequence[int], after: Sequence[int]) -> tuple[Labels, Labels]:
    """Return the labels of a reshape: dims that are merged or split keep the label of the major one.

    >>> reshaped((4, 3, 5), (12, 5))
    (('g0', None, 'g1'), ('g0', 'g1'))
    """
    start: list[str | None] = [None] * len(before)
    stop: list[str | None] = [None] * len(after)
    i = j = group = 0
    while prod(before) and i < len(before) and j < len(after):
        first, second = [i], [j]
        while (one := prod(before[d] for d in first)) != (other := prod(after[d] for d in second)):
            dims = first if one < other else second
            dims.append(dims[-1] + 1)
        i, j = first[-1] + 1, second[-1] + 1
        majors = [next((d for d in dims if sizes[d] > 1), None) for dims, sizes in ((first, before), (second, after))]
        if majors[0] is not None and majors[1] is not None:
            start[majors[0]] = stop[majors[1]] = f"g{group}"
            group += 1
    return tuple(start), tuple(stop)


@rule("reshape view unflatten flatten ravel", is_view=True)
def _reshape(results: Any, x: Any, *args: Any, **kwargs: Any) -> Rule:
    if arrays_in(args) or any(isinstance(one, torch.dtype) for one in (*args, *kwargs.values())):
        return Rule()
    before, after = reshaped(x.shape, results[0].shape)
    return Rule([(x, before)], [after], linear=[(x,)], local=_to_local_shape)


@rule("expand broadcast_to", is_view=True)
def _expand(results: Any, x: Any, *args: Any, **kwargs: Any) -> Rule:
    y = results[0]
    new = y.ndim - x.ndim
    own = "".join("N" if n != m else letter for n, m, letter in zip(x.shape, y.shape[new:], spell(x.ndim), strict=True))
    return alike(f"{own}->{'N' * new}{own}", x, linear=[(x,)], local=_expand_shard)


def _expand_shard(where: Where, func: Any, args: Any, kwargs: Any) -> Any:
    return args[0].expand(where.shapes[0])


compose("view_as reshape_as")(lambda x, other: x.reshape(other.shape))
compose("expand_as")(lambda x, other: x.expand(other.shape))


@compose("broadcast_tensors")
def _broadcast_tensors(*xs: Any) -> Any:
    arrays = arrays_in(xs)
    shape = torch.broadcast_shapes(*(x.shape for x in arrays))
    return tuple(x.expand(shape) for x in arrays)


@rule("repeat tile")
def _repeat(results: Any, x: Any, *args: Any, **kwargs: Any) -> Rule:
    y = results[0]
    own = spell(x.ndim)
    for dim, (n, m) in enumerate(zip(x.shape, y.shape[y.ndim - x.ndim :], strict=True)):
        own = own.replace(own[dim], "N") if n != m or n == 0 else own
    return alike(f"{own}->{'N' * (y.ndim - x.ndim)}{own}", x, linear=[(x,)])


@rule("cat concat concatenate")
def _cat(results: Any, tensors: Sequence[Any], dim: int = 0, out: Any = None) -> Rule:
    if any(x.ndim != results[0].ndim for x in tensors):
        return Rule()
    own = spell(results[0].ndim, {dim: "D"})
    return alike(f"{','.join([own] * len(tensors))}->{own}", *tensors, exact=True, linear=[tuple(tensors)])


@rule("stack")
def _stack(results: Any, tensors: Sequence[Any], dim: int = 0, out: Any = None) -> Rule:
    stacked = spell(results[0].ndim, {dim: "N"})
    own = stacked.replace("N", "")
    return alike(f"{','.join([own] * len(tensors))}->{stacked}", *tensors, linear=[tuple(tensors)])


# Indexing.


@rule("getitem", is_view=True)
def _getitem(results: Any, x: Any, index: Any) -> Rule:
    """Label the dims that an index keeps in full, and those of index arrays."""
    items = index if isinstance(index, tuple) else (index,)
    arrays = arrays_in(items)
    own, (rest,) = strided(x, lambda like: like[tuple(0 if isinstance(item, Tensor) else item for item in items)])
    if not arrays:
        return Rule([(x, own)], [rest], linear=[(x,)])
    mark = torch.empty(1 + max(x.shape), dtype=torch.long, device="meta")  # no dim of x is as long
    front = x[tuple(mark if isinstance(item, Tensor) else item for item in items)].shape.index(len(mark))
    found = alike(",".join(["..."] * len(arrays)) + "->...", *arrays)
    among = found.outputs[0]
    return Rule([(x, own), *found.inputs], [(*rest[:front], *among, *rest[front:])], linear=[(x,)])


@compose("getitem")
def _check_index(x: Any, index: Any) -> Any:
    items = index if isinstance(index, tuple) else (index,)
    if any(one.dtype in (torch.bool, torch.uint8) for one in arrays_in(items)):
        raise LayoutError("x[mask] has a shape that depends on values. Use torch.where(mask, x, 0).")
    if any(isinstance(one, list) for one in items):
        raise LayoutError("a list in an index must be an array: fs.device_put(torch.tensor(...), fs.Layout(mesh, P())).")
    return NotImplemented


def set_slice(x: Any, index: Any, value: Any) -> Any:
    """Return a copy of a tensor with some elements replaced."""
    y = x.clone()
    y[index] = value
    return y


@rule("set_slice")
def _set_slice(results: Any, x: Any, index: Any, value: Any) -> Rule:
    own, (out,) = strided(x, lambda like: like[index])
    if not isinstance(value, Tensor):
        return Rule([(x, own)], [own], linear=[(x,)] if value == 0 else [])
    lengths = x[index].shape[len(out) - value.ndim :]
    kept = zip(out[len(out) - value.ndim :], value.shape, lengths, strict=True)
    inputs = [(x, own), (value, tuple(label if n == m else None for label, n, m in kept))]
    return Rule(inputs, [own], linear=[(x, value)])


def _assign(x: Any, index: Any, value: Any) -> None:
    if isinstance(index, Sharded) and index.dtype == torch.bool and not isinstance(value, Sharded):
        mask = index.reshape(*index.shape, *(1,) * (x.ndim - index.ndim))
        write(x, x.masked_fill(mask, value), "x[mask] = y")
    elif arrays_in(index) or isinstance(index, list):
        raise LayoutError(
            "x[index] = y takes slices, numbers, or one mask with a number. Use x.index_copy(dim, index, y) or x.scatter."
        )
    else:
        value = value.to(x.dtype) if isinstance(value, Sharded) else value
        write(x, operate(set_slice, (x, index, value), {}), "x[index] = y")


DIRECT["setitem"] = _assign


@rule("gather take_along_dim")
def _gather(results: Any, x: Any, *args: Any, dim: Any = None, **kwargs: Any) -> Rule:
    (index,) = arrays_in(args, kwargs)
    given = [one for one in (*args, dim) if isinstance(one, int)]
    if not given or x.ndim != index.ndim:
        return Rule(linear=[(x,)])
    own, out = spell(x.ndim, {given[0]: "D"}), spell(x.ndim, {given[0]: "k"})
    return alike(f"{own},{out}->{out}", x, index, exact=True, linear=[(x,)])


@rule("scatter scatter_add scatter_reduce index_add index_copy index_fill index_reduce")
def _scatter(results: Any, x: Any, dim: int, index: Any, *args: Any, **kwargs: Any) -> Rule:
    own = spell(x.ndim, {dim: "D"} if x.ndim else {})
    more = arrays_in(args, kwargs)
    terms = [own, own if index.ndim == x.ndim else "D" * index.ndim]
    terms += [own if one.ndim == x.ndim else "D" * one.ndim for one in more]
    is_sum = len(more) == 1 and index.ndim == x.ndim and kwargs.get("reduce") is None and len(args) < 2
    groups = [(x, *more)] if is_sum else ()
    return alike(f"{','.join(terms)}->{own}", x, index, *more, exact=True, linear=groups)


@rule("index_select")
def _index_select(results: Any, x: Any, dim: int, index: Any) -> Rule:
    own, out = (spell(x.ndim, {dim: letter} if x.ndim else {}) for letter in "Dk")
    return alike(f"{own},{'k' * index.ndim}->{out}", x, index, linear=[(x,)])


@rule("take")
def _take(results: Any, x: Any, index: Any) -> Rule:
    return alike(f"{'D' * x.ndim},...->...", x, index, linear=[(x,)])


@rule("bucketize searchsorted")
def _bucketize(results: Any, *args: Any, **kwargs: Any) -> Rule:
    return Rule()


@rule("one_hot")
def _one_hot(results: Any, x: Any, num_classes: int = -1) -> Rule:
    return alike("...->...N", x)


@rule("embedding")
def _embedding(
    results: Any, input: Any, weight: Any, padding_idx: int | None = None, max_norm: Any = None, norm_type: float = 2.0,
    scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Rule:  # fmt: skip
    """Rows may be sharded too: every device looks up those that it has, and the rest are zeros."""
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise LayoutError("embedding of arrays does not take max_norm, scale_grad_by_freq and sparse.")
    rows = len(weight)

    def look_up(where: Where, func: Any, args: Any, kwargs: Any) -> Any:
        if "v" not in where.starts:
            return func(*args, **kwargs)
        index, shard = arrays_in(args, kwargs)
        if index.is_cpu and bool(((index < 0) | (index >= rows)).any()):
            raise IndexError(f"embedding: an index must be in 0..{rows - 1}; got {index.min()} to {index.max()}.")
        index = index - where.starts["v"] * len(shard)
        found = (index >= 0) & (index < len(shard))
        return F.embedding(index.clamp(0, max(len(shard) - 1, 0)), shard) * found.unsqueeze(-1)

    equation = "...,vw->...w" if padding_idx is None else "...,Vw->...w"
    return alike(equation, input, weight, linear=[(weight,)], summed=frozenset("v"), local=look_up)
