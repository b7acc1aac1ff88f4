"""Microbatches, losses and metrics: the inputs and outputs of a step besides parameters and gradients."""

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
    """Return a number that identifies the shapes of a microbatch: it is looked up for every message."""
    leaves, structure = flatten_shards(microbatch, none_is_leaf=True)
    shapes = structure, tuple([(x.shape, x.dtype) for x in leaves if isinstance(x, Tensor)])
    return _keys.get(shapes) or _keys.setdefault(shapes, next(_numbers))


def weights_of(microbatches: Sequence[PyTree], weights: Sequence[float] | None) -> list[float]:
    """Return the given weights of microbatches, or their numbers of rows."""
    if weights is None:
        counts = [
            {x.shape[0] for x in flatten_shards(tree)[0] if isinstance(x, Tensor) and x.ndim}
            for tree in microbatches
        ]
        if unequal := next((rows for rows in counts if len(rows) > 1), None):
            raise ValueError(
                f"The tensors of a microbatch must have one number of rows; got {' and '.join(map(str, sorted(unequal)))}. "
                "Give weights=[...], a number for each microbatch."
            )
        weights = [max(rows, default=1) for rows in counts]
    numbers = [*map(float, weights)]
    if len(numbers) != len(microbatches) or min(numbers) < 0 or not sum(numbers) > 0:
        raise ValueError(
            f"weights must be {len(microbatches)} numbers of at least 0, not all 0; got {numbers}."
        )
    return numbers


def mean_result(
    results: Sequence[tuple[Tensor, PyTree]], weights: Sequence[float]
) -> tuple[Tensor, PyTree]:
    """Return the means of losses, in at least 32 bits, and of metrics; integers are summed."""
    losses, metrics = zip(*results, strict=True)
    loss = tree_mean([x.reshape(()) for x in losses], weights)
    means: list[Any] = []
    for column in zip(
        *[flatten_shards(tree, none_is_leaf=True)[0] for tree in metrics], strict=True
    ):
        first = column[0]
        if not isinstance(first, Tensor):
            means.append(first)
        elif first.is_floating_point():
            means.append(tree_mean(column, weights).to(first.dtype))
        else:
            means.append(sum(column[1:], start=first))
    _, structure = flatten_shards(metrics[0], none_is_leaf=True)
    return loss.to(torch.promote_types(losses[0].dtype, torch.float32)), unflatten(structure, means)
