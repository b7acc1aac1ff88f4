"""Drawn moves from a mesh to another one, and their oracle: full tensors, indexed by plain lists."""

from dataclasses import dataclass, replace
from itertools import product
from math import prod

import torch
from hypothesis import strategies as st

import fshard as fs
from fshard import P
from fshard.mesh.layout.kinds import copy_in
from fshard.mesh.layout.mesh import Mesh
from fshard.mesh.layout.sharded import Sharded

WORLD = 8
"""The devices among which meshes are drawn."""
LENGTHS = [0, 1, 2, 3, 4, 6, 7, 8, 12, 16]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
DTYPES = [
    *FLOATS,
    torch.float8_e5m2,
    torch.bool,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.complex64,
    torch.complex128,
]
MEMORIES = ["device", "device", "host", "disk"]
GRIDS = {
    1: [(1,), (1, 1)],
    2: [(2,), (1, 2)],
    3: [(3,)],
    4: [(4,), (2, 2)],
    5: [(5,)],
    6: [(6,), (2, 3), (3, 2)],
    7: [(7,)],
    8: [(8,), (2, 4), (2, 2, 2)],
}


@dataclass(frozen=True)
class DrawnMesh:
    """The arguments of a mesh, which is made where it is used."""

    axes: dict[str, int]
    devices: tuple[int, ...] | None
    zigzag: str | None = None

    def make(self) -> Mesh:
        mesh = fs.make_mesh(self.axes, devices=self.devices)
        return replace(mesh, zigzag=self.zigzag)


@dataclass(frozen=True)
class DrawnSide:
    """The layout of a leaf on a mesh."""

    spec: P
    unit: str | None = None
    memory: str = "device"
    frozen: bool = False

    def layout(self, mesh: Mesh) -> fs.Layout:
        return fs.Layout(mesh, self.spec, self.memory, self.unit, self.frozen)


@dataclass(frozen=True)
class DrawnLeaf:
    """A tensor with its layouts before and after."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    before: DrawnSide
    after: DrawnSide
    seed: int

    def full(self) -> torch.Tensor:
        """Return random bits; small numbers where they are summed, whose zeros have no sign."""
        generator = torch.Generator().manual_seed(self.seed)
        is_summed = self.before.spec.unreduced or self.after.spec.unreduced
        if is_summed or self.dtype == torch.bool:
            numbers = torch.randint(0, 2, self.shape, generator=generator)
            return numbers.to(self.dtype)
        count = prod(self.shape) * self.dtype.itemsize
        bits = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
        return bits.view(self.dtype).reshape(self.shape)


@dataclass(frozen=True)
class DrawnMove:
    """Leaves of one mesh that move to another one, with a dtype for their floats or None."""

    before: DrawnMesh
    after: DrawnMesh
    leaves: tuple[DrawnLeaf, ...]
    dtype: torch.dtype | None

    def expected_full(self, leaf: DrawnLeaf) -> torch.Tensor:
        full = leaf.full()
        is_cast = self.dtype is not None and full.is_floating_point()
        return full.to(self.dtype) if is_cast else full


@st.composite
def drawn_meshes(draw, names, *, has_zigzag=True, world=WORLD):
    """Any mesh of 1 to 8 devices in any order, perhaps all of them without numbers."""
    count = draw(st.integers(1, world))
    sizes = draw(st.sampled_from(GRIDS[count]))
    axes = dict(zip(names, sizes, strict=False))
    devices = draw(st.permutations(range(world)))[:count]
    zigzag = None
    if has_zigzag and draw(st.integers(0, 5)) == 0:
        zigzag = draw(st.sampled_from([*axes]))
    return DrawnMesh(axes, tuple(devices), zigzag)


@st.composite
def drawn_sides(draw, mesh, shape, *, has_sums=True, memories=MEMORIES):
    """Any layout: each axis shards a dim or the flattened block, has a coordinate, a sum, or none.

    A layout with a unit may be uneven. No layout has a sum on a mesh in zigzag order, where there
    is no other reshard to compute it.
    """
    is_parameter = draw(st.booleans())
    kinds = ["nothing", "dim", "dim", "flat", "at"]
    if has_sums and mesh.zigzag is None:
        kinds.append("unreduced")
    dims = [[] for _ in shape]
    axes_of = {"flat": [], "at": [], "unreduced": []}
    for axis in draw(st.permutations([*mesh.axes])):
        kind = draw(st.sampled_from(kinds))
        if kind == "dim":
            candidates = []
            for dim, length in enumerate(shape):
                parts = prod([mesh.axes[name] for name in (*dims[dim], axis)])
                is_zigzag = mesh.zigzag in (*dims[dim], axis)
                if is_zigzag and length % (2 * parts) == 0:
                    candidates.append(dim)
                if not is_zigzag and (is_parameter or length % parts == 0):
                    candidates.append(dim)
            if candidates:
                dims[draw(st.sampled_from(candidates))].append(axis)
        elif kind != "nothing":
            axes_of[kind].append(axis)
    at = {}
    if axes_of["at"]:
        count = prod([mesh.axes[axis] for axis in axes_of["at"]])
        at[tuple(axes_of["at"])] = draw(st.integers(0, count - 1))
    spec = P(
        *[tuple(axes) for axes in dims],
        flat=tuple(axes_of["flat"]),
        unreduced=tuple(axes_of["unreduced"]),
        at=at,
    )
    return DrawnSide(
        spec,
        "unit" if is_parameter else None,
        draw(st.sampled_from(memories)),
        draw(st.booleans()),
    )


@st.composite
def drawn_leaves(draw, before, after, *, dtypes=DTYPES, **options):
    """Any tensor of at most three dims, with any layout on each side."""
    shape = tuple(draw(st.lists(st.sampled_from(LENGTHS), max_size=3)))
    return DrawnLeaf(
        shape,
        draw(st.sampled_from(dtypes)),
        draw(drawn_sides(before, shape, **options)),
        draw(drawn_sides(after, shape, **options)),
        draw(st.integers(0, 1 << 30)),
    )


@st.composite
def drawn_moves(draw, *, has_zigzag=True, world=WORLD, **options):
    """Any move of one to three leaves; the options are those of leaves and sides."""
    before = draw(drawn_meshes("abc", has_zigzag=has_zigzag, world=world))
    names = draw(st.sampled_from(["abc", "xyz"]))
    after = draw(drawn_meshes(names, has_zigzag=has_zigzag, world=world))
    leaves = draw(st.lists(drawn_leaves(before, after, **options), min_size=1, max_size=3))
    dtype = draw(st.sampled_from([None, None, *FLOATS]))
    return DrawnMove(before, after, tuple(leaves), dtype)


# -- the oracle ------------------------------------------------------------------------------------


def stored_numbers(mesh, spec, shape, coordinates):
    """Return the element numbers that a device stores, in the order of its memory, as a list.

    `mesh` has the axes and the axis in zigzag order. Written from the definition of each layout:
    ranges of ceil(length / parts) elements, and chunks i and 2n-1-i in zigzag order.
    """
    for axes, number in spec.at:
        if _index(mesh, axes, coordinates) != number:
            return []
    rows = []
    for length, entry in zip(shape, spec.dims(len(shape)), strict=True):
        order = [*range(length)]
        if mesh.zigzag in entry:
            order = _zigzag_order(mesh, entry, length)
        rows.append(_part(order, mesh, entry, coordinates))

    numbers = []
    for indices in product(*rows):
        number = 0
        for length, index in zip(shape, indices, strict=True):
            number = number * length + index
        numbers.append(number)
    return _part(numbers, mesh, spec.flat_axes or (), coordinates)


def _zigzag_order(mesh, axes, length):
    """Return the indices of a dim in the order in which the devices store them."""
    outer = prod([mesh.axes[axis] for axis in axes[: axes.index(mesh.zigzag)]])
    n = mesh.axes[mesh.zigzag]
    size = length // (outer * 2 * n)
    order = []
    for block in range(outer):
        for device in range(n):
            for chunk in (device, 2 * n - 1 - device):
                start = (block * 2 * n + chunk) * size
                order += range(start, start + size)
    return order


def _index(mesh, axes, coordinates):
    index = 0
    for axis in axes:
        index = index * mesh.axes[axis] + coordinates[axis]
    return index


def _part(items, mesh, axes, coordinates):
    parts = prod([mesh.axes[axis] for axis in axes])
    length = -(-len(items) // parts)
    index = _index(mesh, axes, coordinates)
    return items[index * length : (index + 1) * length]


def all_coordinates(mesh):
    """Return the coordinates of each device of a drawn mesh, in its order."""
    rows = product(*[range(size) for size in mesh.axes.values()])
    return [dict(zip(mesh.axes, row, strict=True)) for row in rows]


def expected_shard(full, mesh, spec, coordinates):
    """Return the shard of one device, by its numbers; of a sum all but the first are zeros."""
    numbers = stored_numbers(mesh, spec, full.shape, coordinates)
    layout = fs.Layout(Mesh((*mesh.axes.items(),), "virtual", "cpu"), spec, unit="unit")
    device = layout.mesh.index(coordinates)
    shard = full.reshape(-1)[numbers].reshape(layout.local_shape(full.shape, device))
    is_summand = any(coordinates[axis] for axis in spec.unreduced)
    return torch.zeros_like(shard) if is_summand else shard


def stored_by_device(mesh, side, shape):
    """Return the numbers that each device stores, by its number in the world."""
    spec = side.spec.replace(unreduced=())
    pairs = zip(mesh.devices, all_coordinates(mesh), strict=True)
    return {number: stored_numbers(mesh, spec, shape, place) for number, place in pairs}


def source_array(move, leaf, mesh):
    """Return the array before the move, with the shards of all devices that the caller has."""
    full = leaf.full()
    layout = leaf.before.layout(mesh)
    shards = []
    for coordinates in all_coordinates(move.before):
        shard = expected_shard(full, move.before, leaf.before.spec, coordinates)
        if leaf.before.memory == "device" and shard.ndim > 1 and leaf.seed % 2:
            shard = shard.transpose(0, -1).contiguous().transpose(0, -1)  # with other strides
        else:
            shard = copy_in(leaf.before.memory, shard, "cpu")
        shards.append(shard)
    return Sharded(leaf.shape, layout, tuple(shards))


def same_bits(x, y, *, is_cast=False):
    """Return True if two tensors have equal dtypes, shapes and bits.

    torch casts a NaN to one or another, by the place of an element in a vector: of cast values, all
    NaNs are equal.
    """
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    x, y = x.reshape(-1), y.reshape(-1)
    if is_cast and x.is_floating_point():
        is_nan = x.double().isnan()
        if not torch.equal(is_nan, y.double().isnan()):
            return False
        x, y = x[~is_nan], y[~is_nan]
    return not x.numel() or torch.equal(x.view(torch.uint8), y.view(torch.uint8))
