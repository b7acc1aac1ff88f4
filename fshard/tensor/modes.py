"""`Mode`: which axes of the mesh shard tokens, features and weights in a tensor-parallel layer.

An activation is (tokens, ..., features): dim 0 is sharded over `tokens`, the last dim over
`hidden`. A linear layer takes activations of one mode to those of `mode.next`, so a block's two
linears use `mode` and `mode.next`:

    mode   axes       tokens    hidden   weight (out, in)   embedding (vocabulary, features)
    1d     t          -         -        P(t, None)         P(t)
      next            -         t        P(None, t)         P(None, t)
    2d     i, j       i         j        P(j, i)            P(i, j)
    2.5d   d, i, j    (d, i)    j        P(j, i)            P((d, i), j)
    3d     a, b, c    (a, c)    b        P(c, (b, a))       P((c, a), b)
      next            (a, b)    c        P(b, (c, a))       P((b, a), c)

A bias is sharded as the features of the result, the weight of a norm as those of the activation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Literal, NamedTuple

from fshard.errors import MeshError
from fshard.mesh.collectives.api import axis_index
from fshard.mesh.layout import Mesh, P, require_mesh
from fshard.mesh.layout.arithmetic import flat_range


class _ModeRow(NamedTuple):
    """A row of the table above. Each string has the letters of the axes that shard a dim."""

    tokens: str
    hidden: str
    next_hidden: str
    """Of the features of the result, so the output dim of a weight."""
    contracted: str
    """Of the input dim of a weight."""
    vocabulary: str


_LETTERS = {"1d": "t", "2d": "ij", "2.5d": "dij", "3d": "abc"}
"""The axes of each kind, a letter each."""
_ROWS = {
    "1d": (_ModeRow("", "", "t", "", "t"), _ModeRow("", "t", "", "t", "")),
    "2d": (_ModeRow("i", "j", "j", "i", "i"),),
    "2.5d": (_ModeRow("di", "j", "j", "i", "di"),),
    "3d": (_ModeRow("ac", "b", "c", "ba", "ca"), _ModeRow("ab", "c", "b", "ca", "ba")),
}
"""The rows of each kind: of a mode and of its next; only one if these are equal."""


@dataclass(frozen=True)
class Mode:
    """The layouts of tensor-parallel layers on some axes. Made by `mode`.

    `axes` and their `sizes` are in the order of the table. `tokens`, `hidden`, `contracted` and
    `vocabulary` are the axes that shard dim 0 and the last dim of activations, the input dim of
    weights and the rows of an embedding. The others are the layouts of parameters: `weight` and
    `bias` of a linear layer, `norm` of a norm, `embedding`, and `features` of an embedding that is
    sharded over its features only. `flipped` is True after an odd number of linear layers, where
    these change the mode.
    """

    kind: str
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    flipped: bool
    tokens: tuple[str, ...]
    hidden: tuple[str, ...]
    contracted: tuple[str, ...]
    vocabulary: tuple[str, ...]
    weight: P
    bias: P
    norm: P
    embedding: P
    features: P

    @property
    def next(self) -> Mode:
        """The mode of the results of a linear layer."""
        return _mode(self.kind, self.axes, self.sizes, not self.flipped)

    def kv_weight(self, kv_heads: int) -> P:
        """Return the layout of the weights of keys and values.

        They are replicated along the axes of heads if the devices there do not divide `kv_heads`.
        """
        if kv_heads % self.next.size() == 0:
            return self.weight
        return P(None, self.contracted)

    def activation(self, ndim: int) -> P:
        """Return the layout of an activation."""
        inner_dims = (None,) * (ndim - 2)
        return P(self.tokens, *inner_dims, self.hidden)

    def size(self, axes: tuple[str, ...] | None = None) -> int:
        """Return the number of devices along some axes, by default those that shard features."""
        if axes is None:
            axes = self.hidden
        return prod([self.sizes[self.axes.index(axis)] for axis in axes])

    def check(
        self, *, batch: int | None = None, hidden: int | None = None, heads: int | None = None
    ) -> None:
        """Raise one error with all sizes of a model that the devices do not divide."""
        n = self.next.size()
        # In 3d the input dim of a weight is sharded over two axes, such as (b, a).
        hidden_divisor = n * n if self.kind == "3d" else self.size()
        requirements = [
            ("batch", batch, self.size(self.tokens)),
            ("hidden", hidden, hidden_divisor),
            ("heads", heads, n),
        ]

        errors: list[str] = []
        for name, size, divisor in requirements:
            if size is None or size % divisor == 0:
                continue
            nearest = max(round(size / divisor), 1) * divisor
            errors.append(
                f"{name} must be a multiple of {divisor}; got {size} (the nearest is {nearest})"
            )
        if errors:
            pairs = zip(self.axes, self.sizes, strict=True)
            grid = ", ".join([f"{axis}={size}" for axis, size in pairs])
            raise ValueError(f'mode "{self.kind}" on {grid}: {"; ".join(errors)}.')


def mode(kind: Literal["1d", "2d", "2.5d", "3d"], axes: str | tuple[str, ...], mesh: Mesh) -> Mode:
    """Return the mode of layers on some axes of a mesh.

    "1d" needs one axis, "2d" a square, "2.5d" an axis of any size and a square, "3d" a cube, in the
    order of the table above. The mesh may have other axes.

    >>> import fshard as fs
    >>> m = fs.tensor.mode("3d", ("a", "b", "c"), fs.make_mesh({"a": 2, "b": 2, "c": 2}))
    >>> m.activation(3), m.weight, m.next.activation(3)
    (P(("a", "c"), None, "b"), P("c", ("b", "a")), P(("a", "b"), None, "c"))
    """
    mesh = require_mesh("mode", mesh)
    names = abstract_mode(kind, mesh.check_axes(axes, "mode")).axes
    equal_axes = names[1:] if kind == "2.5d" else names
    equal_sizes = [mesh.shape[name] for name in equal_axes]
    if len(set(equal_sizes)) > 1:
        _raise_unequal(kind, equal_axes, equal_sizes)

    sizes = tuple([mesh.shape[name] for name in names])
    return _mode(kind, names, sizes, False)


def _raise_unequal(kind: str, axes: tuple[str, ...], sizes: list[int]) -> None:
    """Raise an error that names the cubes (or squares) below and above a number of devices."""
    # Rounded down, where float powers are inexact: 64 ** (1 / 3) is 3.9999999999999996.
    side = int(prod(sizes) ** (1 / len(sizes)) + 1e-9)
    below = " x ".join([str(side)] * len(sizes))
    above = " x ".join([str(side + 1)] * len(sizes))
    actual = " x ".join(map(str, sizes))
    raise MeshError(
        f'mode: the axes {", ".join(axes)} of "{kind}" must have equal sizes; got {actual}. '
        f"The nearest legal sizes are {below} and {above}."
    )


def abstract_mode(kind: str, names: tuple[str, ...]) -> Mode:
    """Return a mode on axes whose sizes are not known yet."""
    is_distinct = len(names) == len(set(names))
    if kind not in _LETTERS or len(names) != len(_LETTERS[kind]) or not is_distinct:
        kinds = [f'"{kind}" with {len(letters)} axes' for kind, letters in _LETTERS.items()]
        actual = ", ".join(names) or "none"
        raise MeshError(
            f"mode must be one of {', '.join(kinds)}, all different; got {kind!r} with {actual}."
        )
    return _mode(kind, names, (1,) * len(names), False)


# Cached, since every call of a layer takes `mode.next`: to make one takes 100 us.
@cache
def _mode(kind: str, names: tuple[str, ...], sizes: tuple[int, ...], flipped: bool) -> Mode:
    rows = _ROWS[kind]
    row = rows[-1] if flipped else rows[0]
    name_of_letter = dict(zip(_LETTERS[kind], names, strict=True))

    def named(letters: str) -> tuple[str, ...]:
        return tuple([name_of_letter[letter] for letter in letters])

    hidden = named(row.hidden)
    next_hidden = named(row.next_hidden)
    contracted = named(row.contracted)
    vocabulary = named(row.vocabulary)
    return Mode(
        kind=kind,
        axes=names,
        sizes=sizes,
        flipped=flipped and len(rows) > 1,
        tokens=named(row.tokens),
        hidden=hidden,
        contracted=contracted,
        vocabulary=vocabulary,
        weight=P(next_hidden, contracted),
        bias=P(next_hidden),
        norm=P(hidden),
        embedding=P(vocabulary, hidden),
        # In 1d no axis shards features: the result of the lookup is all-gathered.
        features=P(None, hidden or vocabulary),
    )


def shard_range(
    total: int | None, local: int, axes: tuple[str, ...], size: int, name: str
) -> tuple[int, int]:
    """Return the first index of this device's shard of a dim, and the dim's global length.

    Shards are those of torch.chunk: the last may be shorter. Without a total all are equally long.

    Args:
        total: the global length; None if the devices divide it.
        local: the length of the shard.
        axes: shard the dim; () if none does.
        size: the number of devices along these axes.
        name: of the argument of the caller that gives the total, for the error.
    """
    index = axis_index(axes) if axes else 0
    length = local * size if total is None else total
    start, stop = flat_range(length, size, index)
    expected = stop - start
    if local != expected or local == 0:
        raise ValueError(
            f"{name} must be the global size, of which device {index} of {size} has {expected}, "
            f"and at least 1; got {length}, but its shard has {local}."
        )
    return start, length
