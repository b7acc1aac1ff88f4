"""Divide a stage's autograd graph for I and W: which nodes run in I, which in W, and at which products W begins.

    early   nodes that lead to an input      late   nodes that lead only to weights      products   the nodes between

A schedule runs the same backward for every microbatch, and equal graphs are divided alike: the result is cached by a
numbering of the graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

from torch.autograd.graph import GradientEdge, Node

from fshard.pipeline.execution.saved import Saved

Slot = tuple[Node, int]
"""An input of a node, where a gradient enters."""
Numbered = tuple[int, int]
"""The same by the number of the node."""

PRODUCTS = frozenset(
    f"{name}Backward0" for name in ("Mm", "Addmm", "Bmm", "Baddbmm", "Addbmm", "Mv", "Addmv", "Convolution", "Linear")
)
"""Operations worth deferring, whose node computes the gradient of each operand separately."""


class _Form(NamedTuple):
    """A graph as numbers, children before parents: the cache key."""

    slots: tuple[tuple[Numbered, ...], ...]  # where each node leads to
    waits: tuple[bool, ...]  # True for a product that can be run later
    ends: tuple[Numbered, ...]  # where gradients come in
    inputs: tuple[int, ...]
    weights: tuple[Numbered, ...]


def divide(
    ends: Sequence[GradientEdge], inputs: Sequence[GradientEdge], weights: Sequence[GradientEdge], saved: Saved
) -> tuple[list[Slot], dict[Node, list[Slot]]]:
    """Return the weights whose gradients I computes, and those that wait for W, by the product that each waits for."""
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
    captured, below = _divided(form)
    return (
        [(nodes[at], slot) for at, slot in captured],
        {nodes[at]: [(nodes[one], slot) for one, slot in slots] for at, slots in below.items()},
    )


@lru_cache(maxsize=256)
def _divided(form: _Form) -> tuple[list[Numbered], dict[int, list[Numbered]]]:
    """Divide a graph.

    Gradients that come from one product alone can be deferred. Others, from several nodes or other operations, make
    all weights below early: sums are accumulated in the order of one backward.
    """
    graph = dict(enumerate(form.slots))
    sources, aims = {*form.inputs}, {node for node, _ in form.weights}
    useful = (_leading(graph, aims) | aims) - sources
    now: set[int] = set()
    while True:
        early = _leading(graph, sources | now)
        late = useful - early - now
        hasty = {node for node, _ in form.ends}
        givers = Counter[int]()
        for node in early | late:
            for child, _ in graph[node]:
                givers[child] += 1
                if node in early and not form.waits[node]:
                    hasty.add(child)
        hasty = {node for node in late if node in hasty or givers[node] != 1}
        if not hasty:
            return [edge for edge in form.weights if edge[0] not in late], _below(graph, early, late, form.weights)
        for node in reversed(graph):
            if node in hasty:
                hasty |= {child for child, _ in graph[node]}
        now |= hasty & aims


def _below(
    graph: Mapping[int, Sequence[Numbered]], early: set[int], late: set[int], weights: Sequence[Numbered]
) -> dict[int, list[Numbered]]:
    """Return the weights below each product, where each late node is below one."""
    above = {child: node for node in (*early, *late) for child, _ in graph[node] if child in late}
    found: dict[int, list[Numbered]] = {node: [] for node in above.values() if node in early}
    for edge in weights:
        node = edge[0]
        while node in late:
            node = above[node]
        if node != edge[0]:
            found[node].append(edge)
    return found


def slot_of(edge: GradientEdge) -> Slot:
    """Return the input of a node at which the gradient of an edge enters."""
    return edge.node, edge.output_nr


def _walk(ends: Iterable[Node]) -> dict[Node, list[Slot]]:
    """Return the successors of each node, children before parents."""
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
        if any(child in found or child in targets for child, _ in slots):
            found.add(node)
    return found


def _can_wait(node: Node, saved: Saved) -> bool:
    """Return True for a product that has saved its own operands: a checkpoint would recompute them."""
    if type(node).__name__ not in PRODUCTS:
        return False
    hooks = [getattr(getattr(node, name), "unpack_hook", None) for name in _raw(type(node))]
    return all(hook is None or hook == saved.unpack for hook in hooks)


@cache
def _raw(kind: type) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]
