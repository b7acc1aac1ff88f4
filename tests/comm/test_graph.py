"""Graphs: weights, gaps, and averages of neighbours."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fshard as fs
from fshard import comm
from tests.comm.graphs import mixed

GRAPHS = {
    "ring": comm.ring,
    "exponential": comm.exponential,
    "one_peer": comm.one_peer,
    "complete": comm.complete,
    "random_pairs": lambda n: comm.random_pairs(n, seed=3, rounds=8),
}


@given(name=st.sampled_from(sorted(GRAPHS)), n=st.integers(1, 17))
def test_columns_sum_to_one_and_rounds_contract(name, n):
    graph = GRAPHS[name](n)
    for turn in range(len(graph.rounds)):
        torch.testing.assert_close(graph.matrix(turn).sum(0), torch.ones(n, dtype=torch.float64))
    assert 0 < graph.gap <= 1 + 1e-9


def test_gaps_are_those_of_the_literature():
    assert 1 - comm.ring(8).gap == pytest.approx(0.8047, abs=1e-4)
    assert [comm.exponential(n).gap for n in (8, 16, 64)] == pytest.approx([1 / 2, 2 / 5, 2 / 7])
    assert comm.complete(5).gap == pytest.approx(1)


def test_graphs_are_values_and_drawn():
    assert comm.ring(4) == comm.ring(4) and {comm.ring(4), comm.ring(4)} == {comm.ring(4)}
    assert repr(comm.one_peer(4)) == "one_peer(4): 2 rounds, gap 1.000"
    svg = comm.one_peer(4)._repr_svg_()
    assert (svg.count("<path"), svg.count("<circle")) == (8, 8) and "one_peer(4)" in svg


WEIGHTED = comm.from_matrix([[0.5, 0.5, 0], [0, 0.25, 0.75], [0.5, 0.25, 0.25]])


@pytest.mark.parametrize(
    "graph", [WEIGHTED, *(make(n) for make in GRAPHS.values() for n in (2, 5, 8))], ids=repr
)
def test_mix_multiplies_by_the_matrix(graph):
    xs = torch.randn(graph.size, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = graph.matrix(1) @ graph.matrix(0) @ xs
    torch.testing.assert_close(torch.stack(mixed(graph, xs, 2)), expected)


def test_push_to_a_device_without_sources_gives_zeros():
    graph = comm.from_matrix([[0, 1], [0, 1]], [[1, 0], [1, 0]])

    def main():
        x = torch.tensor([fs.axis_index("node") + 1.0])
        return comm.mix(x, graph, 0, "node", push=True)

    assert fs.run(main, mesh=fs.make_mesh({"node": 2})) == [
        torch.tensor([0.0]),
        torch.tensor([3.0]),
    ]


def test_rounds_of_a_hypercube_are_pmean_to_the_bit():
    xs = torch.randn(8, 100, generator=torch.Generator().manual_seed(0))
    mean = fs.run(
        lambda: fs.pmean(xs[fs.axis_index("node")], "node"), mesh=fs.make_mesh({"node": 8})
    )
    for x, y in zip(mixed(comm.hypercube(8), xs, 3), mean, strict=True):
        assert torch.equal(x, y)


def test_a_ring_adds_left_itself_and_right():
    xs = torch.randn(4, 100, generator=torch.Generator().manual_seed(0))
    for i, x in enumerate(mixed(comm.ring(4), xs, 1)):
        assert torch.equal(x, (xs[i - 1] + xs[i] + xs[(i + 1) % 4]) / 3)


def test_graph_with_a_weight_that_is_no_number_names_its_row():
    nan = float("nan")
    with pytest.raises(ValueError, match="row 0 has nan, row 0 sums to nan"):
        comm.from_matrix([[nan, 1.0], [0.5, 0.5]])
