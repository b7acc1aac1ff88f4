"""What a plan is made of: states, which are specs of one tensor in normal form, and steps that lead from one to the next.

P("data", ("model", "pipe"))     dims (("data",), ("model", "pipe"))
P.flat("data")                   flat ("data",)
P.owned("b", "a", by=2)          on (("a", 0), ("b", 1)) on 2 x 3 devices: a place, whatever order it was counted in
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from math import prod
from typing import Literal

from fshard.mesh.arithmetic import ravel
from fshard.mesh.regions import Dims, Laid, Sizes
from fshard.mesh.spec import P
from fshard.mesh.supply import Direct

Kind = Literal[
    "slice", "summand", "psum", "psum_scatter", "all_gather", "all_to_all",
    "reshape", "flat_slice", "flat_gather", "flat_scatter",
    "keep", "exchange", "direct", "spread", "flat_spread",
]  # fmt: skip


@dataclass(frozen=True)
class State:
    """A spec in normal form: the axes of every dim or of the flat tensor, the unreduced axes, and the place it lies at."""

    dims: Dims
    unreduced: frozenset[str]
    flat: tuple[str, ...] | None
    on: tuple[tuple[str, int], ...] = ()

    @property
    def on_axes(self) -> tuple[str, ...]:
        """The axes along which it lies at one place only."""
        return tuple(axis for axis, _ in self.on)

    @property
    def cut(self) -> tuple[str, ...]:
        """The axes that cut it."""
        return self.flat or tuple(chain.from_iterable(self.dims))

    @property
    def sharded(self) -> tuple[str, ...]:
        """The axes along which devices hold different pieces, or some hold none."""
        return self.cut + self.on_axes

    def elsewhere(self, ndim: int) -> tuple[int, ...]:
        """Return the shape of the empty piece that a device has where the tensor does not lie."""
        return (0,) * (1 if self.flat is not None else max(ndim, 1))


@dataclass(frozen=True)
class Step:
    """One step of a plan: what to do over which axes, what that costs a device, and where it leads.

    `dim` is the dim that is cut, gathered or joined; `other` the dim that an all_to_all cuts; `owner` who keeps the
    whole, or exchanges it for flat ranges; `move` what supplies each device with what it lacks.  Only the devices at the
    place `on` take the step: the tensor lies there before and after, and what the states say is of these devices.
    """

    kind: Kind
    axes: tuple[str, ...]
    elements: Fraction
    after: State
    dim: int = 0
    other: int = 0
    owner: int = 0
    move: Direct | None = None
    on: tuple[tuple[str, int], ...] = ()


def state_of(spec: P, ndim: int, axes: Sizes) -> State:
    """Return the normal form of a spec, without the axes along which there is one device: they cut nothing."""
    sizes = dict(axes)

    def real(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(axis for axis in names if sizes[axis] > 1)

    place = spec.place(sizes)
    flat = None if spec.flat_axes is None else real(spec.flat_axes)
    on = tuple((axis, place[axis]) for axis, size in axes if size > 1 and axis in place)
    return State(tuple(map(real, spec.dims(ndim))), frozenset(real(spec.unreduced)), flat, on)


def parts(axes: tuple[str, ...], sizes: Mapping[str, int]) -> int:
    """Return into how many pieces some axes cut a dim."""
    return prod(sizes[axis] for axis in axes)


def number(place: Iterable[tuple[str, int]], axes: Iterable[str], sizes: Mapping[str, int]) -> int:
    """Return the number along some axes, major to minor, of a place."""
    places, axes = dict(place), tuple(axes)
    return ravel([places[axis] for axis in axes], [sizes[axis] for axis in axes])


def common(before: State, after: State, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in which to compare pieces: that of the flattened tensor, if all are ranges of it."""
    return shape if any(before.dims[1:]) or any(after.dims[1:]) else (prod(shape),)


def laid(state: State, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Laid:
    """Return what devices hold in a state."""
    if state.flat is not None:
        return Laid(shape, None, state.flat, state.on, (parts(state.flat, sizes),))
    dims = state.dims[: len(shape)] or ((),)
    return Laid(shape, dims, None, state.on, tuple(parts(axes, sizes) for axes in dims))
