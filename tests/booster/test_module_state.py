"""Module state is parameters and buffers; everything else is private to the device, as under DDP."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fshard as fs

D = 4
PLUGINS = {
    "ddp": fs.DDPPlugin,
    "zero1": fs.ZeroPlugin,
    "zero2": lambda **more: fs.ZeroPlugin(stage=2, **more),
    "fsdp": fs.FSDPPlugin,
}
each_plugin = pytest.mark.parametrize("plugin", PLUGINS)


def batches(count=3, rows=4):
    return [torch.randn(rows, D, generator=torch.Generator().manual_seed(step)).double() for step in range(count)]


def trained(make, plugin=None, n=1, loss_of=None, during=None, **options):
    """Return the parameters and buffers after a loop; on one device by torch, or boosted, inside of fs.run."""
    torch.manual_seed(0)
    module = make().double()
    model, opt, booster = module, torch.optim.AdamW([x for x in module.parameters() if x.requires_grad], lr=0.1), None
    if plugin is not None:
        booster = fs.Booster(PLUGINS[plugin](**options))
        model, opt, *_ = booster.boost(model, opt)
    for step, x in enumerate(batches()):
        if during is not None:
            during(module, step)
        own = x if booster is None else x.chunk(n)[fs.axis_index("data")]
        output = model(own)
        loss = output.square().mean() if loss_of is None else loss_of(module, output)
        loss.backward() if booster is None else booster.backward(loss, opt)
        opt.step()
        opt.zero_grad()
    done = module if booster is None else model.unwrap()
    return {name: x.detach().clone() for name, x in done.state_dict().items()}


def assert_trains_as_torch(make, plugin, n=2, options=None, atol=1e-12, **how):
    for found in fs.run(lambda: trained(make, plugin, n, **how, **(options or {})), mesh=fs.make_mesh({"data": n})):
        torch.testing.assert_close(found, trained(make, **how), rtol=0, atol=atol)


class Scaled(nn.Module):
    """Multiplies by an attribute, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.layer, self.tau, self.calls = nn.Linear(D, D), 1.0, 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x).tanh() * self.tau / self.calls


@each_plugin
def test_module_attributes_take_effect(plugin):
    def anneal(module, step):
        module.tau = 0.5**step

    assert_trains_as_torch(Scaled, plugin, during=anneal)


@each_plugin
def test_layer_hooks_and_modes_take_effect(plugin):
    def change(module, step):
        if step == 1:
            module[0].register_forward_hook(lambda layer, args, output: output * 1.5)
        if step == 2:
            module[1].eval()

    assert_trains_as_torch(
        lambda: nn.Sequential(nn.Linear(D, D), nn.Dropout(1.0), nn.Linear(D, D)), plugin, during=change
    )


@each_plugin
def test_penalty_on_parameters_after_forward_trains_as_torch(plugin):
    def penalised(module, output):
        return output.square().mean() + 0.1 * sum(x.square().sum() for x in module.parameters())

    assert_trains_as_torch(
        lambda: nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)), plugin, loss_of=penalised
    )


class Momentum(nn.Module):
    """A momentum encoder: frozen parameters that the forward moves towards the trained ones."""

    def __init__(self):
        super().__init__()
        self.online = nn.Linear(D, D)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for mine, other in zip(self.online.parameters(), self.target.parameters(), strict=True):
                other.mul_(0.9).add_(mine, alpha=0.1)
        return self.online(x) - self.target(x).detach()


@each_plugin
def test_frozen_parameters_declared_as_buffers_are_updated(plugin):
    # AdamW divides gradients near zero by their own size, which magnifies the last digits of a mean over devices
    assert_trains_as_torch(Momentum, plugin, options={"buffers": "target.**"}, atol=1e-8)


@each_plugin
def test_undeclared_write_to_frozen_parameter_raises(plugin):
    with pytest.raises(fs.errors.ModuleError, match=r"writes to .*target.*Declare a frozen parameter"):
        fs.run(lambda: trained(Momentum, plugin, 2), mesh=fs.make_mesh({"data": 2}))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.Tanh()) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@each_plugin
def test_checkpoint_in_forward_trains_as_torch(plugin):
    assert_trains_as_torch(Checkpointed, plugin, n=1, during=lambda module, step: module.eval())


def test_reentrant_checkpoint_raises():
    class Reentrant(Checkpointed):
        def forward(self, x):
            return checkpoint(self.blocks[0], x.requires_grad_(), use_reentrant=True)

    with pytest.raises(fs.errors.ModuleError, match=r"reentrant checkpoint.*use_reentrant=False"):
        fs.run(lambda: trained(Reentrant, "fsdp"), mesh=fs.make_mesh({"data": 1}))


def test_loss_on_unboosted_parameters_raises():
    other = nn.Parameter(torch.ones(D).double())
    with pytest.raises(fs.errors.ModuleError, match=r"parameters that no boosted model has, of shapes \(4,\)"):
        fs.run(
            lambda: trained(Scaled, "ddp", loss_of=lambda module, output: (output * other).mean()),
            mesh=fs.make_mesh({"data": 1}),
        )


def test_module_boosted_twice_or_by_two_devices_raises():
    shared = nn.Linear(2, 2)
    with pytest.raises(fs.errors.ModuleError, match="has been boosted already"):
        fs.run(lambda: fs.Booster().boost(shared), mesh=fs.make_mesh({"data": 2}))

    def twice():
        module = nn.Linear(2, 2)
        fs.Booster().boost(module)
        fs.Booster().boost(module)

    with pytest.raises(fs.errors.ModuleError, match="has been boosted already"):
        fs.run(twice, mesh=fs.make_mesh({"data": 1}))


def test_stages_run_given_layers_in_place():
    seen = []

    def main():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D), nn.BatchNorm1d(D))
        for number, layer in enumerate(module):
            layer.register_forward_hook(lambda layer, args, output, number=number: seen.append(number))
        booster = fs.Booster(fs.HybridParallelPlugin(pipeline=2, microbatches=2))
        model, opt, *_ = booster.boost(module, torch.optim.SGD(module.parameters(), lr=0.1))
        before = copy.deepcopy(model.unwrap().state_dict())
        booster.execute_pipeline(iter([(torch.randn(4, D), torch.zeros(4, D))]), model, nn.MSELoss(), opt)
        opt.step()
        after = model.unwrap().state_dict()
        return [name for name in after if not torch.equal(after[name], before[name])]

    changed = fs.run(main, mesh=fs.make_mesh({"data": 1, "pipe": 2}))
    assert sorted(seen) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert all({"0.weight", "2.weight", "3.running_mean", "3.num_batches_tracked"} <= {*names} for names in changed)
