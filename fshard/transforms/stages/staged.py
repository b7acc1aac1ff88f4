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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import nn

from fshard.ambient import ambient
from fshard.errors import LayoutError
from fshard.mesh.layout import Mesh, P, PyTree, Structure, as_axes, flatten
from fshard.mesh.layout.sharded import Sharded
from fshard.pipeline.execution.route import Route
from fshard.pipeline.schedule.actions import UNITS, Kind
from fshard.pipeline.schedule.communication import with_units
from fshard.pipeline.schedule.schedule import Schedule
from fshard.pipeline.schedule.verify import verify
from fshard.transforms.array_checks import validate_mesh
from fshard.transforms.gradient import GradientFunction, StepInputs
from fshard.transforms.module.buffers import Buffers
from fshard.transforms.options import Options, StepOptions
from fshard.transforms.patterns import named, parts_of
from fshard.transforms.stages.buffers import StageWrites, stage_buffers, stage_of, with_buffers
from fshard.transforms.stages.device import StageStep
from fshard.transforms.stages.functions import in_groups, stage_functions
from fshard.transforms.stages.plan import (
    StagePlan,
    StagePlanner,
    StageProgram,
    coordinate_of,
    validate_schedule_fits,
)

_SHARD_STAGES = "fs.shard_stages(stages, rules, mesh=mesh, schedule=schedule)"


def staged(caller: str, stages: Any, options: Options, *, backward: bool, in_place: bool) -> Staged:
    """Return the gradient of stages that run by the schedule in the options: see `train_step`."""
    assert options.schedule is not None
    functions: list[Any] = [stages]
    if isinstance(stages, list | tuple | nn.ModuleList):
        functions = [*stages]
    mesh, axis, recompute = options.mesh, options.axis, options.recompute
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
    program = StageProgram(axis, functions, inputs, route, options.dynamic)
    return Staged(step_options, mesh, options.batch, program)


def _completed(schedule: Schedule, options: StepOptions) -> Schedule:
    """Add the times at which stages are unsharded, if there are none; without a backward keep forwards."""
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
    axes = {axis for spec in flatten(specs)[0] if isinstance(spec, P) for axis in spec.axes}
    return [axis for axis in mesh.axis_names if axis in axes]


def first_of_two(microbatch: PyTree) -> PyTree:
    """Return the default input of the first stage: x of a pair (x, target), or the full microbatch."""
    return (
        microbatch[0]
        if isinstance(microbatch, tuple | list) and len(microbatch) == 2
        else microbatch
    )


@dataclass(frozen=True)
class Staged(GradientFunction):
    """The gradient of a model in stages."""

    program: StageProgram

    def check_params(
        self, params: PyTree, leaves: Sequence[Any], structure: Structure, mesh: Mesh
    ) -> None:
        """Raise unless there is a tree per stage, of parameters placed on the stage or on one it is tied to."""
        if mesh.runtime == "abstract" and ambient.representative is None:
            raise ValueError(
                f"{self.options.caller}: stages must not run on an abstract mesh by themselves, where results of other stages "
                "are unknown. Run them by fs.plan.cost, or on a virtual mesh."
            )
        if not isinstance(params, list | tuple) or len(params) != len(self.program.stages):
            got = (
                f"{len(params)} are given"
                if isinstance(params, list | tuple)
                else f"found {type(params).__name__}"
            )
            raise ValueError(
                f"{self.options.caller}: {len(self.program.stages)} stages have a list of as many trees of parameters; {got}."
            )
        if not leaves:
            raise ValueError(
                f"{self.options.caller}: no stage has a parameter, so there is nothing to train."
            )
        validate_mesh(leaves, structure, mesh, self.options.caller, _SHARD_STAGES)

    def buffers_on(self, mesh: Mesh, buffers: PyTree) -> Buffers:
        """Return the given buffers of all stages on the mesh."""
        return stage_buffers(
            self.options.caller, buffers, mesh, self.program.axis, self.program.route.placement
        )

    def plan(
        self,
        structure: Structure,
        params: Sequence[tuple[str, Sharded, bool]],
        numbers: Sequence[int],
        mesh: Mesh,
        axes: tuple[str, ...],
    ) -> StagePlan:
        """Return the plans of parameters, which must be on the devices of their stages."""
        axis, placement = self.program.axis, self.program.route.placement
        errors, numbers_so_far = list[str](), set[int]()
        for (path, x, _), number in zip(params, numbers, strict=True):
            coordinate = placement[stage_of(path)]
            if number not in numbers_so_far and coordinate_of(x.layout, axis) != coordinate:
                errors.append(
                    f"{named(parts_of(path))} has {x.spec}, its stage the coordinate {coordinate}"
                )
            numbers_so_far.add(number)
        if errors:
            raise LayoutError(
                f"{self.options.caller}: parameters must be on the devices of their stages, along {axis}: "
                f"{'; '.join(errors)}. Put them there: {_SHARD_STAGES}."
            )
        sum_axes = (
            *(name for name in mesh.axis_names if name in self.options.local and name not in axes),
            *axes,
        )
        return StagePlanner(self.options, self.program, mesh, sum_axes).plan(
            structure.children(), params, numbers
        )

    def device_step(
        self, plans: StagePlan, inputs: StepInputs, index: int, device: int
    ) -> StageStep:
        """Return the step of a device, the local one at `index`."""
        *_, batch, buffers, key, scale, site = inputs
        writes = (
            StageWrites(self.options.caller, buffers, index) if self.options.has_buffers else None
        )
        return StageStep(
            plans, inputs.shards(index), device, writes, site, batch, index, key, scale
        )

    def failed(self, mesh: Mesh, steps: Mapping[int, StageStep], error: BaseException) -> None:
        """Forget the plans: some devices may have cached message forms that others have not."""
        self.plans.clear()
