"""Rings: what is put comes out, in order, whatever is looked for when; and the short way is no other collective."""

import ctypes
import os
from collections import deque
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fshard as fs
from fshard.mesh.layout.arithmetic import tree_sum
from fshard.mesh.shared_memory import neighbours, rings
from fshard.mesh.spmd.scope import here
from fshard.testing.processes import Processes, run_processes

pytestmark = pytest.mark.skipif(neighbours._libc() is None, reason="this system does not read other processes' memory")


def ring():
    number = rings.made()
    try:
        return rings.Putter(number), rings.Taker(number)
    finally:
        os.close(number)


def put(putter, key, text):
    kept = ctypes.create_string_buffer(text, max(len(text), 1))
    return putter.put(key, rings.INSIDE, len(text), key + 1, ctypes.addressof(kept))


def taken(taker, key):
    address, size, stamp, place = taker.inbox.pop(key)
    assert address == rings.INSIDE and stamp == key + 1
    return ctypes.string_at(place, size)


sizes = st.one_of(st.integers(0, 70), st.integers(0, 64 << 10))
steps = st.one_of(
    st.tuples(st.just("put"), sizes),
    st.tuples(st.just("look"), st.integers(0, 3)),
    st.tuples(st.just("take"), st.integers(0, 3)),
)


@given(st.lists(steps, max_size=120))
def test_a_ring_is_a_queue_of_messages_from_which_any_can_be_taken(plan):
    putter, taker = ring()
    waiting, inside, key = deque(), {}, 0
    for what, number in plan:
        if what == "put":
            text = bytes([key % 251]) * number
            if put(putter, key, text):
                waiting.append((key, text))
            else:  # so there is no room, but for what the taker has not passed yet
                assert sum(len(text) + 96 for _, text in waiting) + 2 * (64 << 10) + number > rings.SIZE
            key += 1
        elif what == "look" and waiting:
            wanted = waiting[min(number, len(waiting) - 1)][0]
            assert taker.look(wanted)
            while waiting and waiting[0][0] <= wanted:
                inside.update([waiting.popleft()])
        elif what == "take" and inside:
            chosen = list(inside)[number % len(inside)]
            assert taken(taker, chosen) == inside.pop(chosen)
    assert not taker.look(None)
    for chosen, text in [*inside.items(), *waiting]:
        assert taken(taker, chosen) == text


def test_a_full_ring_refuses_and_takes_again_once_there_is_room():
    putter, taker = ring()
    text = b"x" * (64 << 10)
    count = 0
    while put(putter, count, text):
        count += 1
    assert 14 <= count <= 16
    assert taker.look(count - 1)
    for key in range(count):
        assert taken(taker, key) == text
    assert not taker.look(count) and put(putter, count, text) and taker.look(count) and taken(taker, count) == text


# -- the short way --------------------------------------------------------------------------------------------------

CALLS = {
    "psum": lambda x: fs.psum(x, "d"),
    "pmean": lambda x: fs.pmean(x, ("d",)),
    "pmax": lambda x: fs.pmax(x, "d"),
    "all_gather": lambda x: fs.all_gather(x, "d", dim=1),
    "psum_scatter": lambda x: fs.psum_scatter(x, "d"),
    "all_to_all": lambda x: fs.all_to_all(x, "d", split_dim=0, concat_dim=1),
    "ppermute": lambda x: fs.ppermute(x, "d", [(0, 1), (1, 0)]),
    "broadcast": lambda x: fs.broadcast(x, "d", source=1),
}


@pytest.fixture(scope="module")
def pair() -> Iterator[Processes]:
    """Two processes with a direct link."""
    with Processes(2) as pool:
        yield pool


def on_both_ways(name, rows):
    """Process 0 goes the short way; process 1 goes the long one at every other call."""

    def main():
        index, call = fs.axis_index("d"), CALLS[name]
        here().fast_paths.clear()
        plain = torch.arange(8.0 * rows).reshape(8, rows) + index
        with fs.ledger():
            expected = call(plain)
        assert not here().fast_paths
        for turn in range(4):
            x = plain.clone().requires_grad_(index == 1 and turn % 2 == 1)
            assert torch.equal(call(x).detach(), expected)
        assert len(here().fast_paths) == 1 and None not in here().fast_paths.values()
        return True

    return fs.run(main, mesh=fs.make_mesh({"d": 2}))[0]


@pytest.mark.parametrize("rows", [1, 5000, 100_000])
@pytest.mark.parametrize("name", CALLS)
def test_the_short_way_and_the_long_one_meet(pair, name, rows):
    assert pair.run(on_both_ways, name, rows) == [True, True]


def the_line_of_an_error():
    def main():
        x = torch.ones(4)
        for _ in range(2):
            fs.psum(x, "d")
        try:
            fs.psum(x, "d") if fs.axis_index("d") else fs.pmax(x, "d")
        except fs.errors.MismatchError as error:
            return str(error)

    return fs.run(main, mesh=fs.make_mesh({"d": 2}))[0]


def test_an_error_on_the_short_way_names_the_line():
    line = the_line_of_an_error.__code__.co_firstlineno + 6
    for text in run_processes(the_line_of_an_error, 2):
        assert f"test_rings.py:{line} in main" in text


def counted():
    """A ledger sees what went the short way before it was opened."""

    def main():
        x = torch.ones(4)
        fs.psum(x, "d")
        fs.psum(x, "d")
        with fs.ledger() as comm:
            fs.psum(x, "d")
        return comm.calls()

    return fs.run(main, mesh=fs.make_mesh({"d": 2}))[0]


def test_a_ledger_counts_calls_whose_way_is_known(pair):
    assert pair.run(counted) == [1, 1]


def rows_of(place, dtype):
    n = int(os.environ.get("WORLD_SIZE", "4"))
    x = torch.randn(n, 20_000, generator=torch.Generator().manual_seed(place))
    return (100 * x).to(dtype)


def scatter_twice(dtype):
    """The second is waited for first, so the rows of the first are put away out of the ring."""

    def main():
        x = rows_of(fs.axis_index("d"), dtype)
        before = x.clone()
        first, second = fs.psum_scatter.start(x, "d"), fs.psum_scatter.start(x.flip(1), "d")
        later, sooner = second.wait(), first.wait()
        return x.equal(before), sooner, later

    return fs.run(main, mesh=fs.make_mesh({"d": int(os.environ["WORLD_SIZE"])}))[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_rows_are_summed_where_they_lie_and_what_was_given_stays(dtype):
    results = run_processes(scatter_twice, 4, dtype)
    for place, (kept, sooner, later) in enumerate(results):
        expected = tree_sum([rows_of(other, dtype)[place] for other in range(4)])
        assert kept and sooner.flatten().equal(expected) and later.flatten().equal(expected.flip(0))
