"""One device's step in a pipeline: its stages on its samples.

Its shard of the batch is split into microbatches, which are slices: they are weighted and seeded as slices are, and
losses, metrics and gradients are those of `value_and_grad`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from fshard.errors import LayoutError, MismatchError, ModuleError
from fshard.mesh.layout import PyTree, unflatten
from fshard.mesh.reshard.execute import go
from fshard.mesh.spmd.scope import Group, owning, parting, require
from fshard.optim.scaling import held_by
from fshard.pipeline.execution.device import StageDevice
from fshard.pipeline.execution.leaves import stage_for
from fshard.pipeline.execution.microbatches import shape_key
from fshard.source import Site, call_site
from fshard.transforms.agree import NOT_HEARD, exchanged, marks, objection, on_host, summed, unlike
from fshard.transforms.batch import Batch
from fshard.transforms.device_step import DETACHED, counts_of, one_loss
from fshard.transforms.fsdp.lazy_param import WRITES
from fshard.transforms.graph_checks import refuse_unreached
from fshard.transforms.means import (
    AuxLeaves,
    LossSums,
    Rows,
    collected,
    combine_aux,
    idling,
    something,
    sort_aux,
    together,
    tree_sum,
)
from fshard.transforms.module.buffers import written_paths
from fshard.transforms.origin import Origin, bits
from fshard.transforms.patterns import named, parts_of
from fshard.transforms.reproducible.randomness import folded, keyed_apart
from fshard.transforms.stages.buffers import Memory
from fshard.transforms.stages.params import StageParams, StageSums
from fshard.transforms.stages.plan import StagePlan


class StageResult(NamedTuple):
    """The results of one device's step.

    The loss, its weight and metrics; the local shards of gradients, by index, and which parameters were used on any
    device; the buffers that changed.
    """

    loss: Tensor
    weight: float
    aux: PyTree
    gradients: dict[int, Tensor]
    used: list[bool]
    buffers: dict[str, Tensor]


class Shift:
    """The work of one device in one step.

    Args:
        plan: of all steps.
        shards: the local shard of each parameter.
        batch: the global batch.
        at: index of the device among the local ones.
        key: of random draws.
        scale: the loss scale.
        memory: the buffers of its stages, if any.
        fresh: True in the first step.
        site: the source line of the step.
    """

    def __init__(
        self,
        plan: StagePlan,
        shards: Sequence[Tensor],
        batch: Batch,
        at: int,
        key: int,
        scale: float,
        *,
        memory: Memory | None,
        fresh: bool,
        site: Site,
    ) -> None:
        self.plan, self.batch, self.key, self.scale, self.fresh, self.site = plan, batch, key, scale, fresh, site
        self.scaled, self.memory, how = scale, memory, plan.how
        self.scope = require(how.caller)
        self.pipe = self.scope.group(plan.axis, how.caller)
        self.beside = self._along(batch.axes)
        self.everyone = self.scope.group((plan.axis, *batch.axes), how.caller)
        index = self.beside.index if self.beside is not None else 0
        turns = how.turns(self.beside.size if self.beside is not None else 1)
        self.slices = batch.slices(at, turns, apart=how.slices is not None)
        first = index * len(self.slices)
        self.keys = [folded(key, 0, first + microbatch) for microbatch in range(len(self.slices))]
        self.counts = counts_of(how, batch, self.slices, self.beside, site)
        self.weight = self._weight()
        self.mine = [stage for stage, place in enumerate(plan.route.placement) if place == self.pipe.index]
        self.near = shards[0]
        self._objection = objection(batch, len(self.slices), reproducible=how.slices is not None)
        here = self._borrow(shards)
        self.params = {stage: self._params(stage, here) for stage in self.mine}
        self.totals = self._totals()
        self.parts: dict[int, tuple[LossSums, AuxLeaves]] = {}

    def _along(self, axes: tuple[str, ...]) -> Group | None:
        return self.scope.group(axes, self.plan.how.caller) if axes else None

    def _weight(self) -> float:
        """Return the weight of the entire batch."""
        if self.plan.how.weight is None:
            return float(self.batch.total(len(self.slices)))
        own = tree_sum([count.weight for count in self.counts])
        (total,) = summed((on_host([own], torch.device("cpu")),), self.beside, self.site)
        return something(total.item())

    def _borrow(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Return the device's shards of parameters, with those that it borrows."""
        rows, here = self.plan.weights.borrowed, list(shards)
        given = go([shards[row.leaf].detach() for row in rows], [row.way for row in rows], self.site)()
        for row, x in zip(rows, given, strict=True):
            if row.place == self.pipe.index:
                here[row.leaf] = x
        return here

    def _params(self, stage: int, here: Sequence[Tensor]) -> StageParams:
        own = self.plan.weights.own[stage]
        return StageParams(own, [here[leaf] for leaf in own.numbers], self.plan.how.unit_options.compute, self.site)

    def _totals(self) -> StageSums:
        weights = [count.share for count in self.counts] if self.plan.how.slices is not None else None
        return StageSums(self.plan, self.mine, weights, self.pipe.index, self.near, self.site)

    def run(self) -> StageResult:
        """Take the device's part in the step."""
        plan, known = self.plan, None
        if plan.messages is not None:
            known = plan.messages.setdefault(self.pipe.device, {})
        kinds: list[Hashable] = [
            (shape_key(slice.leaves), slice.rows) for slice in self.slices
        ]  # idle slices have rows of others
        how, near = plan.how, self.near.device
        with owning(self.scope.mesh.axis_names, self._notice), parting(self.everyone):
            device = StageDevice(
                plan.route, self, self.pipe, near, self.site, kinds, known, backward=how.backward, has_outcome=True
            )
            try:
                loss, held, aux = device.run()
            except RuntimeError:  # raised by autograd, for saved tensors that a stage has written to
                self._refuse_written()
                raise
            finally:
                for params in self.params.values():
                    params.close()
        self._refuse_written()
        found = self.totals.result()
        used, buffers = self._agreed()
        divisor = 1.0 if how.slices is None else self.weight
        gradients = {
            leaf: self._divided(g, divisor, held).to(plan.weights.leaves[leaf].dtype)
            for leaf, g in found.items()
            if used[leaf]
        }
        return StageResult(loss, self.weight, aux, gradients, used, buffers)

    def _refuse_written(self) -> None:
        """Raise if a stage has written to a parameter: to frozen ones, too, since it has done so for each microbatch."""
        paths = [path for stage in self.mine for path in self.params[stage].written_to()]
        if paths:
            names = ", ".join(named(parts_of(path)) for path in paths)
            raise ModuleError(f"{self.plan.how.caller}: stages write to parameters in place: {names}. {WRITES}")

    def _divided(self, g: Tensor, divisor: float, held: Tensor) -> Tensor:
        g = g if divisor == 1.0 else g / divisor
        return g if self.scale == 1.0 else g / held

    # -- the work of a schedule -----------------------------------------------------------------------------------

    def begin(self, microbatch: int) -> PyTree:
        """Return the input of the first stage for a microbatch."""
        return self.plan.inputs(self._tree(microbatch))

    def _tree(self, microbatch: int) -> PyTree:
        return self.batch.tree(self.slices[microbatch].leaves, self.plan.how.unit_options.compute)

    def call(self, stage: int, microbatch: int, x: PyTree, skips: dict[str, PyTree]) -> PyTree:
        """Call a stage; its random draws depend on the samples and the layer."""
        with self._draws(microbatch, part=stage), self._idling(microbatch):
            called, params = stage_for(self.plan.stages[stage], microbatch), self.params[stage].tree
            if self.memory is None:
                y = called(params, x, **skips)
            else:
                y, after = called((params, self.memory.parts[stage]), x, **skips)
                self.memory.note(stage, microbatch, after)
        if self.fresh:
            refuse_unreached(y)
        return y

    def _draws(self, microbatch: int, part: int) -> AbstractContextManager[None]:
        return keyed_apart(self.keys[microbatch], part)

    def _idling(self, microbatch: int) -> idling:
        return idling(not self.slices[microbatch].rows)

    def end(self, microbatch: int, y: PyTree) -> Tensor:
        """Return the loss of the last stage's result."""
        how, slice, count = self.plan.how, self.slices[microbatch], self.counts[microbatch]
        with self._draws(microbatch, part=0), self._idling(microbatch):
            returned, aux = how.loss_fn(y, self._tree(microbatch)), ()
            if how.has_aux:
                if not isinstance(returned, tuple | list) or len(returned) != 2:
                    raise LayoutError(
                        f"the loss function has to return (loss, aux); found a {type(returned).__name__}."
                    )
                returned, aux = returned
            loss = one_loss(how, returned, slice, count)
        beside = sort_aux(aux, slice.samples, loss.device)
        means, counts = [*beside.means.values()], [*beside.counts.values()]
        self.parts[microbatch] = LossSums(loss.detach(), count.weight, means, counts), beside
        self.scaled = held_by(loss.dtype, self.scale)
        return loss

    def start(self, microbatch: int) -> Tensor:
        """Return a loss weighted by its part of the batch; in reproducible mode sums are weighted, in 32 bits."""
        share = self.counts[microbatch].share if self.plan.how.slices is None else 1.0
        return torch.full_like(self.parts[microbatch][0].loss, share * self.scaled)

    def edges(self, stage: int) -> list[GradientEdge]:
        """Return the trained ones."""
        return self.params[stage].edges

    def may_accumulate(self, stage: int, microbatch: int) -> bool:
        """Let autograd add to the sums, where nothing has to be done with gradients before."""
        return bool(self.counts[microbatch].weight) and self.totals.let_accumulate(stage, self.params[stage].own)

    def add(self, stage: int, microbatch: int, gs: list[Tensor | None]) -> None:
        """Accumulate gradients; those of weight 0 count as zero, even if they are not finite."""
        self.totals.add(stage, microbatch, gs, idle=not self.counts[microbatch].weight)

    def gather(self, stage: int) -> None:
        """Begin to gather a stage."""
        self.params[stage].gather()

    def free(self, stage: int) -> None:
        """Let a stage go."""
        self.params[stage].free()

    def reduce(self, stage: int) -> None:
        """Begin to reduce the gradients of a stage."""
        self.totals.reduce(stage)

    def outcome(self) -> tuple[Tensor, Tensor, PyTree]:
        """Return the loss, its scale, and the metrics."""
        parts, batch = [self.parts[microbatch] for microbatch in range(len(self.slices))], self.batch
        mean, _ = together([found for found, _ in parts], [], self.beside, 1, self.site)
        cut = () if batch.cut is None else batch.cut.axes
        same = tuple(axis for axis in batch.axes if axis not in cut)

        def collect(rows: Sequence[Tensor]) -> Rows:
            return collected(rows, batch, self._along(same), self._along(cut), self.site)

        counts = [slice.rows if batch.cut else None for slice in self.slices]
        numbers, rows = combine_aux([own for _, own in parts], counts, mean, collect)
        known, structure = {**numbers, **{place: one.own for place, one in rows.items()}}, parts[-1][1].structure
        aux = unflatten(structure, [known[place] for place in range(structure.num_leaves)])
        return mean.loss, torch.full_like(mean.loss, self.scaled / self.scale, dtype=torch.float64), aux

    # -- among all devices --------------------------------------------------------------------------------------------

    def _notice(self, what: str, group: Group) -> None:
        """Raise if a stage calls a collective that stages may not call."""
        elsewhere = {axis for axis in group.axes if self.scope.mesh.shape.get(axis, 1) > 1} - {*self.batch.axes}
        if elsewhere and what not in NOT_HEARD:
            raise LayoutError(
                f"{what} over {', '.join(sorted(elsewhere))} in a stage, at {call_site()}: stages of a pipeline may "
                f"communicate only with devices that have other samples, along {', '.join(self.batch.axes) or 'no axis'}."
            )
        if self._objection is not None:
            self._objection(what, group)

    def _agreed(self) -> tuple[list[bool], dict[str, Tensor]]:
        """Return which parameters any device has used, and the buffers that changed; raise if devices began differently."""
        origin, memory = self._origin(), self.memory
        written = [] if memory is None else memory.written([count.weight for count in self.counts])
        keys = [] if memory is None else memory.keys
        wrote, own = written_paths(written), marks(*origin.numbers)
        row = [*own, *(float(key in wrote) for key in keys), *map(float, self.totals.used)]
        (sums,) = summed((on_host(row, torch.device("cpu")),), self.everyone, self.site)
        found = sums.tolist()
        for place in unlike(found[: len(own)]):
            origin.refuse(place, self.scope.mesh, lambda numbers: exchanged(numbers, self.everyone, self.site))
            raise MismatchError(f"{self.plan.how.caller}: devices have begun from different things.")
        flags, times = found[len(own) :][: len(keys)], found[len(own) + len(keys) :]
        used = [each > 0 for each in times]
        if self.plan.how.backward and not any(used):
            raise LayoutError(DETACHED)
        if memory is None:
            return used, {}
        flagged = [key for key, times in zip(keys, flags, strict=True) if times]
        return used, memory.together(written, flagged, self.mine, self.beside, self.site)

    def _origin(self) -> Origin:
        """Return the inputs of the step."""
        key = None if self.plan.how.slices is None else self.key
        looks = self.fresh and self.batch.alone
        unsharded = {path: bits(x) for path, x in self.batch.unsharded.items()} if looks else {}
        return Origin(self.batch.shapes, key, {}, unsharded)
