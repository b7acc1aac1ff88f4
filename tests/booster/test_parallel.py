"""The parallel configuration: samples of Colossal-AI's page, sizes, and errors that name the nearest legal ones."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fshard as fs
from fshard.booster.hybrid import model_axes

OK = {
    "both dicts": ({"pipeline": {"size": 2}, "tensor": {"size": 4, "mode": "2d"}}, (2, 4, "2d", 1)),
    "pipeline is a number": ({"pipeline": 2, "tensor": {"size": 4, "mode": "2d"}}, (2, 4, "2d", 1)),
    "pipeline alone": ({"pipeline": 2}, (2, 1, "1d", 1)),
    "tensor alone": ({"tensor": {"size": 4, "mode": "2d"}}, (1, 4, "2d", 1)),
    "nothing": ({}, (1, 1, "1d", 1)),
    "1d": ({"tensor": {"size": 4, "mode": "1d"}}, (1, 4, "1d", 1)),
    "2.5d": ({"tensor": {"size": 8, "mode": "2.5d", "depth": 2}}, (1, 8, "2.5d", 1)),
    "3d": ({"tensor": {"size": 8, "mode": "3d"}}, (1, 8, "3d", 1)),
    "pipeline of 4": ({"pipeline": {"size": 4}}, (4, 1, "1d", 1)),
    "sequence": ({"tensor": {"size": 4, "mode": "sequence"}}, (1, 1, "1d", 4)),
    "named": ({"parallel": {"pipeline": 2, "tensor": 1}}, (2, 1, "1d", 1)),
}


def sizes(plugin):
    return plugin.pipeline, plugin.tensor, plugin.tensor_mode, plugin.sequence


@pytest.mark.parametrize("name", OK)
def test_samples_of_the_page(name):
    config, wanted = OK[name]
    plugin = fs.parallel(config, zero_stage=1, microbatches=4)
    assert (sizes(plugin), plugin.zero_stage) == (wanted, 1)
    assert plugin.sequence_mode == ("rsa" if plugin.sequence > 1 else "gather")


WRONG = {
    "no mode": (
        {"pipeline": 2, "tensor": 4},
        r"tensor must have a mode: write tensor=dict\(size=4, mode=...\), with one of .*'2.5d', '3d', 'sequence'",
    ),
    "no mode in a dict": ({"tensor": {"size": 2}}, "must have a mode: write .*size=2, mode="),
    "no size": ({"tensor": {"mode": "2d"}}, "tensor must be an integer >= 1, got None"),
    "square": ({"tensor": {"size": 8, "mode": "2d"}}, "a square .*, got 8: the nearest are 4 and 9"),
    "cube": ({"tensor": {"size": 4, "mode": "3d"}}, "a cube .*, got 4: the nearest are 1 and 8"),
    "depth": ({"tensor": {"size": 9, "mode": "2.5d", "depth": 2}}, "tensor_depth=2 times a square .* 8 and 18"),
    "depth of another": ({"tensor": {"size": 4, "mode": "2d", "depth": 2}}, "tensor_depth=2 has no meaning"),
    "depth of a sequence": (
        {"tensor": {"size": 4, "mode": "sequence", "depth": 2}},
        "tensor_depth=2 has no meaning for",
    ),
    "mode": ({"tensor": {"size": 4, "mode": "4d"}}, "the mode of tensor must be '1d', .* or 'sequence', got '4d'"),
    "no microbatches": ({"pipeline": 2}, "microbatches must be an integer >= 1, got None"),
    "no table": ({"parallel": 2}, "must be a dict of data, experts, pipeline and tensor, got 2"),
    "many": (
        {"pipe": 2, "data": 0, "pipeline": {"size": "2", "n": 1}, "tensor": {"size": 6, "mode": "2d", "rows": 2}},
        "^parallel: tensor has no 'rows'; .*; parallel has no 'pipe'; .*; pipeline has no 'n'; .*"
        "data must be an integer >= 1, got 0; pipeline must be .* got '2'",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_configurations(name):
    config, text = WRONG[name]
    with pytest.raises(ValueError, match=text):
        fs.parallel(config)


@pytest.mark.parametrize("head", ["", "[parallel]\n"], ids=["top", "named"])
def test_toml(tmp_path, head):
    path, under = tmp_path / "config.toml", "parallel." if head else ""
    path.write_text(
        f'{head}data = 1\npipeline = 2\n[{under}tensor]\nsize = 8\nmode = "2.5d"\ndepth = 2\n', encoding="utf-8"
    )
    for given_path in (path, str(path)):
        plugin = fs.parallel(given_path, microbatches=2)
        assert (sizes(plugin), plugin.tensor_depth, plugin.data) == ((2, 8, "2.5d", 1), 2, 1)


def test_python_file_raises_and_names_the_dict(tmp_path):
    with pytest.raises(ValueError, match=r"must be a dict or a TOML file; got .*config.py.*Use fs.parallel\(dict\("):
        fs.parallel(tmp_path / "config.py")


def test_data_is_inferred_from_the_devices():
    def mesh_of(config):
        return fs.run(lambda: fs.parallel(config, microbatches=4).default_mesh(), mesh=fs.make_mesh({"all": 16}))[0]

    found = mesh_of({"pipeline": 2, "tensor": {"size": 4, "mode": "2d"}})
    assert [*found.shape.items()] == [("pipe", 2), ("data", 2), ("model_i", 2), ("model_j", 2)]
    assert [*mesh_of({"tensor": {"size": 4, "mode": "sequence"}}).shape.items()] == [
        ("pipe", 1),
        ("data", 4),
        ("seq", 4),
        ("model", 1),
    ]
    with pytest.raises(
        ValueError, match=r"data \* .* must be the number of devices, 16; got 3 \* 2 \* 1 \* 1 \* 1 = 6"
    ):
        mesh_of({"data": 3, "pipeline": 2})
    with pytest.raises(ValueError, match=r"must be the number of devices, 16; got 1 \* 1 \* 1 \* 1 \* 9 = 9"):
        mesh_of({"tensor": {"size": 9, "mode": "2d"}})
    fs.parallel({"data": 3})  # the devices are not known yet


@given(size=st.integers(1, 200), mode=st.sampled_from(["1d", "2d", "2.5d", "3d"]), depth=st.integers(1, 5))
def test_sizes_are_legal_or_between_the_nearest(size, mode, depth):
    depth = depth if mode == "2.5d" else 1
    power = {"1d": 1, "2d": 2, "2.5d": 2, "3d": 3}[mode]
    legal = [depth * q**power for q in range(1, 201)]
    if size in legal:
        axes = model_axes(size, mode, depth)
        assert prod(axes.values()) == size
        assert len({*axes.values()} - {depth}) <= 1
        return
    nearest = [max((n for n in legal if n < size), default=legal[0]), min(n for n in legal if n > size)]
    second = legal[1] if size < legal[0] else nearest[1]
    with pytest.raises(ValueError, match=f"got {size}: the nearest are {nearest[0]} and {second}"):
        model_axes(size, mode, depth)
