"""`Rule`: which dims of an operation's inputs and outputs correspond. The table of rules is built from it.

A rule is an equation as in einsum, with one term for each array. Dims with one letter are sharded alike:

    bi,io->bo      b, o: inputs and output are sharded alike       i: summed; sharded inputs give an unreduced output
    aDc->aDc       D, a capital: every device needs all of it      ...: dims that broadcast
    ...k,ok,+o->...o   +: added to the sum, once                   ...*->...: any number of arrays

Arrays without a term must be replicated; `->` is the rule of operations that are never local.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor

from fshard.mesh.layout import Layout
from fshard.mesh.layout.sharded import Sharded

Labels = tuple[str | None, ...]
"""A label for every dim of an array; None where every device needs all of it."""


class Where(NamedTuple):
    """The calling device, as a local program sees it."""

    shapes: tuple[tuple[int, ...], ...]
    """Local shapes of the results."""
    positions: Mapping[str, tuple[int, int]]
    """The device's number among the shards of every sharded label, and how many there are."""


LocalProgram = Callable[[Where, Any, tuple[Any, ...], dict[str, Any]], Any]
"""Computes the results of one device: (where, torch's function, args and kwargs with local shards) -> results."""


class Rule(NamedTuple):
    """One operation on arguments of given shapes.

    Args:
        equation: the labels of arrays and results; one term of a result holds for all results.
        linear: groups of arrays, by number; the operation is linear in each group together, so these may be unreduced.
        local: the program of one device; by default torch's function on the local shards.
        exact: a dim of length 1 does not broadcast.
        ragged: letters whose dims may differ in length.
    """

    equation: str
    linear: Sequence[Sequence[int]] | Literal["each", "all"] = ()
    local: LocalProgram | None = None
    exact: bool = False
    ragged: str = ""


ROWS = "v"
"""The letter of a dim that indices refer to: a shard of it must be a range."""


class Row(NamedTuple):
    """A row of the table: a rule, given torch's results and the call's arguments with meta tensors for arrays.

    `compose` computes the operation with others on the arrays themselves, or returns NotImplemented where the rule
    does. `is_view`: whether torch's result shares memory with its argument.
    """

    rule: Callable[..., Rule] | None = None
    compose: Callable[..., Any] | None = None
    is_view: bool = False


TABLE: dict[str, Row] = {}
"""The rows, by the name of torch's function or method."""


def rule(names: str, *, is_view: bool = False) -> Callable[[Callable[..., Rule]], None]:
    """Return the function that adds a rule to the table under some names."""
    return lambda f: TABLE.update(
        {n: TABLE.get(n, Row())._replace(rule=f, is_view=is_view) for n in names.split()}
    )


def compose(names: str) -> Callable[[Callable[..., Any]], None]:
    """Return the function that adds a composition to the table under some names."""
    return lambda f: TABLE.update(
        {n: TABLE.get(n, Row())._replace(compose=f) for n in names.split()}
    )


def equations(names: str, text: str, linear: Any = ()) -> None:
    """Add rows whose rule is the first of some equations whose terms fit the arrays."""

    def fits(term: str, x: Any) -> bool:
        width = x.ndim - len(term.strip("+."))
        return width <= 0 if term.startswith("+") else width >= 0 if "..." in term else width == 0

    def rule_of(results: Any, *args: Any, **kwargs: Any) -> Rule:
        arrays = arrays_in(args, kwargs)
        terms = {equation: equation.partition("->")[0].split(",") for equation in text.split()}
        fitting = [
            equation
            for equation in terms
            if len(terms[equation]) == len(arrays) and all(map(fits, terms[equation], arrays))
        ]
        return Rule(fitting[0] if fitting else "->", linear)

    rule(names)(rule_of)


def spell(ndim: int, labels: Mapping[int, str] | None = None) -> str:
    """Return the term of an array: letters in order, others at some dims.

    >>> spell(4, {-1: "K"})
    'abcK'
    """
    letters = list("abcdefghij"[:ndim])
    for dim, letter in (labels or {}).items() if letters else ():
        letters[dim] = letter
    return "".join(letters)


class Value(NamedTuple):
    """An input or a result of an operation; a result has no layout yet."""

    shape: tuple[int, ...]
    labels: Labels
    itemsize: int
    layout: Layout | None


class LabelledOperation(NamedTuple):
    """A rule with the labels of the arrays of a call."""

    inputs: Sequence[Value]
    outputs: Sequence[Value]
    linear: Sequence[frozenset[int]]
    summed: frozenset[str]
    added: frozenset[int]
    is_elementwise: bool

    def is_shardable(self, label: str | None) -> bool:
        return label is not None and (
            label in self.summed or all(label in y.labels for y in self.outputs)
        )


def describe(rule: Rule, arrays: Sequence[Any], results: Sequence[Any]) -> LabelledOperation:
    """Return the labels of a call's arrays and results.

    A dim that is broadcast has none. Nor have dims whose letter a term repeats, as for a diagonal, or with other lengths.
    """
    operand_terms, result_terms = rule.equation.split("->")
    terms = operand_terms.split(",") if operand_terms else []
    if operand_terms.endswith("*"):
        terms = [operand_terms[:-1]] * len(arrays)
    terms += ["D" * x.ndim for x in arrays[len(terms) :]]
    added = frozenset(number for number, term in enumerate(terms) if term.startswith("+"))
    inputs = [_expanded(term, x.ndim) for term, x in zip(terms, arrays, strict=True)]
    lengths: dict[str, set[int]] = {}
    for labels, x in zip(inputs, arrays, strict=True):
        for label, length in zip(labels, x.shape, strict=True):
            lengths.setdefault(label, set()).add(length)
    repeated = {label for labels in inputs for label in labels if labels.count(label) > 1}
    unequal = {
        a for a, sizes in lengths.items() if len(sizes if rule.exact else sizes - {1}) > 1
    } - {*rule.ragged}

    def shardable_label(label: str, length: int | None = None) -> str | None:
        is_local = label.isupper() or label in repeated | unequal
        return None if is_local or (length == 1 and lengths[label] != {1}) else label

    outputs = result_terms.split(",") if "," in result_terms else [result_terms] * len(results)
    output_labels = [
        tuple(map(shardable_label, _expanded(term, y.ndim)))
        for term, y in zip(outputs, results, strict=True)
    ]
    labels = [
        tuple(map(shardable_label, labels, x.shape))
        for labels, x in zip(inputs, arrays, strict=True)
    ]
    result_labels = [
        dim_labels if len(dim_labels) == y.ndim else (None,) * y.ndim
        for dim_labels, y in zip(output_labels, results, strict=True)
    ]
    used = {label for dim_labels in labels for label in dim_labels if label is not None}
    reduced = used - {label for dim_labels in output_labels for label in dim_labels}
    groups: Any = rule.linear
    if groups == "each":
        groups = [(number, *added) for number in range(len(arrays)) if number not in added]
    return LabelledOperation(
        [
            Value(x.shape, dim_labels, x.dtype.itemsize, x.layout)
            for x, dim_labels in zip(arrays, labels, strict=True)
        ],
        [
            Value(tuple(y.shape), dim_labels, y.dtype.itemsize, None)
            for y, dim_labels in zip(results, result_labels, strict=True)
        ],
        [frozenset(group) for group in ([range(len(arrays))] if groups == "all" else groups)],
        frozenset(label for label in reduced if result_terms == "" or not label.startswith(".")),
        added,
        {*terms} == {"..."} and result_terms in ("...", ""),
    )


def _expanded(term: str, ndim: int) -> list[str]:
    """Return the labels of a term: dots are the dims, from the right, that the letters leave."""
    if term.startswith("+"):
        term = term[len(term) - ndim :]  # the dims that are missing broadcast
    before, dots, after = term.partition("...")
    return [
        *before,
        *(f".{dim}" for dim in range(ndim - len(before) - len(after), 0, -1) if dots),
        *after,
    ]


def as_dims(x: Any, dim: Any) -> tuple[int, ...]:
    """Return dims as a tuple of numbers from 0; None and () mean all."""
    dims: Sequence[int] = (
        (dim,) if isinstance(dim, int) else dim if dim is not None and len(dim) else range(x.ndim)
    )
    for index in dims:
        if not -max(x.ndim, 1) <= index < max(x.ndim, 1):
            raise IndexError(f"dim {index} does not exist in an array of shape {tuple(x.shape)}.")
    return tuple(index % max(x.ndim, 1) for index in dims)


def map_arrays(f: Callable[[Any], Any], tree: Any) -> Any:
    """Return arguments with f applied to their arrays and tensors, in order."""
    if isinstance(tree, Sharded | Tensor):
        return f(tree)
    if type(tree) in (tuple, list):
        return type(tree)([map_arrays(f, item) for item in tree])
    if isinstance(tree, dict):
        return {name: map_arrays(f, item) for name, item in tree.items()}
    if isinstance(tree, slice):
        return slice(*(map_arrays(f, bound) for bound in (tree.start, tree.stop, tree.step)))
    return tree


def arrays_in(*trees: Any) -> list[Any]:
    """Return the arrays and tensors among arguments, in order."""
    arrays: list[Any] = []
    map_arrays(arrays.append, trees)
    return arrays
