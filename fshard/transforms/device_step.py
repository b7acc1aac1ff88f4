"""One device's step: forward and backward of its slices, then what all devices agree on.

    full model    F0 B0  F1 B1 ...                   finish     `ModelStep.run`
    loop          F  the caller's loss  B  ...       finish     `booster/loop.py`
    stages        the row of a schedule              finish     `transforms/stages/device.py`

A full model and a loop have the same three phases, those of `ModelStep`. In stages a schedule calls
forward and backward action by action. The end is the same for all: agreement, then gradients,
buffers and metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from math import inf, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.errors import FshardError
from fshard.mesh.layout import PyTree
from fshard.mesh.spmd.global_inputs import digest
from fshard.mesh.spmd.moments import listeners, reach
from fshard.mesh.spmd.scope import Group, require
from fshard.transforms.agreement import (
    SliceLoss,
    StepAgreement,
    average_losses,
    difference,
    tree_sum,
)
from fshard.transforms.fsdp.graph_checks import validate_no_reentrant_checkpoint
from fshard.transforms.fsdp.param_runtime import ParamRuntime, with_unsharded_params
from fshard.transforms.fsdp.plans import Gradients, Order
from fshard.transforms.fsdp.reductions import AccumulateInto
from fshard.transforms.metrics import SliceMetrics, slice_loss
from fshard.transforms.module.buffers import (
    Buffers,
    Written,
    averaged,
    entries_to_average,
    flags,
    irregular_difference,
    written_paths,
)
from fshard.transforms.reproducible.summation_tree import TreeAccumulator
from fshard.transforms.slices import (
    DeviceSlices,
    SliceTurn,
    SliceValues,
    cotangent_of,
    gradient_divisor,
    largest_of,
)


class SliceOutput(NamedTuple):
    """The results of one slice, and the buffers that it wrote."""

    loss: SliceLoss
    metrics: SliceMetrics
    written: Mapping[str, Tensor]


class DeviceResult(NamedTuple):
    """The results of one device's step.

    The loss, its weight, and the largest number of its dtype; the metrics; the local shards of the
    gradients, None where no device has used a parameter; the buffers that changed; the order of
    units, which the next step expects.
    """

    loss: Tensor
    weight: float
    largest: float
    aux: PyTree
    gradients: Gradients
    buffers: Mapping[str, Tensor]
    order: Order


class ModelStep:
    """One device in one step of a full model, in three phases.

    forward     the function on one slice; units are unsharded as it uses them
    backward    autograd from there; gradients are reduced as each unit's are ready, or added up
    finish      all devices agree; gradients that are left are reduced, losses and buffers averaged

    Args:
        slices: those of the device.
        runtime: its parameters.
        params: returns them as the tree that the function takes.
        buffers: of the function.
        scale: of the losses in `run`.
    """

    def __init__(
        self,
        slices: DeviceSlices,
        runtime: ParamRuntime,
        params: Callable[[], PyTree],
        buffers: Buffers,
        scale: float = 1.0,
    ) -> None:
        self.slices = slices
        self.options = slices.options
        self.runtime = runtime
        self.params = params
        self.buffers = buffers
        self.scale = scale
        self.largest = inf  # number of the dtype of the loss, which limits the scale
        # In reproducible mode the gradients of slices are added in one binary tree.
        self.trees: TreeAccumulator | None = None
        if self.options.reproducible:
            self.trees = TreeAccumulator(runtime.reductions.units, runtime.reducer)

    def run(self) -> DeviceResult:
        """Run all slices by the loss function, and finish.

        Gradients of several slices are added up on the device and reduced with those of the last
        one. In reproducible mode they are added in one binary tree, which the reduction continues
        over devices.
        """
        options, runtime, slices = self.options, self.runtime, self.slices
        turns = slices.turns()
        recorder = runtime.context.recorder
        outputs = list[SliceOutput]()
        for turn in turns:
            is_last = turn is turns[-1]
            is_reduced = self.trees is None and (is_last or not options.reduce_once)
            runtime.begin_slice()
            if recorder is not None:
                recorder.begin_slice(turn.number)
            with slices.running(turn), torch.set_grad_enabled(options.backward):
                values = self._evaluate_loss(turn)
                if recorder is not None:
                    recorder.record("loss", "", values.loss)
                self.agree_on_axes(values.loss.device)
                # Here the host waits for the weights of `weight=`: the forward is launched already.
                weight = turn.weight
                self.backward(
                    [values.loss] if values.loss.requires_grad else [],
                    [self.cotangent(values.loss, turn.share, self.scale)],
                    weight=weight,
                    is_reduced=is_reduced,
                )
            if is_reduced:
                runtime.reductions.end()
            loss = slice_loss(values.loss, weight, values.metrics)
            written = self.buffers.changed(slices.index, values.buffers, loss.loss.device)
            outputs.append(SliceOutput(loss, values.metrics, written))
            del values  # the graph of its loss would live through the next forward

        if self.trees is not None:
            reductions = runtime.reductions
            reductions.accumulated = [self.trees.take(unit) for unit in reductions.units]
            reductions.end()
        return self.finish(outputs, turns, is_weighted=self.trees is not None)

    def _evaluate_loss(self, turn: SliceTurn) -> SliceValues:
        """Return the results of the loss function on a slice."""
        options = self.options
        loss_fn, buffers, names = options.loss_fn, (), ["loss"]
        if hasattr(loss_fn, "_torchdynamo_orig_callable"):
            loss_fn = with_unsharded_params(loss_fn)  # compiled functions take no lazy parameters
        if options.has_buffers:
            buffers = (self.buffers.part(self.slices.index),)
            names.append("buffers")
        if options.has_aux:
            names.append("aux")
        try:
            result = self.forward(turn, loss_fn, *buffers)
        except (TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
            if not isinstance(error, FshardError):
                call = f"loss_fn(params, {'buffers, ' if buffers else ''}batch)"
                error.add_note(f"{options.caller}: The loss function is called as {call}.")
            raise
        values = self.slices.values_of(result, turn.slice, names)
        if self.runtime.is_first_step:
            validate_no_reentrant_checkpoint(values.loss)
        return values

    # -- the three phases --------------------------------------------------------------------------

    def forward(
        self,
        turn: SliceTurn,
        function: Callable[..., Any],
        *buffers: PyTree,
        is_recorded: bool = True,
    ) -> Any:
        """Return the result of function(params, *buffers, batch) on a slice.

        Units are unsharded as it uses them. Without a backward it need not be recorded: then there
        are no saved-tensor hooks, which torch.func refuses.
        """
        if listeners:
            reach("forward")
        batch = self.slices.batch.tree(turn.slice.leaves, self.options.compute)
        with self.runtime.saved.watch() if is_recorded else nullcontext():
            return function(self.params(), *buffers, batch)

    def agree_on_axes(self, device: torch.device) -> None:
        """Agree with all devices on the axes over which any of them called a collective, once."""
        cached = None if self.runtime.is_first_step else self.runtime.expected.along
        self.slices.collectives.agree(self.slices.scope, cached, device, self.slices.site)

    def cotangent(self, loss: Tensor, share: float, scale: float) -> Tensor:
        """Return the cotangent of a loss: its share of the gradient of `scale` times the mean."""
        self.scale = scale  # a loop has it in its backwards
        self.largest = largest_of(loss)
        return cotangent_of(loss, share, scale)

    def backward(
        self,
        outputs: Sequence[Tensor],
        cotangents: Sequence[Tensor],
        *,
        weight: float,
        is_reduced: bool,
        leaves: Sequence[Tensor] = (),
        retain_graph: bool = False,
    ) -> None:
        """Run autograd, which calls the backwards of units, and runs parts of the forward again.

        It takes part in the reductions of other devices even without outputs, where a loss depends
        on no parameter. After the last backward that `is_reduced`, `reductions.end()` reduces what
        is left.

        Args:
            outputs: of one slice.
            cotangents: of these.
            weight: of the slice, by which a tree multiplies its gradients; 0: gradients count as 0,
                finite or not.
            is_reduced: reduce gradients as each unit's are ready, instead of adding them up for
                later.
            leaves: leaves besides parameters, such as inputs: their gradients are added to their
                `.grad`.
            retain_graph: keep the graph, for another backward.
        """
        if listeners:
            reach("backward")
        runtime, collectives = self.runtime, self.slices.collectives
        accumulate_into: AccumulateInto | None = None
        if self.trees is not None:
            accumulate_into = self.trees.add
        elif not is_reduced:
            accumulate_into = runtime.reductions.accumulate

        # Where a collective has mixed samples of several devices, their losses may depend on a
        # slice of weight 0.
        is_idle = not weight and not collectives.is_mixed
        runtime.reductions.begin(
            runtime.used_units,
            self.slices.everyone,
            collectives.along,
            accumulate_into,
            is_idle=is_idle,
        )
        if outputs:
            # A scope of its own: a collective knows its backward in the loss function's scope as
            # one that the loss function itself differentiates.
            is_without_samples = require("a loss function").slice.is_idle
            with runtime.backward(), self.slices.loss_scope(is_idle=is_without_samples):
                _differentiate(outputs, cotangents, runtime.anchor, leaves, retain_graph)
        if self.trees is not None:
            self.trees.end_slice(weight)

    def finish(
        self,
        outputs: Sequence[SliceOutput],
        turns: Sequence[SliceTurn] = (),
        must_agree: Mapping[str, object] | None = None,
        *,
        is_weighted: bool = False,
    ) -> DeviceResult:
        """Agree with all devices, reduce the gradients that are left, and end the step.

        Args:
            outputs: of each slice.
            turns: the slices, if they have metrics.
            must_agree: what else must be the same on all devices, by its name in `INPUT_ERRORS`.
            is_weighted: True if a tree has multiplied the gradients of slices by their weights.
        """
        runtime, slices = self.runtime, self.slices
        runtime.check_unchanged()
        runtime.finish_slice()
        everyone = slices.everyone
        writes = [Written(output.loss.weight, output.written) for output in outputs]
        losses = [output.loss for output in outputs]
        mean, agreement = self._agree(losses, writes, everyone, must_agree or {})
        runtime.reductions.rest(agreement.accumulated, agreement.used)
        device = losses[0].loss.device
        buffers = self._average_buffers(writes, agreement, everyone, device)

        # An abstract mesh knows the weights of no other device.
        is_abstract = slices.batch.mesh.runtime == "abstract"
        weight = 1.0 if is_abstract else mean.weight
        divisor = gradient_divisor(self.largest, self.scale, weight, is_weighted=is_weighted)
        gradients = runtime.reducer.gradients(agreement.used, divisor)
        aux = slices.combine_metrics([output.metrics for output in outputs], turns, mean)
        runtime.close()
        return DeviceResult(
            mean.loss, mean.weight, self.largest, aux, gradients, buffers, runtime.order
        )

    def _agree(
        self,
        losses: Sequence[SliceLoss],
        writes: Sequence[Written],
        everyone: Group | None,
        must_agree: Mapping[str, object],
    ) -> tuple[SliceLoss, StepAgreement]:
        """Return the mean of the losses, and the numbers of all devices together, if they agree."""
        runtime, slices = self.runtime, self.slices
        differences = self._input_differences(everyone)
        for name, value in must_agree.items():
            differences[name] = difference(value, everyone)
        paths = self.buffers.paths
        if paths:
            before = self.buffers.before(slices.index)
            differences |= irregular_difference(writes, before, everyone)
        numbers = StepAgreement(
            tree_sum([loss.weight for loss in losses]),
            differences,
            losses=slices.compared_losses(losses, is_first_step=runtime.is_first_step),
            written=flags(paths, written_paths(writes)),
            accumulated=[float(gs is not None) for gs in runtime.reductions.accumulated],
            used=[*map(float, runtime.reducer.used)],
        )

        # The losses of all devices travel with these numbers, in one collective.
        copies = slices.collectives.copies
        mean, row = average_losses(losses, numbers.pack(), everyone, slices.site, copies=copies)
        agreement = numbers.unpack(row)
        shape = slices.batch.mesh.shape
        agreement.check(
            self.options.caller,
            slices.collectives.along,
            slices.local,
            weight=agreement.weight / prod([shape[axis] for axis in slices.local]),
            is_trained=any([leaf.trained for leaf in runtime.leaves]),
        )
        return mean, agreement

    def _average_buffers(
        self,
        writes: Sequence[Written],
        agreement: StepAgreement,
        everyone: Group | None,
        device: torch.device,
    ) -> Mapping[str, Tensor]:
        """Return the means of the buffers that a slice of any device has written to."""
        paths = self.buffers.paths
        if not paths:
            return {}
        before = self.buffers.before(self.slices.index)
        is_regular = not agreement.differences["buffers"]
        entries = entries_to_average(paths, agreement.written, writes, before, agreed=is_regular)
        return averaged(writes, entries, everyone, before, device, self.slices.site)

    def _input_differences(self, everyone: Group | None) -> dict[str, float]:
        """Return the differences of inputs, of parameters too in the first step."""
        runtime, slices = self.runtime, self.slices
        is_first_step = runtime.is_first_step
        # Parameters that are used as they are stored.
        replicated, local = list[Tensor](), list[Tensor]()
        if is_first_step:
            for leaf, x in zip(runtime.leaves, runtime.shards, strict=True):
                if not leaf.gather.steps:
                    (local if leaf.used.entries else replicated).append(x)
        same_samples = slices.along(slices.collectives.along)
        differences = slices.input_differences(
            replicated, everyone, same_samples, is_first_step=is_first_step
        )

        # Shards of local axes differ along these, and are equal along the other axes of the batch.
        if self.options.local and slices.batch.may_differ:
            axes = [axis for axis in slices.batch.axes if axis not in self.options.local]
            digests = [digest(x) for x in local]
            differences["params"] += difference(digests, slices.along(tuple(axes)))
        differences["gathers"] = difference(runtime.sequence, everyone)
        return differences


def _differentiate(
    outputs: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    anchor: Tensor,
    leaves: Sequence[Tensor],
    retain_graph: bool,
) -> None:
    """Run autograd down to the anchor, an input of every use of a unit, and to other leaves."""
    if leaves:
        torch.autograd.backward(
            outputs, cotangents, retain_graph=retain_graph, inputs=[anchor, *leaves]
        )
    else:
        torch.autograd.grad(
            outputs, [anchor], cotangents, retain_graph=retain_graph, allow_unused=True
        )
