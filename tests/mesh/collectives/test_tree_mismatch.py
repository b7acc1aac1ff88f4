"""The devices of a group must call a collective on the same tree: leaves are never matched by their
order alone.
"""

from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
from tests.helpers.processes import not_under_rules, run_processes

NAMES = st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True)


def tree(names):
    return OrderedDict((name, torch.ones(2)) for name in names)


def paths(names):
    return "(leaves " + ", ".join(f'["{name}"]' for name in names) + ")"


def reduced(names):
    return fs.psum(tree(names[fs.axis_index("data")]), "data")


def sent(names):
    if fs.axis_index("data") == 0:
        return fs.send(tree(names[0]), "data", to=1)
    return fs.recv(tree(names[1]), "data", source=0)


@pytest.mark.parametrize("call", [reduced, sent])
@settings(max_examples=30)
@given(names=st.tuples(NAMES, NAMES))
def test_different_trees_raise_with_both(call, names):
    mesh = fs.make_mesh({"data": 2})
    with fs.ledger() as comm:
        for equal in names:
            assert [*fs.run(call, [equal, equal], mesh=mesh)[1]] == equal
    assert [calls for _, calls, _ in comm.rows()] == [2]  # the line is one row, whatever the tree
    if names[0] != names[1]:
        with pytest.raises(fs.errors.MismatchError) as error:
            fs.run(call, names, mesh=mesh)
        assert all(paths(some) in str(error.value) for some in names)


def different_trees():
    with pytest.raises(fs.errors.MismatchError) as error:
        fs.run(reduced, ["ab", "ba"], mesh=fs.make_mesh({"data": 2}))
    return str(error.value)


WITHOUT_CHECK = pytest.param("0", marks=not_under_rules("NCCL compares no calls"))


@pytest.mark.parametrize("check", [WITHOUT_CHECK, "1"])
def test_processes_with_different_trees_raise(check):
    texts = run_processes(different_trees, 2, environment={"FSHARD_CHECK": check})
    for text, names, peer_names in zip(texts, ["ab", "ba"], ["ba", "ab"], strict=True):
        assert paths(names) in text and (check == "0" or paths(peer_names) in text)
