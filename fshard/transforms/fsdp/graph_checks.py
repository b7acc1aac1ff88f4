"""Checks of autograd's graph: gradients that would be lost raise an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves  # it has the output classes of other libraries' modules
from torch.utils.checkpoint import CheckpointFunction

from fshard.errors import ModuleError
from fshard.mesh.collectives.autograd import Bound
from fshard.mesh.spmd.scope import Group
from fshard.optim.leaves import shards_of
from fshard.transforms.fsdp.autograd import PARAM_NODES

_REENTRANT: Any = cast("Any", CheckpointFunction)._backward_cls


def raise_foreign_backward() -> None:
    """Raise: a backward that fshard did not start has come to sharded parameters."""
    raise ModuleError(
        "loss.backward() reached sharded parameters, whose gradients it does not reduce. Call "
        "booster.backward(loss, optimizer). Gradients of inputs alone are torch.autograd.grad(loss, inputs)."
    )


def validate_no_reentrant_checkpoint(output: Any) -> None:
    """Raise if a forward ran a reentrant checkpoint, whose gradients would be lost."""
    if any(isinstance(node, _REENTRANT) for node in nodes_behind(output)):
        raise ModuleError(
            "a forward runs a reentrant checkpoint, and the gradients of what it computes would be lost. Write "
            "checkpoint(..., use_reentrant=False)."
        )


def nodes_behind(tree: Any, is_end: Callable[[Any], bool] = lambda node: False) -> Iterator[Any]:
    """Yield the nodes of a tree's graph, including the given ends, not those behind these."""
    pending: list[Any] = []
    for x in _tensors_of(tree):
        if x.requires_grad:
            pending.append(x.grad_fn or get_gradient_edge(x).node)

    visited: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        yield node
        if not is_end(node):
            pending += [input_node for input_node, _ in node.next_functions]


def _tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree, of arrays their shards."""
    if type(tree) is Tensor:
        return [tree]
    tensors: list[Tensor] = []
    for leaf in tree_leaves(tree):
        tensors += [x for x in shards_of(leaf) if isinstance(x, Tensor)]
    return tensors


def other_leaves(loss: Tensor) -> list[Tensor]:
    """Return the leaves, beside parameters, whose gradients a loss leads to.

    They are inputs of the model, and what these depend on.
    """
    leaves: list[Tensor] = []
    for node in nodes_behind(loss, _is_param_node):
        leaf = getattr(node, "variable", None)  # of a node that accumulates a gradient
        if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter):
            leaves.append(leaf)
    return leaves


def loop_collectives(loss: Tensor) -> Iterator[tuple[str, Group]]:
    """Yield the collectives that a loop has called for its loss, and their groups."""
    for node in nodes_behind(loss, lambda node: isinstance(node, PARAM_NODES)):
        linear = getattr(node, "linear", None) or getattr(node, "bound", None)
        if not isinstance(linear, Bound) or linear.user_call is None:
            continue
        is_of_loop = linear.user_call.slice is None
        if is_of_loop:
            yield linear.user_call.name, linear.group


def validate_no_other_parameters(loss: Tensor) -> None:
    """Raise if a loss depends on parameters that no boosted model has.

    Their gradient would be lost.
    """
    shapes: list[str] = []
    for node in nodes_behind(loss):
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter):
            shapes.append(str(tuple(leaf.shape)))
    if shapes:
        raise ModuleError(
            f"backward: the loss depends on parameters that no boosted model has, of shapes {', '.join(shapes)}, "
            "and their gradient would be lost. Make them part of the model, or use model.parameters() after the forward."
        )


def validate_joined(loss: Tensor, ends: list[Tensor]) -> None:
    """Raise if a loss leads to parameters otherwise than through the outputs of slices.

    That gradient would be lost.
    """
    end_nodes = {get_gradient_edge(x).node for x in ends}
    if any(_is_param_node(node) for node in nodes_behind(loss, lambda node: node in end_nodes)):
        raise ModuleError(
            "reproducible=True: the loss depends on parameters, or on what a layer left in an attribute, beside the model's "
            "outputs, and that gradient would be lost. Return it from the model."
        )


def _is_param_node(node: Any) -> bool:
    """Return True if a loss depends on parameters by this node."""
    return isinstance(node, PARAM_NODES)
