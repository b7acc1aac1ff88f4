"""`Rule`: which dims of an operation's inputs and outputs correspond. The table of rules is built from it.

A dim has a label, or None if every device needs all of it. Dims with one label are sharded alike:

    einsum "bi,io->bo"    b, o: inputs and output sharded alike        i: sharded inputs give an unreduced output

A row of the table is a function of the call's own arguments, in which arrays are meta tensors of the global shape. It
returns a `Rule`; or it is a composition of other operations, for layouts in which the operation itself is not local.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

Labels = tuple[str | None, ...]
"""A label, or None, for every dim of an array."""


class Where(NamedTuple):
    """The calling device, as a local program sees it."""

    device: int
    shapes: tuple[tuple[int, ...], ...]
    """Local shapes of the results."""
    starts: Mapping[str, int]
    """The device's number among the shards of every sharded label."""

    def start(self, label: str, local_length: int) -> int:
        return self.starts.get(label, 0) * local_length


LocalProgram = Callable[[Where, Any, tuple[Any, ...], dict[str, Any]], Any]
"""Computes the results of one device: (where, torch's function, args and kwargs with local shards) -> results."""


@dataclass(frozen=True)
class Rule:
    """One operation on arguments of given shapes.

    Args:
        inputs: arrays and their labels; an array that is not named must be replicated.
        outputs: the labels of every result; one entry holds for all of them,
            none means that no dim is sharded.
        linear: groups of inputs; the operation is linear in each group together, so these may be unreduced.
        summed: labels that are summed over, where devices with other shards have the other summands.
        added: inputs that are added to the sum over `summed` labels.
        lengths: further lengths that the number of shards must divide, by label.
        local: the program of one device; by default torch's function on the local shards.
        is_elementwise: whether it may run on flat shards too.
    """

    inputs: Sequence[tuple[Any, Labels]]
    outputs: Sequence[Labels]
    linear: Sequence[Sequence[Any]] = ()
    summed: frozenset[str] = frozenset()
    added: Sequence[Any] = ()
    lengths: Mapping[str, int] = field(default_factory=dict[str, int])
    local: LocalProgram | None = None
    is_elementwise: bool = False


class Row(NamedTuple):
    """A row of the table.

    `compose` computes the operation with others, or returns NotImplemented where the rule does. `is_view`: whether
    torch's result shares memory with its argument.
    """

    rule: Callable[..., Rule] | None = None
    compose: Callable[..., Any] | None = None
    is_view: bool = False


TABLE: dict[str, Row] = {}
"""The rows, by the name of torch's function or method."""


def rule(names: str, *, is_view: bool = False) -> Callable[[Callable[..., Rule]], Callable[..., Rule]]:
    """Add a rule to the table under some names."""

    def add(function: Callable[..., Rule]) -> Callable[..., Rule]:
        for name in names.split():
            TABLE[name] = TABLE.get(name, Row())._replace(rule=function, is_view=is_view)
        return function

    return add


def compose(names: str, *, is_view: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a composition to the table under some names; the function is called with the arrays themselves."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names.split():
            TABLE[name] = TABLE.get(name, Row())._replace(compose=function, is_view=is_view)
        return function

    return add


def words(names: str) -> list[str]:
    """Return the names of rows in a string."""
    return names.split()


# Arithmetic of labels.


def letters(x: Any, *local: int, prefix: str = "d") -> Labels:
    """Return one label for every dim of `x`, None for the dims in `local`."""
    kept = {dim % max(x.ndim, 1) for dim in local}
    return tuple(None if dim in kept else f"{prefix}{dim}" for dim in range(x.ndim))


def as_dims(x: Any, dim: Any) -> tuple[int, ...]:
    """Return dims as a tuple of numbers from 0; None and () mean all."""
    if dim is None or dim == () or dim == []:
        return tuple(range(x.ndim))
    dims: Sequence[int] = (dim,) if isinstance(dim, int) else dim
    for one in dims:
        if not -max(x.ndim, 1) <= one < max(x.ndim, 1):
            raise IndexError(f"dim {one} does not exist in an array of shape {tuple(x.shape)}.")
    return tuple(one % max(x.ndim, 1) for one in dims)


def reduced(labels: Labels, dims: Sequence[int], keepdim: bool) -> Labels:
    """Return labels without those of some dims."""
    if keepdim:
        return tuple(None if dim in dims else label for dim, label in enumerate(labels))
    return tuple(label for dim, label in enumerate(labels) if dim not in dims)


def broadcast(*shapes: Sequence[int]) -> tuple[tuple[int, ...], list[Labels]]:
    """Return the broadcast shape and the labels of each shape in it; dims of length 1 that are expanded have none."""
    full = tuple(torch.broadcast_shapes(*map(tuple, shapes)))
    labels = [
        tuple(
            f"d{dim}" if length == full[dim] else None for dim, length in enumerate(shape, start=len(full) - len(shape))
        )
        for shape in shapes
    ]
    return full, labels


def all_letters(full: Sequence[int]) -> Labels:
    """Return one label for every dim of a shape."""
    return tuple(f"d{dim}" for dim in range(len(full)))


def reshaped(before: Sequence[int], after: Sequence[int]) -> tuple[Labels, Labels]:
    """Return the labels of a reshape: dims that are merged or split keep the label of the major one.

    >>> reshaped((4, 3, 5), (12, 5))
    (('g0', None, 'g1'), ('g0', 'g1'))
    """
    start: list[str | None] = [None] * len(before)
    stop: list[str | None] = [None] * len(after)
    if prod(before) == 0:
        return tuple(start), tuple(stop)
    i = j = group = 0
    while i < len(before) and j < len(after):
        first, second = [i], [j]
        while (one := prod(before[d] for d in first)) != (other := prod(after[d] for d in second)):
            if one < other:
                first.append(first[-1] + 1)
            else:
                second.append(second[-1] + 1)
        i, j = first[-1] + 1, second[-1] + 1
        majors = [next((d for d in dims if sizes[d] > 1), None) for dims, sizes in ((first, before), (second, after))]
        if majors[0] is not None and majors[1] is not None:
            start[majors[0]] = stop[majors[1]] = f"g{group}"
            group += 1
    return tuple(start), tuple(stop)


# Arrays among the arguments of a call.


def tensors_in(args: Any) -> list[Any]:
    """Return the arrays (meta tensors, in a rule) among arguments, in order."""
    if isinstance(args, Tensor):
        return [args]
    if isinstance(args, dict):
        return tensors_in(list(args.values()))
    return list(chain.from_iterable(map(tensors_in, args))) if isinstance(args, tuple | list) else []
