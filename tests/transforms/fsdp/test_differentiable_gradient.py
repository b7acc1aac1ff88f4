"""Derivatives of `value_and_grad` and `evaluate`, by torch.func and autograd: those of the serial
loss and its gradient.
"""

from itertools import pairwise

import pytest
import torch
from torch.func import grad

import fshard as fs
from fshard import P
from tests.helpers.processes import run_processes

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script"
)  # torch itself uses it in its first jvp

lifted_grad = fs.array.lift(torch.func.grad)
jvp = fs.array.lift(torch.func.jvp)
vjp = fs.array.lift(torch.func.vjp)
TORCH = torch.Generator().manual_seed(0)
SERIAL = {
    "w": torch.randn(6, 4, generator=TORCH, dtype=torch.float64),
    "b": torch.randn(4, generator=TORCH, dtype=torch.float64),
}
TANGENT = {
    name: torch.randn(x.shape, generator=TORCH, dtype=torch.float64) for name, x in SERIAL.items()
}
BATCH = torch.randn(7, 6, generator=TORCH, dtype=torch.float64)
RULES = {
    "replicated": P(),
    "flat": fs.fsdp("data"),
    "dim": {"w": P("data", "model"), "b": P("model")},
}


def losses(params, x):
    """Return the loss of each sample."""
    return (x @ params["w"] + params["b"]).tanh().pow(2).sum(1)


def mean_loss(params, x):
    return losses(params, x).mean()


def token_loss(params, x):
    """Return a mean that each part of the batch weighs by `weight`."""
    return (losses(params, x) * x[:, 0].abs()).sum() / x[:, 0].abs().sum()


LOSSES = {
    "mean": (mean_loss, {}),
    "samples": (losses, {}),
    "weight": (token_loss, {"weight": lambda x: x[:, 0].abs().sum().detach()}),
}


def placed(mesh, rules):
    params = fs.shard_params(SERIAL, rules, mesh=mesh)
    return params, {name: fs.device_put(TANGENT[name], x.layout) for name, x in params.items()}


def serial(loss_fn):
    """Return the gradient function of one device."""
    return lambda params: grad(lambda p: loss_fn(p, BATCH).mean())(params)


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("rules", RULES)
def test_forward_over_reverse(rules, kind):
    loss_fn, options = LOSSES[kind]
    mesh = fs.make_mesh({"data": 2, "model": 2})
    params, tangent = placed(mesh, RULES[rules])
    gradient = fs.grad(loss_fn, mesh=mesh, batch=P("data"), **options)
    actual = jvp(lambda p: gradient(p, BATCH), (params,), (tangent,))
    for each, expected in zip(actual, jvp(serial(loss_fn), (SERIAL,), (TANGENT,)), strict=True):
        assert {name: x.layout for name, x in each.items()} == {
            name: x.layout for name, x in params.items()
        }
        torch.testing.assert_close(fs.unshard(each), expected)


@pytest.mark.parametrize("rules", RULES)
def test_reverse_over_reverse(rules):
    mesh = fs.make_mesh({"data": 2, "model": 2})
    params, tangent = placed(mesh, RULES[rules])
    gradient = fs.grad(mean_loss, mesh=mesh, batch=P("data"))
    _, pull = vjp(lambda p: gradient(p, BATCH), params)
    _, pull_serial = vjp(serial(mean_loss), SERIAL)
    torch.testing.assert_close(fs.unshard(pull(tangent)[0]), pull_serial(TANGENT)[0])


def test_a_loss_that_communicates():
    mesh = fs.make_mesh({"data": 2, "model": 2})
    params, tangent = placed(mesh, fs.fsdp("data"))

    def by_columns(p, x):
        at = fs.axis_index("model")
        own = (x @ p["w"].chunk(2, 1)[at] + p["b"].chunk(2)[at]).tanh().pow(2).sum(1)
        return fs.psum(own, "model").mean()

    gradient = fs.grad(by_columns, mesh=mesh, batch=P("data"))
    actual = jvp(lambda p: gradient(p, BATCH), (params,), (tangent,))
    expected = jvp(serial(mean_loss), (SERIAL,), (TANGENT,))
    torch.testing.assert_close([fs.unshard(each) for each in actual], [*expected])


def test_frozen_parameters_have_no_gradient():
    mesh = fs.make_mesh({"data": 2})
    params, tangent = placed(mesh, fs.fsdp("data"))
    gradient = fs.grad(mean_loss, mesh=mesh, batch=P("data"), frozen="b")
    actual = []
    jvp(lambda p: actual.append(gradient(p, BATCH)) or actual[0]["w"], (params,), (tangent,))
    assert actual[0]["b"] is None


# The loss itself, and penalties of its gradient.


def norm_squared(gradient):
    return sum(fs.unshard((x * x).sum()) for x in gradient.values() if x is not None)


def penalized(value_and_grad):
    """Return the loss plus a penalty of its gradient."""

    def total(params, x):
        loss, gradient = value_and_grad(params, x)
        return loss + 0.1 * norm_squared(gradient)

    return total


def serial_penalized(loss_fn):
    def total(params, x):
        gradient, loss = torch.func.grad_and_value(loss_fn)(params, x)
        return loss + 0.1 * norm_squared(gradient)

    return total


def in_slices(loss_fn, count):
    """Return the mean of a loss over slices of a batch, weighted by samples."""

    def mean(params, x):
        bounds = [number * len(x) // count for number in range(count + 1)]
        slices = [x[start:stop] for start, stop in pairwise(bounds)]
        return sum(loss_fn(params, part) * len(part) for part in slices if len(part)) / len(x)

    return mean


def contrastive(params, x):
    """Return a loss that is no mean over samples: it depends on all samples of a slice."""
    z = (x @ params["w"] + params["b"]).tanh()
    return (z @ z.T).pow(2).mean()


def leaves_that_require_grad(params):
    return {name: x.detach().clone().requires_grad_() for name, x in params.items()}


@pytest.mark.parametrize(
    ("shape", "rules", "loss_fn", "accumulate"),
    [
        ({"data": 2, "model": 2}, "replicated", mean_loss, 1),
        ({"data": 2, "model": 2}, "flat", mean_loss, 1),
        ({"data": 3}, "flat", contrastive, 2),
        ({"data": 2, "model": 2}, "dim", contrastive, 1),
        ({"data": 8}, "flat", mean_loss, 1),  # one device has no sample
    ],
)
def test_gradient_penalty_equals_serial(shape, rules, loss_fn, accumulate):
    mesh = fs.make_mesh(shape)
    params = fs.shard_params(SERIAL, RULES[rules], mesh=mesh)
    options = {"mesh": mesh, "batch": P("data"), "accumulate": accumulate}
    total = penalized(fs.value_and_grad(loss_fn, **options))
    serial_loss = in_slices(loss_fn, shape["data"] * accumulate)
    expected = grad(serial_penalized(serial_loss), argnums=(0, 1))(SERIAL, BATCH)

    by_func = lifted_grad(total, argnums=(0, 1))(params, BATCH)

    torch.testing.assert_close(fs.unshard(by_func), expected)
    leaves = leaves_that_require_grad(params)
    batch = BATCH.clone().requires_grad_()
    by_autograd = torch.autograd.grad(total(leaves, batch), [*leaves.values(), batch])
    torch.testing.assert_close(
        [fs.unshard(x) for x in by_autograd], [*expected[0].values(), expected[1]]
    )


@pytest.mark.parametrize("rules", RULES)
def test_evaluate_has_derivatives_of_the_loss(rules):
    mesh = fs.make_mesh({"data": 2, "model": 2})
    params, tangent = placed(mesh, RULES[rules])
    evaluate = fs.evaluate(mean_loss, mesh=mesh, batch=P("data"))
    expected = grad(mean_loss, argnums=(0, 1))(SERIAL, BATCH)
    torch.testing.assert_close(
        fs.unshard(lifted_grad(evaluate, argnums=(0, 1))(params, BATCH)), expected
    )
    loss, rate = jvp(lambda p: evaluate(p, BATCH), (params,), (tangent,))
    serial_pair = torch.func.jvp(lambda p: mean_loss(p, BATCH), (SERIAL,), (TANGENT,))
    torch.testing.assert_close((loss, rate), serial_pair)
    leaves = leaves_that_require_grad(params)
    gradients = torch.autograd.grad(evaluate(leaves, BATCH), [*leaves.values()])
    torch.testing.assert_close([fs.unshard(x) for x in gradients], [*expected[0].values()])


def test_cotangent_of_the_loss_is_pulled_back():
    mesh = fs.make_mesh({"data": 2})
    params, _ = placed(mesh, fs.fsdp("data"))
    value_and_grad = fs.value_and_grad(mean_loss, mesh=mesh, batch=P("data"))
    (loss, gradient), pull = vjp(lambda p: value_and_grad(p, BATCH), params)
    zeros = {name: x * 0 for name, x in gradient.items()}
    (actual,) = pull((torch.ones_like(loss), zeros))
    torch.testing.assert_close(fs.unshard(actual), grad(mean_loss)(SERIAL, BATCH))


def test_scale_is_differentiated_too():
    mesh = fs.make_mesh({"data": 2})
    params, _ = placed(mesh, fs.fsdp("data"))
    gradient = fs.grad(mean_loss, mesh=mesh, batch=P("data"))
    actual = lifted_grad(lambda p: norm_squared(gradient(p, BATCH, scale=3.0)))(params)
    expected = grad(lambda p: 9 * norm_squared(grad(mean_loss)(p, BATCH)))(SERIAL)
    torch.testing.assert_close(fs.unshard(actual), expected)


def test_hyperparameter_in_the_batch_has_its_derivative():
    mesh = fs.make_mesh({"data": 2, "model": 2})
    params, _ = placed(mesh, fs.fsdp("data"))

    def decayed(p, batch):
        x, decay = batch
        return mean_loss(p, x) + decay * p["w"].square().sum()

    options = {"mesh": mesh, "batch": (P("data"), P()), "accumulate": 2}
    total = penalized(fs.value_and_grad(decayed, **options))
    decay = torch.tensor(0.3, dtype=torch.float64)
    expected = grad(lambda x: serial_penalized(decayed)(SERIAL, (BATCH, x)))(decay)
    torch.testing.assert_close(lifted_grad(lambda x: total(params, (BATCH, x)))(decay), expected)
    leaf = decay.clone().requires_grad_()
    (actual,) = torch.autograd.grad(total(params, (BATCH, leaf)), leaf)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("columns", [4, 3])  # 3: one device has fewer
@pytest.mark.parametrize("is_zero3", [False, True])
def test_local_tensor_parallel_loss_is_differentiated(columns, is_zero3):
    mesh = fs.make_mesh({"data": 2, "model": 2})
    params = {"w": SERIAL["w"][:, :columns], "b": SERIAL["b"][:columns]}
    rules = {"w": P(None, "model"), "b": P("model")}
    rules = fs.fsdp("data", within=rules) if is_zero3 else rules
    shards = fs.shard_params(params, rules, mesh=mesh)

    def by_columns(p, x):
        return fs.psum((x @ p["w"] + p["b"]).tanh().pow(2).sum(1), "model").mean()

    value_and_grad = fs.value_and_grad(by_columns, mesh=mesh, batch=P("data"), local="model")
    actual = lifted_grad(penalized(value_and_grad), argnums=(0, 1))(shards, BATCH)
    expected = grad(serial_penalized(mean_loss), argnums=(0, 1))(params, BATCH)
    torch.testing.assert_close(fs.unshard(actual), expected)


def test_slice_of_weight_0_adds_nothing_to_a_derivative():
    mesh = fs.make_mesh({"data": 2})
    params, _ = placed(mesh, fs.fsdp("data"))
    mask = torch.tensor([0, 0, 0, 1, 1, 1, 1], dtype=torch.float64)

    def masked(p, batch):  # 0 / 0 on the first device
        x, mask = batch
        return (losses(p, x) * mask).sum() / mask.sum()

    options = {"mesh": mesh, "batch": P("data"), "weight": lambda batch: batch[1].sum()}
    total = penalized(fs.value_and_grad(masked, **options))
    actual = lifted_grad(total)(params, (BATCH, mask))
    expected = grad(serial_penalized(masked))(SERIAL, (BATCH, mask))
    torch.testing.assert_close(fs.unshard(actual), expected)


def test_parameter_that_one_device_uses_has_its_derivative():
    mesh = fs.make_mesh({"data": 2})
    params, _ = placed(mesh, fs.fsdp("data"))

    def branching(p, x):
        bias = p["b"].sum() ** 2 if fs.axis_index("data") == 0 else 0.0
        return (x @ p["w"]).square().mean() + bias

    evaluate = fs.evaluate(branching, mesh=mesh, batch=P("data"))
    actual = lifted_grad(evaluate)(params, BATCH[:6])
    expected = grad(lambda p, x: (x @ p["w"]).square().mean() + p["b"].sum() ** 2 / 2)
    torch.testing.assert_close(fs.unshard(actual), expected(SERIAL, BATCH[:6]))


def test_tied_parameter_has_one_derivative():
    mesh = fs.make_mesh({"data": 2})
    params, _ = placed(mesh, fs.fsdp("data"))

    def tied_loss(p, x):
        return mean_loss(p, x) + p["tied"].pow(3).mean()

    def serial_loss(p, x):
        return tied_loss({**p, "tied": p["w"]}, x)

    value_and_grad = fs.value_and_grad(tied_loss, mesh=mesh, batch=P("data"))
    leaves = leaves_that_require_grad(params)
    loss, gradient = value_and_grad({**leaves, "tied": leaves["w"]}, BATCH)
    total = loss + 0.1 * norm_squared({"w": gradient["w"], "b": gradient["b"]})
    (actual,) = torch.autograd.grad(total, [leaves["w"]])
    expected = grad(serial_penalized(serial_loss))(SERIAL, BATCH)
    torch.testing.assert_close(fs.unshard(actual), expected["w"])


def test_dropout_is_that_of_the_step():
    mesh = fs.make_mesh({"data": 2})
    module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(), torch.nn.Linear(8, 2))
    apply, params, buffers = fs.functionalize(module.double())
    params = fs.shard_params(params, fs.fsdp("data"), mesh=mesh)

    def loss_fn(p, x):
        return apply(p, buffers, x)[0].square().mean()

    value_and_grad = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"))
    torch.manual_seed(3)
    _, expected = value_and_grad(params, BATCH)
    torch.manual_seed(3)
    by_func = lifted_grad(lambda p: value_and_grad(p, BATCH)[0])(params)
    torch.testing.assert_close(fs.unshard(by_func), fs.unshard(expected))
    torch.manual_seed(3)
    leaves = leaves_that_require_grad(params)
    loss, _ = value_and_grad(leaves, BATCH)
    state = torch.get_rng_state()
    gradients = torch.autograd.grad(loss, [*leaves.values()])
    torch.testing.assert_close(
        [fs.unshard(x) for x in gradients], [fs.unshard(x) for x in expected.values()]
    )
    assert torch.equal(torch.get_rng_state(), state)


def test_batches_are_mapped_over_by_vmap():
    mesh = fs.make_mesh({"data": 2})
    params, _ = placed(mesh, fs.fsdp("data"))
    evaluate = fs.evaluate(mean_loss, mesh=mesh, batch=P("data"))
    value_and_grad = fs.value_and_grad(mean_loss, mesh=mesh, batch=P("data"))
    batches = torch.stack([BATCH, BATCH * 2, BATCH - 1])
    expected = torch.stack([mean_loss(SERIAL, x) for x in batches])
    for loss in (lambda x: evaluate(params, x), lambda x: value_and_grad(params, x)[0]):
        torch.testing.assert_close(torch.func.vmap(loss)(batches), expected)
    hessian = torch.func.hessian(lambda x: evaluate(params, x))(BATCH)
    torch.testing.assert_close(hessian, torch.func.hessian(lambda x: mean_loss(SERIAL, x))(BATCH))


# Autograd: inputs that require grad.


def test_autograd_third_derivative_equals_serial():
    mesh = fs.make_mesh({"data": 2})
    params, tangent = placed(mesh, fs.fsdp("data"))
    leaves = leaves_that_require_grad(params)
    gradient = fs.grad(mean_loss, mesh=mesh, batch=P("data"))(leaves, BATCH)
    products = sum(fs.unshard((gradient[name] * x).sum()) for name, x in tangent.items())
    hvp = torch.autograd.grad(products, [*leaves.values()], create_graph=True)
    actual = torch.autograd.grad(sum(fs.unshard((x * x).sum()) for x in hvp), [*leaves.values()])

    def serial_hvp(p):
        return torch.func.jvp(serial(mean_loss), (p,), (TANGENT,))[1]

    torch.testing.assert_close([fs.unshard(x) for x in hvp], [*serial_hvp(SERIAL).values()])
    expected = grad(lambda p: norm_squared(serial_hvp(p)))(SERIAL)
    torch.testing.assert_close([fs.unshard(x) for x in actual], [*expected.values()])


def test_autograd_inside_run_equals_serial():
    mesh = fs.make_mesh({"data": 2})
    expected = grad(serial_penalized(mean_loss), argnums=(0, 1))(SERIAL, BATCH)

    def main():
        params = fs.shard_params(SERIAL, fs.fsdp("data"), mesh=mesh)
        total = penalized(fs.value_and_grad(mean_loss, mesh=mesh, batch=P("data")))
        leaves = leaves_that_require_grad(params)
        batch = BATCH.clone().requires_grad_()
        *actual, of_batch = torch.autograd.grad(total(leaves, batch), [*leaves.values(), batch])
        return [*map(fs.unshard, actual), of_batch]

    for actual in fs.run(main, mesh=mesh):
        torch.testing.assert_close(actual, [*expected[0].values(), expected[1]])


def test_results_require_grad_only_if_an_input_does():
    mesh = fs.make_mesh({"data": 2})
    params, _ = placed(mesh, fs.fsdp("data"))
    value_and_grad = fs.value_and_grad(mean_loss, mesh=mesh, batch=P("data"))
    loss, gradient = value_and_grad(params, BATCH)
    assert not loss.requires_grad and not gradient["w"].requires_grad
    leaves = leaves_that_require_grad(params)
    recorded_loss, recorded_gradient = value_and_grad(leaves, BATCH)
    assert recorded_loss.requires_grad and recorded_gradient["w"].requires_grad
    torch.testing.assert_close(recorded_loss.detach(), loss, rtol=0, atol=0)
    with torch.no_grad():
        assert not value_and_grad(leaves, BATCH)[0].requires_grad


def test_parameters_that_require_grad_train_as_others_do():
    mesh = fs.make_mesh({"data": 2})
    params, _ = placed(mesh, fs.fsdp("data"))
    optimizer = fs.optim.adamw(0.1)
    step = fs.train_step(mean_loss, optimizer, mesh=mesh, batch=P("data"))
    value_and_grad = fs.value_and_grad(mean_loss, mesh=mesh, batch=P("data"))
    results = []
    for start in (params, leaves_that_require_grad(params)):
        trained, _, _ = step(start, optimizer.init(start), BATCH)
        _, gradient = value_and_grad(start, BATCH)
        updates, _ = optimizer.update(gradient, optimizer.init(start), start)
        by_hand = fs.optim.apply_updates(start, updates)
        assert not trained["w"].requires_grad and not updates["w"].requires_grad
        results.append([fs.unshard(x.detach()) for x in (*trained.values(), *by_hand.values())])
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_parameters_written_before_the_backward_raise():
    mesh = fs.make_mesh({"data": 2})
    params, _ = placed(mesh, fs.fsdp("data"))
    leaves = leaves_that_require_grad(params)
    loss, _ = fs.value_and_grad(mean_loss, mesh=mesh, batch=P("data"))(leaves, BATCH)
    with torch.no_grad():
        leaves["w"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, leaves["w"])


@pytest.mark.parametrize(
    ("name", "options"),
    [("has_aux", {"has_aux": True}), ("reproducible", {"reproducible": True, "slices": 4})],
)
def test_options_without_a_differentiable_program_raise(name, options):
    is_aux = name == "has_aux"
    mesh = fs.make_mesh({"data": 2})
    params, _ = placed(mesh, P())

    def loss_fn(p, x):
        return (mean_loss(p, x), {}) if is_aux else mean_loss(p, x)

    def loss_of(function, p):
        result = function(p, BATCH)
        result = result[0] if function is value_and_grad else result
        return result[0] if is_aux else result

    settings = {"mesh": mesh, "batch": P("data"), **options}
    value_and_grad = fs.value_and_grad(loss_fn, **settings)
    for function in (value_and_grad, fs.evaluate(loss_fn, **settings)):
        with pytest.raises(ValueError, match=f"must not have {name} where"):
            jvp(lambda p, function=function: loss_of(function, p), (params,), (params,))
        leaves = leaves_that_require_grad(params)
        loss = loss_of(function, leaves)
        with pytest.raises(ValueError, match=f"must not have {name} where"):
            torch.autograd.grad(loss, leaves["w"])


def test_stages_raise_where_they_are_differentiated():
    schedule = fs.pipeline_schedule("1f1b", stages=2, microbatches=2)
    mesh = fs.make_mesh({"pipe": 2})
    params = fs.shard_stages([torch.tensor(2.0), torch.tensor(3.0)], mesh=mesh, schedule=schedule)
    options = {"mesh": mesh, "batch": P(), "schedule": schedule, "loss": lambda y, x: y.mean()}
    for function in (fs.value_and_grad, fs.evaluate):
        gradient = function([torch.mul] * 2, **options)
        with pytest.raises(TypeError, match="of stages must not be differentiated"):
            lifted_grad(lambda p, gradient=gradient: gradient(p, torch.arange(4.0)))(params)
        for x in params:
            x.requires_grad_()
        result = gradient(params, torch.arange(4.0))
        loss = result[0] if function is fs.value_and_grad else result
        with pytest.raises(TypeError, match="of stages must not be differentiated"):
            torch.autograd.grad(loss, params[0])


def derivatives_on_a_process():
    """Return the derivatives of a gradient penalty by torch.func and by autograd."""
    mesh = fs.make_mesh({"data": 2})
    params = fs.shard_params(SERIAL, fs.fsdp("data"), mesh=mesh)
    total = penalized(fs.value_and_grad(mean_loss, mesh=mesh, batch=P("data")))
    of_params, of_batch = lifted_grad(total, argnums=(0, 1))(params, BATCH)
    leaves = leaves_that_require_grad(params)
    batch = BATCH.clone().requires_grad_()
    *actual, of_leaf = torch.autograd.grad(total(leaves, batch), [*leaves.values(), batch])
    return [*map(fs.unshard, of_params.values()), of_batch], [*map(fs.unshard, actual), of_leaf]


def test_processes_have_the_serial_derivatives():
    expected = grad(serial_penalized(mean_loss), argnums=(0, 1))(SERIAL, BATCH)
    for by_func, by_autograd in run_processes(derivatives_on_a_process, 2, timeout=170):
        torch.testing.assert_close(by_func, [*expected[0].values(), expected[1]])
        torch.testing.assert_close(by_autograd, by_func)
