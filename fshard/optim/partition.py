"""`partition_optimizer`: ZeRO as a table of layouts.

Where an element's update depends on that element alone, an optimizer runs on any piece of the parameters.  So to divide
its work and its state among the devices, nothing about it has to be known: it is given pieces.

    stage   parameters at rest   gradients                  state    after the update
    0       as they are          as the parameters          as they
    1, 2    replicated           pieces (psum_scatter)      pieces   all_gather of the parameters
    3       pieces               pieces (psum_scatter)      pieces

Stages 1 and 2 differ in when gradients are reduced, which is not the optimizer's business: once a step, or as each unit's
is ready (`train_step`).  The state's layout is not described anywhere: the optimizer makes its state from pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Literal, NamedTuple

from torch import Tensor

from fshard.errors import LayoutError, OptimizerError
from fshard.mesh.layout import Layout
from fshard.mesh.mesh import Mesh
from fshard.mesh.placing import reshard_all
from fshard.mesh.sharded import Sharded
from fshard.mesh.spec import P
from fshard.mesh.tree import PyTree, flatten_with_paths, unflatten
from fshard.optim.contract import Optimizer, Update, step_of
from fshard.optim.leaves import trainable
from fshard.source import Site, call_site

Stage = Literal[0, 1, 2, 3]


class Partitioned(NamedTuple):
    """An optimizer whose work is divided: one like any other, that also says how it wants its gradients to lie."""

    init: Callable[[PyTree], PyTree]
    update: Update
    step: Update | None
    elementwise: bool
    loss_scale: Callable[[PyTree], Tensor] | None
    gradients: Callable[[Layout], Layout]
    stage: Stage


def partition_optimizer(
    opt: Optimizer,
    *,
    mesh: Mesh,
    axis: str | tuple[str, ...],
    stage: Stage,
) -> Partitioned:
    """Divide an optimizer's state and work among the devices along `axis`.

    Args:
        opt: any pair of init and update that is elementwise, or says so; others (Muon, Shampoo, LAMB) need stage 0.
        mesh: the devices that the parameters lie on.
        axis: an axis, or several, along which the parameters are replicated (stages 0 to 2) or cut (stage 3).
        stage: of ZeRO: 0 divides nothing, 1 and 2 state and gradients, 3 parameters as well.
    What `update` and `step` send: an all_gather of the parameters in stages 1 and 2, else nothing.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"data": 2})
    >>> params = fs.shard_params({"w": torch.ones(4)}, P(), mesh=mesh)
    >>> opt = fs.partition_optimizer(fs.optim.sgd(1.0, momentum=0.9), mesh=mesh, axis="data", stage=1)
    >>> grads = fs.device_put({"w": torch.arange(4.0)}, fs.Layout(mesh, P.flat("data")))
    >>> params, state = opt.step(grads, opt.init(params), params)
    >>> fs.typeof(params["w"]), fs.unshard(params["w"])
    (f32[4], tensor([ 1.,  0., -1., -2.]))
    """
    axes = mesh.check_axes(axis, "partition_optimizer(axis=)")
    if stage not in (0, 1, 2, 3):
        raise OptimizerError(f"partition_optimizer: the stages of ZeRO are 0, 1, 2 and 3; found {stage!r}.")
    if stage == 0:
        return Partitioned(opt.init, opt.update, opt.step, opt.elementwise, opt.loss_scale, _same, 0)
    if not opt.elementwise:
        raise OptimizerError(
            f"partition_optimizer(stage={stage}): this optimizer says that it is not elementwise, so pieces of parameters "
            "would give it other results. Use stage=0."
        )

    def pieces_of(layout: Layout) -> Layout:
        return pieces(layout, axes)

    inner = step_of(opt)

    def init(params: PyTree) -> PyTree:
        return opt.init(_moved(params, pieces_of, call_site()))

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        site = call_site()
        updates, state = opt.update(_moved(grads, pieces_of, site), state, _moved(params, pieces_of, site))
        return _back(updates, params, site), state

    def step(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        site = call_site()
        new, state = inner(_moved(grads, pieces_of, site), state, _moved(params, pieces_of, site))
        return _back(new, params, site), state

    return Partitioned(init, update, step, True, opt.loss_scale, pieces_of, stage)


def _same(layout: Layout) -> Layout:
    return layout


@lru_cache(maxsize=4096)
def pieces(layout: Layout, axes: tuple[str, ...]) -> Layout:
    """Return the layout of the pieces that devices along `axes` work on.

    What is already cut over some of the axes keeps that cut; the others cut it further, flat.
    """
    spec = layout.spec
    more = tuple(axis for axis in axes if axis not in spec.sharded_axes)
    if not more:
        return layout
    return layout.with_spec(P.flat(*spec.sharded_axes, *more))


def _moved(tree: PyTree, to: Callable[[Layout], Layout], site: Site) -> PyTree:
    """Lay all leaves of a tree differently; but those that are not trained."""
    paths, leaves, structure = flatten_with_paths(tree, sharded_is_leaf=True, none_is_leaf=True)
    places = [place for place, leaf in enumerate(leaves) if leaf is not None]
    wrong = [
        f"{paths[place] or 'the leaf'} is a {type(leaves[place]).__name__}"
        for place in places
        if not isinstance(leaves[place], Sharded)
    ]
    if wrong:
        raise LayoutError(
            f"partition_optimizer: {'; '.join(wrong)}. Lay the parameters on the mesh with fs.shard_params."
        )
    given = [leaves[place] for place in places]
    moved = reshard_all(given, [to(leaf.layout) if trainable(leaf) else leaf.layout for leaf in given], site)
    for place, leaf in zip(places, moved, strict=True):
        leaves[place] = leaf
    return unflatten(structure, leaves)


def _back(tree: PyTree, params: PyTree, site: Site) -> PyTree:
    """Lay updated leaves as the parameters lie; what was not updated is as it was."""
    _, leaves, structure = flatten_with_paths(tree, sharded_is_leaf=True, none_is_leaf=True)
    _, olds, _ = flatten_with_paths(params, sharded_is_leaf=True, none_is_leaf=True)
    places = [place for place, leaf in enumerate(leaves) if leaf is not None]
    moved = reshard_all([leaves[place] for place in places], [olds[place].layout for place in places], site)
    for place, leaf in zip(places, moved, strict=True):
        leaves[place] = leaf
    return unflatten(structure, leaves)
