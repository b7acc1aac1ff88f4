"""The difference that rounding explains: the bound by which runs in two layouts are compared.

TOLERANCES[float32] = 1e-4        a leaf whose largest number is 2        bound 2e-4
a gradient that is zero up to rounding has no size of its own             bound by all leaves
"""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""The relative difference that rounding explains, by the lowest precision of a program."""


def bound_of(x: Tensor | None, largest_of_all: float, dtype: torch.dtype) -> float:
    """Return the error that rounding in a dtype explains.

    It is relative to the largest number of the leaf. A gradient that is zero up to rounding has no
    size of its own: it counts as 1e-5, and as a thousandth of the largest number of all leaves; in
    a lower dtype 32 roundings of that number are allowed.
    """
    tolerance = TOLERANCES[dtype]
    own_bound = tolerance * max(largest(x), 1e-5)
    roundings = max(1e-3 * tolerance, 32 * torch.finfo(dtype).eps)
    return max(own_bound, roundings * largest_of_all)


def largest(x: Tensor | None) -> float:
    """Return the largest absolute value of those that are finite."""
    if x is None or not x.numel():
        return 0.0
    return float(widest(x).abs().nan_to_num(0.0, 0.0).max())


def widest(x: Tensor) -> Tensor:
    """Convert any tensor to float64 (complex128)."""
    return x.to(torch.complex128 if x.is_complex() else torch.float64)
