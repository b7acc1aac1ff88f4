"""Names of leaves: unique, without stage numbers, and what ties, empty containers and keys become.

Of trees that are saved one after the other, and differ in one respect each, the oracle is what a
program writes that has saved nothing before.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fshard as fs
from fshard import P
from fshard.checkpoint import form
from fshard.checkpoint.names import leaves_of
from fshard.checkpoint.snapshot import snapshot_of
from fshard.errors import FshardError


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


# -- trees that are saved one after the other ------------------------------------------------------

MESH = fs.make_mesh({"data": 2})
X = torch.arange(8.0)


ROWS = P("data")


def sharded(x=X, spec=ROWS, on=MESH):
    return fs.device_put(x, fs.Layout(on, spec))


class Counted:
    """An object with a state."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class Pair(NamedTuple):
    """A node with names."""

    a: object
    b: object


def tied(x):
    return {"a": x, "b": x}


TREES = {
    "floats": lambda: {"x": sharded(), "n": 1},
    "other value": lambda: {"x": sharded(X + 1), "n": 2},
    "boolean": lambda: {"x": sharded(), "n": True},
    "text": lambda: {"x": sharded(), "n": "a"},
    "none": lambda: {"x": sharded(), "n": None},
    "integers": lambda: {"x": sharded(X.long()), "n": 1},
    "halves": lambda: {"x": sharded(X.half()), "n": 1},
    "other shape": lambda: {"x": sharded(X.reshape(4, 2)), "n": 1},
    "flat": lambda: {"x": sharded(X.reshape(4, 2), P.flat("data")), "n": 1},
    "replicated": lambda: {"x": sharded(X, P()), "n": 1},
    "other mesh": lambda: {"x": sharded(X, P("data"), fs.make_mesh({"data": 4})), "n": 1},
    "plain": lambda: {"x": X.clone(), "n": 1},
    "swapped": lambda: {"x": 1, "n": sharded()},
    "conjugated": lambda: {"x": torch.complex(X, X + 1).conj(), "n": 1},
    "complex": lambda: {"x": torch.complex(X, X + 1), "n": 1},
    "transposed": lambda: {"x": X.reshape(4, 2).T, "n": 1},
    "key 1": lambda: {"x": {1: sharded()}},
    "key True": lambda: {"x": {True: sharded()}},
    "key 1.0": lambda: {"x": {1.0: sharded()}},
    "key text": lambda: {"x": {"1": sharded()}},
    "list": lambda: {"x": [sharded(), sharded(X + 1)]},
    "pair": lambda: {"x": Pair(sharded(), sharded(X + 1))},
    "tied": lambda: {"x": tied(sharded())},
    "not tied": lambda: {"x": {"a": sharded(), "b": sharded(X + 1)}},
    "ordered": lambda: {"x": OrderedDict(b=sharded(), a=sharded(X + 1))},
    "ordered otherwise": lambda: {"x": OrderedDict(a=sharded(), b=sharded(X + 1))},
    "empty first": lambda: [[], {"x": sharded()}, {}],
    "empty last": lambda: [{"x": sharded()}, {}, []],
    "object first": lambda: {"a": Counted({"x": sharded()}), "b": sharded(X + 1)},
    "object last": lambda: {"a": sharded(), "b": Counted({"x": sharded(X + 1)})},
    "object of more": lambda: {"a": Counted({"x": sharded(), "y": 1}), "b": sharded(X + 1)},
    "object in object": lambda: {"a": Counted({"x": Counted({"x": sharded()})})},
    "objects": lambda: [Counted({"a.x": sharded()}), Counted({"b.x": sharded(X + 1)})],
    "stages": lambda: [{"a.x": sharded()}, {"b.x": sharded(X + 1)}],
    "module": lambda: {"m": torch.nn.Linear(2, 2), "n": 1},
}


def bytes_of(tree):
    """Return the text of the index of a tree, and the bytes of each device."""
    snapshot = snapshot_of(tree)
    shares = {}
    for device, ranges in snapshot.shares.items():
        rows = [(x.array, x.shape, x.values.clone().view(torch.uint8).tolist()) for x in ranges]
        shares[device] = rows
    return snapshot.index.text, shares, snapshot.replicas


@torch.no_grad()
def test_snapshot_after_those_of_other_trees_equals_the_first_of_a_program():
    made = {name: make() for name, make in TREES.items()}
    expected = {}
    for name, tree in made.items():
        form._forms.clear()
        expected[name] = bytes_of(tree)
    form._forms.clear()

    for _ in range(2):
        for name, tree in made.items():
            assert bytes_of(tree) == expected[name], name
    assert len({text for text, *_ in expected.values()}) > len(TREES) - 8


def test_save_of_new_values_restores_them(tmp_path):
    for number in range(3):
        tree = {"x": sharded(X + number), "n": number, "o": Counted({"k": number})}
        fs.save(tmp_path / str(number), tree)
        restored = fs.restore(tmp_path / str(number))
        assert torch.equal(restored["x"], X + number)
        assert (restored["n"], restored["o"]["k"]) == (number, number)


def test_second_snapshot_computes_no_names(monkeypatch):
    tree = {"x": [sharded(X + number) for number in range(4)], "n": 0}
    first = snapshot_of(tree, compare=False)
    monkeypatch.setattr(form, "leaves_of", None)
    second = snapshot_of({"x": [sharded(X) for _ in tree["x"]], "n": 1}, compare=False)
    assert second.index.division is first.index.division
    assert second.index.values == [(("n",), 1)]


def _donated():
    x = sharded()
    del x.shards
    return x


def _stale_view():
    x = sharded()
    view = x[2:]
    x += 1
    return view


@pytest.mark.parametrize(
    ("valid", "invalid", "text"),
    [
        (lambda: sharded(), _donated, "donated"),
        (lambda: sharded()[2:], _stale_view, "changed in place"),
        (lambda: X, lambda: X.to("meta"), "meta tensor"),
        (lambda: torch.eye(2), lambda: torch.eye(2).to_sparse(), "sparse"),
        (lambda: 1, lambda: object(), "value of JSON"),
        (lambda: [1], lambda: {1}, "value of JSON"),
    ],
)
def test_save_of_an_invalid_tree_raises_after_a_valid_one(tmp_path, valid, invalid, text):
    fs.save(tmp_path / "valid", {"x": valid()})
    with pytest.raises((FshardError, RuntimeError), match=text):
        fs.save(tmp_path / "invalid", {"x": invalid()})
