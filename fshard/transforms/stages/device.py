"""One device's step in a pipeline: its stages on its samples.

Its shard of the batch is split into microbatches, which are slices: they are weighted and seeded as
slices are, and losses, metrics and gradients are those of `value_and_grad`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from fshard.errors import ModuleError
from fshard.mesh.collectives.moves import Purpose
from fshard.mesh.layout import PyTree
from fshard.mesh.layout.kinds import empty_in
from fshard.mesh.reshard.execute import start_reshard
from fshard.mesh.spmd.scope import Group, loss_scope, parting
from fshard.pipeline.execution.device import StageDevice
from fshard.pipeline.execution.leaves import stage_for
from fshard.pipeline.execution.microbatches import shape_key
from fshard.randomness import folded, keyed_apart
from fshard.source import call_site
from fshard.transforms.agreement import SliceLoss, StepAgreement, average_losses, tree_sum
from fshard.transforms.device_step import DeviceResult
from fshard.transforms.fsdp.graph_checks import validate_no_reentrant_checkpoint
from fshard.transforms.fsdp.lazy_param import WRITES
from fshard.transforms.fsdp.plans import Order, local_plans
from fshard.transforms.fsdp.reductions import Reducer
from fshard.transforms.fsdp.units import StepContext
from fshard.transforms.loss_collectives import LOCAL_CALLS
from fshard.transforms.metrics import SliceMetrics, slice_loss
from fshard.transforms.module.buffers import Written, flags, written_paths
from fshard.transforms.patterns import titled
from fshard.transforms.slices import (
    DeviceSlices,
    SliceTurn,
    cotangent_of,
    gradient_divisor,
    largest_of,
    nonzero_weight,
)
from fshard.transforms.stages.buffers import StageWrites
from fshard.transforms.stages.params import StageParams, StageSums
from fshard.transforms.stages.plan import StageLeaves, StagePlan


class StageStep:
    """One device in one step of a model in stages: the work behind its row of a schedule.

    F                           first_input, run_stage; of the last stage evaluate_loss
    B, I, W                     cotangent of a loss; edges; add_gradients
    UNSHARD, RESHARD, REDUCE    unshard, reshard, reduce
    the end of the row          outcome, which all devices receive; then finish

    Args:
        plan: of all steps.
        slices: those of the device, the microbatches.
        shards: the local shard of each parameter.
        writes: the buffers that its stages write, if any.
        scale: the loss scale.
    """

    def __init__(
        self,
        plan: StagePlan,
        slices: DeviceSlices,
        shards: Sequence[Tensor],
        writes: StageWrites | None,
        scale: float,
    ) -> None:
        options = plan.options
        scope = slices.scope
        self.options = options
        self.plan = plan
        self.pipeline = plan.pipeline
        self.slices = slices
        self.writes = writes
        self.scale = scale
        self.is_first_step = plan.order is None
        self.context = StepContext.of(options, slices.site)
        self.recorder = self.context.recorder

        axis = plan.pipeline.axis
        batch_axes = slices.batch.axes
        self.pipe = scope.group(axis, options.caller)
        self.same_stages = slices.along((*slices.local, *batch_axes))
        self.everyone = scope.group((axis, *slices.local, *batch_axes), options.caller)

        self.turns = slices.turns()
        # Of each microbatch, on the device of the last stage.
        self.losses: dict[int, SliceLoss] = {}
        self.metrics: dict[int, SliceMetrics] = {}

        shards = self._receive_borrowed(shards)
        self.units = self._make_units(shards)
        self.reducer = self._make_reducer()
        self.sums = self._make_sums()

    @property
    def number(self) -> int:
        """The number of the device in the mesh."""
        return self.slices.batch.devices[self.slices.index]

    @property
    def stages(self) -> list[int]:
        """The stages of the device."""
        placement = self.pipeline.route.placement
        return [stage for stage, index in enumerate(placement) if index == self.pipe.index]

    def _receive_borrowed(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Return the device's shards of parameters, with those that it borrows."""
        borrowed = self.plan.borrowed
        result = [*shards]
        sent = [shards[param.leaf].detach() for param in borrowed]
        plans = [param.plan for param in borrowed]
        received = start_reshard(sent, plans, self.slices.site).wait()
        for param, x in zip(borrowed, received, strict=True):
            if param.coordinate == self.pipe.index:
                result[param.leaf] = x
        return result

    def _make_units(self, shards: Sequence[Tensor]) -> dict[int, StageParams]:
        """Return the unit of each stage."""
        units = dict[int, StageParams]()
        for stage in self.stages:
            params = self.plan.by_stage[stage]
            if self.options.local:
                leaves = local_plans(tuple(params.leaves), self.number)
                params = StageLeaves.of(leaves, params.indices, params.tree)
            shards_of_stage = [shards[index] for index in params.indices]
            units[stage] = StageParams(self.context, stage, params, shards_of_stage)
        return units

    def _make_sums(self) -> StageSums:
        """Return the sums of the stages' gradients."""
        weights: list[float] | None = None
        if self.options.reproducible:
            weights = [turn.weight for turn in self.turns]
        return StageSums(self.plan, self.reducer, self.stages, weights, self.pipe.index)

    def _make_reducer(self) -> Reducer:
        """Return what reduces gradients: those of microbatches are added first, in 32 bits."""
        options, leaves = self.options, self.plan.leaves
        if options.local:
            leaves = local_plans(tuple(leaves), self.number)
        is_wide = options.reproducible or options.accumulate > 1
        reducer = Reducer(
            leaves,
            self.context.device,
            options,
            self.slices.site,
            wide=is_wide,
            recorder=self.recorder,
        )
        reducer.begin(self.plan.reduction_plans, self.slices.local)
        return reducer

    def run(self) -> DeviceResult:
        """Run the device's row of the schedule, and finish."""
        forms = None
        if not self.pipeline.dynamic:
            forms = self.plan.messages.setdefault(self.pipe.device, {})
        slices = [turn.slice for turn in self.turns]
        # Slices without samples have rows of others, so the leaves alone do not distinguish them.
        keys: list[Hashable] = [(shape_key(slice.leaves), slice.rows) for slice in slices]
        with self._stage_scope(), parting(self.everyone):
            interpreter = StageDevice(
                self.pipeline.route,
                self,
                self.pipe,
                self.context.device,
                self.slices.site,
                keys,
                forms,
                backward=self.options.backward,
                has_outcome=True,
            )
            try:
                loss, largest, aux = interpreter.run()
            except RuntimeError:
                # Autograd raises it for saved tensors that a stage has written to: name the
                # parameter.
                self._validate_unwritten()
                raise
            finally:
                self.context.release_replicas()
        return self.finish(loss, largest, aux)

    # -- forward -----------------------------------------------------------------------------------

    def first_input(self, microbatch: int) -> PyTree:
        """Return the input of the first stage for a microbatch."""
        return self.pipeline.inputs(self._batch_of(microbatch))

    def _batch_of(self, microbatch: int) -> PyTree:
        leaves = self.turns[microbatch].slice.leaves
        return self.slices.batch.tree(leaves, self.options.compute)

    def run_stage(self, stage: int, microbatch: int, x: PyTree, skips: dict[str, PyTree]) -> PyTree:
        """Run a stage; its random draws depend on the samples and the layer."""
        turn, params = self.turns[microbatch], self.units[stage].tree()
        if self.recorder is not None:
            self.recorder.begin_slice(turn.number)
        function = stage_for(self.pipeline.stages[stage], microbatch)
        moments: list[Any] | None = None
        if self.writes is not None and not self.options.reproducible:
            moments = []  # running statistics move once, towards those of all microbatches
        with self._seeded(turn, stage), self._stage_scope(turn, moments):
            if self.writes is None:
                y = function(params, x, **skips)
            else:
                y, buffers = function((params, self.writes.parts[stage]), x, **skips)
                self.writes.record(stage, microbatch, buffers, moments or [])
        if self.recorder is not None:
            self.recorder.record("output", "", y)
        if self.is_first_step:
            validate_no_reentrant_checkpoint(y)
        return y

    def evaluate_loss(self, microbatch: int, y: PyTree) -> Tensor:
        """Return the loss of the last stage's output."""
        turn = self.turns[microbatch]
        names = ["loss", "aux"] if self.options.has_aux else ["loss"]
        with self._seeded(turn, 0), self._stage_scope(turn):
            result = self.options.loss_fn(y, self._batch_of(microbatch))
            values = self.slices.values_of(result, turn.slice, names)
        loss = slice_loss(values.loss, turn.weight, values.metrics)
        self.losses[microbatch] = loss
        self.metrics[microbatch] = values.metrics
        if self.recorder is not None:
            self.recorder.record("loss", "", values.loss)
        return values.loss

    def _seeded(self, turn: SliceTurn, index: int) -> AbstractContextManager[None]:
        return keyed_apart(folded(self.slices.key, 0, turn.number), index)

    def _stage_scope(
        self, turn: SliceTurn | None = None, moments: list[Any] | None = None
    ) -> AbstractContextManager[None]:
        """Return the context of a stage or of the loss function: collectives are recorded."""
        is_idle = turn is not None and not turn.slice.rows
        axes = self.slices.batch.mesh.axis_names
        return loss_scope(
            axes,
            self._record_collective,
            is_idle=is_idle,
            moments=moments,
            activations=self.options.activations,
        )

    def _record_collective(self, call: str, group: Group, purpose: Purpose = "values") -> None:
        """Record a collective; raise if it is one that stages may not call."""
        legal = (*self.slices.batch.axes, *self.slices.local)
        sizes = self.slices.scope.mesh.shape
        others = {axis for axis in group.axes if sizes.get(axis, 1) > 1} - {*legal}
        if others and call not in LOCAL_CALLS:
            raise ValueError(
                f"{call} over {', '.join(sorted(others))} in a stage, at {call_site()}: stages of "
                "a pipeline may communicate only with devices that have other samples, along "
                f"{', '.join(legal) or 'no axis'}."
            )
        self.slices.collectives.record(call, group, purpose)

    # -- backward ----------------------------------------------------------------------------------

    def cotangent(self, microbatch: int) -> Tensor:
        """Return the cotangent of the loss of a microbatch."""
        share = self.turns[microbatch].share
        return cotangent_of(self.losses[microbatch].loss, share, self.scale)

    def edges(self, stage: int) -> list[GradientEdge]:
        """Return the edges of trained parameters."""
        return self.units[stage].edges()

    def may_accumulate(self, stage: int, microbatch: int) -> bool:
        """Let autograd add to the sums, where gradients need no conversion before."""
        if self.recorder is not None:
            return False  # the gradients of each microbatch are recorded
        has_weight = bool(self.turns[microbatch].weight)
        return has_weight and self.sums.let_accumulate(stage, self.units[stage].trained)

    def add_gradients(self, stage: int, microbatch: int, gs: list[Tensor | None]) -> None:
        """Accumulate gradients; those of weight 0 count as zero, even if they are not finite."""
        if self.recorder is not None:
            self.recorder.begin_slice(self.turns[microbatch].number)
        is_idle = not self.turns[microbatch].weight
        self.sums.add(stage, microbatch, gs, is_idle=is_idle)

    # -- units -------------------------------------------------------------------------------------

    def unshard(self, stage: int) -> None:
        """Start the all-gather of a stage."""
        self.units[stage].unshard()

    def reshard(self, stage: int) -> None:
        """Free a stage."""
        self.units[stage].reshard()

    def reduce(self, stage: int) -> None:
        """Start the reduction of the gradients of a stage."""
        self.sums.reduce(stage)

    # -- the end of the step -----------------------------------------------------------------------

    def outcome(self) -> tuple[Tensor, Tensor, PyTree]:
        """Return the loss, the largest number of its dtype before the mean, and the metrics.

        The last stage's device has them.
        """
        microbatches = range(len(self.turns))
        losses = [self.losses[microbatch] for microbatch in microbatches]
        metrics = [self.metrics[microbatch] for microbatch in microbatches]
        copies = self.slices.collectives.copies
        weight = self._weight()
        mean, _ = average_losses(
            losses, [weight], self.same_stages, self.slices.site, copies=copies
        )
        aux = self.slices.combine_metrics(metrics, self.turns, mean)
        largest = largest_of(losses[0].loss)
        return mean.loss, torch.full_like(mean.loss, largest, dtype=torch.float64), aux

    def _weight(self) -> float:
        """Return the weight of the device's microbatches."""
        return tree_sum([turn.weight for turn in self.turns])

    def finish(self, loss: Tensor, largest: Tensor, aux: PyTree) -> DeviceResult:
        """Agree with all devices, reduce the gradients that are left, and end the step."""
        self._validate_unwritten()
        self.sums.reduce_rest()

        writes, written = self.writes, list[Written]()
        if writes is not None:
            written = writes.written([turn.weight for turn in self.turns])
        agreement = self._agree(written)
        buffers: Mapping[str, Tensor] = {}
        if writes is not None:
            pairs = zip(writes.paths, agreement.written, strict=True)
            flagged = [path for path, writers in pairs if writers]
            buffers = writes.average(
                written, flagged, self.stages, self.same_stages, self.slices.site
            )

        # Only a scale has a limit: without one the host does not wait for it.
        limit = inf
        if self.scale != 1.0 and not largest.is_meta:
            limit = largest.item()
        weight = nonzero_weight(agreement.weight)
        is_weighted = self.options.reproducible
        divisor = gradient_divisor(limit, self.scale, weight, is_weighted=is_weighted)
        gradients = self.reducer.gradients(agreement.used, divisor)
        for index, users in enumerate(agreement.used):
            if users and gradients[index] is None:
                gradients[index] = self._empty_gradient(index)
        return DeviceResult(loss, weight, limit, aux, gradients, buffers, Order([], []))

    def _validate_unwritten(self) -> None:
        """Raise if a stage has written to a parameter.

        To a frozen one, too: it has done so for each microbatch.
        """
        for unit in self.units.values():
            for path in unit.written():
                raise ModuleError(
                    f"{self.options.caller}: stages write to a parameter in place: "
                    f"{titled(path)}. {WRITES}"
                )

    def _agree(self, written: Sequence[Written]) -> StepAgreement:
        """Return the sums over all devices; raise if they differ in what must be equal."""
        slices = self.slices
        options = self.options
        is_first_step = self.is_first_step
        # Devices along the pipeline and local axes have the same samples: those of the first ones
        # count.
        copies_along = (self.pipeline.axis, *slices.local)
        copies = slices.along(copies_along)
        first_copies = 1 if slices.group is None else slices.group.size
        is_first_copy = self.everyone.index < first_copies
        paths = [] if self.writes is None else self.writes.paths
        numbers = StepAgreement(
            self._weight() if is_first_copy else 0.0,
            slices.input_differences((), self.everyone, copies, is_first_step=is_first_step),
            losses=slices.compared_losses([*self.losses.values()], is_first_step=is_first_step),
            written=flags(paths, written_paths(written)),
            used=[*map(float, self.reducer.used)],
        )
        agreement = numbers.reduce(self.everyone, slices.site)
        agreement.check(
            options.caller,
            copies_along,
            slices.local,
            weight=agreement.weight,
            is_trained=options.backward,
        )
        return agreement

    def _empty_gradient(self, index: int) -> Tensor | None:
        """Return the empty gradient of a parameter of another device's stage, cached."""
        leaf = self.plan.leaves[index]
        cache = self.plan.empty_gradients
        key = (self.number, index)
        if not leaf.trained:
            return None
        if key not in cache:
            shape = leaf.gradient.local_shape(leaf.shape, self.number)
            memory, device = leaf.gradient.memory, self.context.device
            cache[key] = empty_in(memory, shape, leaf.dtype, device.type)
        return cache[key]
