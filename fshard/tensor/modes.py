"""`Mode`: which axes of the mesh shard tokens, features and weights in a tensor-parallel layer.

An activation is (tokens, ..., features): dim 0 is sharded over `tokens`, the last dim over `hidden`. A linear layer
takes activations of one mode to those of `mode.next`, so a block's two linears use `mode` and `mode.next`:

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
from typing import Literal

from fshard.errors import MeshError
from fshard.mesh.collectives.api import axis_index
from fshard.mesh.layout import Mesh, P, require_mesh
from fshard.mesh.layout.arithmetic import flat_range

_TABLE = {
    "1d": ("t", "- - t - t", "- t - t -"),
    "2d": ("ij", "i j j i i"),
    "2.5d": ("dij", "di j j i di"),
    "3d": ("abc", "ac b c ba ca", "ab c b ca ba"),
}
"""The axes of each kind; then the axes of a mode's `tokens, hidden, next.hidden, contracted, vocabulary`, and its next's."""


@dataclass(frozen=True)
class Mode:
    """The layouts of tensor-parallel layers on some axes. Made by `mode`.

    `axes` and their `sizes` are in the order of the table; `tokens`, `hidden`, `contracted` and
    `vocabulary` are the axes that shard dim 0 and the last dim of activations, the input dim of weights and the rows of
    an embedding. The others are the layouts of parameters: `weight` and `bias` of a linear layer, `norm` of a norm,
    `embedding`, and `features` of an embedding that is sharded over its features only. `flipped` is True after an odd
    number of linear layers.
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
        """Return the layout of the weights of keys and values, replicated along heads if the devices do not divide them."""
        return self.weight if kv_heads % self.next.size() == 0 else P(None, self.contracted)

    def activation(self, ndim: int) -> P:
        """Return the layout of an activation."""
        return P(self.tokens, *(None,) * (ndim - 2), self.hidden)

    def size(self, axes: tuple[str, ...] | None = None) -> int:
        """Return the number of devices along some axes, by default those that shard features."""
        return prod(
            self.sizes[self.axes.index(axis)] for axis in (self.hidden if axes is None else axes)
        )

    def check(
        self, *, batch: int | None = None, hidden: int | None = None, heads: int | None = None
    ) -> None:
        """Raise unless the devices divide the sizes of a model; name all that they do not, with the nearest that work."""
        n = self.next.size()
        divisors = {
            "batch": self.size(self.tokens),
            "hidden": n * n if self.kind == "3d" else self.size(),
            "heads": n,
        }
        errors = [
            f"{name} must be a multiple of {n}; got {size} (the nearest is {max(round(size / n), 1) * n})"
            for (name, n), size in zip(divisors.items(), (batch, hidden, heads), strict=True)
            if size is not None and size % n
        ]
        if errors:
            grid = ", ".join(
                f"{axis}={size}" for axis, size in zip(self.axes, self.sizes, strict=True)
            )
            raise ValueError(f'mode "{self.kind}" on {grid}: {"; ".join(errors)}.')


def mode(kind: Literal["1d", "2d", "2.5d", "3d"], axes: str | tuple[str, ...], mesh: Mesh) -> Mode:
    """Return the mode of layers on some axes of a mesh.

    "1d" needs one axis, "2d" a square, "2.5d" an axis of any size and a square, "3d" a cube, in the order of the table
    above. The mesh may have other axes.

    >>> import fshard as fs
    >>> m = fs.tensor.mode("3d", ("a", "b", "c"), fs.make_mesh({"a": 2, "b": 2, "c": 2}))
    >>> m.activation(3), m.weight, m.next.activation(3)
    (P(("a", "c"), None, "b"), P("c", ("b", "a")), P(("a", "b"), None, "c"))
    """
    mesh = require_mesh("mode", mesh)
    names = abstract_mode(kind, mesh.check_axes(axes, "mode")).axes
    square = names[1:] if kind == "2.5d" else names
    sizes = [mesh.shape[name] for name in square]
    if len(set(sizes)) > 1:
        side = int(prod(sizes) ** (1 / len(sizes)) + 1e-9)
        legal = [" x ".join([str(q)] * len(sizes)) for q in (side, side + 1)]
        raise MeshError(
            f'mode: the axes {", ".join(square)} of "{kind}" must have equal sizes; got {" x ".join(map(str, sizes))}. '
            f"The nearest legal sizes are {' and '.join(legal)}."
        )
    return _mode(kind, names, tuple(mesh.shape[name] for name in names), False)


def abstract_mode(kind: str, names: tuple[str, ...]) -> Mode:
    """Return a mode on axes whose sizes are not known yet."""
    if kind not in _TABLE or not len(names) == len(set(names)) == len(_TABLE[kind][0]):
        needed = ", ".join(
            f'"{kind}" with {len(letters)} axes' for kind, (letters, *_) in _TABLE.items()
        )
        raise MeshError(
            f"mode must be one of {needed}, all different; got {kind!r} with {', '.join(names) or 'none'}."
        )
    return _mode(kind, names, (1,) * len(names), False)


@cache
def _mode(kind: str, names: tuple[str, ...], sizes: tuple[int, ...], flipped: bool) -> Mode:
    letters, *rows = _TABLE[kind]
    flipped = flipped and len(rows) > 1
    axes = dict(zip(letters, names, strict=True))
    tokens, hidden, after, contracted, vocabulary = (
        tuple(axes[letter] for letter in entry if letter != "-") for entry in rows[flipped].split()
    )
    layouts = (
        P(after, contracted),
        P(after),
        P(hidden),
        P(vocabulary, hidden),
        P(None, hidden or vocabulary),
    )
    return Mode(kind, names, sizes, flipped, tokens, hidden, contracted, vocabulary, *layouts)


def own_range(
    total: int | None, local: int, axes: tuple[str, ...], size: int, name: str
) -> tuple[int, int]:
    """Return the first index of the calling device's shard of a dim, and the dim's length.

    Shards are those of torch.chunk: the last may be shorter. Without a total all are equally long.
    """
    index, length = axis_index(axes) if axes else 0, local * size if total is None else total
    start, stop = flat_range(length, size, index)
    if stop - start != local or not local:
        raise ValueError(
            f"{name} must be the global size, of which device {index} of {size} has {stop - start}, and at least 1; got "
            f"{length}, but its shard has {local}."
        )
    return start, length
