"""`moe`: tokens to the devices of their experts and back.

Here two devices have an expert each, A and B, and two tokens each, of which each has two experts:

    device                     0                       1
    tokens and their experts   s: A B    t: B A        u: B A    v: B A
    rows, sorted by expert     s t | s t               u v | u v
    all_to_all                 s t u v of A            s t u v of B
    experts                    A(s) A(t) A(u) A(v)     B(s) B(t) B(u) B(v)
    all_to_all back            A(s) A(t) | B(s) B(t)   A(u) A(v) | B(u) B(v)
    weighted sum by token      s: A(s) + B(s), ...     u: B(u) + A(u), ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from fshard.experts.grouped import swiglu
from fshard.experts.routing import Routing
from fshard.mesh.collectives.api import all_gather, all_to_all, axis_index, axis_size, psum, pvary
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
    if count % devices or (capacity is not None and capacity <= 0):
        raise ValueError(
            f"moe: the axes {as_written(expert_axes)} must divide the experts, and capacity be > 0 "
            f"or None; got {devices} devices, {count} experts, {capacity=}."
        )
    if _is_for_shapes(x, batch_axes):
        return torch.empty_like(x), MoEStats(x.new_empty(count), x.new_empty(()))

    tokens = x.reshape(-1, x.shape[-1])
    weights = routing.weights
    order, counts, stats = _sorted(routing.experts, count, batch_axes, capacity)
    if replicated:
        order, counts = _of_same_index(order, counts, count // devices, replicated)
        # Each device of these axes computes other summands of the tokens' results.
        tokens, weights = pvary((tokens, weights), replicated)

    top_k = routing.experts.shape[-1]
    sources = order.div(top_k, rounding_mode="floor")  # the token of each row
    rows = tokens[sources]
    if axis is None:
        results = _applied(experts, rows, counts)
    else:
        results = _on_devices_of_experts(experts, rows, counts, axis)

    weighted = results * weights.reshape(-1)[order, None].to(results.dtype)
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


def _sorted(
    experts: Tensor, count: int, axes: tuple[str, ...], capacity: float | None
) -> tuple[Tensor, list[int], MoEStats]:
    """Sort the rows of this device by expert, and drop those beyond the capacity.

    Args:
        experts: of each token.  (tokens, top_k)
        count: of all experts.
        axes: that shard the batch.
        capacity: as in `moe`.

    Returns:
        The positions of kept rows in the flattened `experts`, sorted by expert; the kept rows of
        each expert; and the statistics.
    """
    experts = experts.reshape(-1)
    if experts.is_meta:
        return _balanced(experts, count)
    rows = torch.bincount(experts, minlength=count)
    table = all_gather(rows[None], axes) if axes else rows[None]  # (devices, experts)
    load = table.sum(0)
    order = experts.argsort(stable=True)
    if capacity is None:
        return order, rows.tolist(), MoEStats(load, table.sum() - load.sum())

    # For example, two devices have rows [3, 1] and [2, 2] of two experts, so the load is [5, 3].
    # With capacity 1 the limit is the mean, 4. The first device keeps [3, 1], the second one has
    # 4 - 3 and 4 - 1 left, and keeps [1, 2]: one row is dropped.
    limit = ceil(capacity * int(load.sum()) / count)
    rows_before = table[: axis_index(axes)].sum(0) if axes else torch.zeros_like(load)
    kept = (limit - rows_before).clamp(min=0).minimum(rows)

    sorted_experts = experts[order]
    first_row = rows.cumsum(0) - rows  # of each expert
    row_of_expert = torch.arange(len(experts), device=experts.device) - first_row[sorted_experts]
    order = order[row_of_expert < kept[sorted_experts]]
    load = load.clamp(max=limit)
    return order, kept.tolist(), MoEStats(load, table.sum() - load.sum())


def _balanced(experts: Tensor, count: int) -> tuple[Tensor, list[int], MoEStats]:
    """Return what `_sorted` returns, for rows without values: as many of each expert."""
    counts: list[int] = []
    for expert in range(count):
        start, stop = balanced_range(len(experts), count, expert)
        counts.append(stop - start)
    order = torch.arange(len(experts), device="meta")
    return order, counts, MoEStats(experts.new_empty(count), experts.new_empty(()))


def _of_same_index(
    order: Tensor, counts: Sequence[int], each: int, axes: Axes
) -> tuple[Tensor, list[int]]:
    """Return the positions and counts of rows for the experts of devices with this one's index.

    With 8 experts over an axis and a replicated one, of 2 devices each, a device has 2 experts:

        index along the axis              0     0     1     1
        index along the replicated axis   0     1     0     1
        experts                           0 1   2 3   4 5   6 7

    Devices whose index along the replicated axis is 0 send rows to experts 0, 1, 4 and 5.

    Args:
        order: positions of rows, sorted by expert.
        counts: the rows of each expert.
        each: the number of experts of a device.
        axes: replicated axes.
    """
    size = axis_size(axes)
    index = axis_index(axes)
    blocks = order.split([*counts])
    same_index = [expert for expert in range(len(counts)) if expert // each % size == index]
    positions = torch.cat([blocks[expert] for expert in same_index])
    return positions, [counts[expert] for expert in same_index]


# Experts.


def _on_devices_of_experts(
    experts: Experts, rows: Tensor, counts: Sequence[int], axis: str
) -> Tensor:
    """Send rows to the devices of their experts, apply these, and send the results back."""
    n = axis_size(axis)
    index = axis_index(axis)
    if rows.is_meta:
        table = [[*counts]] * n
    else:
        table = all_gather(torch.tensor([[*counts]], device=rows.device), axis).tolist()

    each = len(counts) // n
    matrix: list[list[int]] = []  # the rows that each device sends to each other one
    for device_counts in table:
        starts = range(0, len(counts), each)
        matrix.append([sum(device_counts[start : start + each]) for start in starts])
    first = index * each
    by_source = [device_counts[first : first + each] for device_counts in table]
    by_expert = [*zip(*by_source, strict=True)]
    expert_counts = [sum(source_counts) for source_counts in by_expert]

    # One name: without autograd each of these is freed when the next one is there.
    rows = all_to_all(rows, axis, counts=matrix)
    rows = _transposed_blocks(rows, by_source)
    rows = _applied(experts, rows, expert_counts)
    rows = _transposed_blocks(rows, by_expert)
    return all_to_all(rows, axis, counts=[*zip(*matrix, strict=True)])


def _transposed_blocks(rows: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
    """Return rows that are sorted by (i, j) in the order of (j, i).

    There are `counts[i][j]` rows of (i, j).

    >>> _transposed_blocks(torch.tensor([0, 1, 10, 10, 11]), [[1, 1], [2, 1]])
    tensor([ 0, 10, 10,  1, 11])
    """
    blocks = rows.split([*chain(*counts)])
    columns = len(counts[0])
    transposed: list[Tensor] = []
    for column in range(columns):
        transposed += blocks[column::columns]
    return torch.cat(transposed)


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
