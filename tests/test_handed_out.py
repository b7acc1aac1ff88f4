"""What a forward does to parameters beside operations: through memory that was handed out, attributes, swaps and copies."""

import copy

import pytest
import torch
from torch import nn

import fshard as fs
from tests.loops import PLUGINS

np = pytest.importorskip("numpy")


class Frozen(nn.Module):
    """Writes to a frozen layer in some way, which counts from the same call on."""

    def __init__(self, way):
        super().__init__()
        self.layer, self.frozen, self.way = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False), way

    def forward(self, x):
        self.way(self.frozen.weight)
        return self.layer(x) + self.frozen(x)


def by_numpy(x):
    x.detach().numpy()[...] *= 0.9


def by_data(x):
    x.data.numpy()[...] *= 0.9


def by_row(x):
    x.detach()[0].numpy()[...] *= 0.9


def by_array(x):
    np.asarray(x.detach())[...] *= 0.9


def by_dlpack(x):
    torch.from_dlpack(x.detach()).mul_(0.9)


def reading(x):
    assert np.isfinite(x.detach().numpy()).all()


def make(way):
    torch.manual_seed(0)
    return nn.Sequential(Frozen(way), nn.Tanh(), nn.Linear(3, 2), nn.Linear(2, 2)).double()


def batch(step):
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def trained(model):
    return torch.optim.SGD([x for x in model.parameters() if x.requires_grad], lr=0.1)


def alone(way, steps=3):
    model, losses = make(way), []
    opt = trained(model)
    for step in range(steps):
        loss = model(batch(step)).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses, model[0].frozen.weight.detach()


def boosted(way, plugin, steps=3):
    model, losses = make(way), []
    booster = fs.Booster(plugin=plugin)
    model, opt, *_ = booster.boost(model, trained(model))
    for step in range(steps):
        loss = model(batch(step).chunk(2)[fs.axis_index("data")]).square().mean()
        booster.backward(loss, opt)
        opt.step()
        opt.zero_grad()
        losses.append(fs.pmean(loss.detach(), "data").item())
    return losses, model.unwrap()[0].frozen.weight.detach()


def squared(y, _):
    return y.square().mean()


def in_stages(way, steps=1, **options):
    model = make(way)
    booster = fs.Booster(plugin=fs.HybridParallelPlugin(pipeline=2, microbatches=2, **options))
    model, opt, *_ = booster.boost(model, trained(model))
    for step in range(steps):
        x = batch(step)
        booster.execute_pipeline(iter([(x, x)]), model, squared, opt)
        opt.step()
        opt.zero_grad()


@pytest.mark.parametrize("way", [by_numpy, by_data, by_row, by_array, by_dlpack, reading])
@pytest.mark.parametrize("plugin", [*PLUGINS, "reproducible"])
def test_what_is_written_to_the_memory_of_a_frozen_parameter_is_kept(way, plugin):
    made = PLUGINS[plugin]() if plugin in PLUGINS else fs.DDPPlugin(reproducible=True)
    expected = alone(way)
    for found in fs.run(lambda: boosted(way, made), mesh=fs.make_mesh({"data": 2})):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("way", [by_numpy, by_data, by_row, by_array, by_dlpack])
def test_in_stages_it_is_an_error(way, zero):
    with pytest.raises(fs.FshardError, match=r"changed parameters in place: .*frozen\.weight"):
        fs.run(lambda: in_stages(way, zero_stage=zero), mesh=fs.make_mesh({"pipe": 2, "data": 2}))


def test_reading_is_none():
    fs.run(lambda: in_stages(reading), mesh=fs.make_mesh({"pipe": 2}))


def swapping(x):
    torch.utils.swap_tensors(x, nn.Parameter(x.detach() * 0.9, requires_grad=False))


def another_class(x):
    x.__class__ = type("Quantized", (nn.Parameter,), {})


def copying(x):
    copy.deepcopy(x)


def copying_a_layer(x):
    copy.deepcopy({"layer": [x]})


ERRORS = {
    swapping: "a forward swaps a parameter for another",
    another_class: "a forward swaps a parameter for another",
    copying: "a forward makes a deep copy of a parameter",
    copying_a_layer: "a forward makes a deep copy of a parameter",
}


@pytest.mark.parametrize("where", ["ddp", "fsdp", "stages"])
@pytest.mark.parametrize("way", ERRORS)
def test_what_has_no_meaning_is_refused(way, where):
    def main():
        return in_stages(way) if where == "stages" else boosted(way, PLUGINS[where]())

    with pytest.raises(fs.ModuleError, match=ERRORS[way]):
        fs.run(main, mesh=fs.make_mesh({"pipe": 2} if where == "stages" else {"data": 2}))


def noting(x):
    x.calls = getattr(x, "calls", 0) + 1


@pytest.mark.parametrize("where", ["ddp", "fsdp", "stages"])
def test_what_is_set_at_a_parameter_is_told_in_the_first_step(where):
    def main():
        in_stages(noting, steps=2) if where == "stages" else boosted(noting, PLUGINS[where]())

    name = r"\S*0\S*\.frozen\.weight"
    with pytest.warns(UserWarning, match=f"^a forward sets calls of a parameter, {name}, .* self.calls") as told:
        fs.run(main, mesh=fs.make_mesh({"pipe": 2} if where == "stages" else {"data": 2}))
    assert len(told) == (1 if where == "stages" else 2)  # by each device that has it
