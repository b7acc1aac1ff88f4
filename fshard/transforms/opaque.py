"""Objects in a batch of which nobody knows which samples they hold: a jagged tensor, a graph of torch_geometric.

Containers of Python and dataclasses are looked into, and each tensor in them has a row for each sample, or none.  Of another
class it is not known what its tensors are, even where torch can take it apart:

    lengths of 3 features for 8 samples     [24]        a row for each?
    indices, side by side                   [31]

Where every device makes its own such object it goes to the module as it is.  Where samples are cut it is refused, unless
all its tensors have as many rows as there are samples beside them, or as it says itself that it has.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from fshard.errors import LayoutError
from fshard.mesh.sharded import Sharded
from fshard.mesh.tree import any_known, flatten, torch_alone_knows

REASON = "which samples its tensors hold is not known, so it is not cut"


def rows_of(leaf: Any) -> int | None:
    """Return how many samples a leaf says that it holds.

    >>> import torch
    >>> rows_of(torch.zeros(3, 2)), rows_of(torch.tensor(1.0)), rows_of("a")
    (3, None, None)
    """
    if isinstance(leaf, Tensor | Sharded):
        return leaf.shape[0] if len(leaf.shape) else None
    says = torch_alone_knows(leaf) and hasattr(leaf, "__len__") and {len(leaf)} == _lengths(leaf)
    return len(leaf) if says else None


def all_plain(leaves: Sequence[Any]) -> bool:
    """Return whether no leaf of a tree can be in such an object, nor be one: so it is with nearly every batch."""
    return not any_known() and all(isinstance(x, Tensor | Sharded | int | float | str | None) for x in leaves)


def is_opaque(leaf: Any, samples: Collection[int | None]) -> bool:
    """Return whether a leaf is an object whose tensors cannot be cut as those of so many samples.

    >>> import torch
    >>> is_opaque(torch.distributions.Normal(torch.zeros(2), torch.ones(2)), [2]), is_opaque(torch.zeros(3), [2])
    (True, False)
    """
    if isinstance(leaf, Tensor | Sharded):
        return False
    lengths = _lengths(leaf)
    if torch_alone_knows(leaf):
        return bool(lengths) and (len(lengths) > 1 or not lengths <= {*samples})
    return bool(lengths)


def _lengths(leaf: Any) -> set[int]:
    """Return how long the tensors in an object are."""
    return {len(x) for x in tensors_of(leaf) if x.ndim}


def tensors_of(leaf: Any) -> list[Tensor]:
    """Return the tensors that a leaf is made of.

    >>> import torch
    >>> tensors_of(torch.ones(1)), tensors_of(3)
    ([tensor([1.])], [])
    """
    if isinstance(leaf, Tensor):
        return [leaf]
    inside = flatten(leaf)[0] if torch_alone_knows(leaf) else getattr(leaf, "__dict__", {}).values()
    return [x for x in inside if isinstance(x, Tensor)]


def refuse_opaque(paths: Sequence[str], leaves: Sequence[Any], samples: int | None) -> None:
    """Raise naming the arguments of a model, in (args, kwargs), that are not to be cut into slices."""
    found = zip(paths, leaves, strict=True)
    wrong = [f"the argument {path[3:]} is of class {type(x).__name__}" for path, x in found if is_opaque(x, [samples])]
    if wrong:
        raise LayoutError(
            f"reproducible=True: {', '.join(wrong)}: {REASON} into slices as the others are. Give the model tensors, or a "
            "dataclass of them, and make such an object in its forward."
        )
