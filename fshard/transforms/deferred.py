"""BatchNorm under microbatches: each is normalised by itself, and the running statistics see the whole batch, once a step.

    microbatch    y by its own mean m and variance v;  pending += (n m,  n (v + m^2),  n)
    commit        mean = S1 / S0,  variance = (S2 - S1 mean) / (S0 - 1),  one update of the running ones;  pending = 0

So one step counts as one, whatever the number of microbatches, and short ones have their weight.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from fshard.errors import ModuleError
from fshard.transforms.batchnorm import by_itself, sums_of
from fshard.transforms.patterns import parts_of

_PENDING = "pending"


def commit_batch_norm(module: nn.Module, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the buffers after a step, in which the running statistics know of all its microbatches.

    Args:
        module: which was functionalized with `deferred_batch_norm=True`.
        buffers: as `apply` has returned them for the last microbatch, to which it was given those of the one before, and so on.

    >>> import fshard as fs
    >>> layer = nn.BatchNorm1d(1, momentum=1.0)
    >>> apply, params, buffers = fs.functionalize(layer, deferred_batch_norm=True)
    >>> for microbatch in (torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0], [5.0]])):
    ...     _, buffers = apply(params, buffers, microbatch)
    >>> buffers = commit_batch_norm(layer, buffers)
    >>> buffers["running_mean"], buffers["running_var"], buffers["num_batches_tracked"]
    (tensor([3.]), tensor([2.5000]), tensor(1))
    """
    after = dict(buffers)
    for name, layer in _layers(module):
        prefix = f"{name}." if name else ""
        sums = after.get(prefix + _PENDING)
        if sums is None:
            raise ModuleError(
                f'commit_batch_norm: there is no buffers["{prefix}{_PENDING}"]. Give it those of '
                "fs.functionalize(module, deferred_batch_norm=True)."
            )
        counted = sums[-1] > 0
        total, squares, count = *sums[:-1].chunk(2), sums[-1].clamp(min=1)
        mean = total / count
        unbiased = (squares - total * mean) / (count - 1).clamp(min=1)
        batches = after[f"{prefix}num_batches_tracked"] + counted
        weight: Any = 1 / batches.double().clamp(min=1) if layer.momentum is None else layer.momentum
        for key, new in (("running_mean", mean), ("running_var", unbiased)):
            running = after[prefix + key]
            moved = (1 - weight) * running + weight * new.to(running.dtype)
            after[prefix + key] = torch.where(counted, moved.to(running.dtype), running)
        after |= {f"{prefix}num_batches_tracked": batches, prefix + _PENDING: torch.zeros_like(sums)}
    return after


def pending(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that sums are kept in between microbatches."""
    return {
        f"{name}.{_PENDING}".lstrip("."): _nothing(layer.running_mean)
        for name, layer in _layers(module)
        if layer.running_mean is not None
    }


def is_pending(path: str) -> bool:
    """Return whether a buffer, by its name or path, is such a sum."""
    return parts_of(path)[-1:] == (_PENDING,)


def defer(layer: nn.Module) -> Callable[..., Any] | None:
    """Return a forward that keeps a BatchNorm's update as a sum; None for other modules."""
    if isinstance(layer, _BatchNorm) and layer.track_running_stats:
        return partial(_forward, weakref.ref(layer))  # weak, or it would refer to itself
    return None


def _forward(reference: weakref.ref[_BatchNorm], x: Tensor) -> Tensor:
    layer: Any = reference()
    if not layer.training:
        return by_itself(layer, x)
    layer._check_input_dim(x)
    held = vars(layer)["_buffers"]
    sums = held.get(_PENDING)
    held[_PENDING] = (_nothing(layer.running_mean) if sums is None else sums) + sums_of(x.detach())
    return F.batch_norm(x, None, None, layer.weight, layer.bias, training=True, eps=layer.eps)


def _layers(module: nn.Module) -> Iterator[tuple[str, _BatchNorm]]:
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and layer.track_running_stats:
            yield name, layer


def _nothing(like: Tensor) -> Tensor:
    return torch.zeros(2 * len(like) + 1, dtype=torch.float64, device=like.device)
