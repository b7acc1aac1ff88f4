"""Compare the inputs that are promised to be equal on all devices, where they enter: a hash of each, in one collective.

A plain tensor is a global value, of which each device keeps its shard; a shard is replicated along the axes that its
spec does not name. Unequal ones, as weights drawn without a seed, would be mixed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import xxhash
from torch import Tensor

from fshard.errors import MismatchError
from fshard.mesh.collectives.autograd import Tensors, transformed
from fshard.mesh.collectives.moves import AllGather
from fshard.mesh.layout import Mesh, PyTree, flatten_with_paths
from fshard.mesh.spmd.run import inside, is_outside, local_devices, resolve_mesh, run_on_devices
from fshard.mesh.spmd.scope import require
from fshard.source import call_site


def digest(x: Tensor) -> int:
    """Return a hash of 63 bits of the dtype, the shape and the bits of a tensor.

    >>> digest(torch.tensor([1.0, 2.0])) == digest(torch.tensor([1.0, 2.0])) != digest(torch.tensor([2.0, 1.0]))
    True
    """
    found = xxhash.xxh3_64(f"{x.dtype} {tuple(x.shape)}".encode())
    found.update(x.detach().resolve_conj().resolve_neg().cpu().reshape(-1).contiguous().view(torch.uint8).numpy())
    return found.intdigest() >> 1


def samples_of(params: PyTree) -> dict[str, Tensors]:
    """Return the plain tensors of a tree by path, not those without memory; of large ones evenly spaced blocks.

    The blocks of two initial draws or of two files differ, and to read all numbers would take longer than 2% of `boost`.
    """
    paths, leaves, _ = flatten_with_paths(params)
    return {
        path: (_sample(x),) for path, x in zip(paths, leaves, strict=True) if isinstance(x, Tensor) and not x.is_meta
    }


def _sample(x: Tensor) -> Tensor:
    if x.numel() <= 1 << 14:
        return x
    step = min(1 << 17, x.numel() // 4)
    return x.detach().reshape(-1)[: x.numel() // step * step].view(-1, step)[:, : 1 << 12]


def compare_global(call: str, mesh: Mesh, tensors: Mapping[str, Tensors]) -> None:
    """Raise on all devices unless they give equal global values; outside of a virtual mesh there is one."""
    if not is_outside(mesh):
        compare_along(call, resolve_mesh(mesh), resolve_mesh(mesh).axis_names, tensors)


def compare_along(call: str, mesh: Mesh, axes: tuple[str, ...], tensors: Mapping[str, Tensors]) -> None:
    """Raise on all devices along some axes unless they have equal tensors, each given on the local devices.

    In `shard_map` and in loss functions, where values are varying, nothing is compared.
    """
    scope, devices, site = inside(mesh), local_devices(mesh), call_site()
    axes = tuple(axis for axis in axes if mesh.shape[axis] > 1)
    if (
        not axes
        or not tensors
        or mesh.runtime == "abstract"
        or transformed()
        or (scope and (scope.mapped or scope.own))
    ):
        return

    def on_device(device: int) -> None:
        group = require(call).group(axes, call)

        def gather(numbers: list[int]) -> list[list[int]]:
            own = torch.tensor([numbers])
            return group.world.current().start(AllGather(0), (own,), group, site).wait()[0].tolist()

        digests = [digest(shards[devices.index(device)]) for shards in tensors.values()]
        first, *others = gather([len(digests), digest(torch.tensor(digests))])
        if all(row == first for row in others):
            return
        if any(row[0] != first[0] for row in others):
            raise MismatchError(
                f"{call}: trees must have the same leaves on all {kind}; got {[first, *others]} tensors."
            )
        first, *others = gather(digests)
        paths = [path or "the tensor" for path, *row in zip(tensors, first, *others, strict=True) if len({*row}) > 1]
        numbers = [str(number) for number, row in zip(group.members[1:], others, strict=True) if row != first]
        more = f" and {len(paths) - 8} more" if len(paths) > 8 else ""
        raise MismatchError(
            f"{call}: {', '.join(paths[:8])}{more} must be equal on all {kind} along {'+'.join(axes)}; got others on "
            f"{', '.join(numbers)} than on {group.members[0]}. Make them from one seed, or load them from one file."
        )

    kind = "processes" if mesh.runtime == "process" else "devices"
    run_on_devices(mesh, on_device)
