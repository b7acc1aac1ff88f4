"""Compare the results of an answer with those of the program."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, TypeGuard

import torch
from torch import Tensor

import fshard as fs


def is_same(x: Any, y: Any) -> bool:
    """Return True for equal values: floats within rounding, and sequences of any type."""
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        return _is_same_tensor(x, y)
    if isinstance(x, fs.P) or isinstance(y, fs.P):
        return x == y
    if isinstance(x, Mapping) and isinstance(y, Mapping):
        return set(x) == set(y) and all(is_same(x[key], y[key]) for key in x)
    if isinstance(x, (list, tuple)) and isinstance(y, (list, tuple)):
        return len(x) == len(y) and all(map(is_same, x, y))
    if _is_number(x) and _is_number(y):
        return math.isclose(x, y, rel_tol=1e-6, abs_tol=1e-9)
    return type(x) is type(y) and bool(x == y)


def _is_same_tensor(x: Any, y: Any) -> bool:
    if isinstance(x, fs.Sharded) or isinstance(y, fs.Sharded):
        return x is y
    try:
        x = torch.as_tensor(x).detach()
        y = torch.as_tensor(y).detach()
    except (TypeError, ValueError, RuntimeError):
        return False
    if x.shape != y.shape:
        return False
    return torch.allclose(x.double(), y.double(), rtol=1e-4, atol=1e-5, equal_nan=True)


def _is_number(x: Any) -> TypeGuard[int | float | Fraction]:
    return isinstance(x, (int, float, Fraction))
