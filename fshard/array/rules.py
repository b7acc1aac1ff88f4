"""`Rule`: which dims of an operation's inputs and outputs correspond. The table of rules is built from it.

A rule is written as subscripts, as in einsum. Dims with one letter are sharded alike:

    bi,io->bo      b, o: inputs and output are sharded alike       i: summed; sharded inputs give an unreduced output
    aDc->aDc       D, a capital: every device needs all of it      ...: dims that broadcast

A row of the table is a function of torch's results and the call's own arguments, in which arrays are meta tensors of
the global shape. It returns a `Rule`. Or it is a composition of other operations on the arrays themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from fshard.mesh.layout.sharded import Sharded

Labels = tuple[str | None, ...]
"""A label for every dim of an array; None where every device needs all of it."""


class Where(NamedTuple):
    """The calling device, as a local program sees it."""

    shapes: tuple[tuple[int, ...], ...]
    """Local shapes of the results."""
    starts: Mapping[str, int]
    """The device's number among the shards of every sharded label."""


LocalProgram = Callable[[Where, Any, tuple[Any, ...], dict[str, Any]], Any]
"""Computes the results of one device: (where, torch's function, args and kwargs with local shards) -> results."""


@dataclass(frozen=True)
class Rule:
    """One operation on arguments of given shapes.

    Args:
        inputs: arrays and their labels; an array that is not named must be replicated.
        outputs: the labels of every result; one entry holds for all of them, none means that no dim is sharded.
        linear: groups of inputs; the operation is linear in each group together, so these may be unreduced.
        summed: labels that are summed over, where devices with other shards have the other summands.
        added: inputs that are added to the sum over `summed` labels.
        local: the program of one device; by default torch's function on the local shards.
        is_elementwise: whether it may run on flat shards too.
    """

    inputs: Sequence[tuple[Any, Labels]] = ()
    outputs: Sequence[Labels] = ()
    linear: Sequence[Sequence[Any]] = ()
    summed: frozenset[str] = frozenset()
    added: Sequence[Any] = ()
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

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def rule(names: str, *, is_view: bool = False) -> Decorator:
    """Add a rule to the table under some names: a function of the list of results and the call's arguments."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names.split():
            TABLE[name] = TABLE.get(name, Row())._replace(rule=function, is_view=is_view)
        return function

    return add


def compose(names: str) -> Decorator:
    """Add a composition to the table under some names: a function of the call's arguments, with the arrays."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names.split():
            TABLE[name] = TABLE.get(name, Row())._replace(compose=function)
        return function

    return add


# Subscripts.


def spell(ndim: int, at: Mapping[int, str] | None = None) -> str:
    """Return the subscripts of an array: letters in order, others at some dims.

    >>> spell(4, {-1: "K"})
    'abcK'
    """
    letters = list("abcdefghij"[:ndim])
    for dim, letter in (at or {}).items():
        letters[dim] = letter
    return "".join(letters)


def subscripts(
    equation: str, arrays: Sequence[Any], *, exact: bool = False, ragged: str = ""
) -> tuple[list[Labels], list[Labels]]:
    """Return the labels of inputs and outputs.

    A dim of length 1 that is broadcast has none. Nor has a label that a term repeats, as for a diagonal, or whose
    lengths differ otherwise; with `exact`, differ at all. Letters in `ragged` may have several lengths.
    """
    left, right = equation.split("->")
    terms = left.split(",")
    widths = [x.ndim - len(term.replace("...", "")) for term, x in zip(terms, arrays, strict=True)]
    inputs = [_expanded(term, width) for term, width in zip(terms, widths, strict=True)]
    full = max((width for term, width in zip(terms, widths, strict=True) if "..." in term), default=0)
    lengths: dict[str, set[int]] = {}
    for labels, x in zip(inputs, arrays, strict=True):
        for label, length in zip(labels, x.shape, strict=True):
            lengths.setdefault(label, set()).add(length)
    local = {label for labels in inputs for label in labels if labels.count(label) > 1 or label.isupper()}
    local |= {label for label, found in lengths.items() if len(found if exact else found - {1}) > 1} - {*ragged}

    def own(label: str, length: int | None = None) -> str | None:
        is_broadcast = length == 1 and lengths[label] != {1}
        return None if label in local or label.isupper() or is_broadcast else label

    return (
        [tuple(map(own, labels, x.shape)) for labels, x in zip(inputs, arrays, strict=True)],
        [tuple(map(own, _expanded(term, full))) for term in right.split(",")],
    )


def _expanded(term: str, width: int) -> list[str]:
    before, dots, after = term.partition("...")
    return [*before, *(f".{dim}" for dim in range(width, 0, -1) if dots), *after]


def alike(equation: str, *arrays: Any, exact: bool = False, ragged: str = "", **more: Any) -> Rule:
    """Return the rule of an operation that computes each part of its results from the same part of its inputs."""
    inputs, outputs = subscripts(equation, arrays, exact=exact, ragged=ragged)
    return Rule(list(zip(arrays, inputs, strict=True)), outputs, **more)


def product(equation: str, *arrays: Any, has_bias: bool = False, **more: Any) -> Rule:
    """Return the rule of a product that is summed over the letters that the output lacks.

    It is linear in each array. The last one is a bias that is added to the product, if `has_bias`.
    """
    inputs, (output,) = subscripts(equation, arrays)
    factors, bias = (arrays[:-1], arrays[-1:]) if has_bias else (arrays, ())
    used = {label for labels in inputs for label in labels if label is not None}
    return Rule(
        list(zip(arrays, inputs, strict=True)),
        [output],
        linear=[(x, *bias) for x in factors],
        summed=frozenset(used - {*output}),
        added=bias,
        **more,
    )


def as_dims(x: Any, dim: Any) -> tuple[int, ...]:
    """Return dims as a tuple of numbers from 0; None and () mean all."""
    if dim is None or dim == () or dim == []:
        return tuple(range(x.ndim))
    dims: Sequence[int] = (dim,) if isinstance(dim, int) else dim
    for one in dims:
        if not -max(x.ndim, 1) <= one < max(x.ndim, 1):
            raise IndexError(f"dim {one} does not exist in an array of shape {tuple(x.shape)}.")
    return tuple(one % max(x.ndim, 1) for one in dims)


# Arrays among the arguments of a call.


def map_arrays(f: Callable[[Any], Any], given: Any) -> Any:
    """Return arguments with f applied to their arrays and tensors, in order."""
    if isinstance(given, Sharded | Tensor):
        return f(given)
    if type(given) in (tuple, list):
        return type(given)([map_arrays(f, one) for one in given])
    if isinstance(given, dict):
        return {name: map_arrays(f, one) for name, one in given.items()}
    if isinstance(given, slice):
        return slice(*(map_arrays(f, one) for one in (given.start, given.stop, given.step)))
    return given


def arrays_in(*given: Any) -> list[Any]:
    """Return the arrays and tensors among arguments, in order."""
    found: list[Any] = []
    map_arrays(found.append, given)
    return found
