"""LAMB (You et al. 2019): Adam's direction, scaled per leaf by the leaf's norm.

Legend: p parameter, g gradient, m and v as in Adam, u direction.

    u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + decay p
    p = p - lr |p| / |u| u          (no trust ratio where a norm is 0)

The norms are those of global leaves, whatever their layout: all of them in one vector, one collective a step.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fshard.optim.contract import Optimizer, at_least, below, pair, refuse
from fshard.optim.norms import Places, check_summable, in_digits, squares, sum_of, sum_over_mesh
from fshard.optim.rules import lists
from fshard.optim.rules.adam import denominators, moments
from fshard.optim.rules.cells import Cells
from fshard.optim.rules.rule import writer
from fshard.optim.schedules import Rate


def lamb(
    lr: Rate = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6, weight_decay: float = 0.0
) -> Optimizer:
    """Make LAMB, for parameters in any layout.

    Communicates a `psum` of 16 bytes a leaf (1712 if one is of float64) over the axes that shard any leaf.

    Args:
        lr: learning rate, or a schedule.
        betas: decay rates of the means of the gradient and of its square.
        eps: added to the root of the mean square.
        weight_decay: added to the direction, times the parameter.

    >>> import torch
    >>> opt = lamb(0.5)
    >>> opt.update([torch.tensor([9.0, 9.0])], opt.init([torch.tensor([3.0, 4.0])]), [torch.tensor([3.0, 4.0])])[0]
    [tensor([-1.7678, -1.7678])]
    """
    sizes = at_least(0, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
    refuse("lamb", pair(betas=betas), sizes, below(1, betas=betas))

    def rule(cells: Cells, lr: float) -> None:
        found: dict[int, Tensor] = {}
        for kind in cells.kinds():
            found |= zip(map(id, kind.params), _directions(kind.real(), betas, eps, weight_decay), strict=True)
        directions = [found[id(param)] for param in cells.params]
        for param, direction, ratio in zip(cells.params, directions, _ratios(cells, directions), strict=True):
            real = torch.view_as_real(param) if param.is_complex() else param
            real.sub_(direction * (lr * ratio).to(direction.device, direction.dtype))

    slots = {"exp_avg": torch.zeros_like, "exp_avg_sq": torch.zeros_like}
    return writer(lr, slots, rule, check=partial(check_summable, "lamb"), elementwise=False)


def _directions(cells: Cells, betas: tuple[float, float], eps: float, weight_decay: float) -> tuple[Tensor, ...]:
    m, v = cells.state["exp_avg"], cells.state["exp_avg_sq"]
    moments(m, v, cells.grads, betas)
    directions = lists.div(m, [1 - betas[0] ** t for t in cells.steps])
    lists.div_(directions, denominators(v, cells.steps, betas[1], eps))
    if weight_decay:
        lists.add_multiple_(directions, cells.params, weight_decay)
    return directions


def _ratios(cells: Cells, directions: list[Tensor]) -> list[Tensor]:
    """Return for each cell the ratio of the norms of its leaf and of its leaf's direction; 1 where one is 0."""
    near, leaves = cells.params[0].device, {id(leaf): leaf for leaf in cells.owners}
    numbers = {leaf: number for number, leaf in enumerate(leaves)}
    found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in numbers]  # of each leaf, for each of its shards
    digits = in_digits(cells.owners)
    found_in = (squares(shards, near, digits=digits) for shards in (cells.params, directions))
    for leaf, *both in zip(cells.owners, *found_in, strict=True):
        found[numbers[id(leaf)]].append((both[0], both[1]))

    def row(places: Places) -> Tensor:
        here = dict(places)
        none = (squares([], near, digits=digits)[0],) * 2
        own = [found[number][here[number]] if number in here else none for number in range(len(found))]
        return torch.cat([sums for column in zip(*own, strict=True) for sums in column])

    sums = sum_over_mesh([*leaves.values()], row)
    of_params, of_directions = sum_of(sums.reshape(2, len(numbers), -1)).sqrt()  # (2, leaves)
    usable = (of_params > 0) & (of_directions > 0)
    ratios = torch.where(usable, of_params / of_directions, torch.ones_like(of_params))
    return [ratios[numbers[id(leaf)]] for leaf in cells.owners]
