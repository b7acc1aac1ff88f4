"""Skipping a step whose gradients are not finite, on all devices or on none.

What one device finds, all must know before any of them moves: the numbers of bad shards are added up over the mesh.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fshard.mesh.tree import PyTree
from fshard.optim.contract import Optimizer, Update, check_inside, no_updates, refuse_scaled
from fshard.optim.leaves import Leaves, count_from_zero, shards_of
from fshard.optim.norms import Places, check_summable, largest, sum_over_mesh
from fshard.optim.plain import on_arrays


def skip_if_not_finite(opt: Optimizer) -> Optimizer:
    """Leave parameters and state as they are when any gradient, on any device, is infinite or not a number.

    Communicates a `psum` of 8 bytes over the axes along which any gradient is cut; the host waits for the answer.
    state["skipped"] counts how often that happened.

    >>> import torch, fshard.optim as optim
    >>> opt = skip_if_not_finite(optim.sgd(0.5))
    >>> params, state = opt.step([torch.tensor([torch.inf])], opt.init([torch.ones(1)]), [torch.ones(1)])
    >>> params, state["skipped"]
    ([tensor([1.])], tensor(1))
    """

    check_inside("skip_if_not_finite", opt)
    opt = on_arrays(opt, "skip_if_not_finite")
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
        opt: what acts.
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
    """Return whether every element of a tree is a finite number, on all devices; all get the same answer."""
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
