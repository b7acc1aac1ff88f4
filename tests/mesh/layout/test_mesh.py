"""Meshes, specs and layouts are values; wrong ones raise one error that names all mistakes.

Shard arithmetic is compared with enumerations of all elements.
"""

import importlib.metadata
import io
import pickle
import re
from math import prod
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

MESH = fs.make_mesh({"data": 4, "model": 2})
LINE = fs.make_mesh({"data": 2})
META = torch.empty(4, device="meta")


def test_mesh_compared_and_hashed_by_value():
    of_numpy_sizes = {"data": np.int64(4), "model": np.uint8(2)}
    equal = [
        fs.make_mesh(of_numpy_sizes, device=torch.device("cpu")),
        fs.make_mesh([("data", 4), ("model", 2)]),
        fs.make_mesh((4, 2), ("data", "model")),
        MESH["data", "model"],
    ]
    unequal = [
        fs.make_mesh({"model": 2, "data": 4}),
        fs.make_mesh({"data": 4, "model": 2}, runtime="abstract"),
        MESH["model", "data"],
    ]
    for mesh in equal:
        assert mesh == MESH
        assert hash(mesh) == hash(MESH)
    for mesh in unequal:
        assert mesh != MESH

    assert MESH.size == 8
    assert MESH.axis_names == ("data", "model")
    assert dict(MESH.shape) == {"data": 4, "model": 2}
    assert fs.make_mesh([2], names=["data"], runtime="abstract").shape == {"data": 2}
    assert str(fs.make_mesh({"data": np.int64(2)})) == "Mesh(data=2; virtual, cpu)"
    assert MESH["data", "model"] is MESH
    assert MESH["data"]["data"] == MESH["data"]

    with pytest.raises(AttributeError):
        MESH.axes = ()
    with pytest.raises(TypeError):
        MESH.shape["data"] = 3


def test_mesh_indexed_by_axes_keeps_parent():
    mesh = fs.make_mesh({"pipe": 2, "data": 3, "model": 4})

    row = mesh["data"]
    assert row.size == 3
    assert row.axis_names == ("data",)
    assert dict(row.strides) == {"data": 4}
    assert row.root_size == 24
    assert str(row) == "Mesh(data=3 of pipe=2, data=3, model=4; virtual, cpu)"

    plane = mesh["model", "pipe"]
    assert plane.axis_names == ("model", "pipe")
    assert dict(plane.strides) == {"model": 1, "pipe": 12}
    assert plane["pipe"] == mesh["pipe"]


def test_device_numbers_are_row_major():
    expected = []
    for data in range(4):
        expected += [{"data": data, "model": 0}, {"data": data, "model": 1}]

    coordinates = [MESH.coordinates(device) for device in range(8)]

    assert coordinates == expected
    assert [*map(MESH.index, coordinates)] == [*range(8)]


def test_spec_is_hashable_leaf():
    assert P("data", None) == P("data") == P(("data",)) == P("data", ())
    assert P("data") != P(None, "data")
    assert P(unreduced=("b", "a")) == P(unreduced=("a", "b"))
    assert not isinstance(P("data"), tuple)
    assert P(("a", "b"), None, "c").dims(4) == (("a", "b"), (), ("c",), ())

    text = 'P(("a", "b"), None, "c", unreduced="d")'
    assert repr(P(("a", "b"), None, "c", unreduced="d")) == text
    assert repr(P.flat("a", "b", shape=(3, 5))) == 'P.flat("a", "b", shape=(3, 5))'


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
    array = fs.device_put(torch.zeros(8, 6), fs.Layout(MESH, spec, memory))

    assert str(fs.typeof(array)) == token
    assert str(fs.typeof(torch.zeros(2, dtype=torch.bfloat16))) == "bf16[2]"


NAMED = "with names, axes must be as many sizes; got axes="
NO_VALUES = "a meta tensor (shape (4,)) has no values to lay on Mesh"
LIST = 'make_mesh: axes must be names with sizes, {"data": 4, "model": 2}; got'
TWICE = "names an axis more than once: "
# A row is a call, the type of the error, and texts that it contains.
MESHES = [
    (
        lambda: fs.make_mesh({"data": 0}),
        "MeshError",
        "axis 'data' has size 0: a size must be an integer >= 1",
    ),
    (
        lambda: fs.make_mesh({"data": -2, "model": 2.0}),
        "MeshError",
        "'data' has size -2: ",
        "'model' has size 2.0",
    ),
    (lambda: fs.make_mesh({"data": True}), "MeshError", "axis 'data' has size True"),
    (
        lambda: fs.make_mesh([("data", 2), ("data", 4)]),
        "MeshError",
        'axis "data" is named more than once',
    ),
    (
        lambda: fs.make_mesh((2, 4), ("data", "data")),
        "MeshError",
        'axis "data" is named more than once',
    ),
    (lambda: fs.make_mesh({}), "MeshError", "it has no axis"),
    (lambda: fs.make_mesh({"": 2}), "MeshError", "axis name '' is not a name like"),
    (lambda: fs.make_mesh(["a", "b"]), "MeshError", f"{LIST} ['a', 'b']."),
    (lambda: fs.make_mesh(["ab", "cd"]), "MeshError", "got ['ab', 'cd']."),
    (lambda: fs.make_mesh(5), "MeshError", f"{LIST} 5."),
    (lambda: fs.make_mesh((4, 2), ("data",)), "MeshError", NAMED, "names="),
    (lambda: fs.make_mesh({"data": 4}, ("data",)), "MeshError", NAMED),
    (lambda: fs.make_mesh(4, "d"), "MeshError", NAMED),
    (lambda: fs.make_mesh((4,), 5), "MeshError", NAMED),
    (
        lambda: fs.make_mesh({"a": 2}, runtime="imaginary"),
        "MeshError",
        '"imaginary" is none of "virtual", "process"',
    ),
    (
        lambda: fs.make_mesh({"a": 2}, runtime="abstract", device="cuda"),
        "MeshError",
        "an abstract mesh has no device",
    ),
    (lambda: fs.make_mesh({"a": 2}, device="tpu"), "MeshError", "device='tpu' is neither"),
    (lambda: fs.make_mesh({"a": 2}, timeout=3.0), "MeshError", "timeout=3.0 has no meaning"),
    (
        lambda: fs.make_mesh({"data": 4})["model", "x"],
        "MeshError",
        'has no axis "model", "x". Its axes are "data"',
    ),
    (lambda: fs.Layout(LINE, P("model")), "MeshError", 'has no axis "model"'),
]

SPECS = [
    (lambda: P("a", "a"), "LayoutError", f"{TWICE}a"),
    (lambda: P(("a", "b"), "b"), "LayoutError", f"{TWICE}b"),
    (lambda: P("a", unreduced="a"), "LayoutError", f"{TWICE}a"),
    (lambda: P.flat("a", "a"), "LayoutError", f"{TWICE}a"),
    (lambda: P(3), "TypeError", "An entry of P"),
    (lambda: P(("a", 1)), "TypeError", "An entry of P"),
    (lambda: P("a", (2,)), "TypeError", "An entry of P"),
    (lambda: P(unreduced=3), "TypeError", ""),
    (lambda: P.flat(1), "TypeError", ""),
    (lambda: P.flat(("data",)), "TypeError", "Write P.flat(*axes)"),
    (lambda: P.flat(), "ValueError", "names no axis"),
    (lambda: P.flat("data", shape=4), "TypeError", "shape must be a tuple of integers; got 4."),
    (
        lambda: P(at={"data": 0}, shape=("four",)),
        "TypeError",
        "shape must be a tuple of integers; got ('four',).",
    ),
    (lambda: P(at={"data": True}), "ValueError", "True"),
]

ARRAYS = [
    (lambda: fs.typeof(3), "TypeError", "must be a tensor or a tree of tensors; got int"),
    (
        lambda: fs.visualize(fs.Layout(LINE, P())),
        "TypeError",
        "got Layout. Give the tensor or shape: fs.visualize((8, 6)",
    ),
    (lambda: fs.device_put(META, fs.Layout(LINE, P("data"))), "LayoutError", NO_VALUES),
    (
        lambda: fs.from_local(lambda data: META, fs.Layout(LINE, P("data"))),
        "LayoutError",
        NO_VALUES,
    ),
    (
        lambda: fs.shard_map(abs, mesh=LINE, in_specs=P("data"), out_specs=P("data"))(META),
        "LayoutError",
        NO_VALUES,
    ),
]
WRONG = [*MESHES, *SPECS, *ARRAYS]
if not torch.cuda.is_available():
    WRONG.append((lambda: fs.make_mesh({"data": 2}, device="cuda"), "MeshError", "torch sees none"))


@pytest.mark.parametrize(
    ("call", "error", "texts"), [(call, error, texts) for call, error, *texts in WRONG]
)
def test_what_cannot_be_raises(call, error, texts):
    with pytest.raises((fs.errors.FshardError, TypeError, ValueError)) as raised:
        call()

    assert type(raised.value).__name__ == error
    assert all(text in str(raised.value) for text in texts), raised.value


def test_version_matches_package_metadata():
    assert fs.__version__ == importlib.metadata.version("fshard")
    assert fs.testing.strategies.meshes and fs.testing.oracles.ORACLES


# -- shard arithmetic ------------------------------------------------------------------------------

sizes = st.dictionaries(st.sampled_from("abc"), st.integers(1, 4), min_size=1)


@given(sizes, st.integers(0, 1000))
def test_ravel_is_inverse_of_unravel(axes, number):
    lengths = list(axes.values())
    index = number % prod(lengths)

    coordinates = arithmetic.unravel(index, lengths)

    assert arithmetic.ravel(coordinates, lengths) == index


@given(st.integers(0, 40), st.integers(1, 9))
def test_flat_ranges_cover_every_element_in_order(total, parts):
    ranges = [arithmetic.flat_range(total, parts, index) for index in range(parts)]

    covered = []
    for start, stop in ranges:
        covered += range(start, stop)
    assert covered == list(range(total))
    lengths = [stop - start for start, stop in ranges]
    assert lengths == sorted(lengths, reverse=True)


@given(st.permutations(["a", "b", "c"]), st.integers(0, 2), st.integers(1, 3))
def test_spec_blocks_cover_every_element_once(order, first, times):
    axes = {"a": 2, "b": 3, "c": 2}
    dims = (tuple(order[:first]), tuple(order[first:]))
    shape = tuple(times * prod(axes[axis] for axis in names) for names in dims)
    spec = P(*dims)

    covered = torch.zeros(shape)
    for device in range(12):
        indices = arithmetic.unravel(device, list(axes.values()))
        coordinates = dict(zip(axes, indices, strict=True))
        block = spec.block(shape, axes, coordinates)
        covered[tuple(slice(*bounds) for bounds in block)] += 1

    assert (covered == 1).all()


# -- arrays ----------------------------------------------------------------------------------------


def test_in_memory_tensor_of_another_gpu_moves_to_this_process():
    """`to("cuda")` moves to the process's GPU and compares the index.

    A tensor of cuda:0 may not stay on rank 3.
    """
    of_first_gpu = SimpleNamespace(
        device=torch.device("cuda", 0), is_meta=False, to=lambda target: ("moved", target)
    )
    mesh = SimpleNamespace(device_type="cuda")

    assert in_memory(of_first_gpu, mesh, "device") == ("moved", "cuda")


@given(st.data())
def test_stacked_summands_have_the_arrays_memory_and_its_total(data):
    mesh = data.draw(strategies.meshes())
    shape = data.draw(strategies.shapes_for(mesh))
    unreduced = strategies.layouts(mesh, shape).filter(lambda layout: layout.spec.unreduced)
    layout = data.draw(unreduced)
    x = fs.device_put(data.draw(strategies.dyadic(shape, torch.float32)), layout)
    axes = layout.spec.unreduced

    stacked = stack(x, axes)
    stacked.check()
    assert torch.equal(fs.unshard(stacked).sum(0), fs.unshard(x))

    varying = unstack(stacked, axes)
    assert varying.spec == layout.spec.replace(unreduced=None)
    assert varying.shape == shape
    for shard, original in zip(varying.shards, x.shards, strict=True):
        assert shard.data_ptr() == original.data_ptr()
    with pytest.raises(LayoutError, match="must have a first dim"):
        unstack(varying, axes)


@pytest.mark.parametrize(
    "spec",
    [P("data"), P.flat("data", "model"), P(at={("data", "model"): 1}), P(None, unreduced="model")],
    ids=str,
)
def test_sharded_saved_and_loaded_is_equal(spec):
    assert fs.Sharded not in torch.serialization.get_safe_globals()  # importing registers none
    x = fs.device_put(torch.arange(4.0), fs.Layout(MESH, spec, unit="block", frozen=True))

    file = io.BytesIO()
    torch.save({"x": x, "step": 3}, file)
    file.seek(0)
    with torch.serialization.safe_globals(fs.mesh.SAFE_GLOBALS):
        loaded = torch.load(file, weights_only=True)["x"]
    unpickled = pickle.loads(pickle.dumps(x))

    for y in (loaded, unpickled):
        assert y.layout == x.layout
        assert hash(y.layout) == hash(x.layout)
        assert y.shape == x.shape
        assert all(map(torch.equal, y.shards, x.shards))
        assert torch.equal(fs.unshard(y), torch.arange(4.0))


# -- a size of -1 ----------------------------------------------------------------------------------


def test_size_minus_one_is_the_rest_of_the_devices_of_a_run():
    def sizes():
        return dict(fs.make_mesh({"data": -1, "model": 2}).shape)

    assert fs.run(sizes, mesh=fs.make_mesh({"all": 6})) == [{"data": 3, "model": 2}] * 6


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        ({"data": -1}, "process_count(default=8)"),
        ({"data": -1, "model": -1}, "one size at most may be -1"),
        ({"data": -2}, "size -2"),
    ],
)
def test_size_minus_one_without_processes_names_the_way_out(axes, text):
    with pytest.raises(fs.errors.MeshError, match=re.escape(text)):
        fs.make_mesh(axes)


def test_size_minus_one_that_does_not_divide_raises():
    with pytest.raises(fs.errors.MeshError, match="must divide the number of devices, 6"):
        fs.run(lambda: fs.make_mesh({"data": -1, "model": 4}), mesh=fs.make_mesh({"all": 6}))
