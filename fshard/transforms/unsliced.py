"""What reproducible mode refuses to be given, since it would be cut at the wrong place, or its gradient lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fshard.errors import LayoutError
from fshard.transforms.announced import Counted


def refuse_unsliced(leaves: Sequence[Any], counted: Counted) -> None:
    """Raise if what a model is given needs a gradient, or has something else than samples along its first dim.

    >>> import torch
    >>> refuse_unsliced([torch.zeros(6, 4)], Counted(6, None, 1.0, False, 4, 4))
    Traceback (most recent call last):
    fshard.errors.LayoutError: reproducible=True cuts what a model is given into slices along its first dim, but that is 6 ...
    """
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    if any(x.requires_grad for x in tensors):
        raise LayoutError(
            "reproducible=True: what the model is given needs a gradient, as what another call has returned does. Outputs are "
            "cut off from a model's graph, so nothing goes back through one call and then through another: detach() it, or "
            "leave reproducible=True out."
        )
    rows, samples = counted.rows, counted.known
    if rows is None or samples is None or rows == max(samples, 1):
        return
    if rows % max(samples, 1) or not all(x.is_contiguous() for x in tensors if x.ndim and len(x) == rows):
        raise LayoutError(
            f"reproducible=True cuts what a model is given into slices along its first dim, but that is {rows} long, for "
            f"{samples} samples: it is not theirs. Give samples first (batch_first=True), or leave reproducible=True out."
        )
