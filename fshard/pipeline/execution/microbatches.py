"""Microbatches, losses and metrics: the inputs and outputs of a step besides parameters and gradients."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.errors import LayoutError
from fshard.mesh.layout import PyTree, Structure, flatten, unflatten
from fshard.pipeline.execution.total import tree_mean


class Microbatches(NamedTuple):
    """The microbatches of a step, their weights, and keys of their shapes."""

    microbatches: Sequence[PyTree]
    weights: list[float]
    kinds: list[Any]

    @staticmethod
    def of(microbatches: Sequence[PyTree], weights: Sequence[float] | None, count: int) -> Microbatches:
        """Look at microbatches."""
        if len(microbatches) != count:
            raise LayoutError(f"pipelined: the schedule takes {count} microbatches, {len(microbatches)} are given.")
        kinds, rows = zip(*map(_kind_of, microbatches), strict=True)
        if weights is None and any(len(one) > 1 for one in rows):
            several = next(one for one in rows if len(one) > 1)
            raise LayoutError(
                f"pipelined: tensors of one microbatch have {' and '.join(map(str, sorted(several)))} rows, so its weight is "
                "unknown. Give weights=[...], a number for each microbatch."
            )
        given = [float(max(one, default=1)) for one in rows] if weights is None else [*map(float, weights)]
        if len(given) != count or min(given) < 0 or not sum(given) > 0:
            raise LayoutError(
                f"pipelined: {count} microbatches have to count for something together; they count for {given}."
            )
        return Microbatches(microbatches, given, [*kinds])


_kinds: dict[Hashable, tuple[int, set[int]]] = {}
"""A key of microbatches with equal shapes: a number, and the number of rows."""
_numbers = itertools.count(1)


def kind_of(microbatch: PyTree) -> int:
    """Return a number that identifies the shapes of a microbatch: it is looked up for every message."""
    return _kind_of(microbatch)[0]


def _kind_of(microbatch: PyTree) -> tuple[int, set[int]]:
    leaves, structure = flatten(microbatch, none_is_leaf=True)
    key = structure, tuple([(x.shape, x.dtype) for x in leaves if isinstance(x, Tensor)])
    found = _kinds.get(key)
    return found or _kinds.setdefault(key, (next(_numbers), {shape[0] for shape, _ in key[1] if shape}))


_NO_METRICS = flatten((), none_is_leaf=True)


class MicrobatchResult(NamedTuple):
    """The loss of one microbatch, and the leaves and the structure of its metrics."""

    loss: Tensor
    metrics: Sequence[Any]
    structure: Structure

    @staticmethod
    def of(returned: Any) -> tuple[Tensor, MicrobatchResult]:
        """Return the loss, and what is kept of it and the metrics."""
        loss, (leaves, structure) = returned, _NO_METRICS
        if isinstance(returned, tuple) and len(returned) == 2:
            loss, (leaves, structure) = returned[0], flatten(returned[1], none_is_leaf=True)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            found = f"{loss.dtype} of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise LayoutError(
                f"pipelined: loss_fn has to return one floating number, or it and metrics; found {found}."
            )
        return loss, MicrobatchResult(
            loss.detach(), [x.detach() if isinstance(x, Tensor) else x for x in leaves], structure
        )


def together(found: Sequence[MicrobatchResult], weights: Sequence[float]) -> tuple[Tensor, PyTree]:
    """Return the means of losses and metrics; integers are summed."""
    loss = tree_mean([one.loss.reshape(()) if one.loss.ndim else one.loss for one in found], weights)
    metrics = [_metric(column, weights) for column in zip(*(one.metrics for one in found), strict=True)]
    return loss.to(torch.promote_types(found[0].loss.dtype, torch.float32)), unflatten(found[0].structure, metrics)


def _metric(values: Sequence[Any], weights: Sequence[float]) -> Any:
    first = values[0]
    if not isinstance(first, Tensor):
        return first
    return tree_mean(values, weights).to(first.dtype) if first.is_floating_point() else sum(values[1:], start=first)
