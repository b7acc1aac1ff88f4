"""Combinators: compressors around a compressor, which keep what it has not sent.

A residual is a sum not yet made: the total of these residuals over devices is what is missing in the totals.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fshard.comm.compressor import Compressor, Reduced
from fshard.mesh.collectives.api import axis_size
from fshard.mesh.layout import Axes, PyTree, flatten, map_leaves, unflatten
from fshard.optim.arguments import validate, within


def _combined(function: object, tree: PyTree, *trees: PyTree) -> PyTree:
    """Apply a function to the leaves of trees of one structure."""
    assert callable(function)
    leaves, structure = flatten(tree)
    return unflatten(structure, [*map(function, leaves, *(flatten(each)[0] for each in trees))])


def _zeros(params: PyTree) -> PyTree:
    return map_leaves(lambda x: torch.zeros_like(x, requires_grad=False), params)


def _around(compress: Compressor, init: Callable[[PyTree], PyTree], reduce: Callable[..., Reduced]) -> Compressor:
    return Compressor(init, reduce, compress.full)


def error_feedback(compress: Compressor, *, decay: float = 1.0) -> Compressor:
    """Add what was not sent in a step to the next gradient (Seide 2014, Karimireddy 2019).

    Args:
        compress: any compressor.
        decay: factor of what was not sent, below 1 to forget it.
    """
    validate("error_feedback", within("[0, 1]", decay=decay))

    @torch.no_grad()
    def reduce(grads: PyTree, state: PyTree, axis: Axes) -> Reduced:
        wanted = _combined(torch.add, grads, state["residual"])
        total, sent, inner = compress.reduce(wanted, state["inner"], axis)
        residual = _combined(lambda x, y: (x - y) * decay, wanted, sent)
        return Reduced(total, sent, {"inner": inner, "residual": residual})

    return _around(compress, lambda params: {"inner": compress.init(params), "residual": _zeros(params)}, reduce)


def ef21(compress: Compressor) -> Compressor:
    """Send the change of an estimate of this device's gradient; the total is that of the estimates (Richtarik 2021)."""

    @torch.no_grad()
    def reduce(grads: PyTree, state: PyTree, axis: Axes) -> Reduced:
        change = _combined(torch.sub, grads, state["estimate"])
        total, sent, inner = compress.reduce(change, state["inner"], axis)
        estimate, n = _combined(torch.add, state["estimate"], sent), axis_size(axis)
        share = _combined(lambda x, y: x + y / n, state["share"], total)  # of the total of all estimates
        return Reduced(
            map_leaves(lambda x: x * n, share), estimate, {"inner": inner, "estimate": estimate, "share": share}
        )

    return _around(
        compress,
        lambda params: {"inner": compress.init(params), "estimate": _zeros(params), "share": _zeros(params)},
        reduce,
    )


def momentum_corrected(compress: Compressor, momentum: float = 0.9) -> Compressor:
    """Apply momentum before compression; what is sent restarts it (Deep Gradient Compression, Lin 2018).

    It takes the place of the optimizer's momentum: use plain SGD behind it.
    """
    validate("momentum_corrected", within("[0, 1)", momentum=momentum))

    def restarted(x: Tensor, sent: Tensor) -> Tensor:
        return torch.where(sent != 0, torch.zeros_like(x), x)

    @torch.no_grad()
    def reduce(grads: PyTree, state: PyTree, axis: Axes) -> Reduced:
        velocity = _combined(lambda u, g: momentum * u + g, state["velocity"], grads)
        wanted = _combined(torch.add, state["residual"], velocity)
        total, sent, inner = compress.reduce(wanted, state["inner"], axis)
        residual, velocity = _combined(torch.sub, wanted, sent), _combined(restarted, velocity, sent)
        return Reduced(total, sent, {"inner": inner, "velocity": velocity, "residual": residual})

    return _around(
        compress,
        lambda params: {"inner": compress.init(params), "velocity": _zeros(params), "residual": _zeros(params)},
        reduce,
    )


def delayed(compress: Compressor, steps: int = 1) -> Compressor:
    """Reduce the gradients of some steps before; the first totals are zero.

    Gradients that wait count as sent: put `error_feedback` inside.
    """
    validate("delayed", within("[1, inf)", integer=True, steps=steps))

    @torch.no_grad()
    def reduce(grads: PyTree, state: PyTree, axis: Axes) -> Reduced:
        first, *others = state["waiting"]
        total, _, inner = compress.reduce(first, state["inner"], axis)
        return Reduced(total, grads, {"inner": inner, "waiting": [*others, grads]})

    return _around(
        compress,
        lambda params: {"inner": compress.init(params), "waiting": [_zeros(params) for _ in range(steps)]},
        reduce,
    )
