"""One device's step: forward and backward of its slices, then what all devices agree on.

full model    F0 B0  F1 B1 ...           gradients are accumulated, or reduced as each unit's are ready    `ModelStep`
stages        the row of a schedule      (`transforms/stages/device.py`)                                    `StageStep`
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.errors import FshardError
from fshard.mesh.collectives.moves import Purpose
from fshard.mesh.layout import PyTree
from fshard.mesh.runtimes.watch import watching
from fshard.mesh.spmd.global_inputs import digest
from fshard.mesh.spmd.scope import Group, loss_scope, require
from fshard.optim.scaling import finite_scale
from fshard.randomness import keyed_random
from fshard.transforms.agreement import (
    SliceLoss,
    StepAgreement,
    average_losses,
    difference,
    input_differences,
    losses_by_index,
    tree_sum,
)
from fshard.transforms.batch import Batch
from fshard.transforms.fsdp.graph_checks import validate_no_reentrant_checkpoint
from fshard.transforms.fsdp.param_runtime import ParamRuntime, with_unsharded_params
from fshard.transforms.fsdp.plans import Gradients, Order
from fshard.transforms.fsdp.reductions import AccumulateInto
from fshard.transforms.fsdp.units import StepContext
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
from fshard.transforms.reproducible.summation_tree import TreeAccumulator
from fshard.transforms.slices import SliceTurn, nonzero_weight, one_loss, slice_turns, unpack_result


class SliceOutput(NamedTuple):
    """The results of one slice, and the buffers that it wrote."""

    loss: SliceLoss
    metrics: SliceMetrics
    written: dict[str, Tensor]


class DeviceResult(NamedTuple):
    """The results of one device's step.

    The loss and its weight; the metrics; the local shards of the gradients, None where no device has used a parameter; the
    buffers that changed; the order of units, which the next step expects.
    """

    loss: Tensor
    weight: float
    aux: PyTree
    gradients: Gradients
    buffers: dict[str, Tensor]
    order: Order


class DeviceStep:
    """One device in one step.

    Args:
        options: of the step.
        context: of its parameters.
        batch: the batch.
        index: of the device among the local ones.
        key: of random draws; the same on all devices.
        scale: the loss scale.
    """

    def __init__(
        self,
        options: StepOptions,
        context: StepContext,
        batch: Batch,
        index: int,
        key: int,
        scale: float,
    ) -> None:
        self.options, self.scope, self.site, self.batch = (
            options,
            context.scope,
            context.site,
            batch,
        )
        self.index, self.key, self.scale, self.scaled = index, key, scale, scale
        self.group = self.along(batch.axes)  # the devices that have other samples
        self.turns = options.turns(1 if self.group is None else self.group.size)
        self.collectives = LossCollectives(batch, self.turns, options)

    def run(self) -> DeviceResult:
        """Run the step."""
        raise NotImplementedError

    def along(self, axes: tuple[str, ...]) -> Group | None:
        """Return the devices along axes, None without axes."""
        return self.scope.group(axes, self.options.caller) if axes else None

    def slice_turns(self) -> list[SliceTurn]:
        """Return the slices of the device."""
        return slice_turns(self.options, self.batch, self.index, self.turns, self.group, self.site)

    def loss_scope(
        self, *, is_idle: bool = False, moments: list[Any] | None = None
    ) -> AbstractContextManager[None]:
        """Return the context of the loss function or a stage: it records the collectives that are called."""
        return loss_scope(
            self.batch.mesh.axis_names,
            self.record,
            is_idle=is_idle,
            moments=moments,
            activations=self.options.activations,
        )

    def record(self, call: str, group: Group, purpose: Purpose = "values") -> None:
        """Record a collective of the loss function."""
        self.collectives.record(call, group, purpose)

    @property
    def local(self) -> tuple[str, ...]:
        """The local axes along which all devices have the same samples."""
        return tuple([axis for axis in self.collectives.along if axis in self.options.local])

    def compared_losses(self, losses: Sequence[SliceLoss], *, is_first_step: bool) -> list[float]:
        """Return the row that compares the losses of devices along local axes, where they can be read."""
        is_in_host_memory = self.batch.mesh.device_type == "cpu"
        if not (is_in_host_memory or is_first_step or watching()):
            return []
        return losses_by_index(losses, self.along(self.local))

    def combine_metrics(
        self, metrics: Sequence[SliceMetrics], slice_turns: Sequence[SliceTurn], mean: SliceLoss
    ) -> PyTree:
        """Return the metrics of all slices; `mean` is the loss of the batch."""
        slices, along = [slice_turn.slice for slice_turn in slice_turns], self.collectives.along
        return combine_metrics(metrics, slices, mean, self.batch, along, self.scope, self.site)


class ModelStep(DeviceStep):
    """One device in one step of a full model.

    Args:
        options: of the step.
        runtime: its parameters.
        params: returns them as the tree that the loss function takes.
        buffers: of the loss function.
        batch, index, key, scale: see `DeviceStep`.
    """

    def __init__(
        self,
        options: StepOptions,
        runtime: ParamRuntime,
        params: Callable[[], PyTree],
        buffers: Buffers,
        batch: Batch,
        index: int,
        key: int,
        scale: float,
    ) -> None:
        super().__init__(options, runtime.context, batch, index, key, scale)
        self.runtime, self.params, self.buffers = runtime, params, buffers

    @property
    def everyone(self) -> Group | None:
        """All devices whose losses make up the objective; in the order in which slices are added up."""
        return self.along((*self.collectives.along, *self.batch.axes))

    def run(self) -> DeviceResult:
        """Run forward and backward of the device's slices, then the reductions of all devices.

        Gradients of several slices are accumulated on the device and reduced with those of the last one; in reproducible mode
        they are added in one binary tree, which the reduction continues over devices.
        """
        options, runtime, reductions = self.options, self.runtime, self.runtime.reductions
        trees = TreeAccumulator(reductions.units, runtime.reducer) if options.reproducible else None
        slice_turns, outputs = self.slice_turns(), list[SliceOutput]()
        for turn in slice_turns:
            accumulate_into = None if trees is None else trees.add
            if trees is None and options.reduce_once and turn is not slice_turns[-1]:
                accumulate_into = reductions.accumulate
            outputs.append(self.run_slice(turn, accumulate_into))
            if trees is not None:
                trees.end_slice(turn.weight.share)
        if trees is not None:
            reductions.accumulated = [trees.result(unit) for unit in reductions.units]
            reductions.end()
        mean, used, changed = self.agree(
            [output.loss for output in outputs], [output.written for output in outputs]
        )
        gradients = self.gradients(used, mean.weight)
        aux = self.combine_metrics([output.metrics for output in outputs], slice_turns, mean)
        runtime.close()
        return DeviceResult(mean.loss, mean.weight, aux, gradients, changed, runtime.order)

    def run_slice(
        self, slice_turn: SliceTurn, accumulate_into: AccumulateInto | None
    ) -> SliceOutput:
        """Run forward and backward of one slice.

        Its gradients are reduced, or accumulated for a later reduction.
        """
        options, runtime, slice = self.options, self.runtime, slice_turn.slice
        buffers, extra = (
            self.buffers.part(self.index),
            {"buffers": options.has_buffers, "aux": options.has_aux},
        )
        loss_fn = options.loss_fn
        if hasattr(
            loss_fn, "_torchdynamo_orig_callable"
        ):  # compiled functions take no lazy parameters
            loss_fn = with_unsharded_params(loss_fn)
        runtime.begin_slice()
        with self.running(slice_turn.number, is_idle=not slice.rows):
            with torch.set_grad_enabled(options.backward):
                batch = self.batch.tree(slice.leaves, options.compute)
                arguments = self.params(), *((buffers,) if options.has_buffers else ()), batch
                with runtime.saved.watch(), self._describing_call():
                    result = loss_fn(*arguments)
                del arguments, batch
                values = unpack_result(
                    result, ["loss", *(name for name, is_there in extra.items() if is_there)]
                )
                loss = one_loss(options, values["loss"], slice)
            if runtime.is_first_step:
                validate_no_reentrant_checkpoint(loss)
            self.agree_on_axes(loss.device)
            count = slice_turn.weight  # where the host waits, behind a forward that is launched
            share = 1.0 if options.reproducible else count.share  # 1: sums are weighted, in 32 bits
            cotangent = self.begin_backward(loss, share, accumulate_into, idle=not count.weight)
            if loss.requires_grad:
                self.differentiate([loss], [cotangent])
        if accumulate_into is None:
            runtime.reductions.end()
        metrics = metrics_of(values.get("aux", ()), slice, loss.device, options.aux)
        written = self.buffers.changed(self.index, values.get("buffers", buffers), loss.device)
        return SliceOutput(slice_loss(loss, count.weight, metrics), metrics, written)

    @contextmanager
    def _describing_call(self) -> Generator[None]:
        """Add to an error of the loss function how it is called."""
        try:
            yield
        except (TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
            if not isinstance(error, FshardError):
                call = f"loss_fn(params, {'buffers, ' if self.options.has_buffers else ''}batch)"
                error.add_note(f"{self.options.caller}: The loss function is called as {call}.")
            raise

    def agree_on_axes(self, device: torch.device) -> None:
        """Agree with all devices on the axes over which any of them called a collective, once."""
        cached = None if self.runtime.is_first_step else self.runtime.expected.along
        self.collectives.agree(self.scope, cached, device, self.site)

    @contextmanager
    def running(self, number: int, *, is_idle: bool = False) -> Generator[None]:
        """Draw as the slice of this number, and record collectives."""
        with keyed_random(self.key, 0, number), self.loss_scope(is_idle=is_idle):
            yield

    def begin_backward(
        self, loss: Tensor, share: float, accumulate_into: AccumulateInto | None, *, idle: bool
    ) -> Tensor:
        """Begin the backward of a loss of this share; return its cotangent."""
        idle = (
            idle and not self.collectives.is_mixed
        )  # else other losses may depend on samples of weight 0
        used_units, along = self.runtime.used_units, self.collectives.along
        self.runtime.reductions.begin(
            used_units, self.everyone, along, accumulate_into, is_idle=idle
        )
        self.scaled = finite_scale(loss.dtype, self.scale)
        return torch.full_like(loss, share * self.scaled)

    def differentiate(
        self,
        outputs: Sequence[Tensor],
        cotangents: Sequence[Tensor],
        leaves: Sequence[Tensor] = (),
        *,
        retain_graph: bool = False,
    ) -> None:
        """Run autograd, which calls the backwards of units, and runs parts of the forward again.

        The gradients of `leaves`, such as inputs, are added to their `.grad`.
        """
        with (
            self.runtime.backward(),
            self.loss_scope(is_idle=require("a loss function").slice.is_idle),
        ):
            anchor = self.runtime.anchor
            if leaves:
                torch.autograd.backward(
                    outputs, cotangents, retain_graph=retain_graph, inputs=[anchor, *leaves]
                )
            else:
                torch.autograd.grad(
                    outputs, [anchor], cotangents, retain_graph=retain_graph, allow_unused=True
                )

    def agree(
        self,
        losses: list[SliceLoss],
        changed: Sequence[Mapping[str, Tensor]],
        optimizer: object = None,
        order: object = None,
    ) -> tuple[SliceLoss, Sequence[float], dict[str, Tensor]]:
        """Average losses, metrics and buffers over all devices, and reduce the remaining gradients.

        Args:
            losses: of each slice.
            changed: the buffers that each has written.
            optimizer: in a loop its options, which must be the same on all devices.
            order: in a loop what samplers have chosen, which must be the same on all devices.

        Returns also how many devices used each parameter, and the averaged buffers that were written.
        """
        runtime, group, paths = self.runtime, self.everyone, self.buffers.paths
        runtime.check_unchanged()
        runtime.finish_slice()
        before = self.buffers.before(self.index)
        differences = self._input_differences()
        if optimizer is not None:
            differences["optimizer"] = difference(optimizer, group)
        if order:
            differences["order"] = difference(order, group)
        written = [
            Written(slice.weight, buffers) for slice, buffers in zip(losses, changed, strict=True)
        ]
        agreement = StepAgreement(
            tree_sum([slice.weight for slice in losses]),
            differences | (irregular_difference(written, before, group) if paths else {}),
            losses=self.compared_losses(losses, is_first_step=runtime.is_first_step),
            written=flags(paths, written_paths(written)),
            accumulated=[float(gs is not None) for gs in runtime.reductions.accumulated],
            used=[*map(float, runtime.reducer.used)],
        )
        copies = self.collectives.copies
        mean, row = average_losses(losses, agreement.pack(), group, self.site, copies=copies)
        agreement = agreement.unpack(row)
        agreement.check_inputs(self.options.caller, self.collectives.along)
        copies = prod(self.batch.mesh.shape[axis] for axis in self.local)
        agreement.check_losses(self.options.caller, self.local, agreement.weight / copies)
        if any(leaf.trained for leaf in runtime.leaves):
            validate_is_trained(agreement.used)
        runtime.reductions.rest(agreement.accumulated, agreement.used)
        if not paths:
            return mean, agreement.used, {}
        is_regular = not agreement.differences["buffers"]
        entries = entries_to_average(paths, agreement.written, written, before, agreed=is_regular)
        device = losses[0].loss.device
        return mean, agreement.used, averaged(written, entries, group, before, device, self.site)

    def _input_differences(self) -> dict[str, float]:
        """Return the differences of inputs; parameters that are used as they are stored are equal along the batch's axes."""
        runtime, group, is_first_step = self.runtime, self.everyone, self.runtime.is_first_step
        key = self.key if self.options.reproducible else None
        pairs = zip(runtime.leaves, runtime.shards, strict=True) if is_first_step else ()
        stored = [(leaf, x) for leaf, x in pairs if not leaf.gather.steps]
        params = (x for leaf, x in stored if not leaf.used.entries)
        same_samples = self.along(self.collectives.along)
        differences = input_differences(
            self.batch, self.index, key, params, group, same_samples, is_first_step=is_first_step
        )
        if self.options.local and self.batch.may_differ:
            local = [digest(x) for leaf, x in stored if leaf.used.entries]
            equal_along = tuple(
                [axis for axis in self.batch.axes if axis not in self.options.local]
            )
            differences["params"] += difference(local, self.along(equal_along))
        return differences | {"gathers": difference(runtime.sequence, group)}

    def gradients(self, used: Sequence[float], weight: float = 1.0) -> Gradients:
        """Return the gradients; None for a parameter that no device used. `weight` is the total of all slices."""
        divisor = self.scaled / self.scale
        if self.options.reproducible and self.batch.mesh.runtime != "abstract":
            divisor *= nonzero_weight(weight)
        return self.runtime.reducer.gradients(used, divisor)


def validate_is_trained(used: Sequence[float]) -> None:
    """Raise if no device has used any of the trained parameters."""
    if not any(used):
        raise ValueError(
            "value_and_grad: the loss depends on no parameter that is trained, on any device, so nothing would be trained. Was "
            "it cut off by detach(), item(), no_grad() or torch.tensor(...), or are all parameters that it uses frozen?"
        )
