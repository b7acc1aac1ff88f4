"""Leaves that must be whole: for optimizers that look at rows, columns or singular values of a matrix."""

from __future__ import annotations

from collections.abc import Callable

from fshard.errors import LayoutError
from fshard.mesh.sharded import Sharded
from fshard.optim.leaves import Leaf, Leaves, trainable


def check_whole(name: str, *, refuse: Callable[[Leaf], str | None] = lambda leaf: None) -> Callable[[Leaves], None]:
    """Return a check that every parameter is whole on its devices, and not refused for another reason; it names all."""

    def check(at: Leaves) -> None:
        found = [(path or "the leaf", leaf) for path, leaf in zip(at.paths, at.leaves, strict=True) if trainable(leaf)]
        cut = [f"\n  params{path} is {leaf!r}" for path, leaf in found if not is_whole(leaf)]
        if cut:
            raise LayoutError(
                f"{name} needs whole matrices, but these parameters are in pieces:{''.join(cut)}\n"
                "Give each matrix to one device: fs.partition_optimizer(opt, mesh=..., axis=..., stage=...)."
            )
        wrong = [f"\n  params{path}: {reason}" for path, leaf in found if (reason := refuse(leaf))]
        if wrong:
            raise LayoutError(
                f"{name} is not for these parameters:{''.join(wrong)}\n"
                "Give them another optimizer: by_label({...}, labels)."
            )

    return check


def is_whole(leaf: Leaf) -> bool:
    """Return whether every device that holds any of a leaf holds all of it, in its shape."""
    if not isinstance(leaf, Sharded):
        return True
    if leaf.spec.flat_axes is not None and len(leaf.shape) != 1:
        return False  # a row of numbers, if over one device too
    return all(leaf.mesh.shape[axis] == 1 for axis in (*leaf.spec.cut_axes, *leaf.spec.unreduced))
