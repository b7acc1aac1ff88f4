"""Adam and AdamW, with the bits of torch.optim.

Legend: p parameter, g gradient, m and v running means of g and of its square, t the leaf's count of
steps from 1.

    m = lerp(m, g, 1 - beta1)                        v = beta2 v + (1 - beta2) g g
    p = p - lr / (1 - beta1^t)  m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

Weight decay is added to the gradient by `adam` (g + decay p), and shrinks the parameter before the
step in `adamw` (p - lr decay p). With `amsgrad` the largest v so far replaces v. Complex numbers
are pairs of real ones.
"""

from __future__ import annotations

from typing import Any

import torch

from fshard.optim.arguments import validate, within
from fshard.optim.contract import Optimizer
from fshard.optim.rules import foreach
from fshard.optim.rules.rule import optimizer_of_rule
from fshard.optim.rules.shard_lists import ShardLists, each_kind, fused_or, step_tensors
from fshard.optim.schedules import Rate


def adam(
    lr: Rate = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    amsgrad: bool = False,
    maximize: bool = False,
    decoupled_weight_decay: bool = False,
    fused: bool | None = None,
) -> Optimizer:
    """Make Adam: p = p - lr m / (sqrt(v) + eps), with m and v the unbiased means of g and g^2.

    Args:
        lr: learning rate, or a schedule.
        betas: decay rates of the means of the gradient and of its square.
        eps: added to the root of the mean square.
        weight_decay: added to the gradient, times the parameter.
        amsgrad: divide by the largest mean square so far.
        maximize: ascend instead of descend.
        decoupled_weight_decay: shrink the parameter instead, as `adamw` does.
        fused: whether `step` uses torch's fused kernel: None where it can, False for the bits of
            torch's foreach.

    >>> import torch
    >>> opt = adam(0.5)
    >>> params, state = opt.step([torch.tensor([4.0])], opt.init([torch.ones(1)]), [torch.ones(1)])
    >>> params, sorted(state)
    ([tensor([0.5000])], ['count', 'exp_avg', 'exp_avg_sq', 'step'])
    """
    name = "adamw" if decoupled_weight_decay else "adam"
    validate(
        name,
        within("[0, inf)", lr=lr, eps=eps, weight_decay=weight_decay),
        within("[0, 1)", pair=True, betas=betas),
    )
    kernel = foreach.fused_adamw_ if decoupled_weight_decay else foreach.fused_adam_
    names = ["exp_avg", "exp_avg_sq"]
    if amsgrad:
        names.append("max_exp_avg_sq")

    def rule(shards: ShardLists, lr: float) -> None:
        p = shards.params
        m = shards.state["exp_avg"]
        v = shards.state["exp_avg_sq"]
        g = foreach.neg(shards.grads) if maximize else shards.grads
        if weight_decay and decoupled_weight_decay:
            foreach.mul_(p, 1 - lr * weight_decay)
        elif weight_decay:
            g = foreach.add_multiple(g, p, weight_decay)
        moments(m, v, g, betas)
        if amsgrad:
            foreach.maximum_(shards.state["max_exp_avg_sq"], v)
            v = shards.state["max_exp_avg_sq"]
        # In torch's order of operations, for its bits.
        factors = [(lr / (1 - betas[0] ** t)) * -1 for t in shards.steps]
        foreach.addcdiv_(p, m, denominators(v, shards.steps, betas[1], eps), factors)

    def fused_rule(shards: ShardLists, lr: float) -> None:
        m = shards.state["exp_avg"]
        v = shards.state["exp_avg_sq"]
        largest = shards.state.get("max_exp_avg_sq", [])
        numbers = {
            "lr": lr,
            "beta1": betas[0],
            "beta2": betas[1],
            "weight_decay": weight_decay,
            "eps": eps,
        }
        flags = {"amsgrad": amsgrad, "maximize": maximize}
        kernel(shards.params, shards.grads, m, v, largest, step_tensors(shards), **numbers, **flags)

    return optimizer_of_rule(
        lr,
        dict.fromkeys(names, torch.zeros_like),
        each_kind(rule),
        fast=fused_or(fused_rule, rule, fused),
    )


def adamw(
    lr: Rate = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    *,
    amsgrad: bool = False,
    maximize: bool = False,
    fused: bool | None = None,
) -> Optimizer:
    """Make AdamW: p = p - lr weight_decay p before the step of Adam. Arguments as in `adam`.

    >>> import torch
    >>> opt = adamw(0.5, weight_decay=0.2)
    >>> opt.update([torch.tensor([4.0])], opt.init([torch.ones(1)]), [torch.ones(1)])[0]
    [tensor([-0.6000])]
    """
    flags = {"amsgrad": amsgrad, "maximize": maximize, "decoupled_weight_decay": True}
    return adam(lr, betas, eps, weight_decay, fused=fused, **flags)


def moments(
    m: list[torch.Tensor], v: list[torch.Tensor], g: Any, betas: tuple[float, float]
) -> None:
    """Move the means of the gradient and of its square."""
    foreach.lerp_(m, g, 1 - betas[0])
    foreach.mul_(v, betas[1])
    foreach.addcmul_(v, g, g, 1 - betas[1])


def denominators(v: list[torch.Tensor], steps: list[float], beta: float, eps: float) -> Any:
    """Return the roots of the mean squares, without the bias of their start, plus eps."""
    roots = foreach.sqrt(v)
    foreach.div_(roots, [(1 - beta**t) ** 0.5 for t in steps])
    foreach.add_(roots, eps)
    return roots
