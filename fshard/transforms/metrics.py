"""Metrics of a loss function, combined over the slices of all devices by `aux=`.

    "mean"    the mean over slices, weighted as the loss is
    "sum"     the sum over slices
    "rows"    a row per sample: those of the global batch, in its order, as a `Sharded` with the
              batch's layout, replicated where the batch is uneven; a number has none, and is
              averaged

Without a word, numbers are averaged and other tensors raise. Devices with the same samples, along
other axes, are averaged; rows of integers or bools are those of the first device.
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
from fshard.transforms.patterns import titled


class SliceMetrics(NamedTuple):
    """The metrics of a slice, and how each is combined with those of other slices."""

    leaves: list[Tensor]
    structure: Structure
    reductions: list[AuxReduction]


NO_METRICS = SliceMetrics([], flatten_with_paths(())[2], [])


def metrics_of(aux: PyTree, slice: Slice, device: torch.device, prefix: PyTree) -> SliceMetrics:
    """Return the metrics of a slice with the reductions of a prefix tree.

    Raises naming the first that is invalid.
    """
    if isinstance(aux, tuple) and not aux:
        return NO_METRICS
    paths, values, structure = flatten_with_paths(aux)
    leaves: list[Any] = []
    for value in values:
        is_number = isinstance(value, bool | int | float)
        leaves.append(torch.full((), value, device=device) if is_number else value)
    reductions = _reductions(leaves, prefix, aux)
    for path, leaf, reduction in zip(paths, leaves, reductions, strict=True):
        error = _metric_error(leaf, slice.samples, reduction)
        if error is not None:
            raise ValueError(
                "value_and_grad: metrics beside the loss must be numbers, or be named in aux=; "
                f'{titled(path, "it")} is {error}. Give aux="mean", "sum" or "rows" (a row per '
                "sample), or a tree of these."
            )
    return SliceMetrics([leaf.detach() for leaf in leaves], structure, reductions)


def _reductions(leaves: Sequence[Any], prefix: PyTree, aux: PyTree) -> list[Any]:
    """Return the reduction of each leaf of metrics from a prefix tree.

    Numbers that are not summed are averaged.
    """
    words: list[Any] = [None] * len(leaves)
    if prefix is not None:
        try:
            words = broadcast_prefix(prefix, aux)
        except ValueError:
            raise ValueError(
                f"aux={prefix!r} must be a prefix of the metrics {flatten(aux)[1]}. Name each."
            ) from None
    reductions: list[Any] = []
    for leaf, word in zip(leaves, words, strict=True):
        is_number = getattr(leaf, "ndim", None) == 0
        reductions.append("mean" if is_number and word != "sum" else word)
    return reductions


def _metric_error(x: Any, samples: int | None, reduction: AuxReduction | None) -> str | None:
    """Return the error of a leaf."""
    if not isinstance(x, Tensor):
        return f"a {type(x).__name__}"
    if reduction is None:
        return f"of shape {tuple(x.shape)}"
    if reduction == "rows":
        if x.shape[0] == samples:
            return None
        return f"of shape {tuple(x.shape)}, but there are {samples} samples"
    return "complex" if x.is_complex() else None


def slice_loss(loss: Tensor, weight: float, metrics: SliceMetrics) -> SliceLoss:
    """Return the loss of a slice with the metrics that are averaged with it."""
    means: list[Tensor] = []
    for x, reduction in zip(metrics.leaves, metrics.reductions, strict=True):
        if reduction == "sum":
            # A mean weights the slice by its weight; times the total weight it is the sum.
            means.append(x.double() / (weight or 1.0))
        elif reduction == "mean":
            if not x.is_floating_point():
                x = x.to(torch.get_default_dtype())
            # Of 16 bits a mean over slices and devices would lose digits of each.
            means.append(x.to(torch.promote_types(x.dtype, torch.float32)))
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
    next_mean = iter(mean.means)
    combined: list[Tensor] = []
    columns = zip(*[slice_metrics.leaves for slice_metrics in metrics], strict=True)
    for reduction, column in zip(metrics[-1].reductions, columns, strict=True):
        if reduction == "rows":
            local_rows = _local_rows(column, slices, batch)
            combined.append(_global_rows(local_rows, batch, along, scope, site))
        elif reduction == "sum":
            dtype = column[0].dtype
            total = next(next_mean) * mean.weight
            if not dtype.is_floating_point:
                combined.append(total.round().long())
            else:
                combined.append(total.to(torch.promote_types(dtype, torch.float32)))
        else:
            combined.append(next(next_mean))
    return unflatten(metrics[-1].structure, combined)


def _local_rows(column: Sequence[Tensor], slices: Sequence[Slice], batch: Batch) -> Tensor:
    """Return the rows of a device from those of its slices, without the rows of neighbours."""
    if batch.cut is None:
        return torch.cat([*column])
    return torch.cat([rows[: slice.rows] for rows, slice in zip(column, slices, strict=True)])


def _global_rows(
    rows: Tensor, batch: Batch, along: tuple[str, ...], scope: Scope, site: Site
) -> Tensor:
    """Average a device's rows over devices with the same samples.

    Where the batch is uneven no layout has the rows: those of all devices are gathered.
    """
    cut = batch.cut
    cut_axes = () if cut is None else cut.axes
    copy_axes = tuple([axis for axis in (*along, *batch.axes) if axis not in cut_axes])
    if copy_axes:
        copies = scope.group(copy_axes, "value_and_grad")
        is_averaged = rows.is_floating_point() or rows.is_complex()
        if copies.size > 1 and is_averaged:
            (rows,) = Bound(Psum(), copies, site).run((rows,))
            rows = rows / copies.size
        elif copies.size > 1:
            (rows,) = Bound(Broadcast(0), copies, site).run((rows,))
    if cut is None or not cut_axes or cut.is_even:
        return rows

    # An all-gather needs equal shards: pad to the longest, and cut the results.
    longest = -(-cut.length // cut.parts)
    padded = rows.new_zeros(longest, *rows.shape[1:])
    padded[: len(rows)] = rows
    devices = scope.group(cut_axes, "value_and_grad")
    (gathered,) = Bound(AllGather(0, True), devices, site).run((padded,))
    shards = zip(gathered.split(longest), cut.lengths(), strict=True)
    return torch.cat([shard[:length] for shard, length in shards])


def global_metrics(trees: Sequence[PyTree], batch: Batch, prefix: PyTree) -> PyTree:
    """Return the metrics of a step from those of the local devices.

    Rows have the batch's layout, if the batch is even.
    """
    cut = batch.cut
    leaves, structure = flatten(trees[0])
    reductions = _reductions(leaves, prefix, trees[0])
    joined: list[Tensor | Sharded] = []
    columns = zip(*[flatten(tree)[0] for tree in trees], strict=True)
    for reduction, shards in zip(reductions, columns, strict=True):
        first = shards[0]
        if reduction != "rows":
            joined.append(first)
        elif cut is None or not cut.is_even:
            joined.append(Sharded(tuple(first.shape), Layout(batch.mesh), shards))
        else:
            layout = Layout(batch.mesh, P(cut.axes))
            joined.append(Sharded((cut.length, *first.shape[1:]), layout, shards))
    return unflatten(structure, joined)
