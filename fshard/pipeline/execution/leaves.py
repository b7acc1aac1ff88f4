"""Tensors in trees, where they enter a stage and where they leave it.

Also stages that depend on the microbatch.
"""

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
    """A value that one stage sends to another.

    Args:
        leaves: of its tree.
        differentiable: of each leaf, whether it needs a gradient; missing ones do not.
        structure: of its tree.
    """

    leaves: Sequence[Any]
    differentiable: tuple[bool, ...]
    structure: Structure

    def copied(self) -> StageValue:
        """Return the same value in other memory."""
        leaves = [x.clone() if isinstance(x, Tensor) else x for x in self.leaves]
        return self._replace(leaves=leaves)

    def as_input(self) -> tuple[PyTree, list[GradientEdge]]:
        """Return the tree for a stage, and the edges of its gradients.

        The stage may modify its tensors in place.
        """
        # Each tensor gets a version of its own: those of one message share a buffer, and autograd
        # raises if the version of a tensor that it has saved changes.
        leaves = [x.data if isinstance(x, Tensor) else x for x in self.leaves]

        edges: list[GradientEdge] = []
        if torch.is_grad_enabled():
            for index, needs_gradient in enumerate(self.differentiable):
                if needs_gradient:
                    leaf = leaves[index].requires_grad_()
                    # Neither a leaf nor a view in autograd's terms, which may not be modified.
                    x = _unsafe_view(leaf, leaf.shape)
                    accumulate_grad, _ = x.grad_fn.next_functions[0]
                    edges.append(GradientEdge(accumulate_grad, 0))
                    leaves[index] = x
        return unflatten(self.structure, leaves), edges


def as_output(tree: PyTree) -> tuple[StageValue, list[GradientEdge]]:
    """Return the output of a stage, to be sent, and the edges where its gradients enter."""
    leaves, structure = flatten_shards(tree, none_is_leaf=True)
    detached: list[Any] = []
    differentiable: list[bool] = []
    edges: list[GradientEdge] = []
    for leaf in leaves:
        is_tensor = isinstance(leaf, Tensor)
        needs_gradient = is_tensor and leaf.requires_grad
        if needs_gradient:
            edges.append(get_gradient_edge(leaf))
        differentiable.append(needs_gradient)
        detached.append(leaf.detach() if is_tensor else leaf)
    return StageValue(detached, tuple(differentiable), structure), edges


def first_value(microbatch: PyTree) -> StageValue:
    """Return the input of the first stage, which needs no gradient.

    It is a copy, since the stage may modify it in place.
    """
    value, _ = as_output(microbatch)
    return value.copied()._replace(differentiable=())


class Params:
    """The parameters of a stage in one step.

    `tree` has all of them; `trained` are those whose gradients are read at `edges`. Frozen ones,
    `nn.Parameter(x, requires_grad=False)`, have none.
    """

    def __init__(self, tree: PyTree, trained: bool) -> None:
        leaves, self._structure = flatten_shards(tree, none_is_leaf=True)
        detached = [x.detach() if isinstance(x, Tensor) else x for x in leaves]
        self._indices: list[int] = []
        if trained:
            self._indices = [index for index, x in enumerate(leaves) if _is_trained(x)]
        self.trained: list[Tensor] = [detached[index].requires_grad_() for index in self._indices]
        self.edges = [get_gradient_edge(x) for x in self.trained]
        self.tree = unflatten(self._structure, detached)

    def tree_of(self, gs: Sequence[Tensor | None]) -> PyTree:
        """Return gradients as the tree of the parameters; None where there is none.

        `gs` are those of the trained parameters; without a microbatch that has a gradient, none.
        """
        leaves: list[Any] = [None] * self._structure.num_leaves
        for index, g in zip(self._indices, gs, strict=False):
            leaves[index] = g
        return unflatten(self._structure, leaves)


def _is_trained(x: object) -> bool:
    if not isinstance(x, Tensor):
        return False
    is_frozen = isinstance(x, nn.Parameter) and not x.requires_grad
    return not is_frozen and (x.is_floating_point() or x.is_complex())


def map_tensors(f: Callable[[Tensor], Any], tree: PyTree) -> PyTree:
    """Apply a function to every tensor of a tree."""
    leaves, structure = flatten_shards(tree, none_is_leaf=True)
    return unflatten(structure, [f(x) if isinstance(x, Tensor) else x for x in leaves])


# -- stages that depend on the microbatch ----------------------------------------------------------

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
