"""Derivatives through pure updates by torch.func: those of the serial update; optimizers that write
in place raise.
"""

import pytest
import torch
from optree import tree_map

import fshard as fs
from fshard import P
from fshard.errors import OptimizerError

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script"
)  # torch itself uses it in its first jvp

grad, jvp, vjp = (
    fs.array.lift(transform) for transform in (torch.func.grad, torch.func.jvp, torch.func.vjp)
)
GENERATOR = torch.Generator().manual_seed(0)
SERIAL = {
    "w": torch.randn(5, 3, generator=GENERATOR, dtype=torch.float64),
    "b": torch.randn(3, generator=GENERATOR, dtype=torch.float64),
}
BATCH = torch.randn(6, 5, generator=GENERATOR, dtype=torch.float64)
MESH = fs.make_mesh({"data": 2, "model": 2})
RULES = {
    "replicated": P(),
    "flat": fs.fsdp("data"),
    "mixed": {"w": P.flat("data", "model"), "b": P()},
}


def loss_fn(params, x):
    return torch.tanh(x @ params["w"] + params["b"]).pow(2).mean()


def init(params):
    momentum = tree_map(torch.zeros_like, params)
    return {"m": momentum, "lr": torch.tensor(0.5, dtype=torch.float64), "n": torch.tensor(0)}


def update(grads, state, params):
    momentum = tree_map(lambda m, g: 0.9 * m + g, state["m"], grads)
    after = {"m": momentum, "lr": state["lr"], "n": state["n"] + 1}
    return tree_map(lambda m: -state["lr"] * m, momentum), after


optim = fs.optim
PURE = {
    "own": optim.Optimizer(init, update, sharding="flat"),
    "own of full parameters": optim.Optimizer(init, update),
    "scale": optim.scale(-0.5),
    "clipped by value": optim.chain(optim.clip_by_value(0.05), optim.scale(-0.5)),
    "clipped by norm": optim.chain(optim.clip_by_global_norm(0.05), optim.scale(-0.5)),
    "decayed": optim.chain(optim.add_decayed_weights(0.1), optim.scale(-0.5)),
    "by label": optim.by_label(
        {"a": optim.scale(-0.5), "b": optim.Optimizer(init, update, sharding="flat")},
        {"w": "a", "b": "b"},
    ),
}


def unrolled(optimizer, gradient, params, state=None, steps=2):
    """Return parameters after some steps."""
    state = optimizer.init(params) if state is None else state
    for _ in range(steps):
        updates, state = optimizer.update(gradient(params, BATCH), state, params)
        params = optim.apply_updates(params, updates)
    return params


def serial_loss(optimizer, params, state=None):
    after = unrolled(optimizer, torch.func.grad(loss_fn), params, state)
    return loss_fn(after, BATCH)


@pytest.mark.parametrize(
    ("name", "stage", "rules"),
    [
        ("own", 1, "replicated"),
        ("own", 3, "flat"),
        ("own", 2, "mixed"),
        ("own of full parameters", 1, "replicated"),
        ("own of full parameters", 3, "flat"),
        ("scale", 3, "flat"),
        ("clipped by value", 1, "replicated"),
        ("clipped by norm", 1, "replicated"),
        ("clipped by norm", 3, "mixed"),
        ("decayed", 3, "flat"),
        ("by label", 1, "replicated"),
    ],
)
def test_unrolled_pure_updates_have_serial_derivatives(name, stage, rules):
    params = fs.shard_params(SERIAL, RULES[rules], mesh=MESH)
    optimizer = fs.partition_optimizer(PURE[name], mesh=MESH, axis="data", stage=stage)
    gradient = fs.grad(loss_fn, mesh=MESH, batch=P("data"))
    evaluate = fs.evaluate(loss_fn, mesh=MESH, batch=P("data"))
    expected = torch.func.grad(lambda p: serial_loss(PURE[name], p))(SERIAL)

    def loss(p):
        return evaluate(unrolled(optimizer, gradient, p), BATCH)

    torch.testing.assert_close(fs.unshard(grad(loss)(params)), expected)
    tangent = {name: x * 2 for name, x in params.items()}
    rate = sum((expected[name] * x * 2).sum() for name, x in SERIAL.items())
    torch.testing.assert_close(jvp(loss, (params,), (tangent,))[1], rate)


def test_unrolled_updates_have_derivatives_beside_a_tensor_on_the_host():
    elsewhere = fs.device_put(torch.ones(2), fs.Layout(MESH).with_memory("host"))
    test_unrolled_pure_updates_have_serial_derivatives("own", 1, "replicated")
    assert elsewhere.layout.memory == "host"


@pytest.mark.parametrize("rules", ["flat", "mixed"])
def test_learning_rate_in_the_state_has_its_derivative(rules):
    params = fs.shard_params(SERIAL, RULES[rules], mesh=MESH)
    optimizer = fs.partition_optimizer(PURE["own"], mesh=MESH, axis="data", stage=1)
    gradient = fs.grad(loss_fn, mesh=MESH, batch=P("data"))
    evaluate = fs.evaluate(loss_fn, mesh=MESH, batch=P("data"))
    state = optimizer.init(params)
    serial_state = PURE["own"].init(SERIAL)
    rate = torch.tensor(0.5, dtype=torch.float64)

    def loss(lr):
        return evaluate(unrolled(optimizer, gradient, params, {**state, "lr": lr}), BATCH)

    expected = torch.func.grad(
        lambda lr: serial_loss(PURE["own"], SERIAL, {**serial_state, "lr": lr})
    )
    torch.testing.assert_close(grad(loss)(rate), expected(rate))


def test_pure_step_is_differentiated():
    params = fs.shard_params(SERIAL, fs.fsdp("data"), mesh=MESH)
    step = optim.pure_step(optim.scale(-0.5))
    gradient = fs.grad(loss_fn, mesh=MESH, batch=P("data"))
    state = optim.scale(-0.5).init(params)
    after, pull = vjp(lambda p: step(gradient(p, BATCH), state, p)[0], params)

    def serial_step(p):
        gradient = torch.func.grad(loss_fn)(p, BATCH)
        return {name: x - 0.5 * gradient[name] for name, x in p.items()}

    expected, serial_pull = torch.func.vjp(serial_step, SERIAL)
    torch.testing.assert_close(fs.unshard(pull(after)[0]), serial_pull(expected)[0])


IN_PLACE = {
    "sgd": lambda: optim.sgd(0.1),
    "adamw": lambda: optim.adamw(0.1),
    "lamb": lambda: optim.lamb(0.1),
    "of torch": lambda: optim.from_torch(torch.optim.RMSprop, lr=0.1),
    "averaged": lambda: optim.ema(PURE["own"], 0.9),
    "accumulated": lambda: optim.accumulate(PURE["own"], 2),
    "masters": lambda: optim.with_master_weights(optim.sgd(0.1)),
    "scaled": lambda: optim.loss_scaled(PURE["own"]),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_optimizers_that_write_in_place_raise(name):
    optimizer = IN_PLACE[name]()
    params = fs.shard_params(SERIAL, fs.fsdp("data"), mesh=MESH)
    state = optimizer.init(params)
    for act in (optimizer.update, optim.pure_step(optimizer)):
        with pytest.raises(OptimizerError, match="within a transform of torch.func"):
            jvp(lambda p, act=act: act(p, state, p)[0], (params,), (params,))


def test_train_step_within_a_transform_raises():
    params = fs.shard_params(SERIAL, fs.fsdp("data"), mesh=MESH)
    optimizer = optim.sgd(0.1)
    step = fs.train_step(loss_fn, optimizer, mesh=MESH, batch=P("data"))
    state = optimizer.init(params)
    with pytest.raises(TypeError, match="must not be called within a transform of torch.func"):
        vjp(lambda p: step(p, state, BATCH)[0], params)


@pytest.mark.parametrize("communicate", [fs.psum, optim.global_norm])
def test_update_that_communicates_raises_within_a_transform(communicate):
    def normalized(grads, state, params):
        if communicate is fs.psum:
            norm = fs.psum(sum(g.pow(2).sum() for g in grads.values() if g is not None), "data")
        else:
            norm = communicate(grads)
        return tree_map(lambda g: -g / (1 + norm), grads), state

    params = fs.shard_params(SERIAL, fs.fsdp("data"), mesh=MESH)
    own = optim.Optimizer(lambda p: (), normalized, sharding="flat")
    optimizer = fs.partition_optimizer(own, mesh=MESH, axis="data", stage=3)
    optimizer.update(params, (), params)
    with pytest.raises(OptimizerError, match="within a transform of torch.func"):
        grad(lambda p: fs.unshard((optimizer.update(p, (), p)[0]["w"] ** 2).sum()))(params)
