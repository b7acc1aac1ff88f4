"""Pairs of functions on plain tensors, as optimizers of global arrays: run on the tensors of one device at a time.

    params               {"w", "v"}     not elementwise: device 0 owns w, device 1 owns v
    device 0 gets        {"w"}
    device 1 gets        {"v"}
    state                {"m": {"w", "v"}, "count"}     m has the structure of the parameters: m["w"] has w's layout
                                                        count has not: it is replicated, a number equal on all devices

A device gets its shards of the parameters with a gradient. All others are left out of dicts, lists and tuples, and are
an empty tuple in other containers: parameters of other owners or stages, frozen ones, ties after the first, and those
without a gradient, whose state does not change.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fshard.errors import OptimizerError
from fshard.mesh.layout import NAMESPACE, P, PyTree, Structure, flatten, holders, unflatten
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.spmd.run import local_devices
from fshard.optim.contract import Optimizer, Update, check_optimizer
from fshard.optim.leaves import Leaf, Leaves, check_unsharded, is_unsharded, kind_of, trainable

_optree: Any = optree
Check = Callable[[Leaves], None]


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
    >>> params = fs.device_put({"w": torch.ones(3, 2)}, fs.Layout(fs.make_mesh({"data": 2}), P(at={"data": 1})))
    >>> updates, state = opt.update(params, opt.init(params), params)
    >>> fs.unshard(updates["w"])[0], fs.typeof(state["m"]["w"]), state["count"]
    (tensor([-1., -1.]), f32[3, 2]{at:data=1}, tensor(1))
    """
    check_optimizer(opt, who)
    if getattr(opt, "arrays", False):
        return opt
    elementwise, step = getattr(opt, "elementwise", False), getattr(opt, "step", None)
    check_full = check_unsharded("A pair of plain functions without elementwise=True")
    check: Check = (lambda at: None) if elementwise is True else check_full
    return Optimizer(
        _init_on_devices(opt.init, check),
        _on_devices(opt.update, check, writes=False),
        step and _on_devices(step, check, writes=True),
        elementwise,
        getattr(opt, "loss_scale", None),
        arrays=True,
    )


def inside(opt: Any, who: str) -> Any:
    """Return an optimizer of global arrays that may be nested in another: the outermost is the one that is
    partitioned.
    """
    if hasattr(opt, "gradients"):
        raise OptimizerError(
            f"{who}: a partitioned optimizer must not be nested, since what is around it would work on other "
            "shards than it does. Partition the outermost: fs.partition_optimizer(fs.optim.chain(...), ...)."
        )
    return on_arrays(opt, who)


def _init_on_devices(init: Callable[[PyTree], PyTree], check: Check) -> Callable[[PyTree], PyTree]:
    """Make an init of global arrays: run one on each device, and assemble the state."""

    @torch.no_grad()
    def run(params: PyTree) -> PyTree:
        at = Leaves.of(params)
        check(at)
        devices, moved = _devices(at), _moved(at)
        trees = [{i: device.local(at.leaves[i]) for i in device.held(at, moved)} for device in devices]
        if elsewhere := {i: _without_values(at.leaves[i]) for i in set(moved).difference(*trees)}:
            trees.append(elsewhere)  # the state that other processes own: its shapes
        states: list[_State] = []
        for tree in trees:
            local = _only(at, tree)
            states.append(_State.of(init(local), flatten(local, none_is_leaf=True)[1]))
        if any((state.structure, state.is_like) != (states[0].structure, states[0].is_like) for state in states):
            raise OptimizerError(
                f"init must make the same state on all devices, but for subtrees with the structure of the parameters that it "
                f"is given; got {' and '.join({str(state.structure): None for state in states})}. Make dicts with the names of "
                "the parameters."
            )

        _check_numbers(at, states[0])

        def assemble_tree(*entries: list[Any]) -> PyTree:
            rows = [dict(zip(tree, own, strict=True)) for tree, own in zip(trees, entries, strict=True)]
            return at.rebuild([_assemble(x, [row.get(i) for row in rows], devices) for i, x in enumerate(at.leaves)])

        columns = zip(*(state.entries for state in states), strict=True)
        made = [
            assemble_tree(*column) if like else column[0]
            for column, like in zip(columns, states[0].is_like, strict=True)
        ]
        return unflatten(states[0].structure, made)

    return run


def _check_numbers(at: Leaves, state: _State) -> None:
    """Raise if parameters are divided, and state beside them holds more than numbers."""
    divided = any(
        isinstance(x, Sharded) and any(x.mesh.shape[axis] > 1 for axis in x.spec.sharded_axes) for x in at.leaves
    )
    others = [x for x, like in zip(state.entries, state.is_like, strict=True) if not like]
    if divided and (large := [tuple(x.shape) for x in others if isinstance(x, Tensor) and x.ndim]):
        raise OptimizerError(
            f"state of divided parameters must be numbers, but for subtrees with the structure of the parameters; got tensors "
            f"of shape {', '.join(map(str, large))}. Make such subtrees: {{'m': tree_map(torch.zeros_like, params)}}."
        )


def _on_devices(act: Update, check: Check, *, writes: bool) -> Update:
    """Make an update, or a step (`writes`), of global arrays: run one on each device."""

    @torch.no_grad()
    def run(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        at = Leaves.of(params)
        check(at)
        given, before, devices = at.gradients(grads), _State.of(state, at.structure), _devices(at)
        moved = [i for i in _moved(at) if given[i] is not None]
        results: list[dict[int, Any]] = []
        states: list[list[Any]] = []
        for device in devices:
            places = device.held(at, moved)

            def local(leaves: list[Leaf], places: list[int] = places, device: _Device = device) -> PyTree:
                return _only(at, {i: device.local(leaves[i]) for i in places})

            own = local(at.leaves)
            entries = [local(x) if like else x for x, like in zip(before.entries, before.is_like, strict=True)]
            result, after = act(local(given), unflatten(before.structure, entries), own)
            structure = flatten(own, none_is_leaf=True)[1]
            results.append(_by_place(result, structure, places, "updates"))
            entries = zip(before.entries_of(after), before.is_like, strict=True)
            states.append([_by_place(x, structure, places, "state") if like else x for x, like in entries])
        new = {i: _joined(at.leaves[i], [row.get(i) for row in results], "update") for i in moved}
        leaves = [new.get(first, at.leaves[i] if writes else None) for i, first in enumerate(at.firsts)]
        kept = [
            at.rebuild([_joined(x, [row.get(i) for row in column], "state") for i, x in enumerate(old)])
            if like
            else column[0]
            for old, like, column in zip(before.entries, before.is_like, zip(*states, strict=True), strict=True)
        ]
        return at.rebuild(leaves), unflatten(before.structure, kept)

    return run


def _by_place(tree: PyTree, structure: Structure, places: list[int], what: str) -> dict[int, Any]:
    """Return the leaves of a tree with the structure of a device's parameters, by the numbers of these."""
    leaves, found = flatten(tree, none_is_leaf=True)
    if found != structure or (what == "updates" and not all(isinstance(x, Tensor) for x in leaves)):
        raise OptimizerError(
            f"{what} must be a tree like the parameters, with a tensor for each; got {found}. The parameters are {structure}."
        )
    return dict(zip(places, leaves, strict=True))


# -- devices, and what they hold --------------------------------------------------------------------------------------


class _Device(NamedTuple):
    """A device, and the index of its shards among the local ones."""

    place: int
    number: int

    def held(self, at: Leaves, leaves: Sequence[int]) -> list[int]:
        """Return those of some leaves that the device holds."""
        return [i for i in leaves if not isinstance(x := at.leaves[i], Sharded) or x.layout.has_any(self.number)]

    def local(self, leaf: Leaf) -> Any:
        x = leaf.shards[self.place] if isinstance(leaf, Sharded) else leaf
        return x.detach() if isinstance(x, Tensor) else x


def _devices(at: Leaves) -> list[_Device]:
    mesh = next((leaf.mesh for leaf in at.leaves if isinstance(leaf, Sharded)), None)
    return [_Device(place, number) for place, number in enumerate(local_devices(mesh) if mesh else (0,))]


def _moved(at: Leaves) -> list[int]:
    """Return the leaves that may move: not frozen, and no ties to an earlier one."""
    return [i for i, first in enumerate(at.firsts) if i == first and trainable(at.leaves[i])]


def _without_values(leaf: Sharded) -> Tensor:
    """Return a meta tensor for a leaf whose owner is another device."""
    shape = leaf.layout.local_shape(leaf.shape, holders(leaf.layout)[0])
    return torch.empty(shape, dtype=leaf.dtype, device="meta")


def _assemble(param: Leaf, column: Sequence[Any], devices: list[_Device]) -> Leaf:
    """Assemble the state of a parameter from each device's; the last one may be without values."""
    example = next((x for x in column if x is not None), None)
    if example is None or not isinstance(param, Sharded):
        return example
    if not all(isinstance(x, Tensor | None) for x in column):
        raise OptimizerError(
            f"state with the structure of the parameters must hold tensors or None; got a {type(example).__name__}. Write "
            "torch.zeros(()) for a number of each parameter."
        )
    shape, layout = param.shape, param.layout
    shapes = [layout.local_shape(shape, at) for at in (*(device.number for device in devices), holders(layout)[0])]
    if any(x is not None and tuple(x.shape) != own for x, own in zip(column, shapes, strict=False)):
        if example.ndim and not is_unsharded(param):
            raise OptimizerError(
                f"state of an elementwise optimizer must have the shape of its parameter's shard, or be a number; got "
                f"{tuple(example.shape)} beside {kind_of(param)}. Leave out elementwise=True: an owner then has all of it."
            )
        shape, layout = tuple(example.shape), layout.with_spec(P(at=dict(layout.spec.at)))

    def empty(device: _Device) -> Tensor:
        of = layout.local_shape(shape, device.number)
        return torch.empty(of, dtype=example.dtype, device=param.shards[device.place].device)

    made = zip(column, devices, strict=False)
    return Sharded(shape, layout, tuple([empty(device) if x is None else x for x, device in made]))


def _joined(old: Leaf, column: Sequence[Any], what: str) -> Leaf:
    """Return a leaf with the shards that devices computed; other shards are unchanged."""
    example = next((x for x in column if x is not None), None)
    if example is None:
        return old
    before = old.shards if isinstance(old, Sharded) else (old,)
    shards = [shard if x is None else x for x, shard in zip(column, before, strict=False)]
    if old is None or any(x.shape != shard.shape for x, shard in zip(shards, before, strict=True)):
        raise OptimizerError(
            f"{what} of a parameter must keep its shape; got {tuple(example.shape)}, and it was "
            f"{None if old is None else tuple(before[0].shape)}."
        )
    if not isinstance(old, Sharded):
        return example
    return Sharded(old.shape, old.layout, tuple(x.to(example.dtype) for x in shards))


# -- trees with leaves left out, and states ---------------------------------------------------------------------------


class _Absent:
    """Placeholder in a tree for leaves that a device has none of."""


_ABSENT = _Absent()


def _only(at: Leaves, leaves: dict[int, Any]) -> PyTree:
    """Return a tree of some leaves, by index: the others are left out."""
    return _without_absent(at.rebuild([leaves.get(i, _ABSENT) for i in range(len(at.leaves))]))


def _without_absent(tree: Any) -> Any:
    kind: Any = type(tree)
    if kind in (dict, OrderedDict, defaultdict):
        rest = tree.copy()  # of the same kind
        for name, x in tree.items():
            rest[name] = _without_absent(x)
            if x is _ABSENT:
                del rest[name]
        return rest
    if kind in (list, tuple):
        return kind(_without_absent(x) for x in tree if x is not _ABSENT)
    if hasattr(kind, "_fields"):
        return kind(*map(_without_absent, tree))
    return _optree.tree_map(lambda x: () if x is _ABSENT else x, tree, none_is_leaf=True, namespace=NAMESPACE)


class _State(NamedTuple):
    """A state, taken apart into entries: the leaves of a subtree that has the structure of the parameters, or one leaf."""

    structure: Structure
    entries: list[Any]
    is_like: list[bool]

    @staticmethod
    def of(state: PyTree, params: Structure) -> _State:
        alone = params.num_nodes == 1 == params.num_leaves

        def is_like(x: Any) -> bool:
            if alone:  # a number is not like a single parameter
                return bool(getattr(x, "ndim", 0))
            return not isinstance(x, Tensor) and flatten(x, sharded_is_leaf=True, none_is_leaf=True)[1] == params

        entries, structure = _optree.tree_flatten(state, is_leaf=is_like, none_is_leaf=True, namespace=NAMESPACE)
        found = [is_like(x) for x in entries]
        return _State(
            structure,
            [
                flatten(x, sharded_is_leaf=True, none_is_leaf=True)[0] if like else x
                for x, like in zip(entries, found, strict=True)
            ],
            found,
        )

    def entries_of(self, state: PyTree) -> list[Any]:
        """Take another state of this structure apart; subtrees that are like the parameters stay trees."""
        try:
            return self.structure.flatten_up_to(state)
        except ValueError as error:
            raise OptimizerError(f"state must keep its structure from step to step: {error}") from None
