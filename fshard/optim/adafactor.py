"""Adafactor (Shazeer and Stern 2018), with the bits of torch.optim.Adafactor(foreach=False).

A matrix's mean squares are kept as one number per row and one per column; their outer product, scaled, stands for the
whole.  Steps are relative to the size of the parameter.

Legend: p parameter, g gradient, r, c and v mean squares of rows, of columns and of all, t the leaf's steps from 1.

    forget = t^decay      rho = min(lr, 1 / sqrt(t))      alpha = max(eps2, rms(p)) rho
    u = g / sqrt(r c / mean(r))      p = p - alpha u / max(1, rms(u) / d)

(Of parameters of several dtypes, torch gives all the eps of the first one's, by mistake.  Not so here.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from fshard.optim.cells import Cells
from fshard.optim.contract import Optimizer, above, at_least, pair, refuse
from fshard.optim.leaves import check_whole, refuse_complex
from fshard.optim.rules import Slots, writer
from fshard.optim.schedules import Rate

SLOTS: Slots = {
    "row_var": lambda p: p.new_zeros((*p.shape[:-1], 1)) if p.ndim > 1 else None,
    "col_var": lambda p: p.new_zeros((*p.shape[:-2], 1, p.shape[-1])) if p.ndim > 1 else None,
    "variance": lambda p: torch.zeros_like(p) if p.ndim < 2 else None,
}


def adafactor(
    lr: Rate = 1e-2,
    beta2_decay: float = -0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    d: float = 1.0,
    weight_decay: float = 0.0,
    *,
    maximize: bool = False,
) -> Optimizer:
    """Make Adafactor.  Parameters must be whole.

    Args:
        lr: the largest relative step, or a schedule of it.
        beta2_decay: how fast the mean squares come to forget slowly.
        eps: the least root of a mean square (None: the dtype's), and the least size of a parameter.
        d: the largest root mean square of an update.
        weight_decay: by how much of lr parameters shrink.
        maximize: go up, not down.

    >>> import torch
    >>> opt = adafactor(0.5)
    >>> state = opt.init([torch.ones(4, 3)])
    >>> state["row_var"][0].shape, state["col_var"][0].shape, state["variance"]
    (torch.Size([4, 1]), torch.Size([1, 3]), [None])
    >>> opt.update([torch.ones(4, 3)], state, [torch.ones(4, 3)])[0][0][0]
    tensor([-0.5000, -0.5000, -0.5000])
    """
    refuse("adafactor", pair(eps=eps), at_least(0, lr=lr, eps=eps, weight_decay=weight_decay), above(0, d=d))

    def rule(cells: Cells, lr: float) -> None:
        rows, columns, all_ = (cells.state[name] for name in ("row_var", "col_var", "variance"))
        for p, g, t, r, c, v in zip(cells.params, cells.grads, cells.steps, rows, columns, all_, strict=True):
            if p.numel() == 0:
                continue
            least = torch.finfo(p.dtype).eps if eps[0] is None else eps[0]
            g = -g if maximize else g
            alpha = max(eps[1], _rms(p)) * min(lr, 1 / t**0.5)
            if weight_decay:
                p.mul_(1 - lr * weight_decay)
            squared = _factored(g, r, c, t**beta2_decay, least) if p.ndim > 1 else _full(g, v, t**beta2_decay)
            u = squared.clamp_(min=least * least).rsqrt_().mul_(g)
            p.add_(u, alpha=-alpha / max(1.0, _rms(u, d)))

    return writer(lr, SLOTS, rule, check=check_whole("adafactor", refuse=refuse_complex), elementwise=False)


def _rms(x: Tensor, unit: float = 1.0) -> float:
    return x.norm(2).item() / (x.numel() ** 0.5 * unit)


def _factored(g: Tensor, r: Tensor, c: Tensor, weight: float, least: float) -> Tensor:
    """Move the mean squares of rows and columns; return those of all elements."""
    for mean, dim in ((r, -1), (c, -2)):
        mean.lerp_(torch.norm(g, dim=dim, keepdim=True).square_().div_(g.size(dim)), weight)
    return (r @ c).div_(r.mean(dim=-2, keepdim=True).clamp_(min=least))


def _full(g: Tensor, v: Tensor, weight: float) -> Tensor:
    """Move the mean squares of all elements; return a copy."""
    return v.lerp_(g * g, weight).clone()
