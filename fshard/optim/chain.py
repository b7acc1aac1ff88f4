"""Transformations of gradients, and `chain`, which composes them with an optimizer.

    clip_by_global_norm(1.0) ─> add_decayed_weights(0.1) ─> sgd(0.1)   each has an entry in the state

With a writer at the end a chain is a writer, whose `step` is the writer's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fshard.memory.state import Update, at_once
from fshard.mesh.collectives.autograd import transformed
from fshard.mesh.layout import PyTree
from fshard.optim.arguments import validate, within
from fshard.optim.contract import Optimizer, step_of
from fshard.optim.leaves import (
    Leaf,
    Leaves,
    count_from_zero,
    differentiable,
    each_list,
    map_shards,
    trainable,
)
from fshard.optim.nesting import inner_optimizer
from fshard.optim.norms import global_norm
from fshard.optim.rules import foreach
from fshard.optim.schedules import Rate, rate_at
from fshard.optim.sharding import common_sharding


def chain(*optimizers: Optimizer) -> Optimizer:
    """Apply transformations in sequence: updates of opt_n(... opt_1(grads)).

    The state is the tuple of theirs.

    >>> import torch, fshard.optim as optim
    >>> opt = chain(clip_by_value(1.0), optim.sgd(0.5))
    >>> params, _ = opt.step([torch.tensor([8.0])], opt.init([torch.ones(1)]), [torch.ones(1)])
    >>> params
    [tensor([0.5000])]
    """
    links = [inner_optimizer(opt, "chain") for opt in optimizers]
    updates: list[Update] = [opt.update for opt in links]
    step = None
    if links and links[-1].step is not None:
        step = _in_sequence([*map(at_once, updates[:-1]), step_of(links[-1])])
    return Optimizer(
        init=lambda params: tuple([opt.init(params) for opt in links]),
        update=_in_sequence(updates),
        step=step,
        sharding=common_sharding([opt.sharding for opt in links]),
        takes="arrays",
        uses_norm=bool(links) and links[0].uses_norm,
    )


def _in_sequence(updates: list[Update]) -> Update:
    """Return the update that gives the results of each one to the next, as its gradients."""

    def run(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        after: list[Any] = []
        for update, entry in zip(updates, state, strict=True):
            grads, entry = update(grads, entry, params)
            after.append(entry)
        return grads, tuple(after)

    return run


def scale(factor: Rate) -> Optimizer:
    """Multiply gradients: grads * factor, or * factor(count of steps before) for a schedule.

    >>> import torch
    >>> opt = scale(lambda count: count + 2.0)
    >>> grads, state = opt.update([torch.ones(1)], opt.init([torch.ones(1)]), [torch.ones(1)])
    >>> grads, state
    ([tensor([2.])], {'count': tensor(1)})
    """
    validate("scale", within("(-inf, inf)", factor=factor))

    @differentiable
    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        number = rate_at(factor, int(state["count"]))
        scaled = each_list(lambda xs: foreach.mul(xs, number), grads)
        return scaled, {"count": state["count"] + 1}

    return Optimizer(
        init=lambda params: {"count": count_from_zero()},
        update=update,
        sharding="flat",
        takes="arrays",
    )


def clip_by_value(limit: float) -> Optimizer:
    """Clip every element of the gradients: max(-limit, min(limit, grad)).

    Of complex ones, both parts.

    >>> import torch
    >>> clip_by_value(1.0).update([torch.tensor([3.0, -2.0, 0.5])], (), None)[0]
    [tensor([ 1.0000, -1.0000,  0.5000])]
    """
    validate("clip_by_value", within("[0, inf]", limit=limit))
    return _stateless(lambda grads, params: clipped(grads, limit))


def clipped(grads: PyTree, limit: float, *, keep_infinite: bool = False) -> PyTree:
    """Return gradients clipped by value.

    With `keep_infinite`, infinite elements are unchanged: loss scaling must detect them.

    >>> clipped([torch.tensor([3.0, torch.inf])], 1.0, keep_infinite=True)
    [tensor([1., inf])]
    """

    def of_list(xs: list[Tensor]) -> Sequence[Tensor]:
        results = _clipped(xs, limit)
        if not keep_infinite:
            return results
        pairs = zip(xs, results, strict=True)
        return [torch.where(x.isinf(), x, result) for x, result in pairs]

    return each_list(of_list, grads)


def _clipped(xs: list[Tensor], limit: float) -> Sequence[Tensor]:
    """Clip a list of one device and dtype."""
    if xs[0].is_complex():
        parts = [torch.view_as_real(x.resolve_conj()) for x in xs]
        return [*map(torch.view_as_complex, _clipped(parts, limit))]
    results = foreach.clamp_min(xs, -limit)
    foreach.clamp_max_(results, limit)
    return results


def clip_by_global_norm(max_norm: float, order: float = 2) -> Optimizer:
    """Scale the gradients to a total norm of at most `max_norm`.

    grads * min(1, max_norm / (norm + 1e-6)): the factor is that of torch.nn.utils.clip_grad_norm_,
    for every layout. Communicates as `global_norm` does. It does the same on any shards, so they
    may be flat.

    >>> import torch
    >>> clip_by_global_norm(1.0).update([torch.tensor([3.0]), torch.tensor([4.0])], (), None)[0]
    [tensor([0.6000]), tensor([0.8000])]
    """
    validate(
        "clip_by_global_norm",
        within("[0, inf]", max_norm=max_norm),
        within("(0, inf]", order=order),
    )
    transform = _stateless(lambda grads, params: shrunk(grads, global_norm(grads, order), max_norm))
    return replace(transform, uses_norm=order == 2)


def shrunk(grads: PyTree, norm: Tensor, max_norm: float) -> PyTree:
    """Return gradients of some norm with one that is at most `max_norm`."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if transformed():
        # A product of arrays, whose gradient by the factor is the sum over all shards.
        return Leaves.of(grads).mapped(lambda grad: _times(grad, factor))
    # On a CPU the factor is there: to read it waits for no device.
    if factor.is_cpu and factor.item() == 1.0:
        return grads

    # Not in place: the gradients of an update are its caller's, and virtual devices may share them.
    def times_factor(xs: list[Tensor]) -> Sequence[Tensor]:
        # In the dtype of the gradients: for another one torch would launch a kernel for each.
        return foreach.mul(xs, factor.to(xs[0].device, xs[0].dtype))

    return each_list(times_factor, grads)


def _times(grad: Leaf, factor: Tensor) -> Leaf:
    return None if grad is None else grad * factor.to(grad.dtype)


def add_decayed_weights(decay: float) -> Optimizer:
    """Add the gradient of decay / 2 |params|^2: grads + decay * params.

    >>> import torch
    >>> add_decayed_weights(0.5).update([torch.ones(1)], (), [torch.tensor([4.0])])[0]
    [tensor([3.])]
    """
    validate("add_decayed_weights", within("(-inf, inf)", decay=decay))

    def decayed(param: Leaf, grad: Leaf) -> Leaf:
        if grad is None or not trainable(param):
            return grad
        return map_shards(total, grad, param)

    def total(grad: Tensor, param: Tensor) -> Tensor:
        return foreach.add_multiple([grad], [param.to(grad.dtype)], decay)[0]

    def on_trees(grads: PyTree, params: PyTree) -> PyTree:
        leaves = Leaves.of(params)
        return leaves.mapped(decayed, leaves.gradients(grads))

    return _stateless(on_trees)


def _stateless(transform: Callable[[PyTree, PyTree], PyTree]) -> Optimizer:
    """Make a transformation of a function of gradients and parameters."""

    @differentiable
    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        return transform(grads, params), state

    return Optimizer(init=lambda params: (), update=update, sharding="flat", takes="arrays")
