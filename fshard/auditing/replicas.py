"""Compare what several devices hold, by one number a step: `fs.audit(digest=True)`.

    device 0    w   digest d0   adds 1 x d0         along the axes over which w is replicated: the
    device 1    w   digest d1   adds -1 x d1        sum is 0 if all are equal

See Note [Differences of inputs] in `transforms/agreement.py`. The sums of all leaves are one
number of 8 bytes, in one psum. Where it is not 0, devices gather their digests of each leaf, and
those that differ from most are named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fshard.mesh.layout import Mesh, PyTree, path_text
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.spmd.check_equal import gather_all
from fshard.mesh.spmd.global_inputs import digest
from fshard.mesh.spmd.run import is_outside, local_devices, run_on_devices
from fshard.mesh.spmd.scope import Group, require
from fshard.optim.leaves import Leaves
from fshard.source import Site
from fshard.transforms.agreement import difference, host_row, reduce_rows

_CALLER = "fs.audit"


class ReplicatedLeaf(NamedTuple):
    """A leaf that several devices hold: its name, the axes of its replicas, and the local ones."""

    name: str
    axes: tuple[str, ...]
    shards: tuple[Tensor, ...]


class UnequalReplicas(NamedTuple):
    """A leaf whose replicas differ, and the devices that differ from most, by number."""

    leaf: str
    devices: list[int]


def replicated_leaves(trees: Mapping[str, PyTree], mesh: Mesh) -> list[ReplicatedLeaf]:
    """Return the leaves of some trees, by name, that several devices of a mesh hold."""
    found: list[ReplicatedLeaf] = []
    for kind, tree in trees.items():
        leaves = Leaves.of(tree)
        for path, leaf in zip(leaves.paths, leaves.leaves, strict=True):
            axes = mesh.axis_names
            shards: tuple[Tensor, ...] = ()
            if isinstance(leaf, Sharded):
                axes = leaf.layout.replicated_axes
                shards = leaf.shards
            elif isinstance(leaf, Tensor) and not is_outside(mesh):
                shards = (leaf,)
            axes = tuple([axis for axis in axes if mesh.shape[axis] > 1])
            if axes and shards:
                found.append(ReplicatedLeaf(f"{kind} {path_text(path)}".rstrip(), axes, shards))
    return found


def unequal_replicas(trees: Mapping[str, PyTree], mesh: Mesh, site: Site) -> list[UnequalReplicas]:
    """Compare the replicas of all leaves: one psum of 8 bytes; return those that differ."""
    if not mesh.is_member:
        return []
    leaves = replicated_leaves(trees, mesh)
    devices = local_devices(mesh)

    def on_device(device: int) -> list[UnequalReplicas]:
        scope = require(_CALLER)
        index = devices.index(device)
        digests: dict[tuple[str, ...], list[int]] = {}
        for leaf in leaves:
            digests.setdefault(leaf.axes, []).append(digest(leaf.shards[index]))
        sums: list[float] = []
        for axes, row in digests.items():
            sums.append(difference(row, scope.group(axes, _CALLER)))

        everyone = scope.group(mesh.axis_names, _CALLER)
        (total,) = reduce_rows((host_row([sum(sums)], torch.device("cpu")),), everyone, site)
        if not total.item():
            return []
        return _named(leaves, index, everyone, site)

    return run_on_devices(mesh, on_device)[0]


def _named(
    leaves: list[ReplicatedLeaf], index: int, everyone: Group, site: Site
) -> list[UnequalReplicas]:
    """Gather the digests of all leaves from all devices, and name those that differ from most."""
    scope = require(_CALLER)
    row: list[list[int]] = []
    for leaf in leaves:
        base = scope.group(leaf.axes, _CALLER).base
        row.append([base, digest(leaf.shards[index])])
    table = gather_all(torch.tensor(row), everyone, site)  # (devices, leaves, 2)

    found: list[UnequalReplicas] = []
    for number, leaf in enumerate(leaves):
        by_group: dict[int, list[tuple[int, int]]] = {}
        for device, (base, value) in zip(everyone.members, table[:, number].tolist(), strict=True):
            by_group.setdefault(base, []).append((device, value))
        unequal: list[int] = []
        for pairs in by_group.values():
            unequal += _minority(pairs)
        if unequal:
            found.append(UnequalReplicas(leaf.name, sorted(unequal)))
    return found


def _minority(pairs: list[tuple[int, int]]) -> list[int]:
    """Return the devices whose value is not that of more than half; all if none is."""
    ((most_frequent, count),) = Counter([value for _, value in pairs]).most_common(1)
    if count == len(pairs):
        return []
    has_majority = 2 * count > len(pairs)
    return [device for device, value in pairs if not has_majority or value != most_frequent]
