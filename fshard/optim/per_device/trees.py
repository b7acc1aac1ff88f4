"""Parameters, gradients and state as the trees of one device, and the results of devices as arrays.

    params               {"w", "v"}     by owners: device 0 owns w, device 1 owns v
    device 0 gets        {"w": tensor, "v": None}
    device 1 gets        {"w": None, "v": tensor}
    state                {"m": {"w", "v"}, "count"}
                         m has the structure of the parameters: m["w"] has the layout of w
                         count has not: it is replicated, a number equal on all devices

A device gets its shards of the parameters with a gradient, and None for all others: parameters of
other owners or stages, frozen ones, ties after the first, and those without a gradient, whose state
does not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fshard.errors import OptimizerError
from fshard.memory.state import stored
from fshard.mesh.layout import PyTree
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.spmd.run import local_devices
from fshard.optim.leaves import (
    Leaf,
    Leaves,
    assembled_state,
    is_unsharded,
    kind_of,
    like,
    shape_of_shard,
    trainable,
)
from fshard.optim.norms import are_divided
from fshard.optim.per_device.draws import UpdateDraws
from fshard.optim.per_device.states import StateEntries
from fshard.optim.sharding import Sharding, check_fits


class DeviceTrees:
    """Parameters and gradients as the trees of the local devices.

    Args:
        params: of all devices.
        sharding: the kind of shards that the functions can take.
        grads: of all devices; None for `init`, in which every trainable parameter counts.
        is_recorded: True if something takes derivatives, so that devices get their shards
            themselves; else detached ones.
    """

    def __init__(
        self, params: PyTree, sharding: Sharding, grads: PyTree = None, *, is_recorded: bool = False
    ) -> None:
        self.params = Leaves.of(params)
        self.is_recorded = is_recorded
        check_fits(sharding, self.params)
        leaves = self.params.leaves
        self.grads = leaves if grads is None else self.params.gradients(grads)
        self.updated: list[int] = []
        for i, first in enumerate(self.params.firsts):
            is_tie = i != first
            if not is_tie and trainable(leaves[i]) and self.grads[i] is not None:
                self.updated.append(i)

        self.mesh = next((leaf.mesh for leaf in leaves if isinstance(leaf, Sharded)), None)
        self.devices = (0,) if self.mesh is None else local_devices(self.mesh)
        self.held = [self._held_by(device) for device in self.devices]

    def _held_by(self, device: int) -> list[int]:
        """Return the indices of the updated leaves of which a device stores any."""
        held: list[int] = []
        for i in self.updated:
            leaf = self.params.leaves[i]
            if not isinstance(leaf, Sharded) or leaf.layout.has_any(device):
                held.append(i)
        return held

    # -- to devices ------------------------------------------------------------------------------

    def tree(self, leaves: dict[int, Any]) -> PyTree:
        """Return a tree of some leaves, by index: None for the others."""
        return self.params.rebuild([leaves.get(i) for i in range(len(self.params.leaves))])

    def local(self, leaves: list[Leaf], index: int, draws: UpdateDraws | None = None) -> PyTree:
        """Return the tree of a local device, whose random draws are then like those leaves."""
        shards: dict[int, Any] = {}
        for i in self.held[index]:
            shard = _shard(leaves[i], index)
            if isinstance(shard, Tensor) and not self.is_recorded:
                shard = shard.detach()
            if draws is not None:
                draws.follow(shard, i)
            shards[i] = shard
        return self.tree(shards)

    def local_state(self, state: StateEntries, index: int, draws: UpdateDraws | None) -> PyTree:
        """Return the state of a local device."""
        return state.mapped(lambda leaves: self.local(leaves, index, draws))

    def elsewhere(self) -> PyTree | None:
        """Return a tree of shapes: of the leaves that only other processes store.

        None without any.
        """
        indices = {*self.updated}.difference(*self.held)
        if not indices:
            return None
        return self.tree({i: shape_of_shard(self.params.leaves[i]) for i in indices})

    def as_arrays(self, tree: PyTree, index: int) -> list[Leaf]:
        """Return a local tree as arrays, for norms.

        What the device does not hold has empty shards.
        """
        leaves = self.params.leaves
        shards = self.params.beside(tree, "the tree of global_norm")
        arrays: list[Leaf] = []
        for i in self.updated:
            shard = _shard(leaves[i], index) if shards[i] is None else shards[i]
            arrays.append(like(leaves[i], [shard]))
        return arrays

    # -- from devices ----------------------------------------------------------------------------

    def assembled(self, states: Sequence[StateEntries]) -> PyTree:
        """Return the state of arrays that devices have made; the last one may be without values."""
        first, *others = states
        for state in others:
            if (state.structure, state.is_like) != (first.structure, first.is_like):
                raise OptimizerError(
                    "init must make the same state on all devices, but for subtrees with the "
                    "structure of the parameters. Give None where a parameter is None: "
                    "optree.tree_map(f, params)."
                )
        leaves = self.params.leaves
        has_tensors = any(isinstance(x, Tensor) and x.ndim for x in first.single())
        if has_tensors and are_divided(leaves):
            raise OptimizerError(
                "state of divided parameters must be numbers, but for subtrees with the structure "
                "of the parameters; got other tensors. Make such subtrees: {'m': "
                "optree.tree_map(torch.zeros_like, params)}."
            )

        def subtree(*columns: list[Any]) -> PyTree:
            rows = zip(leaves, *columns, strict=True)
            return self.params.rebuild([stored(_assembled(param, x)) for param, *x in rows])

        return first.mapped(subtree, *[state.entries for state in others])

    def joined_results(self, results: Sequence[list[Any]], *, writes: bool) -> PyTree:
        """Return the updates of all devices as arrays; of a step, that `writes`, the parameters."""
        leaves = self.params.leaves
        columns = zip(*results, strict=True)
        joined: dict[int, Leaf] = {}
        for i, shards in enumerate(columns):
            joined[i] = _joined(leaves[i] if i in self.updated else None, shards)
        after: list[Leaf] = []
        for i, first in enumerate(self.params.firsts):
            unchanged = leaves[i] if writes else None
            after.append(joined[first] if first in self.updated else unchanged)
        return self.params.rebuild(after)

    def joined_state(self, before: StateEntries, states: Sequence[list[Any]]) -> PyTree:
        """Return the next state as arrays; numbers are those of the first device."""

        def subtree(first_result: Any, leaves: list[Leaf], *columns: list[Any]) -> PyTree:
            rows = zip(leaves, *columns, strict=True)
            return self.params.rebuild([_joined(leaf, shards) for leaf, *shards in rows])

        after = before._replace(entries=[*states[0]])
        return after.mapped(subtree, before.entries, *states)


def _shard(leaf: Leaf, index: int) -> Any:
    return leaf.shards[index] if isinstance(leaf, Sharded) else leaf


def _assembled(param: Leaf, shards: Sequence[Any]) -> Leaf:
    """Assemble the state of a parameter from that of each device.

    The last may be without values.
    """
    example = next((x for x in shards if x is not None), None)
    if example is None or not isinstance(param, Sharded):
        return example
    leaf = assembled_state(param, shards)
    has_other_shape = example.ndim and leaf.layout is not param.layout
    if has_other_shape and param.spec.split_axes and not is_unsharded(param):
        raise OptimizerError(
            "state of an elementwise optimizer must have the shape of its parameter's shard, or be "
            f"a number; got {tuple(example.shape)} beside {kind_of(param)}. "
            'Leave out sharding="flat": an owner then has all of it.'
        )
    return leaf


def _joined(leaf: Leaf, results: Sequence[Any]) -> Leaf:
    """Return a leaf with the shards that devices computed; other shards are unchanged."""
    example = next((x for x in results if x is not None), None)
    if example is None:
        return leaf
    before = leaf.shards if isinstance(leaf, Sharded) else (leaf,)
    shards: list[Any] = []
    keeps_shapes = leaf is not None
    for result, shard in zip(results, before, strict=False):
        shards.append(shard if result is None else result)
        keeps_shapes = keeps_shapes and shards[-1].shape == shard.shape
    if not keeps_shapes:
        shape = None if leaf is None else tuple(before[0].shape)
        raise OptimizerError(
            f"updates and state of a parameter must keep their shape; got {tuple(example.shape)}, "
            f"and it was {shape}."
        )
    return like(leaf, [x.to(example.dtype) for x in shards])
