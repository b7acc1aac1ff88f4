"""The gradient of a model in stages, run by a schedule: `value_and_grad(stages, ..., schedule=)`.

    mesh {"pipe": 4, "data": 2}        data=0   data=1
                          pipe=0       stage 0  stage 0        values and their gradients are sent along "pipe",
                          pipe=1       stage 1  stage 1        parameters and gradients are gathered and reduced along "data"
                          ...

The batch is sharded along "data" as usual, and each device's shard is split into the microbatches of the schedule.
These are slices: loss, gradients and metrics equal those of `value_and_grad`, bit by bit in reproducible mode with as
many slices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from fshard.errors import LayoutError
from fshard.mesh.layout import Layout, Mesh, P, PyTree, flatten, flatten_with_paths, unflatten
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.spmd.run import local_devices, one_thread, resolve_mesh, run_on_devices
from fshard.pipeline.execution.leaves import Stage
from fshard.pipeline.execution.route import Route
from fshard.pipeline.schedule.actions import UNITS, Kind
from fshard.pipeline.schedule.communication import with_units
from fshard.pipeline.schedule.schedule import Schedule
from fshard.pipeline.schedule.verify import verify
from fshard.source import Site
from fshard.transforms.batch import Batch, placed
from fshard.transforms.device_step import How
from fshard.transforms.fsdp.param_runtime import numbered, refuse_half_frozen
from fshard.transforms.fsdp.units import ParamPlan, UnitOptions
from fshard.transforms.gradient import StepValue, called, refuse_unrecorded
from fshard.transforms.means import Weight, with_batch_layout
from fshard.transforms.options import wrong_options
from fshard.transforms.origin import refuse_unplaced
from fshard.transforms.patterns import Choice, chosen, named, parts_of
from fshard.transforms.reproducible.randomness import drawn_key
from fshard.transforms.stages.buffers import Memory, StageBuffers, with_buffers
from fshard.transforms.stages.device import Shift, StageResult
from fshard.transforms.stages.functions import How as Recompute
from fshard.transforms.stages.functions import in_groups, stage_functions
from fshard.transforms.stages.plan import StagePlan, Terms, place_of, refuse_unfit

_LAY = "fs.shard_stages(stages, rules, mesh=mesh, schedule=schedule)"


def staged(
    stages: Sequence[nn.Module | Stage],
    *,
    mesh: Mesh,
    batch: PyTree,
    schedule: Schedule,
    loss: Callable[..., Any] | None = None,
    inputs: Callable[[PyTree], PyTree] | None = None,
    skips: Mapping[str, tuple[int, int]] | None = None,
    axis: str = "pipe",
    has_buffers: bool = False,
    deferred_batch_norm: bool = False,
    has_aux: bool = False,
    weight: Weight | None = None,
    gradients: Callable[[Layout], Layout] | None = None,
    frozen: Choice = None,
    reproducible: bool = False,
    live_units: int = 2,
    dynamic: bool = False,
    recompute: Recompute = "never",
    compute: torch.dtype | None = None,
    reduce: torch.dtype | None = None,
    backward: bool = True,
    in_place: bool = False,
    caller: str = "value_and_grad",
) -> Staged:
    """Return the gradient of stages that run by a schedule; for its options see `train_step`."""
    given: list[Any] = [*stages] if isinstance(stages, list | tuple | nn.ModuleList) else [stages]
    complaints = ["deferred_batch_norm=True is about buffers: give has_buffers=True"] * (
        deferred_batch_norm and not has_buffers
    )
    complaints += _complaints(given, mesh, batch, axis, loss)
    options: dict[str, Any] = {"live_units": live_units, "reduce": reduce, "compute": compute, "dynamic": dynamic}
    complaints += wrong_options(reproducible, {**options, "recompute": recompute, "skips": skips, "inputs": inputs})
    refuse_unfit(caller, len(given), mesh, schedule, axis, *complaints)
    assert loss is not None
    if not backward:
        schedule = schedule.with_rows([one for one in row if one.kind is Kind.F] for row in schedule.rows)
    if not any(action.kind in UNITS for row in schedule.rows for action in row):
        schedule = with_units(schedule, live_units)
    if not backward:
        schedule = schedule.with_rows([one for one in row if one.kind is not Kind.REDUCE] for row in schedule.rows)
    verify(schedule)
    slices = prod(mesh.shape[name] for name in _cut_over(batch, mesh)) * schedule.microbatches
    unit_options = UnitOptions(live=live_units, compute=compute, reduce=reduce)
    how = How(
        loss,
        has_buffers,
        has_aux,
        weight,
        schedule.microbatches,
        True,
        slices if reproducible else None,
        unit_options,
        backward,
        caller,
    )
    route = Route(schedule, skips or {}, backward, units=True)
    functions = given
    if has_buffers:
        if isinstance(recompute, int):
            functions, recompute = in_groups(given, recompute), "never"
        functions = [with_buffers(stage, deferred_batch_norm, in_place=in_place) for stage in functions]
    called, _ = stage_functions(functions, recompute, microbatches=schedule.microbatches)
    modules = [stage if isinstance(stage, nn.Module) else None for stage in given]
    return Staged(how, mesh, batch, axis, called, modules, inputs or first_of_two, route, gradients, frozen, dynamic)


def _complaints(
    stages: Sequence[Any],
    mesh: Mesh,
    batch: PyTree,
    axis: str,
    loss: object,
) -> list[str]:
    """Return the errors of the arguments."""
    wrong = [
        f"stage {number} is {type(one).__name__}, which is not called"
        for number, one in enumerate(stages)
        if not callable(one)
    ]
    if not callable(loss):
        wrong.append("the last stage returns no loss: give loss=, a function of its result and the microbatch")
    if axis in _cut_over(batch, mesh):
        wrong.append(f"the batch is sharded along {axis}, the axis of the stages: all of them need the same samples")
    if mesh.runtime == "abstract":
        wrong.append(
            "on an abstract mesh the results of stages are unknown: `schedule.simulate` needs no stages, and a virtual mesh "
            "counts bytes as well"
        )
    return wrong


def _cut_over(specs: PyTree, mesh: Mesh) -> list[str]:
    found = {axis for spec in flatten(specs)[0] if isinstance(spec, P) for axis in spec.axes}
    return [axis for axis in mesh.axis_names if axis in found]


def first_of_two(microbatch: PyTree) -> PyTree:
    """Return the default input of the first stage: x of a pair (x, target), or the full microbatch."""
    return microbatch[0] if isinstance(microbatch, tuple | list) and len(microbatch) == 2 else microbatch


@dataclass
class StagedPlan:
    """The cached plan for parameters of these structures, ties, shapes, dtypes and layouts."""

    key: object
    plan: StagePlan
    fresh: bool = True
    elsewhere: dict[int, Sharded] = field(default_factory=dict[int, Sharded])

    def gradient(
        self, number: int, leaf: ParamPlan, devices: Sequence[int], results: Sequence[StageResult]
    ) -> Sharded | None:
        """Return a gradient in its layout: nothing on the devices of other stages; None if no device has used the parameter."""
        if not leaf.trained or not results[0].used[number]:
            return None
        if number in self.elsewhere:
            return self.elsewhere[number]
        here = [result.gradients.get(number) for result in results]
        shards = [
            _nothing(leaf, device, result.loss) if g is None else g
            for g, device, result in zip(here, devices, results, strict=True)
        ]
        made = Sharded(leaf.shape, leaf.gradient, tuple(shards))
        if all(g is None for g in here):
            self.elsewhere[number] = made  # so in all steps
        return made


@dataclass(frozen=True)
class Staged:
    """The gradient function of stages, which runs as that of `value_and_grad` does."""

    how: How
    mesh: Mesh
    specs: PyTree
    axis: str
    stages: Sequence[Stage]
    modules: Sequence[nn.Module | None]
    inputs: Callable[[PyTree], PyTree]
    route: Route
    gradients: Callable[[Layout], Layout] | None
    frozen: Choice
    dynamic: bool
    known: list[StagedPlan] = field(init=False, default_factory=list[StagedPlan], compare=False, repr=False)

    __call__ = called

    def run(
        self, params: PyTree, buffers: PyTree, batch: PyTree, site: Site, scale: float = 1.0
    ) -> tuple[StepValue, PyTree]:
        """Run the schedule on all devices; return the loss, and the gradients of `scale` times it in their layouts."""
        refuse_unrecorded(self.how)
        mesh, caller = resolve_mesh(self.mesh), self.how.caller
        paths, leaves, structure = flatten_with_paths(params, sharded_is_leaf=True)
        parts = placed(batch, self.specs, mesh)
        parts.check(self.how.turns(prod(mesh.shape[axis] for axis in parts.axes)))
        unique, at = numbered(leaves)
        known = self._known(params, paths, leaves, at, mesh, parts)
        drawn = drawn_key()
        devices = local_devices(mesh)
        updates = None
        if self.how.has_buffers:
            updates = StageBuffers(caller, buffers, mesh, self.axis, self.route.placement)

        def on_device(device: int) -> StageResult:
            place = devices.index(device) if len(devices) > 1 else 0
            shards = [leaves[at].shards[place] for at in unique]
            memory = updates and Memory(caller, updates.part(place), self.modules)
            return Shift(
                known.plan, shards, parts, place, drawn, scale, memory=memory, fresh=known.fresh, site=site
            ).run()

        try:
            with one_thread(self.how.slices is not None):
                results = run_on_devices(mesh, on_device, mapped=mesh.axis_names)
        except BaseException:
            self.known.clear()  # some devices may have cached message forms that others have not
            raise
        known.fresh = False
        leaves_of = enumerate(known.plan.weights.leaves)
        grads = [known.gradient(number, leaf, devices, results) for number, leaf in leaves_of]
        one, rows = results[0], [flatten(result.aux)[0] for result in results]
        aux = unflatten(flatten(one.aux)[1], [_together(column, parts) for column in zip(*rows, strict=True)])
        after = updates.after([result.buffers for result in results]) if updates else ()
        value = StepValue(one.loss, one.weight, parts.samples, after, aux)
        return value, unflatten(structure, [grads[number] for number in at])

    def _refuse(self, params: PyTree, paths: Sequence[str], leaves: Sequence[Any], mesh: Mesh) -> None:
        """Raise unless there is a tree per stage, of parameters placed on the stage or on one it is tied to."""
        if not isinstance(params, list | tuple) or len(params) != len(self.stages):
            found = f"{len(params)} are given" if isinstance(params, list | tuple) else f"found {type(params).__name__}"
            raise LayoutError(
                f"{self.how.caller}: {len(self.stages)} stages have a list of as many trees of parameters; {found}."
            )
        if not leaves:
            raise LayoutError(f"{self.how.caller}: no stage has a parameter, so there is nothing to train.")
        refuse_unplaced(leaves, flatten(params, sharded_is_leaf=True)[1], mesh, self.how.caller, _LAY)
        places = self._places_of(params)
        wrong = [
            f"{named(parts_of(paths[first]))} has {leaves[first].spec}, its stage the coordinate {places[first]}"
            for first in numbered(leaves)[0]
            if place_of(leaves[first].layout, self.axis) != places[first]
        ]
        if wrong:
            raise LayoutError(
                f"{self.how.caller}: parameters must be on the devices of their stages, along {self.axis}: "
                f"{'; '.join(wrong)}. Put them there: {_LAY}."
            )

    def _places_of(self, params: Sequence[PyTree]) -> list[int]:
        """Return for each leaf the coordinate of its stage."""
        counts = [len(flatten(tree, sharded_is_leaf=True)[0]) for tree in params]
        return [place for place, count in zip(self.route.placement, counts, strict=True) for _ in range(count)]

    def _known(
        self,
        params: PyTree,
        paths: Sequence[str],
        leaves: Sequence[Sharded],
        at: Sequence[int],
        mesh: Mesh,
        batch: Batch,
    ) -> StagedPlan:
        trees = params if isinstance(params, list | tuple) else [params]
        structures = [flatten(tree, sharded_is_leaf=True)[1] for tree in trees]
        kinds = [(x.shape, x.dtype, x.layout) if isinstance(x, Sharded) else None for x in leaves]
        key = type(params), structures, at, batch.axes, kinds, mesh
        found = next((known for known in self.known if known.key == key), None)
        if found is None:
            self._refuse(params, paths, leaves, mesh)
            fixed = chosen(self.frozen, paths, "frozen")
            refuse_half_frozen(paths, at, fixed)
            terms = Terms(self.how, self.axis, self.route.placement, self.gradients, mesh, batch.axes)
            weights = terms.weights(structures, [*zip(paths, leaves, fixed, strict=True)], at)
            messages = None if self.dynamic else {}
            plan = StagePlan(self.how, self.axis, self.stages, self.inputs, self.route, weights, messages)
            found = StagedPlan(key, plan)
            self.known[:] = [found, *self.known[:7]]
        return found


def _nothing(leaf: ParamPlan, device: int, near: Tensor) -> Tensor:
    return torch.empty(leaf.gradient.local_shape(leaf.shape, device), dtype=leaf.dtype, device=near.device)


def _together(column: Sequence[Any], batch: Batch) -> Any:
    """Return a number that all devices agree on, or the number of rows of all samples."""
    if not column[0].ndim:
        return column[0]
    rows = [with_batch_layout(x, batch) for x in column]
    return Sharded(rows[0].shape, rows[0].layout, tuple(one.own for one in rows))
