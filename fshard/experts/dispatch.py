"""`moe`: tokens to the devices of their experts and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from fshard.experts.grouped import swiglu
from fshard.experts.routing import Routing
from fshard.mesh.collectives.api import all_gather, all_to_all, axis_index, axis_size, psum, pvary
from fshard.mesh.layout import Axes, as_axes, as_written
from fshard.mesh.spmd.scope import here

Experts = Mapping[str, Tensor] | Callable[[Tensor, Sequence[int]], Tensor]


def of_this_mesh(axes: Axes) -> tuple[str, ...]:
    """Return those axes that the mesh of the calling device has; none outside of a mesh."""
    scope = here()
    return (
        ()
        if scope is None
        else tuple([axis for axis in as_axes(axes) if axis in scope.mesh.axis_names])
    )


class MoEStats(NamedTuple):
    """The rows of each expert, on all devices of the batch's axes, and the number of rows that were dropped."""

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
        experts: the weights of this device's experts, "gate", "up" and "down", or a function of rows, sorted by expert, and
            the number of rows of each of this device's experts.
        axis: that shards the experts, and the batch: tokens are sent along it. None: this device has all experts.
        batch: the axes that shard the batch, `axis` among them, for loads and capacity; default: `axis`.
        replicated: axes along which devices have the same tokens, as in tensor parallelism. They shard the experts too, inside
            of `axis`: each device sends tokens to the experts of its own index alone, and the results are summed.
        capacity: the most rows of an expert, in parts of the mean; further ones, in the order of the batch, are dropped: their
            tokens get nothing from this expert. None: no row is dropped.

    >>> routing = Routing(torch.tensor([[0], [1]]), torch.ones(2, 1), torch.full((2, 2), 0.5))
    >>> moe(torch.ones(2, 3), routing, lambda rows, counts: rows * 2)[0]
    tensor([[2., 2., 2.],
            [2., 2., 2.]])
    """
    replicated = as_axes(replicated)
    axes, sharding, count = (
        as_axes(batch) or as_axes(axis or ()),
        (*as_axes(axis or ()), *replicated),
        routing.scores.shape[-1],
    )
    n = axis_size(sharding) if sharding else 1
    if count % n or (capacity is not None and capacity <= 0):
        raise ValueError(
            f"moe: the axes {as_written(sharding)} must divide the experts, and capacity be > 0 or None; got {n} devices, "
            f"{count} experts, {capacity=}."
        )
    # A block of another stage runs for its shapes alone: inside of a step, whose devices of that
    # stage are not here, or while its model is split, where there are no devices.
    scope = here()
    is_for_shapes = x.is_meta and bool(axes) if scope is None else scope.is_for_shapes
    if is_for_shapes:
        return torch.empty_like(x), MoEStats(x.new_empty(count), x.new_empty(()))
    tokens, weights, top_k = x.reshape(-1, x.shape[-1]), routing.weights, routing.experts.shape[-1]
    order, counts, stats = _sorted(routing.experts, count, axes, capacity)
    if replicated:
        order, counts = _of_own_index(order, counts, count // n, replicated)
        tokens, weights = pvary((tokens, weights), replicated)
    sources = order.div(top_k, rounding_mode="floor")
    rows = tokens[sources]
    if axis is None:
        results = _applied(experts, rows, counts)
    else:
        results = _on_devices_of_experts(experts, rows, counts, axis)
    weighted = results * weights.reshape(-1)[order, None].to(results.dtype)
    y = torch.zeros_like(tokens, dtype=weighted.dtype).index_add(0, sources, weighted).view(x.shape)
    return psum(y, replicated) if replicated else y, stats


def _sorted(
    experts: Tensor, count: int, axes: tuple[str, ...], capacity: float | None
) -> tuple[Tensor, list[int], MoEStats]:
    """Return the places of kept rows, sorted by expert, the rows of each expert, and the statistics."""
    flat = experts.reshape(-1)
    if flat.is_meta:  # as many rows of each expert
        counts = [(i + 1) * len(flat) // count - i * len(flat) // count for i in range(count)]
        return (
            torch.arange(len(flat), device="meta"),
            counts,
            MoEStats(flat.new_empty(count), flat.new_empty(())),
        )
    rows = torch.bincount(flat, minlength=count)
    table = all_gather(rows[None], axes) if axes else rows[None]  # (devices, experts)
    load, order = table.sum(0), flat.argsort(stable=True)
    kept = rows
    if capacity is not None:
        limit = ceil(capacity * int(load.sum()) / count)
        before = (
            table[: axis_index(axes)].sum(0) if axes else torch.zeros_like(load)
        )  # rows of devices before this one
        kept = (limit - before).clamp(min=0).minimum(rows)
        place = torch.arange(len(flat), device=flat.device) - (rows.cumsum(0) - rows)[flat[order]]
        order = order[place < kept[flat[order]]]
        load = load.clamp(max=limit)
    return order, kept.tolist(), MoEStats(load, table.sum() - load.sum())


def _of_own_index(
    order: Tensor, counts: Sequence[int], each: int, axes: Axes
) -> tuple[Tensor, list[int]]:
    """Return the places and counts of rows for the experts of devices that have this one's index along some axes."""
    size, index = axis_size(axes), axis_index(axes)
    own = [expert for expert in range(len(counts)) if expert // each % size == index]
    parts = order.split([*counts])
    return torch.cat([parts[expert] for expert in own]), [counts[expert] for expert in own]


def _on_devices_of_experts(
    experts: Experts, rows: Tensor, counts: Sequence[int], axis: str
) -> Tensor:
    """Send rows to the devices of their experts, apply these, and send the results back."""
    n, index = axis_size(axis), axis_index(axis)
    if rows.is_meta:
        table = [[*counts]] * n
    else:
        table = all_gather(torch.tensor([[*counts]], device=rows.device), axis).tolist()
    each = len(counts) // n
    matrix = [[sum(row[to * each : (to + 1) * each]) for to in range(n)] for row in table]
    received = all_to_all(rows, axis, counts=matrix)
    sizes = [row[index * each : (index + 1) * each] for row in table]  # of each source and expert
    parts = received.split([size for row in sizes for size in row])
    by_expert = torch.cat(
        [parts[source * each + expert] for expert in range(each) for source in range(n)]
    )
    results = _applied(
        experts, by_expert, [sum(row[expert] for row in sizes) for expert in range(each)]
    )
    parts = results.split([row[expert] for expert in range(each) for row in sizes])
    by_source = torch.cat(
        [parts[expert * n + source] for source in range(n) for expert in range(each)]
    )
    return all_to_all(by_source, axis, counts=[*zip(*matrix, strict=True)])


def _applied(experts: Experts, rows: Tensor, counts: Sequence[int]) -> Tensor:
    if callable(experts):
        return experts(rows, counts)
    if errors := [f"{name} has {len(w)}" for name, w in experts.items() if len(w) != len(counts)]:
        raise ValueError(
            f"moe: weights must have the {len(counts)} experts of a device in dim 0; {', '.join(errors)}. Shard them by "
            "P(axis), with local=axis in the step."
        )
    return swiglu(experts, rows, counts)
