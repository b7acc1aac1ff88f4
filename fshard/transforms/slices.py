"""The slices that a device takes in a step, their weights, and their losses.

slice 0    3 samples    weight 3, or that of `weight=`    share 3/8: the factor of its gradient
slice 1    2 samples    weight 2                          share 2/8
the other device: 3 samples
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import inf
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.mesh.layout.host_copies import start_read
from fshard.mesh.spmd.scope import Group
from fshard.source import Site
from fshard.transforms.agreement import host_row, reduce_rows
from fshard.transforms.batch import Batch, Slice
from fshard.transforms.options import StepOptions


class Count(NamedTuple):
    """The weight of a slice, and the factor of its gradient."""

    weight: float
    share: float


class SliceTurn(NamedTuple):
    """A slice, its index among those of the device and of all devices, and the function that returns their weights."""

    slice: Slice
    turn: int
    number: int
    counts: Callable[[], list[Count]]

    @property
    def weight(self) -> Count:
        """Its weight."""
        return self.counts()[self.turn]


def slice_turns(
    options: StepOptions,
    batch: Batch,
    device_index: int,
    count: int,
    group: Group | None,
    site: Site,
) -> list[SliceTurn]:
    """Return the slices of the device at an index, with their weights; `group` are the devices that have the others."""
    slices, weight = (
        batch.slices(device_index, count, is_copied=options.reproducible),
        options.weight,
    )
    rows = (
        []
        if weight is None
        else [torch.stack([weight_of(weight(batch.tree(slice.leaves))) for slice in slices])]
    )
    read = start_read(rows)
    counts = cache(lambda: counts_of(options, batch, slices, read(), group, site))
    first = 0 if group is None else group.index * count
    return [SliceTurn(slice, turn, first + turn, counts) for turn, slice in enumerate(slices)]


def counts_of(
    options: StepOptions,
    batch: Batch,
    slices: list[Slice],
    row: list[Tensor],
    group: Group | None,
    site: Site,
) -> list[Count]:
    """Return the weights of a device's slices, from a row of `weight=` or their rows; `group` has the other slices."""
    if not row:
        total = batch.total(len(slices)) if not options.reproducible else 1
        return [Count(float(slice.rows), slice.rows / total) for slice in slices]
    if row[0].is_meta:
        return [Count(1.0, 1.0)] * len(slices)
    weights = [
        weight * bool(slice.rows) for weight, slice in zip(row[0].tolist(), slices, strict=True)
    ]
    for weight in weights:
        if not 0 <= weight < inf:
            raise ValueError(f"weight= must return finite numbers of at least 0; got {weight}.")
    if options.reproducible:
        return [Count(weight, weight) for weight in weights]
    (sums,) = reduce_rows((host_row([sum(weights)], row[0].device),), group, site)
    total = nonzero_weight(sums.item())
    return [Count(weight, weight / total) for weight in weights]


def weight_of(weight: Any) -> Tensor:
    """Return the result of `weight=` in float64."""
    if not isinstance(weight, Tensor | Real) or (
        isinstance(weight, Tensor) and weight.numel() != 1
    ):
        kind = (
            f"a tensor of shape {tuple(weight.shape)}"
            if isinstance(weight, Tensor)
            else repr(weight)
        )
        raise ValueError(f"weight= must return one number for a part of the batch; got {kind}.")
    return torch.as_tensor(weight, dtype=torch.float64).reshape(())


def nonzero_weight(total: float) -> float:
    """Return the weight of the entire batch, which must not be 0."""
    if not total:
        raise ValueError(
            "weight= gave 0 for all of the batch, which has no mean loss then. Leave the batch out."
        )
    return total


def one_loss(options: StepOptions, loss: Any, slice: Slice) -> Tensor:
    """Return the loss of a slice as one number, from the result of the loss function."""
    if isinstance(loss, Tensor) and loss.shape == (slice.samples,) and options.weight is None:
        loss = loss.mean()
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        kind = (
            f"a tensor of shape {tuple(loss.shape)}"
            if isinstance(loss, Tensor)
            else type(loss).__name__
        )
        cure = "Give has_aux=True" if isinstance(loss, tuple | list) else "Take its mean"
        raise ValueError(
            f"the loss function must return one number, or without weight= one for each sample; got {kind}. {cure}."
        )
    if not loss.is_floating_point():
        raise ValueError(
            f"the loss function returned a number of {loss.dtype}, which has no gradient. Return a real floating one."
        )
    return loss.reshape(()) if loss.ndim else loss


def unpack_result(result: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return what the loss function returned by its names: the loss alone, or a tuple that begins with it."""
    if len(names) == 1:
        return {"loss": result}
    if not isinstance(result, tuple | list) or len(result) != len(names):
        size = f" of {len(result)}" if isinstance(result, tuple | list) else ""
        raise ValueError(
            f"the loss function must return ({', '.join(names)}); got a {type(result).__name__}{size}."
        )
    return dict(zip(names, result, strict=True))
