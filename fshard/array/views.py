"""Rows of views and of indexing: results whose elements are the input's, in other shapes or orders.

Labels of strided views are found by torch itself: the stride of a result's dim names the input's
dim. Here x of shape (4, 6, 5), with strides that no two dims share, is indexed and transposed:

    x              letters abc     strides 32, 1031, 32782
    x[:, 2]        "aDc->ac"       strides 32, 32782
    x[::2]         "Dbc->Dbc"      strides 64, 1031, 32782: no dim has 64
    x.mT           "abc->acb"      strides 32, 32782, 1031
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fshard.array.dispatch import DIRECT, operate, write
from fshard.array.rules import (
    ROWS,
    LocalContext,
    LocalProgram,
    Rule,
    arrays_in,
    compose,
    map_arrays,
    rule,
    spell,
)
from fshard.errors import LayoutError
from fshard.mesh.layout.arithmetic import flat_range
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.reshard.device_put import spread

# Strided views.


def strided(x: Any, view: Callable[[Any], Any]) -> str:
    """Return the equation of an input and its views: dims that a view keeps in full are alike."""
    letters = spell(x.ndim)
    # No step is a multiple of another, or a slice could have another dim's stride: with 32 and 1024
    # x[::32] would have 1024 in dim 0.
    steps = [(1 << (5 * (dim + 1))) + 7 * dim for dim in range(x.ndim)]
    like = torch.empty_strided(x.shape, steps, device="meta")
    letter_of = dict(zip(zip(steps, x.shape, strict=True), letters, strict=True))

    view_labels: list[list[str]] = []
    for y in arrays_in(view(like)):
        dims = zip(y.stride(), y.shape, strict=True)
        view_labels.append([letter_of.get(dim, "D") for dim in dims])

    shardable: set[str] = set()
    for letter, length in zip(letters, x.shape, strict=True):
        is_in_all_views = all(labels.count(letter) == 1 for labels in view_labels)
        if is_in_all_views and length > 1:
            shardable.add(letter)
    terms: list[str] = []
    for labels in (letters, *view_labels):
        terms.append("".join([label if label in shardable else "D" for label in labels]))
    return f"{terms[0]}->{','.join(terms[1:])}"


def _add_strided(name: str, func: Any, local: LocalProgram | None = None) -> None:
    """Add the row of a view that torch makes by strides."""

    def make_rule(results: Any, x: Any, *args: Any, **kwargs: Any) -> Rule:
        equation = strided(x, lambda y: func(y, *args, **kwargs))
        return Rule(equation, "each", local)

    rule(name, is_view=True)(make_rule)


def _reshape_locally(context: LocalContext, func: Any, args: Any, kwargs: Any) -> Any:
    return args[0].reshape(context.shapes[0])


_TENSOR: Any = Tensor
_METHODS = """permute transpose t movedim moveaxis swapaxes swapdims adjoint unsqueeze select unbind
diagonal chunk"""
for _name in _METHODS.split():
    _add_strided(_name, getattr(_TENSOR, _name))
for _name in ("T", "mT", "H", "mH"):
    _add_strided(f".{_name}", operator.attrgetter(_name))
# torch's own squeeze would remove dims that have length 1 only in a shard.
_add_strided("squeeze", _TENSOR.squeeze, _reshape_locally)


# Reshapes and repetitions.


def reshaped(before: Sequence[int], after: Sequence[int]) -> str:
    """Return the equation of a reshape.

    Dims that are merged or split keep the label of the major one.

    >>> reshaped((4, 3, 5), (12, 5))
    'aDb->ab'
    """
    start = ["D"] * len(before)
    stop = ["D"] * len(after)
    letters = iter("abcdefghij")
    for before_dims, after_dims in _groups_of_equal_size(before, after):
        before_major = next((dim for dim in before_dims if before[dim] > 1), None)
        after_major = next((dim for dim in after_dims if after[dim] > 1), None)
        if before_major is None or after_major is None:
            continue  # one element
        letter = next(letters)
        start[before_major] = letter
        stop[after_major] = letter
    return f"{''.join(start)}->{''.join(stop)}"


def _groups_of_equal_size(
    before: Sequence[int], after: Sequence[int]
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the smallest groups of successive dims of two shapes that have as many elements.

    >>> list(_groups_of_equal_size((4, 3, 5), (12, 5)))
    [([0, 1], [0]), ([2], [1])]
    """
    if prod(before) == 0:
        return
    i = 0
    j = 0
    while i < len(before) and j < len(after):
        first = [i]
        second = [j]
        while True:
            first_size = prod(before[dim] for dim in first)
            second_size = prod(after[dim] for dim in second)
            if first_size == second_size:
                break
            smaller = first if first_size < second_size else second
            smaller.append(smaller[-1] + 1)
        yield first, second
        i = first[-1] + 1
        j = second[-1] + 1


@rule("reshape view unflatten flatten ravel", is_view=True)
def _reshape(results: Any, x: Any, *args: Any, **kwargs: Any) -> Rule:
    has_dtype = any(isinstance(arg, torch.dtype) for arg in (*args, *kwargs.values()))
    if has_dtype or arrays_in(args):  # x.view(dtype), x.reshape(an array)
        return Rule("->")
    return Rule(reshaped(x.shape, results[0].shape), "each", _reshape_locally)


def _repeated(results: Any, x: Any) -> str:
    """Return the equation of an operation that repeats some dims, and may add dims in front."""
    new = results[0].ndim - x.ndim
    term = ""
    for letter, length, repeated_length in zip(
        spell(x.ndim), x.shape, results[0].shape[new:], strict=True
    ):
        is_repeated = length != repeated_length or length == 0
        term += "N" if is_repeated else letter
    return f"{term}->{'N' * new}{term}"


def _expand_locally(context: LocalContext, func: Any, args: Any, kwargs: Any) -> Any:
    return args[0].expand(context.shapes[0])


@rule("expand broadcast_to", is_view=True)
def _expand(results: Any, x: Any, *args: Any, **kwargs: Any) -> Rule:
    return Rule(_repeated(results, x), "each", _expand_locally)


@rule("repeat tile")
def _repeat(results: Any, x: Any, *args: Any, **kwargs: Any) -> Rule:
    return Rule(_repeated(results, x), "each")


compose("view_as reshape_as")(lambda x, like: x.reshape(like.shape))
compose("expand_as")(lambda x, like: x.expand(like.shape))


@compose("broadcast_tensors")
def _broadcast_tensors(*tensors: Any) -> Any:
    arrays = arrays_in(tensors)
    shape = torch.broadcast_shapes(*[x.shape for x in arrays])
    return tuple([x.expand(shape) for x in arrays])


# Concatenation.


@rule("cat concat concatenate")
def _cat(results: Any, tensors: Sequence[Any], dim: int = 0) -> Rule:
    term = spell(results[0].ndim, {dim: "D"})
    have_one_ndim = all(x.ndim == len(term) for x in tensors)
    return Rule(f"{term}*->{term}" if have_one_ndim else "->", "all", broadcasts=False)


@compose("cat concat concatenate")
def _without_empty(tensors: Sequence[Any], dim: int = 0) -> Any:
    """Leave tensors of shape (0,) out, as torch does: an empty cache is one."""
    nonempty = [x for x in tensors if tuple(x.shape) != (0,)]
    if len(nonempty) == 1:
        return nonempty[0].clone()
    if not nonempty or len(nonempty) == len(tensors):
        return NotImplemented
    return torch.cat(nonempty, dim)


@rule("stack")
def _stack(results: Any, tensors: Sequence[Any], dim: int = 0) -> Rule:
    term = spell(results[0].ndim, {dim: "N"})
    return Rule(f"{term.replace('N', '')}*->{term}", "all")


# Reading by an index.


@rule("getitem", is_view=True)
def _getitem(results: Any, x: Any, index: Any) -> Rule:
    """Label the dims that an index keeps in full, and those of index arrays."""
    term, out = _label_index(x, index)
    count = len(arrays_in(index))
    return Rule(f"{term}{',...' * count}->{out}", [(0,)] if count else "each")


def _label_index(x: Any, index: Any) -> tuple[str, str]:
    """Return the terms of an array and of its elements at an index.

    Dots are the dims of index arrays. Of x with the letters abc, `x[:, i, 1]` has the terms "aDD"
    and "a...".
    """
    items = index if isinstance(index, tuple) else (index,)
    # Numbers in place of index arrays remove the same dims. An empty dim has no number 0.
    like = x.new_empty([max(length, 1) for length in x.shape])
    equation = strided(like, lambda like: like[_replaced_arrays(items, 0)])
    term, out = equation.split("->")
    if not arrays_in(items):
        return term, out

    # The position of the dims of index arrays, by an index with a length that no dim of x has.
    mark = torch.empty(1 + max(x.shape), dtype=torch.long, device="meta")
    marked_shape = x[_replaced_arrays(items, mark)].shape
    front = marked_shape.index(len(mark))
    return term, f"{out[:front]}...{out[front:]}"


def _replaced_arrays(items: Sequence[Any], value: Any) -> tuple[Any, ...]:
    """Return the items of an index with a value in place of arrays."""
    return tuple([value if isinstance(item, Tensor) else item for item in items])


@compose("getitem")
def _getitem_resolved(x: Any, index: Any) -> Any:
    """Index by what lists, numbers and masks resolve to."""
    resolved = _resolve_index(x, index)
    return NotImplemented if resolved is index else x[resolved]


def _resolve_index(x: Any, index: Any) -> Any:
    """Return an index that has only slices, numbers and arrays of integers.

    Lists become arrays, 0-d arrays numbers, as bounds of slices too, and masks the indices of their
    True elements. An index that has no such items is returned itself.
    """
    items = index if isinstance(index, tuple) else (index,)
    without_lists: list[Any] = []
    for item in items:
        if isinstance(item, list | range) and isinstance(x, Sharded):
            dtype = None if len(item) else torch.long  # torch takes [] for floats
            item = spread(torch.tensor(item, dtype=dtype), x.layout)
        without_lists.append(item)
    if any(map(_is_mask, without_lists)):
        _validate_masks(x, without_lists)

    resolved: list[Any] = []
    for item in without_lists:
        if _is_mask(item):
            resolved += item.nonzero().unbind(1)
        elif isinstance(item, Sharded) and item.ndim == 0:
            resolved.append(item.item())
        elif isinstance(item, slice) and arrays_in(item):
            resolved.append(map_arrays(operator.index, item))
        else:
            resolved.append(item)
    is_unchanged = all(item is new for item, new in zip(items, resolved, strict=False))
    return index if is_unchanged else tuple(resolved)


def _is_mask(item: Any) -> bool:
    return isinstance(item, Sharded) and item.dtype in (torch.bool, torch.uint8) and item.ndim > 0


def _validate_masks(x: Any, items: Sequence[Any]) -> None:
    """Raise torch's error for masks whose shape is not that of the dims that they index."""
    false = torch.tensor(False)  # expanded, it needs no memory

    def false_mask(item: Any) -> Any:
        return false.expand(item.shape) if _is_mask(item) else slice(None)

    _ = false.expand(x.shape)[map_arrays(false_mask, tuple(items))]


# Writing by an index.


def set_items(x: Any, index: Any, value: Any) -> Any:
    """Return a copy of a tensor with some elements replaced."""
    y = x.clone()
    y[index] = value
    return y


@rule("set_items")
def _set_items(results: Any, x: Any, index: Any, value: Any) -> Rule:
    term, out = _label_index(x, index)
    index_terms = ["N" * array.ndim for array in arrays_in(index)]
    terms = [term, *index_terms]
    if not isinstance(value, Tensor):
        return Rule(f"{','.join(terms)}->{term}", [(0,)] if value == 0 else ())

    # The value broadcasts to the elements at the index: their last dims are its own. More dims in
    # front have length 1.
    longest_index_term = max(index_terms, default="")
    out = "N" * value.ndim + out.replace("...", longest_index_term)
    value_number = len(terms)
    terms.append(out[len(out) - value.ndim :])
    return Rule(f"{','.join(terms)}->{term}", [(0, value_number)])


def _assign(x: Any, index: Any, value: Any) -> None:
    """Write `x[index] = value`."""
    is_mask = _is_mask(index) and index.shape == x.shape[: index.ndim]
    if is_mask and not isinstance(value, Sharded):
        ones = (1,) * (x.ndim - index.ndim)
        y = x.masked_fill(index.reshape(*index.shape, *ones), value)
    else:
        index = _resolve_index(x, index)
        if isinstance(value, Sharded):
            value = value.to(x.dtype)
        y = operate(set_items, (x, index, value), {})
    write(x, y, "x[index] = y")


DIRECT["setitem"] = _assign


# Lookups: rows by their numbers. Rows may be sharded, with the label ROWS. Each device looks up the
# rows that it has, and the results are zeros elsewhere: their sum is the result.


def _local_rows(context: LocalContext, index: Tensor, total: int) -> tuple[Tensor, Tensor, int]:
    """Return which of its rows a device has to look up.

    The first tensor has indices into these rows, the second one has which of them the device has;
    the number is that of its first row.
    """
    if index.is_cpu and bool(((index < 0) | (index >= total)).any()):
        raise IndexError(f"an index must be in 0..{total - 1}; got {index.min()} to {index.max()}.")
    number, count = context.positions[ROWS]
    start, stop = flat_range(total, count, number)
    is_local = (index >= start) & (index < stop)
    # Indices of other rows become any that exist: the caller replaces what they find by zeros.
    last = max(stop - start - 1, 0)
    return (index - start).clamp(0, last), is_local, start


@rule("gather take_along_dim")
def _gather(results: Any, x: Any, *args: Any, dim: Any = None, **kwargs: Any) -> Rule:
    """Return the rule of a gather: its dim may be sharded."""
    (index,) = arrays_in(args, kwargs)
    dims = [arg for arg in (*args, dim) if isinstance(arg, int)]
    if not dims or not x.ndim or x.ndim != index.ndim:
        return Rule("->", [(0,)])
    gathered = dims[0]
    total = x.shape[gathered]

    def take(context: LocalContext, func: Any, args: Any, kwargs: Any) -> Any:
        if ROWS not in context.positions:
            return func(*args, **kwargs)
        shard, index = arrays_in(args, kwargs)
        index, is_local, _ = _local_rows(context, index, total)
        return torch.where(is_local, shard.gather(gathered, index), 0)

    term = spell(x.ndim, {gathered: ROWS})
    out = spell(x.ndim, {gathered: "k"})
    return Rule(f"{term},{out}->{out}", [(0,)], take, broadcasts=False)


@rule("scatter scatter_add scatter_reduce index_add index_copy index_fill index_reduce")
def _scatter(results: Any, x: Any, dim: int, index: Any, *args: Any, **kwargs: Any) -> Rule:
    term = spell(x.ndim, {dim: "D"})
    sources = arrays_in(args, kwargs)
    terms: list[str] = []
    for array in (x, index, *sources):
        terms.append(term if array.ndim == x.ndim else "D" * array.ndim)
    has_reduction = kwargs.get("reduce") is not None or len(args) > 1
    is_linear = len(sources) == 1 and index.ndim == x.ndim and not has_reduction
    linear = [(0, 2)] if is_linear else ()
    return Rule(f"{','.join(terms)}->{term}", linear, broadcasts=False)


@rule("index_select")
def _index_select(results: Any, x: Any, dim: int, index: Any) -> Rule:
    term = spell(x.ndim, {dim: "D"})
    out = spell(x.ndim, {dim: "k"})
    return Rule(f"{term},{'k' * index.ndim}->{out}", [(0,)])


@rule("take")
def _take(results: Any, x: Any, index: Any) -> Rule:
    return Rule(f"{'D' * x.ndim},...->...", [(0,)])


@rule("searchsorted")
def _searchsorted(results: Any, *args: Any, **kwargs: Any) -> Rule:
    return Rule("->")


@rule("embedding")
def _embedding(
    results: Any, input: Any, weight: Any, padding_idx: int | None = None, max_norm: Any = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Rule:  # fmt: skip
    """Return the rule of a table: its rows may be sharded."""
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise LayoutError(
            "embedding of arrays does not take max_norm, scale_grad_by_freq and sparse."
        )
    rows = len(weight)

    def look_up(context: LocalContext, func: Any, args: Any, kwargs: Any) -> Any:
        if ROWS not in context.positions:
            return func(*args, **kwargs)
        index, shard = arrays_in(args, kwargs)
        index, is_local, start = _local_rows(context, index, rows)
        local_padding = None
        if padding_idx is not None:
            padding_row = padding_idx % rows - start
            if 0 <= padding_row < len(shard):
                local_padding = padding_row
        return F.embedding(index, shard, local_padding) * is_local.unsqueeze(-1)

    return Rule("...,vw->...w", [(1,)], look_up)
