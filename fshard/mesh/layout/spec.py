"""`P`: which mesh axes shard which dims of a tensor.

    P("data", None)                 dim 0 sharded over "data", dim 1 unsharded
    P(("data", "model"))            dim 0 sharded over both axes, "data" major
    P(None, unreduced="model")      replicated in shape; the value is the sum over "model" (torch: Partial)
    P.flat("data")                  flattened, then split over "data" into ceil(size / n) elements each, evenly or not
    P(at={"data": 2})               stored by the devices at coordinate 2 along "data" only; empty on the others
    P.flat("data", at={"pipe": 2})  flat over "data", on the devices at coordinate 2 along "pipe" only
    P(None, "model", flat="data")   each shard along "model" is flattened and split over "data"

Axes that a spec does not name hold replicas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from fshard.errors import LayoutError
from fshard.mesh.layout.arithmetic import unravel

Axes = str | tuple[str, ...]
"""One axis of the mesh by name, or several from major to minor."""
Coordinates = Mapping[Axes, int]
"""Coordinates along axes: `{"pipe": 2}`; along several axes one number, major to minor: `{("data", "model"): 5}`."""


class CachedHash:
    """The base of frozen dataclasses that are cache keys: hashed once.

    Pickles have the fields only: hashes differ between processes.
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
    names = (axes,) if isinstance(axes, str) else tuple(axes) if isinstance(axes, Iterable) else (axes,)
    wrong = [name for name in names if not isinstance(name, str)]
    if wrong:
        raise TypeError(f'An axis must be a name like "data" or a tuple of names; got {", ".join(map(repr, wrong))}.')
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
        entries: one per tensor dim: None, an axis, or a tuple of axes (major to minor).  Trailing Nones may be omitted.
        flat: axes that split the flattened shard of `entries` further: see `P.flat`.
        unreduced: axes over which the value is still the sum of what the devices hold.
        at: coordinates of the devices that store the tensor.  The others store an empty shard, whose dims are all 0.
        shape: of the unsharded tensor; needed only in `out_specs` with `flat` or `at`, where local shapes do not give it.

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
        normal = [_entry(entry) for entry in entries]
        while normal and normal[-1] is None:
            normal.pop()
        flat_axes = as_axes(flat) or None
        fields = tuple(normal), tuple(sorted(as_axes(unreduced))), flat_axes, _coordinates(at), _shape(shape)
        self._set(**dict(zip(_FIELDS, fields, strict=True)))

    @classmethod
    def flat(
        cls,
        *axes: str,
        unreduced: Axes | None = None,
        at: Coordinates | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> P:
        """Flatten the tensor and split it over `axes`, major to minor, into ranges of ceil(size / devices) elements.

        The last ranges are shorter or empty.

        >>> P.flat("data", at={"pipe": 2})
        P.flat("data", at={"pipe": 2})
        """
        if any(isinstance(axis, tuple | list) for axis in axes):
            raise TypeError(
                f'P.flat: axes must be names, as in P.flat("data", "model"); got {axes}. Write P.flat(*axes).'
            )
        if not axes:
            raise ValueError('P.flat() names no axis. Write P.flat("data"), or P() for a replicated tensor.')
        return cls(flat=axes, unreduced=unreduced, at=at, shape=shape)

    def _replace(self, **changes: object) -> P:
        spec = P.__new__(P)
        spec._set(**{name: getattr(self, name) for name in _FIELDS} | changes)
        return spec

    def _set(self, **fields: object) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        repeated = sorted(axis for axis, count in Counter(self.axes).items() if count > 1)
        if repeated:
            raise LayoutError(f"{self!r} names an axis more than once: {', '.join(repeated)}.")

    @property
    def is_flat(self) -> bool:
        return self.flat_axes is not None

    @property
    def shapeless(self) -> P:
        """This spec without `shape`, which does not affect placement."""
        return self if self.shape is None else self._replace(shape=None)

    @property
    def split_axes(self) -> tuple[str, ...]:
        """Axes that split the tensor: its dims, then the flattened one."""
        return (*(axis for entry in self.entries for axis in as_axes(entry)), *(self.flat_axes or ()))

    @property
    def at_axes(self) -> tuple[str, ...]:
        """Axes along which only one coordinate stores the tensor."""
        return tuple(axis for axes, _ in self.at for axis in axes)

    @property
    def sharded_axes(self) -> tuple[str, ...]:
        """Axes along which devices hold different shards, empty ones included."""
        return self.split_axes + self.at_axes

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes of the spec."""
        return self.sharded_axes + self.unreduced

    def with_at(self, at: Coordinates | None) -> P:
        """Return this spec at other coordinates; None: on all devices.

        >>> P.flat("data").with_at({"pipe": 2}), P.flat("data", at={"pipe": 2}).with_at(None)
        (P.flat("data", at={"pipe": 2}), P.flat("data"))
        """
        return self._replace(at=_coordinates(at))

    def flattened(self, *axes: str) -> P:
        """Return this spec, of which `axes` split each shard further, flat."""
        return self._replace(flat_axes=(*(self.flat_axes or ()), *axes))

    def with_unreduced(self, axes: Iterable[str]) -> P:
        """Return this spec, unreduced along `axes` alone."""
        return self._replace(unreduced=tuple(sorted(axes)))

    def coordinates(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return `at` axis by axis, on a mesh of these sizes.

        >>> P(at={("data", "model"): 5, "pipe": 2}).coordinates({"data": 2, "model": 4, "pipe": 3})
        {'data': 1, 'model': 1, 'pipe': 2}
        """
        return {
            axis: index
            for axes, number in self.at
            for axis, index in zip(axes, unravel(number, [sizes[axis] for axis in axes]), strict=True)
        }

    def dims(self, ndim: int) -> tuple[tuple[str, ...], ...]:
        """Return the axes of each of `ndim` dims; () for an unsharded dim."""
        return tuple(as_axes(self.entries[dim]) if dim < len(self.entries) else () for dim in range(ndim))

    __hash__ = CachedHash.__hash__

    def __repr__(self) -> str:
        head, parts = "P", [_show(entry) for entry in self.entries]
        if self.flat_axes is not None and self.entries:
            parts.append(f"flat={_show(_entry(self.flat_axes))}")
        elif self.flat_axes is not None:
            head, parts = "P.flat", [_show(axis) for axis in self.flat_axes]
        if self.at:
            parts.append(f"at={{{', '.join(f'{_show(_entry(axes))}: {number}' for axes, number in self.at)}}}")
        if self.unreduced:
            parts.append(f"unreduced={_show(_entry(self.unreduced))}")
        if self.shape is not None:
            parts.append(f"shape={self.shape}")
        return f"{head}({', '.join(parts)})"


_FIELDS = ("entries", "unreduced", "flat_axes", "at", "shape")


def _shape(shape: object) -> tuple[int, ...] | None:
    if shape is None or (isinstance(shape, tuple | list) and all(isinstance(length, int) for length in shape)):
        return None if shape is None else tuple(shape)
    raise TypeError(f"shape must be a tuple of integers; got {shape!r}.")


def _coordinates(at: Coordinates | None) -> tuple[tuple[tuple[str, ...], int], ...]:
    """Validate and sort `at`."""
    if not isinstance(at, Mapping | None):
        raise TypeError(f'at must map axes to coordinates, {{"pipe": 2}}; got {at!r}.')
    found = [(as_axes(axes), number) for axes, number in (at or {}).items()]
    wrong = [
        f"{axes!r}: {number!r}"
        for axes, number in (at or {}).items()
        if not (axes and isinstance(number, int) and not isinstance(number, bool) and number >= 0)
    ]
    if wrong:
        raise ValueError(f'at must map axes to coordinates, {{"pipe": 0}}; got {{{", ".join(wrong)}}}.')
    return tuple(sorted(found))


def _entry(entry: object) -> Axes | None:
    if entry is None or entry == ():
        return None
    if isinstance(entry, str):
        return entry
    if isinstance(entry, tuple | list) and all(isinstance(axis, str) for axis in entry):
        axes = tuple(entry)
        return axes[0] if len(axes) == 1 else axes
    raise TypeError(f"An entry of P must be None, an axis name or a tuple of axis names; got {entry!r}.")


def _show(entry: Axes | None) -> str:
    return "None" if entry is None else as_written(as_axes(entry))
