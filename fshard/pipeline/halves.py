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

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from fshard.pipeline.saved import Saved

Gradients = list[Tensor | None]
Slot = tuple[Node, int]
"""Where a gradient comes in: as one of those of a node."""
At = TypeVar("At")
Held = tuple[Node, Sequence[Tensor | None]]
"""A product, and the gradients that it was given."""

PRODUCTS = frozenset(
    f"{name}Backward0" for name in ("Mm", "Addmm", "Bmm", "Baddbmm", "Addbmm", "Mv", "Addmv", "Convolution", "Linear")
)
"""Operations whose work is worth deferring, and that compute the gradient of each operand by itself."""


_run: Any = torch.autograd.Variable._execution_engine.run_backward  # pyright: ignore[reportPrivateUsage]
"""What `torch.autograd.grad` calls, after it has looked at what it was given, which takes as long as a small product."""

# -- the two halves ---------------------------------------------------------------------------------------------


def whole(
    outputs: Sequence[GradientEdge],
    gradients: Sequence[Tensor | None],
    inputs: Sequence[GradientEdge],
    weights: Sequence[GradientEdge],
    into: Sequence[Tensor] | None = None,
) -> tuple[Gradients, Gradients]:
    """Return the gradients of inputs and of weights, by one backward: B.  All of these are leaves.

    With `into`, the weights themselves, their gradients are added to their `.grad`, each as soon as it is there.
    """
    if into is None:
        found = _backward(zip(outputs, gradients, strict=True), [*inputs, *weights])
        return found[: len(inputs)], found[len(inputs) :]
    given = [(edge, g) for edge, g in zip(outputs, gradients, strict=True) if g is not None]
    if not given or not (inputs or weights):
        return [None] * len(inputs), []
    edges, gs = zip(*given, strict=True)
    _run(edges, gs, False, False, (*inputs, *weights), allow_unreachable=True, accumulate_grad=True)
    return [cast(Any, edge.node).variable.grad for edge in inputs], []


def halves(
    outputs: Sequence[GradientEdge],
    gradients: Sequence[Tensor | None],
    inputs: Sequence[GradientEdge],
    weights: Sequence[GradientEdge],
    saved: Saved | None = None,
) -> tuple[Gradients, Callable[[], Gradients]]:
    """Return the gradients of inputs, and what returns those of weights when it is called, once: I and W.

    Args:
        outputs: of a stage, as `torch.autograd.graph.get_gradient_edge` gives them.
        gradients: of the outputs; None where there is none.
        inputs: whose gradients are wanted now.
        weights: whose gradients are wanted later.
        saved: what the forward has saved, if it was watched.

    >>> from torch.autograd.graph import get_gradient_edge as edge
    >>> x, w = torch.tensor([[2.0]], requires_grad=True), torch.tensor([[3.0]], requires_grad=True)
    >>> gxs, later = halves([edge(x @ w)], [torch.ones(1, 1)], [edge(x)], [edge(w)])
    >>> gxs, later()
    ([tensor([[3.]])], [tensor([[2.]])])
    """
    saved = Saved() if saved is None else saved
    ends = [(edge, g) for edge, g in zip(outputs, gradients, strict=True) if g is not None]
    parts = _divide([edge for edge, _ in ends], inputs, weights, saved)
    held: deque[Held] = deque()
    hooks = [hook for node in parts.products for hook in _holding(node, held, saved)]
    try:
        early = [(edge, g) for edge, g in ends if edge.node not in parts.late]
        found = _backward(early, [*inputs, *(GradientEdge(*slot) for slot in parts.captured)], retain=True)
    finally:
        for hook in hooks:
            hook.remove()
        saved.let_go(keeping=True)
    captured = dict(zip(parts.captured, found[len(inputs) :], strict=True))
    begun = [(edge, g) for edge, g in ends if edge.node in parts.late]

    def later() -> Gradients:
        if parts.below is not None:
            captured.update(_one_by_one(held, parts.below, saved))
            return [captured.get(_slot(weight)) for weight in weights]
        slots = {**captured, **_called_again(held, parts.deferred, saved)}
        roots = [*begun, *((GradientEdge(*slot), g) for slot, g in slots.items())]
        rest = iter(_backward(roots, [weight for weight in weights if _slot(weight) not in captured]))
        return [captured[slot] if (slot := _slot(weight)) in captured else next(rest) for weight in weights]

    return found[: len(inputs)], later


def _backward(
    ends: Iterable[tuple[GradientEdge, Tensor | None]], targets: Sequence[GradientEdge], *, retain: bool = False
) -> Gradients:
    """Return the gradients of some edges, from those that come in at the ends."""
    given = [(edge, g) for edge, g in ends if g is not None]
    if not given or not targets:
        return [None] * len(targets)
    edges, gs = zip(*given, strict=True)
    return list(_run(edges, gs, retain, False, (*targets,), allow_unreachable=True, accumulate_grad=False))


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


def _one_by_one(held: deque[Held], below: dict[Node, list[Slot]], saved: Saved) -> dict[Slot, Tensor | None]:
    """Begin a backward at each product, for the weights below it alone: then it computes nothing for its input."""
    found: dict[Slot, Tensor | None] = {}
    saved.let_go()
    while held:
        node, gs = held.popleft()
        ends = [(GradientEdge(node, number), g) for number, g in enumerate(gs)]
        slots = below[node]
        found |= zip(slots, _backward(ends, [GradientEdge(*slot) for slot in slots], retain=True), strict=True)
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


# -- early and late ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Divided(Generic[At]):
    """How a graph is divided, by nodes or by their numbers.

    Args:
        late: the nodes that run in W.
        captured: where I collects gradients, for W or for good.
        products: the nodes that are called again.
        deferred: what they are called for.
        below: the weights that wait for each product, if each waits for one alone.
    """

    late: set[At]
    captured: list[tuple[At, int]]
    products: list[At]
    deferred: list[tuple[At, int]]
    below: dict[At, list[tuple[At, int]]] | None


class _Form(NamedTuple):
    """A graph by numbers, children before parents: graphs of one form are divided alike.

    Args:
        slots: where each node leads to.
        waits: whether it is a product that can be called later.
        ends: where gradients come in.
        inputs: the nodes of inputs, and
        weights: where gradients of weights come out.
    """

    slots: tuple[tuple[tuple[int, int], ...], ...]
    waits: tuple[bool, ...]
    ends: tuple[tuple[int, int], ...]
    inputs: tuple[int, ...]
    weights: tuple[tuple[int, int], ...]


def _divide(
    ends: Sequence[GradientEdge], inputs: Sequence[GradientEdge], weights: Sequence[GradientEdge], saved: Saved
) -> _Divided[Node]:
    """Divide what leads from the ends to inputs and weights: see `_divided`, which does it for each form once."""
    graph = _walk([edge.node for edge in (*ends, *inputs, *weights)])
    number = {node: place for place, node in enumerate(graph)}
    nodes = [*graph]
    form = _Form(
        tuple([tuple([(number[child], slot) for child, slot in slots]) for slots in graph.values()]),
        tuple([_can_wait(node, saved) for node in nodes]),
        tuple([(number[edge.node], edge.output_nr) for edge in ends]),
        tuple([number[edge.node] for edge in inputs]),
        tuple([(number[edge.node], edge.output_nr) for edge in weights]),
    )
    found = _divided(form)
    return _Divided(
        {nodes[at] for at in found.late},
        [(nodes[at], slot) for at, slot in found.captured],
        [nodes[at] for at in found.products],
        [(nodes[at], slot) for at, slot in found.deferred],
        None
        if found.below is None
        else {nodes[at]: [(nodes[one], slot) for one, slot in slots] for at, slots in found.below.items()},
    )


@lru_cache(maxsize=256)
def _divided(form: _Form) -> _Divided[int]:
    """Divide a graph.

    A slot can wait if products alone give to it from the early part.  If late nodes give to it as well, there may be two
    givers at most: more are added up in another order.  What cannot wait makes all that leads to it early.
    """
    graph = dict(enumerate(form.slots))
    sources, aims = {*form.inputs}, {node for node, _ in form.weights}
    useful = (_leading(graph, aims) | aims) - sources
    now: set[int] = set()
    while True:
        early = _leading(graph, sources | now)
        late = useful - early
        givers, from_early, from_late = Counter(node for node, _ in form.ends), set[int](), set[int]()
        hasty: set[int] = set()
        for node, slots in graph.items():
            if node not in early and node not in late:
                continue
            for child, _ in slots:
                if child not in late:
                    continue
                givers[child] += 1
                (from_early if node in early else from_late).add(child)
                if node in early and not form.waits[node]:
                    hasty.add(child)
        hasty |= {node for node in from_early & from_late if givers[node] > 2}
        now |= hasty
        if from_late.isdisjoint(hasty):
            break
    late -= now
    between = [(node, slot) for node in graph if node in early for slot in graph[node]]
    captured = {edge: None for edge in form.weights if edge[0] not in late}
    captured |= {edge: None for edge in form.ends if edge[0] in now - early}
    captured |= {slot: None for _, slot in between if slot[0] in now - early}
    products = {node: None for node, slot in between if slot[0] in late}
    deferred = {slot: None for _, slot in between if slot[0] in late}
    below = None
    from_products = late.isdisjoint(node for node, _ in form.ends) and captured.keys() <= {*form.weights}
    if from_products and all(givers[node] == 1 for node in late):
        below = _below(graph, late, products, form.weights)
    return _Divided(late, list(captured), list(products), list(deferred), below)


def _below(
    graph: Mapping[int, Sequence[tuple[int, int]]],
    late: set[int],
    products: Iterable[int],
    weights: Sequence[tuple[int, int]],
) -> dict[int, list[tuple[int, int]]]:
    """Return the weights below each product, where each late node is below one."""
    found: dict[int, list[tuple[int, int]]] = {node: [] for node in products}
    above = {child: node for node in (*found, *late) for child, _ in graph[node] if child in late}
    for edge in weights:
        node = edge[0]
        while node in late:
            node = above[node]
        if node != edge[0]:
            found[node].append(edge)
    return found


def _slot(edge: GradientEdge) -> Slot:
    return edge.node, edge.output_nr


def _walk(ends: Iterable[Node]) -> dict[Node, list[Slot]]:
    """Return what each node leads to, children before parents."""
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


def _leading(graph: Mapping[int, Sequence[tuple[int, int]]], targets: set[int]) -> set[int]:
    """Return the nodes that lead to some."""
    found: set[int] = set()
    for node, slots in graph.items():
        for child, _ in slots:
            if child in found or child in targets:
                found.add(node)
                break
    return found


def _can_wait(node: Node, saved: Saved) -> bool:
    """Return whether a node is a product, and has saved what it needs itself: a checkpoint would compute it once more."""
    if type(node).__name__ not in PRODUCTS:
        return False
    hooks = [getattr(getattr(node, name), "unpack_hook", None) for name in _raw(type(node))]
    return all(hook is None or hook == saved.unpack for hook in hooks)


@cache
def _raw(kind: type) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]
