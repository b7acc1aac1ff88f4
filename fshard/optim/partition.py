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

import torch
from torch import Tensor

from fshard.errors import LayoutError, OptimizerError
from fshard.mesh.layout import Layout, Mesh, P, PyTree
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.reshard.device_put import reshard_all
from fshard.mesh.spmd.run import resolve_mesh
from fshard.optim.compression import Compression
from fshard.optim.contract import Elementwise, Optimizer, Update, elementwise_leaves, step_of
from fshard.optim.leaves import Leaf, Leaves, kind_of
from fshard.optim.per_device import check_not_partitioned, on_arrays
from fshard.source import Site, call_site
from fshard.uncompiled import uncompiled

Stage = Literal[0, 1, 2, 3]
Unit = Literal["elementwise", "matrix"]
AT_ONCE = 1 << 22
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
    arrays: bool = True
    compression: Compression | None = None


def partition_optimizer(
    opt: Optimizer,
    *,
    mesh: Mesh,
    axis: str | tuple[str, ...],
    stage: Stage,
    unit: Unit | None = None,
    compress: Mapping[str, Any] | None = None,
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

    In stages 1 to 3 an own `update` of plain tensors sees the device's shards or the leaves that it owns, so a norm of its
    gradients would be wrong: `fs.optim.global_norm(grads)` there is that of all. `fs.testing.check_elementwise` tests it.

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
    opt = on_arrays(opt, "partition_optimizer")
    _validate(opt, stage, unit)
    flat = opt.elementwise if unit is None else unit == "elementwise"
    is_divided = stage > 0 and not (flat is True and all(mesh.shape[axis] == 1 for axis in axes))

    @uncompiled
    def init(params: PyTree) -> PyTree:
        at = Leaves.of(params)
        _validate_mesh(at, at.leaves, mesh, plain=not is_divided)
        if not is_divided:
            return opt.init(params)
        return opt.init(at.rebuild(_reshard(at.leaves, _targets(at, flat, axes), call_site())))

    def divided(act: Update, *, donated: bool) -> Update:
        @uncompiled
        def run(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
            at, site = Leaves.of(params), call_site()
            given = at.beside(grads, "grads")
            for leaves in (at.leaves, given):
                _validate_mesh(at, leaves, mesh)
            leaves, targets = [*given, *at.leaves], _targets(at, flat, axes) * 2
            if all(
                x is None or target is None or x.layout is target for x, target in zip(leaves, targets, strict=True)
            ):
                return act(grads, state, params)
            leaves = _reshard(leaves, targets, site)
            grads, own = at.rebuild(leaves[: len(given)]), at.rebuild(leaves[len(given) :])
            del given, leaves
            result, state = act(grads, state, own)
            after = at.beside(result, "the optimizer's results")
            del grads, own, result  # then `after` holds the last references to old memory
            return at.rebuild((_write_in_place if donated else _back)(at, after, site)), state

        return run

    made = Partitioned(
        init,
        divided(opt.update, donated=False) if is_divided else opt.update,
        divided(step_of(opt), donated=True) if is_divided else opt.step,
        opt.elementwise,
        opt.loss_scale,
        (lambda layout: shard_layout(layout, axes)) if is_divided else (lambda layout: layout),
        stage,
    )
    return made if compress is None else _compressed(made, compress, mesh, axes if is_divided else ())


def _compressed(opt: Partitioned, compress: Mapping[str, Any], mesh: Mesh, axes: tuple[str, ...]) -> Partitioned:
    """Return a partitioned optimizer whose gradients are reduced by compressors along some axes."""
    rest = tuple(axis for axis in axes if axis not in compress)
    reduced = Compression(compress, mesh, lambda layout: shard_layout(layout, rest), opt.loss_scale)

    def compressed(act: Update) -> Update:
        @uncompiled
        @torch.no_grad()
        def run(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
            grads, state = reduced.reduce(grads, state)
            params, inner = act(grads, state["inner"], params)
            return params, {"compress": state["compress"], "inner": inner}

        return run

    scale = opt.loss_scale
    return opt._replace(
        init=lambda params: {"compress": reduced.init(params), "inner": opt.init(params)},
        update=compressed(opt.update),
        step=opt.step and compressed(opt.step),
        loss_scale=None if scale is None else lambda state: scale(state["inner"]),
        gradients=reduced.layout,
        compression=reduced,
    )


def _validate(opt: Optimizer, stage: Stage, unit: Unit | None) -> None:
    check_not_partitioned(opt, "partition_optimizer")
    if stage not in get_args(Stage) or isinstance(stage, bool):
        raise OptimizerError(f"partition_optimizer: stage must be 0, 1, 2 or 3, as in ZeRO; got {stage!r}.")
    if unit not in (None, *get_args(Unit)):
        raise OptimizerError(f'partition_optimizer: unit must be "elementwise", "matrix" or None; got {unit!r}.')
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
    more = tuple(axis for axis in axes if axis not in spec.sharded_axes and layout.mesh.shape[axis] > 1)
    return layout.with_spec(spec.shapeless.flattened(*more)) if more else None


def _targets(at: Leaves, flat: Elementwise, axes: tuple[str, ...]) -> tuple[Layout | None, ...]:
    """Return the layout of each parameter for the update, None where there is nothing to update."""
    is_float = [leaf is not None and (leaf.dtype.is_floating_point or leaf.dtype.is_complex) for leaf in at.leaves]
    layouts = tuple([leaf.layout if moves else None for leaf, moves in zip(at.leaves, is_float, strict=True)])
    shapes = tuple([() if leaf is None else leaf.shape for leaf in at.leaves])
    elementwise = elementwise_leaves(flat, at.rebuild(at.leaves)) if callable(flat) else [flat] * len(at.leaves)
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
    for place, (layout, is_flat) in enumerate(zip(layouts, elementwise, strict=True)):
        if layout is None or firsts[place] != place:
            continue
        targets[place] = cut = shard_layout(layout, axes)
        if not is_flat and cut.spec.split_axes:
            owned.setdefault((cut.mesh, P.flat(*cut.spec.split_axes, at=dict(cut.spec.at))), {})[place] = layout
    for (mesh, spec), some in owned.items():
        over = spec.split_axes
        owners = assign_owners([prod(shapes[place]) for place in some], prod(mesh.shape[axis] for axis in over))
        for (place, layout), owner in zip(some.items(), owners, strict=True):
            targets[place] = layout.with_spec(P(at={**dict(spec.at), over: owner}))
    return tuple(
        [
            None if layout is None or layout.frozen else targets[first]
            for layout, first in zip(layouts, firsts, strict=True)
        ]
    )


def assign_owners(sizes: Sequence[int], n: int) -> list[int]:
    """Assign sizes to n owners, the largest first, each to the first one with the least; return the owner of each.

    >>> assign_owners([1, 5, 2, 2], 2)
    [1, 0, 1, 1]
    """
    loads, owners = [0] * n, [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        owners[place] = loads.index(min(loads))
        loads[owners[place]] += sizes[place]
    return owners


def _validate_mesh(at: Leaves, leaves: list[Leaf], mesh: Mesh, *, plain: bool = False) -> None:
    """Raise with leaves that are not on a mesh; `plain` tensors may be."""

    def is_elsewhere(leaf: Leaf) -> bool:
        if not isinstance(leaf, Sharded):
            return leaf is not None and not plain
        return leaf.mesh is not mesh and leaf.mesh not in (mesh, resolve_mesh(mesh))

    if any(map(is_elsewhere, leaves)):
        each = zip(at.paths, leaves, strict=True)
        wrong = [f"{path or 'the leaf'} is {kind_of(leaf)}" for path, leaf in each if is_elsewhere(leaf)]
        raise LayoutError(
            f"partition_optimizer on {mesh}: {'; '.join(wrong)}. Give the mesh of the parameters, or shard them on this one: "
            "fs.shard_params(params, rules, mesh=mesh)."
        )


def _reshard(leaves: list[Leaf], layouts: Sequence[Layout | None], site: Site) -> list[Leaf]:
    """Return leaves in the given layouts, resharded together; unchanged where none is given."""
    found = [
        (i, leaf, layout)
        for i, (leaf, layout) in enumerate(zip(leaves, layouts, strict=True))
        if leaf is not None and layout is not None and leaf.layout is not layout
    ]
    moved = reshard_all([x for _, x, _ in found], [layout for *_, layout in found], site)
    new = {i: x for (i, *_), x in zip(found, moved, strict=True)}
    return [new.get(i, leaf) for i, leaf in enumerate(leaves)]


def _back(at: Leaves, after: list[Leaf], site: Site) -> list[Leaf]:
    """Give results the layouts of the parameters."""
    return _reshard(after, [None if leaf is None else leaf.layout for leaf in at.leaves], site)


def _write_in_place(at: Leaves, after: list[Leaf], site: Site) -> list[Leaf]:
    """Give results the layouts of the parameters, some at a time: little more than one copy of them exists at any time.

    Donates `after`.
    """
    firsts = at.firsts
    after[:] = [leaf if firsts[place] == place else None for place, leaf in enumerate(after)]
    for places in _turns(after):
        some = _back(at, [leaf if place in places else None for place, leaf in enumerate(after)], site)
        for place in places:
            new = some[place]
            after[place] = new if new is None else _become(at.leaves[place], new)
        del some
    return [after[first] for first in firsts]


def _turns(leaves: list[Leaf]) -> list[Sequence[int]]:
    """Return the indices of leaves that are assembled together."""
    ends = accumulate(prod(leaf.shape) * leaf.dtype.itemsize if leaf is not None else 0 for leaf in leaves)
    turns = [end // AT_ONCE for end in ends]
    return [[*places] for _, places in groupby(range(len(leaves)), turns.__getitem__)]


def _become(old: Sharded, new: Sharded) -> Sharded:
    """Let the tensors of one array be those of another."""
    if all(map(is_, old.shards, new.shards)):
        return old
    if old.dtype != new.dtype:
        return new
    for target, source in zip(old.shards, new.shards, strict=True):
        if source.data_ptr() != target.data_ptr():
            alone = source.untyped_storage().nbytes() == source.nbytes  # else the plan needs padding
            target.data = source if alone else source.clone()
    return old
