"""Fast paths of small collectives between processes of one machine: same results, errors and ledger as without."""

import os
from collections.abc import Iterator

import pytest
import torch

import fshard as fs
from fshard.mesh.layout.arithmetic import tree_sum
from fshard.mesh.shared_memory import neighbours
from fshard.mesh.spmd.scope import here
from fshard.testing.processes import Processes, run_processes

pytestmark = pytest.mark.skipif(neighbours._libc() is None, reason="this system does not read other processes' memory")

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


def on_both_paths(name, rows):
    """Process 0 takes the fast path; process 1 takes the general one at every other call."""

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
def test_fast_path_matches_the_general_path(pair, name, rows):
    assert pair.run(on_both_paths, name, rows) == [True, True]


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


def test_fast_path_error_names_the_line():
    line = the_line_of_an_error.__code__.co_firstlineno + 6
    for text in run_processes(the_line_of_an_error, 2):
        assert f"test_fast_path.py:{line} in main" in text


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


def test_fast_path_calls_are_counted_by_ledger(pair):
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
def test_psum_scatter_keeps_arguments_and_fixed_tree(dtype):
    results = run_processes(scatter_twice, 4, dtype)
    for place, (kept, sooner, later) in enumerate(results):
        expected = tree_sum([rows_of(other, dtype)[place] for other in range(4)])
        assert kept and sooner.flatten().equal(expected) and later.flatten().equal(expected.flip(0))
