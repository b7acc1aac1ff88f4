"""Compressed gradients in a training step: ZeRO, the Booster, loss scaling, clipping, checkpoints."""

import pytest
import torch

import fshard as fs
from fshard import P, comm

AXES = {"node": 2, "gpu": 2}
FEEDBACK = comm.error_feedback(comm.top_k(0.2))


def full_params():
    draw = torch.Generator().manual_seed(0)
    return {"w": torch.randn(6, 5, generator=draw), "b": torch.randn(5, generator=draw), "scale": torch.tensor(1.5)}


def batch(rows=8):
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(1))


def loss_fn(params, x):
    return ((x @ params["w"] + params["b"]) * params["scale"]).square().mean()


def train(compress, *, stage=1, axis="gpu", opt=None, count=3, mesh=None, rules=None, x=None, **options):
    mesh = mesh or fs.make_mesh(AXES)
    params = fs.shard_params(full_params(), rules or P(), mesh=mesh)
    opt = fs.partition_optimizer(
        opt or fs.optim.sgd(0.1, momentum=0.9), mesh=mesh, axis=axis, stage=stage, compress=compress
    )
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P(mesh.axis_names), **options)
    state, metrics = opt.init(params), []
    for _ in range(count):
        params, state, values = step(params, state, batch() if x is None else x)
        metrics.append(values)
    return fs.unshard(params), state, metrics


CASES = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "1, both axes": {"stage": 1, "axis": ("node", "gpu")},
    "2": {"stage": 2},
    "3": {"stage": 3, "rules": fs.fsdp("gpu")},
    "accumulate": {"accumulate": 2},
    "donate": {"donate": True},
    "clip": {"opt": fs.optim.chain(fs.optim.clip_by_global_norm(0.5), fs.optim.sgd(0.1))},
    "scaled": {"opt": fs.optim.loss_scaled(fs.optim.sgd(0.1))},
    "matrix": {"opt": fs.optim.shampoo(0.1)},
}


@pytest.mark.parametrize("case", CASES)
def test_a_fraction_of_one_trains_as_without_compression(case):
    params, _, metrics = train({"node": comm.error_feedback(comm.top_k(1.0))}, **CASES[case])
    expected, _, exact = train(None, **CASES[case])
    torch.testing.assert_close(params, expected)
    torch.testing.assert_close(metrics[-1]["grad_norm"], exact[-1]["grad_norm"])


@pytest.mark.parametrize("case", CASES)
def test_the_residual_is_what_the_step_has_not_sent(case):
    """In the first step: the gradient is the reduced one and the residual."""
    options = {**CASES[case], "opt": fs.optim.sgd(1.0), "count": 1}
    params, state, metrics = train({"node": FEEDBACK}, **options)
    before = full_params()
    gradient = torch.func.grad(loss_fn)(before, batch())
    residual = fs.unshard(state["compress"]["node"]["residual"])
    sent = {name: before[name] - params[name] for name in before}
    for name in before:
        torch.testing.assert_close(sent[name] + residual[name], gradient[name])
    norm = torch.stack([x.norm() for x in sent.values()]).norm()
    torch.testing.assert_close(metrics[0]["grad_norm"], norm)


def test_residuals_are_unreduced_and_keep_their_total_on_another_mesh(tmp_path):
    _, state, _ = train({"node": FEEDBACK})
    assert str(fs.typeof(state["compress"]["node"]["residual"]["w"])) == "f32[6, 5]{flat:gpu, U:node}"
    fs.save(tmp_path / "c", state)
    total = fs.unshard(state["compress"]["node"]["residual"])
    mesh = fs.make_mesh({"node": 4, "gpu": 1})
    _, other, _ = train({"node": FEEDBACK}, mesh=mesh, count=1)
    restored = fs.restore(tmp_path / "c", other)
    torch.testing.assert_close(fs.unshard(restored["compress"]["node"]["residual"]), total)


def test_a_resumed_run_has_the_bits_of_the_uninterrupted_one(tmp_path):
    mesh, compress = fs.make_mesh(AXES), comm.error_feedback(comm.quantized(4, block=8, stochastic=True))
    opt = fs.partition_optimizer(fs.optim.adam(0.1), mesh=mesh, axis="gpu", stage=1, compress={"node": compress})
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P(mesh.axis_names))
    params = fs.shard_params(full_params(), P(), mesh=mesh)
    run = params, opt.init(params)
    for count in range(4):
        if count == 2:
            fs.save(tmp_path / "c", run)
        run = step(*run, batch())[:2]
    again = fs.restore(tmp_path / "c", (params, opt.init(params)))
    for _ in range(2):
        again = step(*again, batch())[:2]
    assert all(
        torch.equal(x, y) for x, y in zip(fs.unshard(again[0]).values(), fs.unshard(run[0]).values(), strict=True)
    )


def test_a_step_that_is_not_finite_leaves_residuals_alone():
    opt, x = fs.optim.loss_scaled(fs.optim.sgd(0.1)), batch().clone()
    _, before, _ = train({"node": FEEDBACK}, opt=opt, count=1)
    mesh = fs.make_mesh(AXES)
    made = fs.partition_optimizer(opt, mesh=mesh, axis="gpu", stage=1, compress={"node": FEEDBACK})
    step = fs.train_step(loss_fn, made, mesh=mesh, batch=P(mesh.axis_names))
    x[3] = float("inf")
    _, after, metrics = step(fs.shard_params(full_params(), P(), mesh=mesh), before, x)
    assert not metrics["finite"]
    residuals = [fs.unshard(state["compress"]["node"]["residual"]) for state in (before, after)]
    assert all(torch.equal(residuals[0][name], residuals[1][name]) for name in residuals[0])
    assert all(x.isfinite().all() for x in residuals[1].values())


PLUGINS = {
    "ddp": lambda c: fs.DDPPlugin(compress=c),
    "zero 1": lambda c: fs.ZeroPlugin(stage=1, compress=c),
    "zero 2": lambda c: fs.ZeroPlugin(stage=2, compress=c),
}


def boosted(plugin, count=3):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    booster = fs.Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, optimizer)
    norms = []
    for _ in range(count):
        booster.backward(model(batch()).square().mean(), optimizer)
        norms.append(booster.clip_grad_norm(optimizer, 0.5))
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), norms


@pytest.mark.parametrize("name", PLUGINS)
def test_plugins_compress(name):
    mesh = fs.make_mesh({"data": 2})
    runs = {
        key: fs.run(lambda compress=compress: boosted(PLUGINS[name](compress)), mesh=mesh)[0]
        for key, compress in {"none": None, "all": comm.top_k(1.0), "few": FEEDBACK}.items()
    }
    torch.testing.assert_close(runs["all"], runs["none"])
    assert not torch.allclose(runs["few"][1][0], runs["none"][1][0])


def two_nodes():
    mesh, compress = fs.make_mesh({"node": 2}), comm.error_feedback(comm.quantized(4, block=8))
    return train({"node": compress}, mesh=mesh, axis="node")[0], boosted(fs.ZeroPlugin(compress=compress))


def test_processes_train_to_the_bits_of_virtual_devices(two):
    compress = comm.error_feedback(comm.quantized(4, block=8))
    trained, *_ = train({"node": compress}, mesh=fs.make_mesh({"node": 2}), axis="node")
    results = two.run(two_nodes)
    for params, (weights, norms) in results:
        assert all(torch.equal(params[name], trained[name]) for name in trained)
        torch.testing.assert_close((weights, norms), results[0][1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: train({"gpu": FEEDBACK}, stage=3, rules=fs.fsdp("gpu")), "axes that do not shard the parameters"),
        (lambda: train({"node": FEEDBACK}, reproducible=True, slices=4), "reproducible must be False"),
        (lambda: train({"node": comm.power_sgd(1)}, stage=1), "must not be power_sgd"),
        (lambda: train({"host": FEEDBACK}), "host"),
        (lambda: train({"node": 0.1}), "compress must be a compressor"),
        (lambda: fs.DDPPlugin(compress=FEEDBACK, reproducible=True), "compress must be None with reproducible"),
        (lambda: fs.run(lambda: boosted(fs.DDPPlugin(compress=FEEDBACK)), mesh=fs.make_mesh(AXES)), "for each axis"),
    ],
)
def test_wrong_uses_raise(call, message):
    with pytest.raises((ValueError, fs.errors.FshardError), match=message):
        call()
