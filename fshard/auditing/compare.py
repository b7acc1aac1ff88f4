"""Compare the results of two layouts, shard by shard on each device: in bits, or up to rounding.

state    this layout    the other one, moved here
device 0   w[0:2]     |   w[0:2]
device 1   w[2:4]     |   w[2:4]       w[3] differs: 0.5, 0.25
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.auditing.meeting import largest_of_all
from fshard.mesh.layout import Mesh, PyTree, path_text
from fshard.mesh.layout.arithmetic import unravel
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.reshard.device_put import shard_of
from fshard.mesh.spmd.run import local_devices
from fshard.optim.leaves import Leaves
from fshard.rounding import TOLERANCES, bound_of, largest, widest

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Difference(NamedTuple):
    """The first element of a leaf in which two layouts differ.

    Args:
        kind: "gradient", "parameter", "state", "buffer" or "metric".
        leaf: its path.
        device: the number in the world of the device that has it.
        element: its index in the full tensor.
        value, other: in the layout of the step, and in the other one.
    """

    kind: str
    leaf: str
    device: int
    element: list[int]
    value: str
    other: str

    @property
    def name(self) -> str:
        """The element, as a user writes it."""
        leaf = self.leaf or self.kind
        return f"{leaf}{self.element}" if self.element else leaf


def lowest_dtype(tree: PyTree, *others: torch.dtype | None) -> torch.dtype:
    """Return the dtype of the coarsest roundings: of the leaves of a tree, and of others."""
    dtypes = [dtype for dtype in others if dtype is not None]
    for leaf in Leaves.of(tree).leaves:
        if isinstance(leaf, Sharded | Tensor):
            dtypes.append(leaf.dtype)
    known = [dtype for dtype in dtypes if dtype in TOLERANCES]
    return max(known, key=lambda dtype: TOLERANCES[dtype], default=torch.float64)


def differences(
    kind: str, tree: PyTree, other: PyTree, mesh: Mesh, dtype: torch.dtype | None
) -> list[Difference]:
    """Return the differences of two trees with the same layouts, on the devices of the caller.

    Args:
        kind: of the leaves.
        tree: in the layout of the step.
        other: from the other layout, moved to this one.
        mesh: the devices.
        dtype: whose roundings are allowed; None: bits are equal.
    """
    if not mesh.is_member:
        if dtype is not None:  # the members' numbers are broadcast to this process too
            largest_of_all(mesh, [0.0] * len(Leaves.of(tree).leaves))
        return []
    leaves = Leaves.of(tree)
    others = Leaves.of(other).leaves
    bounds = _bounds(leaves.leaves, mesh, dtype)
    results: list[Difference] = []
    for path, leaf, another, bound in zip(leaves.paths, leaves.leaves, others, bounds, strict=True):
        name = path_text(path)
        if (leaf is None) != (another is None):
            here = _presence(leaf)
            there = _presence(another)
            results.append(Difference(kind, name, mesh.devices[0], [], here, there))
        elif isinstance(leaf, Sharded):
            results += _of_array(kind, name, leaf, another, mesh, bound)
        elif isinstance(leaf, Tensor):
            number = mesh.devices[local_devices(mesh)[0]]
            results += _of_tensor(
                kind, name, leaf, another, number, bound, partial(_index_in, leaf)
            )
    return results


def _presence(leaf: Any) -> str:
    return "missing" if leaf is None else "there"


def _bounds(leaves: Sequence[Any], mesh: Mesh, dtype: torch.dtype | None) -> list[float | None]:
    """Return the bound of each leaf: by its largest number on all devices."""
    if dtype is None:
        return [None] * len(leaves)
    sizes: list[float] = []
    for leaf in leaves:
        shards = [leaf]
        if isinstance(leaf, Sharded):
            shards = leaf.shards
        tensors = [x for x in shards if isinstance(x, Tensor) and _is_rounded(x)]
        sizes.append(max([largest(x) for x in tensors], default=0.0))
    sizes = largest_of_all(mesh, sizes)
    largest_leaf = max(sizes, default=0.0)
    return [bound_of(torch.tensor(size), largest_leaf, dtype) for size in sizes]


def _is_rounded(x: Tensor) -> bool:
    """Return True for the numbers that operations round."""
    return x.is_floating_point() or x.is_complex()


def _of_array(
    kind: str, name: str, x: Sharded, other: Sharded, mesh: Mesh, bound: float | None
) -> list[Difference]:
    results: list[Difference] = []
    devices = local_devices(mesh)
    for device, shard, other_shard in zip(devices, x.shards, other.shards, strict=True):
        number = mesh.devices[device]
        index_of = partial(_index_of, x, device)
        results += _of_tensor(kind, name, shard, other_shard, number, bound, index_of)
    return results


def _index_of(x: Sharded, device: int, position: int) -> list[int]:
    """Return the index in the full tensor of an element of a device's shard."""
    numbers = torch.arange(prod(x.shape)).reshape(x.shape)
    number = shard_of(numbers, x.layout, device).reshape(-1)[position]
    return [*unravel(int(number), x.shape)]


def _index_in(x: Tensor, position: int) -> list[int]:
    """Return the index of an element of a tensor."""
    return [*unravel(position, x.shape)]


def _of_tensor(
    kind: str,
    name: str,
    x: Tensor,
    other: Tensor,
    number: int,
    bound: float | None,
    index_of: Callable[[int], list[int]],
) -> list[Difference]:
    """Return the difference of two tensors of one shape, if there is any."""
    other = other.to(x.device)
    if bound is None or not _is_rounded(x):
        unequal = unequal_bits(x, other)
    else:
        unequal = errors_of(x, other) > bound
    if not unequal.any():
        return []
    position = int(unequal.reshape(-1).nonzero()[0])
    value = _written(x.reshape(-1)[position])
    other_value = _written(other.reshape(-1)[position])
    return [Difference(kind, name, number, index_of(position), value, other_value)]


def unequal_bits(x: Tensor, other: Tensor) -> Tensor:
    """Return where two tensors have different bits; a NaN is equal to a NaN.

    >>> unequal_bits(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    tensor([ True, False])
    """
    if x.is_complex():
        return unequal_bits(torch.view_as_real(x), torch.view_as_real(other)).any(-1)
    integers = _INTEGERS[x.dtype.itemsize]
    unequal = x.contiguous().view(integers) != other.contiguous().view(integers)
    if x.is_floating_point() and x.dtype.itemsize > 1:  # torch has no isnan for float8
        unequal &= ~(x.isnan() & other.isnan())
    return unequal


def errors_of(x: Tensor, other: Tensor) -> Tensor:
    """Return the absolute differences of two tensors; those of a NaN and a number are infinite."""
    errors = (widest(x) - widest(other)).abs()
    are_equal = (x == other) | (x.isnan() & other.isnan())  # also two infinities
    return errors.nan_to_num(inf, inf).masked_fill(are_equal, 0.0)


def _written(x: Tensor) -> str:
    """Return a number with all its digits."""
    value = x.item()
    if not x.is_floating_point():
        return str(value)
    digits = 17 if x.dtype == torch.float64 else 9
    return f"{value:.{digits}g}"
