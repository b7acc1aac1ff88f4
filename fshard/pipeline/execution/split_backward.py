"""A backward in two halves: I, the gradients of a stage's inputs, now, and W, the gradients of its weights, later.

In I a matrix product computes the gradient of its input, and its output gradient is kept; in W a backward begins at
the product, for the weights below it.

    y ──> mm ──> relu ──> mm ──> x        early: I
          └─> t ──> weight └─> t ──> weight        late: W

Nothing is computed twice, and the bits are those of one backward. Weights that are not below a single product are done
in I. A schedule runs the same backward for every microbatch: the division of a graph is cached by its numbering.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from fshard.pipeline.execution.saved_tensors import SavedActivations

Gradients = list[Tensor | None]
Slot = tuple[Node, int]
"""An input of a node, where a gradient enters."""
Numbered = tuple[int, int]
"""A slot by the number of its node."""

PRODUCTS = frozenset(
    f"{name}Backward0" for name in ("Mm", "Addmm", "Bmm", "Baddbmm", "Addbmm", "Mv", "Addmv", "Convolution", "Linear")
)
"""Operations worth deferring, whose node computes the gradient of each operand separately."""

_engine: Any = torch.autograd.Variable._execution_engine.run_backward  # pyright: ignore[reportPrivateUsage]
"""The function that `torch.autograd.grad` calls after checks that take as long as a small product."""


def run_backward(
    outputs: Sequence[GradientEdge],
    gradients: Sequence[Tensor | None],
    inputs: Sequence[GradientEdge],
    weights: Sequence[GradientEdge],
    *,
    accumulate: bool = False,
    retain: bool = False,
) -> tuple[Gradients, Gradients | None]:
    """Return the gradients of inputs and of weights, by one backward: B.

    With `accumulate`, all of these are leaves, and those of weights are added to their `.grad`; None is returned for them.
    """
    ends = [(edge, g) for edge, g in zip(outputs, gradients, strict=True) if g is not None]
    if not ends or not (inputs or weights):
        nothing: Gradients = [None] * len(weights)
        return [None] * len(inputs), None if accumulate else nothing
    edges, gs = zip(*ends, strict=True)
    found = _engine(edges, gs, retain, False, (*inputs, *weights), allow_unreachable=True, accumulate_grad=accumulate)
    if accumulate:
        return [cast(Any, edge.node).variable.grad for edge in inputs], None
    return [*found[: len(inputs)]], [*found[len(inputs) :]]


def split_backward(
    outputs: Sequence[GradientEdge],
    gradients: Sequence[Tensor | None],
    inputs: Sequence[GradientEdge],
    weights: Sequence[GradientEdge],
    saved: SavedActivations | None = None,
    *,
    accumulate: bool = False,
) -> tuple[Gradients, Callable[[], Gradients | None]]:
    """Return the gradients of inputs (I), and a function that returns those of weights (W) once.

    All are edges as of `torch.autograd.graph.get_gradient_edge`; `saved` are the forward's saved tensors, if they were
    recorded. `accumulate` is as for `run_backward`.

    >>> from torch.autograd.graph import get_gradient_edge as edge
    >>> x, w = torch.tensor([[2.0]], requires_grad=True), torch.tensor([[3.0]], requires_grad=True)
    >>> gxs, weight_backward = split_backward([edge(x @ w)], [torch.ones(1, 1)], [edge(x)], [edge(w)])
    >>> gxs, weight_backward()
    ([tensor([[3.]])], [tensor([[2.]])])
    """
    if not inputs:
        return [], lambda: run_backward(outputs, gradients, (), weights, accumulate=accumulate)[1]
    saved = SavedActivations() if saved is None else saved
    ends = [edge for edge, g in zip(outputs, gradients, strict=True) if g is not None]
    early, below = divide(ends, inputs, weights, saved)
    deferred: list[tuple[Node, Sequence[Tensor | None]]] = []  # products, and their output gradients
    hooks = [hook for node in below for hook in _defer(node, deferred, saved)]
    targets = [GradientEdge(*slot) for slot in early]
    try:
        gxs, gws = run_backward(outputs, gradients, inputs, targets, accumulate=accumulate, retain=True)
    finally:
        for hook in hooks:
            hook.remove()
        saved.free_read(keep=True)

    def weight_backward() -> Gradients | None:
        found = dict(zip(early, gws or (), strict=not accumulate))
        saved.free_read()
        while deferred:
            node, gs = deferred.pop(0)
            found |= _weights_below(node, gs, below[node], accumulate)
            saved.free_read()
        return None if accumulate else [found.get((edge.node, edge.output_nr)) for edge in weights]

    return gxs, weight_backward


def _defer(
    node: Node, deferred: list[tuple[Node, Sequence[Tensor | None]]], saved: SavedActivations
) -> tuple[Any, Any]:
    """Keep the output gradient of a product, and its saved tensors, when I runs it."""

    def before(gs: Sequence[Tensor | None]) -> None:
        deferred.append((node, gs))
        saved.free_read(keep=True)

    def after(*_: object) -> None:
        saved.free_read()

    return node.register_prehook(before), node.register_hook(after)


def _weights_below(
    node: Node, gs: Sequence[Tensor | None], slots: list[Slot], accumulate: bool
) -> dict[Slot, Tensor | None]:
    """Run a backward from one product to the weights below it alone: then it computes nothing for its input."""
    hook = node.register_prehook(lambda _: gs)  # the hooks of the node have run in I
    edges, targets = [GradientEdge(node, number) for number in range(len(gs))], [GradientEdge(*slot) for slot in slots]
    _, gws = run_backward(edges, gs, (), targets, accumulate=accumulate, retain=True)
    hook.remove()
    return {} if gws is None else dict(zip(slots, gws, strict=True))


# -- the division of a graph ------------------------------------------------------------------------------------


class _Graph(NamedTuple):
    """An autograd graph as numbers, children before parents: the cache key."""

    slots: tuple[tuple[Numbered, ...], ...]  # the inputs of children, by node
    deferrable: tuple[bool, ...]
    ends: tuple[Numbered, ...]  # where gradients enter
    inputs: tuple[int, ...]
    weights: tuple[Numbered, ...]


def divide(
    ends: Sequence[GradientEdge],
    inputs: Sequence[GradientEdge],
    weights: Sequence[GradientEdge],
    saved: SavedActivations,
) -> tuple[list[Slot], dict[Node, list[Slot]]]:
    """Return the weights whose gradients I computes, and those of W, by the product below which they are."""
    slots_of = _walk([edge.node for edge in (*ends, *inputs, *weights)])
    number = {node: place for place, node in enumerate(slots_of)}
    nodes = [*slots_of]
    graph = _Graph(
        tuple([tuple([(number[child], slot) for child, slot in slots]) for slots in slots_of.values()]),
        tuple([_is_deferrable(node, saved) for node in nodes]),
        tuple([(number[edge.node], edge.output_nr) for edge in ends]),
        tuple([number[edge.node] for edge in inputs]),
        tuple([(number[edge.node], edge.output_nr) for edge in weights]),
    )
    early, below = _divide_numbered(graph)
    return (
        [(nodes[at], slot) for at, slot in early],
        {nodes[at]: [(nodes[one], slot) for one, slot in slots] for at, slots in below.items()},
    )


@lru_cache(maxsize=256)
def _divide_numbered(graph: _Graph) -> tuple[list[Numbered], dict[int, list[Numbered]]]:
    """Divide a graph: *early* nodes lead to an input, and are run in I, or to a weight that cannot be deferred.

    A weight can be deferred if all nodes between it and a product get their gradient from one node alone. Others are
    early: sums are accumulated in the order of one backward.
    """
    inputs, ends, leaves = {*graph.inputs}, {node for node, _ in graph.ends}, {node for node, _ in graph.weights}
    parents: dict[int, list[int]] = defaultdict(list)
    for node in _leading_to(graph, inputs | leaves):
        for child, _ in graph.slots[node]:
            parents[child].append(node)

    def product_above(node: int, early: set[int]) -> int | None:
        while node not in ends and len(parents[node]) == 1:
            (node,) = parents[node]
            if node in early:
                return node if graph.deferrable[node] else None
        return None

    early_leaves = leaves & inputs
    while True:
        early = _leading_to(graph, inputs | early_leaves)
        products = {leaf: product_above(leaf, early) for leaf in leaves - early_leaves}
        if None not in products.values():
            break
        early_leaves |= {leaf for leaf, product in products.items() if product is None}
    below: dict[int, list[Numbered]] = defaultdict(list)
    for edge in graph.weights:
        if (product := products.get(edge[0])) is not None:
            below[product].append(edge)
    return [edge for edge in graph.weights if edge[0] in early_leaves], below


def _walk(ends: Iterable[Node]) -> dict[Node, list[Slot]]:
    """Return the inputs of the children of each node, children before parents."""
    found: dict[Node, list[Slot]] = {}
    done: dict[Node, list[Slot]] = {}
    stack: list[Any] = [*ends]
    while stack:
        node = stack[-1]
        if node in found:
            done[stack.pop()] = found[node]
        else:
            found[node] = [slot for slot in node.next_functions if slot[0] is not None]
            stack += [child for child, _ in found[node] if child not in found]
    return done


def _leading_to(graph: _Graph, targets: set[int]) -> set[int]:
    found: set[int] = set()
    for node, slots in enumerate(graph.slots):
        if any(child in found or child in targets for child, _ in slots):
            found.add(node)
    return found


def _is_deferrable(node: Node, saved: SavedActivations) -> bool:
    """Return True for a product that has saved its own operands: a checkpoint would recompute them."""
    if type(node).__name__ not in PRODUCTS:
        return False
    hooks = [getattr(getattr(node, name), "unpack_hook", None) for name in _raw_saved(type(node))]
    return all(hook is None or hook == saved.unpack for hook in hooks)


@cache
def _raw_saved(kind: type) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]
