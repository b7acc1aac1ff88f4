"""A module in torch's loop: on one device by torch alone, and on several by the Booster under each plugin, to be compared.

In float64, where devices and one alone differ by much less than any mistake; or, in reproducible mode, to the bit.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

import fshard as fs

PLUGINS = {
    "ddp": fs.DDPPlugin,
    "zero 1": partial(fs.ZeroPlugin, stage=1),
    "zero 2": partial(fs.ZeroPlugin, stage=2),
    "fsdp": fs.FSDPPlugin,
}
STEPS = 3


class Case(NamedTuple):
    """A module, what it is given, how it is called, and how a loss is made of its output."""

    make: Any
    given: Any = lambda x: x
    taken: Any = lambda y: y.square().mean()
    called: Any = lambda model, x: model(x)

    def batch(self, step, dtype, n=1, at=0):
        """Return a device's part of a batch: of the same 8 samples on any number of devices."""
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64).chunk(n)[at]
        return self.given(x.to(dtype))

    def loss(self, model, *which):
        return self.taken(self.called(model, self.batch(*which)))


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def by_torch(case):
    """Return the losses, and what was learnt."""
    torch.manual_seed(1)
    model = case.make().double()
    opt = momentum(model)
    losses = []
    for step in range(STEPS):
        loss = case.loss(model, step, torch.float64)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses, dict(model.named_parameters())


def boosted(case, plugin, n, optimizer=momentum, dtype=torch.float64, dropout=None):
    """Return the mean losses of all devices, and what each has learnt."""

    def main():
        torch.manual_seed(1)
        model = case.make().to(dtype)
        for part in model.modules():
            if dropout is not None and isinstance(part, nn.Dropout):
                part.p = dropout
        booster = fs.Booster(plugin=plugin)
        model, opt, *_ = booster.boost(model, optimizer(model))
        losses = []
        for step in range(STEPS):
            loss = case.loss(model, step, dtype, n, fs.axis_index("data"))
            booster.backward(loss, opt)
            opt.step()
            opt.zero_grad()
            losses.append(fs.pmean(loss.detach(), "data").item())
        return losses, dict(model.unwrap().named_parameters())

    return fs.run(main, mesh=fs.make_mesh({"data": n}))


def stepped(case, plugin, n):
    """Return the losses, and what was learnt, by the functional form, which is given the batch of all devices."""
    torch.manual_seed(1)
    model = case.make().double()
    booster = fs.Booster(plugin=PLUGINS[plugin](mesh=fs.make_mesh({"data": n})))
    state = booster.init(model, momentum(model), lambda y, _: case.taken(y))
    losses = []
    for step in range(STEPS):
        state, metrics = booster.step(state, (case.batch(step, torch.float64), torch.zeros(8)))
        losses.append(metrics["loss"].item())
    return losses, fs.unshard(state.params)


def assert_trained_alike(case, *found):
    """Hold losses, and what was learnt, to torch's on one device."""
    losses, params = by_torch(case)
    for own, learnt in found:
        torch.testing.assert_close(own, losses, rtol=1e-9, atol=1e-10)
        assert learnt.keys() == params.keys()
        for key, x in params.items():
            torch.testing.assert_close(learnt[key], x, rtol=1e-9, atol=1e-10)


def bits(case, plugin, n):
    """Return what each device has learnt in reproducible mode, with dropout."""
    found = boosted(case, PLUGINS[plugin](reproducible=True), n, adamw, torch.float32, dropout=0.25)
    return [learnt for _, learnt in found]
