"""`offloaded`: an optimizer whose state is in host memory or on disk, updated on device or host.

A step on the host copies gradients and parameters to buffers there, and the parameters back into
their memory:

    from the device    gradients, unless they are on the host since they were reduced
                       parameters, unless their masters are on the host
    to the device      parameters with a gradient
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from fshard.errors import OptimizerError
from fshard.memory.kinds import claim, purpose
from fshard.memory.state import (
    Offload,
    Update,
    UpdateOn,
    at_once,
    empty_for,
    home_of,
    moved,
    offloading,
    shards_and_devices,
    written_back,
)
from fshard.mesh.collectives.autograd import transformed
from fshard.mesh.layout import Memory, Mesh, PyTree, flatten
from fshard.mesh.layout.counting import Purpose
from fshard.mesh.layout.sharded import Sharded
from fshard.optim.contract import Optimizer, step_of
from fshard.optim.leaves import (
    Leaf,
    Leaves,
    differentiable,
    firsts_of,
    raise_undifferentiable,
    shards_of,
    trainable,
    undifferentiable,
)


@dataclass(frozen=True)
class StateMemory:
    """The memories of an optimizer's state: between updates, and in them.

    Args:
        state: the memory between updates.
        update_on: the memory of the update.
    """

    state: Memory = "device"
    update_on: UpdateOn = "device"

    def __post_init__(self) -> None:
        if self.state not in get_args(Memory) or self.update_on not in get_args(UpdateOn):
            raise OptimizerError(
                'partition_optimizer: state_memory must be "device", "host" or "disk", and '
                f'update_on "device" or "host"; got {self.state!r} and {self.update_on!r}.'
            )
        if self.state == "device" and self.update_on == "host":
            raise OptimizerError(
                "partition_optimizer: state that is updated on the host must be there or on disk; "
                'got state_memory="device". Write state_memory="host".'
            )


def offloaded(opt: Optimizer, mesh: Mesh, memory: StateMemory) -> Optimizer:
    """Return an optimizer of arrays whose state is in a memory, and updated in one."""
    offload = Offload(mesh, memory.state, memory.update_on)
    is_all_on_device = memory == StateMemory()

    @torch.no_grad()
    def init(params: PyTree) -> PyTree:
        with offloading(offload):
            return opt.init(params)

    def with_state_moved(act: Update, *, in_place: bool, writes: bool) -> Update:
        @differentiable
        def run(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
            if transformed():
                if not is_all_on_device:
                    raise_undifferentiable()
                return act(grads, state, params)
            is_away = memory.state != memory.update_on or _has_leaves_away(params, state, offload)
            with offloading(offload if is_away else None):
                result, after = act(grads, state, params)
            if not writes:
                result = written_back(result, params, offload, in_place=False)
            if is_away or memory.state != "device":
                after = written_back(after, state, offload, in_place=in_place)
            return result, after

        return run

    # State on disk is updated in place: a copy would need as much disk again.
    is_on_disk = memory.state == "disk"
    update = at_once(opt.update, in_place=is_on_disk)
    update = with_state_moved(update, in_place=is_on_disk, writes=False)
    step = with_state_moved(step_of(opt), in_place=True, writes=True)
    if memory.update_on == "host":
        update = _update_on_host(update, mesh)
        step = HostStep(step, mesh).run
    return Optimizer(init, update, step, opt.sharding, opt.loss_scale, takes="arrays")


def _has_leaves_away(params: PyTree, state: PyTree, offload: Offload) -> bool:
    """Return True if parameters or state must be moved to the update."""
    arrays = [leaf for leaf in flatten((params, state))[0] if isinstance(leaf, Sharded)]
    memories: set[Memory] = {array.layout.memory for array in arrays}
    return any(map(offload.moves, memories))


# -- updates on the host -------------------------------------------------------------------------


def _update_on_host(update: Update, mesh: Mesh) -> Update:
    """Return an update of copies on the host, whose results are in the parameters' memory."""

    @undifferentiable
    def run(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        result, state = update(_on_host(grads, mesh), state, _on_host(params, mesh))

        def in_memory_of(x: Leaf, param: Leaf) -> Leaf:
            memory = param.layout.memory if isinstance(param, Sharded) else "device"
            if x is None or memory == "host":
                return x
            return moved([x], mesh, "host", memory)[0]

        return Leaves.of(result).mapped(in_memory_of, Leaves.of(params).leaves), state

    return run


def _on_host(tree: PyTree, mesh: Mesh) -> PyTree:
    """Return copies of a tree's trainable leaves on the host; ties stay ties."""
    tree_leaves = Leaves.of(tree)
    leaves, firsts = tree_leaves.leaves, tree_leaves.firsts
    indices: list[int] = []
    for i in sorted({*firsts}):
        if trainable(leaves[i]) and not _is_on_host(leaves[i]):
            indices.append(i)
    arrays = moved([leaves[i] for i in indices], mesh, "device", "host")
    copies = dict(zip(indices, arrays, strict=True))
    return tree_leaves.rebuild([copies.get(first, leaves[first]) for first in firsts])


class HostStep:
    """A step on the host, in buffers that are made once.

    Args:
        step: of arrays on the host.
        mesh: the devices.
    """

    def __init__(self, step: Update, mesh: Mesh) -> None:
        self._step = step
        self._mesh = mesh
        self._buffers: dict[tuple[Purpose, int], Leaf] = {}

    @undifferentiable
    def run(self, grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        """Take the step; return parameters in their memory, and the next state."""
        leaves = Leaves.of(params)
        gradients = leaves.beside(grads, "grads")
        trained = [i for i in sorted({*leaves.firsts}) if trainable(leaves.leaves[i])]
        stored = {i: leaves.leaves[i] for i in trained if _is_on_host(leaves.leaves[i])}

        on_host = self._params_on_host(leaves.leaves, trained, stored, state)
        grads_on_host = self._grads_on_host(gradients)
        params_on_host = [on_host.get(first, leaves.leaves[first]) for first in leaves.firsts]
        result, state = self._step(
            leaves.rebuild(grads_on_host), state, leaves.rebuild(params_on_host)
        )

        after = leaves.beside(result, "the optimizer's results")
        updated = [i for i in trained if gradients[i] is not None and i not in stored]
        written = self._to_device(leaves.leaves, after, updated)
        written |= {i: after[i] for i in stored}
        results = [written.get(first, leaves.leaves[first]) for first in leaves.firsts]
        return leaves.rebuild(results), state

    def _params_on_host(
        self, params: list[Leaf], trained: list[int], stored: dict[int, Leaf], state: PyTree
    ) -> dict[int, Leaf]:
        """Return the trained parameters on the host, by index; those `stored` there as they are."""
        masters = _masters_on_host(state, self._mesh)
        on_device = [i for i in trained if i not in stored]
        with_masters = [i for i in on_device if i in masters]
        sent = [i for i in on_device if i not in masters]
        on_host = dict(stored)

        # The rounded master is the parameter: a copy on the host in place of a transfer.
        buffers = self._buffers_for("parameters", params, with_masters)
        for i, leaf in zip(with_masters, buffers, strict=True):
            for x, master in zip(shards_of(leaf), shards_of(masters[i]), strict=True):
                x.copy_(master)
            on_host[i] = leaf
        return on_host | self._sent("parameters", params, sent)

    def _grads_on_host(self, gradients: list[Leaf]) -> list[Leaf]:
        """Return the gradients on the host."""
        firsts = firsts_of(gradients)
        on_host: dict[int, Leaf] = {}
        sent: list[int] = []
        for i in sorted({*firsts}):
            if _is_on_host(gradients[i]):
                on_host[i] = gradients[i]
            elif gradients[i] is not None:
                sent.append(i)
        on_host |= self._sent("gradients", gradients, sent)
        return [on_host.get(first) for first in firsts]

    def _to_device(
        self, params: list[Leaf], after: list[Leaf], updated: list[int]
    ) -> dict[int, Leaf]:
        """Return updated parameters on the device, by index: in the memory of the given ones."""
        into = [params[i] if params[i].dtype == after[i].dtype else None for i in updated]
        results = moved([after[i] for i in updated], self._mesh, "host", "device", into)
        return dict(zip(updated, results, strict=True))

    def _sent(self, name: Purpose, leaves: list[Leaf], indices: list[int]) -> dict[int, Leaf]:
        """Return copies of leaves in buffers on the host, by index."""
        buffers = self._buffers_for(name, leaves, indices)
        copies = moved([leaves[i] for i in indices], self._mesh, "device", "host", buffers)
        return dict(zip(indices, copies, strict=True))

    def _buffers_for(self, name: Purpose, leaves: list[Leaf], indices: Sequence[int]) -> list[Leaf]:
        """Return buffers on the host for leaves: those of the last step, if they still fit."""
        for i in indices:
            with purpose(name):
                buffer = self._buffers.get((name, i))
                self._buffers[name, i] = _buffer_like(leaves[i], buffer, self._mesh)
        buffers = [self._buffers[name, i] for i in indices]
        claim(buffers, name)  # those of an earlier step
        return buffers


def _is_on_host(leaf: Leaf) -> bool:
    return isinstance(leaf, Sharded) and leaf.layout.memory == "host"


def _buffer_like(leaf: Leaf, buffer: Leaf, mesh: Mesh) -> Leaf:
    """Return a buffer for a leaf on the host: the given one, if it fits."""
    layout = leaf.layout.with_memory("host") if isinstance(leaf, Sharded) else None
    if buffer is not None and (buffer.shape, buffer.dtype) == (leaf.shape, leaf.dtype):
        before = buffer.layout if isinstance(buffer, Sharded) else None
        if before == layout:
            return buffer
    shards: list[Tensor] = []
    for shard, device in shards_and_devices(leaf):
        shards.append(empty_for(mesh, device, "host", shard.shape, shard.dtype))
    if layout is None:
        return shards[0]
    return Sharded(leaf.shape, layout, tuple(shards))


def _masters_on_host(state: PyTree, mesh: Mesh) -> dict[int, Leaf]:
    """Return the masters on the host in a state of `with_master_weights`, or around it."""
    masters: dict[int, Leaf] = {}
    entries = [state]
    for entry in entries:  # which grows
        if isinstance(entry, dict) and {"master", "inner"} <= entry.keys():
            leaves = enumerate(flatten(entry["master"], none_is_leaf=True)[0])
            masters |= {i: leaf for i, leaf in leaves if home_of(leaf, mesh) == "host"}
        if isinstance(entry, dict):
            entries += entry.values()
        elif isinstance(entry, tuple):
            entries += entry
    return masters
