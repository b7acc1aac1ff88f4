"""Plan the parameters of a model in stages, once: how they and their gradients are resharded.

    a shard at the first stage's coordinate  ──send──>  a shard at another's  ──all-gather──>  unsharded, for a while
    summands, one per device of the coordinate  ──reduce──>  the gradient's layout, there

All plans begin and end at one coordinate along the pipeline: other devices have other stages, and
take no part.

The coordinate of a stage along "pipe" is part of the layout of each of its parameters,
`P(at={"pipe": k})`. So optimizers, norms, checkpoints and pictures work without knowing pipelines.
A parameter of several stages (tied) is stored by the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
from fshard.transforms.patterns import Choice, named, parts_of
from fshard.transforms.shard_params import Rules, layouts_of, put_all


class StageLeaves(NamedTuple):
    """The parameters of one stage, each once, with their indices, and how they form the stage's tree.

    `sharded` are those that are all-gathered or copied to the device, `replicated` the others, by
    their index in the stage.
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
        sharded = [index for index, leaf in enumerate(leaves) if leaf.is_sharded]
        replicated = [index for index, leaf in enumerate(leaves) if not leaf.is_sharded]
        return StageLeaves(
            leaves,
            indices,
            tree,
            sharded=UnitPlan.of(leaves, sharded),
            replicated=UnitPlan.of(leaves, replicated),
        )


class Borrowed(NamedTuple):
    """A parameter that a stage needs at another coordinate than its own, and the plan to send its shard there."""

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
    """Plans the parameters of stages; gradients are summed along the axes `over`: local ones and the batch's."""

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
        next_number, placement = iter(numbers), self.pipeline.route.placement
        indices = [
            [next(next_number) for _ in range(structure.num_leaves)] for structure in structures
        ]
        firsts = [params[numbers.index(index)] for index in range(len({*numbers}))]
        leaves, layouts = (
            [self._plan_param(*first) for first in firsts],
            [x.layout for _, x, _ in firsts],
        )
        borrowed, ties = list[Borrowed](), list[Tie]()
        for index, (leaf, layout) in enumerate(zip(leaves, layouts, strict=True)):
            stages = [stage for stage, row in enumerate(indices) if index in row]
            for coordinate in sorted(
                {placement[stage] for stage in stages} - {coordinate_of(layout, self.axis)}
            ):
                plan = plan_reshard(
                    layout, at_coordinate(layout, self.axis, coordinate), leaf.shape
                )
                borrowed.append(Borrowed(index, coordinate, plan))
            if leaf.trained and len(stages) > 1:
                ties.append(self._plan_tie(index, leaf, stages))
        by_stage = [
            self._plan_stage(row, structure, leaves, layouts, coordinate)
            for row, structure, coordinate in zip(indices, structures, placement, strict=True)
        ]
        reduction_plans = {
            index: plan_reduction(self.mesh, self.over, leaf, in_order=self.options.reproducible)
            for index, leaf in enumerate(leaves)
            if leaf.trained
        }
        return StagePlan(
            self.options, self.pipeline, leaves, by_stage, reduction_plans, borrowed, ties
        )

    def _used_layout(self, layout: Layout, coordinate: int) -> Layout:
        """Return the layout in which a parameter is used by the devices of a coordinate."""
        return at_coordinate(self.options.used(layout), self.axis, coordinate)

    def _plan_param(self, path: str, x: Sharded, frozen: bool) -> ParamPlan:
        trained = self.options.backward and trainable(x) and not frozen
        coordinate = coordinate_of(x.layout, self.axis)
        assert coordinate is not None
        leaf = plan_param(
            path,
            x,
            self.options.gradients if trained else None,
            self._used_layout(x.layout, coordinate),
        )
        if coordinate_of(leaf.gradient, self.axis) != coordinate:
            raise LayoutError(
                f"{self.options.caller}: gradients= gives that of {named(parts_of(path))} the layout {leaf.gradient.spec}, not "
                f"on the devices of the parameter, {x.spec}. Keep its coordinate along {self.axis}."
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
        unique = list(dict.fromkeys(indices))
        positions = [unique.index(index) for index in indices]

        def plan_in_stage(index: int) -> ParamPlan:
            shard, leaf = at_coordinate(layouts[index], self.axis, coordinate), leaves[index]
            return leaf._replace(
                gather=plan_reshard(shard, self._used_layout(shard, coordinate), leaf.shape)
            )

        def tree(xs: list[Tensor]) -> PyTree:
            return unflatten(structure, [xs[position] for position in positions])

        return StageLeaves.of(list(map(plan_in_stage, unique)), unique, tree)

    def _plan_tie(self, index: int, leaf: ParamPlan, stages: list[int]) -> Tie:
        coordinates = tuple(self.pipeline.route.placement[stage] for stage in stages)
        shape = (1 if not self.options.reproducible else self.options.accumulate, *leaf.shape)
        stacked = [
            at_coordinate(Layout(self.mesh, P(None, *leaf.used.entries)), self.axis, coordinate)
            for coordinate in coordinates
        ]
        to_owner = tuple(plan_reshard(layout, stacked[0], shape) for layout in stacked)
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
    >>> params = fs.shard_stages([torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)], mesh=mesh, schedule=schedule)
    >>> fs.typeof(params[1]["weight"]), [tuple(shard.shape) for shard in params[1]["weight"].shards]
    (f32[2, 4]{at:pipe=1}, [(0, 0), (0, 0), (2, 4), (2, 4)])
    """
    trees = [
        dict(stage.named_parameters()) if isinstance(stage, nn.Module) else stage
        for stage in stages
    ]
    target: dict[str, Any] = {"mesh": mesh, "schedule": schedule, "axis": axis}
    modules = all(
        isinstance(stage, nn.Module) for stage in stages
    )  # other tensors have no initializer
    put = put_equal if seed is None or not modules else reserved
    result = place_stages(trees, rules, **target, frozen=frozen, put=put, memory=memory)
    compare_inputs("shard_stages", mesh, samples_of(trees))
    seen: set[tuple[int, ...]] = set()
    for stage, tree, sharded, is_local in zip(
        stages, trees, result, has_stages(**target), strict=True
    ):
        if isinstance(stage, nn.Module) and seed is not None and put is reserved and is_local:
            new = [name for name, x in tree.items() if key_of(x) not in seen]
            draw(
                stage,
                seed,
                new,
                lambda name, x, sharded=sharded: fill(sharded[name], x),
                "shard_stages",
            )
        seen |= {key_of(x) for x in flatten(tree)[0]}
    return result


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
    layouts = layouts_of(
        trees, P() if rules is None else rules, mesh, frozen, "shard_stages", memory
    )
    _validate_placement(trees, layouts, mesh, axis, schedule.placement)
    coordinates = [
        x for x, tree in zip(schedule.placement, trees, strict=True) for _ in flatten(tree)[0]
    ]
    leaves, structure = flatten([*trees])
    local = (at_coordinate(layout, axis, x) for layout, x in zip(layouts, coordinates, strict=True))
    return unflatten(structure, put_all(leaves, local, put))


def has_stages(mesh: Mesh, schedule: Schedule, axis: str) -> list[bool]:
    """Return, for each stage, True if the caller has tensors of it: meta tensors belong to none."""
    coordinates = (
        {mesh.coordinates(device)[axis] for device in local_devices(mesh)}
        if mesh.runtime != "abstract"
        else set[int]()
    )
    return [coordinate in coordinates for coordinate in schedule.placement]


def _validate_placement(
    trees: Sequence[PyTree],
    layouts: Sequence[Layout],
    mesh: Mesh,
    axis: str,
    placement: Sequence[int],
) -> None:
    """Raise naming the parameters whose rules contradict the placement of their stages."""
    next_leaf, firsts = (
        iter(zip(flatten_with_paths(trees)[0], layouts, strict=True)),
        dict[tuple[int, ...], int](),
    )
    errors = list[str]()
    for tree, coordinate in zip(trees, placement, strict=True):
        for leaf in flatten(tree)[0]:
            (path, layout), first = next(next_leaf), firsts.setdefault(key_of(leaf), coordinate)
            if axis in layout.spec.axes and coordinate_of(layout, axis) != first:
                errors.append(f"{named(parts_of(path))} as {layout.spec}")
    if errors:
        free_axes = ", ".join(f'"{name}"' for name in mesh.axis_names if name != axis)
        raise LayoutError(
            f'shard_stages: stages are placed along "{axis}", but rules shard {", ".join(errors)} along it. '
            + (
                f"Axes that are left for rules: {free_axes}."
                if free_axes
                else "The mesh has no other axis: leave rules out."
            )
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
            f"the schedule {schedule.name} is for {schedule.devices} devices, axis {axis} has {mesh.shape[axis]}"
        )
    if all_errors:
        raise ValueError(f"{caller}: {'; '.join(all_errors)}.")


def at_coordinate(layout: Layout, axis: str, coordinate: int) -> Layout:
    """Return a layout restricted to one coordinate of an axis."""
    return layout.with_spec(
        layout.spec.replace(at={**dict(layout.spec.at), (axis,): coordinate}).shapeless
    )


def coordinate_of(layout: Layout, axis: str) -> int | None:
    """Return the coordinate of an axis to which a layout is restricted, or None."""
    return dict(layout.spec.at).get((axis,))
