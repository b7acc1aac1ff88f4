"""Matrix products of rows with the weights of their experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_grouped_mm: Any = getattr(functional, "grouped_mm", None)


def grouped_matmul(rows: Tensor, weights: Tensor, counts: Sequence[int]) -> Tensor:
    """Multiply the first `counts[0]` rows with the first matrix, the next ones with the second, ...

    By torch's grouped kernel on GPUs in bf16, else matrix by matrix. A matrix without rows has a gradient of zeros.

    >>> grouped_matmul(torch.ones(3, 2), torch.tensor([[[1.0], [1.0]], [[2.0], [2.0]]]), [1, 2])
    tensor([[2.],
            [4.],
            [4.]])
    """
    if _grouped_mm is not None and rows.is_cuda and rows.dtype == weights.dtype == torch.bfloat16:
        ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(rows.device)
        return _grouped_mm(rows, weights, offs=ends)
    parts = [part @ weight for part, weight in zip(rows.split([*counts]), weights, strict=True)]
    return torch.cat(parts)


def swiglu(weights: Mapping[str, Tensor], rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Apply the experts' networks: silu(rows @ gate) * (rows @ up) @ down; each weight is (experts, inputs, outputs)."""
    inner = functional.silu(grouped_matmul(rows, weights["gate"], counts)) * grouped_matmul(
        rows, weights["up"], counts
    )
    return grouped_matmul(inner, weights["down"], counts)
