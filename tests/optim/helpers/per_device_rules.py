"""Rules of optimizers that read full tensors of one leaf, for tests of updates on each device."""

from typing import NamedTuple

import torch
from optree import tree_map

from fshard import optim


def momentum_init(params):
    return tree_map(torch.zeros_like, params)


def momentum_update(grads, state, params):
    state = tree_map(lambda m, g: 0.9 * m + g, state, grads)
    return tree_map(lambda m: -0.1 * m, state), state


class State(NamedTuple):
    """Like the parameters, of other shapes, None for some, numbers of each parameter, and a number."""

    m: object
    rows: object
    norms: object
    count: torch.Tensor


def rows_init(params):
    rows = tree_map(
        lambda x: torch.zeros(x.shape[:1], dtype=x.dtype) if x.ndim > 1 else torch.zeros_like(x),
        params,
    )
    norms = tree_map(lambda x: torch.zeros((), dtype=x.dtype), params)
    return State(tree_map(torch.zeros_like, params), rows, norms, torch.zeros(()))


def rows_update(grads, state, params):
    """Divides by row norms, and by a ratio of sizes that is no number without elements."""
    count = state.count + 1
    m = tree_map(lambda m, g: m + g, state.m, grads)
    rows = tree_map(
        lambda r, g: r + (g.square().flatten(1).sum(1) if g.ndim > 1 else g.square()),
        state.rows,
        grads,
    )
    norms = tree_map(lambda n, g: n + g.norm(), state.norms, grads)

    def move(x, r, n):
        shape = x.shape if x.ndim > 1 and x.numel() else (1, 1)
        return -0.1 * max(1, shape[0] / shape[1]) * x / (1 + r.sum() + n)

    updates = tree_map(move, m, rows, norms)
    return tree_map(lambda x: x / count.item(), updates), State(m, rows, norms, count)


MOMENTUM = optim.Optimizer(momentum_init, momentum_update, sharding="flat")


ROWS = optim.Optimizer(rows_init, rows_update)
