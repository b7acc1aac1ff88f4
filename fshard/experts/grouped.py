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

    By torch's grouped kernel in bf16 on GPUs that have it, else matrix by matrix. A matrix without
    rows has a gradient of zeros.

    >>> weights = torch.tensor([[[1.0], [1.0]], [[2.0], [2.0]]])
    >>> grouped_matmul(torch.ones(3, 2), weights, [1, 2])
    tensor([[2.],
            [4.],
            [4.]])
    """
    if _has_grouped_kernel(rows, weights):
        ends = on_device(counts, rows.device).cumsum(0, dtype=torch.int32)
        return _grouped_mm(rows, weights, offs=ends)
    blocks = rows.split([*counts])
    return torch.cat([block @ weight for block, weight in zip(blocks, weights, strict=True)])


def _has_grouped_kernel(rows: Tensor, weights: Tensor) -> bool:
    """Return True if torch has a grouped kernel for rows and matrices.

    On cards before Hopper torch multiplies matrix by matrix too, but reads the offsets of rows,
    which stops the host. The kernel takes rows of a multiple of 16 bytes.
    """
    is_bfloat16 = rows.dtype == weights.dtype == torch.bfloat16
    if _grouped_mm is None or not rows.is_cuda or not is_bfloat16:
        return False
    _, inputs, outputs = weights.shape
    is_aligned = inputs % 8 == outputs % 8 == 0
    return is_aligned and torch.cuda.get_device_capability(rows.device) >= (9, 0)


def on_device(counts: Sequence[int], device: torch.device) -> Tensor:
    """Copy numbers to a device; the host does not wait for what it has launched there."""
    # A copy from memory that is not pinned would wait.
    numbers = torch.tensor(counts, dtype=torch.int64, pin_memory=device.type == "cuda")
    return numbers.to(device, non_blocking=True)


def swiglu(weights: Mapping[str, Tensor], rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Apply the experts' networks: silu(rows @ gate) * (rows @ up) @ down.

    Each weight is (experts, inputs, outputs).
    """
    # One name for both factors: without autograd the product with "gate" is freed by silu.
    hidden = functional.silu(grouped_matmul(rows, weights["gate"], counts))
    hidden = hidden * grouped_matmul(rows, weights["up"], counts)
    return grouped_matmul(hidden, weights["down"], counts)
