"""Dynamic loss scaling, and skipped steps: `loss_scaled` and `skip_if_not_finite`.

loss x scale ─> backward in float16 ─> gradients / scale ─> the optimizer
an infinite gradient anywhere: no step on any device, and a smaller scale
many finite steps in a row: a larger scale

The number of shards that are not finite is summed over the mesh before any device takes the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fshard.errors import OptimizerError
from fshard.mesh.layout import PyTree
from fshard.mesh.layout.sharded import Sharded
from fshard.optim.arguments import validate, within
from fshard.optim.contract import Optimizer, conditional
from fshard.optim.leaves import Leaves, count_from_zero, each_list
from fshard.optim.nesting import inner_optimizer
from fshard.optim.norms import check_summable, device_of_sums, largest_each, sum_over_mesh
from fshard.optim.rules import foreach


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
    """Divide gradients of a scaled loss by the scale, and adapt it: updates of opt(grads / scale).

    scale = backoff scale    if any gradient is not finite: then parameters do not change
            growth scale     after `interval` steps

    `train_step` reads the scale from the state and applies it: to a loss in float16 at most 2^15,
    to which it then sets the scale of the state. A gradient that is taken without `train_step` must
    be that of the scaled loss, `value_and_grad(...)(params, batch, scale=opt.loss_scale(state))`:
    steps are too small otherwise. If that loss is in float16, give `largest=2.0**15`.

    Args:
        opt: the optimizer, with its chain and wrappers: it gets unscaled gradients, those of 16
            bits in float32.
        initial: the first scale. Powers of two change no bit of a gradient.
        growth: factor of the scale after `interval` finite steps in a row.
        backoff: factor after `hysteresis` steps that were not finite.
        interval: see growth.
        hysteresis: see backoff; growing restores it.
        smallest: the least scale.
        largest: the greatest scale.

    Communicates as `skip_if_not_finite`, and the host waits for that once a step. state["skipped"]
    counts.

    >>> import torch, fshard.optim as optim
    >>> opt = loss_scaled(optim.sgd(1.0), initial=8.0)
    >>> params, state = opt.step([torch.tensor([8.0])], opt.init([torch.ones(1)]), [torch.ones(1)])
    >>> params, state["scale"]
    ([tensor([0.])], tensor(8.))
    >>> params, state = opt.step([torch.tensor([torch.inf])], state, params)
    >>> params, state["scale"], state["skipped"]
    ([tensor([0.])], tensor(4.), tensor(1))
    """
    errors: list[str] = []
    if not 0 < smallest <= initial <= largest:
        errors.append(
            f"smallest <= initial <= largest must hold, above 0; got {smallest}, {initial}, "
            f"{largest}"
        )
    validate(
        "loss_scaled",
        within("(1, inf)", growth=growth),
        within("(0, 1)", backoff=backoff),
        within("[1, inf)", integer=True, interval=interval, hysteresis=hysteresis),
        errors,
    )
    opt = inner_optimizer(opt, "loss_scaled")

    def entries(scale: float, finite: int, patience: int, skipped: Tensor) -> dict[str, PyTree]:
        counts = {"finite": count_from_zero() + finite, "patience": count_from_zero() + patience}
        return {"scale": torch.tensor(float(scale)), **counts, "skipped": skipped}

    def decide(grads: PyTree, state: PyTree) -> tuple[bool, PyTree, dict[str, PyTree]]:
        is_finite = all_finite(grads)
        if is_finite is None:
            return True, grads, _unknown_entries(state)
        scale = float(_scale_of(state))
        finite = int(state["finite"]) + 1
        patience = int(state["patience"])
        skipped = state["skipped"]
        if not is_finite:
            if patience > 1:
                return False, None, entries(scale, 0, patience - 1, skipped + 1)
            return False, None, entries(max(scale * backoff, smallest), 0, 1, skipped + 1)

        def unscaled(xs: list[Tensor]) -> Sequence[Tensor]:
            if xs[0].dtype.itemsize > 2:
                return foreach.div(xs, scale)
            wide = [torch.empty_like(x, dtype=torch.float32) for x in xs]
            foreach.copy_(wide, xs)
            foreach.div_(wide, scale)
            return wide

        after = entries(scale, finite, patience, skipped)
        if finite >= interval:
            after = entries(min(scale * growth, largest), 0, hysteresis, skipped)
        return True, each_list(unscaled, grads), after

    scaled = conditional(
        opt, lambda params: entries(initial, 0, hysteresis, count_from_zero()), decide
    )

    return replace(scaled, loss_scale=_scale_of)


def finite_scale(largest: float, scale: float) -> float:
    """Return a loss scale, halved until it is at most the largest number of the loss's dtype.

    >>> finite_scale(torch.finfo(torch.float16).max, 2.0**16)
    32768.0
    """
    while scale > largest:
        scale /= 2
    return scale


def lower_scale(scale: Tensor, before: float, largest: float) -> None:
    """Lower the next scale of a loss, in place, to one that follows from the applied scale.

    The scale of the state may be too large for the dtype of the loss, which is not known before the
    forward: `finite_scale` was applied. So backing off begins there, and growth ends there.

    Args:
        scale: that of the state after the update.
        before: that of the state before.
        largest: the largest number of the dtype of the loss.
    """
    after = float(scale)
    ratio = finite_scale(largest, before) / before
    lowered = finite_scale(largest, after * ratio)
    if lowered != after:
        scale.fill_(lowered)


def skip_if_not_finite(opt: Optimizer) -> Optimizer:
    """Keep parameters and state unchanged when any gradient, on any device, is infinite or nan.

    Communicates a `psum` of 8 bytes over the axes that shard any gradient; the host waits for the
    result. state["skipped"] counts the skipped steps.

    >>> import torch, fshard.optim as optim
    >>> opt = skip_if_not_finite(optim.sgd(0.5))
    >>> params = [torch.ones(1)]
    >>> params, state = opt.step([torch.tensor([torch.inf])], opt.init(params), params)
    >>> params, state["skipped"]
    ([tensor([1.])], tensor(1))
    """

    opt = inner_optimizer(opt, "skip_if_not_finite")

    def decide(grads: PyTree, state: PyTree) -> tuple[bool, PyTree, dict[str, PyTree]]:
        finite = all_finite(grads)
        if finite is None:
            return True, grads, _unknown_entries(state)
        if state["skipped"] is None:
            raise _unknown("skip_if_not_finite", "skipped")
        return finite, grads, {"skipped": state["skipped"] + (not finite)}

    skipping = conditional(opt, lambda params: {"skipped": count_from_zero()}, decide)
    return replace(skipping, uses_norm=opt.uses_norm)


def _scale_of(state: PyTree) -> Tensor:
    """Return the scale of the next loss."""
    if state["scale"] is None:
        raise _unknown("loss_scaled", "scale")
    return state["scale"]


def _unknown_entries(state: PyTree) -> dict[str, PyTree]:
    """Return the entries of a state that depend on values, of which there are none: None."""
    return {name: None for name in state if name != "inner"}


def _unknown(caller: str, name: str) -> OptimizerError:
    """Return the error of a state that was stepped outside of the mesh of its arrays."""
    return OptimizerError(
        f'{caller}: state["{name}"] must be a number; got None, since this process was outside of '
        "the mesh of the step. Write state = fs.broadcast_to(state, source=mesh), with the mesh of "
        "the step, on all processes."
    )


@torch.no_grad()
def all_finite(tree: PyTree) -> bool | None:
    """Return True if every element of a tree is finite, on all devices.

    The result is equal on all devices; None on processes outside of the mesh of its arrays.

    >>> all_finite([torch.ones(2), None]), all_finite([torch.ones(2), torch.tensor(torch.nan)])
    (True, False)
    """
    tree = Leaves.of(tree)
    check_summable("all_finite", tree)
    leaves = [leaf for leaf in tree.leaves if leaf is not None]
    if not leaves:
        return True
    first = leaves[0]
    if isinstance(first, Sharded) and not first.layout.mesh.is_member:
        return None
    device = device_of_sums(leaves)

    def count(shards: list[Tensor]) -> Tensor:
        return (~largest_each(shards, device).isfinite()).sum(0, keepdim=True).double()

    total = sum_over_mesh(leaves, count)()
    return total.is_meta or not total.any().item()
