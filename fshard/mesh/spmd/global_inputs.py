"""Compare the inputs that must be equal on all devices: hashes of all tensors in one collective.

A plain tensor is a global value, of which each device takes its shard. If processes have unequal
ones, such as weights drawn without a seed, the shards of several values would be mixed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor

from fshard.errors import MismatchError
from fshard.mesh.collectives.autograd import Tensors, transformed
from fshard.mesh.layout import Mesh, PyTree, flatten_with_paths
from fshard.mesh.spmd.check_equal import gather_all
from fshard.mesh.spmd.run import inside, local_devices, resolve_mesh, run_on_devices
from fshard.mesh.spmd.scope import Group, require
from fshard.source import call_site


def digest(x: Tensor) -> int:
    """Return a hash of 63 bits of the dtype, the shape and the bits of a tensor."""
    state = xxhash.xxh3_64(f"{x.dtype} {tuple(x.shape)}".encode())
    row: Any = x.detach().resolve_conj().resolve_neg().cpu().reshape(-1).contiguous()
    state.update(row.view(torch.uint8).numpy())
    return state.intdigest() >> 1


_STRIDE = 1 << 17
_BLOCK = 1 << 12
"""Of each 2^17 elements of a large tensor the first 2^12 are compared: 3 per cent. To read all of
a model takes a fifth of the time of `boost`."""


def samples_of(params: PyTree) -> dict[str, Tensors]:
    """Return the plain tensors of a tree by path; of large ones, blocks of elements.

    A tensor with fewer than 4 strides is divided into 4, and is large if these are longer than a
    block: 40,000 elements are 4 strides of 10,000, of which 4 x 4,096 elements are compared.
    """
    paths, leaves, _ = flatten_with_paths(params)
    samples: dict[str, Tensors] = {}
    for path, x in zip(paths, leaves, strict=True):
        if not isinstance(x, Tensor):
            continue
        stride = min(_STRIDE, x.numel() // 4)
        if stride >= _BLOCK:
            count = x.numel() // stride
            flat = x.detach().reshape(-1)
            x = flat[: count * stride].view(count, stride)[:, :_BLOCK]
        samples[path] = (x,)
    return samples


def compare_inputs(
    caller: str,
    mesh: Mesh,
    tensors: Mapping[str, Tensors],
    axes: tuple[str, ...] | None = None,
) -> None:
    """Raise on all devices unless they have equal tensors, along some axes or all.

    `tensors`: by path, one for each local device. Not compared are tensors outside of a virtual
    mesh, of which there is one; values inside of `shard_map` and loss functions, which are varying;
    and tensors without values.
    """
    mesh = resolve_mesh(mesh)
    site = call_site()
    scope = inside(mesh)
    is_varying = scope is not None and (scope.mapped or scope.varying_axes)
    if is_varying or transformed() or mesh.runtime == "abstract":
        return

    devices = local_devices(mesh)
    by_device = {path: xs for path, xs in tensors.items() if len(xs) == len(devices)}
    compared = {path: xs for path, xs in by_device.items() if not xs[0].is_meta}
    axes = tuple([axis for axis in axes or mesh.axis_names if mesh.shape[axis] > 1])
    if not axes or not compared:
        return

    def on_device(device: int) -> None:
        group = require(caller).group(axes, caller)
        position = devices.index(device)
        digests = torch.tensor([digest(xs[position]) for xs in compared.values()])
        rows = gather_all(digests, group, site).tolist()

        unequal: list[str] = []
        for path, *column in zip(compared, *rows, strict=True):
            if len(set(column)) > 1:
                unequal.append(path or "the tensor")
        if unequal:
            kind = "processes" if mesh.runtime == "process" else "devices"
            raise MismatchError(f"{caller}: {_text_of_difference(unequal, kind, group, rows)}")

    run_on_devices(mesh, on_device)


def _text_of_difference(
    paths: list[str], kind: str, group: Group, rows: Sequence[list[int]]
) -> str:
    """Return the error for unequal tensors; `rows` has the digests of each member of the group."""
    numbers: list[str] = []
    for number, row in zip(group.members, rows, strict=True):
        if row != rows[0]:
            numbers.append(str(number))

    shown = ", ".join(paths[:8])
    if len(paths) > 8:
        shown += ", ..."
    return (
        f"{shown} must be equal on all {kind} along {'+'.join(group.axes)}; got other values on "
        f"{kind} {', '.join(numbers)} than on {group.members[0]}. Make them from one seed, by "
        "torch.manual_seed(0) on all of them, or load them from one file."
    )
