"""Edge cases of boosted models: empty microbatches, outputs fed back, draws, copies."""

import copy

import pytest
import torch
from torch import nn

import fshard as fs


def layers(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5), *more).double()


def rows(count, *shape, seed=5):
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed)).double()


# -- which rows are samples, and what they count for -------------------------------------------------------------------


def test_empty_microbatch_of_small_batch_trains_as_torch():
    x, y = rows(7, 5), rows(7, 5, seed=6)

    def main():
        model = layers()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        booster = fs.Booster(fs.HybridParallelPlugin(pipeline=2, microbatches=4))
        model, opt, *_ = booster.boost(model, opt)
        found = []
        for part in (slice(0, 4), slice(4, 7)):
            batch = iter([(x[part], y[part])])
            found.append(
                booster.execute_pipeline(batch, model, nn.functional.mse_loss, opt, return_outputs=True)["outputs"]
            )
            opt.step(), opt.zero_grad()
        return found

    model, expected = layers(), []
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for part in (slice(0, 4), slice(4, 7)):
        output = model(x[part])
        nn.functional.mse_loss(output, y[part]).backward()
        opt.step(), opt.zero_grad()
        expected.append(output.detach())
    for found in fs.run(main, mesh=fs.make_mesh({"data": 1, "pipe": 2})):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


# -- draws ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pipeline", [1, 2])
def test_each_forward_draws_new_numbers(pipeline):
    """Without gradients, before a step that is skipped, and of another model of the same layers."""
    axes = {"data": 1, "pipe": 2} if pipeline == 2 else {"data": 1}
    x = torch.ones(4, 5).double()

    def main():
        booster = fs.Booster(fs.HybridParallelPlugin(pipeline=pipeline, microbatches=pipeline))

        def boosted():
            model = layers(nn.Dropout(0.5))
            return booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.0))[:2]

        def call(model, opt):
            if pipeline == 1:
                output = model(x)
                if torch.is_grad_enabled():
                    booster.backward(output.sum(), opt)
                    opt.zero_grad()
                return tuple(output.detach().flatten().tolist())
            found = booster.execute_pipeline(
                iter([(x, x)]), model, nn.functional.mse_loss, opt, return_outputs=True
            )  # on all devices
            opt.zero_grad()
            return tuple(found["outputs"].flatten().tolist())

        one, other = boosted(), boosted()
        with torch.no_grad():
            looks = [call(*one) for _ in range(4)]
        return len({*looks, *(call(*one) for _ in range(4)), call(*other)})

    assert {*fs.run(main, mesh=fs.make_mesh(axes))} == {9}


def test_each_device_draws_its_own_dropout():
    def main():
        model, *_ = fs.Booster().boost(layers(nn.Dropout(0.5)))
        return model(torch.ones(8, 5).double()).eq(0).flatten().tolist()

    one, other = fs.run(main, mesh=fs.make_mesh({"data": 2}))
    assert one != other


@pytest.mark.parametrize("reproducible", [False, True])
def test_buffers_of_two_backwards_agree_in_step(reproducible):
    """Though without `sync` nothing is sent in between, and another forward waits for its backward."""

    def main():
        model = layers(nn.BatchNorm1d(5))
        booster = fs.Booster(fs.DDPPlugin(reproducible=reproducible))
        model, opt, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for seed in range(2):
            with booster.no_sync():
                booster.backward(model(rows(8, 5, seed=seed + 7 * fs.axis_index("data"))).square().mean(), opt)
        model(rows(8, 5))
        opt.step()
        return dict(model.unwrap().named_buffers())

    one, other = fs.run(main, mesh=fs.make_mesh({"data": 2}))
    assert all(torch.equal(x, other[name]) for name, x in one.items())
    assert one["3.num_batches_tracked"] == 3 and one["3.running_mean"].any()


# -- what is changed after a model was boosted -------------------------------------------------------------------------


def test_stages_run_given_layers_in_place():
    seen = []

    def main():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.BatchNorm1d(4))
        for number, layer in enumerate(module):
            layer.register_forward_hook(lambda layer, args, output, number=number: seen.append(number))
        booster = fs.Booster(fs.HybridParallelPlugin(pipeline=2, microbatches=2))
        model, opt, *_ = booster.boost(module, torch.optim.SGD(module.parameters(), lr=0.1))
        before = copy.deepcopy(model.unwrap().state_dict())
        booster.execute_pipeline(iter([(torch.randn(4, 4), torch.zeros(4, 4))]), model, nn.MSELoss(), opt)
        opt.step()
        after = model.unwrap().state_dict()
        return [name for name in after if not torch.equal(after[name], before[name])]

    changed = fs.run(main, mesh=fs.make_mesh({"data": 1, "pipe": 2}))
    assert sorted(seen) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert all({"0.weight", "2.weight", "3.running_mean", "3.num_batches_tracked"} <= {*names} for names in changed)


@pytest.mark.parametrize("recompute", ["never", 1])
def test_eval_mode_of_stage_layer_takes_effect(recompute):
    def main():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 5), nn.BatchNorm1d(5))
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        booster = fs.Booster(fs.HybridParallelPlugin(pipeline=2, microbatches=2, recompute=recompute))
        model, opt, *_ = booster.boost(model, opt)
        model.module[1].eval()
        batch = (torch.ones(4, 5), torch.ones(4, 5))
        booster.execute_pipeline(iter([batch]), model, nn.functional.mse_loss, opt)
        with torch.no_grad():
            model.eval()
            booster.execute_pipeline(iter([batch]), model, nn.functional.mse_loss)
        return [model.unwrap()[at].num_batches_tracked.item() for at in (1, 3)]

    for frozen, moved in fs.run(main, mesh=fs.make_mesh({"data": 1, "pipe": 2})):
        assert (frozen, moved > 0) == (0, True)


@pytest.mark.parametrize("recompute", ["always", "except_last", 1, 2])
def test_recomputed_stages_have_equal_bits(recompute):
    def main(recompute):
        model = layers(nn.Dropout(0.5))
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        booster = fs.Booster(fs.HybridParallelPlugin(pipeline=2, microbatches=2, recompute=recompute))
        model, opt, *_ = booster.boost(model, opt)
        for seed in range(2):
            booster.execute_pipeline(iter([(rows(4, 5, seed=seed), rows(4, 5))]), model, nn.functional.mse_loss, opt)
            opt.step(), opt.zero_grad()
        return [x.detach() for x in model.unwrap().parameters()]

    mesh = fs.make_mesh({"data": 1, "pipe": 2})
    for found, expected in zip(fs.run(main, recompute, mesh=mesh), fs.run(main, "never", mesh=mesh), strict=True):
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    "plugin",
    [
        fs.DDPPlugin(),
        fs.ZeroPlugin(stage=1),
        fs.ZeroPlugin(stage=2),
        fs.FSDPPlugin(),
        fs.DDPPlugin(reproducible=True, slices=2),
        fs.HybridParallelPlugin(pipeline=2, microbatches=1, balance="uniform"),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
def test_unwrap_returns_independent_copy(plugin, n):
    """The best model so far stays what it was when training goes on, and training does when somebody writes to the copy."""

    def main():
        given = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        booster = fs.Booster(plugin)
        model, opt, *_ = booster.boost(given, torch.optim.SGD(given.parameters(), lr=0.5))

        def state():
            return {name: x.clone() for name, x in model.unwrap().state_dict().items()}

        def step():
            x, y = rows(8, 3).float(), rows(8, 2, seed=6).float()
            if plugin.in_stages():
                booster.execute_pipeline(iter([(x, y)]), model, nn.functional.mse_loss, opt)
            else:
                booster.backward(nn.functional.mse_loss(model(x), y), opt)
            opt.step()

        step()
        best, then = model.unwrap(), state()
        step()
        torch.testing.assert_close(dict(best.state_dict()), then, rtol=0, atol=0)
        now = state()
        with torch.no_grad():
            for x in best.state_dict().values():
                x.zero_()
            for x in model.unwrap().state_dict().values():
                x.zero_()
        torch.testing.assert_close(state(), now, rtol=0, atol=0)
        return any(not torch.equal(then[name], x) for name, x in now.items())

    pipe = {"pipe": 2} if plugin.in_stages() else {}
    assert all(fs.run(main, mesh=fs.make_mesh({"data": n} | pipe)))


def join_layers():
    """Return the layers of DeepSpeed's page on pipelines: a list with a function among them."""
    torch.manual_seed(0)
    return [nn.Conv2d(1, 2, 3), nn.ReLU(), lambda x: torch.flatten(x, 1), nn.Linear(8, 2)]


@pytest.mark.parametrize("pipeline", [1, 2])
def test_list_of_layers_trains_as_a_sequence(pipeline):
    x, y = torch.randn(6, 1, 4, 4, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 2
    plain = nn.Sequential(*[layer if isinstance(layer, nn.Module) else nn.Flatten() for layer in join_layers()])

    def opt_of(layers):
        return torch.optim.SGD([x for one in layers if isinstance(one, nn.Module) for x in one.parameters()], lr=0.1)

    opt = opt_of(plain)
    nn.functional.cross_entropy(plain(x), y).backward()
    opt.step()
    plugin = fs.HybridParallelPlugin(pipeline=pipeline, microbatches=3)
    mesh = fs.make_mesh({"pipe": pipeline, "data": 1})

    def main(functional):
        layers, booster = join_layers(), fs.Booster(plugin)
        opt, criterion = opt_of(layers), nn.CrossEntropyLoss()
        if functional:
            state, _ = booster.step(booster.init(layers, opt, criterion), (x, y))
            params = fs.unshard(state.params)
            return {name: leaf for stage in ([params] if pipeline == 1 else params) for name, leaf in stage.items()}
        model, opt, *_ = booster.boost(layers, opt)
        if pipeline == 1:
            booster.backward(criterion(model(x), y), opt)
        else:
            booster.execute_pipeline(iter([(x, y)]), model, criterion, opt)
        opt.step()
        return {name: leaf.detach() for name, leaf in model.unwrap().named_parameters()}

    for functional in (False, True):
        for found in fs.run(main, functional, mesh=mesh):
            expected = {name: leaf.detach() for name, leaf in plain.named_parameters()}
            torch.testing.assert_close(found, expected)
    with pytest.raises(TypeError, match=r"layers must be modules and functions; got layers\[1\] is int"):
        fs.run(lambda: fs.Booster().boost([nn.ReLU(), 3]), mesh=fs.make_mesh({"data": 1}))


def means(plugin, index_of):
    """Return means over the devices that have other samples."""
    booster, index = fs.Booster(plugin), float(index_of())
    tree = {"loss": torch.tensor(index), "rows": (index, torch.tensor([index, 1.0]))}
    weighted = booster.mean(torch.tensor(index), samples=[3, 0][int(index)])
    return booster.mean(tree), weighted


def assert_means(found):
    for tree, weighted in found:
        assert tree["loss"] == 0.5 and tree["loss"].dtype == torch.float32
        assert tree["rows"][0] == 0.5 and tree["rows"][0].dtype == torch.float64
        assert tree["rows"][1].tolist() == [0.5, 1.0] and weighted == 0.0


def test_mean_is_over_devices_that_have_other_samples(two):
    plugin = fs.HybridParallelPlugin(tensor=2, sample=rows(2, 4))
    assert_means(fs.run(means, plugin, lambda: fs.axis_index("data"), mesh=fs.make_mesh({"data": 2, "model": 2})))
    assert_means(two.run(means, fs.FSDPPlugin(), fs.mesh.process_index))
    alone = fs.HybridParallelPlugin(mesh=fs.make_mesh({"model": 2}, runtime="virtual"), tensor=2, sample=rows(2, 4))
    assert fs.run(lambda: fs.Booster(alone).mean({"loss": 3}), mesh=alone.mesh) == [{"loss": 3.0}] * 2
    with pytest.raises(fs.errors.ScopeError, match="must run as one device"):
        fs.Booster(fs.DDPPlugin(mesh=fs.make_mesh({"data": 2}, runtime="virtual"))).mean(torch.ones(()))
