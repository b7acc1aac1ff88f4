"""What is set at `model.module` between the steps of a model in stages: the same, whichever device has the stage."""

import pytest
import torch
from torch import nn

import fshard as fs
from tests.loops import momentum


class Counting(nn.Module):
    """Keeps a count, and whether it was called."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls, self.begun, self.scale = nn.Linear(3, 3), 0, False, 1.0

    def forward(self, x):
        self.calls = min(self.calls + 1, 3)
        y = self.layer(x) / self.calls * self.scale
        if not self.begun:
            self.begun, y = True, y * 2
        self.scale *= 0.5
        return y


def make(kind):
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(4))).double()


def batch(step):
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def alone(kind, act, steps=6):
    model, losses = make(kind), []
    opt = momentum(model)
    for step in range(steps):
        act(model[1], step)
        loss = model(batch(step)).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


def in_stages(kind, act, steps=6, **options):
    model, losses = make(kind), []
    booster = fs.Booster(plugin=fs.HybridParallelPlugin(pipeline=2, microbatches=2, **options))
    model, opt, *_ = booster.boost(model, momentum(model))
    for step in range(steps):
        act(model.module[1], step)
        x = batch(step)
        result = booster.execute_pipeline(iter([(x, x)]), model, lambda y, _: y.square().mean(), opt)
        opt.step()
        opt.zero_grad()
        losses.append(result["loss"].item())
    model.unwrap()
    return losses


def same_count(layer, step):
    if step == 4:
        layer.calls = 3


def same_flag(layer, step):
    if step:
        layer.begun = True


def other_count(layer, step):
    layer.calls = 0


def other_flag(layer, step):
    layer.begun = step % 2 == 0


def more(layer, step):
    layer.calls += 1


def another_kind(layer, step):
    if step == 3:
        layer.calls = 0.5
    if step == 4:
        layer.scale = 1


@pytest.mark.parametrize("act", [same_count, same_flag, other_count, other_flag, more, another_kind])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_number_that_a_forward_keeps_is_set(act, schedule):
    for losses in fs.run(lambda: in_stages(Counting, act, schedule=schedule), mesh=fs.make_mesh({"pipe": 2})):
        torch.testing.assert_close(losses, alone(Counting, act), rtol=1e-9, atol=1e-12)
