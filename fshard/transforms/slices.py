"""The slices of a batch that one device runs: weights, random draws, collectives and losses.

slice 0    3 samples    weight 3, or that of `weight=`    share 3/8: the factor of its gradient
slice 1    2 samples    weight 2                          share 2/8
the other device: 3 samples
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from math import inf
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.mesh.layout import PyTree
from fshard.mesh.layout.host_copies import start_read
from fshard.mesh.runtimes.watch import watching
from fshard.mesh.spmd.scope import Group, Scope, loss_scope
from fshard.optim.scaling import finite_scale
from fshard.randomness import keyed_random
from fshard.source import Site
from fshard.transforms.agreement import (
    SliceLoss,
    host_row,
    input_differences,
    losses_by_index,
    reduce_rows,
)
from fshard.transforms.batch import Batch, Slice
from fshard.transforms.loss_collectives import LossCollectives
from fshard.transforms.metrics import SliceMetrics, combine_metrics, metrics_of
from fshard.transforms.options import StepOptions


class Count(NamedTuple):
    """The weight of a slice, and its share in the gradient, which the next note explains."""

    weight: float
    share: float


# Note [Weights in reproducible mode]
# The backward of a slice begins with a cotangent of 1, whatever its weight. The gradient of each
# slice is multiplied by its weight when it is added to the tree, in at least 32 bits
# (`TreeAccumulator`, `OrderedSum`): a loss times its number of tokens would overflow in 16. The sum
# of all devices is divided by the weight of the batch at the end (`gradient_divisor`), which is
# then known to all of them without another collective.


class SliceTurn(NamedTuple):
    """A slice, its index among those of all devices and of this one, and their weights.

    Weights on an accelerator are read when the first is used: the host waits for it then.
    """

    slice: Slice
    number: int
    turn: int
    counts: Callable[[], list[Count]]

    @property
    def weight(self) -> float:
        """The weight of the slice."""
        return self.counts()[self.turn].weight

    @property
    def share(self) -> float:
        """The share of the slice in the gradient: the factor of the cotangent of its loss."""
        return self.counts()[self.turn].share


class SliceValues(NamedTuple):
    """The results of a loss function on one slice; `loss` has a graph, `metrics` have none."""

    loss: Tensor
    metrics: SliceMetrics
    buffers: PyTree


class DeviceSlices:
    """The slices of a batch that one device runs in a step.

    They have the indices `first`, `first + 1`, ... among the slices of all devices: random draws
    are seeded by these.

    Args:
        options: of the step.
        scope: of the device.
        batch: the batch.
        index: of the device among the local ones.
        key: of random draws; the same on all devices.
        site: the source line of the step.
    """

    def __init__(
        self,
        options: StepOptions,
        scope: Scope,
        batch: Batch,
        index: int,
        key: int,
        site: Site,
    ) -> None:
        self.options = options
        self.scope = scope
        self.batch = batch
        self.index = index
        self.key = key
        self.site = site
        self.group = self.along(batch.axes)  # the devices that have other samples
        self.count = options.turns(1 if self.group is None else self.group.size)
        self.collectives = LossCollectives(batch, self.count, options)
        # The local axes along which all devices have the same samples. So far the loss function has
        # called no collective, so `along` has no other axes.
        self.local = self.collectives.along

    def along(self, axes: tuple[str, ...]) -> Group | None:
        """Return the devices along axes, None without axes."""
        return self.scope.group(axes, self.options.caller) if axes else None

    @property
    def everyone(self) -> Group | None:
        """All devices whose losses make up the objective, in the order of sums over slices.

        The batch's axes are the last ones: neighbours along the last axis are added first, and the
        tree of sums continues that of the device's slices. See `summation_tree`.
        """
        return self.along((*self.collectives.along, *self.batch.axes))

    # -- weights -----------------------------------------------------------------------------------

    def turns(self) -> list[SliceTurn]:
        """Return the slices in the order in which they run, with their weights."""
        options = self.options
        slices = self.batch.slices(self.index, self.count, is_copied=options.reproducible)
        rows = list[Tensor]()
        if options.weight is not None:
            weights = [options.weight(self.batch.tree(slice.leaves)) for slice in slices]
            rows.append(torch.stack([weight_of(weight) for weight in weights]))
        read = start_read(rows)
        counts = cache(lambda: self._counts(slices, read()))
        first = 0 if self.group is None else self.group.index * self.count
        return [SliceTurn(slice, first + turn, turn, counts) for turn, slice in enumerate(slices)]

    def _counts(self, slices: list[Slice], row: list[Tensor]) -> list[Count]:
        """Return the weights of the slices: those of `weight=`, or their numbers of samples."""
        is_weighed = bool(row)
        if not is_weighed:
            weights = [float(slice.rows) for slice in slices]
        elif row[0].is_meta:
            return [Count(1.0, 1.0)] * len(slices)
        else:
            weights = _valid_weights(row[0].tolist(), slices)

        if self.options.reproducible:
            return [Count(weight, 1.0) for weight in weights]
        if is_weighed:
            (sums,) = reduce_rows((host_row([sum(weights)], row[0].device),), self.group, self.site)
            total = nonzero_weight(sums.item())
        else:
            total = self.batch.total(len(slices))
        return [Count(weight, weight / total) for weight in weights]

    # -- the run of a slice ------------------------------------------------------------------------

    @contextmanager
    def running(self, turn: SliceTurn) -> Generator[None]:
        """Draw random numbers as this slice, and record the collectives that are called."""
        is_idle = not turn.slice.rows
        with keyed_random(self.key, 0, turn.number), self.loss_scope(is_idle=is_idle):
            yield

    def loss_scope(self, *, is_idle: bool = False) -> AbstractContextManager[None]:
        """Return the context of a loss function, in which its collectives are recorded."""
        return loss_scope(
            self.batch.mesh.axis_names,
            self.collectives.record,
            is_idle=is_idle,
            activations=self.options.activations,
        )

    def values_of(self, result: Any, slice: Slice, names: Sequence[str]) -> SliceValues:
        """Return the results of a loss function: the loss alone, or a tuple with these names."""
        values = unpack_result(result, names)
        loss = one_loss(self.options, values["loss"], slice)
        metrics = metrics_of(values.get("aux", ()), slice, loss.device, self.options.aux)
        return SliceValues(loss, metrics, values.get("buffers", ()))

    # -- what devices compare ----------------------------------------------------------------------

    def input_differences(
        self,
        params: Iterable[Tensor],
        everyone: Group | None,
        same_samples: Group | None,
        *,
        is_first_step: bool,
    ) -> dict[str, float]:
        """Return the differences of this device's inputs: see `agreement.input_differences`."""
        # Only in reproducible mode must all devices draw alike: elsewhere a rank may have its own
        # seed.
        key = self.key if self.options.reproducible else None
        return input_differences(
            self.batch,
            self.index,
            key,
            params,
            everyone,
            same_samples,
            is_first_step=is_first_step,
        )

    def compared_losses(self, losses: Sequence[SliceLoss], *, is_first_step: bool) -> list[float]:
        """Return the row that compares losses along local axes, where they can be read."""
        is_in_host_memory = self.batch.mesh.device_type == "cpu"
        if not (is_in_host_memory or is_first_step or watching()):
            return []  # the host would wait for the device
        return losses_by_index(losses, self.along(self.local))

    def combine_metrics(
        self, metrics: Sequence[SliceMetrics], turns: Sequence[SliceTurn], mean: SliceLoss
    ) -> PyTree:
        """Return the metrics of all slices; `mean` is the loss of the batch."""
        slices = [turn.slice for turn in turns]
        along = self.collectives.along
        return combine_metrics(metrics, slices, mean, self.batch, along, self.scope, self.site)


def _valid_weights(weights: Sequence[float], slices: Sequence[Slice]) -> list[float]:
    """Return valid weights of `weight=`; those of slices with a neighbour's sample are 0."""
    weights = [weight * bool(slice.rows) for weight, slice in zip(weights, slices, strict=True)]
    for weight in weights:
        if not 0 <= weight < inf:
            raise ValueError(f"weight= must return finite numbers of at least 0; got {weight}.")
    return weights


def weight_of(weight: Any) -> Tensor:
    """Return the result of `weight=` in float64."""
    is_tensor = isinstance(weight, Tensor)
    if not isinstance(weight, Tensor | Real) or (is_tensor and weight.numel() != 1):
        kind = f"a tensor of shape {tuple(weight.shape)}" if is_tensor else repr(weight)
        raise ValueError(f"weight= must return one number for a part of the batch; got {kind}.")
    return torch.as_tensor(weight, dtype=torch.float64).reshape(())


def nonzero_weight(total: float) -> float:
    """Return the weight of the entire batch, which must not be 0."""
    if not total:
        raise ValueError(
            "weight= gave 0 for all of the batch, which has no mean loss then. Leave the batch out."
        )
    return total


def cotangent_of(loss: Tensor, share: float, scale: float) -> Tensor:
    """Return the cotangent of a loss: its share of the gradient, times the loss scale."""
    return torch.full_like(loss, share * finite_scale(largest_of(loss), scale))


def largest_of(loss: Tensor) -> float:
    """Return the largest number of the dtype of a loss: at most this scales it."""
    return torch.finfo(loss.dtype).max


def gradient_divisor(largest: float, scale: float, weight: float, *, is_weighted: bool) -> float:
    """Return what the sums of gradients are divided by.

    Args:
        largest: the largest number of the dtype of the losses.
        scale: of the losses: where it is too large for the dtype, a smaller one was applied.
        weight: of the entire batch.
        is_weighted: True if the gradients of slices were multiplied by their weights: Note [Weights
            in reproducible mode]; else the cotangents had their shares.
    """
    ratio = finite_scale(largest, scale) / scale
    return ratio * nonzero_weight(weight) if is_weighted else ratio


def one_loss(options: StepOptions, loss: Any, slice: Slice) -> Tensor:
    """Return the loss of a slice as one number, from the result of the loss function."""
    if isinstance(loss, Tensor) and loss.shape == (slice.samples,) and options.weight is None:
        loss = loss.mean()
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        kind = type(loss).__name__
        if isinstance(loss, Tensor):
            kind = f"a tensor of shape {tuple(loss.shape)}"
        fix = "Give has_aux=True" if isinstance(loss, tuple | list) else "Take its mean"
        raise ValueError(
            "the loss function must return one number, or without weight= one for each sample; "
            f"got {kind}. {fix}."
        )
    if not loss.is_floating_point():
        raise ValueError(
            f"the loss function returned a number of {loss.dtype}, which has no gradient. "
            "Return a real floating one."
        )
    return loss.reshape(()) if loss.ndim else loss


def unpack_result(result: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return a loss function's results by name: the loss alone, or a tuple that begins with it."""
    if len(names) == 1:
        return {"loss": result}
    is_sequence = isinstance(result, tuple | list)
    if not is_sequence or len(result) != len(names):
        size = f" of {len(result)}" if is_sequence else ""
        kind = type(result).__name__
        raise ValueError(f"the loss function must return ({', '.join(names)}); got a {kind}{size}.")
    return dict(zip(names, result, strict=True))
