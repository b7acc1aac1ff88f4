"""Rows of views: results whose elements are elements of the input, in another shape or order.

Labels of strided views are found by torch itself: the stride of an output dim names the input dim that it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch

from fshard.array.rules import (
    Labels,
    Rule,
    Where,
    broadcast,
    compose,
    letters,
    reshaped,
    rule,
    tensors_in,
    words,
)


def strided(x: Any, view: Any) -> tuple[Labels, list[Labels]]:
    """Return the labels of an input and of its views: dims that a view keeps in full are alike.

    `view` is a function of a meta tensor whose strides identify its dims.
    """
    steps = [1 << (5 * (dim + 1)) for dim in range(x.ndim)]  # far apart: a step of a slice is no other dim's stride
    like = torch.empty_strided(x.shape, [step + 7 * dim for dim, step in enumerate(steps)], device="meta")
    names = {
        (stride, length): f"d{dim}" for dim, (stride, length) in enumerate(zip(like.stride(), x.shape, strict=True))
    }
    found = [
        tuple(names.get(pair) if pair[1] != 1 else None for pair in zip(y.stride(), y.shape, strict=True))
        for y in tensors_in(view(like))
    ]
    kept: set[str | None] = set.intersection(*({*labels} for labels in found)) if found else set()
    keep = {label for label in kept if all(labels.count(label) == 1 for labels in found)}
    return (
        tuple(f"d{d}" if f"d{d}" in keep else None for d in range(x.ndim)),
        [tuple(label if label in keep else None for label in labels) for labels in found],
    )


def _view_rule(func: Any) -> Any:
    def rule_of(x: Any, *args: Any, **kwargs: Any) -> Rule:
        own, outs = strided(x, lambda like: func(like, *args, **kwargs))
        return Rule([(x, own)], outs, linear=[(x,)])

    return rule_of


_TENSOR: Any = torch.Tensor
for _name in words(
    "permute transpose t movedim moveaxis swapaxes swapdims adjoint unsqueeze select unbind diagonal chunk"
):
    rule(_name, is_view=True)(_view_rule(getattr(_TENSOR, _name)))
for _name in words("T mT H mH"):
    rule(f".{_name}", is_view=True)(_view_rule(attrgetter(_name)))


def along(x: Any, *dims: int, is_linear: bool = True, outputs: Labels | None = None) -> Rule:
    """Return the rule of an operation that needs all elements along some dims."""
    own = letters(x, *dims)
    return Rule([(x, own)], [own if outputs is None else outputs], linear=[(x,)] if is_linear else ())


def to_local_shape(where: Where, func: Any, args: Any, kwargs: Any) -> Any:
    """Reshape a shard to the local shape of the result."""
    return args[0].reshape(where.shapes[0])


@rule("squeeze", is_view=True)
def _squeeze(x: Any, *args: Any, **kwargs: Any) -> Rule:
    own, outs = strided(x, lambda like: like.squeeze(*args, **kwargs))
    return Rule([(x, own)], outs, linear=[(x,)], local=to_local_shape)  # a shard may have more dims of length 1


def _reshape_rule(func: Any) -> Any:
    def rule_of(x: Any, *args: Any, **kwargs: Any) -> Rule:
        if any(isinstance(one, torch.dtype) for one in (*args, *kwargs.values())):
            return Rule([], [(None,) * x.ndim])
        before, after = reshaped(x.shape, func(x, *args, **kwargs).shape)
        return Rule([(x, before)], [after], linear=[(x,)], local=to_local_shape)

    return rule_of


for _name in words("reshape view unflatten flatten ravel"):
    rule(_name, is_view=True)(_reshape_rule(getattr(_TENSOR, _name)))


def _expand_rule(func: Any) -> Any:
    def rule_of(x: Any, *args: Any, **kwargs: Any) -> Rule:
        full = func(x, *args, **kwargs).shape
        lengths = (-1,) * (len(full) - x.ndim) + tuple(x.shape)
        return Rule(
            [(x, broadcast(full, x.shape)[1][1])],
            [tuple(f"d{d}" if n == before else None for d, (n, before) in enumerate(zip(full, lengths, strict=True)))],
            linear=[(x,)],
            local=lambda where, func, args, kwargs: args[0].expand(where.shapes[0]),
        )

    return rule_of


rule("expand", is_view=True)(_expand_rule(_TENSOR.expand))
rule("broadcast_to", is_view=True)(_expand_rule(torch.broadcast_to))


@compose("view_as reshape_as")
def _reshape_as(x: Any, other: Any) -> Any:
    return x.reshape(other.shape)


@compose("expand_as")
def _expand_as(x: Any, other: Any) -> Any:
    return x.expand(other.shape)


@compose("broadcast_tensors")
def _broadcast_tensors(*xs: Any) -> Any:
    shape = torch.broadcast_shapes(*(x.shape for x in (xs[0] if isinstance(xs[0], tuple | list) else xs)))
    return tuple(x.expand(shape) for x in (xs[0] if isinstance(xs[0], tuple | list) else xs))


@rule("split split_with_sizes tensor_split", is_view=True)
def _split(x: Any, sizes: Any = 1, dim: int = 0, **kwargs: Any) -> Rule:
    return along(x, dim)


@rule("narrow", is_view=True)
def _narrow(x: Any, dim: int, start: Any, length: int) -> Rule:
    return along(x, dim)


@rule("unfold", is_view=True)
def _unfold(x: Any, dimension: int, size: int, step: int) -> Rule:
    return along(x, dimension, outputs=(*letters(x, dimension), None))


@rule("cat concat concatenate")
def _cat(tensors: Sequence[Any], dim: int = 0, out: Any = None) -> Rule:
    width = max(x.ndim for x in tensors)
    if any(x.ndim != width for x in tensors):
        return Rule([], [(None,) * width])
    own = letters(tensors[0], dim)
    return Rule([(x, own) for x in tensors], [own], linear=[tuple(tensors)])


@rule("stack")
def _stack(tensors: Sequence[Any], dim: int = 0, out: Any = None) -> Rule:
    own, place = letters(tensors[0]), dim % (tensors[0].ndim + 1)
    return Rule([(x, own) for x in tensors], [(*own[:place], None, *own[place:])], linear=[tuple(tensors)])


@rule("flip fliplr flipud roll rot90")
def _flip(x: Any, *args: Any, **kwargs: Any) -> Rule:
    return along(x, *range(x.ndim))


@rule("tril triu")
def _triangle(x: Any, diagonal: int = 0) -> Rule:
    return along(x, -2, -1)


@rule("repeat tile")
def _repeat(x: Any, *sizes: Any, dims: Any = (), repeats: Any = ()) -> Rule:
    given = dims or repeats or sizes
    counts: tuple[int, ...] = tuple(given[0]) if given and not isinstance(given[0], int) else tuple(given)
    counts = (1,) * (x.ndim - len(counts)) + counts
    new = len(counts) - x.ndim
    own = tuple(f"d{d}" if counts[new + d] == 1 else None for d in range(x.ndim))
    return Rule([(x, own)], [(None,) * new + own], linear=[(x,)])


@rule("repeat_interleave")
def _repeat_interleave(x: Any, repeats: int, dim: int | None = None, *, output_size: Any = None) -> Rule:
    return Rule([], [(None,)], linear=[(x,)]) if dim is None else along(x, dim)


@rule("pad")
def _pad(x: Any, pad: Sequence[int], mode: str = "constant", value: Any = None) -> Rule:
    touched = [x.ndim - 1 - place // 2 for place, one in enumerate(pad) if one or mode != "constant"]
    return along(x, *touched, is_linear=mode != "constant" or not value)


@rule("pixel_shuffle pixel_unshuffle channel_shuffle")
def _shuffle(x: Any, *args: Any, **kwargs: Any) -> Rule:
    return along(x, *range(x.ndim - 3, x.ndim))
