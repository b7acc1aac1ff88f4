"""Plan the parameters of a model in stages, once: how they and their gradients are resharded.

    a shard at the coordinate of the first stage
        ──send──>  a shard at the coordinate of another stage
        ──all-gather──>  unsharded, for a while
    summands, one per device of the coordinate
        ──reduce──>  the gradient's layout, there

All plans begin and end at one coordinate along the pipeline: other devices have other stages, and
take no part.

The coordinate of a stage along "pipe" is part of the layout of each of its parameters,
`P(at={"pipe": k})`. So optimizers, norms, checkpoints and pictures work without knowing pipelines.
A parameter of several stages (tied) is stored by the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor, nn

from fshard.errors import LayoutError
from fshard.mesh.layout import (
    Layout,
    Memory,
    Mesh,
    P,
    PyTree,
    Structure,
    flatten,
    flatten_with_paths,
    unflatten,
)
from fshard.mesh.layout.sharded import Sharded, key_of
from fshard.mesh.reshard.device_put import put_equal
from fshard.mesh.reshard.execute import ReshardPlan, plan_reshard
from fshard.mesh.spmd.global_inputs import compare_inputs, samples_of
from fshard.mesh.spmd.run import local_devices
from fshard.optim.leaves import trainable
from fshard.pipeline.execution.leaves import Stage
from fshard.pipeline.execution.mailbox import Forms
from fshard.pipeline.execution.route import Route
from fshard.pipeline.schedule.schedule import Schedule
from fshard.transforms.fsdp.plans import (
    Order,
    ParamPlan,
    ReductionPlans,
    UnitPlan,
    plan_param,
    plan_reduction,
)
from fshard.transforms.module.lazy import draw, fill, reserved
from fshard.transforms.options import StepOptions
from fshard.transforms.patterns import Choice, titled
from fshard.transforms.shard_params import Rules, layouts_of, put_all


class StageLeaves(NamedTuple):
    """The parameters of one stage, each once.

    Args:
        leaves: their plans.
        indices: of these in the plans of all stages.
        tree: returns the tree that the stage takes, from their values.
        sharded: those that are all-gathered or copied to the device, by their index in the stage.
        replicated: the others.
    """

    leaves: Sequence[ParamPlan]
    indices: list[int]
    tree: Callable[[list[Tensor]], PyTree]
    sharded: UnitPlan
    replicated: UnitPlan

    @staticmethod
    def of(
        leaves: Sequence[ParamPlan], indices: list[int], tree: Callable[[list[Tensor]], PyTree]
    ) -> StageLeaves:
        """Return the plan of a stage from the plans of its parameters."""
        sharded: list[int] = []
        replicated: list[int] = []
        for index, leaf in enumerate(leaves):
            unit_indices = sharded if leaf.is_sharded else replicated
            unit_indices.append(index)
        return StageLeaves(
            leaves,
            indices,
            tree,
            sharded=UnitPlan.of(leaves, sharded),
            replicated=UnitPlan.of(leaves, replicated),
        )


class Borrowed(NamedTuple):
    """A parameter that a stage needs at another coordinate than that of its owner.

    `plan`: sends the shard there.
    """

    leaf: int
    coordinate: int
    plan: ReshardPlan


class Tie(NamedTuple):
    """A trained parameter of several stages, of which the first owns it.

    `coordinates`: of the stages along the pipeline. `to_owner`: the plans that send each stage's
    gradient to the owner.
    """

    leaf: int
    stages: tuple[int, ...]
    coordinates: tuple[int, ...]
    to_owner: tuple[ReshardPlan, ...]


@dataclass(frozen=True)
class Pipeline:
    """Stages and how they run.

    Args:
        axis: of the pipeline.
        stages: the functions.
        inputs: returns the first stage's input of a microbatch.
        route: the schedule with its messages.
        dynamic: True if each message describes itself.
    """

    axis: str
    stages: Sequence[Stage]
    inputs: Callable[[PyTree], PyTree]
    route: Route
    dynamic: bool


@dataclass
class StagePlan:
    """The plan of a model in stages, the same for all devices and steps.

    Args:
        options: of the step.
        pipeline: the stages.
        leaves: the plans of all parameters, each once; they are referred to by index.
        by_stage: those of each stage.
        reduction_plans: of the gradients of trained ones, among the devices of the stage.
        borrowed: parameters that stages need of others.
        ties: the trained parameters of several stages.
        messages: known forms of messages.
        empty_gradients: of other devices' parameters, by device and index.
        order: of units, in an earlier step; None: this is the first.
    """

    options: StepOptions
    pipeline: Pipeline
    leaves: list[ParamPlan]
    by_stage: list[StageLeaves]
    reduction_plans: ReductionPlans
    borrowed: list[Borrowed]
    ties: list[Tie]
    messages: dict[int, Forms] = field(default_factory=dict[int, Forms])
    empty_gradients: dict[tuple[int, int], Tensor] = field(
        default_factory=dict[tuple[int, int], Tensor]
    )
    order: Order | None = None


@dataclass(frozen=True)
class StagePlanner:
    """Plans the parameters of stages.

    Gradients are summed along the axes `over`: local ones and the batch's.
    """

    options: StepOptions
    pipeline: Pipeline
    mesh: Mesh
    over: tuple[str, ...]

    @property
    def axis(self) -> str:
        """The axis of the pipeline."""
        return self.pipeline.axis

    def plan(
        self,
        structures: Sequence[Structure],
        params: Sequence[tuple[str, Sharded, bool]],
        numbers: Sequence[int],
    ) -> StagePlan:
        """Return the plan.

        Args:
            structures: of the trees of the stages.
            params: for each leaf of these its path, its parameter, and whether it is frozen.
            numbers: of each, equal for tied ones.
        """
        placement = self.pipeline.route.placement
        next_number = iter(numbers)
        by_stage_indices = [[*islice(next_number, tree.num_leaves)] for tree in structures]
        leaves: list[ParamPlan] = []
        layouts: list[Layout] = []
        for index in range(len({*numbers})):
            path, x, frozen = params[numbers.index(index)]  # the first of those that are tied
            leaves.append(self._plan_param(path, x, frozen))
            layouts.append(x.layout)

        borrowed: list[Borrowed] = []
        ties: list[Tie] = []
        for index, (leaf, layout) in enumerate(zip(leaves, layouts, strict=True)):
            stages = [stage for stage, row in enumerate(by_stage_indices) if index in row]
            coordinates = {placement[stage] for stage in stages}
            for coordinate in sorted(coordinates - {coordinate_of(layout, self.axis)}):
                borrowed_layout = at_coordinate(layout, self.axis, coordinate)
                plan = plan_reshard(layout, borrowed_layout, leaf.shape)
                borrowed.append(Borrowed(index, coordinate, plan))
            if leaf.trained and len(stages) > 1:
                ties.append(self._plan_tie(index, leaf, stages))

        by_stage: list[StageLeaves] = []
        for row, structure, coordinate in zip(by_stage_indices, structures, placement, strict=True):
            by_stage.append(self._plan_stage(row, structure, leaves, layouts, coordinate))
        return StagePlan(
            self.options,
            self.pipeline,
            leaves,
            by_stage,
            self._plan_reductions(leaves),
            borrowed,
            ties,
        )

    def _plan_reductions(self, leaves: Sequence[ParamPlan]) -> ReductionPlans:
        """Return the plans of the gradients of trained parameters, by index."""
        in_order = self.options.reproducible
        trained = {index: leaf for index, leaf in enumerate(leaves) if leaf.trained}
        return {
            index: plan_reduction(self.mesh, self.over, leaf, in_order=in_order)
            for index, leaf in trained.items()
        }

    def _used_layout(self, layout: Layout, coordinate: int) -> Layout:
        """Return the layout in which a parameter is used by the devices of a coordinate."""
        return at_coordinate(self.options.used(layout), self.axis, coordinate)

    def _plan_param(self, path: str, x: Sharded, frozen: bool) -> ParamPlan:
        is_trained = self.options.backward and trainable(x) and not frozen
        coordinate = coordinate_of(x.layout, self.axis)
        assert coordinate is not None
        gradients = self.options.gradients if is_trained else None
        used_layout = self._used_layout(x.layout, coordinate)
        leaf = plan_param(path, x, gradients, used_layout)
        if coordinate_of(leaf.gradient, self.axis) != coordinate:
            raise LayoutError(
                f"{self.options.caller}: gradients= gives that of {titled(path)} the "
                f"layout {leaf.gradient.spec}, not on the devices of the parameter, {x.spec}. "
                f"Keep its coordinate along {self.axis}."
            )
        return leaf

    def _plan_stage(
        self,
        indices: Sequence[int],
        structure: Structure,
        leaves: Sequence[ParamPlan],
        layouts: Sequence[Layout],
        coordinate: int,
    ) -> StageLeaves:
        """Return the parameters of a stage, its own and borrowed ones."""
        unique = list(dict.fromkeys(indices))  # a stage may have a tied parameter twice
        positions = [unique.index(index) for index in indices]

        stage_leaves: list[ParamPlan] = []
        for index in unique:
            leaf = leaves[index]
            shard = at_coordinate(layouts[index], self.axis, coordinate)
            gather = plan_reshard(shard, self._used_layout(shard, coordinate), leaf.shape)
            stage_leaves.append(leaf._replace(gather=gather))

        def tree(params: list[Tensor]) -> PyTree:
            return unflatten(structure, [params[position] for position in positions])

        return StageLeaves.of(stage_leaves, unique, tree)

    def _plan_tie(self, index: int, leaf: ParamPlan, stages: list[int]) -> Tie:
        """Return the plan of a tied parameter: each stage sends its gradients to the first one.

        They are a stack: of one gradient in each microbatch in reproducible mode, else of one sum.
        """
        coordinates = tuple([self.pipeline.route.placement[stage] for stage in stages])
        count = self.options.accumulate if self.options.reproducible else 1
        layout = Layout(self.mesh, P(None, *leaf.used.entries))
        stacks = [at_coordinate(layout, self.axis, coordinate) for coordinate in coordinates]
        shape = (count, *leaf.shape)
        to_owner = tuple([plan_reshard(stack, stacks[0], shape) for stack in stacks])
        return Tie(index, tuple(stages), coordinates, to_owner)


def shard_stages(
    stages: Sequence[nn.Module | PyTree],
    rules: Rules | None = None,
    *,
    mesh: Mesh,
    schedule: Schedule,
    axis: str = "pipe",
    frozen: Choice = None,
    seed: int | None = None,
    memory: Memory | Mapping[str, Memory] = "device",
) -> list[PyTree]:
    """Place the parameters of stages on the devices that have them: every process keeps its shards.

    All processes must call it: their tensors are compared, by hashes in one collective, and
    different ones raise.

    Args:
        stages: modules, whose parameters are taken by their names; or trees of parameters.
        rules: their layouts along the other axes: as for `shard_params`, for the list of these
            trees: such as `fsdp("data")`, or patterns as "*.blocks.*.w", which begin with the
            number of the stage. None: replicated.
        mesh: the devices.
        schedule: the placement of stages.
        axis: of the pipeline.
        frozen: parameters that are not trained: see `shard_params`.
        seed: of `lazy` layers. A process builds only those of its own stages, one stage at a time.
        memory: of the shards: see `shard_params`. Patterns begin with the number of the stage.

    >>> import torch, fshard as fs
    >>> mesh = fs.make_mesh({"pipe": 2, "data": 2})
    >>> schedule = fs.pipeline_schedule("1f1b", stages=2, microbatches=4)
    >>> stages = [torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)]
    >>> params = fs.shard_stages(stages, mesh=mesh, schedule=schedule)
    >>> fs.typeof(params[1]["weight"]), [tuple(shard.shape) for shard in params[1]["weight"].shards]
    (f32[2, 4]{at:pipe=1}, [(0, 0), (0, 0), (2, 4), (2, 4)])
    """
    trees: list[PyTree] = []
    for stage in stages:
        is_module = isinstance(stage, nn.Module)
        trees.append(dict(stage.named_parameters()) if is_module else stage)
    # Lazy layers are drawn below, if all stages are modules: other tensors have no initializer.
    are_modules = all(isinstance(stage, nn.Module) for stage in stages)
    is_drawn = seed is not None and are_modules
    put = reserved if is_drawn else put_equal
    target: dict[str, Any] = {"mesh": mesh, "schedule": schedule, "axis": axis}
    result = place_stages(trees, rules, **target, frozen=frozen, put=put, memory=memory)
    compare_inputs("shard_stages", mesh, samples_of(trees))
    if seed is not None and are_modules:
        _draw_stages(stages, seed, trees, result, has_stages(**target))
    return result


def _draw_stages(
    stages: Sequence[nn.Module],
    seed: int,
    trees: Sequence[PyTree],
    sharded: Sequence[PyTree],
    are_local: Sequence[bool],
) -> None:
    """Draw the lazy layers of the stages of this process; a tied parameter by the first stage."""
    seen: set[tuple[int, ...]] = set()
    for stage, tree, arrays, is_local in zip(stages, trees, sharded, are_local, strict=True):
        if is_local:
            new = [name for name, x in tree.items() if key_of(x) not in seen]

            def take(name: str, value: Tensor, arrays: PyTree = arrays) -> None:
                fill(arrays[name], value)

            draw(stage, seed, new, take, "shard_stages")
        seen.update([key_of(x) for x in flatten(tree)[0]])


def place_stages(
    trees: Sequence[PyTree],
    rules: Rules | None = None,
    *,
    mesh: Mesh,
    schedule: Schedule,
    axis: str,
    frozen: Choice = None,
    put: Callable[[Any, Layout], Any] = put_equal,
    memory: Memory | Mapping[str, Memory] = "device",
) -> list[PyTree]:
    """Place the parameters of stages on the devices that have them, each by `put`."""
    validate_schedule_fits("shard_stages", len(trees), mesh, schedule, axis)
    if rules is None:
        rules = P()
    layouts = layouts_of(trees, rules, mesh, frozen, "shard_stages", memory)
    _validate_placement(trees, layouts, mesh, axis, schedule.placement)
    coordinates: list[int] = []  # of each leaf
    for coordinate, tree in zip(schedule.placement, trees, strict=True):
        coordinates += [coordinate] * len(flatten(tree)[0])
    stage_layouts: list[Layout] = []
    for layout, coordinate in zip(layouts, coordinates, strict=True):
        stage_layouts.append(at_coordinate(layout, axis, coordinate))
    leaves, structure = flatten([*trees])
    return unflatten(structure, put_all(leaves, stage_layouts, put))


def has_stages(mesh: Mesh, schedule: Schedule, axis: str) -> list[bool]:
    """Return, for each stage, True if the caller has tensors of it: meta tensors belong to none."""
    if mesh.runtime == "abstract":
        return [False] * len(schedule.placement)
    local_coordinates = {mesh.coordinates(device)[axis] for device in local_devices(mesh)}
    return [coordinate in local_coordinates for coordinate in schedule.placement]


def _validate_placement(
    trees: Sequence[PyTree],
    layouts: Sequence[Layout],
    mesh: Mesh,
    axis: str,
    placement: Sequence[int],
) -> None:
    """Raise naming the parameters whose rules contradict the placement of their stages."""
    next_leaf = iter(zip(flatten_with_paths(trees)[0], layouts, strict=True))
    owner_coordinates: dict[tuple[int, ...], int] = {}  # of each parameter, the first stage's
    errors: list[str] = []
    for tree, coordinate in zip(trees, placement, strict=True):
        for leaf in flatten(tree)[0]:
            path, layout = next(next_leaf)
            owner_coordinate = owner_coordinates.setdefault(key_of(leaf), coordinate)
            is_sharded = axis in layout.spec.axes
            if is_sharded and coordinate_of(layout, axis) != owner_coordinate:
                errors.append(f"{titled(path)} as {layout.spec}")
    if errors:
        free_axes = [f'"{name}"' for name in mesh.axis_names if name != axis]
        fix = "The mesh has no other axis: leave rules out."
        if free_axes:
            fix = f"Axes that are left for rules: {', '.join(free_axes)}."
        raise LayoutError(
            f'shard_stages: stages are placed along "{axis}", but rules shard '
            f"{', '.join(errors)} along it. {fix}"
        )


def validate_schedule_fits(
    caller: str, stages: int, mesh: Mesh, schedule: Schedule, axis: str, *errors: str
) -> None:
    """Raise unless a schedule fits the stages and the mesh, naming all errors."""
    mesh.check_axes(axis, f"{caller}(axis=)")
    if not isinstance(schedule, Schedule):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"{caller}: schedule must be a Schedule; got {schedule!r}. Write "
            "fs.pipeline_schedule(name, stages=, microbatches=)."
        )
    all_errors = [*errors]
    if stages != schedule.stages:
        all_errors.append(
            f"the schedule {schedule.name} has {schedule.stages} stages, {stages} are given"
        )
    if mesh.shape[axis] != schedule.devices:
        all_errors.append(
            f"the schedule {schedule.name} is for {schedule.devices} devices, "
            f"axis {axis} has {mesh.shape[axis]}"
        )
    if all_errors:
        raise ValueError(f"{caller}: {'; '.join(all_errors)}.")


def at_coordinate(layout: Layout, axis: str, coordinate: int) -> Layout:
    """Return a layout restricted to one coordinate of an axis."""
    coordinates = {**dict(layout.spec.at), (axis,): coordinate}
    return layout.with_spec(layout.spec.replace(at=coordinates).shapeless)


def coordinate_of(layout: Layout, axis: str) -> int | None:
    """Return the coordinate of an axis to which a layout is restricted, or None."""
    return dict(layout.spec.at).get((axis,))
