"""A backward in two halves: I, the gradients of a stage's inputs, now, and W, the gradients of its weights, later.

In I a matrix product computes the gradient of its input, and its output gradient is kept; in W a backward begins at
the product, for the weights below it.

    y ──> mm ──> relu ──> mm ──> x        early: I
          └─> t ──> weight └─> t ──> weight        late: W

Nothing is computed twice, and the bits are those of one backward. Weights that are not below a single product are done
in I.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from fshard.pipeline.execution.saved_tensors import SavedActivations

Gradients = list[Tensor | None]
Slot = tuple[Node, int]
"""An input of a node, where a gradient enters."""

PRODUCTS = frozenset(
    f"{name}Backward0"
    for name in ("Mm", "Addmm", "Bmm", "Baddbmm", "Addbmm", "Mv", "Addmv", "Convolution", "Linear")
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
    results = _engine(
        edges,
        gs,
        retain,
        False,
        (*inputs, *weights),
        allow_unreachable=True,
        accumulate_grad=accumulate,
    )
    if accumulate:
        return [cast(Any, edge.node).variable.grad for edge in inputs], None
    return [*results[: len(inputs)]], [*results[len(inputs) :]]


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
    early, late = divide(ends, inputs, weights, saved)
    deferred: list[
        tuple[Node, Sequence[Tensor | None]]
    ] = []  # products, and their output gradients
    hooks = [hook for node in late for hook in _hook_product(node, deferred, saved)]
    targets = [GradientEdge(*slot) for slot in early]
    try:
        gxs, gws = run_backward(
            outputs, gradients, inputs, targets, accumulate=accumulate, retain=True
        )
    finally:
        for hook in hooks:
            hook.remove()
        saved.free_read(keep=True)

    def weight_backward() -> Gradients | None:
        weight_gs = dict(zip(early, gws or (), strict=not accumulate))
        saved.free_read()
        while deferred:
            node, gs = deferred.pop(0)
            weight_gs |= _run_weight_backward(node, gs, late[node], accumulate)
            saved.free_read()
        return (
            None if accumulate else [weight_gs.get((edge.node, edge.output_nr)) for edge in weights]
        )

    return gxs, weight_backward


def _hook_product(
    node: Node, deferred: list[tuple[Node, Sequence[Tensor | None]]], saved: SavedActivations
) -> tuple[Any, Any]:
    """Keep the output gradient of a product, and its saved tensors, when I runs it."""

    def before(gs: Sequence[Tensor | None]) -> None:
        deferred.append((node, gs))
        saved.free_read(keep=True)

    def after(*_: object) -> None:
        saved.free_read()

    return node.register_prehook(before), node.register_hook(after)


def _run_weight_backward(
    node: Node, gs: Sequence[Tensor | None], slots: list[Slot], accumulate: bool
) -> dict[Slot, Tensor | None]:
    """Run a backward from one product to the weights below it alone: then it computes nothing for its input."""
    hook = node.register_prehook(lambda _: gs)  # the hooks of the node have run in I
    edges, targets = (
        [GradientEdge(node, number) for number in range(len(gs))],
        [GradientEdge(*slot) for slot in slots],
    )
    _, gws = run_backward(edges, gs, (), targets, accumulate=accumulate, retain=True)
    hook.remove()
    return {} if gws is None else dict(zip(slots, gws, strict=True))


# -- the division of a graph ------------------------------------------------------------------------------------


def divide(
    ends: Sequence[GradientEdge],
    inputs: Sequence[GradientEdge],
    weights: Sequence[GradientEdge],
    saved: SavedActivations,
) -> tuple[list[Slot], dict[Node, list[Slot]]]:
    """Return the weights whose gradients I computes, and those of W, by the product below which they are.

    *Early* nodes lead to an input, and are run in I, or to a weight that cannot be deferred. A weight can be deferred if
    all nodes between it and a product get their gradient from one node alone. Others are early: sums are accumulated in
    the order of one backward.
    """
    children = _children_first([edge.node for edge in (*ends, *inputs, *weights)])
    tops, sources, leaves = ({edge.node for edge in edges} for edges in (ends, inputs, weights))
    parents: dict[Node, list[Node]] = defaultdict(list)
    for node in _leading_to(children, sources | leaves):
        for child in children[node]:
            parents[child].append(node)

    def product_above(node: Node, early: set[Node]) -> Node | None:
        while node not in tops and len(parents[node]) == 1:
            (node,) = parents[node]
            if node in early:
                return node if _is_deferrable(node, saved) else None
        return None

    early_leaves = leaves & sources
    while True:
        early = _leading_to(children, sources | early_leaves)
        products = {leaf: product_above(leaf, early) for leaf in leaves - early_leaves}
        if None not in products.values():
            break
        early_leaves |= {leaf for leaf, product in products.items() if product is None}
    late: dict[Node, list[Slot]] = defaultdict(list)
    for edge in weights:
        if (product := products.get(edge.node)) is not None:
            late[product].append((edge.node, edge.output_nr))
    return [(edge.node, edge.output_nr) for edge in weights if edge.node in early_leaves], late


def _children_first(ends: Iterable[Node]) -> dict[Node, list[Node]]:
    """Return the children of each node, children before parents."""
    children: dict[Node, list[Node]] = {}
    done: dict[Node, list[Node]] = {}
    stack = [*ends]
    while stack:
        node = stack[-1]
        if node in children:
            done[stack.pop()] = children[node]
        else:
            children[node] = [child for child, _ in node.next_functions if child is not None]
            stack += [child for child in children[node] if child not in children]
    return done


def _leading_to(children: dict[Node, list[Node]], targets: set[Node]) -> set[Node]:
    """Return targets, and the nodes above them."""
    nodes = {*targets}
    for node, own_children in children.items():
        if not nodes.isdisjoint(own_children):
            nodes.add(node)
    return nodes


def _is_deferrable(node: Node, saved: SavedActivations) -> bool:
    """Return True for a product that has saved its own operands: a checkpoint would recompute them."""
    if type(node).__name__ not in PRODUCTS:
        return False
    hooks = [getattr(getattr(node, name), "unpack_hook", None) for name in _raw_saved(type(node))]
    return all(hook is None or hook == saved.unpack for hook in hooks)


@cache
def _raw_saved(kind: type) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]
