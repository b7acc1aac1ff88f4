"""BatchNorm over the samples of all devices: one psum of 2 * channels + 1 numbers a layer."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase  # pyright: ignore[reportPrivateUsage]

from fshard.mesh.collectives.api import pvary
from fshard.mesh.collectives.moves import Psum
from fshard.mesh.collectives.on_trees import plan_call
from fshard.mesh.layout import Axes
from fshard.mesh.spmd.scope import here


class Moments(NamedTuple):
    """The running statistics of a layer, their weight for one batch, and the sums of that batch (`sums_of`)."""

    running_mean: Tensor
    running_var: Tensor
    weight: float | Tensor
    sums: Tensor


def _record_moments(layer: Any, x: Tensor) -> None:
    """Record the moments of a layer's input, after its forward."""
    scope = here()
    moments = None if scope is None else scope.slice.moments
    if moments is not None and layer.training and layer.running_mean is not None:
        weight = (
            1 / layer.num_batches_tracked.double() if layer.momentum is None else layer.momentum
        )
        moments.append(Moments(layer.running_mean, layer.running_var, weight, sums_of(x.detach())))


def synchronise(module: nn.Module, axis: Axes | None) -> Callable[..., Any] | None:
    """Return a forward that takes a BatchNorm's statistics over all devices along `axis`; None for other modules."""
    if axis is not None and isinstance(module, _BatchNorm):
        return partial(
            _synchronised_forward, weakref.ref(module), axis
        )  # weak, or it would refer to itself
    return partial(_local_forward, weakref.ref(module)) if isinstance(module, _NormBase) else None


def _local_forward(reference: weakref.ref[_NormBase], x: Tensor) -> Tensor:
    layer = reference()
    y = local_forward(layer, x)
    if isinstance(layer, _BatchNorm):
        _record_moments(layer, x)
    return y


def local_forward(layer: Any, x: Tensor) -> Tensor:
    """Call a layer with its weights in the dtype of its statistics: torch takes no mixture of 16 bits and 32."""
    slots = vars(layer)["_parameters"]
    params, statistics = dict(slots), layer.running_mean
    if statistics is not None:
        slots.update(
            {
                k: w.to(statistics.dtype)
                for k, w in params.items()
                if w is not None and w.dtype != statistics.dtype
            }
        )
    try:
        return type(layer).forward(layer, x)
    finally:
        slots.update(params)


def _synchronised_forward(reference: weakref.ref[_BatchNorm], axis: Axes, x: Tensor) -> Tensor:
    layer: Any = reference()
    if here() is None or (
        not layer.training and layer.running_mean is not None
    ):  # one device, or nothing to be taken over all
        return local_forward(layer, x)
    layer._check_input_dim(x)
    mean, variance, count = moments(x, axis)  # (channels), (channels), ()
    if layer.training and layer.track_running_stats and layer.running_mean is not None:
        batches = layer.num_batches_tracked
        batches.add_(1)
        weight: Any = 1 / batches.double() if layer.momentum is None else layer.momentum
        unbiased = variance.detach() * (count / (count - 1).clamp(min=1))
        for running, new in ((layer.running_mean, mean.detach()), (layer.running_var, unbiased)):
            running.mul_(1 - weight).add_(weight * new.to(running.dtype))
        _record_moments(layer, x)
    mean, variance = pvary((mean, variance), axis)
    compute = torch.promote_types(x.dtype, torch.float32)
    shape = [1, -1] + [1] * (x.ndim - 2)
    scale = torch.rsqrt(variance + layer.eps).to(compute)
    y = (x - mean.to(compute).view(shape)) * scale.view(shape)
    if layer.affine:
        y = y * layer.weight.view(shape) + layer.bias.view(shape)
    return y.to(x.dtype)


def moments(x: Tensor, axis: Axes) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and variance of every channel (dim 1) over the devices along `axis`, and the count, in float64.

    Sends 2(n-1)/n of 2 * channels + 1 numbers.

    >>> import torch, fshard as fs
    >>> def main():
    ...     x = torch.full((1, 1), float(fs.axis_index("data")))
    ...     return [m.item() for m in moments(x, "data")]
    >>> fs.run(main, mesh=fs.make_mesh({"data": 4}))[0]
    [1.5, 1.25, 4.0]
    """
    channels, sums = x.shape[1], sums_of(x)
    summed = plan_call("sync_batchnorm", sums, axis, lambda x, group: Psum(), equal="result").run()
    total, squares, count = summed.split([channels, channels, 1])
    mean = total / count
    return mean, squares / count - mean * mean, count[0]


def sums_of(x: Tensor) -> Tensor:
    """Return n m and n (v + m^2) of every channel, and n, in float64."""
    scope = here()
    x = x[:0] if scope is not None and scope.slice.is_idle else x
    n = x.numel() // max(x.shape[1], 1)
    if n == 0:
        sums = x.sum(dim=[0, *range(2, x.ndim)]).double()  # zeros connected to the graph
        return torch.cat([sums, sums, sums.new_zeros(1)])
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    v, m = torch.var_mean(wide, dim=[0, *range(2, x.ndim)], correction=0)
    v, m = v.double(), m.double()
    return torch.cat([n * m, n * (v + m * m), m.new_full((1,), n)])
