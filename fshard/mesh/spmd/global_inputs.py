"""Compare the inputs that must be equal on all devices, where they enter: hashes of all tensors in one collective.

A plain tensor is a global value, of which each device keeps its shard. Unequal ones, as weights drawn without a seed,
would be mixed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor

from fshard.errors import MismatchError
from fshard.mesh.collectives.autograd import Tensors, transformed
from fshard.mesh.layout import Mesh, PyTree, flatten_with_paths
from fshard.mesh.spmd.check_equal import gather_all
from fshard.mesh.spmd.run import inside, local_devices, resolve_mesh, run_on_devices
from fshard.mesh.spmd.scope import require
from fshard.source import call_site


def digest(x: Tensor) -> int:
    """Return a hash of 63 bits of the dtype, the shape and the bits of a tensor."""
    state = xxhash.xxh3_64(f"{x.dtype} {tuple(x.shape)}".encode())
    row: Any = x.detach().resolve_conj().resolve_neg().cpu().reshape(-1).contiguous()
    state.update(row.view(torch.uint8).numpy())
    return state.intdigest() >> 1


def samples_of(params: PyTree) -> dict[str, Tensors]:
    """Return the plain tensors of a tree by path; of large ones blocks: to read all takes a fifth of `boost`."""
    samples: dict[str, Tensors] = {}
    for path, x in zip(*flatten_with_paths(params)[:2], strict=True):
        if not isinstance(x, Tensor):
            continue
        step, block = min(1 << 17, x.numel() // 4), 1 << 12
        if step >= block:
            x = x.detach().reshape(-1)[: x.numel() // step * step].view(-1, step)[:, :block]
        samples[path] = (x,)
    return samples


def compare_inputs(
    call: str, mesh: Mesh, tensors: Mapping[str, Tensors], axes: tuple[str, ...] | None = None
) -> None:
    """Raise on all devices unless they have equal tensors, along some axes or all.

    `tensors`: by path, one for each local device. Those outside of a virtual mesh, of which there is one, values inside of
    `shard_map` and loss functions, which are varying, and tensors without values are not compared.
    """
    mesh, site = resolve_mesh(mesh), call_site()
    scope, devices = inside(mesh), local_devices(mesh)
    axes = tuple(axis for axis in axes or mesh.axis_names if mesh.shape[axis] > 1)
    tensors = {
        path: xs for path, xs in tensors.items() if len(xs) == len(devices) and not xs[0].is_meta
    }
    is_varying = scope is not None and (scope.mapped or scope.own)
    if not axes or not tensors or is_varying or transformed() or mesh.runtime == "abstract":
        return

    def on_device(device: int) -> None:
        group = require(call).group(axes, call)
        digests = torch.tensor([digest(xs[devices.index(device)]) for xs in tensors.values()])
        first, *peers = gather_all(digests, group, site).tolist()
        paths = [
            path or "the tensor"
            for path, *row in zip(tensors, first, *peers, strict=True)
            if len({*row}) > 1
        ]
        if paths:
            numbers = [
                str(number)
                for number, row in zip(group.members[1:], peers, strict=True)
                if row != first
            ]
            raise MismatchError(
                f"{call}: {', '.join(paths[:8])}{', ...' * (len(paths) > 8)} must be equal on all {kind} along "
                f"{'+'.join(axes)}; got other values on {kind} {', '.join(numbers)} than on {group.members[0]}. "
                "Make them from one seed, by torch.manual_seed(0) on all of them, or load them from one file."
            )

    kind = "processes" if mesh.runtime == "process" else "devices"
    run_on_devices(mesh, on_device)
