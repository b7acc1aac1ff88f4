"""Layers are built where they are needed alone, and are everywhere the same."""

from typing import ClassVar

import pytest
import torch
from torch import nn

import fshard as fs


class Noted(nn.Module):
    """Notes in which memory it is made."""

    made: ClassVar[list[tuple[str, int]]] = []

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, 8))
        self.inner = nn.LSTM(8, 8)
        self.register_buffer("scale", torch.rand(8))
        self.made.append((self.weight.device.type, width))

    def forward(self, x):
        return self.inner(x @ self.weight.mT @ self.weight * self.scale)[0]


def state(module):
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def test_materialized_stage_draws_by_names():
    Noted.made.clear()
    small = fs.lazy(lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout()))
    layers = [fs.lazy(Noted, 3), nn.Tanh(), small, fs.lazy(Noted, 900), fs.lazy(Noted, 4)]
    stages = fs.pipeline.split_stages(layers, 3, "parameters")
    assert [len(stage) for stage in stages] == [3, 1, 1]
    assert all(x.is_meta for stage in stages for x in state(stage).values())
    before = torch.get_rng_state()
    last = fs.nn.materialize(stages[2], seed=1)
    assert [width for where, width in Noted.made if where != "meta"] == [4]
    full = fs.nn.materialize(nn.Sequential(*layers), seed=1)
    actual = {
        name: x for stage in stages for name, x in state(fs.nn.materialize(stage, seed=1)).items()
    }
    assert actual.keys() == state(full).keys()
    assert all(torch.equal(x, actual[name]) for name, x in state(full).items())
    assert all(torch.equal(x, actual[name]) for name, x in state(last).items())
    assert not torch.equal(actual["0.inner.weight_ih_l0"], actual["4.inner.weight_ih_l0"])
    assert not torch.equal(
        actual["2.0.weight"], state(fs.nn.materialize(stages[0], seed=2))["2.0.weight"]
    )
    assert torch.equal(torch.get_rng_state(), before) and all(
        x.is_meta for x in state(stages[0]).values()
    )
    x = torch.randn(2, 3, 8)
    assert torch.equal(last(x), full[4](x))


def test_materialize_keeps_tensors_and_ties():
    first = fs.lazy(nn.Linear, 4, 4)
    second = fs.lazy(nn.Linear, 4, 4)
    second.weight = first.weight
    real = nn.Linear(4, 4)
    made = fs.nn.materialize(nn.Sequential(first, real, second), seed=0)
    assert (
        made[0].weight is made[2].weight
        and made[1].weight is real.weight
        and not made[0].weight.is_meta
    )
    assert isinstance(made[0].weight, nn.Parameter) and made[0].weight.requires_grad


def test_lazy_blocks_split_into_stages():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 4, 0, batch_first=True), 1)
    model.layers = nn.ModuleList(
        fs.lazy(nn.TransformerEncoderLayer, 4, 2, 4, 0, batch_first=True) for _ in range(3)
    )
    x = torch.ones(1, 2, 4)
    stages = [
        fs.nn.materialize(stage, seed=0)
        for stage in fs.pipeline.split_stages(model, 3, sample=x, blocks="layers")
    ]
    y = x
    for stage in stages:
        y = stage(y)
    assert torch.equal(y, fs.nn.materialize(model, seed=0)(x))


def test_lazy_of_unsuitable_factories_raises():
    with pytest.raises(fs.errors.ModuleError, match="weight must have a shape"):
        fs.lazy(nn.LazyLinear, 3)
    with pytest.raises(fs.errors.ModuleError, match="factory must return a module; got int"):
        fs.lazy(int, "3")
    for made in (nn.Linear(2, 2), 3):
        with pytest.raises(
            fs.errors.ModuleError, match="fs.lazy: factory must be a function that makes a module"
        ):
            fs.lazy(made)
    with pytest.raises(fs.errors.ModuleError, match="0.weight, 0.bias must be described"):
        fs.nn.materialize(
            nn.Sequential(nn.Linear(2, 2, device="meta"), fs.lazy(nn.Linear, 2, 2)), seed=0
        )
