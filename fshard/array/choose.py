"""Choose the layouts of an operation's inputs and results. Pure data.

A choice is better if the busiest device sends fewer bytes, then if shards need less memory, then if
inputs of fewer elements change their layout: so a result keeps the layout of the larger input.

An operation uses each axis of the mesh in one of a few ways:

    None     every device computes the same
    label    inputs with that label are sharded on it; a summed label leaves the results unreduced
    number   of a linear group: its inputs are unreduced, and so are the results

For `x @ w`, whose rule is "ik,ko->io", with x f32[8@data, 4] and w f32[4, 6@model]:

    data   model   bytes
    i      o       0       this is chosen: f32[8@data, 6@model]
    i      None    48      w is all-gathered: 4 x 3 elements of 4 bytes
    None   o       64      x is all-gathered: 4 x 4 elements

Only uses that an input's layout suggests are tried, so nothing is scattered without a reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import product
from math import prod
from typing import NamedTuple

from fshard.array.communicate import LayoutChange, plan_transfer
from fshard.array.rules import ROWS, LabelledOperation, Labels, Value
from fshard.mesh.layout import Layout, Mesh, P
from fshard.mesh.layout.arithmetic import chunk

AxisUse = str | int | None
"""The use of one axis of the mesh by an operation."""

LabelAxes = dict[str, tuple[str, ...]]
"""The axes of every sharded label, major to minor."""


class LayoutChoice(NamedTuple):
    """The chosen layouts, and their costs.

    Args:
        transfers: for each input.
        layouts: of the results.
        labels: the axes of every sharded label.
        bytes: the busiest device sends them.
        memory: bytes of one device's shards of inputs and results.
        changed_elements: of inputs whose layout changes.
    """

    transfers: tuple[LayoutChange, ...]
    layouts: tuple[Layout, ...]
    labels: LabelAxes
    bytes: Fraction
    memory: int
    changed_elements: int

    @property
    def cost(self) -> tuple[Fraction, int, int]:
        return self.bytes, self.memory, self.changed_elements


def choose(op: LabelledOperation, mesh: Mesh) -> LayoutChoice:
    """Return the cheapest layouts."""
    choices = _flat_choices(op, mesh)
    if choices and choices[0].changed_elements == 0:
        return choices[0]  # nothing is sent, so no choice has fewer bytes

    for order in _axis_orders(op, mesh):
        for uses in product(*[_axis_uses(op, axis) for axis in order]):
            choice = _evaluate(op, mesh, dict(zip(order, uses, strict=True)))
            if choice is not None:
                choices.append(choice)
    return min(choices, key=lambda choice: choice.cost)


def _axis_orders(op: LabelledOperation, mesh: Mesh) -> list[tuple[str, ...]]:
    """Return orders of the mesh's axes, major to minor: they matter where axes share a label.

    That is the order of the mesh, and those of inputs' layouts.
    """
    orders = {mesh.axis_names: None}  # a set in order
    for x in op.inputs:
        if x.layout is not None:
            split_axes = x.layout.spec.split_axes
            others = [axis for axis in mesh.axis_names if axis not in split_axes]
            orders[(*split_axes, *others)] = None
    return [*orders]


def _axis_uses(op: LabelledOperation, axis: str) -> list[AxisUse]:
    """Return the uses of one axis that the inputs' layouts suggest."""
    uses: list[AxisUse] = [None]
    for index, x in enumerate(op.inputs):
        assert x.layout
        spec = x.layout.spec
        if axis in spec.unreduced:
            for number, group in enumerate(op.linear):
                if index in group and _may_stay_unreduced(op, group, axis):
                    uses.append(number)
        if axis not in spec.split_axes:
            continue

        split_label = None
        for label, axes in zip(x.labels, spec.dims(len(x.shape)), strict=True):
            if axis in axes:
                split_label = label
                break
        if op.is_shardable(split_label):
            uses.append(split_label)
        else:
            # The dim is needed in full. An all_to_all, which shards another one, is cheaper than an
            # all_gather.
            uses += [label for label in x.labels if op.is_shardable(label)]
    return list(dict.fromkeys(uses))


def _may_stay_unreduced(op: LabelledOperation, group: frozenset[int], axis: str) -> bool:
    """Return False for a sum that is broadcast.

    Its elements would have to be reduced later, when they are more.
    """
    if not op.is_elementwise:
        return True
    size = max([prod(y.shape) for y in op.outputs])
    for index in group:
        x = op.inputs[index]
        assert x.layout
        if axis in x.layout.spec.unreduced and prod(x.shape) >= size:
            return True
    return False


def _evaluate(op: LabelledOperation, mesh: Mesh, uses: dict[str, AxisUse]) -> LayoutChoice | None:
    """Return the layouts for a use of each axis; None if the shapes do not allow it."""
    label_axes: LabelAxes = {}
    for axis, use in uses.items():
        if isinstance(use, str):
            label_axes[use] = (*label_axes.get(use, ()), axis)
    for label, axes in label_axes.items():
        if not _is_divisible(op, mesh, label, axes):
            return None
    summed_axes: list[str] = []
    for label, axes in label_axes.items():
        if label in op.summed:
            summed_axes += axes

    transfers: list[LayoutChange] = []
    for index, x in enumerate(op.inputs):
        assert x.layout
        unreduced = _unreduced_axes(op, index, uses)
        if index in op.added:
            unreduced += summed_axes  # one device adds it to the sum
        spec = _spec_of(x.labels, label_axes, unreduced)
        used_axes = [axis for axis in mesh.axis_names if uses[axis] is not None]
        vary = tuple([axis for axis in used_axes if axis not in spec.axes])
        transfers.append(plan_transfer(x.shape, x.layout, spec, vary))

    linear_axes = [axis for axis, use in uses.items() if isinstance(use, int)]
    layouts: list[Layout] = []
    for y in op.outputs:
        spec = _spec_of(y.labels, label_axes, [*linear_axes, *summed_axes])
        layouts.append(Layout(mesh, spec))
    return _choice(op, transfers, layouts, label_axes)


def _unreduced_axes(op: LabelledOperation, index: int, uses: dict[str, AxisUse]) -> list[str]:
    """Return the axes along which an input is unreduced, as one of a linear group."""
    unreduced: list[str] = []
    for axis, use in uses.items():
        if isinstance(use, int) and index in op.linear[use]:
            unreduced.append(axis)
    return unreduced


def _spec_of(labels: Labels, label_axes: LabelAxes, unreduced: Sequence[str]) -> P:
    """Return the spec of an array whose dims have labels."""
    entries: list[tuple[str, ...]] = []
    for label in labels:
        entries.append(() if label is None else label_axes.get(label, ()))
    return P(*entries, unreduced=tuple(unreduced))


def _choice(
    op: LabelledOperation,
    transfers: Sequence[LayoutChange],
    layouts: Sequence[Layout],
    labels: LabelAxes,
) -> LayoutChoice:
    """Return a choice with its costs."""
    sent = Fraction(0)
    memory = 0
    changed_elements = 0
    for x, to in zip(op.inputs, transfers, strict=True):
        assert x.layout
        sent += to.elements * x.itemsize
        memory += _local_size(x, to.layout)
        if to.layout.spec != x.layout.spec.shapeless:
            changed_elements += prod(x.shape)
    for y, layout in zip(op.outputs, layouts, strict=True):
        memory += _local_size(y, layout)
    return LayoutChoice(tuple(transfers), tuple(layouts), labels, sent, memory, changed_elements)


def _local_size(x: Value, layout: Layout) -> int:
    """Return the bytes of a shard."""
    devices = prod(layout.mesh.shape[axis] for axis in layout.spec.split_axes)
    return x.itemsize * prod(x.shape) // devices


def _is_divisible(op: LabelledOperation, mesh: Mesh, label: str, axes: tuple[str, ...]) -> bool:
    """Return True if devices along some axes can share the dims of a label.

    They divide these dims. Or the dims have one length, which one axis already divides unevenly,
    without empty shards.
    """
    dims: list[tuple[Value, int]] = []
    for x in (*op.inputs, *op.outputs):
        for dim, dim_label in enumerate(x.labels):
            if dim_label == label:
                dims.append((x, dim))
    lengths = {x.shape[dim] for x, dim in dims}
    n = prod(mesh.shape[axis] for axis in axes)

    if mesh.zigzag in axes:
        # A shard is two chunks. So it is no range, with a first row that indices could refer to.
        return label != ROWS and all(length % (2 * n) == 0 for length in lengths)
    if all(length % n == 0 for length in lengths):
        return True
    if len(lengths) > 1 or len(axes) > 1:
        return False  # `plan_transfer` pads dims of one axis only

    (length,) = lengths
    has_empty_shard = (n - 1) * chunk(length, n) >= length
    if has_empty_shard:
        return False
    for x, dim in dims:
        if x.layout is not None and x.layout.spec.dims(len(x.shape))[dim] == axes:
            return True
    return False


# Flat layouts.


def _flat_choices(op: LabelledOperation, mesh: Mesh) -> list[LayoutChoice]:
    """Return the choices of one flat layout for all inputs.

    Elementwise operations have such choices, and sums of all elements. Single numbers are
    replicated. Inputs that broadcast otherwise have no flat layout.
    """
    if not op.is_elementwise or not op.inputs:
        return []
    shapes = [x.shape for x in op.inputs]
    largest = max(shapes, key=lambda shape: (prod(shape), len(shape)))
    inputs = [x for x in op.inputs if not _is_number(x, largest)]
    if not _have_the_same_dims(inputs, op):
        return []

    choices: list[LayoutChoice] = []
    specs = dict.fromkeys(x.layout.spec.shapeless for x in inputs if x.layout)
    for spec in specs:
        if not spec.is_flat or spec.at or spec.unreduced:
            continue
        transfers: list[LayoutChange] = []
        for x in op.inputs:
            assert x.layout
            if _is_number(x, largest):
                to = plan_transfer(x.shape, x.layout, P(), spec.split_axes)
            elif x.layout.spec.shapeless == spec:
                to = LayoutChange(x.layout, (), (), Fraction(0))
            else:
                to = plan_transfer(x.shape, x.layout, spec)
            transfers.append(to)

        layouts: list[Layout] = []
        for y in op.outputs:
            is_sum_of_all = not y.shape
            result_spec = P(unreduced=spec.split_axes) if is_sum_of_all else spec
            layouts.append(Layout(mesh, result_spec))
        choices.append(_choice(op, transfers, layouts, {}))
    return choices


def _is_number(x: Value, largest: tuple[int, ...]) -> bool:
    """Return True for one element that broadcasts to the one dim of a flat shard."""
    return x.shape in ((), (1,)) and x.shape != largest


def _have_the_same_dims(inputs: Sequence[Value], op: LabelledOperation) -> bool:
    """Return True if inputs have one shape, and results have it too or are sums of all elements."""
    shapes = {x.shape for x in inputs}
    labels = {x.labels for x in inputs}
    if len(shapes) != 1 or len(labels) != 1:
        return False
    (dims,) = labels
    is_broadcast = None in dims or not dims
    if is_broadcast:
        return False
    for y in op.outputs:
        is_sum_of_all = not y.shape and op.summed >= {*dims}
        if y.labels != dims and not is_sum_of_all:
            return False
    return True
