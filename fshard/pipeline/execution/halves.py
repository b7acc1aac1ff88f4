"""A backward in two halves: I, the gradients of a stage's inputs, now, and W, the gradients of its weights, later.

In I a matrix product computes the gradient of its input, and its output gradient is held; in W a backward begins at
the product, for the weights below it.

    y ──> mm ──> relu ──> mm ──> x        early: I
          └─> t ──> weight └─> t ──> weight        late: W

Nothing is computed twice, and the bits are those of one backward. Weights that are not below a single product are done
in I.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from fshard.pipeline.execution.divide import Slot, divide, slot_of
from fshard.pipeline.execution.saved import Saved

Gradients = list[Tensor | None]
Held = tuple[Node, Sequence[Tensor | None]]
"""A product, and the gradients that it was given."""

_run: Any = torch.autograd.Variable._execution_engine.run_backward  # pyright: ignore[reportPrivateUsage]
"""The function that `torch.autograd.grad` calls after checks that take as long as a small product."""

# -- the two halves ---------------------------------------------------------------------------------------------


def run_backward(
    outputs: Sequence[GradientEdge],
    gradients: Sequence[Tensor | None],
    inputs: Sequence[GradientEdge],
    weights: Sequence[GradientEdge],
    *,
    adding: bool = False,
) -> tuple[Gradients, Gradients | None]:
    """Return the gradients of inputs and of weights, by one backward: B.

    With `adding`, all of these are leaves, and those of weights are added to their `.grad`, each as soon as it is there.
    """
    gxs, gws = _backward(zip(outputs, gradients, strict=True), inputs, weights, adding=adding)
    return gxs, None if adding else gws


def halves(
    outputs: Sequence[GradientEdge],
    gradients: Sequence[Tensor | None],
    inputs: Sequence[GradientEdge],
    weights: Sequence[GradientEdge],
    saved: Saved | None = None,
    *,
    adding: bool = False,
) -> tuple[Gradients, Callable[[], Gradients | None]]:
    """Return the gradients of inputs (I), and a function that returns those of weights (W) once.

    All are edges as of `torch.autograd.graph.get_gradient_edge`; `saved` are the forward's saved tensors, if they were
    recorded. With `adding`, as for `run_backward`, None is returned for the weights.

    >>> from torch.autograd.graph import get_gradient_edge as edge
    >>> x, w = torch.tensor([[2.0]], requires_grad=True), torch.tensor([[3.0]], requires_grad=True)
    >>> gxs, later = halves([edge(x @ w)], [torch.ones(1, 1)], [edge(x)], [edge(w)])
    >>> gxs, later()
    ([tensor([[3.]])], [tensor([[2.]])])
    """
    if not inputs:
        return [], lambda: run_backward(outputs, gradients, (), weights, adding=adding)[1]
    saved = Saved() if saved is None else saved
    ends = [(edge, g) for edge, g in zip(outputs, gradients, strict=True) if g is not None]
    captured, below = divide([edge for edge, _ in ends], inputs, weights, saved)
    held: list[Held] = []
    hooks = [hook for node in below for hook in _holding(node, held, saved)]
    try:
        targets = [GradientEdge(*slot) for slot in captured]
        gxs, gws = _backward(ends, inputs, targets, retain=True, adding=adding)
    finally:
        for hook in hooks:
            hook.remove()
        saved.let_go(keeping=True)

    def later() -> Gradients | None:
        found = dict(zip(captured, gws, strict=not adding)) | _one_by_one(held, below, saved, adding=adding)
        return None if adding else [found.get(slot_of(weight)) for weight in weights]

    return gxs, later


def _backward(
    ends: Iterable[tuple[GradientEdge, Tensor | None]],
    inputs: Sequence[GradientEdge],
    weights: Sequence[GradientEdge],
    *,
    retain: bool = False,
    adding: bool = False,
) -> tuple[Gradients, Gradients]:
    """Return the gradients of inputs and of weights, from those that come in at the ends.

    With `adding`, all of these are leaves; gradients are added to theirs, and those of weights are not returned.
    """
    given, targets = [(edge, g) for edge, g in ends if g is not None], (*inputs, *weights)
    if not given or not targets:
        return [None] * len(inputs), [None] * (0 if adding else len(weights))
    edges, gs = zip(*given, strict=True)
    found = _run(edges, gs, retain, False, targets, allow_unreachable=True, accumulate_grad=adding)
    if adding:
        return [cast(Any, edge.node).variable.grad for edge in inputs], []
    return [*found[: len(inputs)]], [*found[len(inputs) :]]


def _holding(node: Node, held: list[Held], saved: Saved) -> tuple[Any, Any]:
    """Hold the output gradient of a product, and its saved tensors."""

    def before(gs: Sequence[Tensor | None]) -> None:
        held.append((node, gs))
        saved.let_go(keeping=True)

    def after(*_: object) -> None:
        saved.let_go()

    return node.register_prehook(before), node.register_hook(after)


def _one_by_one(
    held: list[Held], below: dict[Node, list[Slot]], saved: Saved, *, adding: bool
) -> dict[Slot, Tensor | None]:
    """Begin a backward at each product, for the weights below it alone: then it computes nothing for its input."""
    found: dict[Slot, Tensor | None] = {}
    saved.let_go()
    held.reverse()
    while held:
        node, gs = held.pop()
        ends = [(GradientEdge(node, number), g) for number, g in enumerate(gs)]
        slots = below[node]
        targets = [GradientEdge(*slot) for slot in slots]
        again = node.register_prehook(lambda _, gs=gs: gs)  # its hooks have run already
        found |= zip(slots, _backward(ends, (), targets, retain=True, adding=adding)[1], strict=not adding)
        again.remove()
        saved.let_go()
    return found
