"""Values whose graph ends where they are: whoever goes back from a loss that was made of them is told, not given nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.autograd.function import Function

from fshard.errors import ModuleError
from fshard.mesh.tree import PyTree, flatten, unflatten
from fshard.transforms.kept import Slot


class _CutOff(Function):
    """The identity, whose backward is an error."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, message: str) -> Tensor:
        ctx.message = message
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise ModuleError(ctx.message)


_ENDS: Any = cast("Any", _CutOff)._backward_cls


def cut_off(left: Mapping[Slot, PyTree], because: str) -> dict[Slot, PyTree]:
    """Return attributes that a forward has left behind, to be looked at; a backward through one of them says why it cannot be.

    >>> loss = Slot("router", "loss")
    >>> x = cut_off({loss: torch.ones((), requires_grad=True)}, "nobody knows its graph")[loss]
    >>> x.item()
    1.0
    >>> x.backward()
    Traceback (most recent call last):
    fshard.errors.ModuleError: a loss is made of router.loss, which a forward has left there: nobody knows its graph. Return it.
    """
    with torch.enable_grad():
        return {slot: _cut_off(tree, slot, because) for slot, tree in left.items()}


def refuse_cut_off(nodes: Iterable[Any]) -> None:
    """Raise if one of the nodes of a loss is where a graph was cut off."""
    for node in nodes:
        if isinstance(node, _ENDS):
            raise ModuleError(node.message)


def _cut_off(tree: PyTree, slot: Slot, because: str) -> PyTree:
    name = f"{slot.path}.{slot.key}".removeprefix(".")
    message = f"a loss is made of {name}, which a forward has left there: {because}. Return it."
    leaves, structure = flatten(tree, none_is_leaf=True)
    moving = [isinstance(x, Tensor) and x.requires_grad for x in leaves]
    cut: list[Any] = [
        _CutOff.apply(x.detach().requires_grad_(), message) if moves else x
        for x, moves in zip(leaves, moving, strict=True)
    ]
    return unflatten(structure, cut)
