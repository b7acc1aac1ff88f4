"""LAMB (You et al. 2019): Adam's direction, scaled per leaf by the leaf's norm.

Legend: p parameter, g gradient, m and v as in Adam, u direction.

    u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + decay p
    p = p - lr |p| / |u| u          (no trust ratio where a norm is 0)

The norms are those of global leaves, whatever their layout: all of them in one vector, one
collective a step.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fshard.optim.arguments import validate, within
from fshard.optim.contract import Optimizer
from fshard.optim.leaves import Leaf, like
from fshard.optim.norms import (
    Precision,
    check_summable,
    shows_all_bits,
    squares,
    sum_of,
    sum_over_mesh,
)
from fshard.optim.rules import foreach
from fshard.optim.rules.adam import denominators, moments
from fshard.optim.rules.rule import optimizer_of_rule
from fshard.optim.rules.shard_lists import ShardLists
from fshard.optim.schedules import Rate


def lamb(
    lr: Rate = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.0,
) -> Optimizer:
    """Make LAMB: p = p - lr |p| / |u| u, where u is Adam's direction; for parameters in any layout.

    Communicates a `psum` of 16 bytes a leaf (1696 if one is of float64) over the axes that shard
    any leaf.

    Args:
        lr: learning rate, or a schedule.
        betas: decay rates of the means of the gradient and of its square.
        eps: added to the root of the mean square.
        weight_decay: added to the direction, times the parameter.

    >>> import torch
    >>> opt = lamb(0.5)
    >>> params = [torch.tensor([3.0, 4.0])]
    >>> opt.update([torch.tensor([9.0, 9.0])], opt.init(params), params)[0]
    [tensor([-1.7678, -1.7678])]
    """
    decays = within("[0, 1)", pair=True, betas=betas)
    validate("lamb", within("[0, inf)", lr=lr, eps=eps, weight_decay=weight_decay), decays)

    def rule(shards: ShardLists, lr: float) -> None:
        by_param: dict[int, Tensor] = {}
        for kind in shards.by_kind():
            as_real = kind.real()
            m = as_real.state["exp_avg"]
            v = as_real.state["exp_avg_sq"]
            moments(m, v, as_real.grads, betas)
            u = foreach.div(m, [1 - betas[0] ** t for t in as_real.steps])
            foreach.div_(u, denominators(v, as_real.steps, betas[1], eps))
            if weight_decay:
                foreach.add_multiple_(u, as_real.params, weight_decay)
            by_param |= zip(map(id, kind.params), u, strict=True)
        directions = [by_param[id(param)] for param in shards.params]
        ratios = _ratios(shards, directions)
        for param, direction, ratio in zip(shards.params, directions, ratios, strict=True):
            real = torch.view_as_real(param) if param.is_complex() else param
            real.sub_(direction * (lr * ratio).to(direction.device, direction.dtype))

    slots = {"exp_avg": torch.zeros_like, "exp_avg_sq": torch.zeros_like}
    check = partial(check_summable, "lamb")
    return optimizer_of_rule(lr, slots, rule, check=check, sharding="owners")


def _ratios(shards: ShardLists, directions: list[Tensor]) -> list[Tensor]:
    """Return for each shard the norm of its leaf by the norm of the direction of this leaf.

    The ratio is 1 where one of the norms is 0.
    """
    indices: dict[int, list[int]] = {}  # of the shards of each leaf
    for i, leaf in enumerate(shards.leaves):
        indices.setdefault(id(leaf), []).append(i)
    leaves: list[Leaf] = []
    leaf_of: dict[int, int] = {}  # from a shard to the number of its leaf
    for number, of_leaf in enumerate(indices.values()):
        leaf = shards.leaves[of_leaf[0]]
        leaves.append(like(leaf, [shards.params[i] for i in of_leaf]))
        leaf_of |= dict.fromkeys(of_leaf, number)

    index_of = {id(x): i for i, x in enumerate(shards.params)}
    device = shards.params[0].device
    precision: Precision = "exact" if shows_all_bits(shards.leaves) else "float64"
    # (shards, 2, columns of a sum). The two have no name: it would keep them beside their copies.
    each = torch.stack([squares(xs, device, precision) for xs in (shards.params, directions)], 1)

    def row(params: list[Tensor]) -> Tensor:
        sums = each.new_zeros(len(leaves), *each.shape[1:])
        for i in [index_of[id(x)] for x in params]:
            sums[leaf_of[i]] = each[i]
        return sums.reshape(-1)

    sums = sum_over_mesh(leaves, row)().reshape(len(leaves), 2, -1)
    of_params, of_directions = sum_of(sums).sqrt().unbind(1)
    usable = (of_params > 0) & (of_directions > 0)
    ratios = torch.where(usable, of_params / of_directions, torch.ones_like(of_params))
    return [ratios[leaf_of[i]] for i in range(len(directions))]
