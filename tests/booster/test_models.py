"""Boosted models: which rows weigh what, random draws, buffers, copies, several models of one
Booster.
"""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fshard as fs
from tests.booster.loops import PLUGINS, Loop, assert_close, mesh_of, on_devices, unequal_bits


def samples(count):
    draw = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(count, 6, generator=draw).double(), torch.randint(4, (count,), generator=draw)
    )


def layers(*more, drop=0.0):
    hidden = (
        nn.Linear(6, 8),
        nn.Dropout(drop),
        nn.Tanh(),
        nn.Linear(8, 8),
        nn.Dropout(drop),
        nn.Tanh(),
    )
    return nn.Sequential(*hidden, nn.Linear(8, 4), *more).double()


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def sgd(model, lr=0.5):
    return torch.optim.SGD(model.parameters(), lr=lr)


# -- weights of rows -------------------------------------------------------------------------------


@pytest.mark.parametrize("plugin", ["ddp", "zero 2", "fsdp"])
def test_batches_of_unboosted_loader_weigh_equally(plugin):
    def body(loop):
        if loop.booster is not None:
            for x, _ in loop.booster.prepare_dataloader(
                samples(7), batch_size=7
            ):  # a device has 4, the other 3
                loop.model(x)
            loop.opt.zero_grad()
        for batch in DataLoader(samples(32), 16):
            loop.step(*map(loop.part, batch))
        return loop.state()

    assert_close(
        on_devices(body, PLUGINS[plugin](), 2, layers, adam), body(Loop(layers, None, adam))
    )


@pytest.mark.parametrize(
    ("plugin", "batch_size"), [("stages of 4", 7), ("stages of 4", 3), ("ddp", 8)]
)
def test_empty_microbatches_and_outputs_equal_torch(plugin, batch_size):
    """Of 7 rows a microbatch has 1; of 3 rows one has none."""
    plugin = (
        fs.HybridParallelPlugin(pipeline=2, microbatches=4) if plugin != "ddp" else fs.DDPPlugin()
    )

    def body(loop):
        for x, y in DataLoader(samples(14), batch_size):
            loop.step(loop.part(x), loop.part(y))
        return {**loop.state(), "output": loop.output(samples(5).tensors[0])}

    assert_close(on_devices(body, plugin, 2, layers, sgd), body(Loop(layers, None, sgd)))


def test_gradient_through_two_boosted_models_equals_torch():
    """A generator learns from a critic's output, each boosted by itself."""

    def body(generator):
        torch.manual_seed(2)
        critic = layers()
        if generator.booster is not None:
            critic, *_ = generator.booster.boost(critic, sgd(critic))
        generator.backward(
            critic(generator.model(generator.part(samples(4).tensors[0]))).square().mean()
        )
        generator.step()
        return generator.state()

    def make():
        return nn.Linear(6, 6).double()

    assert_close(on_devices(body, fs.DDPPlugin(), 2, make), body(Loop(make)))


def test_one_booster_steps_several_models():
    booster = fs.Booster(fs.ZeroPlugin(stage=1, mesh=fs.make_mesh({"data": 2})))
    batch = samples(8).tensors
    states = []
    for lr in (0.1, 100.0):
        torch.manual_seed(1)
        model = layers()
        states.append((lr, booster.init(model, sgd(model, lr), nn.CrossEntropyLoss())))
    for lr, state in reversed(states):
        after, _ = booster.step(state, batch)
        loop = Loop(layers, None, partial(sgd, lr=lr))
        loop.step(*batch)
        assert_close([fs.unshard(after.params)], loop.state())


class Half(nn.Module):
    """The second layer has no gradients."""

    def __init__(self):
        super().__init__()
        self.used = nn.Linear(6, 4)
        self.idle = nn.Linear(6, 4)

    def forward(self, x):
        return self.used(x)


@pytest.mark.parametrize(
    ("plugin", "unused"), [("ddp", "skip"), ("fsdp", "skip"), ("zero 2", "zero"), ("fsdp", "zero")]
)
def test_functional_step_skips_unused_or_gives_zeros(plugin, unused):
    model = Half().double()
    batch = samples(8).tensors
    opt = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    booster = fs.Booster(PLUGINS[plugin](mesh=fs.make_mesh({"data": 2}), unused=unused))
    state = booster.init(model, opt, nn.CrossEntropyLoss())
    for _ in range(2):
        state, _ = booster.step(state, batch)
    shrunk = 1.0 if unused == "skip" else (1 - 0.1 * 0.5) ** 2
    torch.testing.assert_close(
        fs.unshard(state.params)["idle.weight"], model.idle.weight.detach() * shrunk
    )


def test_mean_is_over_devices_that_have_other_samples():
    def means(plugin):
        booster = fs.Booster(plugin)
        index = float(fs.axis_index("data"))
        tree = {"loss": torch.tensor(index), "rows": (index, torch.tensor([index, 1.0]))}
        return booster.mean(tree), booster.mean(torch.tensor(index), samples=[3, 0][int(index)])

    plugin = fs.HybridParallelPlugin(tensor=2, sample=torch.ones(2, 4))
    for tree, weighted in fs.run(means, plugin, mesh=fs.make_mesh({"data": 2, "model": 2})):
        assert tree["loss"] == 0.5 and tree["loss"].dtype == torch.float32
        assert tree["rows"][0] == 0.5 and tree["rows"][0].dtype == torch.float64
        assert tree["rows"][1].tolist() == [0.5, 1.0] and weighted == 0.0
    alone = fs.HybridParallelPlugin(
        mesh=fs.make_mesh({"model": 2}), tensor=2, sample=torch.ones(2, 4)
    )
    assert (
        fs.run(lambda: fs.Booster(alone).mean({"loss": 3}), mesh=alone.mesh) == [{"loss": 3.0}] * 2
    )


# -- draws, buffers, copies ------------------------------------------------------------------------


@pytest.mark.parametrize("plugin", ["ddp", "stages"])
def test_each_forward_of_each_device_draws_new_numbers(plugin):
    """Without gradients, before a step that is skipped, and of another model of the same layers."""
    x = torch.ones(8, 6).double()
    options = {"return_outputs": True}

    def draw(loop):
        if loop.is_staged:
            batch = iter([(x, x)])
            results = loop.booster.execute_pipeline(
                batch, loop.model, lambda y, _: y.sum(), loop.opt, **options
            )
            output = results["outputs"]
        else:
            output = loop.model(x)
            if torch.is_grad_enabled():
                loop.backward(output.sum())
        loop.opt.zero_grad()
        return tuple(output.flatten().tolist())

    def main():
        booster = fs.Booster(PLUGINS[plugin]())
        first, second = (Loop(lambda: layers(nn.Dropout(0.5)), booster, sgd) for _ in "ab")
        with torch.no_grad():
            looks = [draw(first) for _ in range(4)]
        return {*looks, *(draw(first) for _ in range(4)), draw(second)}

    draws = fs.run(main, mesh=mesh_of(PLUGINS[plugin](), 2))
    assert [len(x) for x in draws] == [9, 9]
    assert len(set.union(*draws)) == (9 if plugin == "stages" else 18)


def learnt_with_dropout(seed, data, pipeline, *, functional=False, noise=0):
    """Return the parameters after three steps, in stages or not, by the loop or by the functional
    form.
    """
    mesh = fs.make_mesh({"data": data, "pipe": pipeline})
    options = {"pipeline": pipeline, "microbatches": 8 // data, "reproducible": True, "seed": seed}
    plugin = fs.HybridParallelPlugin(mesh=mesh, **options)

    def make():
        torch.manual_seed(1)
        model = layers(drop=0.3)
        torch.manual_seed(noise)
        return model

    def main():
        loop = Loop(make, plugin, adam)
        for batch in DataLoader(samples(24), 8):
            loop.step(*map(loop.part, batch))
        return loop.state()

    if not functional:
        return fs.run(main, mesh=mesh)[-1]
    booster = fs.Booster(plugin)
    model = make()
    state = booster.init(model, adam(model), nn.CrossEntropyLoss())
    for batch in DataLoader(samples(24), 8):
        state, _ = booster.step(state, batch)
    trees = fs.unshard(state.params)
    return {name: x for tree in (trees if pipeline > 1 else [trees]) for name, x in tree.items()}


@pytest.mark.parametrize("functional", [False, True], ids=["loop", "functional"])
@pytest.mark.parametrize(("data", "pipeline"), [(1, 1), (2, 2), (1, 2)])
def test_plugin_seed_decides_draws_in_all_forms(data, pipeline, functional):
    expected = learnt_with_dropout(7, 1, 1)
    assert not unequal_bits(
        learnt_with_dropout(7, data, pipeline, functional=functional, noise=5), expected
    )
    assert unequal_bits(learnt_with_dropout(8, data, pipeline, functional=functional), expected)


@pytest.mark.parametrize("reproducible", [False, True])
def test_buffers_of_two_backwards_agree_in_step(reproducible):
    """Though without `sync` nothing is sent in between, and another forward waits for its backward."""

    def body(loop):
        for seed in range(2):
            x = torch.randn(
                8, 6, generator=torch.Generator().manual_seed(seed + 7 * fs.axis_index("data"))
            ).double()
            loop.backward(loop.model(x).square().mean(), sync=False)
        loop.model(samples(8).tensors[0])
        loop.opt.step()
        return dict(loop.model.unwrap().named_buffers())

    plugin = fs.DDPPlugin(reproducible=reproducible)
    first, second = on_devices(body, plugin, 2, lambda: layers(nn.BatchNorm1d(4)))
    assert not unequal_bits(first, second)
    assert first["7.num_batches_tracked"] == 3 and first["7.running_mean"].any()


COPIED = {**PLUGINS, "reproducible": partial(fs.DDPPlugin, reproducible=True, slices=2)}


@pytest.mark.parametrize("plugin", COPIED)
def test_unwrap_returns_independent_copy(plugin):
    """The best model so far stays as it was when training continues, and training when the copy is
    written to.
    """

    def body(loop):
        batch = [loop.part(x) for x in samples(8).tensors]
        loop.step(*batch)
        best = loop.model.unwrap()
        state = loop.state()
        loop.step(*batch)
        last = loop.state()
        copies = [best.state_dict(), loop.model.unwrap().state_dict()]
        errors = unequal_bits(copies[0], state)
        for x in [x for tensors in copies for x in tensors.values()]:
            x.zero_()
        return errors + unequal_bits(loop.state(), last), len(unequal_bits(last, state)) > 4

    assert (
        on_devices(body, COPIED[plugin](), 2, lambda: layers(nn.BatchNorm1d(4))) == [([], True)] * 2
    )


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(("rows", "count"), [(3, 3), (19, 22), (2, 2), (8, 10)])
def test_synchronised_statistics_do_not_count_a_neighbours_samples(stage, rows, count):
    """Four devices, of which the last batch leaves some without a sample. The oracle is torch."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(count, 4, generator=draw, dtype=torch.float64)
    y = torch.randn(count, 1, generator=draw, dtype=torch.float64)
    plugins = [
        fs.DDPPlugin,
        partial(fs.ZeroPlugin, stage=1),
        partial(fs.ZeroPlugin, stage=2),
        fs.FSDPPlugin,
    ]

    def model_of_seed():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()

    def batches():
        return zip(x.split(rows), y.split(rows), strict=True)

    model = model_of_seed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for inputs, labels in batches():
            nn.functional.mse_loss(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()

    def main():
        booster = fs.Booster(plugins[stage](sync_batchnorm=True))
        module = model_of_seed()
        loader = DataLoader(TensorDataset(x, y), rows)
        boosted = booster.boost(
            module, torch.optim.SGD(module.parameters(), lr=0.1), nn.MSELoss(), loader
        )
        own, opt, criterion, own_loader, _ = boosted
        for _ in range(2):
            for inputs, labels in own_loader:
                booster.backward(criterion(own(inputs), labels), opt)
                opt.step()
                opt.zero_grad()
        return own.state_dict()

    for state in fs.run(main, mesh=fs.make_mesh({"data": 4})):
        torch.testing.assert_close(state, model.state_dict(), rtol=1e-10, atol=1e-10)
