"""What a pair of plain functions is shown in the place of parameters, and what following it on placeholders tells.

placeholder    of the true shape, without memory: to find out which state goes with which parameter
shadow         of one element: where a device has nothing to do
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.errors import OptimizerError
from fshard.mesh.sharded import Sharded
from fshard.mesh.tree import PyTree, Structure, flatten, flatten_with_paths
from fshard.optim.contract import Update
from fshard.optim.follow import Following
from fshard.optim.leaves import Leaf, Leaves, trainable


class Plan(NamedTuple):
    """What following a pair has shown.

    Args:
        key: of the parameters that it was followed with.
        structure: of the state.
        belongs: for each leaf of the state the parameter that it goes with, None: with none.
        like: for each leaf of the state a placeholder of the whole.
        refused: why the pair cannot be divided among devices; nothing is known of its state then.
    """

    key: object
    structure: Structure | None = None
    belongs: Sequence[int | None] = ()
    like: Sequence[Any] = ()
    refused: str = ""

    def owner(self, place: int) -> int | None:
        """Return the parameter that a leaf of the state goes with."""
        return self.belongs[place] if self.belongs else None


def planned(init: Callable[[PyTree], PyTree], update: Update, key: object, at: Leaves, moved: set[int]) -> Plan:
    """Follow a pair on placeholders of some parameters, of which some move; return what that shows."""
    try:
        with Following() as following:
            params, grads = (
                at.rebuild(
                    [
                        following.placeholder(seen(x), x.dtype, i) if i in moved else following.marked(shadow(x), i)
                        for i, x in enumerate(at.leaves)
                    ]
                )
                for _ in range(2)
            )
            state = init(params)
            updates, after = update(grads, state, params)
    except Exception as error:  # of the user's function: it will be raised again, if it is not for want of values
        found = "" if isinstance(error, OptimizerError) else f"it could not be followed: {type(error).__name__}: "
        return Plan(key, refused=f"{found}{error}")
    paths, leaves, structure = flatten_with_paths(state, none_is_leaf=True)
    strange = sorted({type(x).__name__ for x in leaves if not isinstance(x, Tensor | bool | int | float | str | None)})
    if strange:
        return Plan(key, refused=f"its state holds {', '.join(strange)}, which are no tensors or trees of them")
    later, other = apart(after)
    if other != structure:
        return Plan(key, refused=f"its state changes from {structure} to {other}")
    sources = [following.marks(x) | following.marks(y) for x, y in zip(leaves, later, strict=True)]
    moves = [following.marks(x) | {i} for i, x in enumerate(at.beside(updates, "updates"))]
    mixed = [f"state{path}" for path, marks in zip(paths, sources, strict=True) if len(marks) > 1]
    mixed += [f"the update of params{at.paths[i]}" for i in sorted(moved) if len(moves[i]) > 1]
    if mixed:
        return Plan(key, refused=f"{', '.join(mixed)} {'is' if len(mixed) == 1 else 'are'} made of several gradients")
    return Plan(key, structure, [next(iter(marks), None) for marks in sources], leaves)


def moving(at: Leaves) -> set[int]:
    """Return which leaves may move: not what is frozen, nor what is tied to an earlier one."""
    return {
        i for i, (leaf, first) in enumerate(zip(at.leaves, at.firsts(), strict=True)) if i == first and trainable(leaf)
    }


def seen(leaf: Leaf) -> tuple[int, ...]:
    """Return the shape in which the functions see a leaf, were it whole."""
    return (prod(leaf.shape),) if _is_flat(leaf) else tuple(leaf.shape)


def _is_flat(leaf: Leaf) -> bool:
    return isinstance(leaf, Sharded) and leaf.spec.is_flat


def apart(state: PyTree) -> tuple[list[Leaf], Structure]:
    """Return the leaves of a state, and its structure."""
    return flatten(state, sharded_is_leaf=True, none_is_leaf=True)


def shadow(leaf: Leaf) -> Tensor:
    """Return what stands for a leaf where there is nothing to do."""
    if leaf is None:
        return torch.ones(1)
    near, dtype = (leaf.shards[0] if isinstance(leaf, Sharded) else leaf), leaf.dtype
    dtype = dtype if dtype.is_floating_point or dtype.is_complex else torch.float32
    return torch.ones((1,) * len(seen(leaf)), dtype=dtype, device=near.device)
