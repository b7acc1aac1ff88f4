"""Copies that share memory until one of them is written to: whoever only reads pays nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fshard.mesh.differentiate import transformed

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_lazy_clone: Any = _C._VariableFunctions._lazy_clone


def lent(x: Any) -> Any:
    """Return a copy to write to; its memory is copied at the first write.

    >>> x = torch.zeros(2)
    >>> copy = lent(x)
    >>> untouched(copy), untouched(copy.add_(1)), x
    (True, False, tensor([0., 0.]))
    """
    if not isinstance(x, Tensor) or type(x) is not Tensor or transformed():
        return x.clone() if isinstance(x, Tensor) else x
    try:
        return _lazy_clone(x)
    except RuntimeError:  # memory that is not torch's own, numpy's for instance
        return x.clone()


def untouched(copy: Any) -> bool:
    """Return whether nobody has written to what was lent."""
    return type(copy) is Tensor and not transformed() and _C._is_cow_tensor(copy)
