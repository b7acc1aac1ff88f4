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
    """The moments of a layer for one batch.

    The running statistics, the weight with which the batch enters them, and the sums of the batch
    (`sums_of`).
    """

    running_mean: Tensor
    running_var: Tensor
    weight: float | Tensor
    sums: Tensor


def _record_moments(layer: Any, x: Tensor) -> None:
    """Record the moments of a layer's input, after its forward."""
    scope = here()
    moments = None if scope is None else scope.slice.moments
    if moments is not None and layer.training and layer.running_mean is not None:
        sums = sums_of(x.detach())
        weight = _weight_of_batch(layer)
        moments.append(Moments(layer.running_mean, layer.running_var, weight, sums))


def _weight_of_batch(layer: Any) -> float | Tensor:
    """Return the weight with which the current batch enters running statistics.

    Without a momentum they are the mean over all batches so far.
    """
    if layer.momentum is None:
        return 1 / layer.num_batches_tracked.double()
    return layer.momentum


def synchronise(module: nn.Module, axis: Axes | None) -> Callable[..., Any] | None:
    """Return a forward that takes a BatchNorm's statistics over all devices along `axis`.

    Without an axis it is the layer's own; None for modules that are no norm.
    """
    # The module has this forward as an attribute: a strong reference would be a cycle.
    if axis is not None and isinstance(module, _BatchNorm):
        return partial(_synchronised_forward, weakref.ref(module), axis)
    if isinstance(module, _NormBase):
        return partial(_local_forward, weakref.ref(module))
    return None


def _local_forward(reference: weakref.ref[_NormBase], x: Tensor) -> Tensor:
    layer = reference()
    y = local_forward(layer, x)
    if isinstance(layer, _BatchNorm):
        _record_moments(layer, x)
    return y


def local_forward(layer: Any, x: Tensor) -> Tensor:
    """Call a layer with its weights in the dtype of its statistics.

    Torch takes no mixture of 16 bits and 32.
    """
    slots = vars(layer)["_parameters"]
    params = dict(slots)
    statistics = layer.running_mean
    if statistics is not None:
        for name, weight in params.items():
            if weight is not None and weight.dtype != statistics.dtype:
                slots[name] = weight.to(statistics.dtype)
    try:
        return type(layer).forward(layer, x)
    finally:
        slots.update(params)


def _synchronised_forward(reference: weakref.ref[_BatchNorm], axis: Axes, x: Tensor) -> Tensor:
    layer: Any = reference()
    is_evaluated = not layer.training and layer.running_mean is not None
    if here() is None or is_evaluated:
        return local_forward(layer, x)  # one device, or statistics that are there already
    layer._check_input_dim(x)
    mean, variance, count = moments(x, axis)  # (channels), (channels), ()
    if layer.training and layer.track_running_stats and layer.running_mean is not None:
        layer.num_batches_tracked.add_(1)
        weight: Any = _weight_of_batch(layer)
        unbiased = variance.detach() * (count / (count - 1).clamp(min=1))
        for running, new in ((layer.running_mean, mean.detach()), (layer.running_var, unbiased)):
            running.mul_(1 - weight).add_(weight * new.to(running.dtype))
        _record_moments(layer, x)

    # Sums over devices are replicated; their cotangents are summed where each device uses them.
    mean, variance = pvary((mean, variance), axis)
    compute = torch.promote_types(x.dtype, torch.float32)
    shape = [1, -1] + [1] * (x.ndim - 2)
    scale = torch.rsqrt(variance + layer.eps).to(compute)
    y = (x - mean.to(compute).view(shape)) * scale.view(shape)
    if layer.affine:
        y = y * layer.weight.view(shape) + layer.bias.view(shape)
    return y.to(x.dtype)


def moments(x: Tensor, axis: Axes) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and variance of every channel (dim 1) over the devices along `axis`.

    The count is returned too, all in float64. Sends 2(n-1)/n of 2 * channels + 1 numbers.

    >>> import torch, fshard as fs
    >>> def main():
    ...     x = torch.full((1, 1), float(fs.axis_index("data")))
    ...     return [m.item() for m in moments(x, "data")]
    >>> fs.run(main, mesh=fs.make_mesh({"data": 4}))[0]
    [1.5, 1.25, 4.0]
    """
    channels = x.shape[1]
    sums = sums_of(x)
    summed = plan_call("sync_batchnorm", sums, axis, lambda x, group: Psum(), equal="result").run()
    total, squares, count = summed.split([channels, channels, 1])
    mean = total / count
    return mean, squares / count - mean * mean, count[0]


def sums_of(x: Tensor) -> Tensor:
    """Return n m and n (v + m^2) of every channel, and n, in float64.

    They are the sums of x and x^2. Computed from the mean m and the variance v they lose no digits
    where the mean is large.
    """
    scope = here()
    if scope is not None and scope.slice.is_idle:
        x = x[:0]
    n = x.numel() // max(x.shape[1], 1)
    other_dims = [0, *range(2, x.ndim)]
    if n == 0:
        sums = x.sum(dim=other_dims).double()  # zeros connected to the graph
        return torch.cat([sums, sums, sums.new_zeros(1)])
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    variance, mean = torch.var_mean(wide, dim=other_dims, correction=0)
    v = variance.double()
    m = mean.double()
    return torch.cat([n * m, n * (v + m * m), m.new_full((1,), n)])
