"""Lion (Chen et al. 2023): every element moves by the learning rate.

Its direction is the sign of a momentum.

Legend: p parameter, g gradient, m momentum.

    p = p - lr decay p - lr sign(lerp(m, g, 1 - beta1))
    m = lerp(m, g, 1 - beta2)
"""

from __future__ import annotations

import torch

from fshard.optim.arguments import validate, within
from fshard.optim.contract import Optimizer
from fshard.optim.rules import foreach
from fshard.optim.rules.rule import optimizer_of_rule
from fshard.optim.rules.shard_lists import ShardLists, each_kind
from fshard.optim.schedules import Rate


def lion(
    lr: Rate = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
) -> Optimizer:
    """Make Lion: p = p - lr sign((1 - beta1) g + beta1 m), then m = beta2 m + (1 - beta2) g.

    Args:
        lr: step size of every element, or a schedule.
        betas: weight of the momentum in the sign, and decay rate of the momentum.
        weight_decay: parameters shrink by lr times this.

    >>> import torch
    >>> opt = lion(0.5)
    >>> opt.update([torch.tensor([4.0, -0.1, 0.0])], opt.init([torch.ones(3)]), [torch.ones(3)])[0]
    [tensor([-0.5000,  0.5000,  0.0000])]
    """
    decays = within("[0, 1)", pair=True, betas=betas)
    validate("lion", within("[0, inf)", lr=lr, weight_decay=weight_decay), decays)

    def rule(shards: ShardLists, lr: float) -> None:
        m = shards.state["exp_avg"]
        if weight_decay:
            foreach.mul_(shards.params, 1 - lr * weight_decay)
        moves = foreach.lerp(m, shards.grads, 1 - betas[0])
        foreach.sign_(moves)
        foreach.add_multiple_(shards.params, moves, -lr)
        foreach.lerp_(m, shards.grads, 1 - betas[1])

    return optimizer_of_rule(lr, {"exp_avg": torch.zeros_like}, each_kind(rule))
