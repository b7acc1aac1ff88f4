"""Choose the layouts of an operation's inputs: the fewest bytes to send, then the least memory. Pure data.

For each axis of the mesh an operation has a few ways to run:

    None     every device computes the same
    label    inputs with that label are sharded on it; a summed label leaves the output unreduced
    number   of a linear group: its inputs are unreduced, and so is the output

Only ways that an input's layout suggests are tried, so nothing is scattered without a reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import product
from math import prod
from typing import NamedTuple

from fshard.array.communicate import LayoutChange, plan_transfer
from fshard.array.rules import ROWS, LabelledOperation, Value
from fshard.mesh.layout import Layout, Mesh, P
from fshard.mesh.layout.arithmetic import chunk

Way = str | int | None


class LayoutChoice(NamedTuple):
    """The chosen layouts, and the bytes that the busiest device sends."""

    transfers: tuple[LayoutChange, ...]
    layouts: tuple[Layout, ...]
    labels: dict[str, tuple[str, ...]]
    """The axes of every sharded label."""
    bytes: Fraction
    memory: int


def choose(op: LabelledOperation, mesh: Mesh) -> LayoutChoice:
    """Return the cheapest layouts."""
    if op.is_elementwise and (flat := _keep_flat(op, mesh)):
        return flat
    splits = [x.layout.spec.split_axes for x in op.inputs if x.layout]
    orders = dict.fromkeys(
        (*axes, *(a for a in mesh.axis_names if a not in axes)) for axes in ((), *splits)
    )
    choices: list[LayoutChoice] = []
    for order in orders:  # major to minor, where axes share a label
        for ways in product(*(_ways(op, axis) for axis in order)):
            choice = _evaluate(op, mesh, dict(zip(order, ways, strict=True)))
            choices += [] if choice is None else [choice]
    return min(choices, key=lambda choice: (choice.bytes, choice.memory))


def _ways(op: LabelledOperation, axis: str) -> list[Way]:
    """Return the ways that the inputs' layouts suggest for one axis."""
    ways: list[Way] = [None]
    for index, x in enumerate(op.inputs):
        assert x.layout
        spec = x.layout.spec
        if axis in spec.unreduced:
            ways += [number for number, group in enumerate(op.linear) if index in group]
        if axis in spec.split_axes:
            dims = zip(x.labels, spec.dims(len(x.shape)), strict=True)
            split_label = next((label for label, axes in dims if axis in axes), None)
            labels = (
                [split_label] if op.is_shardable(split_label) else x.labels
            )  # an all_to_all is cheaper than an all_gather
            ways += [label for label in labels if op.is_shardable(label)]
    return list(dict.fromkeys(ways))


def _evaluate(op: LabelledOperation, mesh: Mesh, ways: dict[str, Way]) -> LayoutChoice | None:
    """Return the layouts of a way for each axis; None if the shapes do not allow it."""
    labels: dict[str, tuple[str, ...]] = {}
    for axis, way in ways.items():
        if isinstance(way, str):
            labels[way] = (*labels.get(way, ()), axis)
    if not all(_is_divided(op, mesh, label, axes) for label, axes in labels.items()):
        return None

    def local_size(x: Value, spec: P) -> int:
        return x.itemsize * prod(x.shape) // prod(mesh.shape[axis] for axis in spec.split_axes)

    def spec_of(x: Value, unreduced: Sequence[str]) -> P:
        return P(*(labels.get(label or "", ()) for label in x.labels), unreduced=tuple(unreduced))

    sent, memory, transfers = Fraction(0), 0, list[LayoutChange]()
    summed = [axis for label, axes in labels.items() if label in op.summed for axis in axes]
    for index, x in enumerate(op.inputs):
        assert x.layout
        unreduced = [
            axis for axis, way in ways.items() if isinstance(way, int) and index in op.linear[way]
        ]
        spec = spec_of(x, [*unreduced, *(summed if index in op.added else ())])
        vary = tuple(
            axis for axis in mesh.axis_names if ways[axis] is not None and axis not in spec.axes
        )
        transfers.append(plan_transfer(x.shape, x.layout, spec, vary))
        sent += transfers[-1].elements * x.itemsize
        memory += local_size(x, spec)
    layouts: list[Layout] = []
    for y in op.outputs:
        reduced = [axis for label, axes in labels.items() if label not in y.labels for axis in axes]
        linear = [axis for axis, way in ways.items() if isinstance(way, int)]
        layouts.append(Layout(mesh, spec_of(y, [*linear, *reduced])))
        memory += local_size(y, layouts[-1].spec)
    return LayoutChoice(tuple(transfers), tuple(layouts), labels, sent, memory)


def _is_divided(op: LabelledOperation, mesh: Mesh, label: str, axes: tuple[str, ...]) -> bool:
    """Return True if devices can share the dims of a label: they divide them, or the dims are one uneven one.

    That is already sharded, and no shard is empty. In zigzag order a shard is two chunks.
    """
    n, is_zigzag = prod(mesh.shape[axis] for axis in axes), mesh.zigzag in axes
    values = [
        (x, dim)
        for x in (*op.inputs, *op.outputs)
        for dim, dim_label in enumerate(x.labels)
        if dim_label == label
    ]
    lengths = {x.shape[dim] for x, dim in values}
    if not any(length % (2 * n if is_zigzag else n) for length in lengths):
        return not is_zigzag or label != ROWS  # which have a first one
    (length, *other_lengths), each = lengths, chunk(max(lengths), n)
    is_sharded = any(
        x.layout is not None and x.layout.spec.dims(len(x.shape))[dim] == axes for x, dim in values
    )
    return (
        not other_lengths
        and is_sharded
        and len(axes) == 1
        and not is_zigzag
        and (n - 1) * each < length
    )


def _keep_flat(op: LabelledOperation, mesh: Mesh) -> LayoutChoice | None:
    """Keep a flat layout, where an operation is elementwise or sums up all elements."""
    operands = {
        (x.shape, x.layout.spec, x.labels)
        for x in op.inputs
        if x.layout and (x.shape or x.layout.spec.axes)
    }
    if len(operands) != 1:
        return None
    ((shape, spec, labels),) = operands
    if not shape or None in labels or not spec.is_flat or spec.at or spec.unreduced:
        return None
    if any(y.labels != labels and (y.shape or not op.summed >= {*labels}) for y in op.outputs):
        return None
    layouts = [
        Layout(mesh, spec.shapeless if y.shape else P(unreduced=spec.split_axes))
        for y in op.outputs
    ]
    transfers = [
        LayoutChange(x.layout, (), () if x.layout.spec == spec else spec.split_axes, Fraction(0))
        for x in op.inputs
        if x.layout
    ]
    return LayoutChoice(tuple(transfers), tuple(layouts), {}, Fraction(0), 0)
