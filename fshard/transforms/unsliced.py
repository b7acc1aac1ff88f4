"""Inputs that reproducible mode refuses: it would cut them at the wrong place, or lose their gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fshard.errors import LayoutError
from fshard.transforms.announced import Counted
from fshard.transforms.opaque import is_opaque


def refuse_unsliced(paths: Sequence[str], given: Sequence[Any], leaves: Sequence[Any], counted: Counted) -> None:
    """Raise unless the arguments of a model are cut into slices by their first dim, and none needs a gradient.

    Args:
        paths, given: the arguments in (args, kwargs), objects among them.
        leaves: what they are made of.
        counted: how many samples they have.
    """
    if wrong := [f"{path[3:]} is a {type(x).__name__}" for path, x in zip(paths, given, strict=True) if is_opaque(x)]:
        raise LayoutError(
            f"reproducible=True: arguments must be tensors, or containers of them, to be cut into slices; {', '.join(wrong)}. "
            "Make such an object in the model's forward."
        )
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    if any(x.requires_grad for x in tensors):
        raise LayoutError(
            "reproducible=True: arguments of the model must not need a gradient, as the output of another call does: slices "
            "are cut off from its graph. detach() them, or leave reproducible=True out."
        )
    rows, samples = counted.rows, counted.known
    if rows is None or samples is None or rows == max(samples, 1):
        return
    if rows % max(samples, 1) or not all(x.is_contiguous() for x in tensors if x.ndim and len(x) == rows):
        raise LayoutError(
            f"reproducible=True: the first dim of arguments must have a row for each of {samples} samples, got {rows}. Give "
            "samples first (batch_first=True), or leave reproducible=True out."
        )
