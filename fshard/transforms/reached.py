"""Which calls of a model a loss was made of: what each has returned is marked in autograd's graph, and looked for there."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves  # it knows the outputs of other libraries' modules

_MARK = "fshard: a call"


def marked(output: Any, owner: object, number: int) -> list[Any]:
    """Mark what the call of some number has returned; return what has to be kept as long as the marks are to last."""
    kept: list[Any] = []
    for x in tree_leaves(output):
        if isinstance(x, Tensor) and x.requires_grad:
            node: Any = get_gradient_edge(x).node
            node.metadata[_MARK] = owner, number
            kept += [node] if x.is_leaf else []  # of others the graph itself keeps it
    return kept


def reached(loss: Tensor, owner: object) -> list[int]:
    """Return the numbers of the calls that a loss was made of; what these were made of is not looked at.

    >>> import torch
    >>> x, owner = torch.ones(1, requires_grad=True), object()
    >>> y, z = x * 2, x * 3
    >>> marked((y, z), owner, 0), marked(z, owner, 1)
    ([], [])
    >>> reached(y.sum(), owner), reached((y + z).sum(), owner), reached(x.sum(), owner)
    ([0], [0, 1], [])
    """
    found, seen, left = set[int](), set[Any](), [get_gradient_edge(loss).node]
    while left:
        node: Any = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        whose, number = node.metadata.get(_MARK, (None, 0))
        if whose is owner:
            found.add(number)
        else:
            left += [before for before, _ in node.next_functions]
    return sorted(found)
