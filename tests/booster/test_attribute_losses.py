"""Losses that layers leave in attributes, as routers do, train as with torch, or raise in reproducible mode."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fshard as fs

ROWS, WIDTH = 4, 5
STEPS = 3
PLUGINS = {
    "ddp": fs.DDPPlugin,
    "zero 2": lambda **more: fs.ZeroPlugin(stage=2, **more),
    "fsdp": fs.FSDPPlugin,
}


class Router(nn.Module):
    """Leaves a loss in an attribute: a tensor, or in lists and dicts."""

    def __init__(self, kind):
        super().__init__()
        self.layer, self.kind = nn.Linear(WIDTH, WIDTH), kind

    def forward(self, x):
        y = self.layer(x).tanh()
        loss = y.square().mean()
        self.aux = {"losses": [loss, loss * 2]} if self.kind == "nested" else loss
        return y


KINDS = ["tensor", "nested", "checkpointed"]


def losses_in(aux):
    if isinstance(aux, torch.Tensor):
        return [aux]
    values = aux.values() if isinstance(aux, dict) else aux
    return [x for each in values if isinstance(each, (torch.Tensor, list)) for x in losses_in(each)]


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.routers, self.head, self.kind = nn.ModuleList(Router(kind) for _ in range(2)), nn.Linear(WIDTH, 1), kind

    def forward(self, x):
        for router in self.routers:
            x = checkpoint(router, x, use_reentrant=False) if self.kind == "checkpointed" else router(x)
        return self.head(x)


def batch(step, rows=ROWS):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(step)).double()


def trained(kind, plugin=None, n=1):
    """Return the parameters after a loop whose loss has what routers have left."""
    torch.manual_seed(0)
    model = Net(kind).double()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    booster, whole = None, model
    if plugin is not None:
        booster = fs.Booster(plugin)
        model, opt, *_ = booster.boost(model, opt)
        whole = model.module
    for step in range(STEPS):
        rows = batch(step)
        own = rows if plugin is None else rows.chunk(n)[fs.axis_index("data")]
        loss = model(own).square().mean()
        loss = loss + sum(x for router in whole.routers for x in losses_in(router.aux))
        loss.backward() if booster is None else booster.backward(loss, opt)
        opt.step()
        opt.zero_grad()
    return [x.detach() for x in (model if booster is None else model.unwrap()).parameters()]


@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("kind", KINDS)
def test_loss_left_in_attribute_trains_as_torch(kind, plugin):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = fs.run(lambda: trained(kind, PLUGINS[plugin](), n=2), mesh=fs.make_mesh({"data": 2}))
    for own in found:
        torch.testing.assert_close(own, trained(kind), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_reproducible_loss_left_in_attribute_raises(kind):
    with pytest.raises(fs.errors.ModuleError, match=r"what a layer left in an attribute, beside the model's outputs"):
        fs.run(lambda: trained(kind, fs.DDPPlugin(reproducible=True, slices=1)), mesh=fs.make_mesh({"data": 1}))
