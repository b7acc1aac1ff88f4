"""Gradients of zeros in the place of those that are None."""

from __future__ import annotations

from collections.abc import Callable

from fshard.mesh.layout import Layout
from fshard.mesh.sharded import Sharded
from fshard.mesh.spmd import held
from fshard.mesh.tree import PyTree, flatten, unflatten
from fshard.optim.leaves import trainable


def with_zeros(grads: PyTree, params: PyTree, lay: Callable[[Layout], Layout]) -> PyTree:
    """Return gradients with zeros for trained parameters that have none; `lay` gives the layout of a gradient."""
    given, _ = flatten(grads, sharded_is_leaf=True, none_is_leaf=True)
    leaves, structure = flatten(params, sharded_is_leaf=True, none_is_leaf=True)
    both = zip(leaves, given, strict=True)
    return unflatten(structure, [_zeros(x, lay(x.layout)) if g is None and trainable(x) else g for x, g in both])


def _zeros(x: Sharded, layout: Layout) -> Sharded:
    near = x.shards[0]
    shapes = [layout.local_shape(x.shape, device) for device in held(x.mesh)]
    return Sharded(x.shape, layout, tuple(near.new_zeros(shape) for shape in shapes))
