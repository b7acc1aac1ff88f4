"""Names of leaves: unique, without stage numbers, and what ties, empty containers and keys become."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fshard as fs
from fshard import P
from fshard.checkpoint.names import leaves_of


class Moments(NamedTuple):
    exp_avg: object
    step: object


@dataclass
class Record:
    weight: object


def names(tree):
    return [leaf.name for leaf in leaves_of(tree)]


def test_names_are_keys_fields_and_positions():
    x = torch.ones(2)
    tree = {
        "state": Moments({"blocks.3.w": x}, 5),
        "list": [x, (x,)],
        "record": Record(x),
        7: {None: x},
    }
    assert sorted(names(tree)) == [
        "7.None",
        "list.0",
        "list.1.0",
        "record.weight",
        "state.exp_avg.blocks.3.w",
        "state.step",
    ]


# -- trees -----------------------------------------------------------------------------------------

keys = (
    st.sampled_from(["a", "b", "a.b", "0", "x y", "ü", "../c", ""])
    | st.integers(-1, 2)
    | st.sampled_from([None, 1.5])
)
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3)
arrays = st.builds(lambda n: torch.arange(n), st.integers(0, 3))
trees = st.recursive(
    plain | arrays,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=6,
)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return (
            isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
        )
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def merged(tree):
    """A tree without stage numbers."""
    if isinstance(tree, dict):
        return {key: merged(x) for key, x in tree.items()}
    if not isinstance(tree, list):
        return tree
    every = [key for x in tree if isinstance(x, dict) for key in x]
    stages = all(isinstance(x, dict) for x in tree) and all(isinstance(key, str) for key in every)
    if stages and any("." in key for key in every) and len({*every}) == len(every):
        return {key: merged(x) for stage in tree for key, x in stage.items()}
    return [merged(x) for x in tree]


@given(trees)
@settings(max_examples=100)
def test_tree_is_restored_or_refused(tmp_path_factory, tree):
    folder = tmp_path_factory.mktemp("a")
    leaf_names = names(tree)
    try:
        fs.save(folder, tree)
    except fs.errors.CheckpointError:
        assert len({*leaf_names}) < len(leaf_names)
        return
    assert same(fs.restore(folder), merged(tree))
    assert same(fs.restore(folder, tree), tree)


def test_keys_that_are_no_json_are_all_named(tmp_path):
    with pytest.raises(
        fs.errors.CheckpointError, match=r"the key <object(?s:.)*the key \(1, 2\), which must be"
    ):
        fs.save(tmp_path, {(1, 2): torch.ones(1), "a": {object(): 1}})


def test_repeated_names_are_all_named(tmp_path):
    tree = {"a.b": 1, "a": {"b": 2}, "c": {1: 3, "1": 4}}
    with pytest.raises(fs.errors.CheckpointError, match=r"several called a\.b, c\.1\."):
        fs.save(tmp_path, tree)


def test_dicts_of_equal_keys_are_no_stages(tmp_path):
    tree = [{"a.b": torch.zeros(2)}, {"a.b": torch.ones(2)}]
    fs.save(tmp_path, tree)
    assert same(fs.restore(tmp_path), tree)


# -- stages ----------------------------------------------------------------------------------------


def test_tied_arrays_of_stages_are_restored_tied(tmp_path):
    x = fs.device_put(
        torch.arange(20.0).view(5, 4), fs.Layout(fs.make_mesh({"data": 2}), P.flat("data"))
    )
    fs.save(tmp_path, {"params": [{"0.weight": x}, {"1.bias": x.clone(), "5.weight": x}]})
    rules = {"target": fs.fsdp("data"), "mesh": fs.make_mesh({"data": 2}), "only": "params"}
    for params in (fs.restore(tmp_path)["params"], fs.restore(tmp_path, **rules)):
        assert params["0.weight"] is params["5.weight"] is not params["1.bias"]
    into = {"5.weight": torch.zeros(5, 4)}
    restored = fs.restore(tmp_path, into, only=["params.5.weight"], rename=lambda name: name[7:])
    assert torch.equal(restored["5.weight"], fs.unshard(x))


def test_stages_without_parameters_are_restored(tmp_path):
    schedule = fs.pipeline_schedule("1f1b", stages=2, microbatches=2)
    mesh = fs.make_mesh({"pipe": 2})
    parts = fs.pipeline.split_stages(
        nn.Sequential(nn.Linear(2, 3), nn.GELU(), nn.GELU(), nn.GELU()), 2, "uniform"
    )
    params = fs.shard_stages(parts, mesh=mesh, schedule=schedule)
    assert params[1] == {}
    fs.save(tmp_path, params)
    assert (
        names(fs.restore(tmp_path, params)) == names(fs.restore(tmp_path)) == ["0.bias", "0.weight"]
    )


def test_nones_are_neither_missing_nor_unexpected(tmp_path):
    fs.save(tmp_path, {"a": torch.ones(1), "b": None})
    assert fs.restore(tmp_path, {"a": torch.zeros(1), "c": None}) == {"a": torch.ones(1), "c": None}
    with pytest.raises(fs.errors.CheckpointError, match="missing in the checkpoint: c"):
        fs.restore(tmp_path, {"a": torch.zeros(1), "c": 5})
