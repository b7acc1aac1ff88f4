"""`offloaded`: an optimizer whose state is in host memory or on disk, and is updated on the device or on the host.

A step on the host copies gradients and parameters to buffers there, and the parameters back into their memory:

    from the device    gradients, unless they are on the host since they were reduced
                       parameters, unless their masters are on the host
    to the device      parameters with a gradient
"""

from __future__ import annotations

from typing import Any, get_args

import torch

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
from fshard.optim.contract import ArrayOptimizer, Optimizer, step_of
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


def offloaded(opt: Optimizer, mesh: Mesh, memory: Memory, update_on: UpdateOn) -> Optimizer:
    """Return an optimizer of arrays whose state is stored in a memory, and updated on the device or the host."""
    _validate(memory, update_on)
    offload = Offload(mesh, memory, update_on)

    @torch.no_grad()
    def init(params: PyTree) -> PyTree:
        with offloading(offload):
            return opt.init(params)

    def stored(act: Update, *, in_place: bool, writes: bool) -> Update:
        @differentiable
        def run(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
            if transformed() and memory == update_on == "device":
                return act(grads, state, params)
            if transformed():
                raise_undifferentiable()
            is_away = memory != update_on or any(
                isinstance(x, Sharded) and offload.moves(x.layout.memory)
                for x in flatten((params, state))[0]
            )
            with offloading(offload if is_away else None):
                result, after = act(grads, state, params)
            if not writes:
                result = written_back(result, params, offload, in_place=False)
            if is_away or memory != "device":
                after = written_back(after, state, offload, in_place=in_place)
            return result, after

        return run

    in_place = memory == "disk"
    update = stored(at_once(opt.update, in_place=in_place), in_place=in_place, writes=False)
    step = stored(step_of(opt), in_place=True, writes=True)
    if update_on == "host":
        update, step = _updating_on_host(update, mesh), _stepping_on_host(step, mesh)
    return ArrayOptimizer(init, update, step, opt.elementwise, opt.loss_scale)


def _validate(memory: Any, update_on: Any) -> None:
    if memory not in get_args(Memory) or update_on not in get_args(UpdateOn):
        raise OptimizerError(
            'partition_optimizer: state_memory must be "device", "host" or "disk", and update_on "device" or "host"; got '
            f"{memory!r} and {update_on!r}."
        )
    if memory == "device" and update_on == "host":
        raise OptimizerError(
            'partition_optimizer: state that is updated on the host must be there or on disk; got state_memory="device". '
            'Write state_memory="host".'
        )


def _on_host(tree: PyTree, mesh: Mesh) -> PyTree:
    """Return copies of a tree's trainable leaves on the host; ties stay ties."""
    at = Leaves.of(tree)
    indices = [
        i for i in sorted({*at.firsts}) if trainable(at.leaves[i]) and not _is_on_host(at.leaves[i])
    ]
    copies = dict(
        zip(indices, moved([at.leaves[i] for i in indices], mesh, "device", "host"), strict=True)
    )
    return at.rebuild([copies.get(first, at.leaves[first]) for first in at.firsts])


def _updating_on_host(update: Update, mesh: Mesh) -> Update:
    @undifferentiable
    def run(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        result, state = update(_on_host(grads, mesh), state, _on_host(params, mesh))

        def beside(x: Leaf, param: Leaf) -> Leaf:
            memory = param.layout.memory if isinstance(param, Sharded) else "device"
            return x if x is None or memory == "host" else moved([x], mesh, "host", memory)[0]

        return Leaves.of(result).mapped(beside, Leaves.of(params).leaves), state

    return run


def _stepping_on_host(step: Update, mesh: Mesh) -> Update:
    """Return a step on the host, in buffers that are made once."""
    buffers: dict[tuple[str, int], Leaf] = {}

    def in_buffers(name: Purpose, leaves: list[Leaf], indices: list[int]) -> list[Leaf]:
        for i in indices:
            with purpose(name):
                buffers[name, i] = _buffer_like(leaves[i], buffers.get((name, i)), mesh)
        claim([buffers[name, i] for i in indices], name)  # those of an earlier step
        return [buffers[name, i] for i in indices]

    def sent(name: Purpose, leaves: list[Leaf], indices: list[int]) -> dict[int, Leaf]:
        into = in_buffers(name, leaves, indices)
        return dict(
            zip(
                indices,
                moved([leaves[i] for i in indices], mesh, "device", "host", into),
                strict=True,
            )
        )

    @undifferentiable
    def run(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        at = Leaves.of(params)
        gradients, masters = at.beside(grads, "grads"), _masters_on_host(state)
        firsts, trained = (
            firsts_of(gradients),
            [i for i in sorted({*at.firsts}) if trainable(at.leaves[i])],
        )
        known = [i for i in trained if i in masters and not _is_on_host(at.leaves[i])]
        on_host = dict(zip(known, in_buffers("parameters", at.leaves, known), strict=True))
        for i, leaf in on_host.items():
            for x, master in zip(shards_of(leaf), shards_of(masters[i]), strict=True):
                x.copy_(master)
        stored = {i: at.leaves[i] for i in trained if _is_on_host(at.leaves[i])}
        on_host |= (
            sent(
                "parameters",
                at.leaves,
                [i for i in trained if i not in masters and i not in stored],
            )
            | stored
        )
        near = {i: x for i, x in enumerate(gradients) if _is_on_host(x)}
        of_grads = near | sent(
            "gradients",
            gradients,
            [i for i in sorted({*firsts}) if gradients[i] is not None and i not in near],
        )
        result, state = step(
            at.rebuild([of_grads.get(first) for first in firsts]),
            state,
            at.rebuild([on_host.get(first, at.leaves[first]) for first in at.firsts]),
        )
        after = at.beside(result, "the optimizer's results")
        updated = [i for i in trained if gradients[i] is not None and i not in stored]
        into = [at.leaves[i] if at.leaves[i].dtype == after[i].dtype else None for i in updated]
        results = moved([after[i] for i in updated], mesh, "host", "device", into)
        written = {i: after[i] for i in stored} | dict(zip(updated, results, strict=True))
        return at.rebuild([written.get(first, at.leaves[first]) for first in at.firsts]), state

    return run


def _is_on_host(leaf: Leaf) -> bool:
    return isinstance(leaf, Sharded) and leaf.layout.memory == "host"


def _buffer_like(leaf: Leaf, buffer: Leaf, mesh: Mesh) -> Leaf:
    """Return a buffer for a leaf on the host: the one of the last step, if it still fits."""
    layout = leaf.layout.with_memory("host") if isinstance(leaf, Sharded) else None
    if buffer is not None and (buffer.shape, buffer.dtype) == (leaf.shape, leaf.dtype):
        before = buffer.layout if isinstance(buffer, Sharded) else None
        if before == layout:
            return buffer
    shards = [
        empty_for(mesh, device, "host", x.shape, x.dtype) for x, device in shards_and_devices(leaf)
    ]
    return shards[0] if layout is None else Sharded(leaf.shape, layout, tuple(shards))


def _masters_on_host(state: PyTree) -> dict[int, Leaf]:
    """Return the masters in a state of `with_master_weights`, or around it, that are on the host: by index."""
    entries, masters = [state], dict[int, Leaf]()
    for entry in entries:  # which grows
        if isinstance(entry, dict) and {"master", "inner"} <= entry.keys():
            leaves = enumerate(flatten(entry["master"], none_is_leaf=True)[0])
            masters |= {
                i: leaf for i, leaf in leaves if leaf is not None and home_of(leaf) == "host"
            }
        if isinstance(entry, dict | tuple):
            entries += entry.values() if isinstance(entry, dict) else entry
    return masters
