"""Tensors in trees, where they enter a stage and where they leave it; stages that depend on the microbatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fshard.mesh.layout import PyTree, Structure, unflatten
from fshard.mesh.layout.sharded import flatten_shards

_unsafe_view: Any = torch.ops.aten._unsafe_view.default


class StageValue(NamedTuple):
    """A value that one stage sends to another: the leaves of a tree, which of them need a gradient, and its structure."""

    leaves: Sequence[Any]
    differentiable: tuple[bool, ...]
    structure: Structure

    def copied(self) -> StageValue:
        """Return the same in other memory."""
        return self._replace(
            leaves=[x.clone() if isinstance(x, Tensor) else x for x in self.leaves]
        )

    def as_input(self) -> tuple[PyTree, list[GradientEdge]]:
        """Return the tree for a stage, which may modify it in place, and the edges of its gradients."""
        leaves = [
            x.data if isinstance(x, Tensor) else x for x in self.leaves
        ]  # changes are not counted together
        edges: list[GradientEdge] = []
        if torch.is_grad_enabled():
            for index in [index for index, needed in enumerate(self.differentiable) if needed]:
                leaf = leaves[index].requires_grad_()
                leaves[index] = x = _unsafe_view(
                    leaf, leaf.shape
                )  # neither leaf nor view: it may be modified in place
                edges.append(GradientEdge(x.grad_fn.next_functions[0][0], 0))
        return unflatten(self.structure, leaves), edges


def as_output(tree: PyTree) -> tuple[StageValue, list[GradientEdge]]:
    """Return the output of a stage, to be sent, and the edges where its gradients enter."""
    leaves, structure = flatten_shards(tree, none_is_leaf=True)
    differentiable = tuple([isinstance(x, Tensor) and x.requires_grad for x in leaves])
    edges = [
        get_gradient_edge(x) for x, needed in zip(leaves, differentiable, strict=True) if needed
    ]
    return StageValue(
        [x.detach() if isinstance(x, Tensor) else x for x in leaves], differentiable, structure
    ), edges


def first_value(microbatch: PyTree) -> StageValue:
    """Return the input of the first stage, in memory of its own: it needs no gradient."""
    return as_output(microbatch)[0].copied()._replace(differentiable=())


class Params:
    """The parameters of a stage in one step: `tree`, and its `trained` leaves, whose gradients are read at `edges`.

    Frozen ones, `nn.Parameter(x, requires_grad=False)`, have none.
    """

    def __init__(self, tree: PyTree, trained: bool) -> None:
        leaves, self._structure = flatten_shards(tree, none_is_leaf=True)
        detached = [x.detach() if isinstance(x, Tensor) else x for x in leaves]
        self._indices = list[int]()
        for i, x in enumerate(leaves if trained else ()):
            is_frozen = isinstance(x, nn.Parameter) and not x.requires_grad
            if (
                isinstance(x, Tensor)
                and (x.is_floating_point() or x.is_complex())
                and not is_frozen
            ):
                self._indices.append(i)
        self.trained: list[Tensor] = [detached[index].requires_grad_() for index in self._indices]
        self.edges = [get_gradient_edge(x) for x in self.trained]
        self.tree = unflatten(self._structure, detached)

    def tree_of(self, gs: Sequence[Tensor | None]) -> PyTree:
        """Return gradients as the tree of the parameters; None where there is none."""
        leaves: list[Any] = [None] * self._structure.num_leaves
        for index, g in zip(self._indices, gs, strict=False):
            leaves[index] = g
        return unflatten(self._structure, leaves)


def map_tensors(f: Callable[[Tensor], Any], tree: PyTree) -> PyTree:
    """Apply a function to every tensor of a tree."""
    leaves, structure = flatten_shards(tree, none_is_leaf=True)
    return unflatten(structure, [f(x) if isinstance(x, Tensor) else x for x in leaves])


Stage = Callable[..., PyTree]
"""(params, x) -> y, with skips as keywords: see `pipelined`."""


@dataclass(frozen=True)
class ByMicrobatch:
    """A stage that depends on the number of the microbatch, counted from 0.

    >>> doubled = ByMicrobatch(lambda number: lambda params, x: x * 2 if number else x)
    >>> [stage_for(doubled, number)((), 1) for number in range(3)]
    [1, 2, 2]
    """

    stage_of: Callable[[int], Stage]

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Call the stage for microbatch 0."""
        return self.stage_of(0)(*args, **kwargs)


def stage_for(stage: Stage, microbatch: int) -> Stage:
    """Return the function of a stage for a microbatch."""
    return stage.stage_of(microbatch) if isinstance(stage, ByMicrobatch) else stage
