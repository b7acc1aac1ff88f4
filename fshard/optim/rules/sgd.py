"""Stochastic gradient descent, with the bits of torch.optim.SGD.

Legend: p parameter, g gradient, b momentum buffer.

    g = g + decay p
    b = g at a leaf's first step, then   momentum b + (1 - dampening) g
    p = p - lr b      (nesterov: p - lr (g + momentum b);  no momentum: p - lr g)
"""

from __future__ import annotations

from typing import Any

import torch

from fshard.optim.arguments import validate, within
from fshard.optim.contract import Optimizer
from fshard.optim.rules import foreach
from fshard.optim.rules.rule import optimizer_of_rule
from fshard.optim.rules.shard_lists import ShardLists, each_kind, fused_or
from fshard.optim.schedules import Rate


def sgd(
    lr: Rate = 1e-3,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    *,
    maximize: bool = False,
    fused: bool | None = None,
) -> Optimizer:
    """Make gradient descent: b = momentum b + (1 - dampening) g, p = p - lr b.

    Args:
        lr: learning rate, or a schedule.
        momentum: decay rate of the momentum.
        dampening: the gradient enters the momentum times 1 minus this.
        weight_decay: added to the gradient, times the parameter.
        nesterov: look ahead along the momentum.
        maximize: ascend instead of descend.
        fused: whether `step` uses torch's fused kernel: None where it can, False for the bits of
            torch's foreach.

    >>> import torch
    >>> opt = sgd(0.5, momentum=0.5)
    >>> params, state = [torch.tensor([4.0])], opt.init([torch.tensor([4.0])])
    >>> for _ in range(2):
    ...     params, state = opt.step([torch.tensor([2.0])], state, params)
    >>> params, state["momentum_buffer"]
    ([tensor([1.5000])], [tensor([3.])])
    """
    errors: list[str] = []
    if nesterov and (not momentum or dampening):
        errors.append(
            "nesterov needs momentum and no dampening; "
            f"got momentum={momentum}, dampening={dampening}"
        )
    validate(
        "sgd",
        within("[0, inf)", lr=lr, momentum=momentum, weight_decay=weight_decay),
        within("(-inf, inf)", dampening=dampening),
        errors,
    )

    def rule(shards: ShardLists, lr: float) -> None:
        g: Any = foreach.neg(shards.grads) if maximize else shards.grads
        if weight_decay:
            g = foreach.add_multiple(g, shards.params, weight_decay)
        if momentum:
            b = shards.state["momentum_buffer"]
            foreach.mul_(b, momentum)
            foreach.add_multiple_(b, g, 1 - dampening)
            for buffer, grad, t in zip(b, g, shards.steps, strict=True):
                if t == 1:
                    buffer.copy_(grad)
            g = foreach.add_multiple(g, b, momentum) if nesterov else b
        foreach.add_multiple_(shards.params, g, -lr)

    def fused_rule(shards: ShardLists, lr: float) -> None:
        numbers = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
        }
        # The kernel makes the first step of all its tensors, or of none.
        for is_first in (True, False):
            indices = [i for i, t in enumerate(shards.steps) if (t == 1) is is_first]
            if not indices:
                continue
            subset = shards.only(indices)
            buffers = subset.state.get("momentum_buffer", [])
            flags = {
                "nesterov": nesterov,
                "maximize": maximize,
                "is_first_step": bool(momentum) and is_first,
            }
            foreach.fused_sgd_(subset.params, subset.grads, buffers, **numbers, **flags)

    slots = {"momentum_buffer": torch.zeros_like} if momentum else {}
    by_kind = each_kind(rule, complex_as_real=False)  # torch adds complex numbers here
    return optimizer_of_rule(lr, slots, by_kind, fast=fused_or(fused_rule, rule, fused))
