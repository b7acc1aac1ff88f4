"""Choose the layouts of an operation's inputs: the fewest bytes to send, then the least memory, then the fewest
elements in another layout than before, so that a result keeps the layout of the larger input. Pure data.

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
    changed: int
    """The number of elements of inputs whose layout is another."""

    @property
    def cost(self) -> tuple[Fraction, int, int]:
        return self.bytes, self.memory, self.changed


def choose(op: LabelledOperation, mesh: Mesh) -> LayoutChoice:
    """Return the cheapest layouts."""
    choices = _flat_choices(op, mesh)
    if choices and choices[0].changed == 0:
        return choices[0]
    splits = [x.layout.spec.split_axes for x in op.inputs if x.layout]
    orders = dict.fromkeys(
        (*axes, *(a for a in mesh.axis_names if a not in axes)) for axes in ((), *splits)
    )
    for order in orders:  # major to minor, where axes share a label
        for ways in product(*(_ways(op, axis) for axis in order)):
            choice = _evaluate(op, mesh, dict(zip(order, ways, strict=True)))
            choices += [] if choice is None else [choice]
    return min(choices, key=lambda choice: choice.cost)


def _ways(op: LabelledOperation, axis: str) -> list[Way]:
    """Return the ways that the inputs' layouts suggest for one axis."""
    ways: list[Way] = [None]
    for index, x in enumerate(op.inputs):
        assert x.layout
        spec = x.layout.spec
        if axis in spec.unreduced:
            ways += [
                number
                for number, group in enumerate(op.linear)
                if index in group and _may_stay_unreduced(op, group, axis)
            ]
        if axis in spec.split_axes:
            dims = zip(x.labels, spec.dims(len(x.shape)), strict=True)
            split_label = next((label for label, axes in dims if axis in axes), None)
            labels = (
                [split_label] if op.is_shardable(split_label) else x.labels
            )  # an all_to_all is cheaper than an all_gather
            ways += [label for label in labels if op.is_shardable(label)]
    return list(dict.fromkeys(ways))


def _may_stay_unreduced(op: LabelledOperation, group: frozenset[int], axis: str) -> bool:
    """Return False for a sum that is broadcast to more elements, which would all have to be reduced later."""
    if not op.is_elementwise:
        return True
    size = max([prod(y.shape) for y in op.outputs])
    for index in group:
        x = op.inputs[index]
        assert x.layout
        if axis in x.layout.spec.unreduced and prod(x.shape) >= size:
            return True
    return False


def _evaluate(op: LabelledOperation, mesh: Mesh, ways: dict[str, Way]) -> LayoutChoice | None:
    """Return the layouts of a way for each axis; None if the shapes do not allow it."""
    labels: dict[str, tuple[str, ...]] = {}
    for axis, way in ways.items():
        if isinstance(way, str):
            labels[way] = (*labels.get(way, ()), axis)
    if not all(_is_divided(op, mesh, label, axes) for label, axes in labels.items()):
        return None

    def spec_of(x: Value, unreduced: Sequence[str]) -> P:
        return P(*(labels.get(label or "", ()) for label in x.labels), unreduced=tuple(unreduced))

    transfers: list[LayoutChange] = []
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
    layouts: list[Layout] = []
    for y in op.outputs:
        reduced = [axis for label, axes in labels.items() if label not in y.labels for axis in axes]
        linear = [axis for axis, way in ways.items() if isinstance(way, int)]
        layouts.append(Layout(mesh, spec_of(y, [*linear, *reduced])))
    return _choice(op, transfers, layouts, labels)


def _choice(
    op: LabelledOperation,
    transfers: Sequence[LayoutChange],
    layouts: Sequence[Layout],
    labels: dict[str, tuple[str, ...]],
) -> LayoutChoice:
    """Return a choice with its costs."""
    sent, memory, changed = Fraction(0), 0, 0
    for x, to in zip(op.inputs, transfers, strict=True):
        assert x.layout
        sent += to.elements * x.itemsize
        memory += _local_size(x, to.layout)
        if to.layout.spec != x.layout.spec.shapeless:
            changed += prod(x.shape)
    for y, layout in zip(op.outputs, layouts, strict=True):
        memory += _local_size(y, layout)
    return LayoutChoice(tuple(transfers), tuple(layouts), labels, sent, memory, changed)


def _local_size(x: Value, layout: Layout) -> int:
    """Return the bytes of a shard."""
    devices = prod(layout.mesh.shape[axis] for axis in layout.spec.split_axes)
    return x.itemsize * prod(x.shape) // devices


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


def _flat_choices(op: LabelledOperation, mesh: Mesh) -> list[LayoutChoice]:
    """Return the choices of one flat layout for all inputs, of elementwise operations and sums of all elements.

    Single numbers are replicated. Inputs that broadcast otherwise have no flat layout.
    """
    if not op.is_elementwise or not op.inputs:
        return []
    largest = max([x.shape for x in op.inputs], key=lambda shape: (prod(shape), len(shape)))

    def is_number(x: Value) -> bool:
        is_single = x.shape in ((), (1,))  # it broadcasts to the one dim of a flat shard
        return is_single and x.shape != largest

    inputs = [x for x in op.inputs if not is_number(x)]
    shapes = {x.shape for x in inputs}
    labels = {x.labels for x in inputs}
    if len(shapes) != 1 or len(labels) != 1:
        return []
    (dims,) = labels
    is_broadcast = None in dims or not dims
    if is_broadcast:
        return []
    for y in op.outputs:
        is_sum_of_all = not y.shape and op.summed >= {*dims}
        if y.labels != dims and not is_sum_of_all:
            return []

    specs = dict.fromkeys(x.layout.spec.shapeless for x in inputs if x.layout)
    choices: list[LayoutChoice] = []
    for spec in specs:
        if not spec.is_flat or spec.at or spec.unreduced:
            continue
        transfers: list[LayoutChange] = []
        for x in op.inputs:
            assert x.layout
            if is_number(x):
                transfers.append(plan_transfer(x.shape, x.layout, P(), spec.split_axes))
            elif x.layout.spec.shapeless == spec:
                transfers.append(LayoutChange(x.layout, (), (), Fraction(0)))
            else:
                transfers.append(plan_transfer(x.shape, x.layout, spec))
        results = [spec if y.shape else P(unreduced=spec.split_axes) for y in op.outputs]
        choices.append(_choice(op, transfers, [Layout(mesh, each) for each in results], {}))
    return choices
