"""Drawn layouts and arrays, and the oracle of a reshard: full tensors, indexed."""

from math import prod

import torch
from hypothesis import strategies as st

from fshard import P

MESHES = [
    {"a": 2},
    {"a": 3},
    {"a": 2, "b": 2},
    {"a": 4, "b": 2},
    {"a": 2, "b": 3},
    {"a": 2, "b": 2, "c": 2},
]


@st.composite
def specs(draw, mesh, shape):
    """Any legal spec: an axis cuts a dim that it divides, or the flat tensor, has a coordinate, is
    unreduced, or unused.
    """
    axes = draw(st.permutations(list(mesh)))
    flat = draw(st.booleans())
    dims = [[] for _ in shape]
    cut, placed, unreduced = [], [], []
    for axis in axes:
        choices = ["nothing", "unreduced", "placed"]
        if flat:
            choices.append("flat")
        else:
            choices += [
                dim
                for dim, length in enumerate(shape)
                if length % prod([mesh[other] for other in (*dims[dim], axis)]) == 0
            ]
        choice = draw(st.sampled_from(choices))
        if choice == "unreduced":
            unreduced.append(axis)
        elif choice == "flat":
            cut.append(axis)
        elif choice == "placed":
            placed.append(axis)
        elif choice != "nothing":
            dims[choice].append(axis)
    unreduced = tuple(unreduced)
    on = (
        {tuple(placed): draw(st.integers(0, prod(mesh[axis] for axis in placed) - 1))}
        if placed
        else {}
    )
    if cut:
        return P.flat(*cut, unreduced=unreduced, at=on)
    return P(*(tuple(dim) for dim in dims), unreduced=unreduced, at=on)


@st.composite
def problems(draw, meshes=MESHES):
    mesh = draw(st.sampled_from(meshes))
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 6, 8, 12, 24]), max_size=3)))
    return mesh, shape, draw(specs(mesh, shape)), draw(specs(mesh, shape))


def expected_shards(whole, layout):
    """The oracle: each device's piece by indexing, every summand but the first zero."""
    pieces = []
    for device in range(layout.mesh.size):
        ranges = layout.ranges(whole.shape, device)
        source = whole.reshape(-1) if layout.spec.is_flat else whole
        piece = (
            source[tuple(slice(*one) for one in ranges)]
            if whole.ndim or layout.spec.is_flat
            else whole
        )
        nothing = [0] * (1 if layout.spec.is_flat else max(whole.ndim, 1))
        piece = piece if layout.has_any(device) else piece.reshape(-1)[:0].reshape(nothing)
        place = layout.mesh.coordinates(device)
        first = not any(place[axis] for axis in layout.spec.unreduced)
        pieces.append(piece.clone() if first else torch.zeros_like(piece))
    return tuple(pieces)
