"""Microbatches, losses and metrics: what a step receives and returns beside parameters."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from fshard.mesh.layout import PyTree, unflatten
from fshard.mesh.layout.sharded import flatten_shards
from fshard.pipeline.execution.gradient_sums import tree_mean

_keys: dict[Hashable, int] = {}
_numbers = itertools.count(1)


def shape_key(microbatch: PyTree) -> int:
    """Return a number that identifies the shapes of a microbatch.

    A number, because it is hashed for every message.
    """
    leaves, structure = flatten_shards(microbatch, none_is_leaf=True)
    shapes = [(x.shape, x.dtype) for x in leaves if isinstance(x, Tensor)]
    key = structure, tuple(shapes)
    # Devices are threads that may add one key at once: `setdefault` decides for one number.
    return _keys.get(key) or _keys.setdefault(key, next(_numbers))


def weights_of(microbatches: Sequence[PyTree], weights: Sequence[float] | None) -> list[float]:
    """Return the given weights of microbatches, or their numbers of rows."""
    if weights is None:
        weights = [_row_count(tree) for tree in microbatches]
    numbers = [float(weight) for weight in weights]
    is_valid = len(numbers) == len(microbatches) and min(numbers) >= 0 and sum(numbers) > 0
    if not is_valid:
        raise ValueError(
            f"weights must be {len(microbatches)} numbers of at least 0, not all 0; got {numbers}."
        )
    return numbers


def _row_count(microbatch: PyTree) -> int:
    leaves, _ = flatten_shards(microbatch)
    counts = {x.shape[0] for x in leaves if isinstance(x, Tensor) and x.ndim > 0}
    if len(counts) > 1:
        found = " and ".join(map(str, sorted(counts)))
        raise ValueError(
            f"The tensors of a microbatch must have one number of rows; got {found}. "
            "Give weights=[...], a number for each microbatch."
        )
    return max(counts, default=1)


def mean_result(
    results: Sequence[tuple[Tensor, PyTree]], weights: Sequence[float]
) -> tuple[Tensor, PyTree]:
    """Return the means of losses, in at least 32 bits, and of metrics; integers are summed."""
    losses, metrics = zip(*results, strict=True)
    loss = tree_mean([x.reshape(()) for x in losses], weights)
    loss = loss.to(torch.promote_types(losses[0].dtype, torch.float32))

    rows = [flatten_shards(tree, none_is_leaf=True)[0] for tree in metrics]
    means: list[Any] = []
    for column in zip(*rows, strict=True):
        first = column[0]
        if not isinstance(first, Tensor):
            means.append(first)
        elif first.is_floating_point():
            means.append(tree_mean(column, weights).to(first.dtype))
        else:
            means.append(sum(column[1:], start=first))
    _, structure = flatten_shards(metrics[0], none_is_leaf=True)
    return loss, unflatten(structure, means)
