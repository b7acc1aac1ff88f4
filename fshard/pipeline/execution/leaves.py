"""Tensors in trees, where they enter a stage and where they leave it; stages that treat some microbatches otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fshard.mesh.layout import PyTree, flatten, unflatten

_unsafe_view: Any = torch.ops.aten._unsafe_view.default


class StageValue(NamedTuple):
    """A value that one stage sends to another: a tree, and which of its leaves need a gradient."""

    tree: PyTree
    moving: tuple[bool, ...]

    def copied(self) -> StageValue:
        """Return the same in other memory."""
        return StageValue(map_tensors(torch.clone, self.tree), self.moving)

    def entered(self) -> tuple[PyTree, list[GradientEdge]]:
        """Return a copy of the tree for a stage, which may modify it in place, and the edges of its gradients."""
        leaves, structure = flatten(self.tree, none_is_leaf=True)
        leaves = [x.data if isinstance(x, Tensor) else x for x in leaves]  # changes are not counted together
        edges: list[GradientEdge] = []
        if torch.is_grad_enabled():
            for place, moves in enumerate(self.moving):
                if moves:
                    leaf = leaves[place].requires_grad_()
                    leaves[place] = own = _unsafe_view(
                        leaf, leaf.shape
                    )  # neither leaf nor view: it may be modified in place
                    edges.append(GradientEdge(own.grad_fn.next_functions[0][0], 0))
        return unflatten(structure, leaves), edges


def left(tree: PyTree) -> tuple[StageValue, list[GradientEdge]]:
    """Return the output of a stage, to be sent, and the edges where its gradients enter."""
    leaves, structure = flatten(tree, none_is_leaf=True)
    moving = tuple([isinstance(x, Tensor) and x.requires_grad for x in leaves])
    edges = [_edge(x) for x, moves in zip(leaves, moving, strict=True) if moves]
    return StageValue(unflatten(structure, [x.detach() if isinstance(x, Tensor) else x for x in leaves]), moving), edges


def _edge(x: Tensor) -> GradientEdge:
    """Return the edge at which the gradient of a tensor enters."""
    return get_gradient_edge(x) if x.grad_fn is None else GradientEdge(x.grad_fn, x.output_nr)


class _Of(Function):
    """An identity of all leaves: its node has an edge for the gradient of each."""

    @staticmethod
    def forward(ctx: Any, *xs: Tensor) -> Tensor:
        return xs[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, *gs: Any) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)


def edges_of(xs: Sequence[Tensor]) -> list[GradientEdge]:
    """Return where the gradients of tensors come in, that require them; quicker than one by one.

    >>> from torch.autograd.graph import get_gradient_edge
    >>> x = torch.ones(2, requires_grad=True)
    >>> edges_of([x, x * 2])[0] == get_gradient_edge(x)
    True
    """
    if not xs:
        return []
    with torch.enable_grad():
        made: Any = _Of.apply(*xs)
    return [GradientEdge(*slot) for slot in made.grad_fn.next_functions]


class Params:
    """The parameters of a stage in one step: `tree`, and its trained leaves `own`, whose gradients are read at
    `edges`.

    Frozen ones, `nn.Parameter(x, requires_grad=False)`, have none.
    """

    def __init__(self, tree: PyTree, trained: bool) -> None:
        leaves, self._structure = flatten(tree, none_is_leaf=True)
        own = [x.detach() if isinstance(x, Tensor) else x for x in leaves]
        self._places = [place for place, x in enumerate(leaves) if trained and isinstance(x, Tensor) and _is_trained(x)]
        self.own: list[Tensor] = [own[place].requires_grad_() for place in self._places]
        self.edges = edges_of(self.own)
        self.tree = unflatten(self._structure, own)

    def tree_of(self, gs: Sequence[Tensor | None]) -> PyTree:
        """Return gradients as the tree of the parameters; None where there is none."""
        leaves: list[Any] = [None] * self._structure.num_leaves
        for place, g in zip(self._places, gs, strict=False):
            leaves[place] = g
        return unflatten(self._structure, leaves)


def _is_trained(x: Tensor) -> bool:
    frozen = isinstance(x, nn.Parameter) and not x.requires_grad
    return (x.is_floating_point() or x.is_complex()) and not frozen


def map_tensors(f: Callable[[Tensor], Any], tree: PyTree) -> PyTree:
    """Apply a function to every tensor of a tree."""
    leaves, structure = flatten(tree, none_is_leaf=True)
    return unflatten(structure, [f(x) if isinstance(x, Tensor) else x for x in leaves])


Stage = Callable[..., PyTree]
"""(params, x) -> y, with skips as keywords: see `pipelined`."""


@dataclass(frozen=True)
class ByMicrobatch:
    """A stage that depends on the number of the microbatch, counted from 0.

    >>> doubled = ByMicrobatch(lambda number: lambda params, x: x * 2 if number else x)
    >>> [called_for(doubled, number)((), 1) for number in range(3)]
    [1, 2, 2]
    """

    at: Callable[[int], Stage]

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Call it for the first."""
        return self.at(0)(*args, **kwargs)


def called_for(stage: Stage, microbatch: int) -> Stage:
    """Return the function of a stage for a microbatch."""
    return stage.at(microbatch) if isinstance(stage, ByMicrobatch) else stage
