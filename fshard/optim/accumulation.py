"""Accumulation: one step for several gradients, with their mean.

count    1   2   3   4   5   6          every=3
sums     a  +b  +c   d  +e  +f
step             x           x          with (a + b + c) / 3, then with (d + e + f) / 3
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fshard.mesh.layout import PyTree
from fshard.optim.contract import Optimizer, Update, count_from, no_updates, refuse, scale_inside
from fshard.optim.leaves import Leaf, Leaves, count_from_zero, each_shard, map_shards, trainable
from fshard.optim.plain import inside


def accumulate(opt: Optimizer, every: int) -> Optimizer:
    """Pass the mean of several gradients to the inner optimizer; between its steps nothing changes.

    A parameter without a gradient in all of them has none in the mean; otherwise a missing gradient counts as 0.

    >>> import torch, fshard.optim as optim
    >>> opt = accumulate(optim.sgd(1.0), every=2)
    >>> params, state = [torch.ones(1)], opt.init([torch.ones(1)])
    >>> for grad in (1.0, 3.0):
    ...     params, state = opt.step([torch.tensor([grad])], state, params)
    ...     print(params)
    [tensor([1.])]
    [tensor([-1.])]
    """
    refuse("accumulate", count_from(1, every=every))
    opt = inside(opt, "accumulate")

    def init(params: PyTree) -> PyTree:
        at = Leaves.of(params)
        sums = at.mapped(lambda leaf: map_shards(torch.zeros_like, leaf) if trainable(leaf) else None)
        seen = at.mapped(lambda leaf: count_from_zero() if trainable(leaf) else None)
        return {"count": count_from_zero(), "seen": seen, "sums": sums, "inner": opt.init(params)}

    def mean(total: Leaf, seen: Leaf) -> Leaf:
        return map_shards(lambda x: x / every, total) if total is not None and int(seen) else None

    def at_last(otherwise: Callable[[PyTree, PyTree], PyTree], act: Update) -> Update:
        def run(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
            sums, seen = Leaves.of(state["sums"]), Leaves.of(state["seen"])
            given = sums.beside(grads, "grads")
            state = {
                "count": state["count"] + 1,
                "sums": sums.mapped(_added, given),
                "seen": seen.mapped(lambda n, grad: n if n is None or grad is None else n + 1, given),
                "inner": state["inner"],
            }
            if int(state["count"]) % every:
                return otherwise(grads, params), state
            means = Leaves.of(state["sums"]).mapped(mean, Leaves.of(state["seen"]).leaves)
            result, inner = act(means, state["inner"], params)
            none = {name: each_shard(torch.zeros_like, state[name]) for name in ("seen", "sums")}
            return result, state | none | {"inner": inner}

        return torch.no_grad()(run)

    update = at_last(lambda grads, params: no_updates(grads), opt.update)
    step = at_last(lambda grads, params: params, opt.step) if opt.step else None
    return Optimizer(init, update, step, opt.elementwise, scale_inside(opt, "inner"), arrays=True)


def _added(total: Leaf, grad: Leaf) -> Leaf:
    if total is None or grad is None:
        return total
    return map_shards(lambda x, g: x + g.detach().to(x.dtype), total, grad)
