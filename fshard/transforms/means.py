"""Means and sums over the slices of all devices: of the loss, and of the metrics of a loss function.

Every slice has a weight, computed on the host: its number of samples, or the result of `weight=`. A slice of weight 0
adds nothing, even if its loss is not finite; the result of an idle slice is dropped.

    (loss x weight, means x weight)  of each slice  ->  one tree of sums  ->  psum  ->  divided by the total weight
    (weight, more numbers)                          ->  one tree of sums  ->  psum  ->  a list

The second vector is on the host, so it does not wait for the first.

Metrics are combined by `aux=`; without a word, numbers are averaged and other tensors raise:

    "mean"    the mean over slices, weighted as the loss is
    "sum"     the sum over slices
    "rows"    a row per sample: those of the global batch, in its order, as a `Sharded` with the batch's layout,
              replicated where the batch is uneven; a number has none, and is averaged

Devices with the same samples, along other axes, are averaged; rows of integers or bools are the first one's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from math import inf
from numbers import Real
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fshard.mesh.collectives.autograd import Bound
from fshard.mesh.collectives.moves import AllGather, Broadcast, Psum
from fshard.mesh.layout import Layout, P, PyTree, Structure, broadcast_prefix, flatten, flatten_with_paths, unflatten
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.spmd.scope import Group
from fshard.source import Site
from fshard.transforms.agree import on_host, summed
from fshard.transforms.batch import Batch
from fshard.transforms.patterns import named, parts_of


class LossSums(NamedTuple):
    """The loss and means of one slice, or of all together, and their weight."""

    loss: Tensor
    weight: float
    means: list[Tensor]


def averaged_results(
    found: list[LossSums], more: list[float], group: Group | None, many: int, site: Site
) -> tuple[LossSums, list[float]]:
    """Average and sum results; return also the sums of the devices' other numbers.

    `many` devices have the same samples.
    """
    first, near = found[0], found[0].loss.device
    alone = group is None or group.size == 1
    if alone and len(found) == 1 and first.weight:  # a mean of one
        return first._replace(loss=first.loss.to(torch.promote_types(first.loss.dtype, torch.float32))), more
    weight = tree_sum([one.weight for one in found])
    with torch.no_grad():
        sums = sum_of_rows(_rows(found, near))
    if not alone:
        sums, known = summed((sums, on_host([weight, *more], near)), group, site)
        weight, *more = [weight, *more] if known.is_meta else known.tolist()
    loss, *rest = sums.split([1, *(x.numel() for x in first.means)])
    means = [(total / weight).reshape(x.shape).to(x) for x, total in zip(first.means, rest, strict=True)]
    loss = (loss / weight).reshape(()).to(torch.promote_types(first.loss.dtype, torch.float32))
    return LossSums(loss, weight / many, means), more


def _rows(found: Sequence[LossSums], near: torch.device) -> Tensor:
    """Return a row of numbers for each slice, times its weight; those of weight 0 are 0, finite or not."""
    if len(found) == 1 and not found[0].means:
        row = found[0].loss.to(near, torch.float64).reshape(1, 1)
        return row * found[0].weight if found[0].weight else torch.zeros_like(row)
    rows = _columns([[one.loss, *one.means] for one in found], near)
    weights = {one.weight for one in found}
    if len(weights) == 1 and all(weights):
        rows = rows * weights.pop()
    else:
        rows = torch.stack([row * one.weight for row, one in zip(rows, found, strict=True)])
    if all(one.weight for one in found):
        return rows
    return torch.stack([row if one.weight else torch.zeros_like(row) for row, one in zip(rows, found, strict=True)])


def _columns(rows: Sequence[Sequence[Tensor]], near: torch.device) -> Tensor:
    """Return tensors of numbers, of one length, as one table."""
    columns = [torch.stack(column).to(near, torch.float64).reshape(len(rows), -1) for column in zip(*rows, strict=True)]
    return columns[0] if len(columns) == 1 else torch.cat(columns, 1)


def sum_of_rows(rows: Tensor) -> Tensor:
    """Add up rows as `tree_sum` does."""
    while len(rows) > 1:
        even = len(rows) // 2 * 2
        rows = torch.cat([rows[:even:2] + rows[1:even:2], rows[even:]])
    return rows[0]


def tree_sum(given: Sequence[float]) -> float:
    """Sum the slices' numbers in the tree in which their gradients are summed."""
    rows = [*given]
    while len(rows) > 1:
        rows = [a + b for a, b in zip(rows[::2], rows[1::2], strict=False)] + rows[len(rows) // 2 * 2 :]
    return rows[0]


Weight = Callable[[PyTree], Tensor | int | float]


class Count(NamedTuple):
    """The weight of a slice, and the factor of its gradient."""

    weight: float
    share: float


def refuse_weights(weights: Sequence[float]) -> None:
    """Raise if a weight is negative or not finite."""
    wrong = [str(weight) for weight in weights if not 0 <= weight < inf]
    if wrong:
        raise ValueError(f"weight= must return finite numbers of at least 0; got {', '.join(wrong)}.")


def nonzero_weight(total: float) -> float:
    """Return the weight of the entire batch, which must not be 0."""
    if not total:
        raise ValueError("weight= gave 0 for all of the batch, which has no mean loss then. Leave the batch out.")
    return total


def weight_of(weight: Any) -> Tensor:
    """Return the result of `weight=` in float64."""
    if not isinstance(weight, Tensor | Real) or (isinstance(weight, Tensor) and weight.numel() != 1):
        found = f"a tensor of shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else repr(weight)
        raise ValueError(f"weight= must return one number for a part of the batch; got {found}.")
    return torch.as_tensor(weight, dtype=torch.float64).reshape(())


class SliceState(threading.local):
    """The slice that the calling device runs: True if it is idle, and a list to which BatchNorm layers add their moments."""

    idle: bool = False
    moments: list[Any] | None = None


current_slice = SliceState()


@contextmanager
def slice_state(*, idle: bool, moments: list[Any] | None = None) -> Generator[None]:
    """Set the state of the current slice within the context.

    >>> with slice_state(idle=True):
    ...     current_slice.idle
    True
    """
    now = current_slice
    before, now.idle, now.moments = (now.idle, now.moments), idle, moments
    try:
        yield
    finally:
        now.idle, now.moments = before


AuxReduction = Literal["mean", "sum", "rows"]


class AuxLeaves(NamedTuple):
    """The metrics of a slice, and how each is combined with those of other slices."""

    leaves: list[Tensor]
    structure: Structure
    reductions: list[AuxReduction]


def aux_leaves(aux: PyTree, samples: int | None, near: torch.device, prefix: PyTree) -> AuxLeaves:
    """Return the metrics of a slice with the reductions of a prefix tree; raise with all that are invalid."""
    if isinstance(aux, tuple) and not aux:
        return _NOTHING
    paths, leaves, structure = flatten_with_paths(aux)
    leaves = [torch.full((), x, device=near) if isinstance(x, bool | int | float) else x for x in leaves]
    reductions = aux_reductions(leaves, prefix, aux)
    wrong = [
        f"{named(parts_of(path)) or 'it'} is {kind}"
        for path, x, reduction in zip(paths, leaves, reductions, strict=True)
        if (kind := _complaint(x, samples, reduction)) is not None
    ]
    if wrong:
        raise ValueError(
            f"value_and_grad: metrics beside the loss must be numbers, or be named in aux=; {'; '.join(wrong)}. "
            'Give aux="mean", "sum" or "rows" (a row per sample), or a tree of these.'
        )
    return AuxLeaves([x.detach() for x in leaves], structure, reductions)


_NOTHING = AuxLeaves([], flatten_with_paths(())[2], [])


def aux_reductions(leaves: Sequence[Any], prefix: PyTree, aux: PyTree) -> list[Any]:
    """Return the reduction of each leaf of metrics from a prefix tree; numbers that are not summed are averaged."""
    try:
        words = [None] * len(leaves) if prefix is None else broadcast_prefix(prefix, aux)
    except ValueError:
        raise ValueError(f"aux={prefix!r} must be a prefix of the metrics {flatten(aux)[1]}. Name each.") from None
    is_number = [not getattr(x, "ndim", 1) for x in leaves]
    return ["mean" if number and word != "sum" else word for word, number in zip(words, is_number, strict=True)]


def _complaint(x: Any, samples: int | None, reduction: AuxReduction | None) -> str | None:
    """Return the error of a leaf."""
    if not isinstance(x, Tensor):
        return f"a {type(x).__name__}"
    if reduction is None:
        return f"of shape {tuple(x.shape)}"
    if reduction == "rows":
        return None if x.shape[0] == samples else f"of shape {tuple(x.shape)}, but there are {samples} samples"
    return "complex" if x.is_complex() else None


def slice_results(
    loss: Tensor, count: Count, aux: PyTree, samples: int | None, prefix: PyTree
) -> tuple[LossSums, AuxLeaves]:
    """Return the results of a slice: its loss and means with their weight, and its metrics."""
    metrics, means = aux_leaves(aux, samples, loss.device, prefix), list[Tensor]()
    for x, reduction in zip(metrics.leaves, metrics.reductions, strict=True):
        if reduction == "sum":
            means.append(x.double() / (count.weight or 1.0))  # their mean times the total weight is the sum
        elif reduction == "mean":
            means.append(x if x.is_floating_point() else x.to(torch.get_default_dtype()))
    return LossSums(loss.detach(), count.weight, means), metrics


def combine_aux(
    each: Sequence[AuxLeaves], rows: Sequence[int | None], mean: LossSums, collect: Callable[[Sequence[Tensor]], Tensor]
) -> PyTree:
    """Return the metrics of one device from those of its slices.

    Args:
        each: the metrics of each slice.
        rows: number of rows of each that count; None: all.
        mean: over all slices of all devices.
        collect: concatenates the rows of slices.
    """
    means = iter(mean.means)

    def combined(reduction: AuxReduction, column: Sequence[Tensor]) -> Tensor:
        if reduction == "rows":
            return collect([x[:count] for x, count in zip(column, rows, strict=True)])
        x, dtype = next(means), column[0].dtype
        if reduction == "sum":
            x = (x * mean.weight).to(dtype) if dtype.is_floating_point else (x * mean.weight).round().long()
        return x

    columns = zip(*(metrics.leaves for metrics in each), strict=True)
    return unflatten(each[-1].structure, [*map(combined, each[-1].reductions, columns)])


def collected(rows: Sequence[Tensor], batch: Batch, same: Group | None, group: Group | None, site: Site) -> Tensor:
    """Concatenate the rows of a device's slices, those of each sample once; of all devices, where the batch is uneven.

    Args:
        rows: of each slice; an idle slice has none.
        batch: that they are the samples of.
        same: the devices that have the same samples.
        group: the devices that have the others, along the axes that shard them.
        site: the source line of the step.
    """
    x = torch.cat([*rows])
    if same is not None and same.size > 1:
        averaged = x.is_floating_point() or x.is_complex()
        (x,) = Bound(Psum() if averaged else Broadcast(0), same, site).run((x,))
        x = x / same.size if averaged else x
    cut = batch.cut
    if cut is None or group is None or cut.is_even:
        return x
    longest = -(-cut.length // cut.parts)
    filled = x.new_zeros(longest, *x.shape[1:])
    filled[: len(x)] = x
    (every,) = Bound(AllGather(0, True), group, site).run((filled,))
    return torch.cat([part[:length] for part, length in zip(every.split(longest), cut.lengths(), strict=True)])


def global_aux(found: Sequence[PyTree], batch: Batch, prefix: PyTree) -> PyTree:
    """Return the metrics of a step from those of the local devices: rows have the batch's layout, if that is even."""
    cut, (leaves, structure) = batch.cut, flatten(found[0])

    def joined(reduction: AuxReduction, shards: tuple[Tensor, ...]) -> Tensor | Sharded:
        x = shards[0]
        if reduction != "rows":
            return x
        if cut is None or not cut.is_even:
            return Sharded(tuple(x.shape), Layout(batch.mesh), shards)
        return Sharded((cut.length, *x.shape[1:]), Layout(batch.mesh, P(cut.axes)), shards)

    columns = zip(*(flatten(aux)[0] for aux in found), strict=True)
    return unflatten(structure, [*map(joined, aux_reductions(leaves, prefix, found[0]), columns)])
