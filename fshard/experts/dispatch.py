"""`moe`: tokens to the devices of their experts and back.

Here two devices have an expert each, A and B, and two tokens each, of which each has two experts:

    device                     0                       1
    tokens and their experts   s: A B    t: B A        u: B A    v: B A
    rows, sorted by expert     s t | s t               u v | u v
    all_to_all                 s t u v of A            s t u v of B
    experts                    A(s) A(t) A(u) A(v)     B(s) B(t) B(u) B(v)
    all_to_all back            A(s) A(t) | B(s) B(t)   A(u) A(v) | B(u) B(v)
    weighted sum by token      s: A(s) + B(s), ...     u: B(u) + A(u), ...

The host must know how many rows each device sends to each other one. It reads one table of these
numbers in a forward, for which it waits for an accelerator, and nothing in a backward. All else,
such as limits and orders of rows, is computed on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fshard.experts.grouped import swiglu
from fshard.experts.routing import Routing
from fshard.mesh.collectives.api import all_gather, all_to_all, axis_index, axis_size, psum, pvary
from fshard.mesh.collectives.autograd import LinearMap, Tensors, apply
from fshard.mesh.layout import Axes, as_axes, as_written
from fshard.mesh.layout.arithmetic import balanced_range
from fshard.mesh.spmd.scope import here

Experts = Mapping[str, Tensor] | Callable[[Tensor, Sequence[int]], Tensor]


def of_this_mesh(axes: Axes) -> tuple[str, ...]:
    """Return those axes that the mesh of the calling device has; none outside of a mesh."""
    scope = here()
    if scope is None:
        return ()
    return tuple([axis for axis in as_axes(axes) if axis in scope.mesh.axis_names])


class MoEStats(NamedTuple):
    """The use of the experts of a layer.

    Args:
        load: the rows of each expert, on all devices of the batch's axes.
        dropped: the number of rows that were dropped.
    """

    load: Tensor
    dropped: Tensor


def moe(
    x: Tensor,
    routing: Routing,
    experts: Experts,
    *,
    axis: str | None = None,
    batch: Axes = (),
    replicated: Axes = (),
    capacity: float | None = None,
) -> tuple[Tensor, MoEStats]:
    """Return the weighted sum of the results of each token's experts, and how these are used.

    Args:
        x: tokens.  (..., width)
        routing: of the flattened tokens.
        experts: the weights of this device's experts, "gate", "up" and "down", or a function of
            rows, sorted by expert, and the number of rows of each of this device's experts.
        axis: that shards the experts, and the batch: tokens are sent along it. None: this device
            has all experts.
        batch: the axes that shard the batch, `axis` among them, for loads and capacity; default:
            `axis`.
        replicated: axes along which devices have the same tokens, as in tensor parallelism. They
            shard the experts too, inside of `axis`: each device sends tokens to the experts of its
            own index alone, and the results are summed.
        capacity: the most rows of an expert, in parts of the mean; further ones, in the order of
            the batch, are dropped: their tokens get nothing from this expert. None: no row is
            dropped.

    >>> routing = Routing(torch.tensor([[0], [1]]), torch.ones(2, 1), torch.full((2, 2), 0.5))
    >>> moe(torch.ones(2, 3), routing, lambda rows, counts: rows * 2)[0]
    tensor([[2., 2., 2.],
            [2., 2., 2.]])
    """
    replicated = as_axes(replicated)
    batch_axes = as_axes(batch) or as_axes(axis or ())
    expert_axes = (*as_axes(axis or ()), *replicated)
    count = routing.scores.shape[-1]
    devices = axis_size(expert_axes) if expert_axes else 1
    if axis is not None and axis not in batch_axes:
        raise ValueError(
            f'moe: batch must have the axis "{axis}", along which tokens are sent; '
            f"got {as_written(batch_axes)}. Leave batch out, or name all axes of the batch."
        )
    if count % devices or (capacity is not None and capacity <= 0):
        raise ValueError(
            f"moe: the axes {as_written(expert_axes)} must divide the experts, and capacity be > 0 "
            f"or None; got {devices} devices, {count} experts, {capacity=}."
        )
    if _is_for_shapes(x, batch_axes):
        return torch.empty_like(x), MoEStats(x.new_empty(count), x.new_empty(()))

    tokens = x.reshape(-1, x.shape[-1])
    weights = routing.weights
    if replicated:
        # Each device of these axes computes other summands of the tokens' results.
        tokens, weights = pvary((tokens, weights), replicated)
    layer = _Layer(count, count // devices, axis, batch_axes, replicated)
    order, counts, stats = _sorted(routing.experts, layer, capacity)

    # By index_select, whose backward adds rows. That of an index in brackets sorts them first.
    top_k = routing.experts.shape[-1]
    sources = order.div(top_k, rounding_mode="floor")  # the token of each row
    rows = tokens.index_select(0, sources)
    if axis is None:
        results = _applied(experts, rows, counts.received)
    else:
        results = _on_devices_of_experts(experts, rows, counts, axis)

    row_weights = weights.reshape(-1).index_select(0, order).unsqueeze(-1)
    weighted = results * row_weights.to(results.dtype)
    y = torch.zeros_like(tokens, dtype=weighted.dtype).index_add(0, sources, weighted).view(x.shape)
    if replicated:
        y = psum(y, replicated)
    return y, stats


def _is_for_shapes(x: Tensor, axes: tuple[str, ...]) -> bool:
    """Return True if a block of another stage runs for its shapes alone.

    It does so inside of a step, whose devices of that stage are not here, or while its model is
    split, where there are no devices.
    """
    scope = here()
    if scope is None:
        return x.is_meta and bool(axes)
    return scope.is_for_shapes


# Rows, sorted by expert.


class _Layer(NamedTuple):
    """The shares that devices have in a layer of experts.

    Args:
        experts: the number of all.
        each: the number of experts of a device.
        axis, batch, replicated: as in `moe`.
    """

    experts: int
    each: int
    axis: str | None
    batch: tuple[str, ...]
    replicated: tuple[str, ...]


class _Counts(NamedTuple):
    """Numbers of rows that devices along the axis send to each other.

    Args:
        sent: from each device (a row) to each, on the host.
        received: of each of this device's experts, on the host.
        by_source: the same by the devices that these come from.  (devices, experts of a device)
    """

    sent: list[list[int]]
    received: list[int]
    by_source: Tensor


def _sorted(
    experts: Tensor, layer: _Layer, capacity: float | None
) -> tuple[Tensor, _Counts, MoEStats]:
    """Sort the rows of this device by expert, and drop those beyond the capacity.

    Args:
        experts: of each token.  (tokens, top_k)
        layer: the devices' shares.
        capacity: as in `moe`.

    Returns:
        The positions of the rows that this device sends in the flattened `experts`, sorted by
        expert; their numbers on all devices along the axis; and the statistics.
    """
    experts = experts.reshape(-1)
    if experts.is_meta:
        return _balanced(experts, layer)
    sorted_experts, order = experts.sort(stable=True)
    numbers = torch.arange(layer.experts, dtype=experts.dtype, device=experts.device)
    ends = torch.searchsorted(sorted_experts, numbers, right=True)
    starts = torch.searchsorted(sorted_experts, numbers)
    rows = ends - starts  # of each expert
    table = all_gather(rows[None], layer.batch) if layer.batch else rows[None]

    kept = table
    if capacity is not None:
        kept = _within_capacity(table, capacity)
    stats = MoEStats(kept.sum(0), table.sum() - kept.sum())
    kept = _of_same_index(_along_axis(kept, layer), layer)
    counts = _read(kept, layer)
    if capacity is not None or layer.replicated:
        index = _index_along_axis(layer)
        starts = _of_same_index(starts, layer)
        order = order.index_select(0, _ranges(starts, kept[index], sum(counts.sent[index])))
    return order, counts, stats


def _read(table: Tensor, layer: _Layer) -> _Counts:
    """Read the numbers of rows that the host must know: the one wait of a layer.

    `table` has the rows that devices along the axis send to experts: (devices, experts).
    """
    n = len(table)
    blocks = table.unflatten(1, (n, layer.each))  # (from device, to device, experts of it)
    by_source = blocks[:, _index_along_axis(layer)]
    rows_sent = blocks.sum(-1)
    rows_received = by_source.sum(0)

    # In one tensor: each `tolist` waits for the device.
    numbers = torch.cat([rows_sent.flatten(), rows_received]).tolist()
    sent = [numbers[start : start + n] for start in range(0, n * n, n)]
    received = numbers[n * n :]
    return _Counts(sent, received, by_source)


def _index_along_axis(layer: _Layer) -> int:
    """Return this device's index along the axis; 0 without one."""
    if layer.axis is None:
        return 0
    return axis_index(layer.axis)


def _within_capacity(table: Tensor, capacity: float) -> Tensor:
    """Return the rows of each expert that each device of the batch keeps.

    For example, two devices have rows [3, 1] and [2, 2] of two experts, so the loads are 5 and 3.
    With capacity 1 the limit is the mean, 4. The first device keeps [3, 1], the second one has
    4 - 3 and 4 - 1 left, and keeps [1, 2]: one row is dropped.

    >>> _within_capacity(torch.tensor([[3, 1], [2, 2]]), 1.0)
    tensor([[3, 1],
            [1, 2]])
    """
    total = table.sum(dtype=torch.float64)
    # Divided by a tensor: in place of a division by a number CUDA multiplies by its reciprocal, and
    # a quotient that is an integer may come out larger.
    limit = (total * capacity / torch.full_like(total, table.shape[1])).ceil().long()
    rows_before = table.cumsum(0) - table  # those of devices that come before in the batch
    return (limit - rows_before).clamp(min=0).minimum(table)


def _balanced(experts: Tensor, layer: _Layer) -> tuple[Tensor, _Counts, MoEStats]:
    """Return what `_sorted` returns, for rows without values: as many of each expert."""
    rows: list[int] = []
    for expert in range(layer.experts):
        start, stop = balanced_range(len(experts), layer.experts, expert)
        rows.append(stop - start)

    # The experts of each device, or of each whose index is that of this one: see `_of_same_index`.
    blocks = [rows[start : start + layer.each] for start in range(0, layer.experts, layer.each)]
    if layer.replicated:
        blocks = blocks[axis_index(layer.replicated) :: axis_size(layer.replicated)]
    n = len(blocks)
    sent = [sum(block) for block in blocks]
    received = [n * count for count in blocks[_index_along_axis(layer)]]

    order = torch.arange(sum(sent), device="meta")
    by_source = experts.new_empty(n, layer.each)
    stats = MoEStats(experts.new_empty(layer.experts), experts.new_empty(()))
    return order, _Counts([sent] * n, received, by_source), stats


def _along_axis(table: Tensor, layer: _Layer) -> Tensor:
    """Return the rows of a table of the batch's devices that are of this group along the axis.

    (devices of the batch, experts) -> (devices along the axis, experts)
    """
    if not layer.batch:
        return table
    sizes = [axis_size(axis) for axis in layer.batch]
    table = table.unflatten(0, sizes)
    for dim, axis in enumerate(layer.batch):
        if axis != layer.axis:
            table = table.narrow(dim, axis_index(axis), 1)
    return table.flatten(0, -2)


def _of_same_index(x: Tensor, layer: _Layer) -> Tensor:
    """Return the columns of experts that are on devices with this one's index.

    With 8 experts over an axis and a replicated one, of 2 devices each, a device has 2 experts:

        index along the axis              0     0     1     1
        index along the replicated axis   0     1     0     1
        experts                           0 1   2 3   4 5   6 7

    Devices whose index along the replicated axis is 0 send rows to experts 0, 1, 4 and 5.

    (..., all experts) -> (..., experts of this index)
    """
    if not layer.replicated:
        return x
    blocks = x.unflatten(-1, (-1, axis_size(layer.replicated), layer.each))
    return blocks[..., axis_index(layer.replicated), :].flatten(-2)


def _ranges(starts: Tensor, lengths: Tensor, total: int) -> Tensor:
    """Return ranges of numbers, one behind the other; `total` is the sum of their lengths.

    >>> _ranges(torch.tensor([5, 0]), torch.tensor([2, 3]), total=5)
    tensor([5, 6, 0, 1, 2])
    """
    ends = lengths.cumsum(0)
    shifts = starts - (ends - lengths)
    # With its size the result is made without a wait.
    shifts = shifts.repeat_interleave(lengths, output_size=total)
    return shifts + torch.arange(total, device=starts.device)


# Experts.


def _on_devices_of_experts(experts: Experts, rows: Tensor, counts: _Counts, axis: str) -> Tensor:
    """Send rows to the devices of their experts, apply these, and send the results back."""
    by_expert = _transposed_order(counts.by_source, sum(counts.received))
    by_source = _inverse(by_expert)
    returned = [*zip(*counts.sent, strict=True)]

    # One name: without autograd each of these is freed when the next one is there.
    rows = all_to_all(rows, axis, counts=counts.sent)
    (rows,) = apply(_Permutation(by_expert, by_source), (rows,))
    rows = _applied(experts, rows, counts.received)
    (rows,) = apply(_Permutation(by_source, by_expert), (rows,))
    return all_to_all(rows, axis, counts=returned)


@dataclass(frozen=True)
class _Permutation(LinearMap):
    """Rows in another order, and their cotangents in the order before.

    The backward of `index_select` adds them to zeros instead, since an index may repeat a row.
    """

    order: Tensor
    inverse: Tensor
    dim: int = 0

    def run(self, xs: Tensors) -> Tensors:
        return tuple([x.index_select(self.dim, self.order) for x in xs])

    def transposed(self) -> LinearMap:
        return _Permutation(self.inverse, self.order, self.dim)

    def batched(self) -> LinearMap:
        return _Permutation(self.order, self.inverse, self.dim + 1)


def _transposed_order(counts: Tensor, total: int) -> Tensor:
    """Return the order by (j, i) of rows that are sorted by (i, j).

    There are `counts[i, j]` rows of (i, j), in all `total`.

    >>> _transposed_order(torch.tensor([[1, 1], [2, 1]]), total=5)
    tensor([0, 2, 3, 1, 4])
    """
    lengths = counts.flatten()
    starts = (lengths.cumsum(0) - lengths).view_as(counts)
    return _ranges(starts.T.flatten(), counts.T.flatten(), total)


def _inverse(order: Tensor) -> Tensor:
    """Return the order that undoes another one.

    >>> _inverse(torch.tensor([0, 2, 3, 1]))
    tensor([0, 3, 1, 2])
    """
    numbers = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).scatter_(0, order, numbers)


def _applied(experts: Experts, rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Apply this device's experts to their rows."""
    if callable(experts):
        return experts(rows, counts)
    misfits = [f"{name} has {len(w)}" for name, w in experts.items() if len(w) != len(counts)]
    if misfits:
        raise ValueError(
            f"moe: weights must have the {len(counts)} experts of a device in dim 0; "
            f"{', '.join(misfits)}. Shard them by P(axis), with local=axis in the step."
        )
    return swiglu(experts, rows, counts)
