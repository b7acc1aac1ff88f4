"""Each sample of Colossal-AI's page "Configure Parallelization", as it stands: a small model trains
as on one device.
"""

import itertools

import pytest
import torch
from torch import nn

import fshard as fs
from tests.booster.loops import Loop, assert_close

SAMPLES = {
    "pipeline and tensor tables": {"pipeline": {"size": 2}, "tensor": {"size": 4, "mode": "2d"}},
    "pipeline as a number": {"pipeline": 2, "tensor": {"size": 4, "mode": "2d"}},
    "pipeline and 1d": {"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}},
    "pipeline alone": {"pipeline": 2},
    "tensor alone": {"tensor": {"size": 4, "mode": "2d"}},
    "1d": {"tensor": {"size": 4, "mode": "1d"}},
    "2.5d": {"tensor": {"size": 8, "mode": "2.5d", "depth": 2}},
    "3d": {"tensor": {"size": 8, "mode": "3d"}},
    "pipeline table alone": {"pipeline": {"size": 4}},
    "sequence": {"tensor": {"size": 4, "mode": "sequence"}},
    "nothing": {},
}


def layers():
    """Return four layers of tokens, whose dims all modes divide."""
    widths = [8, 16, 16, 16, 8]
    pairs = itertools.pairwise(widths)
    return nn.Sequential(*[nn.Linear(*pair) for pair in pairs]).double()


def tokens(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 8, 8, generator=generator, dtype=torch.float64)


def batches():
    """Return a loader of two batches of 16 samples; each device gets its own of them."""
    dataset = torch.utils.data.TensorDataset(tokens(32, 0), tokens(32, 1))
    return torch.utils.data.DataLoader(dataset, batch_size=16)


def trained(loop):
    """Return the parameters after a step on each batch of the loader."""
    for x, y in loop.loader:
        loop.step(x, y)
    return loop.state()


@pytest.mark.parametrize("name", SAMPLES)
def test_sample_of_the_page_trains_as_one_device(name):
    config = SAMPLES[name]
    options = {"sample": tokens(8, 9)} if "tensor" in config else {}
    loop_options = {"loader": batches(), "criterion": nn.functional.mse_loss}

    def main():
        return trained(Loop(layers, fs.parallel(config, **options), **loop_options))

    states = fs.run(main, mesh=fs.make_mesh({"all": 8}))
    assert_close(states, trained(Loop(layers, **loop_options)))


def test_configuration_in_stages_has_as_many_microbatches_as_stages():
    assert fs.parallel({"pipeline": 4}).microbatches == 4
    plugin = fs.HybridParallelPlugin(pipeline=2, schedule="zbv")
    assert plugin.microbatches == 4
    assert "microbatches=4" in repr(plugin)


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_microbatches_need_not_divide_the_batch(rows):
    def step(loop):
        loop.step(tokens(rows, 0), tokens(rows, 1))
        return loop.state()

    def main():
        plugin = fs.HybridParallelPlugin(pipeline=2, schedule="zbv")
        return step(Loop(layers, plugin, criterion=nn.functional.mse_loss))

    states = fs.run(main, mesh=fs.make_mesh({"all": 2}))
    assert_close(states, step(Loop(layers, criterion=nn.functional.mse_loss)))
