"""Plan the parameters of a model in stages, once: how they and their gradients are resharded.

    a shard at the first stage's coordinate  ──send──>  a shard at another's  ──all-gather──>  unsharded, for a while
    summands, one per device of the coordinate  ──reduce──>  the gradient's layout, there

All plans begin and end at one coordinate along the pipeline: other devices have other stages, and take no part.

The coordinate of a stage along "pipe" is part of the layout of each of its parameters, `P(at={"pipe": k})`. So
optimizers, norms, checkpoints and pictures work without knowing pipelines. A parameter of several stages (tied) is
stored by the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from fshard.errors import LayoutError
from fshard.mesh.layout import Layout, Mesh, P, PyTree, Structure, flatten, flatten_with_paths, unflatten
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
from fshard.transforms.fsdp.engine import ParamPlan, plan_reduction
from fshard.transforms.fsdp.param_runtime import plan_param
from fshard.transforms.module.lazy import draw, fill, reserved
from fshard.transforms.options import StepOptions
from fshard.transforms.patterns import Choice, named, parts_of
from fshard.transforms.shard_params import Rules, layouts_of


class StageLeaves(NamedTuple):
    """The parameters of one stage, each once, with their indices, and how they form the stage's tree."""

    leaves: Sequence[ParamPlan]
    indices: list[int]
    tree: Callable[[list[Tensor]], PyTree]


class Borrowed(NamedTuple):
    """A parameter that a stage needs at another coordinate than its own, and the plan to send its shard there."""

    leaf: int
    place: int
    way: ReshardPlan


class Tie(NamedTuple):
    """A trained parameter of several stages, of which the first owns it.

    `places`: the coordinates of the stages along the pipeline. `homes`: the plans that send each stage's gradient to
    the owner.
    """

    leaf: int
    stages: tuple[int, ...]
    places: tuple[int, ...]
    homes: tuple[ReshardPlan, ...]


@dataclass(frozen=True)
class StageParams:
    """The plans of the parameters of all stages.

    Args:
        leaves: each once; they are referred to by index.
        own: those of each stage.
        ways: plans of their gradients, None where they are not trained.
        borrowed: parameters that stages need of others.
        ties: the trained parameters of several stages.
    """

    leaves: list[ParamPlan]
    own: list[StageLeaves]
    ways: list[ReshardPlan | None]
    borrowed: list[Borrowed]
    ties: list[Tie]


@dataclass
class StagePlan:
    """The plan of a model in stages, the same for all devices and steps.

    Args:
        options: of the step.
        axis: of the pipeline.
        stages: the functions.
        inputs: returns the first stage's input of a microbatch.
        route: the schedule with its messages.
        params: the plans of parameters.
        messages: known forms of messages; None: each is described.
        elsewhere: the empty gradients of other devices' parameters, by device and index.
        fresh: True before the first step.
    """

    options: StepOptions
    axis: str
    stages: Sequence[Stage]
    inputs: Callable[[PyTree], PyTree]
    route: Route
    params: StageParams
    messages: dict[int, Forms] | None
    elsewhere: dict[tuple[int, int], Tensor] = field(default_factory=dict[tuple[int, int], Tensor])
    fresh: bool = True

    @property
    def leaves(self) -> list[ParamPlan]:
        """The plans of all parameters."""
        return self.params.leaves


@dataclass(frozen=True)
class StagePlanner:
    """Plans the parameters of stages.

    Args:
        options: of the step.
        axis: of the pipeline.
        placement: the coordinate of each stage.
        mesh: the devices.
        over: local axes and those that shard the batch, along which gradients are summed.
    """

    options: StepOptions
    axis: str
    placement: Sequence[int]
    mesh: Mesh
    over: tuple[str, ...]

    def plan(
        self, structures: Sequence[Structure], given: Sequence[tuple[str, Sharded, bool]], at: Sequence[int]
    ) -> StageParams:
        """Return the plans of parameters.

        Args:
            structures: of the trees of the stages.
            given: for each leaf of these its path, its parameter, and whether it is frozen.
            at: the index of each, equal for tied ones.
        """
        rest = iter(at)
        indices = [[next(rest) for _ in range(structure.num_leaves)] for structure in structures]
        firsts = [given[at.index(index)] for index in range(len({*at}))]
        leaves, layouts = [self._leaf(*first) for first in firsts], [x.layout for _, x, _ in firsts]
        borrowed, ties = list[Borrowed](), list[Tie]()
        for index, (leaf, layout) in enumerate(zip(leaves, layouts, strict=True)):
            stages = [stage for stage, own in enumerate(indices) if index in own]
            for place in sorted({self.placement[stage] for stage in stages} - {place_of(layout, self.axis)}):
                way = plan_reshard(layout, on_place(layout, self.axis, place), leaf.shape)
                borrowed.append(Borrowed(index, place, way))
            if leaf.trained and len(stages) > 1:
                ties.append(self._tie(index, leaf, stages))
        own = [
            self._own(mine, structure, leaves, layouts, place)
            for mine, structure, place in zip(indices, structures, self.placement, strict=True)
        ]
        return StageParams(leaves, own, [self._way(leaf) for leaf in leaves], borrowed, ties)

    def _used(self, layout: Layout, place: int) -> Layout:
        """Return the layout in which a parameter is used by the devices of a coordinate."""
        return on_place(self.options.used(layout), self.axis, place)

    def _leaf(self, path: str, x: Sharded, fixed: bool) -> ParamPlan:
        trained, place = self.options.backward and trainable(x) and not fixed, place_of(x.layout, self.axis)
        assert place is not None
        leaf = plan_param(path, x, self.options.gradients if trained else None, self._used(x.layout, place))
        if place_of(leaf.gradient, self.axis) != place:
            raise LayoutError(
                f"{self.options.caller}: gradients= gives that of {named(parts_of(path))} the layout {leaf.gradient.spec}, not "
                f"on the devices of the parameter, {x.spec}. Keep its coordinate along {self.axis}."
            )
        return leaf

    def _own(
        self,
        indices: Sequence[int],
        structure: Structure,
        leaves: Sequence[ParamPlan],
        layouts: Sequence[Layout],
        place: int,
    ) -> StageLeaves:
        """Return the parameters of a stage, its own and borrowed ones."""
        unique = list(dict.fromkeys(indices))
        at = [unique.index(index) for index in indices]

        def gathered(index: int) -> ParamPlan:
            shard, leaf = on_place(layouts[index], self.axis, place), leaves[index]
            return leaf._replace(gather=plan_reshard(shard, self._used(shard, place), leaf.shape))

        def tree(xs: list[Tensor]) -> PyTree:
            return unflatten(structure, [xs[place] for place in at])

        return StageLeaves(list(map(gathered, unique)), unique, tree)

    def _way(self, leaf: ParamPlan) -> ReshardPlan | None:
        """Return the plan of a gradient among the devices of its stage."""
        place = place_of(leaf.gradient, self.axis)
        if not leaf.trained or place is None:
            return None
        return plan_reduction(self.mesh, self.over, leaf, in_order=self.options.reproducible)

    def _tie(self, index: int, leaf: ParamPlan, stages: list[int]) -> Tie:
        places = tuple(self.placement[stage] for stage in stages)
        stack = (1 if not self.options.reproducible else self.options.accumulate, *leaf.shape)
        rows = [on_place(Layout(self.mesh, P(None, *leaf.used.entries)), self.axis, place) for place in places]
        homes = tuple(plan_reshard(row, rows[0], stack) for row in rows)
        return Tie(index, tuple(stages), places, homes)


def shard_stages(
    stages: Sequence[nn.Module | PyTree],
    rules: Rules | None = None,
    *,
    mesh: Mesh,
    schedule: Schedule,
    axis: str = "pipe",
    frozen: Choice = None,
    seed: int | None = None,
) -> list[PyTree]:
    """Place the parameters of stages on the devices that have them: every process keeps its shards.

    All processes must call it: their tensors are compared, by hashes in one collective, and different ones raise.

    Args:
        stages: modules, whose parameters are taken by their names; or trees of parameters.
        rules: their layouts along the other axes: as for `shard_params`, for the list of these trees: such as `fsdp("data")`,
            or patterns as "*.blocks.*.w", which begin with the number of the stage. None: replicated.
        mesh: the devices.
        schedule: the placement of stages.
        axis: of the pipeline.
        frozen: parameters that are not trained: see `shard_params`.
        seed: of `lazy` layers. A process builds only those of its own stages, one stage at a time.

    >>> import torch, fshard as fs
    >>> mesh = fs.make_mesh({"pipe": 2, "data": 2})
    >>> schedule = fs.pipeline_schedule("1f1b", stages=2, microbatches=4)
    >>> params = fs.shard_stages([torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)], mesh=mesh, schedule=schedule)
    >>> fs.typeof(params[1]["weight"]), [tuple(shard.shape) for shard in params[1]["weight"].shards]
    (f32[2, 4]{at:pipe=1}, [(0, 0), (0, 0), (2, 4), (2, 4)])
    """
    trees = [dict(one.named_parameters()) if isinstance(one, nn.Module) else one for one in stages]
    where: dict[str, Any] = {"mesh": mesh, "schedule": schedule, "axis": axis}
    modules = all(isinstance(one, nn.Module) for one in stages)  # other tensors have no initializer
    put = put_equal if seed is None or not modules else reserved
    result = place_stages(trees, rules, **where, frozen=frozen, put=put)
    compare_inputs("shard_stages", mesh, samples_of(trees))
    seen: set[tuple[int, ...]] = set()
    for stage, tree, sharded, own in zip(stages, trees, result, has_stages(**where), strict=True):
        if isinstance(stage, nn.Module) and seed is not None and put is reserved and own:
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
) -> list[PyTree]:
    """Place the parameters of stages on the devices that have them, each by `put`."""
    refuse_unfit("shard_stages", len(trees), mesh, schedule, axis)
    found = layouts_of(trees, P() if rules is None else rules, mesh, frozen, "shard_stages")
    _refuse_placed(trees, found, mesh, axis, schedule.placement)
    layouts, done, result = iter(found), dict[tuple[int, ...], Any](), list[PyTree]()
    for place, tree in zip(schedule.placement, trees, strict=True):
        leaves, structure = flatten(tree)
        for leaf in leaves:
            layout = on_place(next(layouts), axis, place)
            if key_of(leaf) not in done:
                done[key_of(leaf)] = put(leaf.detach() if isinstance(leaf, Tensor) else leaf, layout)
        result.append(unflatten(structure, [done[key_of(leaf)] for leaf in leaves]))
    return result


def has_stages(mesh: Mesh, schedule: Schedule, axis: str) -> list[bool]:
    """Return, for each stage, True if the caller has tensors of it: meta tensors belong to none."""
    places = (
        {mesh.coordinates(device)[axis] for device in local_devices(mesh)} if mesh.runtime != "abstract" else set[int]()
    )
    return [place in places for place in schedule.placement]


def _refuse_placed(
    trees: Sequence[PyTree], layouts: Sequence[Layout], mesh: Mesh, axis: str, placement: Sequence[int]
) -> None:
    """Raise if rules contradict the placement of stages, naming the parameters."""
    paths, first = flatten_with_paths(trees)[0], dict[tuple[int, ...], int]()
    places = [
        first.setdefault(key_of(leaf), at)
        for tree, at in zip(trees, placement, strict=True)
        for leaf in flatten(tree)[0]
    ]
    wrong = [
        f"{named(parts_of(path))} as {layout.spec}"
        for path, layout, at in zip(paths, layouts, places, strict=True)
        if axis in layout.spec.axes and place_of(layout, axis) != at
    ]
    if wrong:
        others = ", ".join(f'"{name}"' for name in mesh.axis_names if name != axis)
        raise LayoutError(
            f'shard_stages: stages are placed along "{axis}", but rules shard {", ".join(wrong)} along it. '
            + (f"Axes that are left for rules: {others}." if others else "The mesh has no other axis: leave rules out.")
        )


def refuse_unfit(what: str, stages: int, mesh: Mesh, schedule: Schedule, axis: str, *others: str) -> None:
    """Raise unless a schedule fits the stages and the mesh, naming all errors."""
    mesh.check_axes(axis, f"{what}(axis=)")
    if not isinstance(schedule, Schedule):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"{what}: schedule must be a Schedule; got {schedule!r}. Write fs.pipeline_schedule(name, stages=, microbatches=)."
        )
    wrong = [*others]
    if stages != schedule.stages:
        wrong.append(f"the schedule {schedule.name} has {schedule.stages} stages, {stages} are given")
    if mesh.shape[axis] != schedule.devices:
        wrong.append(
            f"the schedule {schedule.name} is for {schedule.devices} devices, axis {axis} has {mesh.shape[axis]}"
        )
    if wrong:
        raise ValueError(f"{what}: {'; '.join(wrong)}.")


def on_place(layout: Layout, axis: str, place: int) -> Layout:
    """Return a layout restricted to one coordinate of an axis."""
    return layout.with_spec(layout.spec.replace(at={**dict(layout.spec.at), (axis,): place}).shapeless)


def place_of(layout: Layout, axis: str) -> int | None:
    """Return the coordinate of an axis to which a layout is restricted, or None."""
    return dict(layout.spec.at).get((axis,))
