"""Microbatches, losses and metrics: the inputs and outputs of a step besides parameters and gradients."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.mesh.layout import PyTree, Structure, flatten, unflatten
from fshard.mesh.layout.sharded import flatten_shards
from fshard.pipeline.execution.gradient_sums import tree_mean

_keys: dict[Hashable, int] = {}
_numbers = itertools.count(1)


def shape_key(microbatch: PyTree) -> int:
    """Return a number that identifies the shapes of a microbatch: it is looked up for every message."""
    leaves, structure = flatten_shards(microbatch, none_is_leaf=True)
    shapes = structure, tuple([(x.shape, x.dtype) for x in leaves if isinstance(x, Tensor)])
    return _keys.get(shapes) or _keys.setdefault(shapes, next(_numbers))


def weights_of(microbatches: Sequence[PyTree], weights: Sequence[float] | None) -> list[float]:
    """Return the given weights of microbatches, or their numbers of rows."""
    if weights is None:
        counts = [
            {x.shape[0] for x in flatten_shards(one)[0] if isinstance(x, Tensor) and x.ndim} for one in microbatches
        ]
        if several := next((rows for rows in counts if len(rows) > 1), None):
            raise ValueError(
                f"The tensors of a microbatch must have one number of rows; got {' and '.join(map(str, sorted(several)))}. "
                "Give weights=[...], a number for each microbatch."
            )
        weights = [max(rows, default=1) for rows in counts]
    found = [*map(float, weights)]
    if len(found) != len(microbatches) or min(found) < 0 or not sum(found) > 0:
        raise ValueError(f"weights must be {len(microbatches)} numbers of at least 0, not all 0; got {found}.")
    return found


_NO_METRICS = flatten((), none_is_leaf=True)


class MicrobatchResult(NamedTuple):
    """The loss of one microbatch, and the leaves and the structure of its metrics."""

    loss: Tensor
    metrics: Sequence[Any]
    structure: Structure

    @staticmethod
    def of(returned: Any) -> tuple[Tensor, MicrobatchResult]:
        """Return the loss with its graph, and the detached result."""
        loss, (leaves, structure) = returned, _NO_METRICS
        if isinstance(returned, tuple) and len(returned) == 2:
            loss, (leaves, structure) = returned[0], flatten_shards(returned[1], none_is_leaf=True)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            found = f"{loss.dtype} of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"loss_fn must return one floating number, or it and metrics; got {found}.")
        detached = [x.detach() if isinstance(x, Tensor) else x for x in leaves]
        return loss, MicrobatchResult(loss.detach(), detached, structure)


def mean_result(results: Sequence[MicrobatchResult], weights: Sequence[float]) -> tuple[Tensor, PyTree]:
    """Return the means of losses and metrics; integers are summed."""
    loss = tree_mean([one.loss.reshape(()) for one in results], weights)
    metrics = [_metric(column, weights) for column in zip(*(one.metrics for one in results), strict=True)]
    dtype = torch.promote_types(results[0].loss.dtype, torch.float32)
    return loss.to(dtype), unflatten(results[0].structure, metrics)


def _metric(values: Sequence[Any], weights: Sequence[float]) -> Any:
    first = values[0]
    if not isinstance(first, Tensor):
        return first
    return tree_mean(values, weights).to(first.dtype) if first.is_floating_point() else sum(values[1:], start=first)
