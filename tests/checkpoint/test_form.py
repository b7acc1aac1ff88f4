"""Trees that are saved one after the other, and differ in one respect each.

The oracle is what `fs.restore` returns, and the bytes of a save in a program that has saved nothing.
"""

from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.checkpoint import form
from fshard.checkpoint.snapshot import snapshot_of
from fshard.errors import FshardError

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


def content(tree):
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
        expected[name] = content(tree)
    form._forms.clear()

    for _ in range(2):
        for name, tree in made.items():
            assert content(tree) == expected[name], name
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
