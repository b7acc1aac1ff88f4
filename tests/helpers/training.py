"""The oracle of training: a module in torch's loop on one device, and in every way of training on
several.

In float64, where devices and one alone differ by much less than any mistake; or, in reproducible
mode, to the bit.
"""

from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn

import fshard as fs
from fshard import P

PLUGINS = {
    "ddp": fs.DDPPlugin,
    "zero 1": partial(fs.ZeroPlugin, stage=1),
    "zero 2": partial(fs.ZeroPlugin, stage=2),
    "fsdp": fs.FSDPPlugin,
}
STEPS = 3


class Case(NamedTuple):
    """A module, its inputs, how it is called, and how a loss is made of its output."""

    make: Any
    to_inputs: Any = lambda x: x
    to_loss: Any = lambda y: y.square().mean()
    forward: Any = lambda model, x: model(x)
    width: int = 3
    ways: tuple[str, ...] = ("loop", "booster.step", "train_step")

    def batch(self, step, dtype, n=1, at=0):
        """Return a device's part of a batch: of the same 8 samples on any number of devices."""
        draw = torch.Generator().manual_seed(step)
        return self.to_inputs(
            torch.randn(8, self.width, generator=draw, dtype=torch.float64).chunk(n)[at].to(dtype)
        )

    def loss(self, model, *which):
        return self.to_loss(self.forward(model, self.batch(*which)))


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


OURS = {momentum: fs.optim.sgd(0.1, momentum=0.9), adamw: fs.optim.adamw(0.01, fused=False)}


@cache
def by_torch(case, optimizer=momentum, clip=None):
    """Return the losses and the trained parameters of torch alone."""
    torch.manual_seed(1)
    model = case.make().double()
    opt = optimizer(model)
    losses = []
    for step in range(STEPS):
        loss = case.loss(model, step, torch.float64)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses, {name: x.detach() for name, x in model.named_parameters()}


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


def stepped(case, plugin, n, optimizer=momentum):
    """Return the losses and the trained parameters of `booster.step`, whose batch is that of all
    devices.
    """
    torch.manual_seed(1)
    model = case.make().double()
    booster = fs.Booster(plugin=PLUGINS[plugin](mesh=fs.make_mesh({"data": n})))
    state = booster.init(model, optimizer(model), lambda y, _: case.to_loss(y))
    losses = []
    for step in range(STEPS):
        state, metrics = booster.step(state, (case.batch(step, torch.float64), torch.zeros(8)))
        losses.append(metrics["loss"].item())
    return losses, fs.unshard(state.params)


def by_train_step(case, stage, n, optimizer=momentum, wrap=lambda opt: opt, **options):
    """Return the losses and the trained parameters of `fs.train_step` on the functionalized module,
    a unit for each leaf.

    `wrap` makes another optimizer of one.
    """
    torch.manual_seed(1)
    module = case.make().double()
    mesh = fs.make_mesh({"data": n})
    apply, params, buffers = fs.functionalize(module)
    opt = fs.partition_optimizer(wrap(OURS[optimizer]), mesh=mesh, axis="data", stage=stage)
    params = fs.shard_params(params, fs.fsdp("data", unit=1) if stage == 3 else P(), mesh=mesh)

    def loss_fn(params, x):
        return case.to_loss(apply(params, buffers, x)[0])

    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), **options)
    state = opt.init(params)
    losses = []
    for seed in range(STEPS):
        params, state, metrics = step(params, state, case.batch(seed, torch.float64))
        losses.append(metrics["loss"].item())
    return losses, fs.unshard(params)


WAYS = {
    "loop": lambda case, stage, n, optimizer: boosted(
        case, [*PLUGINS.values()][stage](), n, optimizer
    ),
    "booster.step": lambda case, stage, n, optimizer: [
        stepped(case, [*PLUGINS][stage], n, optimizer)
    ],
    "train_step": lambda case, stage, n, optimizer: [by_train_step(case, stage, n, optimizer)],
}
"""Each returns losses and parameters, of each device or of all."""


def assert_trained_alike(case, *results, optimizer=momentum, clip=None, tolerance=1e-9):
    """Compare losses and trained parameters with torch's on one device."""
    losses, params = by_torch(case, optimizer, clip)
    for losses_of_device, trained in results:
        torch.testing.assert_close(losses_of_device, losses, rtol=tolerance, atol=tolerance)
        assert trained.keys() == params.keys()
        for key, x in params.items():
            torch.testing.assert_close(trained[key], x, rtol=tolerance, atol=tolerance)


def bits(case, plugin, n):
    """Return what each device has learnt in reproducible mode, with dropout."""
    actual = boosted(
        case, PLUGINS[plugin](reproducible=True), n, adamw, torch.float32, dropout=0.25
    )
    return [learnt for _, learnt in actual]
