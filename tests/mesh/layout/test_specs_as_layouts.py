"""A P where a layout is wanted: on the mesh of `use_mesh`, or of the array; types of trees."""

import pytest
import torch

import fshard as fs
from fshard import P

MESH = fs.make_mesh({"data": 2, "model": 2})
X = torch.arange(16.0).reshape(4, 4)
CALLS = {
    "device_put": lambda spec: fs.device_put(X, spec),
    "device_put of a tree": lambda spec: fs.device_put({"w": X}, spec)["w"],
    "device_put by a tree": lambda spec: fs.device_put({"w": X}, {"w": spec})["w"],
    "from_local": lambda spec: fs.from_local(lambda data, model: X[2 * data : 2 * data + 2], spec),
    "zeros": lambda spec: fs.array.zeros(4, 4, layout=spec),
    "full": lambda spec: fs.array.full((4, 4), 1.5, layout=spec),
    "randn": lambda spec: fs.array.randn(4, 4, layout=spec),
}


@pytest.mark.parametrize("name", CALLS)
def test_spec_without_a_mesh_raises_naming_the_way_out(name):
    with pytest.raises(TypeError, match=r'Write fs\.Layout\(mesh, P\("data"\)\).*fs\.use_mesh'):
        CALLS[name](P("data"))


@pytest.mark.parametrize("name", CALLS)
def test_spec_is_a_layout_on_the_mesh_in_use(name):
    with fs.use_mesh(MESH):
        assert CALLS[name](P("data")).layout == fs.Layout(MESH, P("data"))


@pytest.mark.parametrize("move", [fs.device_put, fs.reshard])
def test_spec_for_an_array_is_a_layout_on_its_mesh(move):
    x = fs.device_put(X, fs.Layout(MESH, P("data")))
    tree = {"w": x, "b": [x, 3]}
    moved = move(tree, P(None, "model")) if move is fs.reshard else move({"w": x}, P(None, "model"))
    assert moved["w"].layout == fs.Layout(MESH, P(None, "model"))
    assert torch.equal(fs.unshard(moved["w"]), X)


def test_spec_of_a_picture_is_on_the_mesh_of_its_array(capsys):
    x = fs.device_put(X, fs.Layout(MESH, P("data")))
    fs.visualize(x, layout=P("model"))
    assert "f32[4@model, 4]" in capsys.readouterr().out


def test_typeof_of_a_tree_is_a_tree_of_types():
    x = fs.device_put(X, fs.Layout(MESH, P("data")))
    types = fs.typeof({"w": x, "more": [X, None, 3]})
    assert types == {"w": fs.typeof(x), "more": [fs.typeof(X), None, 3]}
    assert str(types) == "{'w': f32[4@data, 4], 'more': [f32[4, 4], None, 3]}"


@pytest.mark.parametrize("value", ["text", 3, None, {}, {"a": 3}])
def test_typeof_of_no_tensor_raises(value):
    with pytest.raises(TypeError, match="typeof: x must be a tensor or a tree of tensors"):
        fs.typeof(value)
