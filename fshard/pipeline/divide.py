"""How what autograd has recorded of a stage is divided: what runs in I, what in W, and which products are called again.

    early   what leads to an input      late   what leads to weights alone      products   where the two meet: called again in W

A schedule calls for the same backward of every microbatch, and graphs of one form are divided alike: it is worked out once,
by numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

from torch.autograd.graph import GradientEdge, Node

from fshard.pipeline.saved import Saved

Slot = tuple[Node, int]
"""Where a gradient comes in: as one of those of a node."""
At = TypeVar("At")

PRODUCTS = frozenset(
    f"{name}Backward0" for name in ("Mm", "Addmm", "Bmm", "Baddbmm", "Addbmm", "Mv", "Addmv", "Convolution", "Linear")
)
"""Operations whose work is worth deferring, and that compute the gradient of each operand by itself."""


@dataclass(frozen=True)
class Divided(Generic[At]):
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


def divide(
    ends: Sequence[GradientEdge], inputs: Sequence[GradientEdge], weights: Sequence[GradientEdge], saved: Saved
) -> Divided[Node]:
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
    return Divided(
        {nodes[at] for at in found.late},
        [(nodes[at], slot) for at, slot in found.captured],
        [nodes[at] for at in found.products],
        [(nodes[at], slot) for at, slot in found.deferred],
        None
        if found.below is None
        else {nodes[at]: [(nodes[one], slot) for one, slot in slots] for at, slots in found.below.items()},
    )


@lru_cache(maxsize=256)
def _divided(form: _Form) -> Divided[int]:
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
    return Divided(late, list(captured), list(products), list(deferred), below)


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


def slot_of(edge: GradientEdge) -> Slot:
    """Return where the gradient of an edge comes in."""
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
