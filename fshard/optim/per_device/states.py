"""A state taken apart: into subtrees with the structure of the parameters, and single leaves.

params   {"w", "v"}
state    {"m": {"w": a, "v": b}, "count": c}      entries   [a, b]   c
                                                  is_like   True     False
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optree
from torch import Tensor

from fshard.mesh.layout import NAMESPACE, PyTree, Structure, flatten, paths_of, unflatten
from fshard.mesh.layout.sharded import Sharded

_optree: Any = optree
_ARRAYS = (Sharded, Tensor)


class StateEntries(NamedTuple):
    """The entries of a state.

    Args:
        structure: of the state, with an entry in place of each leaf.
        entries: the leaves of a subtree that has the structure of the parameters; or one leaf.
        is_like: for each entry, True if it is such a subtree.
    """

    structure: Structure
    entries: list[Any]
    is_like: list[bool]

    @staticmethod
    def of(state: PyTree, params: Structure) -> StateEntries:
        """Take a state apart."""
        is_single = params.num_nodes == 1 == params.num_leaves

        def is_like(x: Any) -> bool:
            if is_single:
                # One parameter: any leaf has its structure, but a number is not like it.
                return x is None or (isinstance(x, _ARRAYS) and x.ndim > 0)
            return not isinstance(x, Tensor) and flatten(x, none_is_leaf=True)[1] == params

        subtrees, structure = _optree.tree_flatten(
            state, is_leaf=is_like, none_is_leaf=True, namespace=NAMESPACE
        )
        entries: list[Any] = []
        flags: list[bool] = []
        for subtree in subtrees:
            flags.append(is_like(subtree))
            entries.append(flatten(subtree, none_is_leaf=True)[0] if flags[-1] else subtree)
        return StateEntries(structure, entries, flags)

    @property
    def paths(self) -> tuple[str, ...]:
        """The path of each entry."""
        return paths_of(self.structure)

    def single(self) -> list[Any]:
        """Return the entries that are one leaf."""
        return [x for x, is_like in zip(self.entries, self.is_like, strict=True) if not is_like]

    def entries_of(self, state: PyTree) -> list[Any]:
        """Return the entries of another state of this structure, subtrees as they are."""
        return self.structure.flatten_up_to(state)

    def mapped(self, f: Callable[..., PyTree], *columns: Sequence[Any]) -> PyTree:
        """Return the state with f of the leaves of each subtree.

        Args:
            f: from the leaves of a subtree, and the entries beside it in `columns`.
            columns: the entries of other states.
        """
        results: list[Any] = []
        for is_like, entry, *others in zip(self.is_like, self.entries, *columns, strict=True):
            results.append(f(entry, *others) if is_like else entry)
        return unflatten(self.structure, results)
