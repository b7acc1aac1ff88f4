"""Means and sums over the slices of all devices: of the loss, and of the metrics of a loss function.

Every slice has a weight, computed on the host: its number of samples, or the result of `weight=`. A slice of weight 0
adds nothing, even if its loss is not finite; the result of an idle slice is dropped.

    (loss x weight, means x weight, counts)  of each slice  ->  one tree of sums  ->  psum  ->  divided by the total weight
    (weight, more numbers)                                  ->  one tree of sums  ->  psum  ->  a list

The second vector is on the host, so it does not wait for the first.

Metrics (`has_aux`):

    0-d, floating        the mean, weighted as the loss is
    0-d, integer         a count: the sum over all slices
    a row per sample     the rows of the global batch, in its order: a `Sharded` with the batch's layout, replicated
                         where the batch is uneven

So each is the function's result for the global batch, if that is a mean, a count or one row per sample. Devices with
the same samples, along other axes, are averaged; rows of integers or bools are the first one's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from math import inf
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.mesh.collectives.autograd import Bound
from fshard.mesh.collectives.moves import AllGather, Broadcast, Psum
from fshard.mesh.layout import Layout, P, PyTree, Structure, flatten_with_paths, unflatten
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.spmd.scope import Group
from fshard.source import Site
from fshard.transforms.agree import on_host, summed
from fshard.transforms.batch import Batch
from fshard.transforms.patterns import named, parts_of


class LossSums(NamedTuple):
    """The loss, means and sums of one slice, or of all together, and their weight."""

    loss: Tensor
    weight: float
    means: list[Tensor]
    counts: list[Tensor]


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
    loss, *rest = sums.split([1, *(x.numel() for x in (*first.means, *first.counts))])
    means = [_like(x, total / weight) for x, total in zip(first.means, rest, strict=False)]
    counts = [_like(x, total / many) for x, total in zip(first.counts, rest[len(means) :], strict=True)]
    loss = (loss / weight).reshape(()).to(torch.promote_types(first.loss.dtype, torch.float32))
    return LossSums(loss, weight / many, means, counts), more


def _like(x: Tensor, value: Tensor) -> Tensor:
    """Return a value in its original shape and dtype; integers are rounded."""
    return (value if x.is_floating_point() else value.round()).reshape(x.shape).to(x)


def _rows(found: Sequence[LossSums], near: torch.device) -> Tensor:
    """Return a row of numbers for each slice, times its weight; those of weight 0 are 0, finite or not."""
    if len(found) == 1 and not found[0].means and not found[0].counts:
        row = found[0].loss.to(near, torch.float64).reshape(1, 1)
        return row * found[0].weight if found[0].weight else torch.zeros_like(row)
    rows = _columns([[one.loss, *one.means] for one in found], near)
    weights = {one.weight for one in found}
    if len(weights) == 1 and all(weights):
        rows = rows * weights.pop()
    else:
        rows = torch.stack([row * one.weight for row, one in zip(rows, found, strict=True)])
    if found[0].counts:
        rows = torch.cat([rows, _columns([one.counts for one in found], near)], 1)
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
    """The weight of a slice, the factor of its gradient, and the weight of each sample if there is one."""

    weight: float
    share: float
    each: Tensor | None = None


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


def weights_of(weight: Any, samples: int | None) -> Tensor:
    """Return the weight of a part, or of each of its samples, in float64."""
    if isinstance(weight, Real) or (isinstance(weight, Tensor) and (weight.numel() == 1 or weight.shape == (samples,))):
        found = torch.as_tensor(weight, dtype=torch.float64)
        return found if found.shape == (samples,) else found.reshape(())
    found = f"a tensor of shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else repr(weight)
    raise ValueError(f"weight= must return one number for a part of the batch, or one for each sample; got {found}.")


def weight_of_samples(weights: Tensor) -> Tensor:
    """Add up the weights of samples; if one is negative, return that, for `refuse_weights`."""
    return torch.where((weights < 0).any(), weights.amin(), weights.sum())


def weighted(losses: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean of losses; a loss of weight 0 need not be finite."""
    total = weights.sum()
    shares = (weights / torch.where(total > 0, total, 1)).to(losses)
    return torch.where(weights > 0, losses * shares, 0).sum()


class _IdleState(threading.local):
    idle: bool = False


_here = _IdleState()


def is_idle() -> bool:
    """Return True if the calling device runs an idle slice."""
    return _here.idle


class idle_slice:
    """Mark the calling device as idle within the context.

    >>> with idle_slice(True):
    ...     is_idle()
    True
    """

    __slots__ = ("_before", "_idle")

    def __init__(self, idle: bool) -> None:
        self._idle = idle

    def __enter__(self) -> None:
        self._before, _here.idle = _here.idle, self._idle

    def __exit__(self, *_: object) -> None:
        _here.idle = self._before


class AuxLeaves(NamedTuple):
    """Leaves by their indices in the tree: means, counts, and rows per sample."""

    means: dict[int, Tensor]
    counts: dict[int, Tensor]
    rows: dict[int, Tensor]
    structure: Structure


def sort_aux(aux: PyTree, samples: int | None, near: torch.device) -> AuxLeaves:
    """Sort the metrics of a slice with this number of samples; raise with all that are invalid."""
    if isinstance(aux, tuple) and not aux:
        return _NOTHING
    paths, leaves, structure = flatten_with_paths(aux)
    found, wrong = AuxLeaves({}, {}, {}, structure), list[str]()
    for place, (path, x) in enumerate(zip(paths, leaves, strict=True)):
        x = torch.full((), x, device=near) if isinstance(x, bool | int | float) else x
        kind = _complaint(x, samples)
        if kind is not None:
            wrong.append(f"{named(parts_of(path)) or 'it'} is {kind}")
        elif x.ndim:
            found.rows[place] = x.detach()
        else:
            (found.means if x.is_floating_point() else found.counts)[place] = x
    if wrong:
        raise ValueError(
            f"value_and_grad: what is returned beside the loss is a number, or has a row for each sample; {'; '.join(wrong)}. "
            "Write x.float() for the share of a bool, or x.sum() for a count, and x.unbind() for several numbers."
        )
    return found


_NOTHING = AuxLeaves({}, {}, {}, flatten_with_paths(())[2])


def _complaint(x: Any, samples: int | None) -> str | None:
    """Return the error of a leaf."""
    if not isinstance(x, Tensor):
        return f"a {type(x).__name__}"
    if x.ndim == 0:
        return "a bool" if x.dtype == torch.bool else "complex" if x.is_complex() else None
    if x.shape[0] == samples:
        return None
    return f"of shape {tuple(x.shape)}" + ("" if samples is None else f", but there are {samples} samples")


def slice_results(loss: Tensor, count: Count, aux: PyTree, samples: int | None) -> tuple[LossSums, AuxLeaves]:
    """Return the results of a slice: its loss and numbers with their weight, and its metrics."""
    leaves = sort_aux(aux, samples, loss.device)
    return LossSums(loss.detach(), count.weight, [*leaves.means.values()], [*leaves.counts.values()]), leaves


class Rows(NamedTuple):
    """One device's rows of a leaf, and their layouts."""

    own: Tensor
    shape: tuple[int, ...]
    layout: Layout


def collected(rows: Sequence[Tensor], batch: Batch, same: Group | None, group: Group | None, site: Site) -> Rows:
    """Concatenate the rows of a device's slices, those of each sample once.

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
    if cut is None or group is None or cut.length % cut.parts == 0:
        return with_batch_layout(x, batch)
    longest = -(-cut.length // cut.parts)
    filled = x.new_zeros(longest, *x.shape[1:])
    filled[: len(x)] = x
    (every,) = Bound(AllGather(0, True), group, site).run((filled,))
    parts = [part[:length] for part, length in zip(every.split(longest), cut.lengths(), strict=True)]
    return with_batch_layout(torch.cat(parts), batch)


def combine_aux(
    each: Sequence[AuxLeaves], rows: Sequence[int | None], mean: LossSums, collect: Callable[[Sequence[Tensor]], Rows]
) -> tuple[dict[int, Tensor], dict[int, Rows]]:
    """Return the metrics by index: numbers, of which `mean` has the global ones, and rows.

    Args:
        each: the metrics of each slice.
        rows: number of rows of each that count; None: all.
        mean: over all slices of all devices.
        collect: concatenates the rows of slices.
    """
    last = each[-1]
    numbers = dict(zip((*last.means, *last.counts), (*mean.means, *mean.counts), strict=True))
    columns = {
        place: [sort_aux.rows[place][:count] for sort_aux, count in zip(each, rows, strict=True)] for place in last.rows
    }
    return numbers, {place: collect(column) for place, column in columns.items()}


def with_batch_layout(x: Tensor, batch: Batch) -> Rows:
    """Give collected rows the batch's layout, or replicate them where it is uneven."""
    cut = batch.cut
    if cut is None or cut.length % cut.parts:
        return Rows(x, tuple(x.shape), Layout(batch.mesh))
    return Rows(x, (cut.length, *x.shape[1:]), Layout(batch.mesh, P(cut.axes)))


def put_together(means: dict[int, Tensor], rows: Sequence[dict[int, Rows]], structure: Structure) -> PyTree:
    """Return the tree: numbers, and rows as the devices at hand hold them."""
    integers = {
        place: Sharded(one.shape, one.layout, tuple(device[place].own for device in rows))
        for place, one in rows[0].items()
    }
    known = {**means, **integers}
    return unflatten(structure, [known[place] for place in range(structure.num_leaves)])
