"""A state that has a row for each sample, as an RNN's hidden one, has no mean over devices: who keeps one is told."""

import warnings

import pytest
import torch
from torch import nn

import fshard as fs

WIDTH = 3


class Recurrent(nn.Module):
    """Goes on where it was; `dims` of its state come before that of samples."""

    def __init__(self, dims=0):
        super().__init__()
        self.cell, self.hidden, self.dims = nn.Linear(2 * WIDTH, WIDTH), None, dims

    def forward(self, x):
        before = x.new_zeros(len(x), WIDTH) if self.hidden is None else self.hidden.reshape(len(x), WIDTH)
        after = self.cell(torch.cat((x, before.detach()), -1)).tanh()
        self.hidden = after.detach().reshape(*[1] * self.dims, len(x), WIDTH)
        return after


class Averaging(nn.Module):
    """Keeps what has no row for each sample, though it has as many dims."""

    def __init__(self):
        super().__init__()
        self.layer, self.mean = nn.Linear(WIDTH, WIDTH), torch.zeros(WIDTH, WIDTH)

    def forward(self, x):
        y = self.layer(x)
        self.mean = 0.9 * self.mean + 0.1 * (y.detach().T @ y.detach())
        return y


class Masked(Averaging):
    """Makes a mask once, as large as a batch by chance."""

    def __init__(self):
        super().__init__()
        self.mask = None

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.ones(4, 4, dtype=torch.bool).tril()
        return self.layer(x) * self.mask.any()


def told(model, plugin, mesh, rows):
    """Return the warnings of two steps."""

    def main():
        torch.manual_seed(0)
        own = model()
        booster = fs.Booster(plugin)
        boosted, opt, *_ = booster.boost(own, torch.optim.SGD(own.parameters(), lr=0.1))
        for _ in range(2):
            if isinstance(plugin, fs.HybridParallelPlugin):
                x = torch.arange(1.0, rows + 1)[:, None].expand(-1, WIDTH)
                booster.execute_pipeline(iter([(x, x)]), boosted, nn.functional.mse_loss, opt)
            else:
                x = torch.arange(1.0, rows + 1)[:, None].expand(-1, WIDTH) * (1 + fs.axis_index("data"))
                booster.backward(boosted(x).square().mean(), opt)
            opt.step()
            opt.zero_grad()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fs.run(main, mesh=fs.make_mesh(mesh))
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("dims", [0, 1])
@pytest.mark.parametrize(
    ("plugin", "mesh"),
    [
        (fs.DDPPlugin(), {"data": 2}),
        (fs.FSDPPlugin(), {"data": 2}),
        (fs.ZeroPlugin(stage=1, reproducible=True, slices=2), {"data": 1}),
    ],
    ids=["ddp", "fsdp", "slices"],
)
def test_a_state_of_samples_is_told(plugin, mesh, dims):
    messages = told(lambda: Recurrent(dims), plugin, mesh, 4)
    assert messages
    assert all("hidden is kept from call to call, and seems to have a row for each sample" in each for each in messages)


def test_it_is_told_in_stages():
    plugin = fs.HybridParallelPlugin(pipeline=2, microbatches=2)
    messages = told(lambda: nn.Sequential(Recurrent(), Recurrent()), plugin, {"pipe": 2}, 4)
    assert len({*messages}) == 2
    assert all("hidden is kept" in each for each in messages)


def test_it_is_told_in_a_functional_step():
    apply, params, buffers = fs.functionalize(Recurrent())
    mesh = fs.make_mesh({"data": 2})

    def loss_fn(params, buffers, batch):
        y, buffers = apply(params, buffers, batch)
        return y.square().mean(), buffers

    with pytest.warns(UserWarning, match="hidden is kept from call to call"):
        fs.value_and_grad(loss_fn, mesh=mesh, batch=fs.P("data"), has_buffers=True)(
            fs.shard_params(params, fs.fsdp("data"), mesh=mesh), buffers, torch.arange(4.0)[:, None].expand(-1, WIDTH)
        )


@pytest.mark.parametrize(
    ("model", "plugin", "mesh", "rows"),
    [
        (Recurrent, fs.DDPPlugin(), {"data": 1}, 4),  # nobody else has samples
        (Recurrent, fs.DDPPlugin(), {"data": 2}, 1),
        (Averaging, fs.DDPPlugin(), {"data": 2}, 4),
        (Masked, fs.DDPPlugin(), {"data": 2}, 4),
    ],
    ids=["one device", "one sample", "a mean", "a mask"],
)
def test_nothing_is_told_of_others(model, plugin, mesh, rows):
    assert not told(model, plugin, mesh, rows)
