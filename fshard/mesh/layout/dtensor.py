"""Convert to and from torch's DTensor without copying.

Only shards with gaps, such as slices, are copied. DTensor lists a placement per mesh axis; `P`
lists axes per tensor dim. On a mesh of axes "data" and "model":

    P("data", "model")      [Shard(0), Shard(1)]
    P(("data", "model"))    [Shard(0), Shard(0)]
    P(unreduced="model")    [Replicate(), Partial()]

Where several axes split one dim, DTensor splits in mesh order, so a layout with another order has
no DTensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import torch

from fshard.errors import LayoutError
from fshard.mesh.layout.layout import Layout
from fshard.mesh.layout.make import from_device_mesh, to_device_mesh
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.layout.spec import P

if TYPE_CHECKING:  # importing it takes half as long as importing torch
    from torch.distributed.tensor import DTensor, Placement


def to_dtensor(x: Sharded) -> DTensor:
    """Return a DTensor that shares the local shard, for an array of a process mesh.

    Raises for layouts that DTensor does not have.
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(x, Sharded):
        raise TypeError(
            f"to_dtensor: x must be a Sharded; got {type(x).__name__}. Make one with fs.device_put."
        )
    placements = _placements(x)

    # DTensor needs strides of the global tensor, with its dims in the shard's order in memory.
    local = x.local
    order = sorted(range(x.ndim), key=lambda dim: (-local.stride(dim), dim))
    if local.stride() != _dense_strides(local.shape, order):
        local = local.contiguous()
        order = list(range(x.ndim))

    full_shape = torch.Size(x.shape)
    return DTensor.from_local(
        local,
        to_device_mesh(x.mesh),
        placements,
        run_check=False,
        shape=full_shape,
        stride=_dense_strides(full_shape, order),
    )


def _placements(x: Sharded) -> list[Placement]:
    """Return the placement of an array along each axis of its mesh."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    spec = x.spec
    names = x.mesh.axis_names
    if spec.is_flat or spec.at or x.layout.memory != "device":
        raise LayoutError(
            f"{x!r} has no DTensor: flat, owned and host layouts are fshard's own. "
            "Reshard it first."
        )

    placements: list[Placement] = [Replicate()] * len(names)
    for dim, axes in enumerate(spec.dims(x.ndim)):
        if list(axes) != sorted(axes, key=names.index):
            raise LayoutError(
                f"{x!r} has no DTensor: dim {dim} is cut by {axes}, not in the mesh's order "
                f"{names}."
            )
        for axis in axes:
            placements[names.index(axis)] = Shard(dim)
    for axis in spec.unreduced:
        placements[names.index(axis)] = Partial("sum")
    return placements


def _dense_strides(shape: torch.Size, order: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a dense tensor whose dims are stored in this order, slowest first."""
    strides = [1] * len(shape)
    for position, dim in enumerate(order):
        faster_dims = order[position + 1 :]
        strides[dim] = prod([shape[faster] for faster in faster_dims])
    return tuple(strides)


def from_dtensor(x: DTensor) -> Sharded:
    """Return a Sharded that shares the DTensor's local shard."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    if not isinstance(x, DTensor):
        raise TypeError(f"from_dtensor: x must be a DTensor; got {type(x).__name__}.")
    mesh = from_device_mesh(x.device_mesh)
    dims: list[tuple[str, ...]] = [()] * x.ndim
    unreduced: list[str] = []
    for axis, placement in zip(mesh.axis_names, x.placements, strict=True):
        if isinstance(placement, Shard):
            dims[placement.dim] = (*dims[placement.dim], axis)
        elif isinstance(placement, Partial) and placement.reduce_op == "sum":
            unreduced.append(axis)
        elif not isinstance(placement, Replicate):
            raise LayoutError(
                f'The DTensor is {placement} along "{axis}", which no layout expresses. '
                "Redistribute it."
            )
    layout = Layout(mesh, P(*dims, unreduced=tuple(unreduced)))
    layout.check(x.shape, "the DTensor")
    return Sharded(tuple(x.shape), layout, (x.to_local(),))
