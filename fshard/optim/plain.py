"""Pairs of plain functions, on trees of plain tensors, as optimizers of global arrays.

They are run device by device on the tensors that each device holds, and what comes back is put together.  How the state
lies is not described anywhere: `init` and `update` are followed once on placeholders.

    parameter    device 0    device 1        state goes with    and lies
    w, cut       a piece     a piece         w, of its shape    as w does
    v, owned     whole       a shadow        v, of any shape    with v's owner
                                             no parameter       nowhere: it is a number, equal on all devices

A *shadow*, of one element, stands where there is nothing to do: on other devices than the owner, for what is frozen or tied
to an earlier leaf, and for a parameter without a gradient.  What the functions say of it is not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.errors import OptimizerError
from fshard.mesh.layout import Layout
from fshard.mesh.sharded import Sharded
from fshard.mesh.spec import P
from fshard.mesh.spmd import held
from fshard.mesh.tree import PyTree, unflatten
from fshard.optim.contract import Optimizer, Update, check_optimizer
from fshard.optim.leaves import Leaf, Leaves, kind_of
from fshard.optim.placeholders import Plan, apart, moving, planned, seen, shadow
from fshard.optim.whole import check_whole


def on_arrays(opt: Any, who: str) -> Any:
    """Return an optimizer that takes global arrays: itself, if it does; raise if it is none at all.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> def init(params):
    ...     return {"m": {name: torch.zeros_like(x) for name, x in params.items()}, "count": torch.tensor(0)}
    >>> def update(grads, state, params):
    ...     m = {name: 0.5 * state["m"][name] + grads[name] for name in grads}
    ...     return {name: -x for name, x in m.items()}, {"m": m, "count": state["count"] + 1}
    >>> opt = on_arrays(fs.optim.Optimizer(init, update), "train_step")
    >>> params = fs.device_put({"w": torch.ones(3, 2)}, fs.Layout(fs.make_mesh({"data": 2}), P.owned("data", by=1)))
    >>> updates, state = opt.update(params, opt.init(params), params)
    >>> fs.unshard(updates["w"])[0], fs.typeof(state["m"]["w"]), state["count"]
    (tensor([-1., -1.]), f32[3, 2]{on:data=1}, tensor(1))
    """
    check_optimizer(opt, who)
    if getattr(opt, "arrays", False):
        return opt
    pair = _Pair(opt.init, opt.update, getattr(opt, "elementwise", None) is True)
    step, elementwise = getattr(opt, "step", None), getattr(opt, "elementwise", None)
    return Optimizer(
        pair.made,
        pair.through(opt.update, writes=False),
        step and pair.through(step, writes=True),
        elementwise or False,
        getattr(opt, "loss_scale", None),
        arrays=True,
    )


class Part(NamedTuple):
    """A device, and where its shards stand among those at hand."""

    place: int
    device: int

    def has(self, leaf: Leaf) -> bool:
        """Return whether the device has any of a leaf."""
        return not isinstance(leaf, Sharded) or leaf.layout.has_any(self.device)

    def of(self, leaf: Leaf) -> Any:
        """Return what the device has of a leaf."""
        x = leaf.shards[self.place] if isinstance(leaf, Sharded) else leaf
        return x.detach() if isinstance(x, Tensor) else x

    @staticmethod
    def all(at: Leaves) -> list[Part]:
        """Return the devices at hand of the mesh that any leaf lies on."""
        meshes = [leaf.mesh for leaf in at.leaves if isinstance(leaf, Sharded)]
        return [Part(place, device) for place, device in enumerate(held(meshes[0]) if meshes else (0,))]


@dataclass(frozen=True)
class _Pair:
    init: Callable[[PyTree], PyTree]
    update: Update
    elementwise: bool
    known: list[Plan] = field(default_factory=list[Plan])

    @torch.no_grad()
    def made(self, params: PyTree) -> PyTree:
        """Make the state of global arrays."""
        at = Leaves.of(params)
        moved = moving(at)
        plan, parts = self._plan(at, moved), Part.all(at)
        found = [apart(self.init(_shown(at, at.leaves, moved, part))) for part in parts]
        results: list[Leaf] = []
        for place, column in enumerate(zip(*(leaves for leaves, _ in found), strict=True)):
            owner = plan.owner(place)
            absent = owner is not None and owner not in moved
            results.append(None if absent else _laid(plan, at, place, column, parts))
        return unflatten(found[0][1], results)

    def through(self, act: Update, *, writes: bool) -> Update:
        """Return a function of global arrays that does what one of plain tensors does."""

        @torch.no_grad()
        def run(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
            at = Leaves.of(params)
            given, firsts, able = at.gradients(grads), at.firsts(), moving(at)
            plan, parts, (own, structure) = self._plan(at, able), Part.all(at), apart(state)
            if plan.structure is not None and structure != plan.structure:
                raise OptimizerError(
                    f"This state was not made by this optimizer's init: it is {structure}, and {plan.structure} is needed. "
                    "Write state = opt.init(params)."
                )
            moved = {place for place in able if given[place] is not None}
            shown = moved
            if plan.refused:  # its state cannot be told apart: what has no gradient has one of 0
                shown, given = able, [_zero(x) if g is None else g for x, g in zip(at.leaves, given, strict=True)]
            shadows, _ = apart(self.init(_shown(at, at.leaves, set(), parts[0])))
            columns: list[list[Leaf]] = []
            after: list[list[Leaf]] = []
            for part in parts:
                mine = [
                    part.of(x) if _is_at(plan.owner(place), at, shown, part) else shadows[place]
                    for place, x in enumerate(own)
                ]
                result, new = act(
                    _shown(at, given, shown, part), unflatten(structure, mine), _shown(at, at.leaves, shown, part)
                )
                columns.append(at.beside(result, "the optimizer's results"))
                after.append(apart(new)[0])
            moves = {
                i: _beside(at, i, column, parts) for i, column in enumerate(zip(*columns, strict=True)) if i in moved
            }
            results = [moves.get(first, at.leaves[i] if writes else None) for i, first in enumerate(firsts)]
            kept = [
                own[place]
                if (owner := plan.owner(place)) is not None and owner not in moved
                else _laid(plan, at, place, column, parts)
                for place, column in enumerate(zip(*after, strict=True))
            ]
            return at.rebuild(results), unflatten(structure, kept)

        return run

    def _plan(self, at: Leaves, moved: set[int]) -> Plan:
        """Return what is known of parameters like these; raise if they lie in pieces that the pair cannot work on."""
        key = at.structure, [(seen(x), x.dtype) if i in moved else None for i, x in enumerate(at.leaves)]
        found = next((plan for plan in self.known if plan.key == key), None)
        if found is None:
            found = planned(self.init, self.update, key, at, moved)
            self.known[:] = [found, *self.known[:15]]
        if not self.elementwise:
            check_whole(_WHO)(at)
        if found.refused and any(_is_divided(at.leaves[place]) for place in moved):
            raise OptimizerError(
                f"This optimizer, a pair of plain functions, cannot be divided among devices: {found.refused}. Each parameter "
                "and its state have to go by themselves. Norms of all gradients are taken by fs.optim.clip_by_global_norm "
                "before it in a chain; in stage 0 it works as it is."
            )
        return found


_WHO = "A pair of plain functions that does not say elementwise=True"


def _is_divided(leaf: Leaf) -> bool:
    return isinstance(leaf, Sharded) and any(leaf.mesh.shape[axis] > 1 for axis in leaf.spec.sharded_axes)


def _is_at(owner: int | None, at: Leaves, moved: set[int], part: Part) -> bool:
    """Return whether a device has the state that goes with a parameter."""
    return owner is None or (owner in moved and part.has(at.leaves[owner]))


def _zero(leaf: Leaf) -> Leaf:
    if not isinstance(leaf, Sharded):
        return None if leaf is None else torch.zeros_like(leaf)
    return Sharded(leaf.shape, leaf.layout, tuple(map(torch.zeros_like, leaf.shards)))


def _shown(at: Leaves, leaves: Sequence[Leaf], moved: set[int], part: Part) -> PyTree:
    """Return a tree as the functions see it on a device."""
    return at.rebuild(
        [part.of(x) if i in moved and part.has(at.leaves[i]) else shadow(at.leaves[i]) for i, x in enumerate(leaves)]
    )


def _laid(plan: Plan, at: Leaves, place: int, column: Sequence[Any], parts: list[Part]) -> Leaf:
    """Return a leaf of the state from what each device has of it."""
    owner = plan.owner(place)
    param = None if owner is None else at.leaves[owner]
    if not isinstance(param, Sharded):
        return column[0]
    like = plan.like[place]
    shape, layout = tuple(like.shape), param.layout
    if shape == seen(param):
        shape = param.shape
    else:
        layout = layout.with_spec(P(on=dict(layout.spec.on)))
    return _put_together(param, shape, layout, like.dtype, column, parts, "state")


def _beside(at: Leaves, place: int, column: Sequence[Any], parts: list[Part]) -> Leaf:
    """Return the result for a parameter from what each device has of it."""
    param = at.leaves[place]
    if not isinstance(param, Sharded) or any(x is None for x in column):
        return column[0]
    return _put_together(param, param.shape, param.layout, column[0].dtype, column, parts, "result")


def _put_together(
    param: Sharded,
    shape: tuple[int, ...],
    layout: Layout,
    dtype: torch.dtype,
    column: Sequence[Any],
    parts: list[Part],
    what: str,
) -> Sharded:
    wanted = [layout.local_shape(shape, part.device) for part in parts]
    shards = [
        x if part.has(param) else param.shards[part.place].new_empty(own, dtype=dtype)
        for x, part, own in zip(column, parts, wanted, strict=True)
    ]
    if [tuple(x.shape) for x in shards] != wanted:
        raise OptimizerError(
            f"This optimizer says elementwise=True, but makes a {what} of shape {tuple(shards[0].shape)} from a piece of "
            f"{kind_of(param)}. Say elementwise=False: each parameter is then whole on one device."
        )
    return Sharded(shape, layout, tuple(shards))
