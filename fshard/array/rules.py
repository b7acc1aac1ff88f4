"""`Rule`: which dims of an operation's inputs and results correspond; and the table of rules.

A rule is an equation as in einsum, with one term for each array. Dims with one letter are sharded
alike:

    bi,io->bo           b, o: of an input and the result
                        i: of inputs alone: summed; if it is sharded, the result is unreduced
    aDc->aDc            D, a capital: every device needs all of it
    ...ik,...ko->...io  ...: dims that broadcast
    ...k,ok,+o->...o    +: added to the sum, once
    ...*->...           *: any number of arrays with this term

Arrays without a term must be replicated; `->` is the rule of operations that are never local.

The first of these, as `x @ w`, on a mesh with the axes "data" and "model":

    x                  w                  x @ w
    f32[8@data, 4]     f32[4, 6@model]    f32[8@data, 6@model]
    f32[8, 4@model]    f32[4@model, 6]    f32[8, 6]{U:model}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor

from fshard.mesh.layout import Layout
from fshard.mesh.layout.sharded import Sharded

Labels = tuple[str | None, ...]
"""A label for every dim of an array; None where every device needs all of it."""


class LocalContext(NamedTuple):
    """The calling device, as a local program needs it."""

    shapes: tuple[tuple[int, ...], ...]
    """Local shapes of the results."""
    positions: Mapping[str, tuple[int, int]]
    """For every sharded label, the device's number among its shards, and how many there are."""


LocalProgram = Callable[[LocalContext, Any, tuple[Any, ...], dict[str, Any]], Any]
"""Computes the results of one device, from torch's function, and args and kwargs with shards."""


class Rule(NamedTuple):
    """One operation on arguments of given shapes.

    Args:
        equation: the labels of arrays and results; one term of a result holds for all results.
        linear: groups of arrays, by number. The operation is linear in the arrays of a group
            together, so these may be unreduced. "each": every array is a group, with the added
            ones. "all": all arrays are one group.
        local: the program of one device; by default torch's function on the local shards.
        broadcasts: a dim of length 1 has no label where dims of its letter are longer. If False,
            no device may shard such dims.
        ragged: letters whose dims may differ in length.
    """

    equation: str
    linear: Sequence[Sequence[int]] | Literal["each", "all"] = ()
    local: LocalProgram | None = None
    broadcasts: bool = True
    ragged: str = ""


ROWS = "v"
"""The letter of a dim that indices refer to: a shard of it must be a range."""


# The table.


class Row(NamedTuple):
    """A row of the table.

    Args:
        rule: a function of torch's results and the call's arguments, with meta tensors for arrays.
        compose: computes the operation by others, on the arrays themselves. It returns
            NotImplemented for arguments that `rule` is for.
        is_view: torch's result shares memory with its argument.
    """

    rule: Callable[..., Rule] | None = None
    compose: Callable[..., Any] | None = None
    is_view: bool = False


TABLE: dict[str, Row] = {}
"""The rows, by the name of torch's function or method."""


def rule(names: str, *, is_view: bool = False) -> Callable[[Callable[..., Rule]], None]:
    """Return the function that adds a rule to the table under some names."""

    def add(make_rule: Callable[..., Rule]) -> None:
        for name in names.split():
            TABLE[name] = TABLE.get(name, Row())._replace(rule=make_rule, is_view=is_view)

    return add


def compose(names: str) -> Callable[[Callable[..., Any]], None]:
    """Return the function that adds a composition to the table under some names."""

    def add(composition: Callable[..., Any]) -> None:
        for name in names.split():
            TABLE[name] = TABLE.get(name, Row())._replace(compose=composition)

    return add


def equations(names: str, text: str, linear: Any = ()) -> None:
    """Add rows whose rule is the first of some equations whose terms fit the arrays."""
    terms_of = {equation: equation.partition("->")[0].split(",") for equation in text.split()}

    def make_rule(results: Any, *args: Any, **kwargs: Any) -> Rule:
        arrays = arrays_in(args, kwargs)
        for equation, terms in terms_of.items():
            if len(terms) == len(arrays) and all(map(_fits, terms, arrays)):
                return Rule(equation, linear)
        return Rule("->", linear)

    rule(names)(make_rule)


def _fits(term: str, x: Any) -> bool:
    """Return True if an array can have the dims of a term."""
    letters = len(term.strip("+."))
    if term.startswith("+"):
        return x.ndim <= letters  # it broadcasts to the sum
    if "..." in term:
        return x.ndim >= letters
    return x.ndim == letters


def spell(ndim: int, labels: Mapping[int, str] | None = None) -> str:
    """Return the term of an array: letters in order, others at some dims.

    >>> spell(4, {-1: "K"})
    'abcK'
    """
    letters = list("abcdefghij"[:ndim])
    if labels and letters:  # torch takes dim 0 of a 0-d tensor, which has no letter
        for dim, letter in labels.items():
            letters[dim] = letter
    return "".join(letters)


# A rule, for the arrays of a call.


class Value(NamedTuple):
    """An input or a result of an operation; a result has no layout yet."""

    shape: tuple[int, ...]
    labels: Labels
    itemsize: int
    layout: Layout | None


class LabelledOperation(NamedTuple):
    """A rule with the labels of the arrays of a call.

    Args:
        inputs, outputs: the arrays of the call, and its results.
        linear: groups of inputs, by number, in which the operation is linear.
        summed: the labels that results lack: if one is sharded, the results are unreduced.
        added: inputs that are added to the sum, once.
        is_elementwise: every element of a result is one of each input's, or it is the sum of all.
    """

    inputs: Sequence[Value]
    outputs: Sequence[Value]
    linear: Sequence[frozenset[int]]
    summed: frozenset[str]
    added: frozenset[int]
    is_elementwise: bool

    def is_shardable(self, label: str | None) -> bool:
        """Return True if all results have a label, or it is summed: devices can share its dims."""
        if label is None:
            return False
        return label in self.summed or all(label in y.labels for y in self.outputs)


def describe(rule: Rule, arrays: Sequence[Any], results: Sequence[Any]) -> LabelledOperation:
    """Return the labels of a call's arrays and results.

    A dim that is broadcast has none. Nor have dims whose letter a term repeats, as for a diagonal,
    or whose lengths differ.
    """
    operand_text, result_text = rule.equation.split("->")
    terms = _operand_terms(operand_text, arrays)
    result_terms = result_text.split(",") if "," in result_text else [result_text] * len(results)
    labels = [_expanded(term, x.ndim) for term, x in zip(terms, arrays, strict=True)]
    result_labels = [_expanded(term, y.ndim) for term, y in zip(result_terms, results, strict=True)]

    lengths: dict[str, set[int]] = {}
    for dim_labels, x in zip(labels, arrays, strict=True):
        for label, length in zip(dim_labels, x.shape, strict=True):
            lengths.setdefault(label, set()).add(length)
    local_labels = _local_labels(rule, labels, result_labels, lengths)

    inputs: list[Value] = []
    for dim_labels, x in zip(labels, arrays, strict=True):
        shardable = _without(local_labels, dim_labels)
        for dim, length in enumerate(x.shape):
            is_broadcast = length == 1 and lengths[dim_labels[dim]] != {1}
            if is_broadcast:
                shardable[dim] = None
        inputs.append(Value(x.shape, tuple(shardable), x.dtype.itemsize, x.layout))

    outputs: list[Value] = []
    for dim_labels, y in zip(result_labels, results, strict=True):
        has_dims_of_term = len(dim_labels) == y.ndim
        shardable = _without(local_labels, dim_labels) if has_dims_of_term else [None] * y.ndim
        outputs.append(Value(tuple(y.shape), tuple(shardable), y.dtype.itemsize, None))

    summed = _summed_labels(inputs, result_labels)
    added = frozenset(number for number, term in enumerate(terms) if term.startswith("+"))
    is_elementwise = {*terms} == {"..."} and result_text in ("...", "")
    linear = _linear_groups(rule, len(arrays), added)
    return LabelledOperation(inputs, outputs, linear, summed, added, is_elementwise)


def _operand_terms(text: str, arrays: Sequence[Any]) -> list[str]:
    """Return a term for each array; an array without a term is needed in full."""
    if text.endswith("*"):
        return [text[:-1]] * len(arrays)
    terms = text.split(",") if text else []
    for x in arrays[len(terms) :]:
        terms.append("D" * x.ndim)
    return terms


def _local_labels(
    rule: Rule,
    labels: Sequence[Sequence[str]],
    result_labels: Sequence[Sequence[str]],
    lengths: Mapping[str, set[int]],
) -> set[str]:
    """Return the labels of dims that every device needs in full."""
    local_labels: set[str] = set()
    for dim_labels in (*labels, *result_labels):
        local_labels.update(label for label in dim_labels if label.isupper())
    for dim_labels in labels:
        for label in dim_labels:
            # A diagonal: a block of rows and the same block of columns do not contain it all.
            if dim_labels.count(label) > 1:
                local_labels.add(label)
    for label, label_lengths in lengths.items():
        # Shards of dims of other lengths would have other elements, which do not correspond.
        others = label_lengths - {1} if rule.broadcasts else label_lengths
        if len(others) > 1 and label not in rule.ragged:
            local_labels.add(label)
    return local_labels


def _without(local_labels: set[str], labels: Sequence[str]) -> list[str | None]:
    """Return labels with None in place of those of dims that every device needs in full."""
    return [None if label in local_labels else label for label in labels]


def _summed_labels(
    inputs: Sequence[Value], result_labels: Sequence[Sequence[str]]
) -> frozenset[str]:
    """Return the labels of inputs that no result has."""
    summed: set[str] = set()
    for x in inputs:
        summed.update(label for label in x.labels if label is not None)
    return frozenset(summed.difference(*result_labels))


def _linear_groups(rule: Rule, count: int, added: frozenset[int]) -> list[frozenset[int]]:
    """Return the groups of arrays in which an operation is linear."""
    if rule.linear == "all":
        return [frozenset(range(count))]
    if rule.linear == "each":
        return [frozenset({number, *added}) for number in range(count) if number not in added]
    return [frozenset(group) for group in rule.linear]


def _expanded(term: str, ndim: int) -> list[str]:
    """Return the labels of a term: dots are the dims, from the right, that the letters leave.

    >>> _expanded("...ik", 4), _expanded("+io", 1)
    (['.2', '.1', 'i', 'k'], ['o'])
    """
    if term.startswith("+"):
        term = term[len(term) - ndim :]  # the dims that are missing broadcast
    before, dots, after = term.partition("...")
    labels = [*before]
    if dots:
        count = ndim - len(before) - len(after)
        labels += [f".{dim}" for dim in range(count, 0, -1)]
    return [*labels, *after]


# Arguments.


def as_dims(x: Any, dim: Any) -> tuple[int, ...]:
    """Return dims as a tuple of numbers from 0; None and () mean all."""
    dims: Sequence[int]
    if isinstance(dim, int):
        dims = (dim,)
    elif dim is None or len(dim) == 0:
        dims = range(x.ndim)
    else:
        dims = dim

    ndim = max(x.ndim, 1)  # torch takes dim 0 of a 0-d tensor
    for index in dims:
        if not -ndim <= index < ndim:
            raise IndexError(f"dim {index} does not exist in an array of shape {tuple(x.shape)}.")
    return tuple(index % ndim for index in dims)


def map_arrays(f: Callable[[Any], Any], tree: Any) -> Any:
    """Return arguments with f applied to their arrays and tensors, in order."""
    if isinstance(tree, Sharded | Tensor):
        return f(tree)
    if type(tree) in (tuple, list):
        return type(tree)([map_arrays(f, item) for item in tree])
    if isinstance(tree, dict):
        return {name: map_arrays(f, item) for name, item in tree.items()}
    if isinstance(tree, slice):
        return slice(*[map_arrays(f, bound) for bound in (tree.start, tree.stop, tree.step)])
    return tree


def arrays_in(*trees: Any) -> list[Any]:
    """Return the arrays and tensors among arguments, in order."""
    arrays: list[Any] = []
    map_arrays(arrays.append, trees)
    return arrays
