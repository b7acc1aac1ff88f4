"""`booster.save` and `load`: the steps after are those of the loop that was not interrupted, to the bit, under any plugin."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fshard as fs
from fshard.errors import CheckpointError

DATA = TensorDataset(
    torch.randn(40, 4, 8, generator=torch.Generator().manual_seed(1)),
    torch.randn(40, 4, 8, generator=torch.Generator().manual_seed(2)),
)


class Block(nn.Module):
    def __init__(self, counts):
        super().__init__()
        self.counts = counts
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.25)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.counts:
            self.calls += 1
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.drop(self.out(y.transpose(1, 2).flatten(2)))


def network(counts=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Block(counts), nn.Linear(8, 8), Block(counts), nn.Linear(8, 8))
    model[4].weight = model[0].weight  # of the first and the last stage
    return model


def adamw(model):
    decayed = [x for x in model.parameters() if x.ndim > 1]
    others = [x for x in model.parameters() if x.ndim < 2]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=0.01, betas=(0.8, 0.9))


HYBRID = partial(fs.HybridParallelPlugin, sample=torch.randn(2, 4, 8), microbatches=1)
PLUGINS = {
    "ddp": (fs.DDPPlugin, {"data": 2}),
    "zero1": (partial(fs.ZeroPlugin, stage=1), {"data": 4}),
    "zero2": (partial(fs.ZeroPlugin, stage=2), {"data": 2}),
    "fsdp": (fs.FSDPPlugin, {"data": 4}),
    "stages": (partial(HYBRID, pipeline=2, zero_stage=1), {"pipe": 2, "data": 2}),
    "tensor": (partial(HYBRID, tensor=2, zero_stage=3), {"data": 2, "model": 2}),
    "both": (partial(HYBRID, tensor=2, pipeline=2, zero_stage=2), {"pipe": 2, "data": 1, "model": 2}),
}


def options_of(plugin):
    return getattr(plugin, "keywords", {})


class Loop:
    """What a loop has, on one device."""

    def __init__(self, plugin, make=network, optimizer=adamw, reproducible=True, **options):
        staged = options_of(plugin).get("pipeline", 1) > 1
        self.booster = fs.Booster(plugin(reproducible=reproducible, **({} if staged else {"slices": 4}), **options))
        model = make() if options_of(plugin).get("tensor", 1) == 1 else make(counts=False)
        opt = optimizer(model)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(opt, [2, 5, 5, 9], gamma=0.5)
        loader = DataLoader(DATA, 8, shuffle=True)
        self.model, self.opt, _, self.loader, _ = self.booster.boost(model, opt, None, loader)
        self.parts = (self.model, self.opt, self.schedule, self.loader)
        self.staged = staged

    def step(self, batches):
        if self.staged:
            loss = self.booster.execute_pipeline(batches, self.model, nn.MSELoss(), self.opt)["loss"]
        else:
            x, y = next(batches)
            loss = nn.functional.mse_loss(self.model(x), y)
            self.booster.backward(loss, self.opt)
        self.booster.clip_grad_norm(self.opt, 1.0)
        self.opt.step()
        self.opt.zero_grad()
        self.schedule.step()
        return loss.detach()

    def steps(self, count):
        """Take steps on the loader's batches, in as many epochs as that takes; return losses and what is left."""
        losses = []
        while len(losses) < count:
            batches = iter(self.loader)
            left = len(self.loader) - self.loader.sample // 8
            losses += [self.step(batches) for _ in range(min(count - len(losses), left))]
        state = {name: x.detach().clone() for name, x in self.model.unwrap().state_dict().items()}
        return losses, state, torch.rand(2), self.schedule.get_last_lr(), self.loader.state_dict()


def saved(folder, plugin, before=3, after=3, **options):
    """Return the steps after a save, by the loop that saves."""

    def main():
        loop = Loop(plugin, **options)
        loop.steps(before)
        loop.booster.save(folder, *loop.parts)
        return loop.steps(after)

    return main


def loaded(folder, plugin, after=3, **options):
    def main():
        torch.manual_seed(100)
        loop = Loop(plugin, **{"seed": 5, **options})
        loop.booster.load(folder, *loop.parts)
        return loop.steps(after)

    return main


def equal(found, wanted, what=range(5)):
    for place in what:
        torch.testing.assert_close(found[place], wanted[place], rtol=0, atol=0)


@pytest.mark.parametrize("name", PLUGINS)
def test_loop_continues_with_equal_bits(name, tmp_path):
    plugin, axes = PLUGINS[name]
    mesh = fs.make_mesh(axes)
    wanted = fs.run(saved(tmp_path, plugin), mesh=mesh)
    for one, other in zip(fs.run(loaded(tmp_path, plugin), mesh=mesh), wanted, strict=True):
        equal(one, other)
