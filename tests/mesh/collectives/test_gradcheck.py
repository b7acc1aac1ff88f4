"""A shard_map seen from outside is a function like any other: torch's own checks of derivatives, and random losses."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck
from torch.func import hessian

import fshard as fs
from fshard import P
from tests.mesh.collectives.test_derivatives import KINDS

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script",  # torch itself uses it in its first jvp
    "ignore:Input #0 requires gradient and is not a double precision",
)


def halves(x):
    return x.unflatten(0, (2, 2))


PROGRAMS: dict[str, tuple[Any, P, Any]] = {
    # name: what each device does, the spec of the results, and the same on the full tensor (of 4 rows, on 2 devices)
    "psum": (lambda x: fs.psum(x.sin() * x, "data"), P(), lambda x: halves(x.sin() * x).sum(0)),
    "alone": (lambda x: x * x, P("data"), lambda x: x * x),
    "linear": (lambda x: x * 3, P("data"), lambda x: x * 3),
    "all_gather": (lambda x: fs.all_gather(x, "data").sum() * x**2, P("data"), lambda x: x.sum() * x**2),
    "ppermute": (lambda x: fs.ppermute(x, "data", [(0, 1), (1, 0)]) * x, P("data"), lambda x: x.roll(2, 0) * x),
    "pmax": (lambda x: fs.pmax(x * 2, "data") ** 2, P(), lambda x: halves(x * 2).amax(0) ** 2),
    "a sum": (lambda x: fs.psum(x.exp().sum(), "data"), P(), lambda x: x.exp().sum()),
    "expanded": (lambda x: x.sum().expand(3), P("data"), lambda x: halves(x).sum(1).repeat_interleave(3)),
}
LOSSES = {
    "sum": torch.sum,
    "mean": torch.mean,
    "square": lambda y: y.square().sum(),
    "exp of sum": lambda y: (y.sum() / 9).exp(),
    "product": torch.prod,
    "maximum": torch.amax,
    "one element, expanded": lambda y: y.flatten()[0].expand(3).sum(),
}
SECOND = [name for name in KINDS if "hessian" in name or "over" in name or "of" in name]
"""Kinds that differentiate twice or map a derivative; those of autograd alone raise where a function is linear."""
X = torch.tensor([0.3, -1.2, 0.7, 2.1], dtype=torch.float64)


def on_mesh(name):
    body, spec, _ = PROGRAMS[name]
    mapped = fs.shard_map(body, mesh=fs.make_mesh({"data": 2}), in_specs=P("data"), out_specs=spec)
    return lambda x: fs.unshard(mapped(x))


def put_and_resharded(spec):
    layout = fs.Layout(fs.make_mesh({"data": 2}), P("data"))
    return lambda x: fs.unshard(fs.reshard(fs.device_put(x, layout), layout.with_spec(spec))) ** 2


FUNCTIONS = {name: lambda name=name: on_mesh(name) for name in PROGRAMS} | {
    "device_put, all_gather": lambda: put_and_resharded(P()),
    "device_put, flat": lambda: put_and_resharded(P.flat("data")),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradcheck(name):
    f, x = FUNCTIONS[name](), X.clone().requires_grad_()
    assert gradcheck(f, x, check_batched_grad=True, check_forward_ad=True, check_batched_forward_grad=True)
    assert gradgradcheck(f, x, check_batched_grad=True, check_fwd_over_rev=True, check_rev_over_rev=True)


@settings(max_examples=25)
@given(
    name=st.sampled_from([*PROGRAMS]),
    inner=st.sampled_from([*LOSSES]),
    weight=st.sampled_from([0.0, 1.0, -2.0]),
    kind=st.sampled_from(SECOND),
)
def test_derivatives_of_drawn_losses_equal_one_device(name, inner, weight, kind):
    v = torch.tensor([1.0, -0.5, 0.25, 2.0], dtype=torch.float64)

    def loss_of(f):
        return lambda w, x: LOSSES[inner](f(w)) + weight * f(w).sum()

    sharded, serial = (KINDS[kind](loss_of(f), X.clone(), None, v) for f in (on_mesh(name), PROGRAMS[name][2]))
    torch.testing.assert_close(sharded, serial)


@pytest.mark.parametrize("options", [{"retain_graph": True}, {"create_graph": True}])
def test_batched_gradients_of_retained_graph(options):
    serial, x = PROGRAMS["psum"][2], X.clone().requires_grad_()
    y, eye = on_mesh("psum")(x), torch.eye(2, dtype=X.dtype)
    jacobians = [torch.autograd.grad(y, x, eye, is_grads_batched=True, **options)[0] for _ in range(2)]
    for jacobian in jacobians:
        torch.testing.assert_close(jacobian, torch.autograd.functional.jacobian(serial, X))
    if "create_graph" in options:
        (second,) = torch.autograd.grad(jacobians[1].sum(), x)
        torch.testing.assert_close(second, hessian(lambda x: serial(x).sum())(X).sum(0))
