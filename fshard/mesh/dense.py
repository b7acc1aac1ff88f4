"""Dense tensors: one shape, and a place in memory for each element.  All others are refused wherever they would come in."""

from __future__ import annotations

import torch
from torch import Tensor


def is_dense(x: Tensor) -> bool:
    """Return whether a tensor can be cut and sent as it is.

    >>> is_dense(torch.eye(2)), is_dense(torch.eye(2).to_sparse())
    (True, False)
    """
    return x.layout is torch.strided and not x.is_nested


def no_dense(x: Tensor) -> str:
    """Return what to say of a tensor that is not dense, and what to give instead."""
    if x.is_nested:
        return (
            "a nested tensor, which has no one shape to be cut or sent by. Give torch.nested.to_padded_tensor(x, 0.0), or its "
            "parts: x.unbind()"
        )
    return f"a tensor of {x.layout} (shape {tuple(x.shape)}), which cannot be cut or sent. Give x.to_dense()"
