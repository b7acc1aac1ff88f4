"""Evaluation: the loss alone, on parameters that lie in any way."""

import weakref

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard import P, optim
from fshard.transforms.fsdp.lazy_param import unsharded


def params_of(layers=4):
    draw = torch.Generator().manual_seed(0)
    blocks = [
        {"w": torch.randn(6, 6, generator=draw) / 3, "b": torch.zeros(6)} for _ in range(layers)
    ]
    return {"blocks": blocks, "head": torch.randn(6, 2, generator=draw)}


def per_sample(p, batch):
    x = batch["x"]
    for block in p["blocks"]:
        x = torch.tanh(x @ block["w"] + block["b"])
    return (x @ p["head"] - batch["y"]).square().mean(1), {"size": x.abs().mean(1)}


def batch_of(rows):
    draw = torch.Generator().manual_seed(rows)
    return {"x": torch.randn(rows, 6, generator=draw), "y": torch.randn(rows, 2, generator=draw)}


def mean(p, batch):
    loss, aux = per_sample(p, batch)
    return loss.mean(), {"size": aux["size"].mean()}


def evaluated(n, stage, rows, **options):
    mesh = fs.make_mesh({"data": n})
    params = fs.shard_params(params_of(), fs.fsdp("data") if stage == 3 else P(), mesh=mesh)
    return fs.evaluate(mean, mesh=mesh, batch=P("data"), has_aux=True, **options)(
        params, batch_of(rows)
    )


@given(
    n=st.sampled_from([1, 2, 4]),
    stage=st.sampled_from([0, 3]),
    rows=st.integers(1, 9),
    options=st.sampled_from(
        [
            {},
            {"accumulate": 2},
            {"live_units": 1, "prefetch": 0},
            {"weight": lambda b: b["x"].shape[0]},
        ]
    ),
    mode=st.sampled_from([torch.no_grad, torch.inference_mode, torch.enable_grad]),
)
@settings(max_examples=30)
def test_evaluate_of_any_batch_equals_one_device(n, stage, rows, options, mode):
    expected, aux = mean(params_of(), batch_of(rows))
    with mode():
        loss, actual = evaluated(n, stage, rows, **options)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(actual, aux)
    assert not loss.requires_grad


def test_evaluate_reproducible_has_bits_of_one_device():
    actual = [evaluated(n, stage, 7, reproducible=True)[0] for n in (1, 2, 4) for stage in (0, 3)]
    assert len({x.item() for x in actual}) == 1


def test_evaluate_unshards_units_one_by_one():
    mesh = fs.make_mesh({"data": 2})
    alive = []
    seen = []
    params = fs.shard_params(params_of(8), fs.fsdp("data", unit="blocks[*]"), mesh=mesh)

    def loss_fn(p, batch):
        x = batch["x"]
        own = []
        for block in p["blocks"]:
            w = unsharded(block["w"])
            x = torch.tanh(x @ w)
            own.append(weakref.ref(w))
            del w
            alive.append(sum(one() is not None for one in own))
        seen.append(torch.is_grad_enabled())
        return x.mean() + (p["head"] * 0).sum()

    test = fs.evaluate(loss_fn, mesh=mesh, batch=P("data"))
    with fs.ledger() as comm:
        test(params, batch_of(4))
    calls = {name: count for (name, _), (count, _) in comm.by_collective().items()}
    assert calls == {"all_gather": 9, "psum": 1} and max(alive) == 2 and seen == [False, False]


def test_evaluate_reads_buffers_and_follows_eval():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2)
    )
    model(torch.randn(20, 6))
    apply, params, buffers = fs.functionalize(model, sync_batchnorm="data")
    model.eval()
    mesh = fs.make_mesh({"data": 4})
    batch = batch_of(7)
    params = fs.shard_params(params, fs.fsdp("data"), mesh=mesh)

    def loss_fn(p, b, batch):
        y, b = apply(p, b, batch["x"])
        return (y - batch["y"]).square().mean(), b

    kept = {name: x.clone() for name, x in buffers.items()}
    with torch.inference_mode():
        loss = fs.evaluate(loss_fn, mesh=mesh, batch=P("data"), has_buffers=True)(
            params, buffers, batch
        )
    torch.testing.assert_close(loss, (model(batch["x"]) - batch["y"]).square().mean().detach())
    assert all(torch.equal(x, buffers[name]) for name, x in kept.items())


def test_evaluate_draws_differ_by_call_and_sample_and_repeat_by_seed():
    mesh = fs.make_mesh({"data": 4})

    def sampled(params, x):
        noise = torch.rand(x.shape[0])
        return noise.mean(), noise

    test = fs.evaluate(sampled, mesh=mesh, batch=P("data"), aux="rows")
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        runs.append([test({}, torch.ones(8))[1] for _ in range(2)])
    first, second = runs[0]
    assert len(torch.cat([first, second]).unique()) == 16
    assert torch.equal(first, runs[1][0]) and torch.equal(second, runs[1][1])


def test_evaluate_in_keyed_random_draws_alike_and_keeps_the_random_state():
    mesh = fs.make_mesh({"data": 4})
    before = torch.get_rng_state()
    test = fs.evaluate(lambda params, x: torch.rand(2).mean(), mesh=mesh, batch=P("data"))
    losses = []
    for _ in range(2):
        with fs.keyed_random(0):
            losses.append(test({}, torch.ones(8)))
    assert losses[0] == losses[1] and torch.equal(before, torch.get_rng_state())


# -- the pieces of a step --------------------------------------------------------------------------


def test_gradient_and_scaled_optimizer_equal_the_step():
    mesh = fs.make_mesh({"data": 2})

    def begin():
        params = fs.shard_params(params_of(), fs.fsdp("data"), mesh=mesh)
        opt = optim.loss_scaled(optim.adamw(0.1, fused=False), initial=2.0**10, interval=2)
        opt = fs.partition_optimizer(opt, mesh=mesh, axis="data", stage=3)
        return opt, params, opt.init(params)

    opt, params, state = begin()
    gradient = fs.value_and_grad(lambda p, b: mean(p, b)[0], mesh=mesh, batch=P("data"))
    only = fs.grad(lambda p, b: mean(p, b)[0], mesh=mesh, batch=P("data"))
    for turn in range(5):
        scale = opt.loss_scale(state)
        loss, grads = gradient(params, batch_of(8 + turn), scale=scale)
        assert torch.equal(
            fs.unshard(only(params, batch_of(8 + turn), scale=scale)["head"]),
            fs.unshard(grads["head"]),
        )
        updates, state = opt.update(grads, state, params)
        params = fs.optim.apply_updates(params, updates)
    opt, others, again = begin()
    step = fs.train_step(lambda p, b: mean(p, b)[0], opt, mesh=mesh, batch=P("data"))
    for turn in range(5):
        others, again, metrics = step(others, again, batch_of(8 + turn))
    assert state["scale"] == again["scale"] == 2.0**12
    torch.testing.assert_close(loss, metrics["loss"])
    torch.testing.assert_close(fs.unshard(params), fs.unshard(others), rtol=1e-5, atol=1e-6)


def test_synchronised_batchnorm_outside_mesh_is_local():
    layer = torch.nn.BatchNorm1d(3)
    x = torch.randn(5, 3)
    apply, params, buffers = fs.functionalize(layer, sync_batchnorm="data")
    y, after = apply(params, buffers, x)
    assert torch.equal(y, layer(x))
    assert all(torch.equal(after[name], own) for name, own in layer.named_buffers())
