"""Rows of indexing: slices, gathers and scatters along a dim, embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fshard.array.dispatch import DIRECT, operate, write
from fshard.array.rules import Labels, Rule, Where, broadcast, letters, rule, tensors_in
from fshard.array.views import strided
from fshard.errors import LayoutError
from fshard.mesh.layout.sharded import Sharded


def _items(index: Any) -> tuple[Any, ...]:
    return tuple(index) if isinstance(index, tuple) else (index,)


def _getitem(x: Any, index: Any) -> Rule:
    """Label the dims that an index keeps in full."""
    items = _items(index)
    arrays = [item for item in items if isinstance(item, Tensor)]
    if any(item.dtype in (torch.bool, torch.uint8) for item in arrays):
        raise LayoutError("x[mask] has a shape that depends on values. Use torch.where(mask, x, 0).")
    if not arrays:
        own, (out,) = strided(x, lambda like: like[index])
        return Rule([(x, own)], [out], linear=[(x,)])
    if any(isinstance(item, list) for item in items):
        raise LayoutError(
            "a list in an index must be an array: fs.device_put(torch.tensor(...), fs.Layout(mesh, P()))."
        )
    sliced = tuple(0 if isinstance(item, Tensor) else item for item in items)
    own, (rest,) = strided(x, lambda like: like[sliced])
    full, labels = broadcast(*(item.shape for item in arrays))
    labels = [tuple(f"i{one}" if one else None for one in labelled) for labelled in labels]
    among = tuple(f"id{dim}" for dim in range(len(full)))
    front = _place_of_arrays(x.ndim - sum(isinstance(item, int) for item in items), items)
    return Rule([(x, own), *zip(arrays, labels, strict=True)], [(*rest[:front], *among, *rest[front:])], linear=[(x,)])


def _place_of_arrays(ndim: int, items: Sequence[Any]) -> int:
    """Return where the dims of index arrays are in the result: at the first array, if all are adjacent; else in front."""
    items = [item for item in items if isinstance(item, bool) or not isinstance(item, int)]  # numbers select first
    places = [place for place, item in enumerate(items) if isinstance(item, Tensor)]
    if places[-1] - places[0] + 1 != len(places):
        return 0
    before = 0
    for item in items[: places[0]]:
        before += ndim - sum(one is not None and one is not ... for one in items) if item is ... else 1
    return before


rule("getitem", is_view=True)(_getitem)


@rule("set_slice")
def _setitem(x: Any, index: Any, value: Any) -> Rule:
    own, (out,) = strided(x, lambda like: like[index])
    inputs, linear = [(x, own)], [(x,)]
    if isinstance(value, Tensor):
        labels = out[len(out) - value.ndim :]
        lengths = x[index].shape[len(out) - value.ndim :]
        inputs.append(
            (value, tuple(a if n == m else None for a, n, m in zip(labels, value.shape, lengths, strict=True)))
        )
        linear = [(x, value)]
    elif value != 0:
        linear = []
    return Rule(inputs, [own], linear=linear, local=_set)


def _set(where: Where, func: Any, args: Any, kwargs: Any) -> Any:
    x, index, value = args
    y = x.clone()
    y[index] = value
    return y


def _assign(x: Any, index: Any, value: Any) -> None:
    arrays = [item for item in _items(index) if isinstance(item, Sharded)]
    if len(arrays) == 1 and len(_items(index)) == 1 and arrays[0].dtype == torch.bool:
        write(
            x,
            x.masked_fill(_like(arrays[0], x), value) if not isinstance(value, Sharded) else NotImplemented,
            "x[mask] = y",
        )
    elif arrays or isinstance(index, list):
        raise LayoutError(
            "x[index] = y takes slices and numbers for arrays. Use x.index_copy(dim, index, y) or x.scatter."
        )
    else:
        value = value.to(x.dtype) if isinstance(value, Sharded) and value.dtype != x.dtype else value
        write(x, operate(set_item, (x, index, value), {}), "x[index] = y")


def _like(mask: Any, x: Any) -> Any:
    return mask.reshape(*mask.shape, *(1,) * (x.ndim - mask.ndim))


def set_item(x: Any, index: Any, value: Any) -> Any:
    """Return a copy of a tensor with some elements replaced."""
    return x.clone()


set_item.__name__ = "set_slice"
DIRECT["setitem"] = _assign


def _matched(x: Any, *others: Any, dim: int) -> list[tuple[Any, Labels]]:
    """Label arrays of one rank alike, except along `dim` and where their lengths differ."""
    arrays = [x, *(one for one in others if isinstance(one, Tensor))]
    dim = dim % max(x.ndim, 1)
    own = tuple(
        f"d{d}" if d != dim and all(one.shape[d] == x.shape[d] for one in arrays) else None for d in range(x.ndim)
    )
    return [(one, own) for one in arrays]


@rule("gather take_along_dim")
def _gather(x: Any, dim: Any = None, index: Any = None, *, indices: Any = None, sparse_grad: bool = False) -> Rule:
    if isinstance(dim, Tensor):  # take_along_dim(x, indices, dim)
        dim, index = index, dim
    index = indices if index is None else index
    if dim is None or x.ndim != index.ndim:
        return Rule([], [(None,) * max(index.ndim, 1)], linear=[(x,)])
    (_, own), _ = labelled = _matched(x, index, dim=dim)
    out = tuple("k" if d == dim % max(x.ndim, 1) else label for d, label in enumerate(own))
    return Rule([labelled[0], (index, out)], [out], linear=[(x,)])


@rule("scatter scatter_add scatter_reduce index_add index_copy index_fill index_reduce")
def _scatter(x: Any, dim: int, index: Any, src: Any = None, *args: Any, **kwargs: Any) -> Rule:
    value = kwargs.get("value", kwargs.get("source", src))
    if index.ndim != x.ndim or x.ndim == 0:  # index_add: the index is one dim
        named = [
            (x, letters(x, dim)),
            *([(value, letters(value, dim))] if isinstance(value, Tensor) and value.ndim == x.ndim else []),
        ]
        return Rule(named, [letters(x, dim)])
    named = _matched(x, index, value, dim=dim)
    is_sum = isinstance(value, Tensor) and kwargs.get("reduce") is None and not args
    return Rule(named, [named[0][1]], linear=[(x, value)] if is_sum else ())


@rule("index_select")
def _index_select(x: Any, dim: int, index: Any) -> Rule:
    own = letters(x, dim)
    out = tuple("k" if d == dim % max(x.ndim, 1) else label for d, label in enumerate(own))
    return Rule([(x, own), (index, ("k",) * index.ndim)], [out], linear=[(x,)])


@rule("take")
def _take(x: Any, index: Any) -> Rule:
    return Rule([(index, letters(index))], [letters(index)], linear=[(x,)])


@rule("one_hot")
def _one_hot(x: Any, num_classes: int = -1) -> Rule:
    if num_classes < 0:
        raise LayoutError("one_hot of an array needs num_classes: its shape must not depend on values.")
    return Rule([(x, letters(x))], [(*letters(x), None)])


@rule("embedding")
def _embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: Any = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Rule:
    """Rows may be sharded too: every device looks up those that it has, and the rest are zeros."""
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise LayoutError("embedding of arrays does not take max_norm, scale_grad_by_freq and sparse.")
    rows = "v" if padding_idx is None else None
    own = letters(input)
    return Rule(
        [(input, own), (weight, (rows, "w"))],
        [(*own, "w")],
        linear=[(weight,)],
        summed=frozenset("v"),
        local=partial(_look_up, weight.shape[0]),
    )


def _look_up(rows_in_all: int, where: Where, func: Any, args: Any, kwargs: Any) -> Any:
    if "v" not in where.starts:
        return func(*args, **kwargs)
    index, weight = tensors_in([*args, kwargs])
    if index.is_cpu and bool(((index < 0) | (index >= rows_in_all)).any()):
        raise IndexError(
            f"embedding: an index must be in 0..{rows_in_all - 1}; got {int(index.min())} to {int(index.max())}."
        )
    rows = index - where.starts["v"] * len(weight)
    found = (rows >= 0) & (rows < len(weight))
    return F.embedding(rows.clamp(0, max(len(weight) - 1, 0)), weight) * found.unsqueeze(-1)


@rule("searchsorted bucketize")
def _bucketize(first: Any, second: Any, **kwargs: Any) -> Rule:
    return Rule([], [(None,) * second.ndim])
