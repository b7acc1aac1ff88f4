"""The devices of a group must call a collective on the same tree: leaves are never matched by their order alone."""

from collections import OrderedDict

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard.testing import run_processes

NAMES = st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True)


def each(trees):
    return trees[fs.axis_index("data")]


@settings(max_examples=50)
@given(names=st.tuples(NAMES, NAMES))
def test_psum_different_trees_raise_with_both(names):
    first, second = (OrderedDict((name, torch.ones(2)) for name in some) for some in names)
    mesh = fs.make_mesh({"data": 2})
    assert fs.run(lambda: fs.psum(first, "data"), mesh=mesh)[1].keys() == first.keys()
    assume(names[0] != names[1])
    with pytest.raises(fs.errors.MismatchError) as error:
        fs.run(lambda: fs.psum(each([first, second]), "data"), mesh=mesh)
    for some in names:
        leaves = ", ".join(f'["{name}"]' for name in some)
        assert f"(leaves {leaves}) at" in str(error.value)


def sent_and_expected(trees):
    if fs.axis_index("data") == 0:
        return fs.send(trees[0], "data", to=1)
    return fs.recv(trees[1], "data", source=0)


@settings(max_examples=20)
@given(names=st.tuples(NAMES, NAMES))
def test_recv_other_tree_than_sent_raises(names):
    trees = [OrderedDict((name, torch.ones(2)) for name in some) for some in names]
    mesh = fs.make_mesh({"data": 2})
    assert fs.run(sent_and_expected, [trees[0], trees[0]], mesh=mesh)[1].keys() == trees[0].keys()
    assume(names[0] != names[1])
    with pytest.raises(fs.errors.MismatchError) as error:
        fs.run(sent_and_expected, trees, mesh=mesh)
    for some in names:
        leaves = ", ".join(f'["{name}"]' for name in some)
        assert f"(leaves {leaves})" in str(error.value)


def test_ledger_counts_line_once_for_any_tree():
    with fs.ledger() as comm:
        fs.run(lambda: [fs.psum({name: torch.ones(2)}, "data") for name in "ab"], mesh=fs.make_mesh({"data": 2}))
    assert [calls for _, calls, _ in comm.rows()] == [2]
    with fs.ledger() as comm:
        fs.run(
            lambda: [sent_and_expected([{name: torch.ones(2)}] * 2) for name in "ab"], mesh=fs.make_mesh({"data": 2})
        )
    assert [calls for _, calls, _ in comm.rows()] == [2]


def other_trees() -> str:
    mesh = fs.make_mesh({"data": 2})
    ones, tens = torch.ones(2), torch.full((2,), 10.0)
    trees = [OrderedDict(a=ones, b=tens), OrderedDict(b=tens, a=ones)]
    with pytest.raises(fs.errors.MismatchError) as error:
        fs.run(lambda: fs.psum(each(trees), "data"), mesh=mesh)
    return str(error.value)


@pytest.mark.parametrize("check", ["0", "1"])
def test_processes_with_different_trees_raise(check):
    mine = ['(leaves ["a"], ["b"])', '(leaves ["b"], ["a"])']
    for text, own in zip(run_processes(other_trees, 2, environment={"FSHARD_CHECK": check}), mine, strict=True):
        assert own in text
        assert check == "0" or all(one in text for one in mine)
