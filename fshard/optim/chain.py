"""Transformations of gradients, and `chain`, which composes them with an optimizer.

    clip_by_global_norm(1.0) ─> add_decayed_weights(0.1) ─> sgd(0.1)          each has its own entry in the state

The last one determines the kind: with a writer at the end a chain is a writer, whose `step` is the writer's.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import torch
from torch import Tensor

from fshard.mesh.layout import PyTree
from fshard.optim.contract import (
    Elementwise,
    Optimizer,
    Update,
    above,
    elementwise_leaves,
    finite,
    refuse,
    refuse_scaled,
    scale_inside,
    within,
)
from fshard.optim.leaves import Leaf, Leaves, count_from_zero, each_shard, map_shards, trainable
from fshard.optim.norms import global_norm
from fshard.optim.plain import inside
from fshard.optim.rules import lists
from fshard.optim.schedules import Rate, rate_at


def chain(*optimizers: Optimizer) -> Optimizer:
    """Apply transformations in sequence; the state is the tuple of theirs.

    >>> import torch, fshard.optim as optim
    >>> opt = chain(clip_by_value(1.0), optim.sgd(0.5))
    >>> params, _ = opt.step([torch.tensor([8.0])], opt.init([torch.ones(1)]), [torch.ones(1)])
    >>> params
    [tensor([0.5000])]
    """
    transforms = [inside(one, "chain") for one in optimizers]
    refuse_scaled("chain", transforms[1:], "the transformations before it would get gradients that are still scaled")

    def init(params: PyTree) -> PyTree:
        return tuple(one.init(params) for one in transforms)

    def through(last: Callable[[Optimizer], Update]) -> Update:
        def run(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
            after: list[Any] = []
            for place, (one, own) in enumerate(zip(transforms, state, strict=True)):
                act = last(one) if place == len(transforms) - 1 else one.update
                grads, own = act(grads, own, params)
                after.append(own)
            return grads, tuple(after)

        return run

    writes = transforms and transforms[-1].step
    step = through(lambda one: one.step or one.update) if writes else None
    elementwise = _jointly([one.elementwise for one in transforms])
    loss_scale = scale_inside(transforms[0], 0) if transforms else None
    return Optimizer(init, through(lambda one: one.update), step, elementwise, loss_scale, arrays=True)


def _jointly(flags: list[Elementwise]) -> Elementwise:
    """Return True if all are elementwise, per leaf where one of them differs by leaf."""
    if not any(map(callable, flags)):
        return all(flags)
    return lambda params: [
        all(column) for column in zip(*(elementwise_leaves(one, params) for one in flags), strict=True)
    ]


def scale(factor: Rate) -> Optimizer:
    """Multiply gradients by a number, or by a schedule of numbers.

    >>> import torch
    >>> opt = scale(lambda count: count + 2.0)
    >>> grads, state = opt.update([torch.ones(1)], opt.init([torch.ones(1)]), [torch.ones(1)])
    >>> grads, state
    ([tensor([2.])], {'count': tensor(1)})
    """

    refuse("scale", finite(factor=factor))

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        by = rate_at(factor, int(state["count"]))
        return each_shard(lambda grad: grad * by, grads), {"count": state["count"] + 1}

    return Optimizer(
        lambda params: {"count": count_from_zero()}, torch.no_grad()(update), elementwise=True, arrays=True
    )


def clip_by_value(limit: float) -> Optimizer:
    """Keep every element of the gradients between -limit and limit (of complex ones, both parts).

    >>> import torch
    >>> clip_by_value(1.0).update([torch.tensor([3.0, -2.0, 0.5])], (), None)[0]
    [tensor([ 1.0000, -1.0000,  0.5000])]
    """

    refuse("clip_by_value", within(0, inf, limit=limit))

    return _stateless(lambda grads, params: each_shard(lambda grad: _clipped(grad, limit), grads))


def clipped_if_finite(grads: PyTree, limit: float) -> PyTree:
    """Return gradients clipped by value, with infinite elements unchanged: loss scaling must detect these.

    >>> clipped_if_finite([torch.tensor([3.0, torch.inf])], 1.0)
    [tensor([1., inf])]
    """
    return each_shard(lambda grad: torch.where(grad.isinf(), grad, _clipped(grad, limit)), grads)


def _clipped(grad: Tensor, limit: float) -> Tensor:
    if grad.is_complex():
        return torch.view_as_complex(torch.view_as_real(grad.resolve_conj()).clamp(-limit, limit))
    return grad.clamp(-limit, limit)


def clip_by_global_norm(max_norm: float, order: float = 2) -> Optimizer:
    """Scale the gradients so that their total norm is at most `max_norm`, whatever their layouts.

    Communicates as `global_norm` does. The factor is that of torch.nn.utils.clip_grad_norm_. It counts as elementwise,
    since it does the same on any shards.

    >>> import torch
    >>> clip_by_global_norm(1.0).update([torch.tensor([3.0]), torch.tensor([4.0])], (), None)[0]
    [tensor([0.6000]), tensor([0.8000])]
    """

    refuse("clip_by_global_norm", within(0, inf, max_norm=max_norm), above(0, order=order))
    return _stateless(lambda grads, params: shrunk(grads, global_norm(grads, order), max_norm))


def shrunk(grads: PyTree, norm: Tensor, max_norm: float) -> PyTree:
    """Return gradients of some norm with one that is at most `max_norm`."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if factor.is_cpu and bool(factor == 1.0):  # available without waiting for a device
        return grads
    return each_shard(lambda grad: grad * factor.to(grad.device, grad.dtype), grads)


def add_decayed_weights(decay: float) -> Optimizer:
    """Add to each gradient its parameter times `decay`: the gradient of half the sum of squares.

    >>> import torch
    >>> add_decayed_weights(0.5).update([torch.ones(1)], (), [torch.tensor([4.0])])[0]
    [tensor([3.])]
    """

    refuse("add_decayed_weights", finite(decay=decay))

    def decayed(grads: PyTree, params: PyTree) -> PyTree:
        at = Leaves.of(params)
        return at.mapped(_decayed, at.gradients(grads))

    def _decayed(param: Leaf, grad: Leaf) -> Leaf:
        moved = grad is not None and trainable(param)
        return map_shards(_sum, grad, param) if moved else grad

    def _sum(grad: Tensor, param: Tensor) -> Tensor:
        return lists.add_multiple([grad], [param.detach().to(grad.dtype)], decay)[0]

    return _stateless(decayed)


def _stateless(transform: Callable[[PyTree, PyTree], PyTree]) -> Optimizer:
    """Make a transformation of a function of gradients and parameters."""

    @torch.no_grad()
    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        return transform(grads, params), state

    return Optimizer(lambda params: (), update, elementwise=True, arrays=True)
