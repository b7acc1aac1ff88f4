"""Muon (Jordan 2024), with the bits of torch.optim.Muon: momentum, made orthogonal.

Newton and Schulz's iteration drives all singular values of a matrix towards 1 by matrix products alone.

Legend: p parameter, g gradient, b momentum; a, b, c coefficients of the quintic a x + b x^3 + c x^5.

    b = lerp(b, g, 1 - momentum)        u = orthogonal(nesterov: lerp(g, b, momentum))
    p = p - lr decay p - lr sqrt(max(1, rows / columns)) u

(Of bfloat16 parameters without nesterov, torch normalises its own momentum in place, by mistake.  Not so here.)
"""

from __future__ import annotations

from math import sqrt
from typing import Literal

import torch
from torch import Tensor

from fshard.optim.cells import Cells
from fshard.optim.contract import Optimizer, at_least, refuse
from fshard.optim.leaves import Leaf, check_whole, refuse_complex
from fshard.optim.rules import writer
from fshard.optim.schedules import Rate

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients whose slope at 0 is the largest; singular values end up between about 0.7 and 1.2."""


def muon(
    lr: Rate = 1e-3,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    coefficients: tuple[float, float, float] = QUINTIC,
    eps: float = 1e-7,
    iterations: int = 5,
    size: Literal["original", "match_rms_adamw"] = "original",
) -> Optimizer:
    """Make Muon, for matrices.  They must be whole.

    Args:
        lr: learning rate, or a schedule.
        weight_decay: by how much of lr parameters shrink.
        momentum: how slowly the momentum forgets.
        nesterov: look ahead along the momentum.
        coefficients: of the quintic.
        eps: the least norm that is divided by.
        iterations: how often the quintic is applied.
        size: steps by the ratio of rows to columns, or as long as AdamW's would be.

    >>> import torch
    >>> opt = muon(1.0, weight_decay=0.0)
    >>> opt.update([torch.eye(2) * 100], opt.init([torch.zeros(2, 2)]), [torch.zeros(2, 2)])[0][0].diagonal()
    tensor([-1.1250, -1.1250])
    """
    refuse("muon", at_least(0, lr=lr, weight_decay=weight_decay, momentum=momentum, eps=eps))

    def rule(cells: Cells, lr: float) -> None:
        for p, g, b in zip(cells.params, cells.grads, cells.state["momentum_buffer"], strict=True):
            b.lerp_(g, 1 - momentum)
            if p.numel() == 0:
                continue
            u = orthogonal(g.lerp(b, momentum) if nesterov else b, coefficients, iterations, eps)
            p.mul_(1 - lr * weight_decay)
            p.add_(u, alpha=-lr * _length(p.shape, size))

    check = check_whole("muon", refuse=_refuse)
    return writer(lr, {"momentum_buffer": torch.zeros_like}, rule, check=check, elementwise=False)


def orthogonal(x: Tensor, coefficients: tuple[float, float, float], iterations: int, eps: float) -> Tensor:
    """Return the nearest orthogonal matrix, roughly, in bfloat16: Newton and Schulz's iteration."""
    a, b, c = coefficients
    tall = x.size(0) > x.size(1)
    y = x.to(torch.bfloat16, copy=True)
    y = y.T if tall else y  # (few, many)
    y.div_(y.norm().clamp(min=eps))
    for _ in range(iterations):
        gram = y @ y.T  # (few, few)
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.T if tall else y


def _length(shape: torch.Size, size: str) -> float:
    rows, columns = shape
    return sqrt(max(1, rows / columns)) if size == "original" else 0.2 * sqrt(max(rows, columns))


def _refuse(leaf: Leaf) -> str | None:
    return refuse_complex(leaf) or (None if leaf.ndim == 2 else f"it has {leaf.ndim} dims, not 2")
