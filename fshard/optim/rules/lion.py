"""Lion (Chen et al. 2023): the sign of a momentum, so that every element moves by the learning rate.

Legend: p parameter, g gradient, m momentum.

    p = p - lr decay p - lr sign(lerp(m, g, 1 - beta1))
    m = lerp(m, g, 1 - beta2)
"""

from __future__ import annotations

import torch

from fshard.optim.contract import Optimizer, at_least, below, pair, refuse
from fshard.optim.rules import lists
from fshard.optim.rules.cells import Cells, each_kind
from fshard.optim.rules.rule import writer
from fshard.optim.schedules import Rate


def lion(lr: Rate = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0) -> Optimizer:
    """Make Lion.

    Args:
        lr: step size of every element, or a schedule.
        betas: weight of the momentum in the sign, and decay rate of the momentum.
        weight_decay: parameters shrink by lr times this.

    >>> import torch
    >>> opt = lion(0.5)
    >>> opt.update([torch.tensor([4.0, -0.1, 0.0])], opt.init([torch.ones(3)]), [torch.ones(3)])[0]
    [tensor([-0.5000,  0.5000,  0.0000])]
    """
    sizes = at_least(0, lr=lr, betas=betas, weight_decay=weight_decay)
    refuse("lion", pair(betas=betas), sizes, below(1, betas=betas))

    def rule(cells: Cells, lr: float) -> None:
        m = cells.state["exp_avg"]
        if weight_decay:
            lists.mul_(cells.params, 1 - lr * weight_decay)
        moves = lists.lerp(m, cells.grads, 1 - betas[0])
        lists.sign_(moves)
        lists.add_multiple_(cells.params, moves, -lr)
        lists.lerp_(m, cells.grads, 1 - betas[1])

    return writer(lr, {"exp_avg": torch.zeros_like}, each_kind(rule))
