"""Cutting layers into stages: the best cut there is, of the layers themselves."""

import time
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fshard.pipeline.split.balance import partition
from fshard.pipeline.split.stages import split_stages


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
def test_partition_is_optimal(costs, data):
    parts = data.draw(st.integers(1, len(costs)))

    def sums(cuts):
        return [sum(costs[begin:end]) for begin, end in pairwise((0, *cuts, len(costs)))]

    cuts = combinations(range(1, len(costs)), parts - 1)
    best = min((max(own), sum(x * x for x in own)) for own in map(sums, cuts))
    sizes = partition(costs, parts)
    assert len(sizes) == parts and min(sizes) >= 1 and sum(sizes) == len(costs)
    own = sums([sum(sizes[: part + 1]) for part in range(parts - 1)])
    assert (max(own), sum(x * x for x in own)) == best


@given(
    st.lists(st.sampled_from([0.1, 0.3, 0.7, 1.1, 1e9]), min_size=5, max_size=40), st.integers(1, 5)
)
def test_partition_of_rounded_costs_keeps_all_layers(costs, parts):
    sizes = partition(costs, parts)
    assert len(sizes) == parts and min(sizes) >= 1 and sum(sizes) == len(costs)


def test_partition_of_many_layers_is_fast():
    began = time.process_time()
    assert partition([1.5, 0.1, 2.5] * 100, 64)
    assert time.process_time() - began < 5


class Clock:
    """Stands still but for layers that say how long they take; what it shows is of no use to
    anybody else.
    """

    now = 0.0

    def perf_counter(self):
        return self.now


class Slow(nn.Module):
    def __init__(self, clock, seconds):
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def forward(self, x):
        self.clock.now += self.seconds
        return x


def model():
    return nn.Sequential(
        nn.Embedding(50, 8),
        nn.Linear(8, 8),
        nn.ReLU(inplace=True),
        nn.Linear(8, 8),
        nn.Tanh(),
        nn.Linear(8, 50),
    )


TOKENS = torch.arange(6).reshape(2, 3)


@pytest.mark.parametrize(
    ("balance", "expected"),
    [
        ("uniform", [2, 2, 2]),
        ("parameters", [1, 4, 1]),
        ("type:linear", [3, 2, 1]),
        ([1, 2, 3], [1, 2, 3]),
    ],
    ids=["uniform", "parameters", "type", "sizes"],
)
def test_stages_are_balanced_by_each_measure(balance, expected):
    layers = model()
    stages = split_stages(layers, 3, balance)
    assert [len(stage) for stage in stages] == expected
    assert [x for stage in stages for x in stage] == [*layers]
    assert [name for stage in stages for name in stage.state_dict()] == [*layers.state_dict()]
    y = TOKENS
    for stage in stages:
        y = stage(y)
    assert torch.equal(y, layers(TOKENS))


def test_tied_parameters_count_once():
    layers = model()
    layers[5].weight = layers[0].weight
    assert [len(stage) for stage in split_stages(layers, 2, "parameters")] == [1, 5]


def test_layers_may_be_functions_and_keep_names():
    first, second = split_stages([nn.Linear(2, 3), torch.relu, lambda x: x.sum()], 2)
    assert [*first.state_dict()] == ["0.weight", "0.bias"]
    assert second(first(torch.ones(1, 2))[:0]) == 0


def test_measuring_balance_leaves_layers_unchanged(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("fshard.pipeline.split.balance.time", clock)
    layers = nn.Sequential(
        nn.BatchNorm1d(4), Slow(clock, 2), nn.Tanh(), Slow(clock, 1), nn.Dropout(), Slow(clock, 3)
    )
    before = {name: x.clone() for name, x in layers.state_dict().items()}
    wide = nn.Sequential(
        nn.Linear(4, 4),
        nn.ReLU(inplace=True),
        nn.Linear(4, 400),
        nn.Sigmoid(),
        nn.Linear(400, 4),
        nn.Tanh(),
    )
    sample = torch.ones(3, 4)
    state = torch.get_rng_state()
    assert [len(stage) for stage in split_stages(layers, 2, "time", sample=sample)] in (
        [4, 2],
        [5, 1],
    )
    assert [len(stage) for stage in split_stages(wide, 2, "memory", sample=sample)] == [3, 3]
    assert all(torch.equal(before[name], x) for name, x in layers.state_dict().items())
    assert all(x.grad is None for x in [*layers.parameters(), *wide.parameters()])
    assert torch.equal(torch.get_rng_state(), state) and sample.eq(1).all()
