"""Combinators: compressors around a compressor, which keep what it has not sent.

A residual is a sum not yet made: the total of these residuals over devices is missing in the
totals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from fshard.comm.compressor import Compressor, Phases, Reduced
from fshard.mesh.collectives.on_trees import Handle
from fshard.mesh.layout import Axes, PyTree, map_leaves
from fshard.optim.arguments import validate, within


def _combinator(
    compress: Compressor,
    phases: Callable[..., Phases],
    *names: str,
    totals: Sequence[str] = (),
    early: Callable[[PyTree, Axes], Handle] | None = None,
) -> Compressor:
    """Return a compressor around a compressor.

    Args:
        compress: the inner compressor.
        phases, early: of the outer one.
        names: of trees in its state that have the parameters' structure, and begin as zeros.
        totals: those of them that are equal on all devices.
    """

    def zeros(x: Tensor) -> Tensor:
        return torch.zeros_like(x, requires_grad=False)

    def init(params: PyTree) -> PyTree:
        state: dict[str, PyTree] = {"inner": compress.init(params)}
        for name in names:
            state[name] = map_leaves(zeros, params)
        return state

    all_totals = (*compress.totals, *totals)
    return Compressor(init, phases, compress.full, early=early, totals=all_totals)


def error_feedback(compress: Compressor, *, decay: float = 1.0) -> Compressor:
    """Add what was not sent in a step to the next gradient (Seide 2014, Karimireddy 2019).

    Args:
        compress: any compressor.
        decay: factor of what was not sent, below 1 to forget it.
    """
    validate("error_feedback", within("[0, 1]", decay=decay))

    def phases(grads: PyTree, state: PyTree, axis: Axes) -> Phases:
        target = map_leaves(torch.add, grads, state["residual"])
        total, sent, inner = yield compress.start(target, state["inner"], axis)
        residual = map_leaves(lambda x, y: (x - y) * decay, target, sent)
        return Reduced(total, sent, {"inner": inner, "residual": residual})

    return _combinator(compress, phases, "residual")


def ef21(compress: Compressor) -> Compressor:
    """Send the change of an estimate of this device's gradient (Richtarik 2021).

    The total is that of the estimates.
    """

    def phases(grads: PyTree, state: PyTree, axis: Axes) -> Phases:
        change = map_leaves(torch.sub, grads, state["estimate"])
        total_change, sent, inner = yield compress.start(change, state["inner"], axis)
        estimate = map_leaves(torch.add, state["estimate"], sent)
        total = map_leaves(torch.add, state["total"], total_change)
        return Reduced(total, estimate, {"inner": inner, "estimate": estimate, "total": total})

    return _combinator(compress, phases, "estimate", "total", totals=["total"])


def momentum_corrected(compress: Compressor, momentum: float = 0.9) -> Compressor:
    """Apply momentum before compression; what is sent restarts it (Lin 2018, DGC).

    It takes the place of the optimizer's momentum: use plain SGD behind it.
    """
    validate("momentum_corrected", within("[0, 1)", momentum=momentum))
    feedback = error_feedback(compress)

    def phases(grads: PyTree, state: PyTree, axis: Axes) -> Phases:
        velocity = map_leaves(lambda u, g: momentum * u + g, state["velocity"], grads)
        total, sent, inner = yield feedback.start(velocity, state["inner"], axis)
        velocity = map_leaves(lambda u, y: u.where(y == 0, 0), velocity, sent)
        return Reduced(total, sent, {"inner": inner, "velocity": velocity})

    return _combinator(feedback, phases, "velocity")


def delayed(compress: Compressor, steps: int = 1) -> Compressor:
    """Reduce the gradients of some steps before, while the next are computed.

    The first totals are zero. `train_step` starts the reduction before the forward, and waits for
    it after the backward. Gradients that wait count as sent: put `error_feedback` inside.
    """
    validate("delayed", within("[1, inf)", integer=True, steps=steps))
    names = [f"queue_{step}" for step in range(steps)]
    oldest = names[0]

    def early(state: PyTree, axis: Axes) -> Handle:
        return compress.start(state[oldest], state["inner"], axis)

    def phases(grads: PyTree, state: PyTree, axis: Axes, handle: Handle | None = None) -> Phases:
        total, _, inner = yield handle or early(state, axis)
        next_state = {"inner": inner}
        for name, next_name in pairwise(names):
            next_state[name] = state[next_name]
        next_state[names[-1]] = grads
        return Reduced(total, grads, next_state)

    return _combinator(compress, phases, *names, early=early)
