"""Choose the layouts of an operation's inputs: the fewest bytes to send, then the least memory. Pure data.

For each axis of the mesh an operation has a few ways to run:

    replicated      every device computes the same
    label           inputs with that label are sharded on it; a summed label leaves the output unreduced
    linear group    its inputs are unreduced, and so is the output

Only ways that an input's layout suggests are tried, so nothing is scattered without a reason. Combinations over the
axes are compared by the cost of their reshards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from math import prod
from typing import NamedTuple

from fshard.array.communicate import LayoutChange, plan_transfer
from fshard.array.rules import Labels
from fshard.mesh.layout import Layout, Mesh, P

REPLICATED = ("replicated", "")
Way = tuple[str, str | int]
"""("replicated", ""), ("label", its name) or ("linear", the number of the group)."""


@dataclass(frozen=True)
class InputArray:
    """An input: what is needed to choose its layout."""

    shape: tuple[int, ...]
    layout: Layout
    labels: Labels
    itemsize: int
    is_added: bool


class OutputArray(NamedTuple):
    """An output: what is needed to count its memory."""

    shape: tuple[int, ...]
    labels: Labels
    itemsize: int


@dataclass(frozen=True)
class Operation:
    """The inputs and outputs of an operation, and in which ways it may run."""

    operands: Sequence[InputArray]
    results: Sequence[OutputArray]
    linear: Sequence[frozenset[int]]
    summed: frozenset[str]

    def is_shardable(self, label: str | None) -> bool:
        return label is not None and (label in self.summed or all(label in result.labels for result in self.results))


class LayoutChoice(NamedTuple):
    """The chosen layouts, and the bytes that the busiest device sends."""

    transfers: tuple[LayoutChange, ...]
    layouts: tuple[Layout, ...]
    labels: dict[str, tuple[str, ...]]
    """The axes of every sharded label."""
    summed: tuple[str, ...]
    """The axes along which the output is unreduced since a label is summed over."""
    bytes: Fraction


def choose(op: Operation, mesh: Mesh) -> LayoutChoice:
    """Return the cheapest layouts."""
    best: tuple[tuple[Fraction, int], LayoutChoice] | None = None
    for order in _orders(op, mesh):
        for ways in product(*(_ways(op, axis) for axis in order)):
            choice = _evaluate(op, mesh, dict(zip(order, ways, strict=True)))
            if choice is not None and (best is None or choice[0] < best[0]):
                best = choice
    assert best is not None, "replicated inputs are always possible"
    return best[1]


def _orders(op: Operation, mesh: Mesh) -> list[tuple[str, ...]]:
    """Return the orders, major to minor, in which axes may share a label."""
    found = [mesh.axis_names]
    for operand in op.operands:
        first = operand.layout.spec.split_axes
        found.append((*first, *(axis for axis in mesh.axis_names if axis not in first)))
    return list(dict.fromkeys(found))


def _ways(op: Operation, axis: str) -> list[Way]:
    """Return the ways that the inputs' layouts suggest for one axis."""
    ways: list[Way] = [REPLICATED]
    for place, operand in enumerate(op.operands):
        spec = operand.layout.spec
        if axis in spec.unreduced:
            ways += [("linear", number) for number, group in enumerate(op.linear) if place in group]
        if axis in spec.split_axes:
            label = next(
                (
                    label
                    for label, axes in zip(operand.labels, spec.dims(len(operand.shape)), strict=True)
                    if axis in axes
                ),
                None,
            )
            own = [label] if op.is_shardable(label) else operand.labels  # else an all_to_all is cheaper than a gather
            ways += [("label", one) for one in own if one is not None and op.is_shardable(one)]
    return list(dict.fromkeys(ways))


def _evaluate(op: Operation, mesh: Mesh, ways: dict[str, Way]) -> tuple[tuple[Fraction, int], LayoutChoice] | None:
    """Return cost and layouts of a way for each axis; None if the shapes do not allow it."""
    labels: dict[str, tuple[str, ...]] = {}
    for axis, (kind, label) in ways.items():
        if kind == "label":
            labels[str(label)] = (*labels.get(str(label), ()), axis)
    parts = {label: prod(mesh.shape[axis] for axis in axes) for label, axes in labels.items()}
    shapes = [*((operand.labels, operand.shape) for operand in op.operands)]
    shapes += [(result.labels, result.shape) for result in op.results]
    lengths = [pair for own, shape in shapes for pair in zip(own, shape, strict=True)]
    if any(length % parts.get(label or "", 1) for label, length in lengths):
        return None
    summed = tuple(axis for label, axes in labels.items() if label in op.summed for axis in axes)
    sent, memory = Fraction(0), 0
    transfers: list[LayoutChange] = []
    for place, operand in enumerate(op.operands):
        unreduced = [
            axis for axis, (kind, group) in ways.items() if kind == "linear" and place in op.linear[int(group)]
        ]
        unreduced += summed if operand.is_added else ()
        spec = _spec(operand.labels, labels, unreduced)
        busy = {axis for axis, way in ways.items() if way != REPLICATED} - {*spec.axes}
        vary = tuple(axis for axis in mesh.axis_names if axis in busy)
        transfers.append(plan_transfer(operand.shape, operand.layout, spec, vary))
        sent += transfers[-1].elements * operand.itemsize
        memory += operand.itemsize * _local_size(operand.shape, spec, mesh)
    layouts: list[Layout] = []
    linear = [axis for axis, (kind, _) in ways.items() if kind == "linear"]
    for result in op.results:
        lost = [axis for label in labels if label not in result.labels for axis in labels[label]]
        layouts.append(Layout(mesh, _spec(result.labels, labels, [*linear, *lost])))
        memory += result.itemsize * _local_size(result.shape, layouts[-1].spec, mesh)
    return (sent, memory), LayoutChoice(tuple(transfers), tuple(layouts), labels, summed, sent)


def flat_choice(op: Operation, mesh: Mesh) -> LayoutChoice | None:
    """Keep a flat layout, where an operation is elementwise or sums up all elements."""
    found = {(one.shape, one.layout.spec, one.labels) for one in op.operands if one.shape or one.layout.spec.axes}
    if len(found) != 1:
        return None
    ((shape, spec, labels),) = found
    if not shape or None in labels or not spec.is_flat or spec.at or spec.unreduced:
        return None
    layouts = [Layout(mesh, spec.shapeless if y.labels == labels else P(unreduced=spec.split_axes)) for y in op.results]
    if any(y.labels != labels and (y.shape or not op.summed >= {*labels}) for y in op.results):
        return None
    vary = [() if one.layout.spec == spec else spec.split_axes for one in op.operands]
    transfers = [LayoutChange(one.layout, (), axes, Fraction(0)) for one, axes in zip(op.operands, vary, strict=True)]
    return LayoutChoice(tuple(transfers), tuple(layouts), {}, (), Fraction(0))


def _spec(own: Labels, labels: dict[str, tuple[str, ...]], unreduced: Sequence[str]) -> P:
    return P(*(labels.get(label or "", ()) for label in own), unreduced=tuple(unreduced))


def _local_size(shape: tuple[int, ...], spec: P, mesh: Mesh) -> int:
    return prod(shape) // prod(mesh.shape[axis] for axis in spec.split_axes)
