"""`fs.mesh.to_spmd_type` and `from_spmd_type`: round trips of drawn layouts and types, and on
processes the collectives of spmd_types, which unshard what a type states.
"""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fshard as fs
from fshard import P
from fshard.errors import LayoutError, MeshError
from tests.helpers.processes import not_under_rules

spmd = pytest.importorskip("spmd_types")

MESH = fs.make_mesh({"data": 2, "model": 3, "seq": 2, "one": 1}, runtime="virtual")
GROUPS = {
    "data": spmd.MeshAxis.of(2, 6),
    "model": spmd.MeshAxis.of(3, 2),
    "seq": spmd.MeshAxis.of(2, 1),
}
"""The axes of the mesh as spmd_types makes them of process groups: sizes and strides of ranks."""


@st.composite
def shared_axes(draw, axes=tuple(MESH.axis_names)):
    """Draw the axes of each of three dims, major to minor, and the unreduced and other axes."""
    dims = ([], [], [])
    unreduced, others = [], []
    for axis in draw(st.permutations(axes)):
        draw(st.sampled_from([*dims, unreduced, others])).append(axis)
    return [tuple(axes) for axes in dims], unreduced, others


@given(shared_axes())
def test_layouts_return_from_their_types(shared):
    dims, unreduced, _ = shared
    layout = fs.Layout(MESH, P(*dims, unreduced=tuple(unreduced)))
    assert fs.mesh.from_spmd_type(fs.mesh.to_spmd_type(layout, ndim=3), MESH) == layout


def drawn_type(shared, invariant, names):
    """Return the type of spmd_types for axes that are shared in this way."""
    dims, unreduced, _ = shared
    kinds = {}
    for axis in MESH.axis_names:
        if any(axis in axes for axes in dims):
            kinds[names[axis]] = spmd.V
        elif axis in unreduced:
            kinds[names[axis]] = spmd.P
        else:
            kinds[names[axis]] = spmd.I if axis in invariant else spmd.R
    entries = []
    for axes in dims:
        of_dim = tuple(names[axis] for axis in axes)
        entries.append((None, *of_dim)[-1] if len(of_dim) < 2 else of_dim)
    return spmd.SpmdType(kinds, spmd.PartitionSpec(*entries) if any(dims) else None)


@given(shared_axes(), st.data())
def test_types_return_from_their_layouts(shared, data):
    names = {axis: axis for axis in MESH.axis_names}
    others = shared[2]
    invariant = data.draw(st.sets(st.sampled_from(others))) if others else set()
    given_type = drawn_type(shared, invariant, names)
    layout = fs.mesh.from_spmd_type(given_type, MESH)
    assert fs.mesh.to_spmd_type(layout, 3, invariant=tuple(invariant)) == given_type


@given(shared_axes(axes=tuple(GROUPS)))
def test_annotated_tensors_have_the_layout_of_their_type(shared):
    """spmd_types itself stores a type: by groups in place of names, without axes of one device."""
    dims, unreduced, _ = shared
    layout = fs.Layout(MESH, P(*dims, unreduced=tuple(unreduced)))
    tensor = torch.empty(2, 2, 2)
    with spmd.set_current_mesh({**GROUPS, "one": spmd.MeshAxis.of(1, 1)}):
        spmd.assert_type(tensor, fs.mesh.to_spmd_type(layout, 3))
    stored = spmd.SpmdType(spmd.get_local_type(tensor), spmd.get_partition_spec(tensor))
    assert fs.mesh.from_spmd_type(stored, MESH) == layout


def test_dims_of_kinds_are_those_of_a_partition_spec():
    kinds = {"data": spmd.S(1), "model": spmd.P, "seq": spmd.S(0)}
    assert fs.mesh.from_spmd_type(spmd.SpmdType(kinds), MESH).spec == P(
        "seq", "data", unreduced="model"
    )


def test_axes_of_a_sliced_mesh_of_some_devices_are_found():
    mesh = fs.make_mesh({"a": 2, "b": 2}, devices=[1, 3, 5, 7])
    by_groups = spmd.SpmdType({spmd.MeshAxis.of(2, 4): spmd.S(0), spmd.MeshAxis.of(2, 2): spmd.R})
    assert fs.mesh.from_spmd_type(by_groups, mesh).spec == P("a")
    of_b = spmd.SpmdType({spmd.MeshAxis.of(2, 2): spmd.S(0)})
    assert fs.mesh.from_spmd_type(of_b, mesh["b"]).spec == P("b")


# Each is a layout that a type would lose, and what the error names.
OWN = {
    "flat": (P.flat("data"), {}, "it is flat"),
    "at": (P("data", at={"seq": 1}), {}, "it has at="),
    "shape": (P("data", shape=(4,)), {}, "it has shape="),
    "host": (P("data"), {"memory": "host"}, 'its memory is "host"'),
    "unit": (P("data"), {"unit": "block"}, "it has a unit"),
    "frozen": (P("data"), {"frozen": True}, "it is frozen"),
}


@pytest.mark.parametrize(("spec", "options", "text"), OWN.values(), ids=OWN)
def test_layout_of_fshard_alone_has_no_type(spec, options, text):
    with pytest.raises(LayoutError, match=re.escape(text)):
        fs.mesh.to_spmd_type(fs.Layout(MESH, spec, **options), ndim=1)


def test_layout_in_zigzag_order_has_no_type():
    mesh = fs.make_mesh({"seq": 2})
    mesh = type(mesh)(mesh.axes, mesh.runtime, mesh.device_type, zigzag="seq")
    with pytest.raises(LayoutError, match='"seq" is in zigzag order'):
        fs.mesh.to_spmd_type(fs.Layout(mesh, P("seq")), ndim=1)
    replicated = fs.Layout(mesh, P())
    assert fs.mesh.from_spmd_type(fs.mesh.to_spmd_type(replicated, ndim=1), mesh) == replicated


KINDS = {"data": spmd.R, "model": spmd.R, "seq": spmd.R}
# Each is a call that fixes no layout or no type, and what the error names.
WRONG = {
    "V without a dim": ({**KINDS, "data": spmd.V}, None, 'the dim that "data" shards'),
    "an axis without": ({"data": spmd.R, "model": spmd.R}, None, 'a kind for "seq"; got none'),
    "dims counted back": ({**KINDS, "data": spmd.S(-1)}, None, "must be counted from 0; got S(-1)"),
    "no order": ({**KINDS, "data": spmd.S(0), "seq": spmd.S(0)}, None, "must have an order"),
    "two kinds": ({**KINDS, GROUPS["data"]: spmd.P}, None, 'one kind for "data"; got R and P'),
    "R and sharded": (KINDS, (GROUPS["data"],), 'V for "data", which shards dim 0; got R'),
    "another group": ({**KINDS, spmd.MeshAxis.of(4, 3): spmd.R}, None, "must have axes of Mesh("),
}  # fmt: skip


@pytest.mark.parametrize(("kinds", "entries", "text"), WRONG.values(), ids=WRONG)
def test_type_without_a_layout_raises(kinds, entries, text):
    spmd_type = spmd.SpmdType(kinds, None if entries is None else spmd.PartitionSpec(*entries))
    with pytest.raises(LayoutError, match=re.escape(text)):
        fs.mesh.from_spmd_type(spmd_type, MESH)


def test_arguments_of_conversions_are_checked():
    layout = fs.Layout(MESH, P("data", "model"))
    with pytest.raises(LayoutError, match="ndim must be at least 2"):
        fs.mesh.to_spmd_type(layout, ndim=1)
    with pytest.raises(LayoutError, match=r'along which the tensor is replicated; got "data"'):
        fs.mesh.to_spmd_type(layout, ndim=2, invariant=("data", "seq"))
    with pytest.raises(MeshError, match='has no axis "tp"'):
        fs.mesh.to_spmd_type(layout, ndim=2, invariant="tp")
    with pytest.raises(MeshError, match='has no axis "tp"'):
        fs.mesh.from_spmd_type(spmd.SpmdType({**KINDS, "tp": spmd.R}), MESH)
    with pytest.raises(TypeError, match="layout must be a Layout; got P"):
        fs.mesh.to_spmd_type(P("data"), ndim=1)
    with pytest.raises(TypeError, match=r"must be a spmd_types.SpmdType; got dict"):
        fs.mesh.from_spmd_type(KINDS, MESH)
    with pytest.raises(TypeError, match="mesh must be a Mesh; got dict"):
        fs.mesh.from_spmd_type(spmd.SpmdType(KINDS), {"data": 2})


def unshard_by_their_collectives():
    """Unshard arrays by the collectives of spmd_types, which check the types of arguments."""
    import spmd_types.checker

    mesh = fs.make_mesh({"data": 2, "model": 2})
    device_mesh = fs.mesh.to_device_mesh(mesh)
    full = torch.arange(48.0).reshape(4, 6, 2)
    for spec in (P("data", "model"), P(("model", "data")), P(None, "data", unreduced="model"), P()):
        x = fs.device_put(full, fs.Layout(mesh, spec))
        local = x.local.clone()
        with spmd.set_current_mesh(device_mesh), spmd_types.checker.typecheck(local=False):
            y = spmd.assert_type(local, fs.mesh.to_spmd_type(x.layout, x.ndim))
            stored = spmd.SpmdType(spmd.get_local_type(y), spmd.get_partition_spec(y))
            assert fs.mesh.from_spmd_type(stored, mesh) == x.layout
            for dim, axes in enumerate(spec.dims(3)):
                for axis in reversed(axes):
                    y = spmd.all_gather(y, device_mesh.get_group(axis), src=spmd.S(dim), dst=spmd.R)
            for axis in spec.unreduced:
                y = spmd.all_reduce(y, device_mesh.get_group(axis), src=spmd.P, dst=spmd.R)
            spmd.assert_type(y, spmd.R)
        assert torch.equal(y, full)


@not_under_rules("spmd_types takes groups that are not written in Python")
def test_collectives_of_spmd_types_unshard_by_the_types(four):
    four.run(unshard_by_their_collectives)
