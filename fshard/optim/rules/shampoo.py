"""Shampoo (Gupta, Koren, Singer 2018): preconditioners for the rows and the columns of a matrix.

Legend: p parameter, g gradient, l and r preconditioners, u direction, b momentum.

    l = l + g g'        r = r + g' g        u = l^(-1/4) g r^(-1/4)
    b = momentum b + u                      p = p - lr decay p - lr b

A tensor of more dims is the matrix of its first dim by all others. A dim longer than `longest` has
no preconditioner, and the other one's root is -1/2; so have vectors, for which this is Adagrad with
a full matrix. Without any preconditioner the direction is the gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fshard.optim.arguments import validate, within
from fshard.optim.contract import Optimizer
from fshard.optim.leaves import Leaves, check_unsharded, complex_is_unsupported
from fshard.optim.rules.rule import optimizer_of_rule
from fshard.optim.rules.shard_lists import ShardLists
from fshard.optim.schedules import Rate


def shampoo(
    lr: Rate = 1e-1,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    eps: float = 1e-4,
    *,
    longest: int = 2048,
) -> Optimizer:
    """Make Shampoo: p = p - lr l^(-1/4) g r^(-1/4), for parameters unsharded on their devices.

    Args:
        lr: learning rate, or a schedule.
        momentum: decay rate of the momentum.
        weight_decay: parameters shrink by lr times this.
        eps: the initial diagonal of preconditioners.
        longest: dims that are longer have no preconditioner.

    >>> import torch
    >>> opt = shampoo(1.0, eps=0.0)
    >>> grad = torch.diag(torch.tensor([4.0, 9.0]))
    >>> opt.update([grad], opt.init([torch.zeros(2, 2)]), [torch.zeros(2, 2)])[0][0].diagonal()
    tensor([-1., -1.])
    """
    validate(
        "shampoo",
        within("[0, inf)", lr=lr, momentum=momentum, weight_decay=weight_decay, eps=eps),
        within("[0, inf)", integer=True, longest=longest),
    )

    def rule(shards: ShardLists, lr: float) -> None:
        state = shards.state
        columns = (state["left"], state["right"], state["momentum_buffer"])
        for p, g, left, right, b in zip(shards.params, shards.grads, *columns, strict=True):
            if p.numel():
                u = _direction(_matrix(g), left, right).reshape(p.shape)
                b.mul_(momentum).add_(u)
                p.mul_(1 - lr * weight_decay).sub_(b, alpha=lr)

    def check(params: Leaves) -> None:
        check_unsharded("shampoo", params, complex_is_unsupported)

    slots = {
        "left": _preconditioner(0, eps, longest),
        "right": _preconditioner(1, eps, longest),
        "momentum_buffer": torch.zeros_like,
    }
    return optimizer_of_rule(lr, slots, rule, check=check, sharding="owners")


def _matrix(x: Tensor) -> Tensor:
    """Return a tensor as a matrix; a vector is one column."""
    if not x.numel():
        return x.new_empty(0, 0)
    rows = x.shape[0] if x.ndim else 1
    return x.reshape(rows, -1)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _preconditioner(dim: int, eps: float, longest: int) -> Callable[[Tensor], Tensor | None]:
    def make(p: Tensor) -> Tensor | None:
        length = _matrix(p).shape[dim]
        if not 1 < length <= longest:
            return None
        return eps * torch.eye(length, dtype=_wide(p), device=p.device)

    return make


def _direction(g: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """Move the preconditioners and apply their roots."""
    wide = g.to(_wide(g))
    has_both = left is not None and right is not None
    power = -0.25 if has_both else -0.5
    u = wide
    if left is not None:
        u = _power(left.addmm_(wide, wide.T), power) @ u
    if right is not None:
        u = u @ _power(right.addmm_(wide.T, wide), power)
    return u.to(g.dtype)


def _power(x: Tensor, power: float) -> Tensor:
    """Return a symmetric matrix to a negative power.

    Directions that were never seen stay out of it.
    """
    values, vectors = torch.linalg.eigh(x.double())
    is_seen = values > values.amax() * torch.finfo(x.dtype).eps
    powers = torch.where(is_seen, values, torch.ones_like(values)).pow(power) * is_seen
    return ((vectors * powers) @ vectors.T).to(x.dtype)
