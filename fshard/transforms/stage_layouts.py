"""Where the parameters of a pipeline lie: those of a stage on the devices that have it, and nowhere else.

A stage's place along "pipe" is a part of the layout of each of its parameters.  So optimizers, norms, checkpoints and pictures
need to know nothing of pipelines.  Of a parameter that stands in two stages (tied) there is one: it lies where the first is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from fshard.errors import LayoutError
from fshard.mesh.layout import Layout
from fshard.mesh.mesh import Mesh
from fshard.mesh.placing import device_put
from fshard.mesh.sharded import key_of
from fshard.mesh.spec import P
from fshard.mesh.spmd import held
from fshard.mesh.tree import PyTree, flatten, flatten_with_paths, unflatten
from fshard.pipeline.schedule import Schedule
from fshard.transforms.lazy import draw, fill, reserved
from fshard.transforms.patterns import Choice, named, parts_of
from fshard.transforms.rules import Rules, layouts_of


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
    """Lay the parameters of stages on the devices that have them.  Nothing is sent: every process keeps its pieces.

    Args:
        stages: modules, of which the parameters are taken by their names; or trees of parameters.
        rules: how they lie along the other axes: what `shard_params` takes, for the list of these trees: `fsdp("data")`, say,
            or patterns as "*.blocks.*.w", which begin with the number of the stage.  None: whole.
        mesh: the devices.
        schedule: which says where each stage lies.
        axis: along which.
        frozen: which are not to be trained: see `shard_params`.
        seed: that `lazy` layers are drawn by.  A process builds those of its own stages only, one stage after the other.

    >>> import torch, fshard as fs
    >>> mesh = fs.make_mesh({"pipe": 2, "data": 2})
    >>> schedule = fs.pipeline_schedule("1f1b", stages=2, microbatches=4)
    >>> params = fs.shard_stages([torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)], mesh=mesh, schedule=schedule)
    >>> fs.typeof(params[1]["weight"]), [tuple(shard.shape) for shard in params[1]["weight"].shards]
    (f32[2, 4]{on:pipe=1}, [(0, 0), (0, 0), (2, 4), (2, 4)])
    """
    trees = [dict(one.named_parameters()) if isinstance(one, nn.Module) else one for one in stages]
    where: dict[str, Any] = {"mesh": mesh, "schedule": schedule, "axis": axis}
    modules = all(isinstance(one, nn.Module) for one in stages)  # nobody says how other tensors are made
    put = device_put if seed is None or not modules else reserved
    result = lay_stages(trees, rules, **where, frozen=frozen, put=put)
    seen: set[tuple[int, ...]] = set()
    for stage, tree, laid, own in zip(stages, trees, result, has_stages(**where), strict=True):
        if isinstance(stage, nn.Module) and seed is not None and put is reserved and own:
            new = [name for name, x in tree.items() if key_of(x) not in seen]
            draw(stage, seed, new, lambda name, x, laid=laid: fill(laid[name], x), "shard_stages")
        seen |= {key_of(x) for x in flatten(tree, sharded_is_leaf=True)[0]}
    return result


def lay_stages(
    trees: Sequence[PyTree],
    rules: Rules | None = None,
    *,
    mesh: Mesh,
    schedule: Schedule,
    axis: str,
    frozen: Choice = None,
    put: Callable[[Any, Layout], Any] = device_put,
) -> list[PyTree]:
    """Lay the parameters of stages on the devices that have them, each by `put`."""
    refuse_unfit("shard_stages", len(trees), mesh, schedule, axis)
    found = layouts_of(trees, P() if rules is None else rules, mesh, frozen, "shard_stages")
    _refuse_placed(trees, found, mesh, axis, schedule.placement)
    layouts, done, result = iter(found), dict[tuple[int, ...], Any](), list[PyTree]()
    for place, tree in zip(schedule.placement, trees, strict=True):
        leaves, structure = flatten(tree, sharded_is_leaf=True)
        for leaf in leaves:
            layout = on_place(next(layouts), axis, place)
            if key_of(leaf) not in done:
                done[key_of(leaf)] = put(leaf.detach() if isinstance(leaf, Tensor) else leaf, layout)
        result.append(unflatten(structure, [done[key_of(leaf)] for leaf in leaves]))
    return result


def has_stages(mesh: Mesh, schedule: Schedule, axis: str) -> list[bool]:
    """Return for each stage whether the caller has tensors of it: without memory nobody has."""
    places = {mesh.coordinates(device)[axis] for device in held(mesh)} if mesh.runtime != "abstract" else set[int]()
    return [place in places for place in schedule.placement]


def _refuse_placed(
    trees: Sequence[PyTree], layouts: Sequence[Layout], mesh: Mesh, axis: str, placement: Sequence[int]
) -> None:
    """Raise if rules say something else of where stages lie, naming which parameters."""
    paths, first = flatten_with_paths(trees, sharded_is_leaf=True)[0], dict[tuple[int, ...], int]()
    places = [
        first.setdefault(key_of(leaf), at)
        for tree, at in zip(trees, placement, strict=True)
        for leaf in flatten(tree, sharded_is_leaf=True)[0]
    ]
    wrong = [
        f"{named(parts_of(path))} as {layout.spec}"
        for path, layout, at in zip(paths, layouts, places, strict=True)
        if axis in layout.spec.axes and place_of(layout, axis) != at
    ]
    if wrong:
        others = ", ".join(f'"{name}"' for name in mesh.axis_names if name != axis)
        raise LayoutError(
            f'shard_stages: stages lie along "{axis}" already, each at its place, but rules lay {", ".join(wrong)}. '
            + (f"Axes that are left for rules: {others}." if others else "The mesh has no other axis: leave rules out.")
        )


def refuse_unfit(what: str, stages: int, mesh: Mesh, schedule: Schedule, axis: str, *others: str) -> None:
    """Raise, naming all of it, unless a schedule fits so many stages and a mesh, and nothing else is wrong."""
    mesh.check_axes(axis, f"{what}(axis=)")
    if not isinstance(schedule, Schedule):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise LayoutError(
            f"{what}: schedule={schedule!r} is none. Write fs.pipeline_schedule(name, stages=, microbatches=)."
        )
    wrong = [*others]
    if stages != schedule.stages:
        wrong.append(f"the schedule {schedule.name} has {schedule.stages} stages, {stages} are given")
    if mesh.shape[axis] != schedule.devices:
        wrong.append(
            f"the schedule {schedule.name} is for {schedule.devices} devices, axis {axis} has {mesh.shape[axis]}"
        )
    if wrong:
        raise LayoutError(f"{what}: {'; '.join(wrong)}.")


def on_place(layout: Layout, axis: str, place: int) -> Layout:
    """Return a layout on the devices at one place of an axis alone."""
    spec, on = layout.spec, {**dict(layout.spec.on), (axis,): place}
    if spec.flat_axes is not None:
        return layout.with_spec(P.flat(*spec.flat_axes, unreduced=spec.unreduced, on=on))
    return layout.with_spec(P(*spec.entries, unreduced=spec.unreduced, on=on))


def place_of(layout: Layout, axis: str) -> int | None:
    """Return the place of an axis where alone something lies, if there is one."""
    return dict(layout.spec.on).get((axis,))
