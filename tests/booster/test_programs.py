"""One table: loops as torch's users write them train as torch on one device under every plugin,
reproducibly to the bit.
"""

import copy
import warnings
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fshard as fs
from tests.booster.loops import Loop, assert_close, on_devices, unequal_bits
from tests.helpers.sampled import in_pairs
from tests.helpers.training import PLUGINS, adamw, momentum


def rows(seed):
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def forward(loop, seed, *args):
    """Run the model on this device's part of a batch of 8 rows."""
    return loop.model(loop.part(rows(seed)), *args)


def mlp():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


def accumulated(loop, *, sync):
    """Without `sync` the step reduces what is left."""
    for step in range(3):
        loop.backward(forward(loop, step).square().mean() / 2, sync=False)
        loop.backward(forward(loop, step + 50).square().mean() / 2, sync=sync)
        loop.step()


def two_forwards_in_one_loss(loop):
    for step in range(2):
        loop.backward((forward(loop, step) * forward(loop, step + 9)).mean())
        loop.step()


def two_forwards_and_backwards(loop):
    for step in range(2):
        losses = [forward(loop, step + seed).square().mean() for seed in (0, 9)]
        for loss in losses:
            loop.backward(loss)
        loop.backward(forward(loop, step + 20).mean())
        loop.step()


def output_fed_back(loop):
    y = forward(loop, 0)
    loop.backward(y.square().mean() + loop.model(y).square().mean())
    loop.step()


def towards_larger_loss(loop):
    """Adversarial training: with a gradient of the inputs."""
    for step in range(3):
        x = loop.part(rows(step)).clone().requires_grad_()
        (g,) = torch.autograd.grad(loop.model(x).square().mean(), x)
        loop.backward(loop.model((x + 0.1 * g.sign()).detach()).square().mean())
        loop.step()


def dropped_between(loop):
    """`zero_grad` between forward and backward drops gradients and keeps the forward."""
    for step in range(3):
        loop.backward(forward(loop, step + 7).sum())
        loss = forward(loop, step).square().mean()
        loop.opt.zero_grad()
        loop.backward(loss)
        loop.opt.step()


def looked_at_before_step(loop):
    """A forward whose loss has no backward, as for a metric."""
    for step in range(2):
        loop.backward(forward(loop, step).square().mean())
        forward(loop, step + 5)
        loop.step()


def closure(loop):
    for step in range(3):

        def again(step=step):
            loop.opt.zero_grad()
            loss = forward(loop, step).square().mean()
            loop.backward(loss)
            return loss

        assert loop.opt.step(again).item() > 0


def grouped(model):
    decayed, others = (
        [x for x in model.parameters() if x.ndim > 1],
        [x for x in model.parameters() if x.ndim < 2],
    )
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.3}, {"params": others}], lr=0.05
    )


def one_cycle(opt):
    return torch.optim.lr_scheduler.OneCycleLR(opt, [0.1, 0.2], total_steps=8)


def scheduled(loop):
    """Values that a scheduler and the loop write to groups are used; the scheduler is made before
    or after boosting.
    """
    schedule = loop.schedule or one_cycle(loop.opt)
    for step in range(8):
        loop.backward(forward(loop, step).square().mean())
        loop.step()
        if step < 7:
            schedule.step()
        loop.opt.param_groups[0]["weight_decay"] = 0.1


class Branches(nn.Module):
    """Uses the second layer in some steps only."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)

    def forward(self, x, both):
        return self.second(self.first(x)) if both else self.first(x)


def partly_used(loop, *, set_to_none):
    for step in range(4):
        loop.backward(forward(loop, step, step % 2 == 0).square().mean())
        loop.step(set_to_none=set_to_none)


class Router(nn.Module):
    """Leaves a loss in an attribute: a tensor, or in lists and dicts."""

    def __init__(self, kind):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.kind = kind

    def forward(self, x):
        y = self.layer(x).tanh()
        loss = y.square().mean()
        self.aux = {"losses": [loss, loss * 2]} if self.kind == "nested" else loss
        return y

    def losses(self):
        return self.aux["losses"] if self.kind == "nested" else [self.aux]


class Routed(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.routers = nn.ModuleList(Router(kind) for _ in range(2))
        self.head = nn.Linear(3, 1)
        self.kind = kind

    def forward(self, x):
        for router in self.routers:
            x = (
                checkpoint(router, x, use_reentrant=False)
                if self.kind == "checkpointed"
                else router(x)
            )
        return self.head(x)


def loss_in_attribute(loop):
    for step in range(3):
        loss = forward(loop, step).square().mean()
        loop.backward(loss + sum(x for router in loop.module.routers for x in router.losses()))
        loop.step()


class Scaled(nn.Module):
    """Multiplies by an attribute, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.tau = 1.0
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x).tanh() * self.tau / self.calls


def plain(loop, *, loss_of=lambda module, y: y.square().mean(), change=lambda module, step: None):
    for step in range(3):
        change(loop.module, step)
        loop.backward(loss_of(loop.module, forward(loop, step)))
        loop.step()


def anneal(module, step):
    module.tau = 0.5**step


def hooked(module, step):
    if step == 1:
        module[0].register_forward_hook(lambda layer, args, output: output * 1.5)
    if step == 2:
        module[1].eval()


def penalised(module, y):
    return y.square().mean() + 0.1 * sum(x.square().sum() for x in module.parameters())


class Momentum(nn.Module):
    """A momentum encoder: frozen parameters that the forward moves towards the trained ones."""

    def __init__(self):
        super().__init__()
        self.online = nn.Linear(3, 3)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for trained, frozen in zip(
                self.online.parameters(), self.target.parameters(), strict=True
            ):
                frozen.mul_(0.9).add_(trained, alpha=0.1)
        return self.online(x) - self.target(x).detach()


OTHER = nn.Parameter(torch.ones(3).double())


class Program(NamedTuple):
    """A loop that trains as torch, or raises an error; `raises`: in reproducible mode, where slices
    have no common graph.
    """

    run: Any
    make: Any = mlp
    optimizer: Any = momentum
    schedule: Any = None
    options: Any = ()
    raises: str = ""
    error: str = ""


ATTRIBUTE = "what a layer left in an attribute, beside the model's outputs"
INPUT = r"must not need a gradient, .*detach\(\) them, or leave reproducible"
PROGRAMS = {
    "accumulated, reduced at last": Program(partial(accumulated, sync=True)),
    "accumulated, reduced by the step": Program(partial(accumulated, sync=False)),
    "two forwards in one loss": Program(two_forwards_in_one_loss),
    "two forwards and backwards": Program(two_forwards_and_backwards),
    "output fed back": Program(output_fed_back, raises=INPUT),
    "gradient of inputs": Program(towards_larger_loss, raises=INPUT),
    "gradients dropped between": Program(dropped_between),
    "a look before the step": Program(looked_at_before_step),
    "closure": Program(closure),
    "scheduler made before": Program(scheduled, optimizer=grouped, schedule=one_cycle),
    "scheduler made after": Program(scheduled, optimizer=grouped),
    "unused is skipped": Program(partial(partly_used, set_to_none=True), Branches, adamw),
    "unused gets zeros": Program(
        partial(partly_used, set_to_none=False), Branches, adamw, options=[("unused", "zero")]
    ),
    "parameters in no group": Program(closure, optimizer=lambda model: momentum(model[0])),
    "hooks and modes": Program(
        partial(plain, change=hooked),
        lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout(1.0), nn.Linear(3, 3)),
    ),
    "momentum encoder": Program(plain, Momentum, options=[("buffers", "target.**")]),
    "momentum encoder, undeclared": Program(
        plain, Momentum, error=r"writes to .*target.*Declare a frozen parameter"
    ),
    "parameters of no boosted model": Program(
        partial(plain, loss_of=lambda module, y: (y * OTHER).mean()),
        error=r"parameters that no boosted model has, of shapes \(3,\)",
    ),
    **{
        f"loss in an attribute, {kind}": Program(
            loss_in_attribute, partial(Routed, kind), raises=ATTRIBUTE
        )
        for kind in ("tensor", "nested", "checkpointed")
    },
}
NOT_BY_SLICES = {
    "attributes": Program(partial(plain, change=anneal), Scaled),
    "penalty on parameters": Program(partial(plain, loss_of=penalised)),
}
"""Whose loss depends on more than a sample."""


def states(name, plugin, n, **options):
    """Return the state of the model on each device."""
    program = (PROGRAMS | NOT_BY_SLICES)[name]
    plugin = PLUGINS[plugin](**dict(program.options), **options)

    def run(loop):
        program.run(loop)
        return loop.state()

    return on_devices(
        run,
        plugin,
        n,
        lambda: program.make().double(),
        program.optimizer,
        schedule=program.schedule,
    )


@cache
def by_torch(name):
    program = (PROGRAMS | NOT_BY_SLICES)[name]
    loop = Loop(lambda: program.make().double(), None, program.optimizer, schedule=program.schedule)
    program.run(loop)
    return loop.state()


@cache
def on_one_device(name):
    return states(name, "ddp", 1, reproducible=True)[0]


@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("name", [*PROGRAMS, *NOT_BY_SLICES])
def test_program_trains_as_torch(name, plugin):
    program = (PROGRAMS | NOT_BY_SLICES)[name]
    with warnings.catch_warnings(), raising(program.error):
        warnings.simplefilter("error")
        assert_close(states(name, plugin, 2), by_torch(name))


def raising(error):
    return (
        pytest.raises((ValueError, fs.errors.ModuleError), match=error) if error else nullcontext()
    )


@pytest.mark.parametrize(
    ("name", "plugin", "n"), in_pairs(PROGRAMS, ("ddp", "zero 1", "fsdp"), (2, 4))
)
def test_reproducible_program_has_equal_bits(name, plugin, n):
    with raising(PROGRAMS[name].error or PROGRAMS[name].raises):
        results = states(name, plugin, n, reproducible=True)
        assert_close([on_one_device(name)], by_torch(name))
        assert not any(unequal_bits(state, on_one_device(name)) for state in results)
