"""Patterns of torch loops: prefetched batches, dropped gradients, unboosted loaders, closures, seeds, several models."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fshard as fs
from fshard.mesh.layout.arithmetic import balanced_range

PLUGINS = {
    "ddp": fs.DDPPlugin,
    "zero 2": lambda **options: fs.ZeroPlugin(stage=2, **options),
    "fsdp": fs.FSDPPlugin,
}


def samples(count):
    draw = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(count, 6, generator=draw).double(), torch.randint(4, (count,), generator=draw))


def layers(drop=0.0):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.Dropout(drop), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(drop), nn.Tanh(), nn.Linear(8, 4)
    ).double()


def by_torch(batches, loss=nn.functional.cross_entropy):
    model = layers()
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    for x, y in batches:
        opt.zero_grad()
        loss(model(x), y).backward()
        opt.step()
    return model.state_dict()


def boosted(plugin, body, n=2, count=22, batch_size=5, **options):
    """Return what each device has after what `body` does with (booster, model, optimizer, loader)."""

    def main():
        model = layers()
        opt, booster = torch.optim.Adam(model.parameters(), lr=0.01), fs.Booster(PLUGINS[plugin](**options))
        model, opt, _, loader, _ = booster.boost(model, opt, None, DataLoader(samples(count), batch_size))
        body(booster, model, opt, loader)
        return model.unwrap().state_dict()

    return fs.run(main, mesh=fs.make_mesh({"data": n}))


def close(states, expected):
    for state in states:
        torch.testing.assert_close(dict(state), dict(expected), rtol=0, atol=1e-12)


def round_of(booster, model, opt, x, y):
    booster.backward(nn.functional.cross_entropy(model(x), y), opt)
    opt.step(), opt.zero_grad()


# -- gradients and batches --------------------------------------------------------------------------------------------


def in_turn(loader):
    yield from loader


def fetched(loader):
    yield from list(loader)


def copied(batches):
    """Copy each batch, as on its way to an accelerator."""
    for x, y in batches:
        yield x.clone(), y.clone()


def one_ahead(loader):
    """Copy each batch while the one before is used."""
    before = None
    for now in copied(loader):
        if before is not None:
            yield before
        before = now
    yield before


FETCH = {
    "fetched": fetched,
    "copied": lambda loader: copied(in_turn(loader)),
    "fetched and copied": lambda loader: copied(fetched(loader)),
    "one ahead": one_ahead,
    "two epochs, then copied": lambda loader: copied([*fetched(loader), *fetched(loader)]),
}


def rows_on(n, size):
    return [max(len(range(*balanced_range(size, n, at))), 1) for at in range(n)]


@settings(max_examples=20, deadline=None)
@given(
    fetch=st.sampled_from([*FETCH]),
    plugin=st.sampled_from([*PLUGINS]),
    sync=st.booleans(),
    n=st.integers(1, 4),
    count=st.integers(1, 14),
    size=st.integers(1, 9),
    epochs=st.integers(1, 2),
)
def test_batches_fetched_ahead_or_copied_keep_weights(fetch, plugin, sync, n, count, size, epochs):
    """Batches of two sizes, of which a device has as many rows, must be used before the next is fetched."""
    sizes = {min(size, count - at) for at in range(0, count, size)}
    columns = zip(*(rows_on(n, one) for one in sizes), strict=True)
    assume(fetch == "copied" or all(len({*column}) == len(sizes) for column in columns))

    def body(booster, model, opt, loader):
        for _ in range(epochs):
            for x, y in FETCH[fetch](loader):
                with nullcontext() if sync else booster.no_sync():
                    booster.backward(nn.functional.cross_entropy(model(x), y), opt)
                opt.step(), opt.zero_grad()

    states = boosted(plugin, body, n=n, count=count, batch_size=size)
    close(states, by_torch([*DataLoader(samples(count), size)] * epochs * (2 if "two epochs" in fetch else 1)))


def through_two():
    """Return what a generator has learnt from a critic's word, each boosted by itself, and what the serial loop has."""
    draw = torch.Generator().manual_seed(1)
    noise = torch.randn(4, 6, generator=draw).double()

    def main():
        booster = fs.Booster()
        generator, critic = nn.Linear(6, 6).double(), layers()
        with torch.no_grad():
            generator.weight.fill_(0.1), generator.bias.fill_(0.2)
        opt = torch.optim.SGD(generator.parameters(), lr=0.1)
        generator, opt, *_ = booster.boost(generator, opt)
        critic, *_ = booster.boost(critic, torch.optim.SGD(critic.parameters(), lr=0.1))
        own = noise.chunk(fs.axis_size("data"))[fs.axis_index("data")]
        booster.backward(critic(generator(own)).square().mean(), opt)
        opt.step()
        return generator.unwrap().state_dict()

    return [fs.run(main, mesh=fs.make_mesh({"data": n})) for n in (1, 2)]


def test_gradient_through_two_boosted_models_equals_serial():
    (alone,), both = through_two()
    assert not alone["weight"].eq(0.1).any()
    close(both, alone)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_batches_of_unboosted_loader_weigh_equally(plugin):
    def body(booster, model, opt, loader):
        for x, _ in booster.prepare_dataloader(samples(7), batch_size=7):  # of which one device has 4, the other 3
            model(x)
        opt.zero_grad()
        for x, y in DataLoader(samples(32), 16):
            round_of(booster, model, opt, *(part.chunk(2)[fs.axis_index("data")] for part in (x, y)))

    close(boosted(plugin, body), by_torch(DataLoader(samples(32), 16)))


@pytest.mark.parametrize("make", [torch.optim.Adam, lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9)])
def test_optimizer_that_has_stepped_raises(make):
    model = layers()
    opt = make(model.parameters())
    model(torch.randn(2, 6).double()).sum().backward()
    opt.step()
    with pytest.raises(fs.errors.OptimizerError, match=r"has taken steps already.*before its first step"):
        fs.run(lambda: fs.Booster().boost(model, opt), mesh=fs.make_mesh({"data": 2}))


@pytest.mark.parametrize("start", [0.0, 0.5])
def test_optimizer_with_initial_state_is_accepted(start):
    model = layers()
    opt = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=start)
    (boosted_one,) = fs.run(lambda: fs.Booster().boost(model, opt)[1], mesh=fs.make_mesh({"data": 1}))
    assert boosted_one.optim is opt and boosted_one.param_groups[0]["initial_accumulator_value"] == start


# -- draws, and what nobody has used ----------------------------------------------------------------------------------


MESHES = {
    1: fs.make_mesh({"data": 1}),
    2: fs.make_mesh({"data": 1, "pipe": 2}),
    4: fs.make_mesh({"data": 2, "pipe": 2}),
}


def dropped(seed, pipeline, n, functional, noise=0):
    """Return the parameters after three steps with dropout, in stages or not, by the loop or by the functional form."""
    mesh, batches = MESHES[n], DataLoader(samples(24), 8)
    how = {"mesh": mesh, "reproducible": True, "seed": seed}
    stages = {"pipeline": pipeline, "microbatches": 8 // mesh.shape["data"]}
    plugin = fs.HybridParallelPlugin(**stages, **how) if pipeline else fs.DDPPlugin(**how)
    booster, criterion = fs.Booster(plugin), nn.CrossEntropyLoss()

    def start():
        model = layers(0.3)
        torch.manual_seed(noise)
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    def main():
        model, opt, _, loader, _ = booster.boost(*start(), None, batches)
        it = iter(loader)
        for _ in range(3):
            if pipeline:
                booster.execute_pipeline(it, model, criterion, opt)
            else:
                x, y = next(it)
                booster.backward(criterion(model(x), y), opt)
            opt.step(), opt.zero_grad()
        return dict(model.unwrap().state_dict())

    if not functional:
        return fs.run(main, mesh=mesh)[-1]
    state = booster.init(*start(), criterion)
    for batch in batches:
        state, _ = booster.step(state, batch)
    trees = fs.unshard(state.params)
    return {name: x for tree in (trees if pipeline else [trees]) for name, x in tree.items()}


@pytest.mark.parametrize("functional", [False, True], ids=["loop", "functional"])
@pytest.mark.parametrize(("pipeline", "n"), [(0, 1), (2, 4), (2, 2)])
def test_plugin_seed_decides_draws_in_all_forms(pipeline, n, functional):
    expected = dropped(7, 0, 1, functional=False)
    found = dropped(7, pipeline, n, functional, noise=5)
    assert all(torch.equal(x, found[name]) for name, x in expected.items())
    assert any(not torch.equal(x, expected[name]) for name, x in dropped(8, pipeline, n, functional).items())


class Half(nn.Module):
    """Of which the second layer is used by nobody."""

    def __init__(self):
        super().__init__()
        self.used, self.idle = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x):
        return self.used(x)


@pytest.mark.parametrize("unused", ["skip", "zero"])
@pytest.mark.parametrize("plugin", PLUGINS)
def test_functional_step_skips_unused_or_gives_zeros(plugin, unused):
    torch.manual_seed(0)
    model = Half().double()
    opt = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    booster, batch = fs.Booster(PLUGINS[plugin](mesh=fs.make_mesh({"data": 2}), unused=unused)), samples(8).tensors
    state = booster.init(model, opt, nn.CrossEntropyLoss())
    for _ in range(2):
        state, _ = booster.step(state, batch)
    shrunk = 1.0 if unused == "skip" else (1 - 0.1 * 0.5) ** 2
    torch.testing.assert_close(fs.unshard(state.params)["idle.weight"], model.idle.weight.detach() * shrunk)


# -- BatchNorm in 16 bits ---------------------------------------------------------------------------------------------


def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))


@pytest.mark.parametrize("pipeline", [0, 2])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_batch_norm_statistics_stay_float32_in_16_bits(precision, pipeline):
    batches = [(x.float(), y) for x, y in DataLoader(samples(24), 8)]
    model = normed()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches:
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step(), opt.zero_grad()
    plain = {"mesh": fs.make_mesh({"data": 1, "pipe": pipeline} if pipeline else {"data": 1}), "precision": precision}
    plugin = fs.HybridParallelPlugin(pipeline=pipeline, microbatches=1, **plain) if pipeline else fs.FSDPPlugin(**plain)

    def main():
        booster, criterion = fs.Booster(plugin), nn.CrossEntropyLoss()
        own = normed()
        boosted, opt, *_ = booster.boost(own, torch.optim.SGD(own.parameters(), lr=0.1))
        for x, y in batches:
            if pipeline:
                booster.execute_pipeline(iter([(x, y)]), boosted, criterion, opt)
            else:
                booster.backward(criterion(boosted(x), y), opt)
            opt.step(), opt.zero_grad()
        boosted.eval()
        with torch.no_grad():
            if pipeline:
                how = {"return_outputs": True}
                output = booster.execute_pipeline(iter([batches[0]]), boosted, criterion, **how)["outputs"]
            else:
                output = boosted(batches[0][0])
        return boosted.unwrap().state_dict(), output

    model.eval()
    for state, output in fs.run(main, mesh=plugin.mesh):
        torch.testing.assert_close(dict(state), dict(model.state_dict()), rtol=0.05, atol=0.02)
        torch.testing.assert_close(output.float(), model(batches[0][0]).detach(), rtol=0.05, atol=0.05)


# -- several models, closures, parameters that have no memory ---------------------------------------------------------


def test_one_booster_steps_several_models():
    mesh = fs.make_mesh({"data": 2})
    x, y = samples(8).tensors
    booster, rates = fs.Booster(fs.ZeroPlugin(stage=1, mesh=mesh)), (0.1, 100.0)
    models = [layers(), layers()]
    states = [
        booster.init(model, torch.optim.SGD(model.parameters(), lr=rate), nn.CrossEntropyLoss())
        for model, rate in zip(models, rates, strict=True)
    ]
    for state, rate in [*zip(states, rates, strict=True)][::-1]:
        after, _ = booster.step(state, (x, y))
        model = layers()
        opt = torch.optim.SGD(model.parameters(), lr=rate)
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
        close([fs.unshard(after.params)], {name: w.detach() for name, w in model.named_parameters()})
