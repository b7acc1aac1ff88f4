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
from contextvars import copy_context
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fshard.errors import OptimizerError
from fshard.mesh.layout import NAMESPACE, PyTree, Structure, flatten, unflatten
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.spmd.run import local_devices, run_on_devices
from fshard.optim.contract import Optimizer, Update, check_optimizer
from fshard.optim.leaves import (
    Leaf,
    Leaves,
    assembled_state,
    check_unsharded,
    is_unsharded,
    kind_of,
    like,
    shape_of_shard,
    trainable,
)
from fshard.optim.norms import local_arrays

_optree: Any = optree


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

    def leaves_of(params: PyTree) -> Leaves:
        at = Leaves.of(params)
        if elementwise is not True:
            check_unsharded("A pair of plain functions without elementwise=True", at)
        return at

    return Optimizer(
        torch.no_grad()(lambda params: _init(opt.init, leaves_of(params))),
        torch.no_grad()(lambda grads, state, params: _act(opt.update, grads, state, leaves_of(params), writes=False)),
        step and torch.no_grad()(lambda grads, state, params: _act(step, grads, state, leaves_of(params), writes=True)),
        elementwise,
        getattr(opt, "loss_scale", None),
        arrays=True,
    )


def inner_optimizer(opt: Any, who: str) -> Optimizer:
    """Return an optimizer of global arrays to nest in another; raise if it must be the outermost."""
    check_not_partitioned(opt, who)
    made = on_arrays(opt, who)
    if made.loss_scale is not None:
        raise OptimizerError(
            f"{who}: loss_scaled must not be nested, since what is around it would get gradients that are still scaled. "
            "Put one loss_scaled around all of it."
        )
    return made


def check_not_partitioned(opt: Any, who: str) -> None:
    """Raise if an optimizer is partitioned: what is around it would work on other shards than it does."""
    if hasattr(opt, "gradients"):
        raise OptimizerError(
            f"{who}: a partitioned optimizer must not be nested, since what is around it would work on other "
            "shards than it does. Partition the outermost: fs.partition_optimizer(fs.optim.chain(...), ...)."
        )


def _init(init: Callable[[PyTree], PyTree], at: Leaves) -> PyTree:
    """Run an init of plain tensors on each device, and assemble the state."""
    moved = _trained(at)
    trees = [{i: _local(at.leaves[i], place) for i in held} for place, held in _devices(at, moved)]
    if elsewhere := {i: shape_of_shard(at.leaves[i]) for i in set(moved).difference(*trees)}:
        trees.append(elsewhere)  # the state that other processes own: its shapes
    made = [init(_only(at, tree)) for tree in trees]
    states = [_State.of(x, flatten(_only(at, tree), none_is_leaf=True)[1]) for x, tree in zip(made, trees, strict=True)]
    first = next((state for state, tree in zip(states, trees, strict=True) if tree), states[0])
    states = [state if tree else first.beside(x) for state, x, tree in zip(states, made, trees, strict=True)]
    if any((state.structure, state.is_like) != (first.structure, first.is_like) for state in states):
        raise OptimizerError(
            "init must make the same state on all devices, but for subtrees with the structure of the parameters that it is "
            "given. Make dicts with the names of the parameters."
        )
    others = [x for x, like in zip(first.entries, first.is_like, strict=True) if isinstance(x, Tensor) and not like]
    if any(x.ndim for x in others) and not all(map(_is_replicated, at.leaves)):
        raise OptimizerError(
            "state of divided parameters must be numbers, but for subtrees with the structure of the parameters; got other "
            "tensors. Make such subtrees: {'m': tree_map(torch.zeros_like, params)}."
        )

    def assembled(*entries: list[Any]) -> PyTree:
        rows = [dict(zip(tree, own, strict=True)) for tree, own in zip(trees, entries, strict=True)]
        return at.rebuild([_assembled(x, [row.get(i) for row in rows]) for i, x in enumerate(at.leaves)])

    columns = zip(first.is_like, *(state.entries for state in states), strict=True)
    return unflatten(first.structure, [assembled(*column) if like else column[0] for like, *column in columns])


def _act(act: Update, grads: PyTree, state: PyTree, at: Leaves, *, writes: bool) -> tuple[PyTree, PyTree]:
    """Run an update, or a step (`writes`), of plain tensors on each device; return arrays."""
    given, before = at.gradients(grads), _State.of(state, at.structure)
    moved = [i for i in _trained(at) if given[i] is not None]
    devices = _devices(at, moved)

    def on_device(place: int) -> tuple[dict[int, Any], list[Any]]:
        held = devices[place][1]

        def local(leaves: list[Leaf]) -> PyTree:
            return _only(at, {i: _local(leaves[i], place) for i in held})

        def arrays(tree: PyTree) -> list[Leaf]:
            """Return a local tree as arrays; shards of those that the device does not hold are empty."""
            shards = _by_index(tree, structure, held, "the tree of global_norm")
            return [like(at.leaves[i], [shards.get(i, _local(at.leaves[i], place))]) for i in moved]

        own = local(at.leaves)
        structure = flatten(own, none_is_leaf=True)[1]
        entries = [local(x) if like else x for x, like in zip(before.entries, before.is_like, strict=True)]
        context = copy_context()
        context.run(local_arrays.set, arrays)
        result, after = context.run(act, local(given), unflatten(before.structure, entries), own)
        entries = zip(before.structure.flatten_up_to(after), before.is_like, strict=True)
        after = [_by_index(x, structure, held, "state") if like else x for x, like in entries]
        return _by_index(result, structure, held, "updates"), after

    mesh = next((leaf.mesh for leaf in at.leaves if isinstance(leaf, Sharded)), None)
    if mesh is None:
        found = [on_device(0)]
    else:
        numbers = local_devices(mesh)
        found = run_on_devices(mesh, lambda device: on_device(numbers.index(device)))
    results, states = zip(*found, strict=True)
    new = {i: _joined(at.leaves[i], [row.get(i) for row in results], "update") for i in moved}
    leaves = [new.get(first, at.leaves[i] if writes else None) for i, first in enumerate(at.firsts)]
    columns = zip(before.is_like, before.entries, zip(*states, strict=True), strict=True)
    kept = [
        at.rebuild([_joined(x, [row.get(i) for row in rows], "state") for i, x in enumerate(old)]) if like else rows[0]
        for like, old, rows in columns
    ]
    return at.rebuild(leaves), unflatten(before.structure, kept)


# -- devices, and their shards -----------------------------------------------------------------------------------------


def _devices(at: Leaves, indices: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Return for each local device the index of its shards, and which of some leaves it holds."""
    mesh = next((leaf.mesh for leaf in at.leaves if isinstance(leaf, Sharded)), None)

    def is_held(leaf: Leaf, device: int) -> bool:
        return not isinstance(leaf, Sharded) or leaf.layout.has_any(device)

    devices = enumerate(local_devices(mesh) if mesh else (0,))
    return [(place, [i for i in indices if is_held(at.leaves[i], device)]) for place, device in devices]


def _trained(at: Leaves) -> list[int]:
    """Return the indices of the leaves that are trained; of ties the first."""
    return [i for i, first in enumerate(at.firsts) if i == first and trainable(at.leaves[i])]


def _is_replicated(leaf: Leaf) -> bool:
    """Return True if all devices store all of a leaf."""
    return not isinstance(leaf, Sharded) or all(leaf.mesh.shape[axis] == 1 for axis in leaf.spec.sharded_axes)


def _local(leaf: Leaf, place: int) -> Any:
    x = leaf.shards[place] if isinstance(leaf, Sharded) else leaf
    return x.detach() if isinstance(x, Tensor) else x


def _assembled(param: Leaf, made: Sequence[Any]) -> Leaf:
    """Assemble the state of a parameter from that of each device; the last one may be without values."""
    example = next((x for x in made if x is not None), None)
    if example is None or not isinstance(param, Sharded):
        return example
    leaf = assembled_state(param, made)
    if example.ndim and leaf.layout is not param.layout and not is_unsharded(param):
        raise OptimizerError(
            f"state of an elementwise optimizer must have the shape of its parameter's shard, or be a number; got "
            f"{tuple(example.shape)} beside {kind_of(param)}. Leave out elementwise=True: an owner then has all of it."
        )
    return leaf


def _joined(old: Leaf, made: Sequence[Any], what: str) -> Leaf:
    """Return a leaf with the shards that devices computed; other shards are unchanged."""
    example = next((x for x in made if x is not None), None)
    if example is None:
        return old
    before = old.shards if isinstance(old, Sharded) else (old,)
    shards = [shard if x is None else x for x, shard in zip(made, before, strict=False)]
    if old is None or any(x.shape != shard.shape for x, shard in zip(shards, before, strict=True)):
        raise OptimizerError(
            f"{what} of a parameter must keep its shape; got {tuple(example.shape)}, and it was "
            f"{None if old is None else tuple(before[0].shape)}."
        )
    return (
        Sharded(old.shape, old.layout, tuple(x.to(example.dtype) for x in shards))
        if isinstance(old, Sharded)
        else example
    )


# -- trees with leaves left out, and states ----------------------------------------------------------------------------

_ABSENT = object()
"""In the place of a leaf that a device does not get."""


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
        is_single = params.num_nodes == 1 == params.num_leaves

        def is_like(x: Any) -> bool:
            if is_single:  # a number is not like a single parameter
                return bool(getattr(x, "ndim", 0))
            return not isinstance(x, Tensor) and flatten(x, none_is_leaf=True)[1] == params

        subtrees, structure = _optree.tree_flatten(state, is_leaf=is_like, none_is_leaf=True, namespace=NAMESPACE)
        found = [is_like(x) for x in subtrees]
        entries = [flatten(x, none_is_leaf=True)[0] if like else x for x, like in zip(subtrees, found, strict=True)]
        return _State(structure, entries, found)

    def beside(self, state: PyTree) -> _State:
        """Take the state of a device without parameters apart, whose empty trees may be like the parameters or not."""
        try:
            entries = self.structure.flatten_up_to(state)
        except ValueError:
            return _State(self.structure, [], [])
        return self._replace(entries=[[] if like else x for x, like in zip(entries, self.is_like, strict=True)])


def _by_index(tree: PyTree, structure: Structure, indices: list[int], what: str) -> dict[int, Any]:
    """Return the leaves of a tree with the structure of a device's parameters, by the indices of these."""
    leaves, found = flatten(tree, none_is_leaf=True)
    if found != structure or (what == "updates" and not all(isinstance(x, Tensor) for x in leaves)):
        raise OptimizerError(
            f"{what} must be a tree like the parameters, with a tensor for each; got {found}. The parameters are {structure}."
        )
    return dict(zip(indices, leaves, strict=True))
