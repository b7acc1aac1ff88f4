"""`P`: how the dims of a tensor lie on the axes of a mesh.

An entry per tensor dim says which axes of the mesh cut that dim: none, one, or several from major to minor.  What
is not cut is whole on every device.  Three things more can be said: *flat* (the tensor flattened, then cut into even
ranges, the last ones shorter or empty), *owned* (whole on one device, nothing on the others) and *unreduced* (the true
value is the sum over those axes).

    P("data", None)                 dim 0 over "data", dim 1 whole
    P(("data", "model"))            dim 0 over both axes, "data" major
    P(None, unreduced="model")      whole, but each device along "model" holds one summand
    P.flat("data")                  flattened and cut over "data"
    P.owned("data", by=2)           whole on device 2 along "data", empty on the others
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from fshard.errors import LayoutError

Axes = str | tuple[str, ...]
"""One axis of the mesh by name, or several from major to minor."""


def without_hash(value: object, /) -> dict[str, object]:
    """Return what is pickled of a value that keeps its hash: in another process the hash is another."""
    return {name: part for name, part in value.__dict__.items() if name != "_hash"}


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
    """Say which mesh axes cut each dim of a tensor.

    Args:
        entries: one per tensor dim: None, an axis, or a tuple of axes (major to minor).  Trailing Nones may be left out.
        unreduced: axes over which the true value is still the sum of what the devices hold.

    `P` is a leaf, not a tuple, so a tree of them is a tree of specs.

    >>> P("data", None) == P("data")
    True
    >>> P(None, ("data", "model"), unreduced="pipe")
    P(None, ("data", "model"), unreduced="pipe")
    >>> P.flat("data")
    P.flat("data")
    """

    entries: tuple[Axes | None, ...]
    unreduced: tuple[str, ...]
    flat_axes: tuple[str, ...] | None
    owned_axes: tuple[str, ...] | None
    owner: int | None
    shape: tuple[int, ...] | None

    def __init__(self, *entries: Axes | None, unreduced: Axes | None = None) -> None:
        normal = [_entry(entry) for entry in entries]
        while normal and normal[-1] is None:
            normal.pop()
        self._set(tuple(normal), as_axes(unreduced))

    @classmethod
    def flat(cls, *axes: str, unreduced: Axes | None = None, shape: tuple[int, ...] | None = None) -> P:
        """Flatten the tensor and cut it into even ranges over `axes`, major to minor.

        A range is ceil(size / devices) elements; the last ranges are shorter, or empty, where that does not come out
        even.  `shape` is the shape of the whole tensor, needed only where it cannot be known: in `out_specs`.
        """
        if not axes:
            raise LayoutError('P.flat() names no axis. Write P.flat("data"), or P() for a replicated tensor.')
        spec = cls.__new__(cls)
        spec._set((), as_axes(unreduced), flat_axes=as_axes(axes), shape=shape)
        return spec

    @classmethod
    def owned(cls, *axes: str, by: int, unreduced: Axes | None = None, shape: tuple[int, ...] | None = None) -> P:
        """Leave the tensor whole on the device at place `by` along `axes`, counted major to minor.

        The other devices hold an empty piece, every dim of which is 0 (a number's is an empty vector).  `shape` is as for
        `flat`.

        >>> P.owned("data", by=2)
        P.owned("data", by=2)
        """
        if not axes or not isinstance(by, int) or isinstance(by, bool) or by < 0:
            raise LayoutError(
                f"P.owned({', '.join(map(repr, axes))}{', ' if axes else ''}by={by!r}) names no axis, or no place along it. "
                'Write P.owned("data", by=0).'
            )
        spec = cls.__new__(cls)
        spec._set((), as_axes(unreduced), owned_axes=as_axes(axes), owner=by, shape=shape)
        return spec

    def _set(
        self,
        entries: tuple[Axes | None, ...],
        unreduced: tuple[str, ...],
        *,
        flat_axes: tuple[str, ...] | None = None,
        owned_axes: tuple[str, ...] | None = None,
        owner: int | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        if shape is not None and not (
            isinstance(shape, tuple | list) and all(isinstance(length, int) for length in shape)
        ):
            raise LayoutError(f"The shape of a whole tensor is a tuple of whole numbers, not {shape!r}.")
        for name, value in {
            "entries": entries,
            "unreduced": tuple(sorted(unreduced)),
            "flat_axes": flat_axes,
            "owned_axes": owned_axes,
            "owner": owner,
            "shape": None if shape is None else tuple(shape),
        }.items():
            object.__setattr__(self, name, value)
        repeated = sorted(axis for axis, count in Counter(self._all_axes()).items() if count > 1)
        if repeated:
            raise LayoutError(
                f"{self!r} names an axis more than once: {', '.join(repeated)}. An axis can cut one dim only."
            )

    def _all_axes(self) -> list[str]:
        return (
            [axis for entry in self.entries for axis in as_axes(entry)]
            + list(self.flat_axes or self.owned_axes or ())
            + list(self.unreduced)
        )

    @property
    def is_flat(self) -> bool:
        """Whether the tensor is flattened before it is cut."""
        return self.flat_axes is not None

    @property
    def is_owned(self) -> bool:
        """Whether the tensor is whole on one device, and nowhere else."""
        return self.owned_axes is not None

    @property
    def shapeless(self) -> P:
        """The spec without the shape that it may have been written for, which says nothing of where things lie."""
        if self.shape is None:
            return self
        if self.owned_axes is not None and self.owner is not None:
            return P.owned(*self.owned_axes, by=self.owner, unreduced=self.unreduced)
        return P.flat(*(self.flat_axes or ()), unreduced=self.unreduced)

    @property
    def sharded_axes(self) -> tuple[str, ...]:
        """The axes along which devices hold different pieces of the tensor."""
        return tuple(axis for axis in self._all_axes() if axis not in self.unreduced)

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes named here: those that cut the tensor and those over which it is unreduced."""
        return tuple(self._all_axes())

    def dims(self, ndim: int) -> tuple[tuple[str, ...], ...]:
        """Return the axes of each of `ndim` dims, () where a dim is whole."""
        return tuple(as_axes(self.entries[dim]) if dim < len(self.entries) else () for dim in range(ndim))

    @cached_property
    def _hash(self) -> int:
        return hash((self.entries, self.unreduced, self.flat_axes, self.owned_axes, self.owner, self.shape))

    def __hash__(self) -> int:
        return self._hash  # computed once: layouts are the keys of what is planned once per program

    def __getstate__(self) -> dict[str, object]:
        return without_hash(self)

    def __repr__(self) -> str:
        parts = [_show(entry) for entry in self.entries]
        head = "P"
        if self.flat_axes is not None:
            head, parts = "P.flat", [_show(axis) for axis in self.flat_axes]
        if self.owned_axes is not None:
            head, parts = "P.owned", [*(_show(axis) for axis in self.owned_axes), f"by={self.owner}"]
        if self.unreduced:
            parts.append(f"unreduced={_show(_entry(self.unreduced))}")
        if self.shape is not None:
            parts.append(f"shape={self.shape}")
        return f"{head}({', '.join(parts)})"


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
