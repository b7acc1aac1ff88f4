"""Cutting layers into stages: the best cut there is, of the layers themselves."""

import time
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fshard as fs
from fshard.pipeline.execution.execute import pipelined
from fshard.pipeline.schedule.builders import pipeline_schedule
from fshard.pipeline.split.stages import partition, split_stages


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
def test_no_cut_has_a_smaller_largest_sum_and_is_more_even(costs, data):
    parts = data.draw(st.integers(1, len(costs)))

    def sums(cuts):
        return [sum(costs[begin:end]) for begin, end in pairwise((0, *cuts, len(costs)))]

    cuts = combinations(range(1, len(costs)), parts - 1)
    best = min((max(own), sum(x * x for x in own)) for own in map(sums, cuts))
    sizes = partition(costs, parts)
    assert len(sizes) == parts and min(sizes) >= 1 and sum(sizes) == len(costs)
    own = sums([sum(sizes[: part + 1]) for part in range(parts - 1)])
    assert (max(own), sum(x * x for x in own)) == best


@given(st.lists(st.sampled_from([0.1, 0.3, 0.7, 1.1, 1e9]), min_size=5, max_size=40), st.integers(1, 5))
def test_rounding_leaves_no_layer_out(costs, parts):
    sizes = partition(costs, parts)
    assert len(sizes) == parts and min(sizes) >= 1 and sum(sizes) == len(costs)


def test_a_long_model_is_cut_at_once():
    began = time.perf_counter()
    assert partition([1.5, 0.1, 2.5] * 100, 64)
    assert time.perf_counter() - began < 5


class Clock:
    """Stands still but for layers that say how long they take; what it shows is of no use to anybody else."""

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
        nn.Embedding(50, 8), nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 50)
    )


TOKENS = torch.arange(6).reshape(2, 3)


@pytest.mark.parametrize(
    ("balance", "expected"),
    [("uniform", [2, 2, 2]), ("parameters", [1, 4, 1]), ("type:linear", [3, 2, 1]), ([1, 2, 3], [1, 2, 3])],
    ids=["uniform", "parameters", "type", "sizes"],
)
def test_what_is_balanced(balance, expected):
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


def test_layers_may_be_functions_and_keep_their_names():
    first, second = split_stages([nn.Linear(2, 3), torch.relu, lambda x: x.sum()], 2)
    assert [*first.state_dict()] == ["0.weight", "0.bias"]
    assert second(first(torch.ones(1, 2))[:0]) == 0


def test_time_is_measured_and_memory_is_counted_without_a_trace(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("fshard.pipeline.split.stages.time", clock)
    layers = nn.Sequential(nn.BatchNorm1d(4), Slow(clock, 2), nn.Tanh(), Slow(clock, 1), nn.Dropout(), Slow(clock, 3))
    before = {name: x.clone() for name, x in layers.state_dict().items()}
    wide = nn.Sequential(
        nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 400), nn.Sigmoid(), nn.Linear(400, 4), nn.Tanh()
    )
    sample, state = torch.ones(3, 4), torch.get_rng_state()
    assert [len(stage) for stage in split_stages(layers, 2, "time", sample=sample)] in ([4, 2], [5, 1])
    assert [len(stage) for stage in split_stages(wide, 2, "memory", sample=sample)] == [3, 3]
    assert all(torch.equal(before[name], x) for name, x in layers.state_dict().items())
    assert all(x.grad is None for x in [*layers.parameters(), *wide.parameters()])
    assert torch.equal(torch.get_rng_state(), state) and sample.eq(1).all()


def test_what_cannot_be_cut_is_refused():
    layers = model()
    for n, balance, text in [
        (7, "uniform", "6 layers cannot be split into 7 stages. Give n from 1 to 6"),
        (2, [6], "6 layers in 2 stages, but balance=[6] are 1 of 6 layers. Each takes at least one"),
        (2, "size", "there is no balance='size'"),
        (2, "time", 'balance="time" is measured. Give a microbatch'),
        (2, "type:(", 'balance="type:(" is no regular expression: missing )'),
        (2, "type:Conv", 'no layer has a class that matches "Conv"; they are Embedding, Linear, ReLU, Tanh'),
    ]:
        with pytest.raises(fs.errors.LayoutError) as error:
            split_stages(layers, n, balance)
        assert text in str(error.value)
    with pytest.raises(fs.errors.LayoutError, match=r"layers\[1\] is int, layers\[2\] is str"):
        split_stages([nn.ReLU(), 3, "x"], 2)
    with pytest.raises(fs.errors.LayoutError, match="a list of layers, found Bilinear. .* sample=x, blocks="):
        split_stages(nn.Bilinear(2, 2, 2), 2)


class Halved(nn.Sequential):
    def forward(self, x):
        return super().forward(x) / 2


def with_hook(model, kind="register_forward_hook"):
    getattr(model, kind)(lambda *_: None)
    return model


def with_own(model, **more):
    for name, x in more.items():
        setattr(model, name, x)
    return model


@pytest.mark.parametrize(
    ("model", "more"),
    [
        (Halved(nn.Linear(2, 2), nn.ReLU()), "forward"),
        (with_own(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), forward=lambda x: x), "forward"),
        (with_hook(nn.Sequential(nn.Linear(2, 2), nn.ReLU())), "hooks"),
        (with_hook(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "register_forward_pre_hook"), "hooks"),
        (with_hook(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "register_full_backward_hook"), "hooks"),
        (with_own(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), gain=nn.Parameter(torch.ones(2))), "gain"),
    ],
)
def test_what_a_row_of_layers_does_beside_them_is_not_lost(model, more):
    with pytest.raises(fs.errors.LayoutError, match=rf"more than the row of its layers, .* would have its {more}\."):
        split_stages(model, 2)


def test_stages_run_in_a_pipeline_as_the_whole_model():
    layers, tokens = model(), [TOKENS, TOKENS[:1] + 7]
    stages = split_stages(layers, 3, "parameters")
    step = pipelined(
        [lambda params, x, stage=stage: torch.func.functional_call(stage, params, x) for stage in stages],
        pipeline_schedule("zb-h1", stages=3, microbatches=2),
        lambda y, x: nn.functional.cross_entropy(y.flatten(0, 1), x.flatten()),
        mesh=fs.make_mesh({"pipe": 3}),
    )
    found = step([dict(stage.named_parameters()) for stage in stages], tokens)
    loss = sum(nn.functional.cross_entropy(layers(x).flatten(0, 1), x.flatten()) * len(x) for x in tokens) / 3
    loss.backward()
    torch.testing.assert_close(found.loss, loss.detach())
    for name, x in layers.named_parameters():
        torch.testing.assert_close(next(own[name] for own in found.gradients if name in own), x.grad)
