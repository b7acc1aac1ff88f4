"""Meshes and specs are values; what cannot be is an error that says everything at once."""

import importlib.metadata
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fshard as fs
from fshard import P
from fshard.errors import LayoutError
from fshard.mesh.layout import arithmetic
from fshard.mesh.layout.sharded import in_memory, stack, unstack
from fshard.testing import strategies


def test_mesh_compared_and_hashed_by_value():
    mesh = fs.make_mesh({"data": 4, "model": 2})
    assert mesh == fs.make_mesh([("data", 4), ("model", 2)])
    assert hash(mesh) == hash(fs.make_mesh({"data": 4, "model": 2}))
    assert mesh != fs.make_mesh({"model": 2, "data": 4})
    assert mesh != fs.make_mesh({"data": 4, "model": 2}, runtime="abstract")
    assert (mesh.size, mesh.axis_names, dict(mesh.shape)) == (8, ("data", "model"), {"data": 4, "model": 2})
    with pytest.raises(AttributeError):
        mesh.axes = ()
    with pytest.raises(TypeError):
        mesh.shape["data"] = 3


def test_mesh_indexed_by_axes_keeps_parent():
    mesh = fs.make_mesh({"pipe": 2, "data": 3, "model": 4})
    row = mesh["data"]
    assert (row.size, row.axis_names, dict(row.strides), row.root_size) == (3, ("data",), {"data": 4}, 24)
    plane = mesh["model", "pipe"]
    assert (plane.axis_names, dict(plane.strides)) == (("model", "pipe"), {"model": 1, "pipe": 12})
    assert plane["pipe"] == mesh["pipe"]
    assert str(row) == "Mesh(data=3 of pipe=2, data=3, model=4; virtual, cpu)"


def test_device_numbers_are_row_major():
    mesh = fs.make_mesh({"data": 2, "model": 3})
    assert [mesh.coordinates(device) for device in (0, 1, 3)] == [
        {"data": 0, "model": 0},
        {"data": 0, "model": 1},
        {"data": 1, "model": 0},
    ]
    assert all(mesh.index(mesh.coordinates(device)) == device for device in range(6))


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        ({"data": 0}, "axis 'data' has size 0: a size must be an integer >= 1"),
        (
            {"data": -2, "model": 2.0},
            "axis 'data' has size -2: a size must be an integer >= 1; axis 'model' has size 2.0",
        ),
        ([("data", 2), ("data", 4)], 'axis "data" is named more than once'),
        ({}, "it has no axis"),
        ({"": 2}, "axis name '' is not a name like \"data\""),
        ({"data": True}, "axis 'data' has size True"),
        (["a", "b"], "make_mesh: axes must be names with sizes, {\"data\": 4, \"model\": 2}; got ['a', 'b']."),
        (["ab", "cd"], "got ['ab', 'cd']."),
        (5, 'make_mesh: axes must be names with sizes, {"data": 4, "model": 2}; got 5.'),
    ],
)
def test_make_mesh_invalid_axes_raise(axes, text):
    with pytest.raises(fs.errors.MeshError) as error:
        fs.make_mesh(axes)
    assert text in str(error.value)


def test_make_mesh_sizes_and_names_as_in_jax():
    assert fs.make_mesh((4, 2), ("data", "model")) == fs.make_mesh({"data": 4, "model": 2})
    assert fs.make_mesh([2], names=["data"], runtime="abstract").shape == {"data": 2}
    for axes, names in (((4, 2), ("data",)), ({"data": 4}, ("data",)), (4, "d"), ((4,), 5)):
        with pytest.raises(fs.errors.MeshError, match=r"with names, axes must be as many sizes; got axes=.*names="):
            fs.make_mesh(axes, names)


def test_mesh_unknown_axis_error_names_axes():
    mesh = fs.make_mesh({"data": 4})
    with pytest.raises(fs.errors.MeshError, match=r'has no axis "model", "x"\. Its axes are "data"'):
        mesh["model", "x"]
    with pytest.raises(fs.errors.MeshError, match='has no axis "model"'):
        fs.Layout(mesh, P("model"))


def test_process_mesh_without_launcher_raises(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(fs.errors.MeshError, match="missing: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"):
        fs.make_mesh({"data": 2}, runtime="process")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(fs.errors.MeshError, match="missing: MASTER_ADDR, MASTER_PORT"):
        fs.make_mesh({"data": 2})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"runtime": "imaginary"}, '"imaginary" is none of "virtual", "process", "abstract"'),
        ({"runtime": "abstract", "device": "cuda"}, "an abstract mesh has no device"),
        ({"device": "tpu"}, "device='tpu' is neither"),
        ({"timeout": 3.0}, "timeout=3.0 has no meaning"),
    ],
)
def test_make_mesh_invalid_runtime_or_device_raises(arguments, text):
    with pytest.raises(fs.errors.MeshError) as error:
        fs.make_mesh({"data": 2}, **arguments)
    assert text in str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_make_mesh_cuda_without_gpu_raises():
    with pytest.raises(fs.errors.MeshError, match="torch sees none"):
        fs.make_mesh({"data": 2}, device="cuda")


def test_spec_is_hashable_leaf():
    assert P("data", None) == P("data") == P(("data",)) == P("data", ())
    assert P("data") != P(None, "data")
    assert P(unreduced=("b", "a")) == P(unreduced=("a", "b"))
    assert not isinstance(P("data"), tuple)
    assert repr(P(("a", "b"), None, "c", unreduced="d")) == 'P(("a", "b"), None, "c", unreduced="d")'
    assert repr(P.flat("a", "b", shape=(3, 5))) == 'P.flat("a", "b", shape=(3, 5))'
    assert P(("a", "b"), None, "c").dims(4) == (("a", "b"), (), ("c",), ())


@pytest.mark.parametrize(
    "make", [lambda: P("a", "a"), lambda: P(("a", "b"), "b"), lambda: P("a", unreduced="a"), lambda: P.flat("a", "a")]
)
def test_spec_repeated_axis_raises(make):
    with pytest.raises(fs.errors.LayoutError, match="names an axis more than once: [ab]"):
        make()


@pytest.mark.parametrize("make", [lambda: P(3), lambda: P(("a", 1)), lambda: P.flat()])
def test_spec_invalid_entries_raise(make):
    with pytest.raises((TypeError, ValueError), match=r"An entry of P|names no axis"):
        make()


@pytest.mark.parametrize(
    ("spec", "memory", "token"),
    [
        (P("data", "model"), "device", "f32[8@data, 6@model]"),
        (P("data"), "device", "f32[8@data, 6]"),
        (P(("data", "model")), "device", "f32[8@data+model, 6]"),
        (P(None, unreduced="model"), "device", "f32[8, 6]{U:model}"),
        (P.flat("data", unreduced="model"), "host", "f32[8, 6]{flat:data, U:model, host}"),
    ],
)
def test_typeof_prints_one_token(spec, memory, token):
    mesh = fs.make_mesh({"data": 4, "model": 2})
    assert str(fs.typeof(fs.device_put(torch.zeros(8, 6), fs.Layout(mesh, spec, memory)))) == token


def test_typeof_plain_tensor_and_invalid_value():
    assert str(fs.typeof(torch.zeros(2, dtype=torch.bfloat16))) == "bf16[2]"
    with pytest.raises(TypeError, match="must be a Sharded or a dense tensor; got int"):
        fs.typeof(3)


# -- shard arithmetic ---------------------------------------------------------------------------------------------

sizes = st.dictionaries(st.sampled_from("abc"), st.integers(1, 4), min_size=1)


@given(sizes, st.integers(0, 1000))
def test_ravel_is_inverse_of_unravel(axes, seed):
    lengths = list(axes.values())
    total = torch.tensor(lengths).prod().item()
    assert arithmetic.ravel(arithmetic.unravel(seed % total, lengths), lengths) == seed % total


@given(st.integers(0, 40), st.integers(1, 9))
def test_flat_ranges_cover_every_element_in_order(total, parts):
    ranges = [arithmetic.flat_range(total, parts, index) for index in range(parts)]
    assert [element for start, stop in ranges for element in range(start, stop)] == list(range(total))
    lengths = [stop - start for start, stop in ranges]
    assert lengths == sorted(lengths, reverse=True)


@given(st.permutations(["a", "b", "c"]), st.integers(0, 2), st.integers(1, 3))
def test_spec_blocks_cover_every_element_once(order, first, times):
    axes = {"a": 2, "b": 3, "c": 2}
    dims = (tuple(order[:first]), tuple(order[first:]))
    shape = tuple(times * torch.tensor([axes[axis] for axis in names] or [1]).prod().item() for names in dims)
    covered = torch.zeros(shape)
    for device in range(12):
        coordinates = dict(zip(axes, arithmetic.unravel(device, list(axes.values())), strict=True))
        covered[tuple(slice(*side) for side in P(*dims).block(shape, axes, coordinates))] += 1
    assert (covered == 1).all()


def test_make_mesh_accepts_numpy_sizes_and_torch_device():
    mesh = fs.make_mesh({"data": 2, "model": 3})
    assert fs.make_mesh({"data": np.int64(2), "model": np.uint8(3)}, device=torch.device("cpu")) == mesh
    assert str(fs.make_mesh({"data": np.int64(2)})) == "Mesh(data=2; virtual, cpu)"
    with pytest.raises(fs.errors.MeshError, match="axis 'data' has size True"):
        fs.make_mesh({"data": True})


def test_mesh_indexed_by_all_axes_is_itself():
    mesh = fs.make_mesh({"data": 2, "model": 3})
    assert mesh["data", "model"] is mesh and mesh["model", "data"] != mesh and mesh["data"]["data"] == mesh["data"]


def test_spec_at_boolean_raises():
    with pytest.raises(ValueError, match="True"):
        P(at={"data": True})


def test_meta_tensor_on_mesh_with_values_raises():
    mesh, x = fs.make_mesh({"data": 2}), torch.empty(4, device="meta")
    for lay in (
        lambda: fs.device_put(x, fs.Layout(mesh, P("data"))),
        lambda: fs.from_local(lambda data: x, fs.Layout(mesh, P("data"))),
        lambda: fs.shard_map(lambda x: x, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x),
    ):
        with pytest.raises(fs.errors.LayoutError, match=r"a meta tensor \(shape \(4,\)\) has no values to lay on Mesh"):
            lay()


def test_visualize_bare_layout_raises():
    with pytest.raises(
        TypeError, match=r"got Layout. Give the tensor or shape: fs.visualize\(\(8, 6\), layout=layout\)"
    ):
        fs.visualize(fs.Layout(fs.make_mesh({"data": 2}), P("data")))


def test_version_matches_package_metadata():
    assert fs.__version__ == importlib.metadata.version("fshard")
    assert fs.testing.strategies.meshes and fs.testing.oracles.ORACLES


def test_in_memory_tensor_of_another_gpu_moves_to_this_process():
    """`to("cuda")` moves to the process's GPU and compares the index: a tensor of cuda:0 may not stay there on rank 3."""
    x = SimpleNamespace(device=torch.device("cuda", 0), is_meta=False, to=lambda target: ("moved", target))
    assert in_memory(x, SimpleNamespace(device_type="cuda"), "device") == ("moved", "cuda")


@given(st.data())
def test_stacked_summands_have_the_arrays_memory_and_its_total(data):
    mesh = data.draw(strategies.meshes())
    shape = data.draw(strategies.shapes_for(mesh))
    layout = data.draw(strategies.layouts(mesh, shape).filter(lambda layout: layout.spec.unreduced))
    x, axes = fs.device_put(data.draw(strategies.dyadic(shape, torch.float32)), layout), layout.spec.unreduced
    stacked = stack(x, axes)
    stacked.check()
    assert torch.equal(fs.unshard(stacked).sum(0), fs.unshard(x))
    varying = unstack(stacked, axes)
    assert varying.spec == layout.spec.replace(unreduced=None) and varying.shape == shape
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(varying.shards, x.shards, strict=True))
    with pytest.raises(LayoutError, match="must have a first dim"):
        unstack(varying, axes)
