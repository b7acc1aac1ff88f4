"""`partition_optimizer`: ZeRO as a table of layouts.

An elementwise optimizer runs on any shard of the parameters: it gets flat ranges. One that needs the full matrix
(Muon, Shampoo) gets each matrix on one device, its *owner*; the shards of the others are empty.

    stage   parameters                 gradients                  state        after the update
    0       as given                   as the parameters          as these
    1, 2    replicated                 shards (psum_scatter)      shards       all_gather of the parameters
    3       shards                     shards (psum_scatter)      shards

Stored and sent shards are flat ranges. Owners collect them before the update and distribute them after it, in one
exchange each (`mesh.reshard.owners`); so gradients are reduced as usual, each unit's evenly.

Stages 1 and 2 differ in when gradients are reduced, which the optimizer does not see: once a step, or as each unit's
are ready (`train_step`). The layout of the state follows from the shards that the optimizer's `init` gets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, groupby
from math import prod
from operator import is_
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor

from fshard.errors import LayoutError, OptimizerError
from fshard.memory.kinds import claim, made_for
from fshard.memory.state import UpdateOn
from fshard.mesh.layout import Layout, Memory, Mesh, P, PyTree
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.reshard.device_put import reshard_all
from fshard.mesh.spmd.run import resolve_mesh
from fshard.optim.compression import Compression
from fshard.optim.contract import (
    Elementwise,
    Optimizer,
    Update,
    donating,
    elementwise_leaves,
    step_of,
    writing,
)
from fshard.optim.leaves import Leaf, Leaves, kind_of, undifferentiable
from fshard.optim.offload import offloaded
from fshard.optim.per_device import array_optimizer, check_not_partitioned
from fshard.source import Site, call_site
from fshard.uncompiled import uncompiled

Stage = Literal[0, 1, 2, 3]
Unit = Literal["elementwise", "matrix"]
AT_ONCE = 1 << 26
"""Approximate bytes of parameters that are assembled together in a donated step."""


class Partitioned(NamedTuple):
    """An optimizer on shards: an `Optimizer` that also has the layouts it needs for gradients."""

    init: Callable[[PyTree], PyTree]
    update: Update
    step: Update | None
    elementwise: Elementwise
    loss_scale: Callable[[PyTree], Tensor] | None
    gradients: Callable[[Layout], Layout]
    stage: Stage
    compression: Compression | None = None
    state_memory: Memory = "device"
    update_on: UpdateOn = "device"
    on_mesh: Callable[[Mesh], Partitioned] | None = None


def partition_optimizer(
    opt: Optimizer,
    *,
    mesh: Mesh,
    axis: str | tuple[str, ...],
    stage: Stage,
    unit: Unit | None = None,
    compress: Mapping[str, Any] | None = None,
    state_memory: Memory = "device",
    update_on: UpdateOn = "device",
) -> Partitioned:
    """Shard an optimizer's state and work over the devices along `axis`.

    Args:
        opt: any pair of init and update.
        mesh: the devices of the parameters.
        axis: an axis, or several, along which the parameters are replicated (stages 0 to 2) or sharded (stage 3).
        stage: of ZeRO: 0 shards nothing, 1 and 2 state and gradients, 3 parameters as well. Parameters keep the layouts
            of `shard_params`: one that is replicated along `axis` is treated in stage 3 as in 2.
        unit: every leaf as flat ranges ("elementwise"), or the leaves in full at owners of about equal total size
            ("matrix"). None: flat where the optimizer is elementwise, in `by_label` leaf by leaf, else at owners.
        compress: by axis, along which the parameters are replicated, a compressor of `fs.comm`: it reduces the gradients
            there. Then the state is {"compress", "inner"}.
        state_memory: where the state is: on the "device", the "host", or "disk", in unlinked files in the folder that the
            environment names as FSHARD_DISK. State on disk is updated in place: `train_step(..., donate=True)`.
        update_on: the "device", to which state elsewhere is moved in groups of leaves and back; or the "host", to which
            gradients and parameters are sent, and parameters back. Gradients for an elementwise optimizer are sent when
            they are reduced, and those of several microbatches are added there.

    In stages 1 to 3 an own `update` of plain tensors sees the device's shards or the leaves that it owns, so a norm of its
    gradients would be wrong: `fs.optim.global_norm(grads)` there is that of all. `fs.testing.check_elementwise` tests it.
    `torch.randn_like(grad)` there has the elements of one device's draw, as have draws like any tensor of one leaf.
    Other draws there must be one number.

    `update` and `step` send an all_gather of the parameters in stages 1 and 2; and for leaves at owners an all_to_all
    of the device's gradient shards, one of the parameters after the update, and in stage 3 one before.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"data": 2})
    >>> params = fs.shard_params({"w": torch.ones(4)}, P(), mesh=mesh)
    >>> opt = fs.partition_optimizer(fs.optim.sgd(1.0, momentum=0.9), mesh=mesh, axis="data", stage=1)
    >>> grads = fs.device_put({"w": torch.arange(4.0)}, fs.Layout(mesh, P.flat("data")))
    >>> params, state = opt.step(grads, opt.init(params), params)
    >>> fs.typeof(params["w"]), fs.unshard(params["w"])
    (f32[4], tensor([ 1.,  0., -1., -2.]))

    >>> opt = fs.partition_optimizer(fs.optim.muon(0.1), mesh=mesh, axis="data", stage=1)
    >>> params = fs.shard_params([torch.ones(4, 3), torch.ones(2, 3), torch.ones(2, 3)], P(), mesh=mesh)
    >>> [fs.typeof(x) for x in opt.init(params)["momentum_buffer"]]
    [f32[4, 3]{at:data=0}, f32[2, 3]{at:data=1}, f32[2, 3]{at:data=1}]
    """
    axes = mesh.check_axes(axis, "partition_optimizer(axis=)")
    arrays = array_optimizer(opt, "partition_optimizer")
    _validate(arrays, stage, unit)
    inner = offloaded(arrays, mesh, state_memory, update_on)
    flat = inner.elementwise if unit is None else unit == "elementwise"
    is_sent = update_on == "host" and flat is True  # gradients to the host, when they are reduced
    is_divided = stage > 0 and not (flat is True and all(mesh.shape[axis] == 1 for axis in axes))

    @lru_cache(maxsize=4096)  # one object for each: layouts are compared by identity first
    def of_gradients(layout: Layout) -> Layout:
        memory: Memory = "host" if is_sent else "device"
        return layout if layout.memory == memory else layout.with_memory(memory)

    @uncompiled
    @made_for("state")
    def init(params: PyTree) -> PyTree:
        claim(params, "parameters")  # state counts for their devices
        at = Leaves.of(params)
        _validate_mesh(at, at.leaves, mesh, plain=not is_divided)
        _validate_memory(at, stage)
        if not is_divided:
            return inner.init(params)
        return inner.init(at.rebuild(_reshard(at.leaves, _targets(at, flat, axes), call_site())))

    def divided(act: Update, *, donated: bool) -> Update:
        @uncompiled
        def run(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
            at, site = Leaves.of(params), call_site()
            gradients = at.beside(grads, "grads")
            for leaves in (at.leaves, gradients):
                _validate_mesh(at, leaves, mesh)
            targets = _targets(at, flat, axes)
            of_grads = [layout and of_gradients(layout) for layout in targets]
            shards = _shards_to_collect(at.leaves, targets, axes)
            before = [*gradients, *_reshard(at.leaves, shards, site)]
            leaves = _reshard(before, [*of_grads, *targets], site)
            if leaves is before:
                return act(grads, state, params)
            grads, collected = (
                at.rebuild(leaves[: len(gradients)]),
                at.rebuild(leaves[len(gradients) :]),
            )
            del gradients, before, leaves
            result, state = act(grads, state, collected)
            after = at.beside(result, "the optimizer's results")
            del grads, collected, result  # then `after` holds the last references to old memory
            after = [
                x if first == i else None
                for i, (x, first) in enumerate(zip(after, at.firsts, strict=True))
            ]
            after = _reshard(after, shards, site)
            layouts = [None if x is None else x.layout for x in at.leaves]
            for indices in _turns(after) if donated else [range(len(after))]:
                results = _reshard([after[i] for i in indices], [layouts[i] for i in indices], site)
                for i, x in zip(indices, results, strict=True):
                    after[i] = _with_memory(at.leaves[i], x) if donated and x is not None else x
                del results
            return at.rebuild([after[first] for first in at.firsts]), state

        return run

    options: Any = {"axis": axis, "stage": stage, "unit": unit, "compress": compress}
    options |= {"state_memory": state_memory, "update_on": update_on}
    partitioned = Partitioned(
        init,
        divided(inner.update, donated=False) if is_divided else inner.update,
        donating(divided(step_of(inner), donated=True)) if is_divided else inner.step,
        inner.elementwise,
        inner.loss_scale,
        lambda layout: of_gradients(shard_layout(layout, axes) if is_divided else layout),
        stage,
        state_memory=state_memory,
        update_on=update_on,
        on_mesh=lambda mesh: partition_optimizer(opt, mesh=mesh, **options),
    )
    return (
        partitioned
        if compress is None
        else _compressed(partitioned, compress, mesh, axes if is_divided else ())
    )


def _compressed(
    opt: Partitioned, compress: Mapping[str, Any], mesh: Mesh, axes: tuple[str, ...]
) -> Partitioned:
    """Return a partitioned optimizer whose gradients are reduced by compressors along some axes."""
    rest = tuple(axis for axis in axes if axis not in compress)
    reduced = Compression(compress, mesh, lambda layout: shard_layout(layout, rest), opt.loss_scale)

    def compressed(act: Update) -> Update:
        @uncompiled
        @undifferentiable
        def run(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
            grads, state = reduced.reduce(grads, state)
            params, inner = act(grads, state["inner"], params)
            return params, {"compress": state["compress"], "inner": inner}

        return run

    scale = opt.loss_scale
    return opt._replace(
        init=lambda params: {"compress": reduced.init(params), "inner": opt.init(params)},
        update=compressed(opt.update),
        step=opt.step and donating(compressed(writing(opt.step))),
        loss_scale=None if scale is None else lambda state: scale(state["inner"]),
        gradients=reduced.layout,
        compression=reduced,
    )


def _validate(opt: Optimizer, stage: Stage, unit: Unit | None) -> None:
    check_not_partitioned(opt, "partition_optimizer")
    if stage not in get_args(Stage) or isinstance(stage, bool):
        raise OptimizerError(
            f"partition_optimizer: stage must be 0, 1, 2 or 3, as in ZeRO; got {stage!r}."
        )
    if unit not in (None, *get_args(Unit)):
        raise OptimizerError(
            f'partition_optimizer: unit must be "elementwise", "matrix" or None; got {unit!r}.'
        )
    if stage > 0 and unit == "elementwise" and opt.elementwise is not True:
        raise OptimizerError(
            f'partition_optimizer(stage={stage}, unit="elementwise"): this optimizer is not elementwise, so '
            'shards of parameters would give other results. Use unit="matrix", which gives each full parameter to one '
            "device, or leave it to the optimizer: unit=None."
        )


def shard_layout(layout: Layout, axes: tuple[str, ...]) -> Layout:
    """Return the layout of the shards that devices along `axes` work on.

    Existing sharding is kept, of dims too; the other axes split each shard further, flat. One device splits nothing.
    """
    return _cut_further(layout, axes) or layout  # itself: layouts are compared by identity first


@lru_cache(maxsize=4096)
def _cut_further(layout: Layout, axes: tuple[str, ...]) -> Layout | None:
    spec = layout.spec
    more = tuple(
        axis for axis in axes if axis not in spec.sharded_axes and layout.mesh.shape[axis] > 1
    )
    return (
        layout.with_spec(spec.shapeless.replace(flat=(*(spec.flat_axes or ()), *more)))
        if more
        else None
    )


def _targets(at: Leaves, flat: Elementwise, axes: tuple[str, ...]) -> tuple[Layout | None, ...]:
    """Return the layout of each parameter for the update, None where there is nothing to update."""
    is_float = [
        leaf is not None and (leaf.dtype.is_floating_point or leaf.dtype.is_complex)
        for leaf in at.leaves
    ]
    layouts = tuple(
        [leaf.layout if moves else None for leaf, moves in zip(at.leaves, is_float, strict=True)]
    )
    shapes = tuple([() if leaf is None else leaf.shape for leaf in at.leaves])
    elementwise = (
        elementwise_leaves(flat, at.rebuild(at.leaves))
        if callable(flat)
        else [flat] * len(at.leaves)
    )
    return _divided(layouts, shapes, tuple(at.firsts), tuple(elementwise), axes)


@lru_cache(maxsize=256)
def _divided(
    layouts: tuple[Layout | None, ...],
    shapes: tuple[tuple[int, ...], ...],
    firsts: tuple[int, ...],
    elementwise: tuple[bool, ...],
    axes: tuple[str, ...],
) -> tuple[Layout | None, ...]:
    """Return layouts for parameters of these layouts and shapes: flat where they are elementwise, else at owners.

    Leaves sharded over the same axes, at the same coordinates, are assigned to the owner with the least so far, the
    largest first. Frozen ones count, though they are not moved: so unfreezing one changes no owner.
    """
    targets = list[Layout | None]([None] * len(layouts))
    owned: dict[tuple[Mesh, P], dict[int, Layout]] = {}
    for i, (layout, is_flat) in enumerate(zip(layouts, elementwise, strict=True)):
        if layout is None or firsts[i] != i:
            continue
        targets[i] = shards = shard_layout(layout, axes)
        if not is_flat and shards.spec.split_axes:
            owned.setdefault(
                (shards.mesh, P.flat(*shards.spec.split_axes, at=dict(shards.spec.at))), {}
            )[i] = layout
    for (mesh, spec), group in owned.items():
        over = spec.split_axes
        owners = assign_owners(
            [prod(shapes[i]) for i in group], prod(mesh.shape[axis] for axis in over)
        )
        for (i, layout), owner in zip(group.items(), owners, strict=True):
            targets[i] = layout.with_spec(P(at={**dict(spec.at), over: owner}))
    pairs = zip(layouts, firsts, strict=True)
    return tuple(
        [None if layout is None or layout.frozen else targets[first] for layout, first in pairs]
    )


def assign_owners(sizes: Sequence[int], n: int) -> list[int]:
    """Assign sizes to n owners, the largest first, each to the first one with the least; return the owner of each.

    >>> assign_owners([1, 5, 2, 2], 2)
    [1, 0, 1, 1]
    """
    loads, owners = [0] * n, [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += sizes[i]
    return owners


def _validate_mesh(at: Leaves, leaves: list[Leaf], mesh: Mesh, *, plain: bool = False) -> None:
    """Raise with the first leaf that is not on a mesh; `plain` tensors may be."""
    for i, leaf in enumerate(leaves):
        if leaf is None or (plain and not isinstance(leaf, Sharded)):
            continue
        if not isinstance(leaf, Sharded) or (
            leaf.mesh is not mesh and leaf.mesh not in (mesh, resolve_mesh(mesh))
        ):
            raise LayoutError(
                f"partition_optimizer on {mesh}: {at.paths[i] or 'the leaf'} is {kind_of(leaf)}. Give the mesh of the "
                "parameters, or shard them on this one: fs.shard_params(params, rules, mesh=mesh)."
            )


def _validate_memory(at: Leaves, stage: Stage) -> None:
    """Raise with the parameters in other memory, which only stage 3 fetches before their use."""
    away = [
        f"{path or 'the leaf'} in {x.layout.memory} memory"
        for path, x in zip(at.paths, at.leaves, strict=True)
        if stage < 3 and isinstance(x, Sharded) and x.layout.memory != "device"
    ]
    if away:
        raise OptimizerError(
            f"partition_optimizer: stage must be 3 for parameters in other memory; got {stage}, and {', '.join(away)}. "
            "Leave memory= out of shard_params, or write stage=3."
        )


def _shards_to_collect(
    params: list[Leaf], targets: Sequence[Layout | None], axes: tuple[str, ...]
) -> list[Layout | None]:
    """Return for sharded parameters that are collected at owners the layout of their gradients, None for the others.

    Cut like this, which sends nothing, they travel to their owners and back in one exchange with the gradients.
    """

    def layout(leaf: Leaf, target: Layout | None) -> Layout | None:
        is_collected = target is not None and target.spec.at and leaf.spec.split_axes
        return _cut_further(leaf.layout, axes) if is_collected else None

    return [layout(leaf, target) for leaf, target in zip(params, targets, strict=True)]


def _reshard(leaves: list[Leaf], layouts: Sequence[Layout | None], site: Site) -> list[Leaf]:
    """Return leaves in the given layouts, resharded together; the list itself, if none moves."""
    goals = {
        i: layout
        for i, (leaf, layout) in enumerate(zip(leaves, layouts, strict=True))
        if leaf is not None and layout is not None and leaf.layout is not layout
    }
    if not goals:
        return leaves
    after = dict(
        zip(goals, reshard_all([leaves[i] for i in goals], [*goals.values()], site), strict=True)
    )
    return [after.get(i, leaf) for i, leaf in enumerate(leaves)]


def _turns(leaves: list[Leaf]) -> list[Sequence[int]]:
    """Return the indices of leaves that are assembled together, so that little more than one copy exists at any time."""
    ends = accumulate(
        prod(leaf.shape) * leaf.dtype.itemsize if leaf is not None else 0 for leaf in leaves
    )
    turns = [end // AT_ONCE for end in ends]
    return [[*indices] for _, indices in groupby(range(len(leaves)), turns.__getitem__)]


def _with_memory(param: Sharded, result: Sharded) -> Sharded:
    """Return a parameter whose shards have the memory of those of a result."""
    if all(map(is_, param.shards, result.shards)):
        return param
    if param.dtype != result.dtype:
        return result
    for target, source in zip(param.shards, result.shards, strict=True):
        if source.data_ptr() != target.data_ptr():
            alone = (
                source.untyped_storage().nbytes() == source.nbytes
            )  # else the plan needs padding
            target.data = source if alone else source.clone()
    return param
