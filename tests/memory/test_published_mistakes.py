"""Mistakes that libraries with offload have had; each oracle is torch alone, on one device."""

import itertools

import pytest
import torch
from torch import nn

import fshard as fs
from fshard import P, optim
from fshard.memory.transfers import stress
from tests.memory.training import CASE, OPTIMIZERS, same_bits, trained

STEPS = 3
PLACES = [("host", "device"), ("host", "host"), ("disk", "host")]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batches(count):
    """Return the microbatches of a step: they differ, so that none may be lost."""
    draw = torch.Generator().manual_seed(count)
    return [torch.randn(4, 6, generator=draw).double() * (i + 1) for i in range(count)]


def by_torch(microbatches, make=lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), max_norm=None):
    """Return the parameters, and the norms of gradients."""
    model, norms = network(), []
    opt = make(model)
    for _ in range(STEPS):
        for x in batches(microbatches):
            (model(x).square().mean() / microbatches).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm or float("inf")))
        opt.step()
        opt.zero_grad()
    return dict(model.named_parameters()), norms


def functional(microbatches, stage, place, opt, n=2):
    """Return the parameters and norms of a functional step that accumulates."""
    mesh, model = fs.make_mesh({"data": n}), network()
    apply, params, _ = fs.functionalize(model)
    params = fs.shard_params(params, fs.fsdp("data") if stage == 3 else P(), mesh=mesh)
    opt = fs.partition_optimizer(opt, mesh=mesh, axis="data", stage=stage, state_memory=place[0], update_on=place[1])
    step = fs.train_step(
        lambda p, x: apply(p, {}, x)[0].square().mean(),
        opt,
        mesh=mesh,
        batch=P("data"),
        accumulate=microbatches,
        donate=True,
    )
    rows = torch.stack([x.unflatten(0, (n, -1)) for x in batches(microbatches)], 1)  # each device has some of each
    state, norms = opt.init(params), []
    for _ in range(STEPS):
        params, state, metrics = step(params, state, rows.flatten(0, 2))
        norms.append(metrics["grad_norm"])
    return fs.unshard(params), norms


def looped(plugin, microbatches, make, max_norm=None, n=2):
    """Return the parameters and norms of a loop with a backward for each microbatch."""

    def main():
        model = network()
        booster = fs.Booster(plugin)
        model, opt, *_ = booster.boost(model, make(model))
        norms = []
        for _ in range(STEPS):
            for x in batches(microbatches):
                with booster.no_sync(model, opt):
                    loss = model(x.chunk(n)[fs.axis_index("data")]).square().mean() / microbatches
                    booster.backward(loss, opt)
            norms.append(booster.clip_grad_norm(opt, max_norm or float("inf")))
            opt.step()
            opt.zero_grad()
        return dict(model.unwrap().named_parameters()), norms

    return fs.run(main, mesh=fs.make_mesh({"data": n}))[0]


def assert_close(result, expected):
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("place", "microbatches"), [*itertools.product(PLACES, [2, 4])])
def test_no_microbatch_is_lost(disk_folder, stage, place, microbatches):
    """DeepSpeed, until 2026: of several microbatches only the last one's gradient reached the host."""
    with stress(poison=True):
        result = functional(microbatches, stage, place, optim.sgd(0.1, momentum=0.9))
    assert_close(result, by_torch(microbatches))


@pytest.mark.parametrize(
    "plugin",
    [fs.ZeroPlugin(stage=1, offload="host"), fs.ZeroPlugin(stage=2, offload="disk"), fs.FSDPPlugin(offload=True)],
)
def test_no_backward_of_a_loop_is_lost(disk_folder, plugin):
    make = lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)  # noqa: E731
    assert_close(looped(plugin, 3, make), by_torch(3))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_of_any_optimizer_is_elsewhere(disk_folder, name, place):
    """Elsewhere offload knows the names of Adam's state: others stayed on the device, or failed."""
    case = CASE | {"name": name, "stage": 2, "half": "masters" in name}
    expected = trained(**case)
    with stress(poison=True):
        assert same_bits(trained(*place, **case), expected)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_on_the_host_are_clipped_as_on_the_device(stage):
    """Elsewhere the norm was that of gradients that were still on the device, or of one device's."""
    opt = optim.chain(optim.clip_by_global_norm(0.05), optim.sgd(0.1, momentum=0.9))
    result, resident = (functional(2, stage, place, opt) for place in (("host", "host"), ("device", "device")))
    params, norms = by_torch(2, max_norm=0.05)
    assert_close(result, (params, norms))
    assert all(norm > 0.05 for norm in norms) and all(map(torch.equal, result[0].values(), resident[0].values()))


@pytest.mark.parametrize("plugin", [fs.ZeroPlugin(stage=2, offload="host"), fs.FSDPPlugin(offload=True)])
def test_parameter_groups_keep_their_options(plugin):
    """Elsewhere, with offload, the second group was lost, or had the options of the first one."""

    def make(model):
        weights = [x for x in model.parameters() if x.ndim > 1]
        biases = [x for x in model.parameters() if x.ndim == 1]
        return torch.optim.AdamW(
            [{"params": weights, "lr": 0.01, "weight_decay": 0.5}, {"params": biases, "lr": 0.1, "betas": (0.5, 0.6)}]
        )

    assert_close(looped(plugin, 2, make, max_norm=0.1), by_torch(2, make, max_norm=0.1))
