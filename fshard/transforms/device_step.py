"""One device's step: forward and backward of its slices, in sequence.

slice 0          slice 1          last slice
gradients kept   accumulated      accumulated, reduced as each unit's are ready
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from math import inf
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.errors import FshardError
from fshard.mesh.layout import PyTree, flatten_with_paths
from fshard.mesh.layout.host_copies import start_read
from fshard.mesh.spmd.global_inputs import digest
from fshard.mesh.spmd.scope import Group, loss_scope, require
from fshard.optim.scaling import finite_scale
from fshard.source import Site
from fshard.transforms.agreement import (
    SliceLoss,
    StepAgreement,
    average_losses,
    difference,
    host_row,
    input_differences,
    reduce_rows,
    tree_sum,
)
from fshard.transforms.batch import Batch, Slice
from fshard.transforms.fsdp.engine import Gradients
from fshard.transforms.fsdp.param_runtime import Order, ParamRuntime, followed
from fshard.transforms.fsdp.reductions import AccumulateInto
from fshard.transforms.fsdp.units import Unit
from fshard.transforms.graph_checks import refuse_unreached
from fshard.transforms.loss_collectives import LossCollectives
from fshard.transforms.metrics import SliceMetrics, combine_metrics, metrics_of, slice_loss
from fshard.transforms.module.buffers import (
    Buffers,
    Written,
    averaged,
    entries_to_average,
    flags,
    irregular_difference,
    written_paths,
)
from fshard.transforms.options import StepOptions
from fshard.transforms.patterns import named, parts_of
from fshard.transforms.reproducible.randomness import keyed_random
from fshard.transforms.reproducible.summation_tree import TreeAccumulator


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


class SliceOutput(NamedTuple):
    """The results of one slice, and the buffers that it wrote."""

    loss: SliceLoss
    metrics: SliceMetrics
    written: dict[str, Tensor]


class DeviceResult(NamedTuple):
    """The results of one device's step.

    The loss and its weight; the metrics; the local shards of the gradients, None where no device has used a parameter; the
    buffers that changed; the order of units.
    """

    loss: Tensor
    weight: float
    aux: PyTree
    gradients: Gradients
    buffers: dict[str, Tensor]
    order: Order | None = None


class DeviceStep:
    """One device in one step.

    Args:
        options: of the step.
        runtime: its parameters.
        params: returns them as the tree that the loss function takes.
        buffers: of the loss function.
        batch: the batch.
        place: index of the device among the local ones.
        key: of random draws; the same on all devices.
        scale: the loss scale.
    """

    def __init__(
        self,
        options: StepOptions,
        runtime: ParamRuntime,
        params: Callable[[], PyTree],
        buffers: Buffers,
        batch: Batch,
        place: int,
        key: int,
        scale: float,
    ) -> None:
        self.options, self.runtime, self.params, self.buffers, self.batch = options, runtime, params, buffers, batch
        self.place, self.key, self.scale, self.scaled = place, key, scale, scale
        self.group = self._along(batch.axes)  # the devices that have other samples
        self.turns = options.turns(1 if self.group is None else self.group.size)
        self.collectives = LossCollectives(batch, self.turns, options)

    @property
    def everyone(self) -> Group | None:
        """All devices whose losses make up the objective; in the order in which slices are added up."""
        return self._along((*self.collectives.along, *self.batch.axes))

    def _along(self, axes: tuple[str, ...]) -> Group | None:
        return self.runtime.scope.group(axes, "value_and_grad") if axes else None

    def run(self) -> DeviceResult:
        """Run the step: forward and backward of the device's slices, then the reductions of all devices."""
        options, runtime = self.options, self.runtime
        turns = slice_turns(options, self.batch, self.place, self.turns, self.group, runtime.site)
        if options.reproducible:
            parts = self._run_reproducible(turns)
        else:
            parts = self._accumulate(turns) if options.reduce_once else [self.run_slice(turn) for turn in turns]
        return self._result(parts, [turn.slice for turn in turns])

    def _accumulate(self, turns: list[SliceTurn]) -> list[SliceOutput]:
        """Add the gradients of all slices up on the device, and reduce them with those of the last one."""
        *others, last = turns
        return [*(self.run_slice(turn, Unit.accumulate) for turn in others), self.run_slice(last)]

    def _run_reproducible(self, turns: list[SliceTurn]) -> list[SliceOutput]:
        """Add the gradients of all slices up in one binary tree, which the reduction continues over devices."""
        trees, parts = TreeAccumulator(self.runtime.units, self.runtime.reductions.as_reduced), list[SliceOutput]()
        for turn in turns:
            parts.append(self.run_slice(turn, trees.add))
            trees.end_slice(turn.weight.share)
        for unit in self.runtime.units:
            unit.accumulated = trees.result(unit)
        self.runtime.reductions.end()
        return parts

    def _result(self, parts: list[SliceOutput], slices: list[Slice]) -> DeviceResult:
        mean, used, changed = self.agree([part.loss for part in parts], [part.written for part in parts])
        gradients = self.gradients(used, mean.weight)
        along, metrics, runtime = self.collectives.along, [part.metrics for part in parts], self.runtime
        aux = combine_metrics(metrics, slices, mean, self.batch, along, runtime.scope, runtime.site)
        self.runtime.close()
        return DeviceResult(mean.loss, mean.weight, aux, gradients, changed, self.runtime.order)

    def run_slice(self, turn: SliceTurn, accumulate_into: AccumulateInto | None = None) -> SliceOutput:
        """Run forward and backward of one slice; its gradients are reduced, or accumulated for a later reduction."""
        runtime, slice, number = self.runtime, turn.slice, turn.number
        runtime.begin()
        with self.running(number, is_idle=not slice.rows):
            loss, buffers, aux = self._forward(slice)
            self.agree_on_axes(loss.device)
            count = turn.weight  # where the host waits, behind a forward that is launched
            share = 1.0 if self.options.reproducible else count.share  # 1: sums are weighted, in 32 bits
            start = self.begin_backward(loss, share, accumulate_into, idle=not count.weight)
            if loss.requires_grad:
                self.differentiate([loss], [start])
        if accumulate_into is None:
            runtime.reductions.end()
        written = self.buffers.changed(self.place, buffers, loss.device)
        metrics = metrics_of(aux, slice, loss.device, self.options.aux)
        return SliceOutput(slice_loss(loss, count.weight, metrics), metrics, written)

    def _forward(self, slice: Slice) -> tuple[Tensor, PyTree, PyTree]:
        options, runtime = self.options, self.runtime
        with torch.set_grad_enabled(options.backward):
            batch = self.batch.tree(slice.leaves, options.compute)
            with runtime.saved.watch():
                loss, buffers, aux = self._call_loss(batch)
            loss = one_loss(options, loss, slice)
        if runtime.fresh:
            refuse_unreached(loss)
        return loss, buffers, aux

    def agree_on_axes(self, device: torch.device) -> None:
        """Agree with all devices on the axes over which any of them called a collective, once."""
        cached = None if self.runtime.fresh else self.runtime.expected.along
        self.collectives.agree(self.runtime.scope, cached, device, self.runtime.site)

    @contextmanager
    def running(self, number: int, *, is_idle: bool = False) -> Generator[None]:
        """Draw as the slice of this number, and record collectives."""
        with keyed_random(self.key, 0, number), self._loss_scope(is_idle=is_idle):
            yield

    def _loss_scope(self, *, is_idle: bool) -> AbstractContextManager[None]:
        return loss_scope(self.batch.mesh.axis_names, self.collectives.record, is_idle=is_idle)

    def begin_backward(
        self, loss: Tensor, share: float, accumulate_into: AccumulateInto | None, *, idle: bool
    ) -> Tensor:
        """Begin the backward of a loss of this share; return its cotangent."""
        idle = idle and not self.collectives.is_mixed  # else other losses may depend on samples of weight 0
        self.runtime.begin_backward(self.everyone, self.collectives.along, accumulate_into, idle=idle)
        self.scaled = finite_scale(loss.dtype, self.scale)
        return torch.full_like(loss, share * self.scaled)

    def differentiate(self, outputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> None:
        """Run autograd, which calls the backwards of units, and runs parts of the forward again."""
        is_idle = require("a loss function").slice.is_idle
        with self.runtime.reductions.collecting(), self._loss_scope(is_idle=is_idle):
            torch.autograd.grad(outputs, [self.runtime.anchor], cotangents, allow_unused=True)

    def _call_loss(self, batch: PyTree) -> tuple[Any, PyTree, PyTree]:
        """Call the loss function; return the loss, buffers and metrics."""
        options, buffers = self.options, self.buffers.part(self.place)
        arguments = {"params": self.params(), **({"buffers": buffers} if options.has_buffers else {}), "batch": batch}
        try:
            result = followed(options.loss_fn)(*arguments.values())
        except (TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
            if not isinstance(error, FshardError):
                call = f"The loss function is called as loss_fn({', '.join(arguments)})"
                error.add_note(f"{options.caller}: {call}{self._hint(error, batch)}.")
            raise
        names = ["loss", *(["buffers"] if options.has_buffers else []), *(["aux"] if options.has_aux else [])]
        if len(names) == 1:
            return result, buffers, ()
        if not isinstance(result, tuple | list) or len(result) != len(names):
            size = f" of {len(result)}" if isinstance(result, tuple | list) else ""
            raise ValueError(
                f"the loss function must return ({', '.join(names)}); got a {type(result).__name__}{size}."
            )
        values = {"buffers": buffers, "aux": ()} | dict(zip(names, result, strict=True))
        return values["loss"], values["buffers"], values["aux"]

    def _hint(self, error: Exception, batch: PyTree) -> str:
        """Return the likely fix of an error in the loss function."""
        text, paths_and_leaves = str(error), zip(*flatten_with_paths(batch)[:2], strict=True)
        if "saved tensor hooks" in text:
            return (
                ". Mark the part that calls torch.func.grad, vjp or jacrev: fs.with_unsharded_params(part, keep=True)"
            )
        if ("'str'" in text or "not str" in text) and not isinstance(batch, Mapping):
            return (
                f". It indexes the batch, a {type(batch).__name__}, by a string: swap its arguments if params are last"
            )
        dtype, *others = {leaf.dtype for leaf in self.runtime.leaves if leaf.dtype.is_floating_point} or {None}
        for path, x in paths_and_leaves:
            if isinstance(x, Tensor) and x.dtype != dtype and dtype and not others and self.options.compute is None:
                short, name = (str(y).removeprefix("torch.") for y in (dtype, x.dtype))
                return (
                    f"; params are {short}, {named(('batch', *parts_of(path)))} is {name}. Where they meet, convert the "
                    f"batch, x.to({dtype}), or give compute={dtype} for floating ones"
                )
        return ""

    def agree(
        self, losses: list[SliceLoss], changed: Sequence[Mapping[str, Tensor]]
    ) -> tuple[SliceLoss, Sequence[float], dict[str, Tensor]]:
        """Average losses, metrics and buffers over all devices, and reduce the remaining gradients.

        Args:
            losses: of each slice.
            changed: the buffers that each has written.

        Returns also how many devices used each parameter, and the averaged buffers that were written.
        """
        runtime, group, paths = self.runtime, self.everyone, self.buffers.paths
        runtime.check_unchanged()
        runtime.end()
        if runtime.fresh and len(losses) > 1:
            runtime.warn_of_attributes()
        before = self.buffers.before(self.place)
        written = [Written(slice.weight, buffers) for slice, buffers in zip(losses, changed, strict=True)]
        agreement = StepAgreement(
            tree_sum([slice.weight for slice in losses]),
            self._input_differences() | (irregular_difference(written, before, group) if paths else {}),
            written=flags(paths, written_paths(written)),
            accumulated=[float(unit.accumulated is not None) for unit in runtime.units],
            used=[*map(float, runtime.reductions.used)],
        )
        copies = self.collectives.copies
        mean, row = average_losses(losses, agreement.pack(), group, runtime.site, copies=copies)
        agreement = agreement.unpack(row)
        agreement.check_inputs(self.options.caller, self.collectives.along)
        if any(leaf.trained for leaf in runtime.leaves):
            refuse_detached(agreement.used)
        runtime.reductions.rest(agreement.accumulated, agreement.used)
        if not paths:
            return mean, agreement.used, {}
        is_regular = not agreement.differences["buffers"]
        entries = entries_to_average(paths, agreement.written, written, before, agreed=is_regular)
        device = losses[0].loss.device
        return mean, agreement.used, averaged(written, entries, group, before, device, runtime.site)

    def _input_differences(self) -> dict[str, float]:
        """Return the differences of inputs; parameters that are used as they are stored are equal along the batch's axes."""
        runtime, group, is_first_step = self.runtime, self.everyone, self.runtime.fresh
        key = self.key if self.options.reproducible else None
        pairs = zip(runtime.leaves, runtime.shards, strict=True) if is_first_step else ()
        stored = [(leaf, x) for leaf, x in pairs if not leaf.gather.steps]
        params = (x for leaf, x in stored if not leaf.used.entries)
        same_samples = self._along(self.collectives.along)
        differences = input_differences(
            self.batch, self.place, key, params, group, same_samples, is_first_step=is_first_step
        )
        if self.options.local and self.batch.alone:
            local = [digest(x) for leaf, x in stored if leaf.used.entries]
            differences["params"] += difference(local, self.group)
        return differences | {"gathers": difference(runtime.sequence, group)}

    def gradients(self, used: Sequence[float], weight: float = 1.0) -> Gradients:
        """Return the gradients; None for a parameter that no device used. `weight` is the total of all slices."""
        divisor = self.scaled / self.scale
        if self.options.reproducible and self.batch.mesh.runtime != "abstract":
            divisor *= nonzero_weight(weight)
        return self.runtime.reductions.gradients(used, divisor)


def slice_turns(
    options: StepOptions, batch: Batch, place: int, count: int, group: Group | None, site: Site
) -> list[SliceTurn]:
    """Return the slices of the device at index `place`, with their weights; `group` are the devices with the others."""
    slices = batch.slices(place, count, apart=options.reproducible)
    weight = options.weight
    weights = [] if weight is None else [torch.stack([weight_of(weight(batch.tree(one.leaves))) for one in slices])]
    read = start_read(weights)
    counts = cache(lambda: counts_of(options, batch, slices, read(), group, site))
    first = 0 if group is None else group.index * count
    return [SliceTurn(slice, turn, first + turn, counts) for turn, slice in enumerate(slices)]


def counts_of(
    options: StepOptions, batch: Batch, slices: list[Slice], given: list[Tensor], group: Group | None, site: Site
) -> list[Count]:
    """Return the weights of a device's slices, `given` or their rows; `group` are the devices that have the others."""
    rows = [slice.rows for slice in slices]
    if not given:
        total = batch.total(len(slices)) if not options.reproducible else 1
        return [Count(float(each), each / total) for each in rows]
    (found,) = given
    if found.is_meta:
        return [Count(1.0, 1.0)] * len(slices)
    weights = [weight * bool(each) for weight, each in zip(found.tolist(), rows, strict=True)]
    for weight in weights:
        if not 0 <= weight < inf:
            raise ValueError(f"weight= must return finite numbers of at least 0; got {weight}.")
    if options.reproducible:
        return [Count(weight, weight) for weight in weights]
    (sums,) = reduce_rows((host_row([sum(weights)], found.device),), group, site)
    total = nonzero_weight(sums.item())
    return [Count(weight, weight / total) for weight in weights]


def weight_of(weight: Any) -> Tensor:
    """Return the result of `weight=` in float64."""
    if not isinstance(weight, Tensor | Real) or (isinstance(weight, Tensor) and weight.numel() != 1):
        found = f"a tensor of shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else repr(weight)
        raise ValueError(f"weight= must return one number for a part of the batch; got {found}.")
    return torch.as_tensor(weight, dtype=torch.float64).reshape(())


def nonzero_weight(total: float) -> float:
    """Return the weight of the entire batch, which must not be 0."""
    if not total:
        raise ValueError("weight= gave 0 for all of the batch, which has no mean loss then. Leave the batch out.")
    return total


def one_loss(options: StepOptions, loss: Any, slice: Slice) -> Tensor:
    """Return the loss of a slice as one number, from the result of the loss function."""
    if isinstance(loss, Tensor) and loss.shape == (slice.samples,) and options.weight is None:
        loss = loss.mean()
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        cure = "Give has_aux=True" if isinstance(loss, tuple | list) else "Take its mean"
        raise ValueError(
            f"the loss function must return one number, or without weight= one for each sample; got {found}. {cure}."
        )
    if not loss.is_floating_point():
        raise ValueError(
            f"the loss function returned a number of {loss.dtype}, which has no gradient. Return a real floating one."
        )
    return loss.reshape(()) if loss.ndim else loss


def refuse_detached(used: Sequence[float]) -> None:
    """Raise if no device has used any of the trained parameters."""
    if not any(used):
        raise ValueError(
            "value_and_grad: the loss depends on no parameter that is trained, on any device, so nothing would be trained. Was "
            "it cut off by detach(), item(), no_grad() or torch.tensor(...), or are all parameters that it uses frozen?"
        )
