"""One device's step in a pipeline: its stages on its samples.

Its shard of the batch is split into microbatches, which are slices: they are weighted and seeded as slices are, and
losses, metrics and gradients are those of `value_and_grad`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from fshard.errors import ModuleError
from fshard.mesh.collectives.moves import Purpose
from fshard.mesh.layout import PyTree
from fshard.mesh.layout.kinds import empty_in
from fshard.mesh.reshard.execute import start_reshard
from fshard.mesh.spmd.scope import Group, parting
from fshard.optim.scaling import finite_scale
from fshard.pipeline.execution.device import StageDevice
from fshard.pipeline.execution.leaves import stage_for
from fshard.pipeline.execution.microbatches import shape_key
from fshard.randomness import folded, keyed_apart
from fshard.source import Site, call_site
from fshard.transforms.agreement import (
    SliceLoss,
    StepAgreement,
    average_losses,
    input_differences,
    tree_sum,
)
from fshard.transforms.batch import Batch
from fshard.transforms.device_step import DeviceResult, DeviceStep, validate_is_trained
from fshard.transforms.fsdp.graph_checks import validate_no_reentrant_checkpoint
from fshard.transforms.fsdp.lazy_param import WRITES
from fshard.transforms.fsdp.plans import Order, local_plans
from fshard.transforms.fsdp.reductions import Reducer
from fshard.transforms.fsdp.units import StepContext
from fshard.transforms.loss_collectives import LOCAL_CALLS
from fshard.transforms.metrics import SliceMetrics, metrics_of, slice_loss
from fshard.transforms.module.buffers import flags, written_paths
from fshard.transforms.patterns import named, parts_of
from fshard.transforms.slices import nonzero_weight, one_loss, unpack_result
from fshard.transforms.stages.buffers import StageWrites
from fshard.transforms.stages.params import StageParams, StageSums
from fshard.transforms.stages.plan import StageLeaves, StagePlan


class StageStep(DeviceStep):
    """The work of one device in one step.

    Args:
        plan: of all steps.
        shards: the local shard of each parameter.
        device: its number in the mesh.
        writes: the buffers that its stages write, if any.
        site: the source line of the step.
        batch, index, key, scale: see `DeviceStep`.
    """

    def __init__(
        self,
        plan: StagePlan,
        shards: Sequence[Tensor],
        device: int,
        writes: StageWrites | None,
        site: Site,
        batch: Batch,
        index: int,
        key: int,
        scale: float,
    ) -> None:
        self.context, options = StepContext.of(plan.options, site), plan.options
        super().__init__(options, self.context, batch, index, key, scale)
        self.plan, self.program, self.number, self.writes = plan, plan.program, device, writes
        self.is_first_step = plan.order is None
        self.pipe = self.scope.group(plan.program.axis, options.caller)
        self.same_stages = self.along((*self.local, *batch.axes))
        self.everyone = self.scope.group(
            (plan.program.axis, *self.local, *batch.axes), options.caller
        )
        self.slices = self.slice_turns()
        placement = plan.program.route.placement
        self.stages = [
            stage for stage, coordinate in enumerate(placement) if coordinate == self.pipe.index
        ]
        self.device = shards[0].device
        shards = self._borrow(shards)
        self.units = dict[int, StageParams]()
        for stage in self.stages:
            params = plan.by_stage[stage]
            if options.local:
                params = StageLeaves.of(
                    local_plans(tuple(params.leaves), device), params.indices, params.tree
                )
            shards_of_stage = [shards[index] for index in params.indices]
            self.units[stage] = StageParams(
                self.context, stage, params, shards_of_stage, self.device
            )
        self.reducer = Reducer(
            local_plans(tuple(plan.leaves), device) if options.local else plan.leaves,
            self.device,
            options,
            site,
            wide=options.reproducible or options.accumulate > 1,
        )
        self.reducer.begin(plan.reduction_plans, self.local)
        self.sums = StageSums(
            plan,
            self.reducer,
            self.stages,
            [turn.weight.share for turn in self.slices] if options.reproducible else None,
            self.pipe.index,
        )
        self.parts: dict[int, tuple[SliceLoss, SliceMetrics]] = {}

    @property
    def weight(self) -> float:
        """The weight of the device's microbatches."""
        return tree_sum([slice_turn.weight.weight for slice_turn in self.slices])

    def _borrow(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Return the device's shards of parameters, with those that it borrows."""
        borrowed, result = self.plan.borrowed, [*shards]
        sent = [shards[param.leaf].detach() for param in borrowed]
        received = start_reshard(sent, [param.plan for param in borrowed], self.site)()
        for param, x in zip(borrowed, received, strict=True):
            if param.coordinate == self.pipe.index:
                result[param.leaf] = x
        return result

    def run(self) -> DeviceResult:
        """Take the device's part in the step."""
        options, pipe = self.options, self.pipe
        forms = None if self.program.dynamic else self.plan.messages.setdefault(pipe.device, {})
        keys: list[Hashable] = [  # idle slices have rows of others
            (shape_key(slice_turn.slice.leaves), slice_turn.slice.rows)
            for slice_turn in self.slices
        ]
        flags = {"backward": options.backward, "has_outcome": True}
        with self.loss_scope(), parting(self.everyone):
            device = StageDevice(
                self.program.route, self, pipe, self.device, self.site, keys, forms, **flags
            )
            try:
                loss, scale_ratio, aux = device.run()
            except (
                RuntimeError
            ):  # raised by autograd, for saved tensors that a stage has written to
                self._validate_unwritten()
                raise
            finally:
                self.context.release_replicas()
        self._validate_unwritten()
        self.sums.reduce_rest()
        agreement, buffers = self._agree()
        weight = nonzero_weight(agreement.weight)
        divisor = scale_ratio if self.scale != 1.0 else 1.0
        gradients = self.reducer.gradients(
            agreement.used, scale_ratio * weight if options.reproducible else divisor
        )
        gradients = [
            self._empty_gradient(index) if users and g is None else g
            for index, (g, users) in enumerate(zip(gradients, agreement.used, strict=True))
        ]
        return DeviceResult(loss, weight, aux, gradients, buffers, Order([], []))

    def _empty_gradient(self, index: int) -> Tensor | None:
        """Return the empty gradient of a parameter of another device's stage, the same in all steps."""
        leaf, cache, key = self.plan.leaves[index], self.plan.empty_gradients, (self.number, index)
        if not leaf.trained:
            return None
        if key not in cache:
            shape = leaf.gradient.local_shape(leaf.shape, self.number)
            cache[key] = empty_in(leaf.gradient.memory, shape, leaf.dtype, self.device.type)
        return cache[key]

    def _validate_unwritten(self) -> None:
        """Raise if a stage has written to a parameter: to frozen ones, too, since it has done so for each microbatch."""
        path = next((path for unit in self.units.values() for path in unit.written()), None)
        if path is not None:
            error = f"stages write to a parameter in place: {named(parts_of(path))}"
            raise ModuleError(f"{self.options.caller}: {error}. {WRITES}")

    # -- the work of a schedule -----------------------------------------------------------------------------------

    def begin(self, microbatch: int) -> PyTree:
        """Return the input of the first stage for a microbatch."""
        return self.program.inputs(self._microbatch_tree(microbatch))

    def _microbatch_tree(self, microbatch: int) -> PyTree:
        return self.batch.tree(self.slices[microbatch].slice.leaves, self.options.compute)

    def call(self, stage: int, microbatch: int, x: PyTree, skips: dict[str, PyTree]) -> PyTree:
        """Call a stage; its random draws depend on the samples and the layer."""
        is_moved = self.writes is not None and not self.options.reproducible
        moments = list[Any]() if is_moved else None
        with self._seeded(microbatch, index=stage), self._slice_scope(microbatch, moments):
            called, params = (
                stage_for(self.program.stages[stage], microbatch),
                self.units[stage].tree(),
            )
            if self.writes is None:
                y = called(params, x, **skips)
            else:
                y, after = called((params, self.writes.parts[stage]), x, **skips)
                self.writes.record(stage, microbatch, after, moments or [])
        if self.is_first_step:
            validate_no_reentrant_checkpoint(y)
        return y

    def _seeded(self, microbatch: int, index: int) -> AbstractContextManager[None]:
        return keyed_apart(folded(self.key, 0, self.slices[microbatch].number), index)

    def _slice_scope(
        self, microbatch: int, moments: list[Any] | None = None
    ) -> AbstractContextManager[None]:
        return self.loss_scope(is_idle=not self.slices[microbatch].slice.rows, moments=moments)

    def end(self, microbatch: int, y: PyTree) -> Tensor:
        """Return the loss of the last stage's result."""
        options, slice = self.options, self.slices[microbatch].slice
        with self._seeded(microbatch, index=0), self._slice_scope(microbatch):
            result = options.loss_fn(y, self._microbatch_tree(microbatch))
            values = unpack_result(result, ["loss", "aux"] if options.has_aux else ["loss"])
            loss = one_loss(options, values["loss"], slice)
        metrics = metrics_of(values.get("aux", ()), slice, loss.device, options.aux)
        self.parts[microbatch] = (
            slice_loss(loss, self.slices[microbatch].weight.weight, metrics),
            metrics,
        )
        self.scaled = finite_scale(loss.dtype, self.scale)
        return loss

    def start(self, microbatch: int) -> Tensor:
        """Return a loss weighted by its part of the batch; in reproducible mode sums are weighted, in 32 bits."""
        share = self.slices[microbatch].weight.share if not self.options.reproducible else 1.0
        return torch.full_like(self.parts[microbatch][0].loss, share * self.scaled)

    def edges(self, stage: int) -> list[GradientEdge]:
        """Return the trained ones."""
        return self.units[stage].edges()

    def may_accumulate(self, stage: int, microbatch: int) -> bool:
        """Let autograd add to the sums, where gradients need no conversion before."""
        has_weight = bool(self.slices[microbatch].weight.weight)
        return has_weight and self.sums.let_accumulate(stage, self.units[stage].trained)

    def add(self, stage: int, microbatch: int, gs: list[Tensor | None]) -> None:
        """Accumulate gradients; those of weight 0 count as zero, even if they are not finite."""
        self.sums.add(stage, microbatch, gs, is_idle=not self.slices[microbatch].weight.weight)

    def gather(self, stage: int) -> None:
        """Start the all-gather of a stage."""
        self.units[stage].unshard()

    def free(self, stage: int) -> None:
        """Free a stage."""
        self.units[stage].reshard()

    def reduce(self, stage: int) -> None:
        """Start the reduction of the gradients of a stage."""
        self.sums.reduce(stage)

    def outcome(self) -> tuple[Tensor, Tensor, PyTree]:
        """Return the loss, the ratio of its scale to the given one, and the metrics."""
        losses, metrics = zip(
            *(self.parts[microbatch] for microbatch in range(len(self.slices))), strict=True
        )
        mean, _ = average_losses(
            losses, [self.weight], self.same_stages, self.site, copies=self.collectives.copies
        )
        aux = self.combine_metrics(metrics, self.slices, mean)
        return (
            mean.loss,
            torch.full_like(mean.loss, self.scaled / self.scale, dtype=torch.float64),
            aux,
        )

    # -- agreement with all devices -----------------------------------------------------------------------------------

    def record(self, call: str, group: Group, purpose: Purpose = "values") -> None:
        """Raise if a stage calls a collective that stages may not call."""
        legal = (*self.batch.axes, *self.local)
        elsewhere = {axis for axis in group.axes if self.scope.mesh.shape.get(axis, 1) > 1} - {
            *legal
        }
        if elsewhere and call not in LOCAL_CALLS:
            raise ValueError(
                f"{call} over {', '.join(sorted(elsewhere))} in a stage, at {call_site()}: stages of a pipeline may "
                f"communicate only with devices that have other samples, along {', '.join(legal) or 'no axis'}."
            )
        super().record(call, group, purpose)

    def _agree(self) -> tuple[StepAgreement, dict[str, Tensor]]:
        """Return the sums over all devices, and the buffers that changed; raise if inputs differ."""
        options, writes, key = (
            self.options,
            self.writes,
            self.key if self.options.reproducible else None,
        )
        along = (self.program.axis, *self.local)
        written = (
            []
            if writes is None
            else writes.written([slice_turn.weight.weight for slice_turn in self.slices])
        )
        paths = [] if writes is None else writes.paths
        is_first_copy = self.everyone.index < (
            1 if self.group is None else self.group.size
        )  # of the same samples
        losses = [loss for loss, _ in self.parts.values()]  # of the last stage
        agreement = StepAgreement(
            self.weight if is_first_copy else 0.0,
            input_differences(
                self.batch,
                self.index,
                key,
                (),
                self.everyone,
                self.along(along),
                is_first_step=self.is_first_step,
            ),
            losses=self.compared_losses(losses, is_first_step=self.is_first_step),
            written=flags(paths, written_paths(written)),
            used=[*map(float, self.reducer.used)],
        ).reduce(self.everyone, self.site)
        agreement.check_inputs(options.caller, along)
        agreement.check_losses(options.caller, self.local, agreement.weight)
        if options.backward:
            validate_is_trained(agreement.used)
        if writes is None:
            return agreement, {}
        flagged = [path for path, writers in zip(paths, agreement.written, strict=True) if writers]
        return agreement, writes.average(written, flagged, self.stages, self.same_stages, self.site)
