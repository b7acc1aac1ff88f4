"""Pairs of plain functions, on trees of plain tensors, as optimizers of global arrays.

They are run device by device on the tensors that each device holds, and what comes back is put together.  How the state
lies is not described anywhere: `init` and `update` are followed once on placeholders (see `follow`).

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
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.errors import OptimizerError
from fshard.mesh.layout import Layout
from fshard.mesh.sharded import Sharded
from fshard.mesh.spec import P
from fshard.mesh.spmd import held
from fshard.mesh.tree import PyTree, Structure, flatten, flatten_with_paths, unflatten
from fshard.optim.contract import Optimizer, Update, check_optimizer
from fshard.optim.follow import Following
from fshard.optim.leaves import Leaf, Leaves, kind_of, trainable
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


class Plan(NamedTuple):
    """What following a pair has shown.

    Args:
        key: of the parameters that it was followed with.
        structure: of the state.
        belongs: for each leaf of the state the parameter that it goes with, None: with none.
        like: for each leaf of the state a placeholder of the whole.
        refused: why the pair cannot be divided among devices; nothing is known of its state then.
    """

    key: object
    structure: Structure | None = None
    belongs: Sequence[int | None] = ()
    like: Sequence[Any] = ()
    refused: str = ""

    def owner(self, place: int) -> int | None:
        """Return the parameter that a leaf of the state goes with."""
        return self.belongs[place] if self.belongs else None


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
        moved = _moving(at)
        plan, parts = self._plan(at, moved), Part.all(at)
        found = [_apart(self.init(_shown(at, at.leaves, moved, part))) for part in parts]
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
            given, firsts, able = at.gradients(grads), at.firsts(), _moving(at)
            plan, parts, (own, structure) = self._plan(at, able), Part.all(at), _apart(state)
            if plan.structure is not None and structure != plan.structure:
                raise OptimizerError(
                    f"This state was not made by this optimizer's init: it is {structure}, and {plan.structure} is needed. "
                    "Write state = opt.init(params)."
                )
            moved = {place for place in able if given[place] is not None}
            shown = moved
            if plan.refused:  # its state cannot be told apart: what has no gradient has one of 0
                shown, given = able, [_zero(x) if g is None else g for x, g in zip(at.leaves, given, strict=True)]
            shadows, _ = _apart(self.init(_shown(at, at.leaves, set(), parts[0])))
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
                after.append(_apart(new)[0])
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
        key = at.structure, [(_seen(x), x.dtype) if i in moved else None for i, x in enumerate(at.leaves)]
        found = next((plan for plan in self.known if plan.key == key), None)
        if found is None:
            found = self._followed(key, at, moved)
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

    def _followed(self, key: object, at: Leaves, moved: set[int]) -> Plan:
        try:
            with Following() as following:
                params, grads = (
                    at.rebuild(
                        [
                            following.placeholder(_seen(x), x.dtype, i)
                            if i in moved
                            else following.marked(_shadow(x), i)
                            for i, x in enumerate(at.leaves)
                        ]
                    )
                    for _ in range(2)
                )
                state = self.init(params)
                updates, after = self.update(grads, state, params)
        except Exception as error:  # of the user's function: it will be raised again, if it is not for want of values
            return Plan(key, refused=f"it could not be followed: {error}")
        paths, leaves, structure = flatten_with_paths(state, none_is_leaf=True)
        strange = sorted(
            {type(x).__name__ for x in leaves if not isinstance(x, Tensor | bool | int | float | str | None)}
        )
        if strange:
            return Plan(key, refused=f"its state holds {', '.join(strange)}, which are no tensors or trees of them")
        later, other = _apart(after)
        if other != structure:
            return Plan(key, refused=f"its state changes from {structure} to {other}")
        sources = [following.marks(x) | following.marks(y) for x, y in zip(leaves, later, strict=True)]
        moves = [following.marks(x) | {i} for i, x in enumerate(at.beside(updates, "updates"))]
        mixed = [f"state{path}" for path, marks in zip(paths, sources, strict=True) if len(marks) > 1]
        mixed += [f"the update of params{at.paths[i]}" for i in sorted(moved) if len(moves[i]) > 1]
        if mixed:
            return Plan(
                key, refused=f"{', '.join(mixed)} {'is' if len(mixed) == 1 else 'are'} made of several gradients"
            )
        return Plan(key, structure, [next(iter(marks), None) for marks in sources], leaves)


_WHO = "A pair of plain functions that does not say elementwise=True"


def _moving(at: Leaves) -> set[int]:
    """Return which leaves may move: not what is frozen, nor what is tied to an earlier one."""
    return {
        i for i, (leaf, first) in enumerate(zip(at.leaves, at.firsts(), strict=True)) if i == first and trainable(leaf)
    }


def _seen(leaf: Leaf) -> tuple[int, ...]:
    """Return the shape in which the functions see a leaf, were it whole."""
    return (prod(leaf.shape),) if _is_flat(leaf) else tuple(leaf.shape)


def _is_flat(leaf: Leaf) -> bool:
    return isinstance(leaf, Sharded) and leaf.spec.is_flat


def _is_divided(leaf: Leaf) -> bool:
    return isinstance(leaf, Sharded) and any(leaf.mesh.shape[axis] > 1 for axis in leaf.spec.sharded_axes)


def _is_at(owner: int | None, at: Leaves, moved: set[int], part: Part) -> bool:
    """Return whether a device has the state that goes with a parameter."""
    return owner is None or (owner in moved and part.has(at.leaves[owner]))


def _apart(state: PyTree) -> tuple[list[Leaf], Structure]:
    return flatten(state, sharded_is_leaf=True, none_is_leaf=True)


def _shadow(leaf: Leaf) -> Tensor:
    if leaf is None:
        return torch.ones(1)
    near, dtype = (leaf.shards[0] if isinstance(leaf, Sharded) else leaf), leaf.dtype
    dtype = dtype if dtype.is_floating_point or dtype.is_complex else torch.float32
    return torch.ones((1,) * len(_seen(leaf)), dtype=dtype, device=near.device)


def _zero(leaf: Leaf) -> Leaf:
    if not isinstance(leaf, Sharded):
        return None if leaf is None else torch.zeros_like(leaf)
    return Sharded(leaf.shape, leaf.layout, tuple(map(torch.zeros_like, leaf.shards)))


def _shown(at: Leaves, leaves: Sequence[Leaf], moved: set[int], part: Part) -> PyTree:
    """Return a tree as the functions see it on a device."""
    return at.rebuild(
        [part.of(x) if i in moved and part.has(at.leaves[i]) else _shadow(at.leaves[i]) for i, x in enumerate(leaves)]
    )


def _laid(plan: Plan, at: Leaves, place: int, column: Sequence[Any], parts: list[Part]) -> Leaf:
    """Return a leaf of the state from what each device has of it."""
    owner = plan.owner(place)
    param = None if owner is None else at.leaves[owner]
    if not isinstance(param, Sharded):
        return column[0]
    like = plan.like[place]
    shape, layout = tuple(like.shape), param.layout
    if shape == _seen(param):
        shape = param.shape
    elif not layout.spec.is_owned:
        layout = layout.with_spec(P())
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
