"""Pairs of functions on one device's tensors, as optimizers of arrays: run on each device.

    on_arrays(opt)     an own optimizer: its draws are those of one device (`draws.py`), and what
                       replicas must have equal is compared (`replicas.py`)
    device_optimizer   functions that communicate themselves, as those of a compressor

`trees.py` makes the trees of the devices and puts their results together.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fshard.memory.state import Update, at_once
from fshard.mesh.collectives.autograd import transformed
from fshard.mesh.layout import PyTree
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.spmd.run import run_on_devices
from fshard.optim.contract import Optimizer, check_optimizer
from fshard.optim.leaves import raise_undifferentiable
from fshard.optim.norms import local_arrays
from fshard.optim.per_device.differentiated import differentiable_on_devices
from fshard.optim.per_device.draws import UpdateDraws
from fshard.optim.per_device.replicas import EqualResult, ReplicaCheck, sums_over_shards
from fshard.optim.per_device.states import StateEntries
from fshard.optim.per_device.trees import DeviceTrees
from fshard.optim.sharding import Sharding
from fshard.randomness import drawn_key


def on_arrays(opt: Any, caller: str) -> Optimizer:
    """Return an optimizer whose functions take arrays: itself, if they do; raise if it is none.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> from optree import tree_map
    >>> def init(params):
    ...     return {"m": tree_map(torch.zeros_like, params), "count": torch.tensor(0)}
    >>> def update(grads, state, params):
    ...     m = tree_map(lambda m, g: 0.5 * m + g, state["m"], grads)
    ...     return tree_map(torch.neg, m), {"m": m, "count": state["count"] + 1}
    >>> opt = on_arrays(fs.optim.Optimizer(init, update), "train_step")
    >>> layout = fs.Layout(fs.make_mesh({"data": 2}), P(at={"data": 1}))
    >>> params = fs.device_put({"w": torch.ones(3, 2)}, layout)
    >>> updates, state = opt.update(params, opt.init(params), params)
    >>> fs.unshard(updates["w"])[0], fs.typeof(state["m"]["w"]), state["count"]
    (tensor([-1., -1.]), f32[3, 2]{at:data=1}, tensor(1))
    """
    if not isinstance(opt, Optimizer):
        check_optimizer(opt, caller)
        opt = Optimizer(opt.init, opt.update)  # a pair of another library
    if opt.takes == "arrays":
        return opt
    return device_optimizer(opt, ReplicaCheck())


def device_optimizer(opt: Optimizer, check: ReplicaCheck | None = None) -> Optimizer:
    """Return a pair of functions of one device's tensors as an optimizer of arrays.

    With a check it is an own one: its draws are those of one device, and what replicas have equal
    is
    compared. Without, its functions communicate, and their results may differ between devices, as
    those of a compressor.
    """

    @torch.no_grad()
    def init(params: PyTree) -> PyTree:
        key = None if check is None else drawn_key()
        return init_on_devices(DeviceTrees(params, opt.sharding), opt.init, key)

    @torch.no_grad()
    def run_on_arrays(
        act: Update, writes: bool, grads: PyTree, state: PyTree, params: PyTree
    ) -> tuple[PyTree, PyTree]:
        trees = DeviceTrees(params, opt.sharding, grads)
        before = StateEntries.of(state, trees.params.structure)
        key = None if check is None else drawn_key()
        return UpdateOnDevices(trees, act, before, key, check).run(writes=writes)

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        if transformed():
            return _differentiable_update(opt.update, opt.sharding, (grads, state, params))
        return run_on_arrays(opt.update, False, grads, state, params)

    def step(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        if transformed():
            raise_undifferentiable()
        assert opt.step is not None
        return run_on_arrays(opt.step, True, grads, state, params)

    step_at_once: Update | None = None
    if opt.step is not None:
        step_at_once = at_once(step, writes=True)
    return Optimizer(init, update, step_at_once, opt.sharding, opt.loss_scale, takes="arrays")


def _differentiable_update(
    update: Update, sharding: Sharding, trees: tuple[PyTree, PyTree, PyTree]
) -> tuple[PyTree, PyTree]:
    """Run an update within a transform of torch.func, as one program of all devices."""
    key = drawn_key()  # before devices part: equal on all of them

    def on_arrays_of_device(
        local_update: Update, grads: PyTree, state: PyTree, params: PyTree
    ) -> tuple[PyTree, PyTree]:
        trees = DeviceTrees(params, sharding, grads, is_recorded=True)
        before = StateEntries.of(state, trees.params.structure)
        return UpdateOnDevices(trees, local_update, before, key, check=None).run(writes=False)

    return differentiable_on_devices(on_arrays_of_device, update, trees)


# -- init ----------------------------------------------------------------------------------------


def init_on_devices(
    trees: DeviceTrees, init: Callable[[PyTree], PyTree], key: int | None
) -> PyTree:
    """Run an init on each local device, and assemble the state.

    Args:
        trees: of the devices.
        init: of one device's tensors.
        key: of its random draws, the same on all devices. Without, the function draws as it likes.
    """
    leaves = trees.params.leaves
    results: list[PyTree] = []
    for index, device in enumerate(trees.devices):
        if key is None:
            results.append(init(trees.local(leaves, index)))
            continue
        draws = UpdateDraws(trees.params, trees.updated, device, key)
        params = trees.local(leaves, index, draws)
        with draws.seeded():
            results.append(init(params))
    elsewhere = trees.elsewhere()
    if elsewhere is not None:
        results.append(init(elsewhere))  # the state of other processes: its shapes
    structure = trees.params.structure
    return trees.assembled([StateEntries.of(result, structure) for result in results])


# -- update --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UpdateOnDevices:
    """An update, or a step, of one device's tensors, to be run on each local device.

    Args:
        trees: parameters and gradients of the devices.
        act: the update or step.
        state: before it.
        key: of its random draws, the same on all devices. Without, the function draws as it likes.
        check: compares what replicas must have equal.
    """

    trees: DeviceTrees
    act: Update
    state: StateEntries
    key: int | None
    check: ReplicaCheck | None

    def run(self, *, writes: bool) -> tuple[PyTree, PyTree]:
        """Run it.

        Return arrays: updates, or of a step that `writes` parameters, and the next state.
        """
        trees, mesh = self.trees, self.trees.mesh
        if mesh is None:
            results = [self._on_device(0)]
        else:
            results = run_on_devices(
                mesh, lambda device: self._on_device(trees.devices.index(device))
            )
        updates, states = zip(*results, strict=True)
        return (
            trees.joined_results(updates, writes=writes),
            trees.joined_state(self.state, states),
        )

    def _on_device(self, index: int) -> tuple[list[Any], list[Any]]:
        """Run it on one local device; return the leaves of its updates, and the state's entries."""
        trees, draws = self.trees, None
        params = trees.params
        if self.key is not None:
            draws = UpdateDraws(params, trees.updated, trees.devices[index], self.key)
        state = trees.local_state(self.state, index, draws)
        grads = trees.local(trees.grads, index, draws)
        local_params = trees.local(params.leaves, index, draws)

        def act() -> tuple[PyTree, PyTree]:
            local_arrays.set(partial(trees.as_arrays, index=index))
            if draws is None:
                return self.act(grads, state, local_params)
            with draws.seeded(), sums_over_shards(params, trees.updated):
                return self.act(grads, state, local_params)

        # In a copy of the context, where `global_norm` finds the arrays of this device alone.
        result, after = copy_context().run(act)
        updates = params.beside(result, "updates")
        states: list[Any] = []
        for entry, is_like in zip(self.state.entries_of(after), self.state.is_like, strict=True):
            states.append(params.beside(entry, "state") if is_like else entry)

        if trees.mesh is not None and self.check is not None and draws is not None:
            results = partial(self._equal_results, updates, states)
            self.check.compare(trees.mesh, trees.devices[index], results, draws)
        return updates, states

    def _equal_results(self, updates: list[Any], states: list[Any]) -> list[EqualResult]:
        """Return what other devices have equal: results of replicas, and numbers of the state."""
        params = self.trees.params
        updated = self.trees.updated
        results: list[EqualResult] = []
        for i in updated:
            name = f"update{params.paths[i]}"
            results.append(EqualResult(name, updates[i], params.leaves[i].layout))
        before = self.state
        rows = zip(before.paths, before.entries, before.is_like, states, strict=True)
        for path, entry, is_like, after in rows:
            if not is_like:
                results.append(EqualResult(f"state{path}", after, None))
                continue
            for i in updated:
                if isinstance(entry[i], Sharded):
                    name = f"state{path}{params.paths[i]}"
                    results.append(EqualResult(name, after[i], entry[i].layout))
        return results
