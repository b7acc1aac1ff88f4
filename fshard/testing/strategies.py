"""Hypothesis strategies for meshes, layouts and tensors.

Numbers are *dyadic*: small multiples of 1/8, whose sums and differences are exact in any order, so
that linear functions can be compared bit for bit in any layout. Examples shrink to one axis, few
devices, few uses of axes, float32, and zeros; large tensors to consecutive numbers.

    @settings(deadline=None)  # the first example of a process starts threads that all later ones use
    @given(st.data())
    def test_unshard_undoes_device_put(data):
        mesh = data.draw(meshes())
        shape = data.draw(shapes_for(mesh))
        layout = data.draw(layouts(mesh, shape))
        x = data.draw(dyadic(shape, torch.float32))
        assert torch.equal(fs.unshard(fs.device_put(x, layout)), x)
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from hypothesis import strategies as st
from torch import Tensor

from fshard.mesh.layout import Layout, Mesh, P
from fshard.mesh.layout.make import make_mesh

AXIS_NAMES = ("data", "model", "pipe")
"""The names that axes of drawn meshes have, in this order."""
DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    torch.complex64, torch.complex128,
)  # fmt: skip
"""The dtypes that tensors are drawn in, simplest first."""
FEW = 12
"""Up to this size elements are drawn, and shrink, one by one; larger tensors come from a seed."""
_SELDOM = st.sampled_from((False, False, False, True))


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """Draw a virtual mesh of one to three axes and at most eight devices; axes of size 1 occur.

    >>> from hypothesis import find
    >>> find(meshes(), lambda mesh: mesh.shape == {"data": 6})
    Mesh(data=6; 6 devices, virtual, cpu)
    """
    shape: dict[str, int] = {}
    most_devices = 8
    for name in AXIS_NAMES[: draw(st.integers(1, len(AXIS_NAMES)))]:
        size = draw(st.sampled_from(range(1, most_devices + 1)))
        shape[name] = size
        most_devices //= size
    return make_mesh(shape, runtime="virtual")


def axis_subsets(mesh: Mesh) -> st.SearchStrategy[tuple[str, ...]]:
    """Draw one or more axes of a mesh, in any order, as for a collective.

    >>> from hypothesis import find
    >>> find(axis_subsets(make_mesh({"data": 2, "model": 2})), lambda axes: axes == ("model", "data"))
    ('model', 'data')
    """
    return st.lists(st.sampled_from(mesh.axis_names), min_size=1, unique=True).map(tuple)


@st.composite
def specs(draw: st.DrawFn, mesh: Mesh, shape: tuple[int, ...], *, unreduced: bool = True) -> P:
    """Draw a valid spec of a tensor of `shape`.

    Its dims are sharded by one or several axes in any order, flat, or both; on some devices.

    Args:
        draw: given by hypothesis.
        mesh: whose axes may be used.
        shape: the global shape.
        unreduced: True allows unreduced axes.

    >>> from hypothesis import find
    >>> mesh = make_mesh({"data": 2, "model": 2})
    >>> def is_sharded_by_both(spec):
    ...     return spec.sharded_axes == ("data", "model") and not (spec.is_flat or spec.at)
    >>> find(specs(mesh, (4, 3)), is_sharded_by_both)
    P(("data", "model"))
    >>> find(specs(mesh, (4, 3)), lambda spec: spec.is_flat and spec.at)
    P.flat("model", at={"data": 0})
    """
    axes = draw(st.permutations(mesh.axis_names))
    at: dict[str | tuple[str, ...], int] = {}
    if draw(_SELDOM):
        at_axes, axes = _drawn_prefix(draw, axes)
        devices = prod([mesh.shape[axis] for axis in at_axes])
        at[at_axes] = draw(st.integers(0, devices - 1))
    if axes and draw(_SELDOM):
        flat_axes, axes = _drawn_prefix(draw, axes)
        unreduced_axes = [axis for axis in axes if unreduced and draw(st.booleans())]
        return P.flat(*flat_axes, unreduced=tuple(unreduced_axes), at=at)

    entries: list[tuple[str, ...]] = [()] * len(shape)
    parts = [1] * len(shape)
    uses: dict[str, list[str]] = {"replicated": [], "unreduced": [], "flat": []}
    for axis in axes:
        size = mesh.shape[axis]
        dims = [dim for dim, length in enumerate(shape) if length % (parts[dim] * size) == 0]
        choices = [*dims, "replicated"]
        if unreduced:
            choices.append("unreduced")
        if any(entries):
            choices.append("flat")  # within the shards of dims
        use = draw(st.sampled_from(choices))
        if isinstance(use, int):
            entries[use] += (axis,)
            parts[use] *= size
        else:
            uses[use].append(axis)
    return P(*entries, flat=tuple(uses["flat"]), unreduced=tuple(uses["unreduced"]), at=at)


def _drawn_prefix(draw: st.DrawFn, axes: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return one or more of the first axes, and the rest."""
    count = draw(st.integers(1, len(axes)))
    return tuple(axes[:count]), tuple(axes[count:])


def layouts(
    mesh: Mesh, shape: tuple[int, ...], *, unreduced: bool = True
) -> st.SearchStrategy[Layout]:
    """Draw a layout of a tensor of `shape` on a mesh: a spec (see `specs`) and a memory kind.

    >>> from hypothesis import find
    >>> find(layouts(make_mesh({"data": 2}), (4,)), lambda layout: layout.memory == "host").mesh
    Mesh(data=2; 2 devices, virtual, cpu)
    """
    spec = specs(mesh, shape, unreduced=unreduced)
    return st.builds(Layout, st.just(mesh), spec, st.sampled_from(("device", "host")))


@st.composite
def shapes_for(draw: st.DrawFn, mesh: Mesh) -> tuple[int, ...]:
    """Draw a shape of at most three dims, which some axes of the mesh divide.

    0-d, empty and undivided ones occur.

    >>> from hypothesis import find
    >>> find(shapes_for(make_mesh({"data": 4})), lambda shape: shape == (4,))
    (4,)
    """
    lengths: list[int] = []
    for _ in range(draw(st.integers(0, 3))):
        axes = draw(st.lists(st.sampled_from(mesh.axis_names), unique=True))
        parts = prod([mesh.shape[axis] for axis in axes])
        lengths.append(draw(st.sampled_from((1, 2, 3, 0))) * parts)
    return tuple(lengths)


@st.composite
def dyadic(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw a tensor of multiples of 1/8 up to 4 (integers up to 8 where the dtype has no others).

    Sums of eight such numbers are exact in bfloat16, of 64 in float16, of 500,000 in float32, in any order.

    >>> from hypothesis import find
    >>> x = find(dyadic((3,)), lambda x: bool(x.sum() > 1))
    >>> bool(((8 * x) % 1 == 0).all())
    True
    """
    if dtype.is_complex:
        real = torch.float32 if dtype == torch.complex64 else torch.float64
        return torch.complex(draw(dyadic(shape, real)), draw(dyadic(shape, real)))
    low, high = _range(dtype)
    size = prod(shape)
    if size <= FEW:
        drawn = draw(st.lists(st.integers(low, high), min_size=size, max_size=size))
        numbers = torch.tensor(drawn, dtype=torch.int64)
    else:
        seed = draw(st.integers(0, 2**16))
        if seed == 0:  # what hypothesis shrinks to: consecutive numbers
            numbers = torch.arange(size) % (high - low + 1) + low
        else:
            generator = torch.Generator().manual_seed(seed)
            numbers = torch.randint(low, high + 1, (size,), generator=generator)
    if dtype.is_floating_point:
        numbers = numbers / 8
    return numbers.to(dtype).reshape(shape)


def _range(dtype: torch.dtype) -> tuple[int, int]:
    """Return the smallest and the largest number that is drawn: of eighths for a floating dtype."""
    if dtype == torch.bool:
        return 0, 1
    if dtype == torch.uint8:
        return 0, 8
    return (-32, 32) if dtype.is_floating_point else (-8, 8)
