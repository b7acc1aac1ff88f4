"""What goes into a step besides parameters, and what comes out besides gradients: microbatches, losses and metrics."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.errors import LayoutError
from fshard.mesh.tree import PyTree, flatten, unflatten
from fshard.pipeline.leaves import map_tensors
from fshard.pipeline.total import tree_mean


class Batch(NamedTuple):
    """The microbatches of a step, what they count for, and what tells their shapes apart."""

    microbatches: Sequence[PyTree]
    weights: list[float]
    kinds: list[Any]

    @staticmethod
    def of(microbatches: Sequence[PyTree], weights: Sequence[float] | None, count: int) -> Batch:
        """Look at microbatches."""
        if len(microbatches) != count:
            raise LayoutError(f"pipelined: the schedule takes {count} microbatches, {len(microbatches)} are given.")
        kinds: list[Any] = []
        rows: list[set[int]] = []
        for microbatch in microbatches:
            kinds.append(kind_of(microbatch))
            rows.append({x.shape[0] for x in flatten(microbatch)[0] if isinstance(x, Tensor) and x.ndim})
        if weights is None and any(len(found) > 1 for found in rows):
            found = next(found for found in rows if len(found) > 1)
            raise LayoutError(
                f"pipelined: tensors of one microbatch have {' and '.join(map(str, sorted(found)))} rows, so it is not known "
                "what it counts for. Say it: weights=[...], a number for each microbatch."
            )
        given = [float(max(found, default=1)) for found in rows] if weights is None else [*map(float, weights)]
        if len(given) != count or min(given) < 0 or not sum(given) > 0:
            raise LayoutError(
                f"pipelined: {count} microbatches have to count for something together; they count for {given}."
            )
        return Batch(microbatches, given, kinds)


_kinds: dict[Hashable, int] = {}
_numbers = itertools.count(1)


def kind_of(microbatch: PyTree) -> int:
    """Return a number that tells the shapes of microbatches apart: it is looked up for every message."""
    leaves, structure = flatten(microbatch, none_is_leaf=True)
    key = structure, tuple([(x.shape, x.dtype) for x in leaves if isinstance(x, Tensor)])
    return _kinds.get(key) or _kinds.setdefault(key, next(_numbers))


_NONE: tuple[()] = ()


class Found(NamedTuple):
    """What the loss function has returned for one microbatch."""

    loss: Tensor
    metrics: PyTree

    @staticmethod
    def of(returned: Any) -> tuple[Tensor, Found]:
        """Return the loss, and what is kept of it and the metrics."""
        loss, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, _NONE)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            found = f"{loss.dtype} of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise LayoutError(
                f"pipelined: loss_fn has to return one floating number, or it and metrics; found {found}."
            )
        return loss, Found(loss.detach(), metrics if metrics is _NONE else map_tensors(Tensor.detach, metrics))


def together(found: Sequence[Found], weights: Sequence[float]) -> tuple[Tensor, PyTree]:
    """Return the means of losses and metrics; whole numbers are added up."""
    rows, (structure, *_) = zip(*(flatten(one.metrics, none_is_leaf=True) for one in found), strict=True)
    loss = tree_mean([one.loss.reshape(()) for one in found], weights)
    metrics = [_metric(column, weights) for column in zip(*rows, strict=True)]
    return loss.to(torch.promote_types(found[0].loss.dtype, torch.float32)), unflatten(structure, metrics)


def _metric(values: Sequence[Any], weights: Sequence[float]) -> Any:
    first = values[0]
    if not isinstance(first, Tensor):
        return first
    return tree_mean(values, weights).to(first.dtype) if first.is_floating_point() else sum(values[1:], start=first)
