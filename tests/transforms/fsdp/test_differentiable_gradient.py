"""`fs.grad` within transforms of torch.func: the derivatives of the serial gradient, in the parameters' layouts."""

import pytest
import torch
from torch.func import grad

import fshard as fs
from fshard import P

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script"
)  # torch itself uses it in its first jvp

jvp, vjp = fs.array.lift(torch.func.jvp), fs.array.lift(torch.func.vjp)
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
    found = jvp(lambda p: gradient(p, BATCH), (params,), (tangent,))
    for each, wanted in zip(found, jvp(serial(loss_fn), (SERIAL,), (TANGENT,)), strict=True):
        assert {name: x.layout for name, x in each.items()} == {
            name: x.layout for name, x in params.items()
        }
        torch.testing.assert_close(fs.unshard(each), wanted)


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
    found = jvp(lambda p: gradient(p, BATCH), (params,), (tangent,))
    wanted = jvp(serial(mean_loss), (SERIAL,), (TANGENT,))
    torch.testing.assert_close([fs.unshard(each) for each in found], [*wanted])


def test_frozen_parameters_have_no_gradient():
    mesh = fs.make_mesh({"data": 2})
    params, tangent = placed(mesh, fs.fsdp("data"))
    gradient = fs.grad(mean_loss, mesh=mesh, batch=P("data"), frozen="b")
    found = []
    jvp(lambda p: found.append(gradient(p, BATCH)) or found[0]["w"], (params,), (tangent,))
    assert found[0]["b"] is None


def test_options_that_a_transform_does_not_take():
    mesh = fs.make_mesh({"data": 2})
    params, tangent = placed(mesh, P())
    gradient = fs.grad(lambda p, x: (mean_loss(p, x), {}), mesh=mesh, batch=P("data"), has_aux=True)
    with pytest.raises(ValueError, match="must not have has_aux within a torch.func transform"):
        jvp(lambda p: gradient(p, BATCH), (params,), (tangent,))
