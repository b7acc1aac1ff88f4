"""Objects in a batch whose samples are not known: a jagged tensor, a graph of torch_geometric.

Containers of Python and dataclasses are trees, in which each tensor has a row for each sample, or none.  In objects of other
classes tensors may mean anything, even where torch can take them apart:

    lengths of 3 features for 8 samples     [24]        a row for each?
    indices, side by side                   [31]

Where every device makes its own, they go to the module as they are.  Where samples are cut they are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fshard.mesh.sharded import Sharded
from fshard.mesh.tree import any_known, flatten, torch_alone_knows


def rows_of(leaf: Any) -> int | None:
    """Return the length of a tensor's first dim; None if it has no dims, or is no tensor.

    >>> import torch
    >>> rows_of(torch.zeros(3, 2)), rows_of(torch.tensor(1.0)), rows_of("a")
    (3, None, None)
    """
    return leaf.shape[0] if isinstance(leaf, Tensor | Sharded) and len(leaf.shape) else None


def all_plain(leaves: Sequence[Any]) -> bool:
    """Return whether no leaf can be such an object, nor be in one: so it is with nearly every batch."""
    return not any_known() and all(isinstance(x, Tensor | Sharded | int | float | str | None) for x in leaves)


def is_opaque(leaf: Any) -> bool:
    """Return whether a leaf is an object with tensors that cannot be cut; torch must know it, and they must be equally long.

    >>> import torch
    >>> is_opaque(torch.distributions.Normal(torch.zeros(2), torch.ones(2))), is_opaque(torch.zeros(3)), is_opaque("a")
    (True, False, False)
    """
    if isinstance(leaf, Tensor | Sharded):
        return False
    lengths = {len(x) for x in tensors_in(leaf) if x.ndim}
    return len(lengths) > torch_alone_knows(leaf)


def tensors_in(leaf: Any) -> list[Tensor]:
    """Return a tensor, or those in an object.

    >>> import torch
    >>> tensors_in(torch.ones(1)), tensors_in(3)
    ([tensor([1.])], [])
    """
    if isinstance(leaf, Tensor):
        return [leaf]
    inside = flatten(leaf)[0] if torch_alone_knows(leaf) else getattr(leaf, "__dict__", {}).values()
    return [x for x in inside if isinstance(x, Tensor)]
