"""Parameters that a forward writes to: frozen ones are kept, as buffers are; trained ones belong to the optimizer."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fshard as fs

D, ROWS, STEPS = 4, 8, 4


class Momentum(nn.Module):
    """A key encoder that follows the query encoder, as in MoCo."""

    def __init__(self):
        super().__init__()
        self.query = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))
        self.key = copy.deepcopy(self.query).requires_grad_(False)

    @torch.no_grad()
    def follow(self):
        for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
            key.data = key.data * 0.5 + query.data * 0.5

    def forward(self, x):
        if self.training:
            self.follow()
        with torch.no_grad():
            key = self.key(x)
        return self.query(x) - 0.5 * key


class ByData(Momentum):
    def follow(self):
        for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
            key.data.mul_(0.5).add_(query.data, alpha=0.5)


class InPlace(Momentum):
    @torch.no_grad()
    def follow(self):
        for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
            key.lerp_(query, 0.5)


class Together(Momentum):
    @torch.no_grad()
    def follow(self):
        keys, queries = [*self.key.parameters()], [*self.query.parameters()]
        torch._foreach_mul_(keys, 0.5)
        torch._foreach_add_(keys, queries, alpha=0.5)


class Out(Momentum):
    @torch.no_grad()
    def follow(self):
        for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
            torch.lerp(key, query, 0.5, out=key)


class Items(Momentum):
    @torch.no_grad()
    def follow(self):
        for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
            key[:] = key * 0.5 + query * 0.5


class Sometimes(Momentum):
    """Takes the weights over in every second step, by a state_dict."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def follow(self):
        self.calls += 1
        if self.calls % 2 == 0:
            self.key.load_state_dict(self.query.state_dict())


class Codebook(nn.Module):
    """A number of its own that it anneals, and a table that it moves by what it has seen."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, D)
        self.heat = nn.Parameter(torch.ones(()), requires_grad=False)
        self.table = nn.Parameter(torch.randn(D, generator=torch.Generator().manual_seed(3)), requires_grad=False)

    def forward(self, x):
        y = self.layer(x)
        if self.training:
            self.heat.data *= 0.9
            self.table.data += 0.1 * self.layer.bias.detach()
        return y * self.heat + self.table.data


class ByNumpy(Momentum):
    """Writes where no version counts it, to what a frozen parameter shows as it is."""

    def follow(self):
        for at, (key, query) in enumerate(zip(self.key.parameters(), self.query.parameters(), strict=True)):
            array = torch.from_dlpack(key).numpy() if at else key.numpy()
            array[...] = 0.5 * array + 0.5 * query.detach().numpy()


KINDS = [ByNumpy, Momentum, ByData, InPlace, Together, Out, Items, Sometimes, Codebook]
WAYS = {
    "ddp": (fs.DDPPlugin(), 1),
    "ddp on two": (fs.DDPPlugin(), 2),
    "zero 1": (fs.ZeroPlugin(stage=1), 2),
    "zero 2": (fs.ZeroPlugin(stage=2), 2),
    "fsdp": (fs.FSDPPlugin(), 2),
    "fsdp on one": (fs.FSDPPlugin(), 1),
    "reproducible": (fs.FSDPPlugin(reproducible=True), 2),
    "kept whole": (fs.FSDPPlugin(reshard_after_forward=False), 2),
}


def made(kind):
    torch.manual_seed(0)
    return kind()


def batch(step):
    return torch.randn(ROWS, D, generator=torch.Generator().manual_seed(step))


def by_torch(kind):
    model = made(kind)
    opt = torch.optim.SGD([x for x in model.parameters() if x.requires_grad], lr=0.5)
    losses = []
    for step in range(STEPS):
        loss = model(batch(step)).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses, model.eval()(batch(9)).detach(), model.state_dict()


def assert_as_torch(kind, way):
    """Hold losses, outputs and what was learnt to torch's loop; and the model that was given is left as it was."""
    plugin, n = WAYS[way]

    def main():
        model = made(kind)
        before = copy.deepcopy(model.state_dict())
        booster = fs.Booster(plugin=plugin)
        boosted, opt, *_ = booster.boost(
            model, torch.optim.SGD([x for x in model.parameters() if x.requires_grad], lr=0.5)
        )
        losses = []
        for step in range(STEPS):
            loss = boosted(batch(step).chunk(n)[fs.axis_index("data")]).square().mean()
            booster.backward(loss, opt)
            opt.step()
            opt.zero_grad()
            losses.append(fs.pmean(loss.detach(), "data").item())
        boosted.eval()
        with torch.no_grad():
            seen = boosted(batch(9))
        assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
        return losses, seen, boosted.unwrap().state_dict()

    expected = by_torch(kind)
    for found in fs.run(main, mesh=fs.make_mesh({"data": n})):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_frozen_parameters_that_a_forward_writes_to_are_kept(kind, way):
    assert_as_torch(kind, way)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2])
def test_functional_steps_keep_them(kind, n):
    model = made(kind)
    booster = fs.Booster(plugin=fs.FSDPPlugin(mesh=fs.make_mesh({"data": n})))
    opt = torch.optim.SGD([x for x in model.parameters() if x.requires_grad], lr=0.5)
    state, losses = booster.init(model, opt, lambda y, _: y.square().mean()), []
    for step in range(STEPS):
        first = state
        state, metrics = booster.step(state, (batch(step), batch(step)))
        losses.append(metrics["loss"].item())
    del first
    torch.testing.assert_close(losses, by_torch(kind)[0])


class ReadsData(Momentum):
    """Only reads, whatever way."""

    def follow(self):
        self.read = sum(x.data.norm() for x in self.parameters()) + sum(x.detach().sum() for x in self.key.parameters())


def test_who_only_reads_keeps_nothing():
    apply, params, buffers = fs.functionalize(made(ReadsData))
    _, after = apply(params, buffers, batch(0))
    assert not [name for name in after if "weight" in name or "bias" in name]


def test_apply_stays_pure():
    for kind in KINDS:
        apply, params, buffers = fs.functionalize(made(kind))
        params = {name: x + 0.1 if x.requires_grad else x for name, x in params.items()}
        before = {name: x.clone() for name, x in params.items()}
        first, after = apply(params, buffers, batch(0))
        again, _ = apply(params, buffers, batch(0))
        assert torch.equal(first, again) and all(torch.equal(x, before[name]) for name, x in params.items())
        later, _ = apply(params, after, batch(0))
        assert not torch.equal(later, first)


class Clamped(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x):
        self.layer.weight.data.clamp_(-0.1, 0.1)
        return self.layer(x)


class Rebound(Clamped):
    def forward(self, x):
        self.layer.weight.data = self.layer.weight.data.clamp(-0.1, 0.1)
        return self.layer(x)


class Written(Clamped):
    def forward(self, x):
        with torch.no_grad():
            self.layer.weight.clamp_(-0.1, 0.1)
        return self.layer(x)


@pytest.mark.parametrize("kind", [Clamped, Rebound, Written])
@pytest.mark.parametrize("way", WAYS)
def test_trained_parameters_are_the_optimizers(kind, way):
    plugin, n = WAYS[way]

    def main():
        model = made(kind)
        booster = fs.Booster(plugin=plugin)
        boosted, opt, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5))
        loss = boosted(batch(0).chunk(n)[fs.axis_index("data")]).square().mean()
        booster.backward(loss, opt)
        opt.step()

    with pytest.raises(fs.FshardError, match=r"(in place: |given )layer\.weight.*requires_grad_\(False\)"):
        fs.run(main, mesh=fs.make_mesh({"data": n}))


@pytest.mark.parametrize("kind", [Clamped, Rebound, Written, ByData, Momentum, InPlace])
@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_stages_refuse_writes_to_any(kind, zero_stage):
    plugin = fs.HybridParallelPlugin(pipeline=2, microbatches=2, zero_stage=zero_stage)

    def main():
        model = nn.Sequential(made(kind), nn.Linear(D, D))
        booster = fs.Booster(plugin=plugin)
        opt = torch.optim.SGD([x for x in model.parameters() if x.requires_grad], lr=0.5)
        boosted, opt, *_ = booster.boost(model, opt)
        booster.execute_pipeline(iter([(batch(0), batch(1))]), boosted, nn.MSELoss(), opt)

    name = r"0\[0\]\.layer\.weight" if issubclass(kind, Clamped) else r"0\[0\]\.key\[0\]\.weight"
    with pytest.raises(fs.LayoutError, match=rf"execute_pipeline: stages changed parameters in place: .*{name}"):
        fs.run(main, mesh=fs.make_mesh({"data": 2, "pipe": 2}))


class Decayed(nn.Module):
    """Writes to a frozen parameter before each use, so that the backward of the call before misses what it has saved."""

    def __init__(self):
        super().__init__()
        self.layer, self.key = nn.Linear(D, D), nn.Linear(D, D).requires_grad_(False)

    def forward(self, x):
        self.key.weight.data.mul_(0.9)
        return self.key(self.layer(x))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_stages_refuse_writes_that_a_backward_comes_upon(schedule):
    def main():
        model = nn.Sequential(Decayed(), nn.Linear(D, D))
        booster = fs.Booster(plugin=fs.HybridParallelPlugin(pipeline=2, microbatches=4, schedule=schedule))
        opt = torch.optim.SGD([x for x in model.parameters() if x.requires_grad], lr=0.5)
        boosted, opt, *_ = booster.boost(model, opt)
        booster.execute_pipeline(iter([(batch(0), batch(1))]), boosted, nn.MSELoss(), opt)

    with pytest.raises(fs.LayoutError, match=r"stages changed parameters in place: 0\[0\]\.key\.weight\. "):
        fs.run(main, mesh=fs.make_mesh({"pipe": 2}))


class Checkpointed(nn.Module):
    """Runs a part again in the backward, after it has written to what that reads."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, D)
        self.gain = nn.Parameter(torch.ones(D), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            self.gain.mul_(1.5)
        return checkpoint(lambda h: (h * self.gain).sin(), self.layer(x), use_reentrant=False)


class Filled(Momentum):
    """torch's initialisers are given their tensor by its name."""

    def follow(self):
        nn.init.constant_(self.key[0].bias, 0.5)
        nn.init.constant_(tensor=self.key[2].bias, val=0.25)


class Signs(nn.Module):
    """Computes with other data than a trained weight has, and puts its own back."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x):
        own = self.layer.weight.data
        self.layer.weight.data = own.sign()
        y = self.layer(x)
        self.layer.weight.data = own
        return y


class ByStates(Momentum):
    """Writes to what a state_dict has of it, after all of it was looked up."""

    @torch.no_grad()
    def follow(self):
        keys, queries = self.key.state_dict(), self.query.state_dict()
        for name, key in keys.items():
            key.mul_(0.5).add_(queries[name], alpha=0.5)


class Detached(Momentum):
    def follow(self):
        for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
            key.detach().lerp_(query.detach(), 0.5)


class Averaged(Momentum):
    """By torch's own average of a model."""

    def __init__(self):
        super().__init__()
        averages = torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        self.key = torch.optim.swa_utils.AveragedModel(self.query, multi_avg_fn=averages).requires_grad_(False)

    def follow(self):
        self.key.update_parameters(self.query)


class Inference(Momentum):
    @torch.inference_mode()
    def follow(self):
        for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
            key.lerp_(query, 0.5)


class Product(torch.autograd.Function):
    """Has its weight saved, and not what it was computed with."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x * weight

    @staticmethod
    def backward(ctx, g):
        (weight,) = ctx.saved_tensors
        return g * weight, None


class Gained(nn.Module):
    """Writes by the signs of Python, which set the attribute again."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, D)
        self.gain = nn.Parameter(torch.ones(D), requires_grad=False)
        self.more = nn.ParameterDict({"gain": nn.Parameter(torch.ones(D), requires_grad=False)})

    def forward(self, x):
        assert all(isinstance(each, nn.Parameter) for each in (self.gain, self.more["gain"], self.layer.bias))
        with torch.no_grad():
            self.gain *= 1.5
            self.gain -= 0.1
            self.more["gain"] /= 1 + self.layer.bias.square()
        return self.act(self.layer(x)) * self.more["gain"]

    def act(self, x):
        return Product.apply(x, self.gain).sin()


class Given(Gained):
    def act(self, x):
        return checkpoint(lambda x, gain: (x * gain).sin(), x, self.gain, use_reentrant=False)


class Reset(Gained):
    """Gives it other memory, which torch does past all that classes see."""

    def act(self, x):
        with torch.no_grad():
            self.gain.set_(self.gain.detach() * 0.5)
        return (x * self.gain).sin()


class Named(Gained):
    """Gives parameters other names for a while, by which torch registers them once more."""

    def act(self, x):
        self.scale, self.weight = self.gain, self.layer.weight
        y = ((x * self.scale) @ self.weight.T).sin()
        del self.scale, self.weight
        return y


WRITERS = [Checkpointed, Filled, Signs, ByStates, Detached, Averaged, Inference, Gained, Given, Reset, Named]


class Late(nn.Sequential):
    """Writes to weights of which others have been used since they were looked up."""

    def __init__(self):
        super().__init__(*(nn.Linear(D, D) for _ in range(4)))

    def forward(self, x):
        first, *_ = self.looked_up()
        first.clamp_(-0.1, 0.1)
        return super().forward(x)

    def looked_up(self):
        return [x.data for x in self.parameters()]


class LateStates(Late):
    def looked_up(self):
        return [*self.state_dict().values()]


@pytest.mark.parametrize("kind", [Late, LateStates])
@pytest.mark.parametrize("way", WAYS)
def test_what_shares_the_memory_of_trained_ones_is_watched_for_as_long(kind, way):
    plugin, n = WAYS[way]

    def main():
        model = made(kind)
        booster = fs.Booster(plugin=plugin)
        boosted, opt, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5))
        booster.backward(boosted(batch(0).chunk(n)[fs.axis_index("data")]).square().mean(), opt)
        opt.step()

    with pytest.raises(fs.LayoutError, match=r"changed parameters in place: 0\.weight\."):
        fs.run(main, mesh=fs.make_mesh({"data": n}))


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("way", WAYS)
def test_writes_are_seen_where_torch_sees_them(kind, way):
    assert_as_torch(kind, way)
