"""A functional state is used up by its step: whoever goes on from it is told, if its numbers are not there any more."""

import copy

import pytest
import torch
from torch import nn

import fshard as fs

PLUGINS = {
    "ddp": (fs.DDPPlugin, {"data": 2}),
    "zero 2": (lambda **how: fs.ZeroPlugin(stage=2, **how), {"data": 2}),
    "fsdp": (fs.FSDPPlugin, {"data": 2}),
    "stages": (lambda **how: fs.HybridParallelPlugin(pipeline=2, microbatches=2, **how), {"data": 1, "pipe": 2}),
}
BATCH = torch.ones(4, 3), torch.zeros(4, 1)


def begun(name, *, frozen=False, **how):
    plugin, mesh = PLUGINS[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3).requires_grad_(not frozen), nn.Linear(3, 1))
    booster = fs.Booster(plugin(mesh=fs.make_mesh(mesh), **how))
    trained = [x for x in model.parameters() if x.requires_grad]
    return booster, booster.init(model, torch.optim.AdamW(trained, lr=0.1), nn.MSELoss())


def values(state):
    trees = fs.unshard(state.params)
    flat = {k: x for tree in trees for k, x in tree.items()} if isinstance(trees, list) else trees
    return {name: x.clone() for name, x in flat.items()}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", PLUGINS)
def test_a_state_is_used_up_once(name, frozen):
    booster, first = begun(name, frozen=frozen)
    second, _ = booster.step(first, BATCH)
    third, _ = booster.step(second, BATCH)
    for old in (first, second):
        with pytest.raises(
            fs.LayoutError, match="was used up by an earlier step, .* Go on with the state that was returned"
        ):
            booster.step(old, BATCH)
    booster.step(third, BATCH)


@pytest.mark.parametrize("name", PLUGINS)
def test_in_reproducible_mode_it_is_as_it_was(name):
    booster, first = begun(name, reproducible=True)
    before = values(first)
    again = [values(booster.step(first, BATCH)[0]) for _ in range(2)]
    assert all(torch.equal(again[0][k], again[1][k]) and torch.equal(before[k], x) for k, x in values(first).items())


def test_what_nobody_uses_is_the_same_in_each_state_and_says_nothing():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.layer = nn.Parameter(torch.ones(2)), nn.Linear(3, 1)

        def forward(self, x):
            return self.layer(x)

    batch, model = (torch.ones(8, 3), torch.zeros(8, 1)), Idle()
    booster = fs.Booster(fs.DDPPlugin(mesh=fs.make_mesh({"data": 2}), reproducible=True))
    first = booster.init(model, torch.optim.AdamW(model.parameters(), lr=0.1), nn.MSELoss())
    again = [values(booster.step(first, batch)[0]) for _ in range(2)]
    assert all(torch.equal(x, again[1][name]) for name, x in again[0].items())
    booster = fs.Booster(fs.DDPPlugin(mesh=fs.make_mesh({"data": 2})))
    first = booster.init(model, torch.optim.AdamW(model.parameters(), lr=0.1), nn.MSELoss())
    booster.step(first, batch)
    with pytest.raises(fs.LayoutError, match="was used up by an earlier step"):
        booster.step(first, batch)


def test_another_state_of_the_same_booster_may_be_given():
    booster, first = begun("ddp")
    kept = {name: x.clone() for name, x in fs.unshard(first.params).items()}
    second, metrics = booster.step(first, BATCH)
    mesh = fs.make_mesh({"data": 2})
    back = second._replace(params=fs.shard_params(kept, fs.P(), mesh=mesh))
    before, fresh = values(second), copy.deepcopy(second)
    _, again = booster.step(back, BATCH)
    assert torch.equal(again["loss"], metrics["loss"])
    assert all(torch.equal(before[name], x) for name, x in values(second).items())
    with pytest.raises(fs.LayoutError, match="was used up by an earlier step"):
        booster.step(second, BATCH)  # its parameters are there, but what its optimizer keeps has taken another step
    booster.step(fresh, BATCH)
