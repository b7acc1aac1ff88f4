"""Dynamic loss scaling: prevents underflow of float16 gradients by scaling the loss, and overflow by a smaller scale.

loss x scale ─> backward in float16 ─> gradients / scale ─> the optimizer
an infinite gradient anywhere: no step on any device, and a smaller scale
many finite steps in a row: a larger scale

Skip a step whose gradients are not finite, on all devices or on none.

The number of bad shards is summed over the mesh before any device takes the step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fshard.mesh.layout import PyTree
from fshard.optim.contract import (
    Optimizer,
    Update,
    above,
    below,
    count_from,
    no_updates,
    refuse,
    refuse_scaled,
)
from fshard.optim.leaves import Leaves, count_from_zero, each_shard, shards_of
from fshard.optim.norms import Places, check_summable, largest, sum_over_mesh
from fshard.optim.plain import inside


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
    """Make an optimizer of gradients of a scaled loss.

    `train_step` reads the scale from the state and applies it. A gradient that is taken without `train_step` must be
    that of the scaled loss, `value_and_grad(...)(params, batch, scale=opt.loss_scale(state))`: steps are too small
    otherwise.

    Args:
        opt: the optimizer, with its chain: it gets unscaled gradients. `ema`, `accumulate`, `masked` and
            `with_master_weights` may also wrap the result.
        initial: the first scale. Powers of two change no bit of a gradient.
        growth: factor of the scale after `interval` finite steps in a row.
        backoff: factor after `hysteresis` steps that were not finite.
        interval: see growth.
        hysteresis: see backoff; growing restores it.
        smallest: the least scale.
        largest: the greatest scale.

    Communicates as `skip_if_not_finite`, and the host waits for that once a step. state["skipped"] counts.

    >>> import torch, fshard.optim as optim
    >>> opt = loss_scaled(optim.sgd(1.0), initial=8.0)
    >>> params, state = opt.step([torch.tensor([8.0])], opt.init([torch.ones(1)]), [torch.ones(1)])
    >>> params, state["scale"]
    ([tensor([0.])], tensor(8.))
    >>> params, state = opt.step([torch.tensor([torch.inf])], state, params)
    >>> params, state["scale"], state["skipped"]
    ([tensor([0.])], tensor(4.), tensor(1))
    """
    order = f"smallest={smallest}, initial={initial}, largest={largest} out of order"
    refuse(
        "loss_scaled",
        above(1, growth=growth),
        above(0, backoff=backoff),
        below(1, backoff=backoff),
        count_from(1, interval=interval, hysteresis=hysteresis),
        [order] * (not 0 < smallest <= initial <= largest),
    )
    opt = inside(opt, "loss_scaled")
    refuse_scaled("loss_scaled", [opt], "gradients would be divided twice")

    def init(params: PyTree) -> PyTree:
        counts = {"finite": count_from_zero(), "patience": count_from_zero() + hysteresis, "skipped": count_from_zero()}
        return {"scale": torch.tensor(float(initial))} | counts | {"inner": opt.init(params)}

    def after(state: PyTree, finite: bool, inner: PyTree) -> PyTree:
        scale, good, patience = float(state["scale"]), int(state["finite"]) + 1, int(state["patience"])
        if not finite:
            scale, good, patience = (scale, 0, patience - 1) if patience > 1 else (max(scale * backoff, smallest), 0, 1)
        elif good >= interval:
            scale, good, patience = min(scale * growth, largest), 0, hysteresis
        counts = {"finite": count_from_zero() + good, "patience": count_from_zero() + patience}
        return {"scale": torch.tensor(scale)} | counts | {"skipped": state["skipped"] + (not finite), "inner": inner}

    def divided(grads: PyTree, state: PyTree) -> PyTree:
        scale = float(state["scale"])
        return each_shard(lambda x: x / scale, grads)

    update, step = if_finite(opt, after, divided)
    return Optimizer(init, update, step, opt.elementwise, lambda state: state["scale"], arrays=True)


def held_by(dtype: torch.dtype, scale: float) -> float:
    """Return a scale, halved until it is finite in this dtype: a 16-bit loss can be multiplied by it.

    >>> held_by(torch.float16, 2.0**16), held_by(torch.float32, 2.0**16)
    (32768.0, 65536.0)
    """
    while scale > torch.finfo(dtype).max:
        scale /= 2
    return scale


def skip_if_not_finite(opt: Optimizer) -> Optimizer:
    """Keep parameters and state unchanged when any gradient, on any device, is infinite or nan.

    Communicates a `psum` of 8 bytes over the axes that shard any gradient; the host waits for the result.
    state["skipped"] counts the skipped steps.

    >>> import torch, fshard.optim as optim
    >>> opt = skip_if_not_finite(optim.sgd(0.5))
    >>> params, state = opt.step([torch.tensor([torch.inf])], opt.init([torch.ones(1)]), [torch.ones(1)])
    >>> params, state["skipped"]
    ([tensor([1.])], tensor(1))
    """

    opt = inside(opt, "skip_if_not_finite")
    refuse_scaled("skip_if_not_finite", [opt], "the scale would never learn of the steps that are skipped")

    def init(params: PyTree) -> PyTree:
        return {"skipped": count_from_zero(), "inner": opt.init(params)}

    def after(state: PyTree, finite: bool, inner: PyTree) -> PyTree:
        return {"skipped": state["skipped"] + (not finite), "inner": inner}

    update, step = if_finite(opt, after, lambda grads, state: grads)
    return Optimizer(init, update, step, opt.elementwise, arrays=True)


def if_finite(
    opt: Optimizer, after: Callable[[PyTree, bool, PyTree], PyTree], given: Callable[[PyTree, PyTree], PyTree]
) -> tuple[Update, Update | None]:
    """Return an update and a step that act only if gradients are finite, on any state that has an "inner" one.

    Args:
        opt: the inner optimizer.
        after: from the state, whether gradients were finite, and the next inner state, to the next state.
        given: from gradients and state to the gradients that `opt` gets.
    """

    def guarded(act: Update, otherwise: Callable[[PyTree, PyTree], PyTree]) -> Update:
        @torch.no_grad()
        def run(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
            if not all_finite(grads):
                return otherwise(grads, params), after(state, False, state["inner"])
            result, inner = act(given(grads, state), state["inner"], params)
            return result, after(state, True, inner)

        return run

    update = guarded(opt.update, lambda grads, params: no_updates(grads))
    return update, guarded(opt.step, lambda grads, params: params) if opt.step else None


@torch.no_grad()
def all_finite(tree: PyTree) -> bool:
    """Return True if every element of a tree is finite on all devices; equal on all devices."""
    at = Leaves.of(tree)
    check_summable("all_finite", at)
    leaves = [leaf for leaf in at.leaves if leaf is not None]
    if not leaves:
        return True
    near = shards_of(leaves[0])[0].device

    def bad(places: Places) -> Tensor:
        found = largest([shards_of(leaves[i])[at] for i, at in places], near)
        return (~found.isfinite()).sum(0, keepdim=True).double()

    total = sum_over_mesh(leaves, bad)
    return total.is_meta or not total.any().item()
