"""Collectives: functions of local tensors, called inside `shard_map` and `run`.

Each works along one mesh axis, or a tuple of axes (major to minor), on a tensor or a tree of
tensors; leaves of one dtype share a buffer. Results are *tiled*: shards are concatenated along
`dim`, no dim is added. `psum.start(...)` starts any of them and returns a `Handle`.

A function here plans its call: a `Move` for each leaf. The type of an argument determines the type
of its cotangent: see `moves`.
"""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import Any, Literal, TypeGuard

import torch
from torch import Tensor

from fshard.errors import LayoutError
from fshard.mesh.collectives.moves import (
    AllGather,
    AllToAll,
    Broadcast,
    Extreme,
    Permute,
    Psum,
    PsumScatter,
    Pvary,
    Rows,
    Same,
)
from fshard.mesh.collectives.on_trees import CollectiveCall, collective, plan_call
from fshard.mesh.layout import Axes, PyTree
from fshard.mesh.spmd.scope import Group, require
from fshard.uncompiled import uncompiled

_PSUM, _PVARY = Psum(), Pvary()


def _normalized_dim(leaf: Tensor, dim: int) -> int:
    if not _is_integer(dim):
        raise TypeError(f"a dim must be an integer; got {dim!r}.")
    if not -leaf.ndim <= dim < leaf.ndim:
        raise ValueError(f"dim {dim} does not exist in a tensor of shape {tuple(leaf.shape)}.")
    return dim % leaf.ndim  # -1 is the last


def _divisible_dim(leaf: Tensor, dim: int, group: Group) -> int:
    dim = _normalized_dim(leaf, dim)
    length = leaf.shape[dim]
    missing = -length % group.size
    if missing:
        axes = "+".join(group.axes)
        raise LayoutError(
            f"dim {dim} has {length} elements, which the {group.size} devices along {axes} do not "
            f"divide (shape {tuple(leaf.shape)}). Pad it to {length + missing}."
        )
    return dim


def _countable(x: Tensor) -> Tensor:
    """Sum booleans as torch.sum does: by counting."""
    return x.to(torch.int64) if x.dtype == torch.bool else x


@collective
def psum(tree: PyTree, axis: Axes) -> CollectiveCall:
    """Sum over the devices along `axis`; every device gets the sum.

    device 0  [1 2]            [111 222]
    device 1  [10 20]      ─>  [111 222]
    device 2  [100 200]        [111 222]

    Sends 2(n-1)/n of the bytes. Booleans are counted. 16-bit floats accumulate in 32 bits, in a
    fixed binary tree (NCCL: in its own order and precision, except in reproducible mode).
    Backward: the cotangent passes through.

    >>> import torch, fshard as fs
    >>> mesh = fs.make_mesh({"data": 4})
    >>> fs.run(lambda: fs.psum(torch.tensor(fs.axis_index("data")), "data"), mesh=mesh)
    [tensor(6), tensor(6), tensor(6), tensor(6)]
    """
    return plan_call(
        "fs.psum", tree, axis, lambda x, group: _PSUM, prepare=_countable, equal="result"
    )


@collective
def pmean(tree: PyTree, axis: Axes) -> CollectiveCall:
    """Average over the devices along `axis`; every device gets the mean.

    Sends as many bytes as `psum`.

    >>> import torch, fshard as fs
    >>> mesh = fs.make_mesh({"data": 4})
    >>> fs.run(lambda: fs.pmean(torch.tensor(float(fs.axis_index("data"))), "data"), mesh=mesh)[0]
    tensor(1.5000)
    """

    return plan_call(
        "fs.pmean",
        tree,
        axis,
        lambda x, group: _PSUM,
        prepare=_validate_averageable,
        finish=lambda y, group: y / group.size,
        equal="result",
    )


def _validate_averageable(x: Tensor) -> Tensor:
    if not (x.is_floating_point() or x.is_complex()):
        raise TypeError(f"the mean of {x.dtype} is no {x.dtype}. Write fs.pmean(x.float(), ...).")
    if x.dtype.itemsize == 1 or x.dtype == torch.complex32:
        wider = "x.to(torch.complex64)" if x.is_complex() else "x.float()"
        raise TypeError(f"torch does not divide {x.dtype}. Write fs.pmean({wider}, ...).")
    return x


def _validate_ordered(x: Tensor) -> Tensor:
    if x.is_complex():
        raise TypeError("complex numbers have no order. Compare x.abs().")
    return x


@collective
def pmax(tree: PyTree, axis: Axes) -> CollectiveCall:
    """Return the elementwise maximum over the devices along `axis`, NaN if any is.

    Sends as many bytes as `psum`. Backward: the cotangent, divided equally among the devices whose
    element equals the maximum.

    >>> import torch, fshard as fs
    >>> mesh = fs.make_mesh({"data": 4})
    >>> fs.run(lambda: fs.pmax(torch.tensor(fs.axis_index("data")), "data"), mesh=mesh)[0]
    tensor(3)
    """
    return plan_call(
        "fs.pmax",
        tree,
        axis,
        lambda x, group: Extreme(True),
        prepare=_validate_ordered,
        equal="result",
    )


@collective
def pmin(tree: PyTree, axis: Axes) -> CollectiveCall:
    """Return the elementwise minimum over the devices along `axis`: see `pmax`.

    >>> import torch, fshard as fs
    >>> mesh = fs.make_mesh({"data": 4})
    >>> fs.run(lambda: fs.pmin(torch.tensor(fs.axis_index("data")), "data"), mesh=mesh)[0]
    tensor(0)
    """
    return plan_call(
        "fs.pmin",
        tree,
        axis,
        lambda x, group: Extreme(False),
        prepare=_validate_ordered,
        equal="result",
    )


@collective
def pvary(tree: PyTree, axis: Axes) -> CollectiveCall:
    """Convert a replicated value to a varying one (JAX: `pcast`).

    Sends nothing. Backward: psum.

    Use it where a value that is equal along `axis` first meets data that is not. In a loss function
    of `value_and_grad` it does nothing: every value there is varying.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"data": 4})
    >>> def gradient(w, x):
    ...     w = w.requires_grad_()
    ...     return torch.autograd.grad((fs.pvary(w, "data") * x).sum(), w)[0]
    >>> step = fs.shard_map(gradient, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    >>> fs.unshard(step(torch.tensor(2.0), torch.arange(4.0)))
    tensor(6.)
    """
    return plan_call("fs.pvary", tree, axis, lambda x, group: _PVARY, equal="argument")


@collective
def replicated(tree: PyTree, axis: Axes) -> CollectiveCall:
    """Declare a value that is equal along `axis` by construction as replicated.

    Sends nothing. A checked call compares it by value. Backward: the cotangent on the first device,
    zeros on the others. In a loss function of `value_and_grad` it does nothing.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"data": 2})
    >>> def ring_sum(x):
    ...     return fs.replicated(x + fs.ppermute(x, "data", [(0, 1), (1, 0)]), "data")
    >>> summed = fs.shard_map(ring_sum, mesh=mesh, in_specs=P("data"), out_specs=P())
    >>> fs.unshard(summed(torch.tensor([1.0, 2.0])))
    tensor([3.])
    """
    return plan_call("fs.replicated", tree, axis, lambda x, group: Same(), equal="argument")


@collective
def all_gather(
    tree: PyTree, axis: Axes, *, dim: int = 0, to: Literal["varying", "replicated"] = "varying"
) -> CollectiveCall:
    """Concatenate the shards along `axis` on every device, along `dim`.

    Sends (n-1)/n of the result's bytes.

    device 0  [a]        [a b c]
    device 1  [b]    ─>  [a b c]
    device 2  [c]        [a b c]

    to            backward
    "varying"     psum_scatter
    "replicated"  local slice, no communication

    A 0-d tensor is gathered as one of one element.

    >>> import torch, fshard as fs
    >>> mesh = fs.make_mesh({"data": 4})
    >>> fs.run(lambda: fs.all_gather(torch.tensor([fs.axis_index("data")]), "data"), mesh=mesh)[0]
    tensor([0, 1, 2, 3])
    """
    if to not in ("varying", "replicated"):
        raise ValueError(f'fs.all_gather: to must be "varying" or "replicated"; got {to!r}.')
    replicated = to == "replicated"
    return plan_call(
        "fs.all_gather",
        tree,
        axis,
        lambda x, group: AllGather(_normalized_dim(x, dim), replicated),
        prepare=lambda x: x if x.ndim else x.reshape(1),
        equal="result" if replicated else None,
    )


@collective
def psum_scatter(tree: PyTree, axis: Axes, *, dim: int = 0) -> CollectiveCall:
    """Sum over the devices along `axis`, and leave each device with its shard along `dim`.

    Sends (n-1)/n of the bytes.

    device 0  [1 2 3]              [111]
    device 1  [10 20 30]       ─>  [222]
    device 2  [100 200 300]        [333]

    Backward: all_gather.

    >>> import torch, fshard as fs
    >>> mesh = fs.make_mesh({"data": 2})
    >>> fs.run(lambda: fs.psum_scatter(torch.tensor([1.0, 2.0]), "data"), mesh=mesh)
    [tensor([2.]), tensor([4.])]
    """
    return plan_call(
        "fs.psum_scatter",
        tree,
        axis,
        lambda x, group: PsumScatter(_divisible_dim(x, dim, group)),
        prepare=_countable,
    )


@collective
def all_to_all(
    tree: PyTree,
    axis: Axes,
    *,
    split_dim: int = 0,
    concat_dim: int | None = None,
    counts: Any = None,
) -> CollectiveCall:
    """Split `split_dim` into a shard per device; concatenate the received ones along `concat_dim`.

    device 0  [a0 a1 a2]        [a0 b0 c0]
    device 1  [b0 b1 b2]    ─>  [a1 b1 c1]
    device 2  [c0 c1 c2]        [a2 b2 c2]

    `concat_dim` is `split_dim` by default. Sends (n-1)/n of the bytes. Backward: all_to_all with
    the dims swapped.

    With `counts` devices get these numbers of rows (of dim 0), in order. It is a matrix, equal on
    all devices, of the rows that each device (a row) sends to each (a column); or this device's row
    of it, which is all-gathered first. The result has the rows from device 0, then those from 1,
    ... Backward: all_to_all with the matrix transposed. On an abstract mesh a row is what every
    device is expected to send.

    >>> import torch, fshard as fs
    >>> mesh = fs.make_mesh({"data": 2})
    >>> def main(length, counts=None):
    ...     rows = torch.arange(length) + 10 * fs.axis_index("data")
    ...     return fs.all_to_all(rows, "data", counts=counts)
    >>> fs.run(main, 2, mesh=mesh)
    [tensor([ 0, 10]), tensor([ 1, 11])]
    >>> fs.run(main, 3, [1, 2], mesh=mesh)
    [tensor([ 0, 10]), tensor([ 1,  2, 11, 12])]
    """
    concat = split_dim if concat_dim is None else concat_dim
    if counts is not None:
        if (split_dim, concat) != (0, 0):
            raise ValueError(
                "fs.all_to_all: counts are of rows, of dim 0; "
                f"got {split_dim=}, {concat_dim=}. Leave them out."
            )
        return _plan_rows(tree, axis, counts)

    def move(x: Tensor, group: Group) -> AllToAll:
        split = _divisible_dim(x, split_dim, group)
        return AllToAll(split, _normalized_dim(x, concat))

    return plan_call("fs.all_to_all", tree, axis, move)


def _plan_rows(tree: PyTree, axis: Axes, counts: Any) -> CollectiveCall:
    """Plan an all_to_all of counted rows, in buffers that are equally long on all devices.

    With counts [[1, 2], [0, 3]] both buffers have 5 rows, as the result of device 1 has:

                  argument      padded              exchanged           result
        device 0  [0 1 2]       [0 1 2 . .]         [0 . . . .]         [0]
        device 1  [10 11 12]    [10 11 12 . .]      [1 2 10 11 12]      [1 2 10 11 12]
    """
    group = require("fs.all_to_all").group(axis, "fs.all_to_all")  # `plan_call` notifies the step
    matrix = _counts_matrix(counts, group)
    sent = sum(matrix[group.index])
    received = sum(row[group.index] for row in matrix)
    length = Rows(matrix, 1).length

    def padded(x: Tensor) -> Tensor:
        if not x.ndim or len(x) != sent:
            raise ValueError(
                f"counts of device {group.index} are of {sent} rows; "
                f"got a tensor of shape {tuple(x.shape)}."
            )
        if len(x) == length:
            return x
        padding = x.new_zeros(length - len(x), *x.shape[1:])
        return torch.cat([x, padding])

    def move(x: Tensor, group: Group) -> Rows:
        return Rows(matrix, x[0].numel())

    def without_padding(y: Tensor, group: Group) -> Tensor:
        return y[:received]

    return plan_call("fs.all_to_all", tree, axis, move, prepare=padded, finish=without_padding)


def _counts_matrix(counts: Any, group: Group) -> tuple[tuple[int, ...], ...]:
    """Return the rows that each device of a group sends to each.

    `counts` is this matrix, or the row of this device, which is gathered from all. On an abstract
    mesh every device has the row of the one that represents it.
    """
    n = group.size
    table = counts.tolist() if isinstance(counts, Tensor) else counts
    if _is_row_of_counts(table, n):
        if group.world.has_values:
            rows = all_gather(torch.tensor([table]), group.axes).tolist()
        else:
            rows = [table] * n
    elif _is_matrix_of_counts(table, n):
        rows = table
    else:
        raise ValueError(
            f"fs.all_to_all: counts must be {n} numbers of rows, or {n} x {n}, for the {n} devices "
            f"along {'+'.join(group.axes)}; got {counts!r}."
        )
    return tuple([tuple([int(count) for count in row]) for row in rows])


def _is_matrix_of_counts(table: Any, n: int) -> bool:
    if not isinstance(table, list | tuple) or len(table) != n:
        return False
    return all(_is_row_of_counts(row, n) for row in table)


def _is_row_of_counts(row: Any, n: int) -> bool:
    if not isinstance(row, list | tuple) or len(row) != n:
        return False
    for count in row:
        if not _is_integer(count) or count < 0:
            return False
    return True


@collective
def ppermute(tree: PyTree, axis: Axes, perm: list[tuple[int, int]]) -> CollectiveCall:
    """Send along (source, destination) pairs; a device that receives nothing gets zeros.

    device 0  [a]        [0]
    device 1  [b]    ─>  [a]      perm=[(0, 1), (1, 2)]
    device 2  [c]        [b]

    Sends the bytes once. Backward: ppermute with the pairs reversed.

    >>> import torch, fshard as fs
    >>> mesh = fs.make_mesh({"pipe": 3})
    >>> def main():
    ...     x = torch.tensor(fs.axis_index("pipe") + 1)
    ...     return fs.ppermute(x, "pipe", [(0, 1), (1, 2)])
    >>> fs.run(main, mesh=mesh)
    [tensor(0), tensor(1), tensor(2)]
    """
    group = require("fs.ppermute").group(axis, "fs.ppermute")
    destinations: dict[int, int] = {}
    for pair in perm if isinstance(perm, Iterable) else [perm]:
        if not _is_new_pair(pair, destinations, group.size):
            raise ValueError(
                "fs.ppermute: perm must be (source, destination) pairs of indices in "
                f"0..{group.size - 1} along {'+'.join(group.axes)}, each index at most once as "
                f"source and once as destination; got {pair!r}."
            )
        source, to = pair
        destinations[source] = to
    move = Permute(tuple(destinations.items()))
    return plan_call("fs.ppermute", tree, axis, lambda x, group: move)


def _is_new_pair(pair: Any, destinations: dict[int, int], n: int) -> bool:
    """Return True if a pair has two indices below n that are not used yet."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        return False
    source, to = pair
    if not (_is_integer(source) and _is_integer(to)):
        return False
    is_inside = 0 <= source < n and 0 <= to < n
    return is_inside and source not in destinations and to not in destinations.values()


def _is_integer(number: object) -> TypeGuard[int]:
    return isinstance(number, Integral) and not isinstance(number, bool)


@collective
def broadcast(tree: PyTree, axis: Axes, *, source: int = 0) -> CollectiveCall:
    """Copy the value of the device at index `source` to every device along `axis`.

    device 0  [a]        [b]
    device 1  [b]    ─>  [b]      source=1
    device 2  [c]        [b]

    Sends the bytes once. Backward: the cotangent on the source device, zeros on the others.

    >>> import torch, fshard as fs
    >>> mesh = fs.make_mesh({"data": 3})
    >>> def main():
    ...     return fs.broadcast(torch.tensor(fs.axis_index("data")), "data", source=2)
    >>> fs.run(main, mesh=mesh)
    [tensor(2), tensor(2), tensor(2)]
    """
    group = require("fs.broadcast").group(axis, "fs.broadcast")
    check_index("fs.broadcast", "source", source, group)
    return plan_call("fs.broadcast", tree, axis, lambda x, group: Broadcast(source), equal="result")


def check_index(caller: str, role: str, index: int, group: Group) -> None:
    """Raise unless `index` is an index along the group's axes."""
    is_integer = _is_integer(index)
    if not is_integer or not 0 <= index < group.size:
        kind = ValueError if is_integer else TypeError
        raise kind(
            f"{caller}: {role} must be one of the indices 0..{group.size - 1} along "
            f"{'+'.join(group.axes)}; got {index!r}."
        )


@uncompiled
def axis_index(axis: Axes) -> int:
    """Return the calling device's index along `axis`: along several, one number, major to minor.

    >>> import fshard as fs
    >>> fs.run(lambda: fs.axis_index("data"), mesh=fs.make_mesh({"data": 3}))
    [0, 1, 2]
    """
    return require("fs.axis_index").called_group(axis, "fs.axis_index").index


@uncompiled
def axis_size(axis: Axes) -> int:
    """Return the number of devices along `axis`.

    >>> import fshard as fs
    >>> fs.run(lambda: fs.axis_size("data"), mesh=fs.make_mesh({"data": 3}))
    [3, 3, 3]
    """
    return require("fs.axis_size").called_group(axis, "fs.axis_size").size
