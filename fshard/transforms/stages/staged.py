"""The gradient of a model in stages, run by a schedule: `value_and_grad(stages, ..., schedule=)`.

    mesh {"pipe": 4, "data": 2}    data=0   data=1
                         pipe=0    stage 0  stage 0    values are sent along "pipe",
                         pipe=1    stage 1  stage 1    parameters gathered along "data"
                         ...

The batch is sharded along "data" as usual, and each device's shard is split into the microbatches
of the schedule. These are slices: loss, gradients and metrics equal those of `value_and_grad`, bit
by bit in reproducible mode with as many slices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from torch import nn

from fshard.errors import LayoutError
from fshard.mesh.layout import Mesh, P, PyTree, as_axes, flatten
from fshard.mesh.layout.kinds import compute_device
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.runtimes.abstract import representative
from fshard.pipeline.execution.route import Route
from fshard.pipeline.schedule.actions import UNITS, Kind
from fshard.pipeline.schedule.communication import with_units
from fshard.pipeline.schedule.schedule import Schedule
from fshard.pipeline.schedule.verify import verify
from fshard.transforms.array_checks import validate_mesh
from fshard.transforms.gradient import GradientFunction, ParamTree, StepInputs
from fshard.transforms.module.buffers import Buffers
from fshard.transforms.options import Options, StepOptions
from fshard.transforms.patterns import named, parts_of
from fshard.transforms.stages.buffers import StageWrites, stage_buffers, stage_of, with_buffers
from fshard.transforms.stages.device import StageStep
from fshard.transforms.stages.functions import in_groups, stage_functions
from fshard.transforms.stages.plan import (
    Pipeline,
    StagePlan,
    StagePlanner,
    coordinate_of,
    validate_schedule_fits,
)

if TYPE_CHECKING:
    from fshard.transforms.differentiable_gradient import DifferentiableStep

_SHARD_STAGES = "fs.shard_stages(stages, rules, mesh=mesh, schedule=schedule)"


def staged(
    caller: str, stages: Any, options: Options, *, backward: bool, in_place: bool
) -> GradientFunction:
    """Return the gradient of stages that run by the schedule in the options: see `train_step`."""
    assert options.schedule is not None
    functions: list[Any] = [stages]
    if isinstance(stages, list | tuple | nn.ModuleList):
        functions = [*stages]
    mesh = options.mesh
    axis = options.axis
    recompute = options.recompute
    errors = _argument_errors(functions, options)
    validate_schedule_fits(caller, len(functions), mesh, options.schedule, axis, *errors)
    assert options.loss is not None

    microbatches = options.schedule.microbatches
    parts = prod(mesh.shape[name] for name in _sharded_axes(options.batch, mesh))
    step_options = StepOptions.of(
        options,
        options.loss,
        caller=caller,
        backward=backward,
        slices=parts * microbatches,
        accumulate=microbatches,
        in_flight=len(functions),
    )
    schedule = _completed(options.schedule, step_options)
    verify(schedule)
    route = Route(schedule, options.skips or {}, backward)
    if options.has_buffers:
        if isinstance(recompute, int):
            functions = in_groups(functions, recompute, in_place=in_place)
            recompute = "never"
        functions = [with_buffers(stage, in_place=in_place) for stage in functions]
    functions, _ = stage_functions(functions, recompute, microbatches=microbatches)
    inputs = options.inputs or first_of_two
    pipeline = Pipeline(axis, functions, inputs, route, options.dynamic)
    return GradientFunction(step_options, mesh, options.batch, StageProgram(pipeline))


def _completed(schedule: Schedule, options: StepOptions) -> Schedule:
    """Add the times at which stages are unsharded, if there are none.

    Without a backward keep forwards alone, with the units that they need.
    """
    if not options.backward:
        schedule = schedule.with_rows(
            [action for action in row if action.kind is Kind.F] for row in schedule.rows
        )
    has_units = any(action.kind in UNITS for row in schedule.rows for action in row)
    if not has_units:
        schedule = with_units(schedule, options.live_units)
    if not options.backward:
        schedule = schedule.with_rows(
            [action for action in row if action.kind is not Kind.REDUCE] for row in schedule.rows
        )
    return schedule


def _argument_errors(stages: Sequence[Any], options: Options) -> list[str]:
    """Return the errors of stages, and of options together with them."""
    axis = options.axis
    errors = list[str]()
    for number, stage in enumerate(stages):
        if not callable(stage):
            errors.append(f"stage {number} is {type(stage).__name__}, which is not called")
    if not callable(options.loss):
        errors.append(
            "the last stage returns no loss: "
            "give loss=, a function of its result and the microbatch"
        )
    if axis in _sharded_axes(options.batch, options.mesh):
        errors.append(
            f"the batch is sharded along {axis}, the axis of the stages: "
            "all of them need the same samples"
        )
    if axis in as_axes(options.local):
        errors.append(f"the axis of the stages, {axis}, is local, but shards no parameter")
    return errors


def _sharded_axes(specs: PyTree, mesh: Mesh) -> list[str]:
    sharded_axes: set[str] = set()
    for spec in flatten(specs)[0]:
        if isinstance(spec, P):
            sharded_axes.update(spec.axes)
    return [axis for axis in mesh.axis_names if axis in sharded_axes]


def first_of_two(microbatch: PyTree) -> PyTree:
    """Return the default input of the first stage: x of a pair (x, target), or all of it."""
    if isinstance(microbatch, tuple | list) and len(microbatch) == 2:
        return microbatch[0]
    return microbatch


@dataclass(frozen=True)
class StageProgram:
    """A model in stages: each device runs its row of the schedule."""

    pipeline: Pipeline

    def validate_params(
        self, options: StepOptions, params: PyTree, tree: ParamTree, mesh: Mesh
    ) -> None:
        """Raise unless there is a tree of parameters per stage, on the mesh."""
        caller, count = options.caller, len(self.pipeline.stages)
        is_abstract = mesh.runtime == "abstract" and mesh.is_member
        if is_abstract and representative() is None:
            raise ValueError(
                f"{caller}: stages must not run on an abstract mesh by themselves, where results "
                "of other stages are unknown. Run them by fs.plan.cost, or on a virtual mesh."
            )
        is_sequence = isinstance(params, list | tuple)
        if not is_sequence or len(params) != count:
            got = f"found {type(params).__name__}"
            if is_sequence:
                got = f"{len(params)} are given"
            raise ValueError(
                f"{caller}: {count} stages have a list of as many trees of parameters; {got}."
            )
        if not tree.leaves:
            raise ValueError(f"{caller}: no stage has a parameter, so there is nothing to train.")
        validate_mesh(tree.leaves, tree.structure, mesh, caller, _SHARD_STAGES)

    def buffers(self, options: StepOptions, buffers: PyTree, mesh: Mesh) -> Buffers:
        """Return the given buffers of all stages on the mesh."""
        pipeline = self.pipeline
        placement = pipeline.route.placement
        return stage_buffers(options.caller, buffers, mesh, pipeline.axis, placement)

    def plan(
        self,
        options: StepOptions,
        tree: ParamTree,
        params: Sequence[tuple[str, Sharded, bool]],
        mesh: Mesh,
        axes: tuple[str, ...],
    ) -> StagePlan:
        """Return the plans of parameters, which must be on the devices of their stages."""
        self._validate_placement(options, params, tree.numbers)
        # Along a local axis that does not shard the batch, devices compute one loss together, each
        # with its shards.
        local = [axis for axis in mesh.axis_names if axis in options.local and axis not in axes]
        planner = StagePlanner(options, self.pipeline, mesh, (*local, *axes))
        return planner.plan(tree.structure.children(), params, tree.numbers)

    def _validate_placement(
        self,
        options: StepOptions,
        params: Sequence[tuple[str, Sharded, bool]],
        numbers: Sequence[int],
    ) -> None:
        """Raise unless parameters are on the devices of their stages, tied ones of the first."""
        axis = self.pipeline.axis
        placement = self.pipeline.route.placement
        errors: list[str] = []
        validated: set[int] = set()
        for (path, x, _), number in zip(params, numbers, strict=True):
            if number in validated:
                continue
            validated.add(number)
            coordinate = placement[stage_of(path)]
            if coordinate_of(x.layout, axis) != coordinate:
                name = named(parts_of(path))
                errors.append(f"{name} has {x.spec}, its stage the coordinate {coordinate}")
        if errors:
            raise LayoutError(
                f"{options.caller}: parameters must be on the devices of their stages, along "
                f"{axis}: {'; '.join(errors)}. Put them there: {_SHARD_STAGES}."
            )

    def device_step(
        self, options: StepOptions, plans: StagePlan, inputs: StepInputs, index: int
    ) -> StageStep:
        """Return the step of a device, the local one at `index`."""
        slices = inputs.slices(options, index)
        writes = None
        if options.has_buffers:
            device = compute_device(slices.scope.mesh)
            writes = StageWrites(options.caller, inputs.buffers, index, device)
        shards = inputs.params.shards(index)
        return StageStep(plans, slices, shards, writes, inputs.scale)

    def differentiable(
        self, options: StepOptions, mesh: Mesh, specs: PyTree, params: PyTree, batch: PyTree
    ) -> DifferentiableStep:
        """Raise: no differentiable program runs stages."""
        caller = options.caller
        raise TypeError(
            f"{caller} of stages must not be differentiated, within a torch.func transform or by "
            f"autograd. Differentiate fs.{caller} of the loss of the full model, without schedule=."
        )

    def handle_error(
        self,
        caller: str,
        mesh: Mesh,
        plans: StagePlan,
        steps: Mapping[int, StageStep],
        error: BaseException,
    ) -> bool:
        """Forget the forms of messages, which some devices may have cached and others not."""
        plans.messages.clear()
        return False
