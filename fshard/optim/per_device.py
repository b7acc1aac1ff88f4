"""Pairs of functions on plain tensors, as optimizers of global arrays: run on the tensors of one device at a time.

    params               {"w", "v"}     not elementwise: device 0 owns w, device 1 owns v
    device 0 gets        {"w": tensor, "v": None}
    device 1 gets        {"w": None, "v": tensor}
    state                {"m": {"w", "v"}, "count"}     m has the structure of the parameters: m["w"] has w's layout
                                                        count has not: it is replicated, a number equal on all devices

A device gets its shards of the parameters with a gradient, and None for all others: parameters of other owners or stages,
frozen ones, ties after the first, and those without a gradient, whose state does not change.

Random draws are those of one device: see `optim/draws.py`. What must be equal on several devices is compared in the
updates 1, 2, 4, 8, ...: see `ReplicaCheck`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from functools import partial
from math import prod
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fshard.errors import MismatchError, OptimizerError
from fshard.memory.state import at_once, stored
from fshard.mesh.collectives.api import pvary, replicated
from fshard.mesh.collectives.autograd import Tensors, transformed
from fshard.mesh.collectives.moves import Purpose
from fshard.mesh.layout import (
    NAMESPACE,
    Layout,
    Mesh,
    P,
    PyTree,
    Structure,
    flatten,
    paths_of,
    unflatten,
)
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.reshard.device_put import spread, unshard
from fshard.mesh.runtimes.watch import watching
from fshard.mesh.spmd.call_plan import unnamed
from fshard.mesh.spmd.check_equal import gather_all
from fshard.mesh.spmd.global_inputs import digest
from fshard.mesh.spmd.outer_autograd import run_mapped
from fshard.mesh.spmd.run import local_devices, run_on_devices
from fshard.mesh.spmd.scope import Group, entered, here, loss_scope, require
from fshard.optim.contract import ArrayOptimizer, Update, check_optimizer
from fshard.optim.draws import UpdateDraws
from fshard.optim.leaves import (
    Leaf,
    Leaves,
    assembled_state,
    check_unsharded,
    is_unsharded,
    kind_of,
    like,
    raise_undifferentiable,
    shape_of_shard,
    shards_of,
    trainable,
)
from fshard.optim.norms import cut_axes, local_arrays
from fshard.randomness import drawn_key
from fshard.source import call_site

_optree: Any = optree


def array_optimizer(opt: Any, who: str) -> Any:
    """Return an optimizer whose functions take global arrays: itself, if it is one; raise if it is no optimizer.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> from optree import tree_map
    >>> def init(params):
    ...     return {"m": tree_map(torch.zeros_like, params), "count": torch.tensor(0)}
    >>> def update(grads, state, params):
    ...     m = tree_map(lambda m, g: 0.5 * m + g, state["m"], grads)
    ...     return tree_map(torch.neg, m), {"m": m, "count": state["count"] + 1}
    >>> opt = array_optimizer(fs.optim.Optimizer(init, update), "train_step")
    >>> params = fs.device_put({"w": torch.ones(3, 2)}, fs.Layout(fs.make_mesh({"data": 2}), P(at={"data": 1})))
    >>> updates, state = opt.update(params, opt.init(params), params)
    >>> fs.unshard(updates["w"])[0], fs.typeof(state["m"]["w"]), state["count"]
    (tensor([-1., -1.]), f32[3, 2]{at:data=1}, tensor(1))
    """
    check_optimizer(opt, who)
    if isinstance(opt, ArrayOptimizer) or hasattr(opt, "gradients"):
        return opt
    return device_optimizer(opt, ReplicaCheck())


def device_optimizer(opt: Any, check: ReplicaCheck | None = None) -> ArrayOptimizer:
    """Return a pair of functions of one device's tensors as an optimizer of arrays.

    With a check it is an own one: its draws are those of one device, and what replicas have equal is compared. Without,
    its functions communicate, and their results may differ between devices, as those of a compressor.
    """
    elementwise, step = getattr(opt, "elementwise", False), getattr(opt, "step", None)

    @torch.no_grad()
    def init(params: PyTree) -> PyTree:
        key = None if check is None else drawn_key()
        return _DeviceTrees(params, elementwise).init(opt.init, key)

    def on_devices(act: Update, *, writes: bool) -> Update:
        @torch.no_grad()
        def run(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
            trees = _DeviceTrees(params, elementwise, grads)
            key = None if check is None else drawn_key()
            return trees.act(act, state, key, check, writes=writes)

        def run_or_derive(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
            if not transformed():
                return run(grads, state, params)
            if writes:
                raise_undifferentiable()
            return _differentiable_update(act, elementwise, grads, state, params)

        return run_or_derive

    return ArrayOptimizer(
        init,
        on_devices(opt.update, writes=False),
        step and at_once(on_devices(step, writes=True), writes=True),
        elementwise,
        getattr(opt, "loss_scale", None),
    )


def inner_optimizer(opt: Any, who: str) -> ArrayOptimizer:
    """Return an optimizer of global arrays to nest in another; raise if it must be the outermost."""
    check_not_partitioned(opt, who)
    inner = array_optimizer(opt, who)
    if inner.loss_scale is not None:
        raise OptimizerError(
            f"{who}: loss_scaled must not be nested, since what is around it would get gradients that are still scaled. "
            "Put one loss_scaled around all of it."
        )
    return inner


def check_not_partitioned(opt: Any, who: str) -> None:
    """Raise if an optimizer is partitioned: what is around it would work on other shards than it does."""
    if hasattr(opt, "gradients"):
        raise OptimizerError(
            f"{who}: a partitioned optimizer must not be nested, since what is around it would work on other "
            "shards than it does. Partition the outermost: fs.partition_optimizer(fs.optim.chain(...), ...)."
        )


def _differentiable_update(
    update: Update, elementwise: Any, grads: PyTree, state: PyTree, params: PyTree
) -> tuple[PyTree, PyTree]:
    """Run an update within a transform of torch.func: as one differentiable program of all devices."""
    mesh = next((x.mesh for x in flatten(params)[0] if isinstance(x, Sharded)), None)
    key = drawn_key()  # before devices part: equal on all of them

    def local_update(*trees: PyTree) -> tuple[PyTree, PyTree]:
        if mesh is None:
            return update(*trees)
        with loss_scope(mesh.axis_names, _refuse_collective):
            return update(*trees)

    def of_arrays(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        trees = _DeviceTrees(params, elementwise, grads, is_recorded=True)
        return trees.act(local_update, state, key, check=None, writes=False)

    if mesh is None:
        return of_arrays(grads, state, params)
    return _mapped_over_devices(of_arrays, mesh, (grads, state, params))


def _refuse_collective(call: str, group: Group, purpose: Purpose) -> None:
    """Raise: the derivative of a collective depends on which values of an update are replicated."""
    if call not in ("fs.pvary", "fs.axis_size", "fs.axis_index"):
        raise OptimizerError(
            f"an update of shards within a transform of torch.func must not communicate; got {call}. Compute the number "
            "before, such as fs.optim.global_norm(grads) of the arrays, and scale the gradients that the update gets."
        )


def _mapped_over_devices(function: Callable[..., PyTree], mesh: Mesh, trees: PyTree) -> PyTree:
    """Run a function of trees of arrays on each device, which has its own shards; return its results as arrays.

    Plain tensors are global values. All devices return the same tree of arrays and plain tensors. Inside, every value is
    varying: a number that meets shards has the sum of all devices' gradients. So replicated inputs become varying, and
    of results that are replicated one device's cotangent counts.
    """
    leaves, structure = flatten(trees, none_is_leaf=True)
    inputs = [index for index, x in enumerate(leaves) if isinstance(x, Sharded | Tensor)]
    arrays = [
        x if isinstance(x, Sharded) else spread(x, Layout(mesh))
        for x in (leaves[index] for index in inputs)
    ]
    results: list[tuple[list[Any], Structure]] = []  # of any device: equal but for the values

    def on_device(device: int, xs: Tensors) -> Tensors:
        values, zero = [*leaves], 0.0
        for index, array, x in zip(inputs, arrays, xs, strict=True):
            axes = unnamed(mesh.axis_names, array.spec)
            if axes and (x.is_floating_point() or x.is_complex()):
                x, anchor = pvary([x, x.new_zeros(())], axes)
                zero = zero + anchor.real.double()
            values[index] = like(leaves[index], [x])
        outputs, output_structure = flatten(
            function(*unflatten(structure, values)), none_is_leaf=True
        )
        results.append((outputs, output_structure))

        shards: list[Tensor] = []
        for leaf in outputs:
            for x in shards_of(leaf) if isinstance(leaf, _ARRAYS) else ():
                if x.is_floating_point() or x.is_complex():
                    x = x + torch.as_tensor(zero).to(x.dtype)  # all devices go back to all inputs
                    spec = leaf.spec if isinstance(leaf, Sharded) else P()
                    axes = unnamed(mesh.axis_names, spec)
                    x = replicated(x, axes) if axes else x
                shards.append(x)
        return tuple(shards)

    columns = iter(run_mapped(mesh, on_device, [x.shards for x in arrays]))
    outputs, output_structure = results[-1]
    for index, x in enumerate(outputs):
        if isinstance(x, Sharded):
            outputs[index] = like(x, next(columns))
        elif isinstance(x, Tensor):
            outputs[index] = unshard(Sharded(tuple(x.shape), Layout(mesh), next(columns)))
    return unflatten(output_structure, outputs)


_ARRAYS = (Sharded, Tensor)


class _DeviceTrees:
    """Parameters and gradients as the trees of the local devices: None for what a device does not update.

    `is_recorded`: whether something takes derivatives, so that devices get their shards themselves; else detached ones.
    """

    def __init__(
        self,
        params: PyTree,
        elementwise: Any,
        grads: PyTree = None,
        *,
        is_recorded: bool = False,
    ) -> None:
        self.params = at = Leaves.of(params)
        self.is_recorded = is_recorded
        if elementwise is not True:
            check_unsharded("A pair of plain functions without elementwise=True", at)
        self.grads = at.leaves if grads is None else at.gradients(grads)
        self.updated = [
            i
            for i, first in enumerate(at.firsts)
            if i == first and trainable(at.leaves[i]) and self.grads[i] is not None
        ]
        self.mesh = next((leaf.mesh for leaf in at.leaves if isinstance(leaf, Sharded)), None)
        self.devices = local_devices(self.mesh) if self.mesh else (0,)

        def is_held(leaf: Leaf, device: int) -> bool:
            return not isinstance(leaf, Sharded) or leaf.layout.has_any(device)

        self.held = [
            [i for i in self.updated if is_held(at.leaves[i], device)] for device in self.devices
        ]

    def tree(self, leaves: dict[int, Any]) -> PyTree:
        """Return a tree of some leaves, by index: None for the others."""
        return self.params.rebuild([leaves.get(i) for i in range(len(self.params.leaves))])

    def local(self, leaves: list[Leaf], index: int, draws: UpdateDraws | None = None) -> PyTree:
        """Return the tree of a local device, whose random draws are then like those leaves."""
        shards = {i: _shard(leaves[i], index) for i in self.held[index]}
        if not self.is_recorded:
            shards = {i: x.detach() if isinstance(x, Tensor) else x for i, x in shards.items()}
        if draws is not None:
            for i, shard in shards.items():
                draws.follow(shard, i)
        return self.tree(shards)

    def init(self, init: Callable[[PyTree], PyTree], key: int | None) -> PyTree:
        """Run an init on each device, and assemble the state. `key`: of its random draws, as in `act`."""
        at, results = self.params, list[PyTree]()
        for index, device in enumerate(self.devices):
            if key is None:
                results.append(init(self.local(at.leaves, index)))
                continue
            draws = UpdateDraws(at, self.updated, device, key)
            params = self.local(at.leaves, index, draws)
            with draws.seeded():
                results.append(init(params))
        if elsewhere := {
            i: shape_of_shard(at.leaves[i]) for i in {*self.updated}.difference(*self.held)
        }:
            results.append(init(self.tree(elsewhere)))  # the state of other processes: its shapes
        first, *others = states = [_State.of(result, at.structure) for result in results]
        if any(
            (state.structure, state.is_like) != (first.structure, first.is_like) for state in others
        ):
            raise OptimizerError(
                "init must make the same state on all devices, but for subtrees with the structure of the parameters. Give "
                "None where a parameter is None: optree.tree_map(f, params)."
            )
        is_cut = any(isinstance(leaf, Sharded) and cut_axes(leaf.layout) for leaf in at.leaves)
        if is_cut and any(isinstance(x, Tensor) and x.ndim for x in first.single()):
            raise OptimizerError(
                "state of divided parameters must be numbers, but for subtrees with the structure of the parameters; got "
                "other tensors. Make such subtrees: {'m': optree.tree_map(torch.zeros_like, params)}."
            )

        def assembled(*trees: list[Any]) -> PyTree:
            return at.rebuild(
                [stored(_assembled(param, x)) for param, *x in zip(at.leaves, *trees, strict=True)]
            )

        return first.mapped(assembled, *[state.entries for state in states])

    def act(
        self,
        act: Update,
        state: PyTree,
        key: int | None,
        check: ReplicaCheck | None,
        *,
        writes: bool,
    ) -> tuple[PyTree, PyTree]:
        """Run an update, or a step (`writes`), on each device; return arrays.

        `key`: of its random draws, the same on all devices. Without it the function draws as it likes.
        """
        at, before = self.params, _State.of(state, self.params.structure)

        def on_device(index: int) -> tuple[list[Any], list[Any]]:
            def arrays(tree: PyTree) -> list[Leaf]:
                """Return a local tree as arrays; shards of those that the device does not hold are empty."""
                shards, leaves = at.beside(tree, "the tree of global_norm"), at.leaves
                local = {
                    i: _shard(leaves[i], index) if shards[i] is None else shards[i]
                    for i in self.updated
                }
                return [like(leaves[i], [shard]) for i, shard in local.items()]

            draws = None
            if key is not None:
                draws = UpdateDraws(at, self.updated, self.devices[index], key)
            local_state = before.mapped(
                lambda leaves: self.local(leaves, index, draws), before.entries
            )
            grads, params = (
                self.local(self.grads, index, draws),
                self.local(at.leaves, index, draws),
            )

            def update() -> tuple[PyTree, PyTree]:
                local_arrays.set(arrays)
                if draws is None:
                    return act(grads, local_state, params)
                with draws.seeded(), sums_over_shards(at, self.updated):
                    return act(grads, local_state, params)

            result, after = copy_context().run(update)
            entries = zip(before.structure.flatten_up_to(after), before.is_like, strict=True)
            updates = at.beside(result, "updates")
            states = [at.beside(x, "state") if is_like else x for x, is_like in entries]
            if self.mesh is not None and check is not None and draws is not None:
                results = partial(self.equal_results, before, updates, states)
                check.compare(self.mesh, self.devices[index], results, draws)
            return updates, states

        if self.mesh is None:
            results = [on_device(0)]
        else:
            results = run_on_devices(
                self.mesh, lambda device: on_device(self.devices.index(device))
            )
        updates, states = zip(*results, strict=True)

        def joined(leaves: list[Leaf], *trees: list[Any]) -> list[Leaf]:
            return [_joined(leaf, shards) for leaf, *shards in zip(leaves, *trees, strict=True)]

        after = joined(
            [leaf if i in self.updated else None for i, leaf in enumerate(at.leaves)], *updates
        )
        pairs = enumerate(at.firsts)
        leaves = [
            after[first] if first in self.updated else at.leaves[i] if writes else None
            for i, first in pairs
        ]
        state = before._replace(entries=[*states[0]]).mapped(
            lambda leaves, *trees: at.rebuild(joined(leaves, *trees)), before.entries, *states
        )
        return at.rebuild(leaves), state

    def equal_results(
        self, before: _State, updates: list[Any], states: list[Any]
    ) -> list[EqualResult]:
        """Return the results of a device that are equal on others: of replicas, and numbers of the state."""
        at, results = self.params, list[EqualResult]()
        for i in self.updated:
            results.append(EqualResult(f"update{at.paths[i]}", updates[i], at.leaves[i].layout))
        columns = zip(
            paths_of(before.structure), before.entries, before.is_like, states, strict=True
        )
        for path, entry, is_like, state in columns:
            if not is_like:
                results.append(EqualResult(f"state{path}", state, None))
                continue
            for i in self.updated:
                if isinstance(entry[i], Sharded):
                    name = f"state{path}{at.paths[i]}"
                    results.append(EqualResult(name, state[i], entry[i].layout))
        return results


# -- checks of own updates --------------------------------------------------------------------------------------------


def sums_over_shards(params: Leaves, updated: Sequence[int]) -> AbstractContextManager[None]:
    """Return the context of an own update on a device: sums over replicas raise, as they count parameters several times."""
    scope = here()
    if scope is None:
        return nullcontext()

    def validate_sum(call: str, group: Group, purpose: Purpose) -> None:
        if call not in ("fs.psum", "fs.psum_scatter"):
            return
        for i in updated:
            spec, sizes = params.leaves[i].spec, params.leaves[i].mesh.shape
            replicated = [axis for axis in group.axes if axis not in spec.sharded_axes]
            copies = prod(sizes.get(axis, 1) for axis in replicated)
            if copies > 1:
                raise OptimizerError(
                    f"{call} in an update must be over axes that shard all parameters; got {', '.join(replicated)}, along "
                    f"which params{params.paths[i]} is replicated, so that it would count {copies} times. "
                    "A norm that is right in every stage is fs.optim.global_norm(grads)."
                )

    return entered(scope.replaced(notice=validate_sum))


class EqualResult(NamedTuple):
    """A result of an update that is equal on the devices that hold one shard of a layout; without one, on all."""

    name: str
    value: Any
    layout: Layout | None


class ReplicaCheck:
    """Compare, between devices, what an own update must return equal: in its calls 1, 2, 4, 8, ...

    Differences often begin after the first step. In these calls the devices gather a row of hashes; those of large
    tensors are of samples. With FSHARD_CHECK=1 they do so in every call.
    """

    def __init__(self) -> None:
        self._calls = dict[tuple[Mesh, int], int]()

    def compare(
        self,
        mesh: Mesh,
        device: int,
        results_of_device: Callable[[], list[EqualResult]],
        draws: UpdateDraws,
    ) -> None:
        """Raise on all devices unless their results are equal, and the keys of their draws."""
        calls = self._calls[mesh, device] = self._calls.get((mesh, device), 0) + 1
        is_due = calls & (calls - 1) == 0 or watching()
        if mesh.size == 1 or mesh.runtime == "abstract" or not is_due:
            return
        group = require("an update").group(mesh.axis_names, "an update")
        results = results_of_device()
        hashes = [int(draws.has_drawn), draws.key >> 1, *[_hash(x.value) for x in results]]
        rows = gather_all(torch.tensor(hashes), group, call_site()).tolist()
        if any(has_drawn for has_drawn, *_ in rows) and len({row[1] for row in rows}) > 1:
            raise MismatchError(
                "the random state must be the same on all devices, for draws in an update. Give all processes one seed: "
                "torch.manual_seed(0), not that of a rank."
            )
        for column, result in enumerate(results, 2):
            values = dict[tuple[int, ...], int]()
            for member, row in enumerate(rows):
                place, value = _place(result.layout, mesh, member), row[column]
                if place is None or value == _NOTHING:
                    continue
                if values.setdefault(place, value) != value:
                    raise OptimizerError(
                        f"{result.name} must be equal on all devices that have it; got another value on device "
                        f"{mesh.coordinates(member)}. An update sees this device's shards: make a number from those of all, by "
                        "fs.optim.global_norm(grads) or fs.psum(x, axis) over the axes that shard the parameters; or leave "
                        "out elementwise=True, for owners."
                    )


_NOTHING = 0
"""The hash of a result that a device does not have, which is not compared."""


def _place(layout: Layout | None, mesh: Mesh, device: int) -> tuple[int, ...] | None:
    """Return the coordinates of a device along the axes that shard an array; None if it holds none of it."""
    if layout is None:
        return ()
    if not layout.has_any(device):
        return None
    coordinates = mesh.coordinates(device)
    return tuple([coordinates[axis] for axis in layout.spec.sharded_axes])


def _hash(x: Any) -> int:
    """Return a hash of 63 bits: of a tensor, large ones at samples of 64 KiB, or of a value's text."""
    if x is None:
        return _NOTHING
    if isinstance(x, Tensor):
        return digest(x.reshape(-1)[:: 1 + x.nbytes // (1 << 16)])
    return digest(torch.tensor([*repr(x).encode()], dtype=torch.uint8))


# -- shards of a leaf -------------------------------------------------------------------------------------------------


def _shard(leaf: Leaf, index: int) -> Any:
    return leaf.shards[index] if isinstance(leaf, Sharded) else leaf


def _assembled(param: Leaf, shards: Sequence[Any]) -> Leaf:
    """Assemble the state of a parameter from that of each device; the last one may be without values."""
    example = next((x for x in shards if x is not None), None)
    if example is None or not isinstance(param, Sharded):
        return example
    leaf = assembled_state(param, shards)
    if (
        example.ndim
        and leaf.layout is not param.layout
        and param.spec.split_axes
        and not is_unsharded(param)
    ):
        raise OptimizerError(
            f"state of an elementwise optimizer must have the shape of its parameter's shard, or be a number; got "
            f"{tuple(example.shape)} beside {kind_of(param)}. Leave out elementwise=True: an owner then has all of it."
        )
    return leaf


def _joined(leaf: Leaf, results: Sequence[Any]) -> Leaf:
    """Return a leaf with the shards that devices computed; other shards are unchanged."""
    example = next((x for x in results if x is not None), None)
    if example is None:
        return leaf
    before = leaf.shards if isinstance(leaf, Sharded) else (leaf,)
    shards = [shard if x is None else x for x, shard in zip(results, before, strict=False)]
    if leaf is None or any(x.shape != shard.shape for x, shard in zip(shards, before, strict=True)):
        raise OptimizerError(
            f"updates and state of a parameter must keep their shape; got {tuple(example.shape)}, and it was "
            f"{None if leaf is None else tuple(before[0].shape)}."
        )
    return like(leaf, [x.to(example.dtype) for x in shards])


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

        subtrees, structure = _optree.tree_flatten(
            state, is_leaf=is_like, none_is_leaf=True, namespace=NAMESPACE
        )
        flags = [is_like(x) for x in subtrees]
        entries = [
            flatten(x, none_is_leaf=True)[0] if like else x
            for x, like in zip(subtrees, flags, strict=True)
        ]
        return _State(structure, entries, flags)

    def single(self) -> list[Any]:
        """Return the entries that are one leaf."""
        return [x for x, is_like in zip(self.entries, self.is_like, strict=True) if not is_like]

    def mapped(self, f: Callable[..., PyTree], *columns: Sequence[Any]) -> PyTree:
        """Return the state with f of the leaves of each subtree, and of those beside it in other columns of entries."""
        rows = zip(self.is_like, self.entries, *columns, strict=True)
        return unflatten(
            self.structure, [f(*row) if is_like else entry for is_like, entry, *row in rows]
        )
