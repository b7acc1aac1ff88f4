"""Compare what several devices hold, by one number a step: `digest=True` of `audit` and `Booster`.

    device 0    w   digest d0   adds 1 x d0         along the axes over which w is replicated: the
    device 1    w   digest d1   adds -1 x d1        sum is 0 if all are equal

See Note [Differences of inputs] in `transforms/agreement.py`. The sums of all leaves are one
number of 8 bytes, in one psum. Where it is not 0, devices gather their digests of each leaf, and
those that differ from most are named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.auditing.diagnosis import device_name
from fshard.errors import AuditError
from fshard.mesh.layout import Mesh, PyTree, path_text
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.reshard.broadcast_to import broadcast_to
from fshard.mesh.spmd.check_equal import gather_all
from fshard.mesh.spmd.global_inputs import digest
from fshard.mesh.spmd.run import is_outside, local_devices, run_on_devices
from fshard.mesh.spmd.scope import Group, require
from fshard.optim.leaves import Leaves
from fshard.source import Site, call_site
from fshard.transforms.agreement import difference, host_row, reduce_rows

_CALLER = "fs.audit"


class ReplicatedLeaf(NamedTuple):
    """A leaf that several devices hold: its name, the axes of its replicas, and the local ones."""

    name: str
    axes: tuple[str, ...]
    shards: tuple[Tensor, ...]


class UnequalReplicas(NamedTuple):
    """A leaf whose replicas differ.

    Args:
        leaf: its name.
        devices: the numbers of those that differ from most, or from each other.
        has_majority: True if most replicas are equal wherever some differ; two are no majority.
    """

    leaf: str
    devices: list[int]
    has_majority: bool


def validate_replicas(trees: Mapping[str, PyTree], mesh: Mesh, step: str) -> None:
    """Raise on all devices unless those that hold a leaf hold equal values.

    Args:
        trees: by the names of their leaves: "parameter", "state" or "buffer".
        mesh: the devices, which all call this.
        step: after which it is.
    """
    unequal = unequal_replicas(trees, mesh, call_site())
    if unequal:
        raise AuditError(table_of(unequal, mesh, step))


def table_of(unequal: Sequence[UnequalReplicas], mesh: Mesh, step: str) -> str:
    """Return the error of replicas that differ after a step."""
    lines = [f"{step}: replicas must be equal on all devices"]
    lines += [described(replica, mesh, "after the step") for replica in unequal]
    return "\n  ".join(lines)


def described(replica: UnequalReplicas, mesh: Mesh, when: str) -> str:
    """Return the sentence about a leaf whose replicas differ."""
    names = " and ".join([device_name(mesh, number) for number in replica.devices])
    if replica.has_majority:
        return f"{replica.leaf} has other values on {names} than on most, {when}"
    return f"{replica.leaf} differs between {names}, {when}"


def replicated_leaves(trees: Mapping[str, PyTree], mesh: Mesh) -> list[ReplicatedLeaf]:
    """Return the leaves of some trees, by name, that several devices of a mesh hold."""
    replicated: list[ReplicatedLeaf] = []
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
                replicated.append(
                    ReplicatedLeaf(f"{kind} {path_text(path)}".rstrip(), axes, shards)
                )
    return replicated


@torch.no_grad()
def unequal_replicas(trees: Mapping[str, PyTree], mesh: Mesh, site: Site) -> list[UnequalReplicas]:
    """Compare the replicas of all leaves: one psum of 8 bytes; return those that differ."""
    rows: list[list[Any]] | None = None
    if mesh.is_member:
        leaves = replicated_leaves(trees, mesh)
        devices = local_devices(mesh)

        def on_device(device: int) -> list[list[Any]]:
            index = devices.index(device)
            shards = [leaf.shards[index] for leaf in leaves]
            return [[*replica] for replica in _compared(leaves, shards, mesh, site)]

        rows = run_on_devices(mesh, on_device)[0]
    if mesh.numbers is not None:  # processes outside of the mesh raise too
        rows = broadcast_to(rows, source=mesh)
    assert rows is not None
    return [UnequalReplicas(*row) for row in rows]


def _compared(
    leaves: Sequence[ReplicatedLeaf], shards: Sequence[Tensor], mesh: Mesh, site: Site
) -> list[UnequalReplicas]:
    """Compare the replicas of leaves, as one device."""
    scope = require(_CALLER)
    digests: dict[tuple[str, ...], list[int]] = {}
    for leaf, shard in zip(leaves, shards, strict=True):
        digests.setdefault(leaf.axes, []).append(digest(shard))
    total = 0.0
    for axes, row in digests.items():
        total += difference(row, scope.group(axes, _CALLER))

    everyone = scope.group(mesh.axis_names, _CALLER)
    (sum_of_all,) = reduce_rows((host_row([total], torch.device("cpu")),), everyone, site)
    if not sum_of_all.item():
        return []
    return _named(leaves, shards, everyone, site)


def _named(
    leaves: Sequence[ReplicatedLeaf], shards: Sequence[Tensor], everyone: Group, site: Site
) -> list[UnequalReplicas]:
    """Gather the digests of all leaves from all devices, and name those that differ."""
    scope = require(_CALLER)
    row: list[list[int]] = []
    for leaf, shard in zip(leaves, shards, strict=True):
        base = scope.group(leaf.axes, _CALLER).base
        row.append([base, digest(shard)])
    table = gather_all(torch.tensor(row), everyone, site)  # (devices, leaves, 2)

    unequal_leaves: list[UnequalReplicas] = []
    for number, leaf in enumerate(leaves):
        by_group: dict[int, list[tuple[int, int]]] = {}
        for device, (base, value) in zip(everyone.members, table[:, number].tolist(), strict=True):
            by_group.setdefault(base, []).append((device, value))
        unequal: list[int] = []
        has_majority = True
        for pairs in by_group.values():
            minority = _minority(pairs)
            unequal += minority
            has_majority &= len(minority) < len(pairs)
        if unequal:
            unequal_leaves.append(UnequalReplicas(leaf.name, sorted(unequal), has_majority))
    return unequal_leaves


def _minority(pairs: list[tuple[int, int]]) -> list[int]:
    """Return the devices whose value is not that of more than half; all if none is."""
    ((most_frequent, count),) = Counter([value for _, value in pairs]).most_common(1)
    if count == len(pairs):
        return []
    has_majority = 2 * count > len(pairs)
    return [device for device, value in pairs if not has_majority or value != most_frequent]
