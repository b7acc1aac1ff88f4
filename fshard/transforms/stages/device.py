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
from fshard.mesh.layout import PyTree
from fshard.mesh.reshard.execute import go
from fshard.mesh.spmd.scope import Group, loss_scope, parting, require
from fshard.optim.scaling import finite_scale
from fshard.pipeline.execution.device import StageDevice
from fshard.pipeline.execution.leaves import stage_for
from fshard.pipeline.execution.microbatches import shape_key
from fshard.source import Site, call_site
from fshard.transforms.agreement import SliceLoss, StepAgreement, average_losses, input_differences, tree_sum
from fshard.transforms.batch import Batch
from fshard.transforms.device_step import DeviceResult, nonzero_weight, one_loss, refuse_detached, slice_turns
from fshard.transforms.fsdp.engine import GradientSums, Reducer, Storage, local_plans
from fshard.transforms.fsdp.lazy_param import WRITES
from fshard.transforms.graph_checks import refuse_unreached
from fshard.transforms.loss_collectives import LOCAL_CALLS, LossCollectives
from fshard.transforms.metrics import SliceMetrics, combine_metrics, metrics_of, slice_loss
from fshard.transforms.module.buffers import flags, written_paths
from fshard.transforms.patterns import named, parts_of
from fshard.transforms.reproducible.randomness import folded, keyed_apart
from fshard.transforms.stages.buffers import StageWrites
from fshard.transforms.stages.params import StageSums, StageUnit
from fshard.transforms.stages.plan import StagePlan


class StageStep:
    """The work of one device in one step.

    Args:
        plan: of all steps.
        shards: the local shard of each parameter.
        batch: the global batch.
        device: number of the device in the mesh, and `at` its index among the local ones.
        key: of random draws.
        scale: the loss scale.
        writes: the buffers that its stages write, if any.
        site: the source line of the step.
    """

    def __init__(
        self,
        plan: StagePlan,
        shards: Sequence[Tensor],
        batch: Batch,
        device: int,
        at: int,
        key: int,
        scale: float,
        writes: StageWrites | None,
        site: Site,
    ) -> None:
        self.plan, self.batch, self.key, self.scale, self.fresh, self.site = plan, batch, key, scale, plan.fresh, site
        self.at, self.number, self.scaled, self.writes, options = at, device, scale, writes, plan.options
        self.scope = require(options.caller)
        self.pipe = self.scope.group(plan.axis, options.caller)
        self.beside = self._along(batch.axes)
        count = options.turns(1 if self.beside is None else self.beside.size)
        self.collectives = LossCollectives(batch, count, options)
        self.local = self.collectives.along
        self.same_stages = self._along((*self.local, *batch.axes)) if self.local else self.beside
        self.everyone = self.scope.group((plan.axis, *self.local, *batch.axes), options.caller)
        self.turns = slice_turns(options, batch, at, count, self.beside, site)
        self.mine = [stage for stage, place in enumerate(plan.route.placement) if place == self.pipe.index]
        self.device = shards[0].device
        here = self._borrow(shards)
        self.units = {stage: self._unit(stage, here) for stage in self.mine}
        self.totals = self._totals()
        self.parts: dict[int, tuple[SliceLoss, SliceMetrics]] = {}

    def _along(self, axes: tuple[str, ...]) -> Group | None:
        return self.scope.group(axes, self.plan.options.caller) if axes else None

    @property
    def weight(self) -> float:
        """The weight of the device's microbatches."""
        return tree_sum([turn.weight.weight for turn in self.turns])

    def _borrow(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Return the device's shards of parameters, with those that it borrows."""
        rows, here = self.plan.params.borrowed, list(shards)
        given = go([shards[row.leaf].detach() for row in rows], [row.way for row in rows], self.site)()
        for row, x in zip(rows, given, strict=True):
            if row.place == self.pipe.index:
                here[row.leaf] = x
        return here

    def _unit(self, stage: int, here: Sequence[Tensor]) -> StageUnit:
        own, options = self.plan.params.own[stage], self.plan.options
        own = own._replace(leaves=local_plans(tuple(own.leaves), self.number)) if self.local else own
        storage = Storage(own.leaves, [here[index] for index in own.indices], options.compute, self.site)
        return StageUnit(own, storage, options, self.device)

    def _totals(self) -> StageSums:
        plan, options = self.plan.params, self.plan.options
        weights = [turn.weight.share for turn in self.turns] if options.reproducible else None
        wide = options.reproducible or options.accumulate > 1
        reducer = Reducer(lambda along: plan.ways, self.site, ahead=options.in_flight > 0)
        leaves = local_plans(tuple(plan.leaves), self.number) if self.local else plan.leaves
        reduced = GradientSums(leaves, self.device, options, reducer, wide)
        reduced.along = self.local
        return StageSums(plan, self.mine, weights, self.pipe.index, reduced, self.site)

    def run(self) -> DeviceResult:
        """Take the device's part in the step."""
        plan, known = self.plan, None
        if plan.messages is not None:
            known = plan.messages.setdefault(self.pipe.device, {})
        kinds: list[Hashable] = [  # idle slices have rows of others
            (shape_key(turn.slice.leaves), turn.slice.rows) for turn in self.turns
        ]
        options = plan.options
        with self._loss_scope(), parting(self.everyone):
            device = StageDevice(
                plan.route,
                self,
                self.pipe,
                self.device,
                self.site,
                kinds,
                known,
                backward=options.backward,
                has_outcome=True,
            )
            try:
                loss, held, aux = device.run()
            except RuntimeError:  # raised by autograd, for saved tensors that a stage has written to
                self._refuse_written()
                raise
            finally:
                for unit in self.units.values():
                    unit.close()
        self._refuse_written()
        self.totals.finish()
        agreement, buffers = self._agree()
        weight = nonzero_weight(agreement.weight)
        divisor = held * weight if options.reproducible else held if self.scale != 1.0 else 1.0
        gradients = self.totals.reduced.gradients(agreement.used, divisor)
        gradients = [
            self._nothing(at) if times and g is None else g
            for at, (g, times) in enumerate(zip(gradients, agreement.used, strict=True))
        ]
        return DeviceResult(loss, weight, aux, gradients, buffers)

    def _nothing(self, index: int) -> Tensor | None:
        """Return the empty gradient of a parameter of another device's stage, the same in all steps."""
        leaf, known = self.plan.params.leaves[index], self.plan.elsewhere
        if not leaf.trained:
            return None
        key = self.number, index
        if key not in known:
            shape = leaf.gradient.local_shape(leaf.shape, self.number)
            known[key] = torch.empty(shape, dtype=leaf.dtype, device=self.device)
        return known[key]

    def _refuse_written(self) -> None:
        """Raise if a stage has written to a parameter: to frozen ones, too, since it has done so for each microbatch."""
        paths = [path for unit in self.units.values() for path in unit.written()]
        if paths:
            names = ", ".join(named(parts_of(path)) for path in paths)
            raise ModuleError(f"{self.plan.options.caller}: stages write to parameters in place: {names}. {WRITES}")

    # -- the work of a schedule -----------------------------------------------------------------------------------

    def begin(self, microbatch: int) -> PyTree:
        """Return the input of the first stage for a microbatch."""
        return self.plan.inputs(self._tree(microbatch))

    def _tree(self, microbatch: int) -> PyTree:
        return self.batch.tree(self.turns[microbatch].slice.leaves, self.plan.options.compute)

    def call(self, stage: int, microbatch: int, x: PyTree, skips: dict[str, PyTree]) -> PyTree:
        """Call a stage; its random draws depend on the samples and the layer."""
        is_moved = self.writes is not None and not self.plan.options.reproducible
        moments = list[Any]() if is_moved else None
        with self._draws(microbatch, part=stage), self._loss_scope(microbatch, moments):
            called, params = stage_for(self.plan.stages[stage], microbatch), self.units[stage].tree
            if self.writes is None:
                y = called(params, x, **skips)
            else:
                y, after = called((params, self.writes.parts[stage]), x, **skips)
                self.writes.record(stage, microbatch, after, moments or [])
        if self.fresh:
            refuse_unreached(y)
        return y

    def _draws(self, microbatch: int, part: int) -> AbstractContextManager[None]:
        return keyed_apart(folded(self.key, 0, self.turns[microbatch].number), part)

    def _loss_scope(
        self, microbatch: int | None = None, moments: list[Any] | None = None
    ) -> AbstractContextManager[None]:
        is_idle = microbatch is not None and not self.turns[microbatch].slice.rows
        return loss_scope(self.scope.mesh.axis_names, self._record, is_idle=is_idle, moments=moments)

    def end(self, microbatch: int, y: PyTree) -> Tensor:
        """Return the loss of the last stage's result."""
        options, slice = self.plan.options, self.turns[microbatch].slice
        with self._draws(microbatch, part=0), self._loss_scope(microbatch):
            returned, aux = options.loss_fn(y, self._tree(microbatch)), ()
            if options.has_aux:
                if not isinstance(returned, tuple | list) or len(returned) != 2:
                    raise ValueError(f"the loss function must return (loss, aux); got a {type(returned).__name__}.")
                returned, aux = returned
            loss = one_loss(options, returned, slice)
        metrics = metrics_of(aux, slice, loss.device, options.aux)
        self.parts[microbatch] = slice_loss(loss, self.turns[microbatch].weight.weight, metrics), metrics
        self.scaled = finite_scale(loss.dtype, self.scale)
        return loss

    def start(self, microbatch: int) -> Tensor:
        """Return a loss weighted by its part of the batch; in reproducible mode sums are weighted, in 32 bits."""
        share = self.turns[microbatch].weight.share if not self.plan.options.reproducible else 1.0
        return torch.full_like(self.parts[microbatch][0].loss, share * self.scaled)

    def edges(self, stage: int) -> list[GradientEdge]:
        """Return the trained ones."""
        return self.units[stage].edges

    def may_accumulate(self, stage: int, microbatch: int) -> bool:
        """Let autograd add to the sums, where gradients need no conversion before."""
        weighs = bool(self.turns[microbatch].weight.weight)
        return weighs and self.totals.let_accumulate(stage, self.units[stage].trained)

    def add(self, stage: int, microbatch: int, gs: list[Tensor | None]) -> None:
        """Accumulate gradients; those of weight 0 count as zero, even if they are not finite."""
        self.totals.add(stage, microbatch, gs, idle=not self.turns[microbatch].weight.weight)

    def gather(self, stage: int) -> None:
        """Start the all-gather of a stage."""
        self.units[stage].start()

    def free(self, stage: int) -> None:
        """Free a stage."""
        self.units[stage].reshard()

    def reduce(self, stage: int) -> None:
        """Start the reduction of the gradients of a stage."""
        self.totals.reduce(stage)

    def outcome(self) -> tuple[Tensor, Tensor, PyTree]:
        """Return the loss, the ratio of its scale to the given one, and the metrics."""
        losses, metrics = zip(*(self.parts[microbatch] for microbatch in range(len(self.turns))), strict=True)
        mean, _ = average_losses(losses, [self.weight], self.same_stages, self.site, copies=self.collectives.copies)
        slices = [turn.slice for turn in self.turns]
        aux = combine_metrics(metrics, slices, mean, self.batch, self.local, self.scope, self.site)
        return mean.loss, torch.full_like(mean.loss, self.scaled / self.scale, dtype=torch.float64), aux

    # -- agreement with all devices -----------------------------------------------------------------------------------

    def _record(self, call: str, group: Group) -> None:
        """Raise if a stage calls a collective that stages may not call."""
        legal = (*self.batch.axes, *self.local)
        elsewhere = {axis for axis in group.axes if self.scope.mesh.shape.get(axis, 1) > 1} - {*legal}
        if elsewhere and call not in LOCAL_CALLS:
            raise ValueError(
                f"{call} over {', '.join(sorted(elsewhere))} in a stage, at {call_site()}: stages of a pipeline may "
                f"communicate only with devices that have other samples, along {', '.join(legal) or 'no axis'}."
            )
        self.collectives.record(call, group)

    def _agree(self) -> tuple[StepAgreement, dict[str, Tensor]]:
        """Return the sums over all devices, and the buffers that changed; raise if inputs differ."""
        options, writes, key = self.plan.options, self.writes, self.key if self.plan.options.reproducible else None
        along = (self.plan.axis, *self.local)
        written = [] if writes is None else writes.written([turn.weight.weight for turn in self.turns])
        paths = [] if writes is None else writes.paths
        is_first = self.everyone.index < (
            1 if self.beside is None else self.beside.size
        )  # of those with the same samples
        agreement = StepAgreement(
            self.weight if is_first else 0.0,
            input_differences(
                self.batch, self.at, key, (), self.everyone, self._along(along), is_first_step=self.fresh
            ),
            written=flags(paths, written_paths(written)),
            used=[*map(float, self.totals.reduced.used)],
        ).reduce(self.everyone, self.site)
        agreement.check_inputs(options.caller, along)
        if options.backward:
            refuse_detached(agreement.used)
        if writes is None:
            return agreement, {}
        flagged = [path for path, times in zip(paths, agreement.written, strict=True) if times]
        return agreement, writes.average(written, flagged, self.mine, self.same_stages, self.site)
