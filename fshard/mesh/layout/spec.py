"""`P`: which mesh axes shard which dims of a tensor.

    P("data", None)                 dim 0 sharded over "data", dim 1 unsharded
    P(("data", "model"))            dim 0 sharded over both axes, "data" major
    P(None, unreduced="model")      replicated in shape; the sum over "model" (torch: Partial)
    P.flat("data")                  flattened, then split over "data", evenly or not
    P(at={"data": 2})               stored by the devices at coordinate 2 along "data" only
    P.flat("data", at={"pipe": 2})  flat over "data", on the devices at coordinate 2 along "pipe"
    P(None, "model", flat="data")   each shard along "model" is flattened and split over "data"

A flat spec splits into ranges of ceil(size / n) elements. Axes that a spec does not name have
replicas. Devices at other coordinates than `at` store an empty shard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, ClassVar

from fshard.errors import LayoutError
from fshard.mesh.layout.arithmetic import Range, flat_range, ravel, unravel

Axes = str | tuple[str, ...]
"""One axis of the mesh by name, or several from major to minor."""
Coordinates = Mapping[Axes, int] | Mapping[str, int] | Mapping[tuple[str, ...], int]
"""Coordinates along axes: `{"pipe": 2}`.

Along several axes one number, major to minor: `{("data", "model"): 5}`.
"""


class CachedHash:
    """The base of frozen dataclasses that are cache keys: hashed once.

    Pickles have the fields only: hashes differ between processes. Each class must set
    `__hash__ = CachedHash.__hash__`, or `dataclass` defines one that hashes all fields every time.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @cached_property
    def _hash(self) -> int:
        return hash(tuple([getattr(self, name) for name in self.__dataclass_fields__]))

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def as_axes(axes: Axes | Iterable[str] | None) -> tuple[str, ...]:
    """Return axis names as a tuple."""
    if axes is None:
        return ()
    if isinstance(axes, str):
        return (axes,)

    names = tuple(axes) if isinstance(axes, Iterable) else (axes,)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(
                f'An axis must be a name like "data" or a tuple of names; got {name!r}.'
            )
    return names


def as_written(axes: tuple[str, ...]) -> str:
    """Return axis names as Python source.

    >>> print(as_written(("data",)), as_written(("data", "model")))
    "data" ("data", "model")
    """
    names = ", ".join(f'"{axis}"' for axis in axes)
    return names if len(axes) == 1 else f"({names})"


@dataclass(frozen=True, init=False, repr=False)
class P(CachedHash):
    """A spec: which mesh axes shard each dim of a tensor.

    Args:
        entries: one per tensor dim: None, an axis, or a tuple of axes (major to minor). Trailing
            Nones may be omitted.
        flat: axes that split the flattened shard of `entries` further: see `P.flat`.
        unreduced: axes over which the value is still the sum of what the devices hold.
        at: coordinates of the devices that store the tensor. The others store an empty shard, whose
            dims are all 0.
        shape: of the unsharded tensor; needed only in `out_specs` with `flat` or `at`, where local
            shapes do not give it.

    `P` is a leaf, not a tuple, so a tree of them is a tree of specs.

    >>> P("data", None) == P("data")
    True
    >>> P(None, ("data", "model"), unreduced="pipe")
    P(None, ("data", "model"), unreduced="pipe")
    >>> P("model", at={"pipe": 2})
    P("model", at={"pipe": 2})
    """

    entries: tuple[Axes | None, ...]
    unreduced: tuple[str, ...]
    flat_axes: tuple[str, ...] | None
    at: tuple[tuple[tuple[str, ...], int], ...]
    shape: tuple[int, ...] | None

    def __init__(
        self,
        *entries: Axes | None,
        flat: Axes | None = None,
        unreduced: Axes | None = None,
        at: Coordinates | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        # Specs of one meaning must be equal, as they are keys of caches. So there is one form of
        # each: no None at the end, and axes whose order has no meaning are sorted.
        normalized = [_normalized_entry(entry) for entry in entries]
        while normalized and normalized[-1] is None:
            normalized.pop()

        assign = object.__setattr__  # the class is frozen
        assign(self, "entries", tuple(normalized))
        assign(self, "unreduced", tuple(sorted(as_axes(unreduced))))
        assign(self, "flat_axes", as_axes(flat) or None)
        assign(self, "at", _normalized_coordinates(at))
        assign(self, "shape", _normalized_shape(shape))

        counts = Counter(self.axes)
        repeated = sorted(axis for axis, count in counts.items() if count > 1)
        if repeated:
            raise LayoutError(f"{self!r} names an axis more than once: {', '.join(repeated)}.")

    @classmethod
    def flat(
        cls,
        *axes: str,
        unreduced: Axes | None = None,
        at: Coordinates | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> P:
        """Flatten the tensor and split it over `axes`, major to minor.

        The ranges have ceil(size / devices) elements; the last ones are shorter or empty.

        >>> P.flat("data", at={"pipe": 2})
        P.flat("data", at={"pipe": 2})
        """
        if any(isinstance(axis, tuple | list) for axis in axes):
            raise TypeError(
                f'P.flat: axes must be names, as in P.flat("data", "model"); got {axes}. '
                "Write P.flat(*axes)."
            )
        if not axes:
            raise ValueError(
                'P.flat() names no axis. Write P.flat("data"), or P() for a replicated tensor.'
            )
        return cls(flat=axes, unreduced=unreduced, at=at, shape=shape)

    def replace(self, **changes: Any) -> P:
        """Return this spec with another `flat`, `unreduced`, `at`, `shape` or `entries`.

        >>> P.flat("data").replace(at={"pipe": 2})
        P.flat("data", at={"pipe": 2})
        >>> P("data", unreduced="model").replace(unreduced=None)
        P("data")
        """
        fields: dict[str, Any] = {
            "flat": self.flat_axes,
            "unreduced": self.unreduced,
            "at": dict(self.at),
            "shape": self.shape,
        }
        entries = changes.pop("entries", self.entries)
        fields.update(changes)
        return P(*entries, **fields)

    @property
    def is_flat(self) -> bool:
        return self.flat_axes is not None

    @property
    def shapeless(self) -> P:
        """This spec without `shape`, which does not affect placement."""
        return self if self.shape is None else self.replace(shape=None)

    @cached_property
    def split_axes(self) -> tuple[str, ...]:
        """Axes that split the tensor: its dims, then the flattened one."""
        return (
            *(axis for entry in self.entries for axis in as_axes(entry)),
            *(self.flat_axes or ()),
        )

    @cached_property
    def at_axes(self) -> tuple[str, ...]:
        """Axes along which only one coordinate stores the tensor."""
        return tuple(axis for axes, _ in self.at for axis in axes)

    @cached_property
    def sharded_axes(self) -> tuple[str, ...]:
        """Axes along which devices hold different shards, empty ones included."""
        return self.split_axes + self.at_axes

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """All axes of the spec."""
        return self.sharded_axes + self.unreduced

    def coordinates(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return `at` axis by axis, on a mesh of these sizes.

        >>> P(at={("data", "model"): 5, "pipe": 2}).coordinates({"data": 2, "model": 4, "pipe": 3})
        {'data': 1, 'model': 1, 'pipe': 2}
        """
        coordinates: dict[str, int] = {}
        for axes, number in self.at:
            indices = unravel(number, [sizes[axis] for axis in axes])
            coordinates.update(zip(axes, indices, strict=True))
        return coordinates

    def dims(self, ndim: int) -> tuple[tuple[str, ...], ...]:
        """Return the axes of each of `ndim` dims; () for an unsharded dim."""
        axes = [as_axes(entry) for entry in self.entries[:ndim]]
        missing = ndim - len(axes)
        return (*axes, *[()] * missing)

    def block(
        self, shape: Sequence[int], sizes: Mapping[str, int], coordinates: Mapping[str, int]
    ) -> tuple[Range, ...]:
        """Return the range of each dim of a device's block: its shard before that is flattened.

        >>> P("data", "model").block((8, 6), {"data": 4, "model": 2}, {"data": 1, "model": 1})
        ((2, 4), (3, 6))
        """
        ranges: list[Range] = []
        for length, axes in zip(shape, self.dims(len(shape)), strict=True):
            ranges.append(_range_along(axes, length, sizes, coordinates))
        return tuple(ranges)

    def ranges(
        self, shape: Sequence[int], sizes: Mapping[str, int], coordinates: Mapping[str, int]
    ) -> tuple[Range, ...]:
        """Return the range of each dim that the device at `coordinates` stores.

        Of a flat spec it is the one range of its flattened block.

        >>> P("data", flat="model").ranges((4, 3), {"data": 2, "model": 2}, {"data": 1, "model": 0})
        ((0, 3),)
        """
        for axis, index in self.coordinates(sizes).items():
            if coordinates[axis] != index:
                ndim = 1 if self.is_flat else max(len(shape), 1)
                return ((0, 0),) * ndim  # it stores nothing, not even of a scalar

        block = self.block(shape, sizes, coordinates)
        if self.flat_axes is None:
            return block
        total = prod([stop - start for start, stop in block])
        return (_range_along(self.flat_axes, total, sizes, coordinates),)

    def local_shape(
        self, shape: Sequence[int], sizes: Mapping[str, int], coordinates: Mapping[str, int]
    ) -> tuple[int, ...]:
        """Return the shape of the shard of the device at `coordinates`."""
        return tuple([stop - start for start, stop in self.ranges(shape, sizes, coordinates)])

    __hash__ = CachedHash.__hash__

    def __repr__(self) -> str:
        """Return the spec as Python source."""
        head = "P"
        arguments = [_entry_as_written(entry) for entry in self.entries]
        if self.flat_axes is not None:
            if self.entries:
                arguments.append(f"flat={as_written(self.flat_axes)}")
            else:
                head = "P.flat"
                arguments = [f'"{axis}"' for axis in self.flat_axes]
        if self.at:
            pairs = [f"{as_written(axes)}: {index}" for axes, index in self.at]
            arguments.append("at={" + ", ".join(pairs) + "}")
        if self.unreduced:
            arguments.append(f"unreduced={as_written(self.unreduced)}")
        if self.shape is not None:
            arguments.append(f"shape={self.shape}")
        return f"{head}({', '.join(arguments)})"


def _range_along(
    axes: Sequence[str],
    length: int,
    sizes: Mapping[str, int],
    coordinates: Mapping[str, int],
) -> Range:
    """Return the range of the device at `coordinates`, of a length that is split over some axes."""
    parts = [sizes[axis] for axis in axes]
    index = ravel([coordinates[axis] for axis in axes], parts)
    return flat_range(length, prod(parts), index)


def _entry_as_written(entry: Axes | None) -> str:
    return "None" if entry is None else as_written(as_axes(entry))


def _normalized_coordinates(
    coordinates: Coordinates | None,
) -> tuple[tuple[tuple[str, ...], int], ...]:
    """Validate and sort `coordinates`."""
    if not isinstance(coordinates, Mapping | None):
        raise TypeError(f'at must map axes to coordinates, {{"pipe": 2}}; got {coordinates!r}.')
    pairs: list[tuple[tuple[str, ...], int]] = []
    for axes, index in (coordinates or {}).items():
        # A bool is an int in Python, but no coordinate.
        is_index = isinstance(index, int) and not isinstance(index, bool) and index >= 0
        if not axes or not is_index:
            raise ValueError(
                f'at must map axes to coordinates, {{"pipe": 0}}; got {{{axes!r}: {index!r}}}.'
            )
        pairs.append((as_axes(axes), index))
    return tuple(sorted(pairs))


def _normalized_shape(shape: object) -> tuple[int, ...] | None:
    if shape is None:
        return None
    if not isinstance(shape, tuple | list) or not all(isinstance(size, int) for size in shape):
        raise TypeError(f"shape must be a tuple of integers; got {shape!r}.")
    return tuple(shape)


def _normalized_entry(entry: object) -> Axes | None:
    if entry is None or entry == ():
        return None
    if isinstance(entry, str):
        return entry
    if isinstance(entry, tuple | list) and all(isinstance(axis, str) for axis in entry):
        axes = tuple(entry)
        return axes[0] if len(axes) == 1 else axes
    raise TypeError(
        f"An entry of P must be None, an axis name or a tuple of axis names; got {entry!r}."
    )
