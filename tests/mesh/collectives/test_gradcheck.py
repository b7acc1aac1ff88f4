"""A shard_map seen from outside is a function like any other: torch's own checks of derivatives, and random losses of it."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import fshard as fs
from fshard import P

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script",  # torch itself uses it in its first jvp
    "ignore:Input #0 requires gradient and is not a double precision",
)
PROGRAMS: dict[str, tuple[Any, P, Any]] = {
    # name: what each device does, how the results lie, and the same on the whole tensor (of 4 rows, on 2 devices)
    "psum": (lambda x: fs.psum(x.sin() * x, "data"), P(), lambda x: (x.sin() * x).unflatten(0, (2, 2)).sum(0)),
    "alone": (lambda x: x * x, P("data"), lambda x: x * x),
    "linear": (lambda x: x * 3, P("data"), lambda x: x * 3),
    "all_gather": (lambda x: fs.all_gather(x, "data").sum() * x**2, P("data"), lambda x: x.sum() * x**2),
    "ppermute": (lambda x: fs.ppermute(x, "data", [(0, 1), (1, 0)]) * x, P("data"), lambda x: x.roll(2, 0) * x),
    "pmax": (lambda x: fs.pmax(x * 2, "data") ** 2, P(), lambda x: (x * 2).unflatten(0, (2, 2)).amax(0) ** 2),
    "a sum": (lambda x: fs.psum(x.exp().sum(), "data"), P(), lambda x: x.exp().sum()),
    "expanded": (lambda x: (x.sum() * 2).expand(3), P("data"), lambda x: (x.unflatten(0, (2, 2)).sum(1) * 2).repeat_interleave(3)),
}  # fmt: skip
LOSSES = {
    "sum": torch.sum,
    "mean": torch.mean,
    "square": lambda y: y.square().sum(),
    "exp of sum": lambda y: (y.sum() / 9).exp(),
    "product": torch.prod,
    "maximum": torch.amax,
    "one place, expanded": lambda y: y.flatten()[0].expand(3).sum(),
}
X = torch.tensor([0.3, -1.2, 0.7, 2.1], dtype=torch.float64)


def on_mesh(name):
    body, lies, _ = PROGRAMS[name]
    mapped = fs.shard_map(body, mesh=fs.make_mesh({"data": 2}), in_specs=P("data"), out_specs=lies)
    return lambda x: fs.unshard(mapped(x))


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradcheck_of_shard_map(name):
    f, x = on_mesh(name), X.clone().requires_grad_()
    assert gradcheck(f, x, check_batched_grad=True, check_forward_ad=True, check_batched_forward_grad=True)
    assert gradgradcheck(f, x, check_batched_grad=True, check_fwd_over_rev=True, check_rev_over_rev=True)


def test_gradcheck_of_device_put():
    layout = fs.Layout(fs.make_mesh({"data": 2}), P("data"))
    x = X.clone().requires_grad_()
    for to in (P(), P.flat("data")):
        f = lambda x, to=to: fs.unshard(fs.reshard(fs.device_put(x, layout), layout.with_spec(to))) ** 2  # noqa: E731
        assert gradcheck(f, x, check_batched_grad=True, check_forward_ad=True, check_batched_forward_grad=True)
        assert gradgradcheck(f, x, check_batched_grad=True, check_fwd_over_rev=True)


DERIVATIVES = {
    "hessian": lambda loss, v: hessian(loss)(X),
    "forward over reverse": lambda loss, v: jvp(grad(loss), (X,), (v,))[1],
    "forward over forward": lambda loss, v: jacfwd(jacfwd(loss))(X),
    "reverse over forward": lambda loss, v: jacrev(jacfwd(loss))(X),
    "reverse over reverse": lambda loss, v: jacrev(jacrev(loss))(X),
    "of many": lambda loss, v: vmap(grad(loss))(torch.stack([X, v])),
    "along many": lambda loss, v: vmap(lambda v: jvp(loss, (X,), (v,))[1])(torch.stack([X, v])),
}


@settings(max_examples=25)
@given(
    name=st.sampled_from([*PROGRAMS]),
    inner=st.sampled_from([*LOSSES]),
    weight=st.sampled_from([0.0, 1.0, -2.0]),
    way=st.sampled_from([*DERIVATIVES]),
)
def test_second_derivatives_equal_one_device(name, inner, weight, way):
    whole, sharded = PROGRAMS[name][2], on_mesh(name)
    v = torch.tensor([1.0, -0.5, 0.25, 2.0], dtype=torch.float64)

    def loss_of(f):
        return lambda x: LOSSES[inner](f(x)) + weight * f(x).sum()

    torch.testing.assert_close(DERIVATIVES[way](loss_of(sharded), v), DERIVATIVES[way](loss_of(whole), v))


@pytest.mark.parametrize("again", [{"retain_graph": True}, {"create_graph": True}])
def test_batched_gradients_of_retained_graph(again):
    x = X.clone().requires_grad_()
    y, eye = on_mesh("psum")(x), torch.eye(2, dtype=X.dtype)
    found = [torch.autograd.grad(y, x, eye, is_grads_batched=True, **again)[0] for _ in range(2)]
    expected = torch.autograd.functional.jacobian(PROGRAMS["psum"][2], X)
    for one in found:
        torch.testing.assert_close(one, expected)
    if "create_graph" in again:
        torch.testing.assert_close(
            torch.autograd.grad(found[1].sum(), x)[0],
            hessian(lambda x: PROGRAMS["psum"][2](x).sum())(X).sum(0),
        )
