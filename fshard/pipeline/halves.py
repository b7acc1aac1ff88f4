"""A backward in two halves: I, the gradients of a stage's inputs, now, and W, the gradients of its weights, later.

What autograd has recorded is divided: what leads to an input is *early*, what leads to weights alone is *late*.  Where the
two meet stand mostly matrix products, and these can do half of their work.  In I a product gives the gradient of its input,
and its own is held; in W it is called again, for the gradient of its weight.

    y ──> mm ──> relu ──> mm ──> x        early: I goes this way
          │               │
          t               t               late: W begins here, with what each mm gives when it is called again
          └─> weight      └─> weight

Nothing is computed twice.  Each sum is added up in the order of one whole backward, so the bits are equal too; weights that
this forbids to wait are *captured* in I, and so is what other operations than products give, which is cheap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from fshard.pipeline.divide import Slot, divide, slot_of
from fshard.pipeline.saved import Saved

Gradients = list[Tensor | None]
Held = tuple[Node, Sequence[Tensor | None]]
"""A product, and the gradients that it was given."""

_run: Any = torch.autograd.Variable._execution_engine.run_backward  # pyright: ignore[reportPrivateUsage]
"""What `torch.autograd.grad` calls, after it has looked at what it was given, which takes as long as a small product."""

# -- the two halves ---------------------------------------------------------------------------------------------


def whole(
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
    """Return the gradients of inputs, and what returns those of weights when it is called, once: I and W.

    Args:
        outputs: of a stage, as `torch.autograd.graph.get_gradient_edge` gives them.
        gradients: of the outputs; None where there is none.
        inputs: whose gradients are wanted now.
        weights: whose gradients are wanted later.
        saved: what the forward has saved, if it was watched.
        adding: whether all of these are leaves, and gradients of weights may be added to their `.grad`, as soon as they are
            there; where that can be, None is returned for them.

    >>> from torch.autograd.graph import get_gradient_edge as edge
    >>> x, w = torch.tensor([[2.0]], requires_grad=True), torch.tensor([[3.0]], requires_grad=True)
    >>> gxs, later = halves([edge(x @ w)], [torch.ones(1, 1)], [edge(x)], [edge(w)])
    >>> gxs, later()
    ([tensor([[3.]])], [tensor([[2.]])])
    """
    saved = Saved() if saved is None else saved
    ends = [(edge, g) for edge, g in zip(outputs, gradients, strict=True) if g is not None]
    parts = divide([edge for edge, _ in ends], inputs, weights, saved)
    held: deque[Held] = deque()
    hooks = [hook for node in parts.products for hook in _holding(node, held, saved)]
    try:
        early = [(edge, g) for edge, g in ends if edge.node not in parts.late]
        adding = adding and parts.below is not None
        targets = [GradientEdge(*slot) for slot in parts.captured]
        gxs, found = _backward(early, inputs, targets, retain=True, adding=adding)
    finally:
        for hook in hooks:
            hook.remove()
        saved.let_go(keeping=True)
    captured = dict(zip(parts.captured, found, strict=not adding))
    begun = [(edge, g) for edge, g in ends if edge.node in parts.late]

    def later() -> Gradients | None:
        if parts.below is not None:
            captured.update(_one_by_one(held, parts.below, saved, adding=adding))
            return None if adding else [captured.get(slot_of(weight)) for weight in weights]
        slots = {**captured, **_called_again(held, parts.deferred, saved)}
        roots = [*begun, *((GradientEdge(*slot), g) for slot, g in slots.items())]
        rest = iter(_backward(roots, (), [weight for weight in weights if slot_of(weight) not in captured])[1])
        return [captured[slot] if (slot := slot_of(weight)) in captured else next(rest) for weight in weights]

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


def _holding(node: Node, held: deque[Held], saved: Saved) -> tuple[Any, Any]:
    """Hold the gradient that a product is given, and what it has saved."""

    def before(gs: Sequence[Tensor | None]) -> None:
        held.append((node, gs))
        saved.let_go(keeping=True)

    def after(*_: object) -> None:
        saved.let_go()

    return node.register_prehook(before), node.register_hook(after)


class _Calling(Function):
    """The identity, whose backward calls something: what is called there computes only what autograd was asked for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, something: Callable[[], None]) -> Tensor:
        ctx.something = something
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[None, None]:
        ctx.something()
        return None, None


def _one_by_one(
    held: deque[Held], below: dict[Node, list[Slot]], saved: Saved, *, adding: bool
) -> dict[Slot, Tensor | None]:
    """Begin a backward at each product, for the weights below it alone: then it computes nothing for its input."""
    found: dict[Slot, Tensor | None] = {}
    saved.let_go()
    while held:
        node, gs = held.popleft()
        ends = [(GradientEdge(node, number), g) for number, g in enumerate(gs)]
        slots = below[node]
        targets = [GradientEdge(*slot) for slot in slots]
        again = node.register_prehook(lambda _, gs=gs: gs)  # what it was given has been through the hooks there already
        found |= zip(slots, _backward(ends, (), targets, retain=True, adding=adding)[1], strict=not adding)
        again.remove()
        saved.let_go()
    return found


def _called_again(held: deque[Held], wanted: Sequence[Slot], saved: Saved) -> dict[Slot, Tensor]:
    """Call products for what they give at the slots that are wanted, and for nothing else; let them go."""
    sums: dict[Slot, Tensor] = {}

    def call() -> None:
        while held:
            node, gs = held.popleft()
            for slot, g in _given_by(node, gs):
                if g is not None:
                    g = _fitted(g, slot)
                    sums[slot] = sums[slot] + g if slot in sums else g
            saved.let_go()

    if held:
        saved.let_go()
        anchor = torch.zeros((), requires_grad=True)
        targets = [get_gradient_edge(anchor), *(GradientEdge(*slot) for slot in wanted)]
        with torch.enable_grad():
            end = _Calling.apply(anchor, call)
        torch.autograd.grad([get_gradient_edge(end)], targets, [anchor.detach()], allow_unused=True)
        saved.let_go(keeping=True)
    return sums


def _given_by(node: Any, gs: Sequence[Tensor | None]) -> Iterable[tuple[Slot, Tensor | None]]:
    return zip(node.next_functions, node(*gs), strict=True)


def _fitted(g: Tensor, slot: Slot) -> Tensor:
    """Return a gradient in the shape and dtype that it has to have, as autograd does between nodes."""
    node: Any = slot[0]
    meta = node._input_metadata[slot[1]]
    return g.sum_to_size(meta.shape).to(meta.dtype)
