"""Pairs of functions on plain tensors, as optimizers of global arrays: run on the tensors of one device at a time.

    params               {"w", "v"}     not elementwise: device 0 owns w, device 1 owns v
    device 0 gets        {"w": tensor, "v": None}
    device 1 gets        {"w": None, "v": tensor}
    state                {"m": {"w", "v"}, "count"}     m has the structure of the parameters: m["w"] has w's layout
                                                        count has not: it is replicated, a number equal on all devices

A device gets its shards of the parameters with a gradient, and None for all others: parameters of other owners or stages,
frozen ones, ties after the first, and those without a gradient, whose state does not change.
"""

from __future__ import annotations

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
    >>> from optree import tree_map
    >>> def init(params):
    ...     return {"m": tree_map(torch.zeros_like, params), "count": torch.tensor(0)}
    >>> def update(grads, state, params):
    ...     m = tree_map(lambda m, g: 0.5 * m + g, state["m"], grads)
    ...     return tree_map(torch.neg, m), {"m": m, "count": state["count"] + 1}
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
    rows = [{i: _local(at.leaves[i], index) for i in indices} for index, indices in _devices(at, moved)]
    if elsewhere := {i: shape_of_shard(at.leaves[i]) for i in set(moved).difference(*rows)}:
        rows.append(elsewhere)  # the state that other processes own: its shapes
    states = [_State.of(init(_tree(at, row)), at.structure) for row in rows]
    first = states[0]
    if any((state.structure, state.is_like) != (first.structure, first.is_like) for state in states):
        raise OptimizerError(
            "init must make the same state on all devices, but for subtrees with the structure of the parameters. Give None "
            "where a parameter is None: optree.tree_map(f, params)."
        )
    others = [x for x, like in zip(first.entries, first.is_like, strict=True) if isinstance(x, Tensor) and not like]
    if any(x.ndim for x in others) and not all(map(_is_replicated, at.leaves)):
        raise OptimizerError(
            "state of divided parameters must be numbers, but for subtrees with the structure of the parameters; got other "
            "tensors. Make such subtrees: {'m': optree.tree_map(torch.zeros_like, params)}."
        )

    def assembled(*columns: list[Any]) -> PyTree:
        return at.rebuild([_assembled(param, shards) for param, *shards in zip(at.leaves, *columns, strict=True)])

    columns = zip(first.is_like, *(state.entries for state in states), strict=True)
    return unflatten(first.structure, [assembled(*column) if like else column[0] for like, *column in columns])


def _act(act: Update, grads: PyTree, state: PyTree, at: Leaves, *, writes: bool) -> tuple[PyTree, PyTree]:
    """Run an update, or a step (`writes`), of plain tensors on each device; return arrays."""
    gradients, before = at.gradients(grads), _State.of(state, at.structure)
    moved = [i for i in _trained(at) if gradients[i] is not None]
    devices = _devices(at, moved)

    def on_device(index: int) -> tuple[list[Any], list[Any]]:
        def local(leaves: list[Leaf]) -> PyTree:
            return _tree(at, {i: _local(leaves[i], index) for i in devices[index][1]})

        def arrays(tree: PyTree) -> list[Leaf]:
            """Return a local tree as arrays; shards of those that the device does not hold are empty."""
            shards = _leaves(tree, at, "the tree of global_norm")
            return [
                like(at.leaves[i], [_local(at.leaves[i], index) if shards[i] is None else shards[i]]) for i in moved
            ]

        entries = [local(x) if like else x for x, like in zip(before.entries, before.is_like, strict=True)]
        context = copy_context()
        context.run(local_arrays.set, arrays)
        result, after = context.run(act, local(gradients), unflatten(before.structure, entries), local(at.leaves))
        entries = zip(before.structure.flatten_up_to(after), before.is_like, strict=True)
        after = [_leaves(x, at, "state") if like else x for x, like in entries]
        return _leaves(result, at, "updates"), after

    mesh = next((leaf.mesh for leaf in at.leaves if isinstance(leaf, Sharded)), None)
    if mesh is None:
        results = [on_device(0)]
    else:
        numbers = local_devices(mesh)
        results = run_on_devices(mesh, lambda device: on_device(numbers.index(device)))
    updates, states = zip(*results, strict=True)

    def joined(old: list[Leaf], rows: Sequence[list[Any]], name: str) -> list[Leaf]:
        return [_joined(leaf, shards, name) for leaf, *shards in zip(old, *rows, strict=True)]

    new = joined([leaf if i in moved else None for i, leaf in enumerate(at.leaves)], updates, "update")
    leaves = [new[first] if first in moved else (at.leaves[i] if writes else None) for i, first in enumerate(at.firsts)]
    columns = zip(before.is_like, before.entries, zip(*states, strict=True), strict=True)
    entries = [at.rebuild(joined(old, rows, "state")) if like else rows[0] for like, old, rows in columns]
    return at.rebuild(leaves), unflatten(before.structure, entries)


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
    if example.ndim and leaf.layout is not param.layout and param.spec.split_axes and not is_unsharded(param):
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


# -- trees of a device, and states -------------------------------------------------------------------------------------


def _tree(at: Leaves, leaves: dict[int, Any]) -> PyTree:
    """Return a tree of some leaves, by index: None for the others."""
    return at.rebuild([leaves.get(i) for i in range(len(at.leaves))])


def _leaves(tree: PyTree, at: Leaves, name: str) -> list[Any]:
    """Return the leaves of a device's tree with the structure of the parameters."""
    leaves, structure = flatten(tree, none_is_leaf=True)
    if structure != at.structure:
        raise OptimizerError(f"{name} must be a tree like the parameters, {at.structure}; got {structure}.")
    return leaves


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
                return x is None or bool(getattr(x, "ndim", 0))
            return not isinstance(x, Tensor) and flatten(x, none_is_leaf=True)[1] == params

        subtrees, structure = _optree.tree_flatten(state, is_leaf=is_like, none_is_leaf=True, namespace=NAMESPACE)
        flags = [is_like(x) for x in subtrees]
        entries = [flatten(x, none_is_leaf=True)[0] if like else x for x, like in zip(subtrees, flags, strict=True)]
        return _State(structure, entries, flags)
