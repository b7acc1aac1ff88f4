"""Name the leaves of a tree of weights, in the order in which they were given."""

from __future__ import annotations

from fshard.checkpoint.names import NamedLeaf, leaves_of, name_of, opened
from fshard.mesh.layout import PyTree


def named_leaves(tree: PyTree) -> list[NamedLeaf]:
    """Return the leaves of a tree; those of a dict in its order, not in that of the alphabet.

    >>> [leaf.name for leaf in named_leaves({"q": 1, "k": [2, 3]})]
    ['q', 'k.0', 'k.1']
    """
    opened_tree, _ = opened(tree)
    leaves = leaves_of(opened_tree)
    if not isinstance(opened_tree, dict):
        return leaves
    ranks = {str(key): rank for rank, key in enumerate(opened_tree)}
    return sorted(leaves, key=lambda leaf: ranks[name_of(leaf.path[:1])])
