"""Arrays that a step has donated: each later use raises, and what was copied before keeps its
values.
"""

import copy
import pickle

import pytest
import torch

import fshard as fs
from fshard import P, optim
from fshard.errors import LayoutError

FULL = {"w": torch.arange(15.0).reshape(5, 3) / 15, "b": torch.ones(3)}

USES = {
    "unshard": fs.unshard,
    "device_put": lambda x: fs.device_put(x, x.layout),
    "add": lambda x: x + 1,
    "tolist": lambda x: x.tolist(),
    "shards": lambda x: x.shards,
    "typeof": fs.typeof,
    "pickle": pickle.dumps,
    "deepcopy": copy.deepcopy,
}


def loss_fn(params, x):
    return (x @ params["w"] + params["b"]).square().mean()


def trained(stage, opt, frozen=None, donate=True, devices=2):
    """Return parameters and state before and after a step."""
    mesh = fs.make_mesh({"data": devices})
    rules = fs.fsdp("data") if stage == 3 else P()
    params = fs.shard_params(FULL, rules, mesh=mesh, frozen=frozen)
    opt = fs.partition_optimizer(opt, mesh=mesh, axis="data", stage=stage)
    state = opt.init(params)
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), donate=donate)
    after, state_after, _ = step(params, state, torch.ones(6, 5))
    return params, state, after, state_after


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_donated_parameters_and_state_raise_at_each_use(stage):
    params, state, after, _ = trained(stage, optim.adamw(0.1))
    for array in (params["w"], params["b"], state["exp_avg"]["w"]):
        assert array.is_donated
        assert "donated" in repr(array)
        for use in USES.values():
            with pytest.raises(LayoutError, match="must not be donated"):
                use(array)
    assert not torch.equal(fs.unshard(after)["w"], FULL["w"])


@pytest.mark.parametrize("stage", [0, 3])
def test_step_that_does_not_donate_leaves_its_arguments(stage):
    params, state, after, _ = trained(stage, optim.adamw(0.1), donate=False)
    assert torch.equal(fs.unshard(params)["w"], FULL["w"])
    assert float(fs.unshard(state)["exp_avg"]["w"].abs().sum()) == 0
    assert not torch.equal(fs.unshard(after)["w"], FULL["w"])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "opt",
    [
        optim.sgd(0.1),
        optim.sgd(0.1, momentum=0.9),
        optim.chain(optim.clip_by_value(1.0), optim.adamw(0.1)),
        optim.masked(optim.sgd(0.1), {"w": True, "b": False}),
        optim.ema(optim.adamw(0.1), 0.9),
        optim.with_master_weights(optim.adamw(0.1)),
        optim.accumulate(optim.sgd(0.1), 2),
        optim.from_torch(torch.optim.RMSprop, lr=0.1),
        optim.lamb(0.1),
    ],
    ids=["sgd", "momentum", "chain", "masked", "ema", "master", "accumulate", "rmsprop", "lamb"],
)
def test_step_of_an_optimizer_donates_and_its_results_are_those_of_the_pure_step(opt, stage):
    mesh = fs.make_mesh({"data": 2})
    rules = fs.fsdp("data") if stage == 3 else P()
    params = fs.shard_params(FULL, rules, mesh=mesh)
    opt = fs.partition_optimizer(opt, mesh=mesh, axis="data", stage=stage)
    pure = optim.pure_step(opt)
    gradient = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"), gradients=opt.gradients)
    state = opt.init(params)
    expected, expected_state, best = params, state, params
    own, own_state = fs.device_put((params, state), fs.mesh.layouts((params, state)))
    for _ in range(3):
        _, grads = gradient(expected, torch.ones(6, 5))
        expected, expected_state = pure(grads, expected_state, expected)
        before = own
        own, own_state = opt.step(grads, own_state, own)
        assert before["w"].is_donated
    for name, start in FULL.items():
        assert torch.equal(fs.unshard(own)[name], fs.unshard(expected)[name])
        assert torch.equal(fs.unshard(best)[name], start)


def test_frozen_arrays_are_not_donated():
    params, _, after, _ = trained(3, optim.adamw(0.1), frozen="b")
    assert after["b"] is params["b"]
    assert torch.equal(fs.unshard(params["b"]), FULL["b"])
    assert params["w"].is_donated


def test_views_of_donated_arrays_raise():
    mesh = fs.make_mesh({"data": 2})
    params = fs.shard_params(FULL, P(), mesh=mesh)
    w = params["w"]
    views = [w.detach(), w[0], w.T, w.reshape(15), fs.array.constrain(w, P())]
    kept = w.clone()
    opt = optim.sgd(1.0)
    opt.step(fs.device_put(FULL, fs.Layout(mesh, P())), opt.init(params), params)
    for view in views:
        for use in (fs.unshard, lambda x: x + 1, lambda x: x.tolist(), pickle.dumps):
            with pytest.raises(LayoutError, match="donated"):
                use(view)
    assert torch.equal(fs.unshard(kept), FULL["w"])


def test_donated_argument_of_a_step_raises():
    params, state, *_ = trained(1, optim.sgd(0.1))
    mesh = params["w"].mesh
    opt = fs.partition_optimizer(optim.sgd(0.1), mesh=mesh, axis="data", stage=1)
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), donate=True)
    with pytest.raises(LayoutError, match="must not be donated"):
        step(params, state, torch.ones(6, 5))


def test_tied_parameters_stay_tied_when_they_are_donated():
    mesh = fs.make_mesh({"data": 2})
    w = torch.ones(3, 3)
    params = fs.shard_params({"a": w, "b": w}, P(), mesh=mesh)
    opt = optim.sgd(1.0)
    grads = fs.device_put({"a": w, "b": w}, fs.Layout(mesh, P()))
    after, _ = opt.step(grads, opt.init(params), params)
    assert after["a"] is after["b"]


def test_step_writes_plain_tensors_in_place():
    params = [torch.ones(2)]
    opt = optim.sgd(1.0)
    after, _ = opt.step([torch.ones(2)], opt.init(params), params)
    assert after[0] is params[0]


def test_arrays_that_require_grad_are_written_in_place():
    """They are variables, as a module's parameters in torch's loop."""
    mesh = fs.make_mesh({"data": 2})
    w = fs.device_put(torch.ones(4), fs.Layout(mesh, P("data"))).requires_grad_()
    opt = fs.optim.sgd(0.5)
    (grad,) = torch.autograd.grad((w * w).sum(), w)
    opt.step({"w": grad}, opt.init({"w": w}), {"w": w})
    assert fs.unshard(w.detach()).tolist() == [0.0] * 4
