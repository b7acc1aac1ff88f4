"""Matrix products of rows with the weights of their experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_grouped_mm: Any = getattr(functional, "grouped_mm", None)
"""torch's grouped kernel; older versions of torch have none."""


def grouped_matmul(rows: Tensor, weights: Tensor, counts: Sequence[int]) -> Tensor:
    """Multiply the first `counts[0]` rows with the first matrix, the next ones with the second, ...

    By torch's grouped kernel on GPUs in bf16, else matrix by matrix. A matrix without rows has a
    gradient of zeros.

    >>> weights = torch.tensor([[[1.0], [1.0]], [[2.0], [2.0]]])
    >>> grouped_matmul(torch.ones(3, 2), weights, [1, 2])
    tensor([[2.],
            [4.],
            [4.]])
    """
    if _grouped_mm is not None and rows.is_cuda and rows.dtype == weights.dtype == torch.bfloat16:
        ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return _grouped_mm(rows, weights, offs=ends.to(rows.device))
    blocks = rows.split([*counts])
    return torch.cat([block @ weight for block, weight in zip(blocks, weights, strict=True)])


def swiglu(weights: Mapping[str, Tensor], rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Apply the experts' networks: silu(rows @ gate) * (rows @ up) @ down.

    Each weight is (experts, inputs, outputs).
    """
    # One name for both factors: without autograd the product with "gate" is freed by silu.
    hidden = functional.silu(grouped_matmul(rows, weights["gate"], counts))
    hidden = hidden * grouped_matmul(rows, weights["up"], counts)
    return grouped_matmul(hidden, weights["down"], counts)
