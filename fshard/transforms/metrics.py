"""Metrics of a loss function, combined over the slices of all devices by `aux=`.

    "mean"    the mean over slices, weighted as the loss is
    "sum"     the sum over slices
    "rows"    a row per sample: those of the global batch, in its order, as a `Sharded` with the batch's layout,
              replicated where the batch is uneven; a number has none, and is averaged

Without a word, numbers are averaged and other tensors raise. Devices with the same samples, along other axes, are averaged;
rows of integers or bools are the first one's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.mesh.collectives.autograd import Bound
from fshard.mesh.collectives.moves import AllGather, Broadcast, Psum
from fshard.mesh.layout import (
    Layout,
    P,
    PyTree,
    Structure,
    broadcast_prefix,
    flatten,
    flatten_with_paths,
    unflatten,
)
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.spmd.scope import Scope
from fshard.source import Site
from fshard.transforms.agreement import SliceLoss
from fshard.transforms.batch import Batch, Slice
from fshard.transforms.options import AuxReduction
from fshard.transforms.patterns import named, parts_of


class SliceMetrics(NamedTuple):
    """The metrics of a slice, and how each is combined with those of other slices."""

    leaves: list[Tensor]
    structure: Structure
    reductions: list[AuxReduction]


NO_METRICS = SliceMetrics([], flatten_with_paths(())[2], [])


def metrics_of(aux: PyTree, slice: Slice, device: torch.device, prefix: PyTree) -> SliceMetrics:
    """Return the metrics of a slice with the reductions of a prefix tree; raise naming the first that is invalid."""
    if isinstance(aux, tuple) and not aux:
        return NO_METRICS
    paths, leaves, structure = flatten_with_paths(aux)
    leaves = [
        torch.full((), x, device=device) if isinstance(x, bool | int | float) else x for x in leaves
    ]
    reductions = _reductions(leaves, prefix, aux)
    for path, x, reduction in zip(paths, leaves, reductions, strict=True):
        if error := _metric_error(x, slice.samples, reduction):
            raise ValueError(
                "value_and_grad: metrics beside the loss must be numbers, or be named in aux=; "
                f'{named(parts_of(path)) or "it"} is {error}. Give aux="mean", "sum" or "rows" (a row per sample), or a '
                "tree of these."
            )
    return SliceMetrics([x.detach() for x in leaves], structure, reductions)


def _reductions(leaves: Sequence[Any], prefix: PyTree, aux: PyTree) -> list[Any]:
    """Return the reduction of each leaf of metrics from a prefix tree; numbers that are not summed are averaged."""
    try:
        words = [None] * len(leaves) if prefix is None else broadcast_prefix(prefix, aux)
    except ValueError:
        raise ValueError(
            f"aux={prefix!r} must be a prefix of the metrics {flatten(aux)[1]}. Name each."
        ) from None
    return [
        "mean" if not getattr(x, "ndim", 1) and word != "sum" else word
        for x, word in zip(leaves, words, strict=True)
    ]


def _metric_error(x: Any, samples: int | None, reduction: AuxReduction | None) -> str | None:
    """Return the error of a leaf."""
    if not isinstance(x, Tensor):
        return f"a {type(x).__name__}"
    if reduction is None:
        return f"of shape {tuple(x.shape)}"
    if reduction == "rows":
        return (
            None
            if x.shape[0] == samples
            else f"of shape {tuple(x.shape)}, but there are {samples} samples"
        )
    return "complex" if x.is_complex() else None


def slice_loss(loss: Tensor, weight: float, metrics: SliceMetrics) -> SliceLoss:
    """Return the loss of a slice with the metrics that are averaged with it."""
    means = list[Tensor]()
    for x, reduction in zip(metrics.leaves, metrics.reductions, strict=True):
        if reduction == "sum":
            means.append(
                x.double() / (weight or 1.0)
            )  # their mean times the total weight is the sum
        elif reduction == "mean":
            means.append(x if x.is_floating_point() else x.to(torch.get_default_dtype()))
    return SliceLoss(loss.detach(), weight, means)


def combine_metrics(
    metrics: Sequence[SliceMetrics],
    slices: Sequence[Slice],
    mean: SliceLoss,
    batch: Batch,
    along: tuple[str, ...],
    scope: Scope,
    site: Site,
) -> PyTree:
    """Return the metrics of one device from those of its slices.

    Args:
        metrics: of each slice of the batch.
        slices: those without samples have no rows.
        mean: the mean over all slices of all devices.
        batch: of which a row of the metrics is a sample.
        along: axes beside the batch's along which devices have the same samples.
        scope: of the device.
        site: the source line of the step.
    """
    means, cut = iter(mean.means), batch.cut
    cut_axes = () if cut is None else cut.axes
    copy_axes = tuple(axis for axis in (*along, *batch.axes) if axis not in cut_axes)

    def global_rows(rows: Tensor) -> Tensor:
        """Average a device's rows over devices with the same samples; gather those of all, where the batch is uneven."""
        if copy_axes and (copies := scope.group(copy_axes, "value_and_grad")).size > 1:
            is_averaged = rows.is_floating_point() or rows.is_complex()
            (rows,) = Bound(Psum() if is_averaged else Broadcast(0), copies, site).run((rows,))
            rows = rows / copies.size if is_averaged else rows
        if cut is None or not cut_axes or cut.is_even:
            return rows
        longest = -(-cut.length // cut.parts)
        padded = rows.new_zeros(longest, *rows.shape[1:])
        padded[: len(rows)] = rows
        (gathered,) = Bound(AllGather(0, True), scope.group(cut_axes, "value_and_grad"), site).run(
            (padded,)
        )
        return torch.cat(
            [
                shard[:length]
                for shard, length in zip(gathered.split(longest), cut.lengths(), strict=True)
            ]
        )

    def combined(reduction: AuxReduction, column: Sequence[Tensor]) -> Tensor:
        if reduction == "rows":
            return global_rows(
                torch.cat(
                    [x[: slice.rows] if cut else x for x, slice in zip(column, slices, strict=True)]
                )
            )
        x, dtype = next(means), column[0].dtype
        if reduction == "sum":
            x = (
                (x * mean.weight).to(dtype)
                if dtype.is_floating_point
                else (x * mean.weight).round().long()
            )
        return x

    columns = zip(*(slice_metrics.leaves for slice_metrics in metrics), strict=True)
    return unflatten(metrics[-1].structure, [*map(combined, metrics[-1].reductions, columns)])


def global_metrics(trees: Sequence[PyTree], batch: Batch, prefix: PyTree) -> PyTree:
    """Return the metrics of a step from those of the local devices: rows have the batch's layout, if that is even."""
    cut, (leaves, structure) = batch.cut, flatten(trees[0])

    def joined(reduction: AuxReduction, shards: tuple[Tensor, ...]) -> Tensor | Sharded:
        x = shards[0]
        if reduction != "rows":
            return x
        if cut is None or not cut.is_even:
            return Sharded(tuple(x.shape), Layout(batch.mesh), shards)
        return Sharded((cut.length, *x.shape[1:]), Layout(batch.mesh, P(cut.axes)), shards)

    columns = zip(*(flatten(tree)[0] for tree in trees), strict=True)
    return unflatten(structure, [*map(joined, _reductions(leaves, prefix, trees[0]), columns)])
