"""Dynamic loss scaling: gradients in float16 are kept from vanishing by scaling the loss, and from overflowing by watching.

loss x scale ─> backward in float16 ─> gradients / scale ─> the optimizer
an infinite gradient anywhere: no step on any device, and a smaller scale
many finite steps in a row: a larger scale
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fshard.errors import OptimizerError
from fshard.mesh.tree import PyTree
from fshard.optim.contract import Optimizer, Update, no_updates
from fshard.optim.finite import all_finite
from fshard.optim.leaves import Leaves, count_from_zero, map_shards


def loss_scaled(
    opt: Optimizer,
    *,
    initial: float = 2.0**16,
    growth: float = 2.0,
    backoff: float = 0.5,
    interval: int = 2000,
    hysteresis: int = 1,
    smallest: float = 1.0,
    largest: float = 2.0**24,
) -> Optimizer:
    """Let an optimizer take gradients of a scaled loss; `train_step` reads the scale from the state and applies it.

    Args:
        opt: the optimizer, with its chain: it gets gradients of the true size.
        initial: the scale to begin with.  Powers of two change no bit of a gradient.
        growth: what the scale is multiplied by after `interval` finite steps in a row.
        backoff: what it is multiplied by after `hysteresis` steps that were not finite.
        interval: see growth.
        hysteresis: see backoff; growing restores it.
        smallest: the least scale.
        largest: the greatest scale.

    Communicates what `skip_if_not_finite` does, and the host waits for that once a step.  state["skipped"] counts.

    >>> import torch, fshard.optim as optim
    >>> opt = loss_scaled(optim.sgd(1.0), initial=8.0)
    >>> params, state = opt.step([torch.tensor([8.0])], opt.init([torch.ones(1)]), [torch.ones(1)])
    >>> params, state["scale"]
    ([tensor([0.])], tensor(8.))
    >>> params, state = opt.step([torch.tensor([torch.inf])], state, params)
    >>> params, state["scale"], state["skipped"]
    ([tensor([0.])], tensor(4.), tensor(1))
    """
    wrong = [
        text
        for bad, text in [
            (growth <= 1, f"growth={growth} has to be above 1"),
            (not 0 < backoff < 1, f"backoff={backoff} has to lie between 0 and 1"),
            (interval < 1 or hysteresis < 1, f"interval={interval} and hysteresis={hysteresis} have to be at least 1"),
            (
                not 0 < smallest <= initial <= largest,
                f"smallest={smallest}, initial={initial}, largest={largest} out of order",
            ),
        ]
        if bad
    ]
    if wrong:
        raise OptimizerError(f"loss_scaled: {'; '.join(wrong)}.")

    def init(params: PyTree) -> PyTree:
        return {
            "scale": torch.tensor(float(initial)),
            "finite": count_from_zero(),
            "patience": count_from_zero() + hysteresis,
            "skipped": count_from_zero(),
            "inner": opt.init(params),
        }

    def after(state: PyTree, finite: bool, inner: PyTree) -> PyTree:
        """Return the next state."""
        scale, good, patience = float(state["scale"]), int(state["finite"]), int(state["patience"])
        if finite:
            good += 1
            if good >= interval:
                scale, good, patience = min(scale * growth, largest), 0, hysteresis
        else:
            good, patience = 0, patience - 1
            if patience < 1:
                scale, patience = max(scale * backoff, smallest), 1
        zero = count_from_zero()
        return {
            "scale": torch.tensor(scale),
            "finite": zero + good,
            "patience": zero + patience,
            "skipped": state["skipped"] + (not finite),
            "inner": inner,
        }

    def scaled(otherwise: Callable[[PyTree, PyTree], PyTree], act: Update) -> Update:
        @torch.no_grad()
        def run(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
            finite = all_finite(grads)
            if not finite:
                return otherwise(grads, params), after(state, finite, state["inner"])
            result, inner = act(_divided(grads, float(state["scale"])), state["inner"], params)
            return result, after(state, finite, inner)

        return run

    update = scaled(lambda grads, params: no_updates(grads), opt.update)
    step = scaled(lambda grads, params: params, opt.step) if opt.step else None
    return Optimizer(init, update, step, opt.elementwise, _scale_of)


def _scale_of(state: PyTree) -> Tensor:
    return state["scale"]


def _divided(grads: PyTree, scale: float) -> PyTree:
    at = Leaves.of(grads)
    return at.mapped(lambda leaf: None if leaf is None else map_shards(lambda x: x / scale, leaf))
