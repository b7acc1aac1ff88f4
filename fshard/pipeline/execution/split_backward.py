"""A backward in two halves: I, the gradients of a stage's inputs, and later W, of its weights.

In I a matrix product computes the gradient of its input, and the gradient of its output is kept; in
W a backward begins at the product, for the weights below it.

    y ──> mm ──> relu ──> mm ──> x                 I: from y to x
          └─> t ──> weight └─> t ──> weight        W: from each mm to its weight

Nothing is computed twice, and the bits are those of one backward. Weights that are not below a
single product are done in I.
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
ProductGradients = list[tuple[Node, Sequence[Tensor | None]]]
"""Products that I has run, and the gradients of their outputs."""

PRODUCTS = frozenset(
    f"{name}Backward0"
    for name in ("Mm", "Addmm", "Bmm", "Baddbmm", "Addbmm", "Mv", "Addmv", "Convolution", "Linear")
)
"""Operations worth deferring, whose node computes the gradient of each operand separately."""

_engine: Any = torch.autograd.Variable._execution_engine.run_backward  # pyright: ignore[reportPrivateUsage]
"""The function that `torch.autograd.grad` calls after checks, as slow as a small product."""


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

    With `accumulate`, all of these are leaves, and the gradients of weights are added to their
    `.grad`; None is returned for them.
    """
    edges: list[GradientEdge] = []
    gs: list[Tensor] = []
    for edge, g in zip(outputs, gradients, strict=True):
        if g is not None:
            edges.append(edge)
            gs.append(g)

    if not edges or not (inputs or weights):
        no_gradients: Gradients = [None] * len(weights)
        return [None] * len(inputs), None if accumulate else no_gradients

    results = _engine(
        tuple(edges),
        tuple(gs),
        retain,
        False,
        (*inputs, *weights),
        allow_unreachable=True,
        accumulate_grad=accumulate,
    )
    if accumulate:
        return [cast(Any, edge.node).variable.grad for edge in inputs], None
    count = len(inputs)
    return [*results[:count]], [*results[count:]]


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

    All are edges as of `torch.autograd.graph.get_gradient_edge`; `saved` are the forward's saved
    tensors, if they were recorded. `accumulate` is as for `run_backward`.

    >>> from torch.autograd.graph import get_gradient_edge as edge
    >>> x = torch.tensor([[2.0]], requires_grad=True)
    >>> w = torch.tensor([[3.0]], requires_grad=True)
    >>> g = torch.ones(1, 1)
    >>> gxs, weight_backward = split_backward([edge(x @ w)], [g], [edge(x)], [edge(w)])
    >>> gxs, weight_backward()
    ([tensor([[3.]])], [tensor([[2.]])])
    """
    if not inputs:
        return [], lambda: run_backward(outputs, gradients, (), weights, accumulate=accumulate)[1]

    if saved is None:
        saved = SavedActivations()
    ends = [edge for edge, g in zip(outputs, gradients, strict=True) if g is not None]
    slots_of_i, slots_of_w = divide(ends, inputs, weights, saved)

    # I: run the graph down to the inputs. Each product passes, and leaves its output gradient.
    products: ProductGradients = []
    hooks: list[Any] = []
    for node in slots_of_w:
        hooks += _hook_product(node, products, saved)
    targets = [GradientEdge(*slot) for slot in slots_of_i]
    try:
        gxs, gws_of_i = run_backward(
            outputs, gradients, inputs, targets, accumulate=accumulate, retain=True
        )
    finally:
        for hook in hooks:
            hook.remove()
        saved.free_read()

    def weight_backward() -> Gradients | None:
        gradient_of: dict[Slot, Tensor | None] = {}
        if gws_of_i is not None:
            gradient_of.update(zip(slots_of_i, gws_of_i, strict=True))
        while products:
            node, gs = products.pop(0)  # so that an output gradient is freed after its product
            gradient_of |= _run_weight_backward(node, gs, slots_of_w[node], accumulate)
            saved.free_read()
        if accumulate:
            return None
        return [gradient_of.get((edge.node, edge.output_nr)) for edge in weights]

    return gxs, weight_backward


def _hook_product(
    node: Node, products: ProductGradients, saved: SavedActivations
) -> tuple[Any, Any]:
    """Keep the output gradients of a product, and its saved tensors, when I runs it."""

    def before(gs: Sequence[Tensor | None]) -> None:
        products.append((node, gs))
        saved.free_read(keep=True)  # what the nodes above it have read; W reads what it reads

    def after(*_: object) -> None:
        saved.free_read()

    return node.register_prehook(before), node.register_hook(after)


def _run_weight_backward(
    node: Node, gs: Sequence[Tensor | None], slots: list[Slot], accumulate: bool
) -> dict[Slot, Tensor | None]:
    """Run a backward from one product to the weights below it alone.

    Then the product computes nothing for its input.
    """
    # The hooks of the node have run in I, and `gs` is what they returned. They run again here; the
    # last one puts `gs` in the place of their results.
    hook = node.register_prehook(lambda _: gs)
    edges = [GradientEdge(node, number) for number in range(len(gs))]
    targets = [GradientEdge(*slot) for slot in slots]
    _, gws = run_backward(edges, gs, (), targets, accumulate=accumulate, retain=True)
    hook.remove()
    return {} if gws is None else dict(zip(slots, gws, strict=True))


# -- the division of a graph -----------------------------------------------------------------------


def divide(
    ends: Sequence[GradientEdge],
    inputs: Sequence[GradientEdge],
    weights: Sequence[GradientEdge],
    saved: SavedActivations,
) -> tuple[list[Slot], dict[Node, list[Slot]]]:
    """Return the weights whose gradients I computes, and those of W, by the product above them.

    I runs the nodes that lead to an input, or to a weight that cannot be deferred. A weight can be
    deferred if each node between it and a product of I receives its gradient from one node alone.
    Others are done in I: their gradients are sums, which are accumulated as in one backward.
    """
    children = _children_first([edge.node for edge in (*ends, *inputs, *weights)])
    end_nodes = {edge.node for edge in ends}
    input_nodes = {edge.node for edge in inputs}
    weight_nodes = {edge.node for edge in weights}
    parents: dict[Node, list[Node]] = defaultdict(list)
    for node in _leading_to(children, input_nodes | weight_nodes):
        for child in children[node]:
            parents[child].append(node)

    def product_above(node: Node, nodes_of_i: set[Node]) -> Node | None:
        """Return the first node of I above a weight, if the weight can be deferred to it."""
        while node not in end_nodes and len(parents[node]) == 1:
            (node,) = parents[node]
            if node in nodes_of_i:
                return node if _is_deferrable(node, saved) else None
        return None

    # Each weight that I computes adds nodes to I, and a node of I above another weight that is no
    # product adds that weight. So this repeats until no weight is added.
    weights_of_i = weight_nodes & input_nodes
    while True:
        nodes_of_i = _leading_to(children, input_nodes | weights_of_i)
        weights_of_w = weight_nodes - weights_of_i
        product_of = {node: product_above(node, nodes_of_i) for node in weights_of_w}
        weights_without_product = {node for node in weights_of_w if product_of[node] is None}
        if not weights_without_product:
            break
        weights_of_i |= weights_without_product

    slots_of_i: list[Slot] = []
    slots_of_w: dict[Node, list[Slot]] = defaultdict(list)
    for edge in weights:
        slot = (edge.node, edge.output_nr)
        product = product_of.get(edge.node)
        if product is None:
            slots_of_i.append(slot)
        else:
            slots_of_w[product].append(slot)
    return slots_of_i, slots_of_w


def _children_first(ends: Iterable[Node]) -> dict[Node, list[Node]]:
    """Return the children of each node, children before parents."""
    children: dict[Node, list[Node]] = {}
    done: dict[Node, list[Node]] = {}
    stack = [*ends]
    while stack:
        node = stack[-1]
        if node in children:  # its children, which were pushed above it, are done
            done[stack.pop()] = children[node]
        else:
            children[node] = [child for child, _ in node.next_functions if child is not None]
            stack += [child for child in children[node] if child not in children]
    return done


def _leading_to(children: dict[Node, list[Node]], targets: set[Node]) -> set[Node]:
    """Return targets, and the nodes above them; `children` has children before parents."""
    nodes = {*targets}
    for node, children_of_node in children.items():
        if not nodes.isdisjoint(children_of_node):
            nodes.add(node)
    return nodes


def _is_deferrable(node: Node, saved: SavedActivations) -> bool:
    """Return True for a product that has saved its operands itself.

    Within a checkpoint the operands would be recomputed, in I and again in W.
    """
    if type(node).__name__ not in PRODUCTS:
        return False
    for name in _raw_saved_names(type(node)):
        hook = getattr(getattr(node, name), "unpack_hook", None)
        if hook is not None and hook != saved.unpack:
            return False
    return True


@cache
def _raw_saved_names(kind: type) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]
