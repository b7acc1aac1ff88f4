"""`P`: how the dims of a tensor lie on the axes of a mesh.

An entry per tensor dim says which axes of the mesh cut that dim: none, one, or several from major to minor.  What
is not cut is whole on every device.  Three things more can be said: *flat* (the tensor flattened, then cut into even
ranges, the last ones shorter or empty), *on* (it lies on the devices at one place along those axes, and nothing of it on the
others) and *unreduced* (the true value is the sum over those axes).  They go together, each with axes of its own.

    P("data", None)                 dim 0 over "data", dim 1 whole
    P(("data", "model"))            dim 0 over both axes, "data" major
    P(None, unreduced="model")      whole, but each device along "model" holds one summand
    P.flat("data")                  flattened and cut over "data"
    P.owned("data", by=2)           whole on device 2 along "data", empty on the others: P(on={"data": 2})
    P.flat("data", on={"pipe": 2})  flattened and cut over "data" on the devices at place 2 along "pipe", empty on the others
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fshard.errors import LayoutError
from fshard.mesh.layout.arithmetic import unravel

Axes = str | tuple[str, ...]
"""One axis of the mesh by name, or several from major to minor."""
On = Mapping[Axes, int]
"""Places along axes: `{"pipe": 2}`; along several axes counted major to minor, `{("data", "model"): 5}`."""


def without_hash(value: Any, /) -> dict[str, object]:
    """Return the pickled state of a value without its cached hash, which differs between processes."""
    return {name: part for name, part in value.__dict__.items() if name in value.__dataclass_fields__}


def as_axes(axes: Axes | Iterable[str] | None) -> tuple[str, ...]:
    """Return axis names as a tuple: none, one, or several."""
    if axes is None:
        return ()
    names = (axes,) if isinstance(axes, str) else tuple(axes) if isinstance(axes, Iterable) else (axes,)
    wrong = [name for name in names if not isinstance(name, str)]
    if wrong:
        raise LayoutError(f'An axis is a name like "data", or a tuple of names; found {", ".join(map(repr, wrong))}.')
    return names


def as_written(axes: tuple[str, ...]) -> str:
    """Return axis names as a caller would write them.

    >>> print(as_written(("data",)), as_written(("data", "model")))
    "data" ("data", "model")
    """
    names = ", ".join(f'"{axis}"' for axis in axes)
    return names if len(axes) == 1 else f"({names})"


@dataclass(frozen=True, init=False, repr=False)
class P:
    """A spec: which mesh axes shard each dim of a tensor.

    Args:
        entries: one per tensor dim: None, an axis, or a tuple of axes (major to minor).  Trailing Nones may be left out.
        unreduced: axes over which the true value is still the sum of what the devices hold.
        on: the place along some axes at which the tensor lies.  Devices elsewhere hold an empty shard, every dim of which
            is 0 (a number's is an empty vector).
        shape: of the whole tensor, needed only where it cannot be known: in `out_specs`, of what is flat or lies on some
            devices only.

    `P` is a leaf, not a tuple, so a tree of them is a tree of specs.

    >>> P("data", None) == P("data")
    True
    >>> P(None, ("data", "model"), unreduced="pipe")
    P(None, ("data", "model"), unreduced="pipe")
    >>> P("model", on={"pipe": 2}), P(on={"pipe": 2})
    (P("model", on={"pipe": 2}), P.owned("pipe", by=2))
    """

    entries: tuple[Axes | None, ...]
    unreduced: tuple[str, ...]
    flat_axes: tuple[str, ...] | None
    on: tuple[tuple[tuple[str, ...], int], ...]
    shape: tuple[int, ...] | None

    def __init__(
        self,
        *entries: Axes | None,
        unreduced: Axes | None = None,
        on: On | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        normal = [_entry(entry) for entry in entries]
        while normal and normal[-1] is None:
            normal.pop()
        parts = tuple(normal), tuple(sorted(as_axes(unreduced))), None, _places(on), _shape(shape)
        self._set(**dict(zip(_PARTS, parts, strict=True)))

    @classmethod
    def flat(
        cls, *axes: str, unreduced: Axes | None = None, on: On | None = None, shape: tuple[int, ...] | None = None
    ) -> P:
        """Flatten the tensor and cut it into even ranges over `axes`, major to minor.

        A range is ceil(size / devices) elements; the last ranges are shorter, or empty, where that does not come out
        even.  All else is as for `P`.

        >>> P.flat("data", on={"pipe": 2})
        P.flat("data", on={"pipe": 2})
        """
        if not axes:
            raise LayoutError('P.flat() names no axis. Write P.flat("data"), or P() for a replicated tensor.')
        return cls(unreduced=unreduced, on=on, shape=shape)._but(flat_axes=as_axes(axes))

    @classmethod
    def owned(cls, *axes: str, by: int, unreduced: Axes | None = None, shape: tuple[int, ...] | None = None) -> P:
        """Leave the tensor whole on the device at place `by` along `axes`, counted major to minor: `P(on={axes: by})`.

        >>> P.owned("data", by=2)
        P.owned("data", by=2)
        """
        if not axes or not _is_place(by):
            raise LayoutError(
                f"P.owned({', '.join(map(repr, axes))}{', ' if axes else ''}by={by!r}) names no axis, or no place along it. "
                'Write P.owned("data", by=0).'
            )
        return cls(unreduced=unreduced, on={axes: by}, shape=shape)

    def _but(self, **changes: object) -> P:
        spec = P.__new__(P)
        spec._set(**{name: getattr(self, name) for name in _PARTS} | changes)
        return spec

    def _set(self, **parts: object) -> None:
        for name, value in parts.items():
            object.__setattr__(self, name, value)
        repeated = sorted(axis for axis, count in Counter(self.axes).items() if count > 1)
        if repeated:
            raise LayoutError(f"{self!r} names an axis more than once: {', '.join(repeated)}.")

    @property
    def is_flat(self) -> bool:
        return self.flat_axes is not None

    @property
    def shapeless(self) -> P:
        """The spec without the shape that it may have been written for, which says nothing of where things lie."""
        return self if self.shape is None else self._but(shape=None)

    @property
    def cut_axes(self) -> tuple[str, ...]:
        """The axes that cut the tensor: its dims, or the flat one."""
        return self.flat_axes or tuple(axis for entry in self.entries for axis in as_axes(entry))

    @property
    def on_axes(self) -> tuple[str, ...]:
        """The axes along which it lies at one place only."""
        return tuple(axis for axes, _ in self.on for axis in axes)

    @property
    def sharded_axes(self) -> tuple[str, ...]:
        """The axes along which devices hold different shards of the tensor, or some hold none."""
        return self.cut_axes + self.on_axes

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes named here: those that cut the tensor, those along which it has a place, and those it is unreduced over."""
        return self.sharded_axes + self.unreduced

    def at(self, on: On | None) -> P:
        """Return this spec at another place; None: everywhere.

        >>> P.flat("data").at({"pipe": 2}), P.flat("data", on={"pipe": 2}).at(None)
        (P.flat("data", on={"pipe": 2}), P.flat("data"))
        """
        return self._but(on=_places(on))

    def place(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return at which place it lies along each axis of `on`, on a mesh of these sizes.

        >>> P(on={("data", "model"): 5, "pipe": 2}).place({"data": 2, "model": 4, "pipe": 3})
        {'data': 1, 'model': 1, 'pipe': 2}
        """
        return {
            axis: index
            for axes, place in self.on
            for axis, index in zip(axes, unravel(place, [sizes[axis] for axis in axes]), strict=True)
        }

    def dims(self, ndim: int) -> tuple[tuple[str, ...], ...]:
        """Return the axes of each of `ndim` dims, () where a dim is whole."""
        return tuple(as_axes(self.entries[dim]) if dim < len(self.entries) else () for dim in range(ndim))

    @cached_property
    def _hash(self) -> int:
        return hash((self.entries, self.unreduced, self.flat_axes, self.on, self.shape))

    def __hash__(self) -> int:
        return self._hash  # computed once: layouts are the keys of what is planned once per program

    def __getstate__(self) -> dict[str, object]:
        return without_hash(self)

    def __repr__(self) -> str:
        head, parts = "P", [_show(entry) for entry in self.entries]
        if self.flat_axes is not None:
            head, parts = "P.flat", [_show(axis) for axis in self.flat_axes]
        elif len(self.on) == 1 and not parts:
            ((axes, place),) = self.on
            head, parts = "P.owned", [*(_show(axis) for axis in axes), f"by={place}"]
        if self.on and head != "P.owned":
            parts.append(f"on={{{', '.join(f'{_show(_entry(axes))}: {place}' for axes, place in self.on)}}}")
        if self.unreduced:
            parts.append(f"unreduced={_show(_entry(self.unreduced))}")
        if self.shape is not None:
            parts.append(f"shape={self.shape}")
        return f"{head}({', '.join(parts)})"


_PARTS = ("entries", "unreduced", "flat_axes", "on", "shape")


def _shape(shape: object) -> tuple[int, ...] | None:
    if shape is None or (isinstance(shape, tuple | list) and all(isinstance(length, int) for length in shape)):
        return None if shape is None else tuple(shape)
    raise LayoutError(f"The shape of a whole tensor is a tuple of whole numbers, not {shape!r}.")


def _is_place(place: object) -> bool:
    return isinstance(place, int) and not isinstance(place, bool) and place >= 0


def _places(on: On | None) -> tuple[tuple[tuple[str, ...], int], ...]:
    """Return places along axes in one order, whatever order they were written in."""
    if not isinstance(on, Mapping | None):
        raise LayoutError(f'on= says the place along an axis, {{"pipe": 2}}; found {on!r}.')
    found = [(as_axes(axes), place) for axes, place in (on or {}).items()]
    wrong = ", ".join(f"{axes!r}: {place!r}" for axes, place in (on or {}).items() if not (axes and _is_place(place)))
    if wrong:
        raise LayoutError(f'on={{{wrong}}} names no axis, or no place along it. Write on={{"pipe": 0}}.')
    return tuple(sorted(found))


def _entry(entry: object) -> Axes | None:
    if entry is None or entry == ():
        return None
    if isinstance(entry, str):
        return entry
    if isinstance(entry, tuple | list) and all(isinstance(axis, str) for axis in entry):
        axes = tuple(entry)
        return axes[0] if len(axes) == 1 else axes
    raise LayoutError(f"P takes None, an axis name or a tuple of axis names per dim; found {entry!r}.")


def _show(entry: Axes | None) -> str:
    if entry is None:
        return "None"
    if isinstance(entry, str):
        return f'"{entry}"'
    return "(" + ", ".join(f'"{axis}"' for axis in entry) + ")"
