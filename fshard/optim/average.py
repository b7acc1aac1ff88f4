"""A moving average of the parameters, in the state beside an optimizer's own: often better than the last ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fshard.errors import OptimizerError
from fshard.mesh.layout import PyTree
from fshard.optim.contract import Optimizer, apply_updates, copied, refuse, scale_inside, step_of, within
from fshard.optim.leaves import Leaves, map_shards, trainable
from fshard.optim.plain import inside


def ema(opt: Optimizer, decay: float) -> Optimizer:
    """Keep a moving average of the parameters: average = decay average + (1 - decay) params, after every step.

    `ema_params(state)` returns it.

    >>> import torch, fshard.optim as optim
    >>> opt = ema(optim.sgd(1.0), 0.5)
    >>> params, state = opt.step([torch.ones(1)], opt.init([torch.ones(1)]), [torch.ones(1)])
    >>> params, ema_params(state)
    ([tensor([0.])], [tensor([0.5000])])
    """
    refuse("ema", within(0, 1, decay=decay))
    opt = inside(opt, "ema")

    def init(params: PyTree) -> PyTree:
        return {"ema": copied(params), "inner": opt.init(params)}

    @torch.no_grad()
    def averaged(state: PyTree, params: PyTree, mix: Callable[[Tensor, Tensor], Tensor]) -> PyTree:
        at = Leaves.of(state["ema"])
        after = at.beside(params, "params")
        return at.mapped(lambda old, new: map_shards(mix, old, new) if trainable(new) else new, after)

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        updates, inner = opt.update(grads, state["inner"], params)
        after = apply_updates(params, updates)
        return updates, {"ema": averaged(state, after, lambda a, p: a.lerp(p, 1 - decay)), "inner": inner}

    def step(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        params, inner = step_of(opt)(grads, state["inner"], params)
        return params, {"ema": averaged(state, params, lambda a, p: a.lerp_(p, 1 - decay)), "inner": inner}

    return Optimizer(init, update, step, opt.elementwise, scale_inside(opt, "inner"), arrays=True)


def ema_params(state: PyTree) -> PyTree:
    """Return the averaged parameters from the state of an `ema`, or of a chain that has one in it."""
    found = _find(state)
    if found is None:
        raise OptimizerError("ema_params: there is no average in this state. Make the optimizer with ema(opt, decay).")
    return found


def _find(state: PyTree) -> PyTree | None:
    if isinstance(state, dict):
        if "ema" in state and "inner" in state:
            return state["ema"]
        state = tuple(state.values())
    inside = (_find(one) for one in state) if isinstance(state, tuple) else ()
    return next((found for found in inside if found is not None), None)
