"""Forwards that end in an error, and outputs that nobody goes back through: what they have made is let go."""

import gc

import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy

import fshard as fs

PLUGINS = {"ddp": fs.DDPPlugin, "zero 2": lambda: fs.ZeroPlugin(stage=2), "fsdp": fs.FSDPPlugin}
WIDE, ROWS = 37, 3


def fails(model, x):
    with pytest.raises(RuntimeError):
        model(torch.cat([x, x], 1))


def drops(model, x):
    model(x).sum().item()


def drops_what_failed_midway(model, x):
    model.module[3].p = 2.0
    with pytest.raises(ValueError, match="dropout"):
        model(x)
    model.module[3].p = 0.0


def _is_wide(x):
    """Return whether something is a tensor of these tests; those of others may have no shape yet."""
    return issubclass(type(x), torch.Tensor) and not is_lazy(x) and WIDE in x.shape


@pytest.mark.parametrize("does", [fails, drops, drops_what_failed_midway])
@pytest.mark.parametrize("plugin", PLUGINS)
def test_failed_and_evaluated_calls_leave_no_state(plugin, does):
    x, counts = torch.randn(ROWS, 6), list[int]()
    gc.collect()
    gc.freeze()  # only what is made from here on is looked at

    def main():
        layers = nn.Linear(6, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE), nn.Dropout(0.0), nn.Sigmoid(), nn.Linear(WIDE, 2)
        model, booster = nn.Sequential(*layers), fs.Booster(PLUGINS[plugin]())
        model, opt, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(10):
            does(model, x)
            booster.backward(model(x).square().mean(), opt)
            opt.step(), opt.zero_grad()
            if step in (1, 9):
                gc.collect()
                counts.append(sum(map(_is_wide, gc.get_objects())))

    fs.run(main, mesh=fs.make_mesh({"data": 2}))
    assert max(counts[2:]) <= max(counts[:2]) + 6, counts
