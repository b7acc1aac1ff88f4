"""A shard_map seen from outside is a function like any other: torch's own checks of derivatives."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.func import hessian

import fshard as fs
from fshard import P

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script",  # torch itself uses it in its first jvp
    "ignore:Input #0 requires gradient and is not a double precision",
)


SHARDED = P("data")


def mapped(body, spec=SHARDED):
    f = fs.shard_map(body, mesh=fs.make_mesh({"data": 2}), in_specs=SHARDED, out_specs=spec)
    return lambda x: fs.unshard(f(x))


def put_and_resharded(spec):
    layout = fs.Layout(fs.make_mesh({"data": 2}), P("data"))
    return lambda x: fs.unshard(fs.reshard(fs.device_put(x, layout), layout.with_spec(spec))) ** 2


PSUM = mapped(lambda x: fs.psum(x.sin() * x, "data"), P())
LINEAR = mapped(lambda x: x * 3)
EXPANDED = mapped(lambda x: (x.sum() * 2).expand(3))
FUNCTIONS = {
    "psum": PSUM,
    "alone": mapped(lambda x: x * x),
    "linear": LINEAR,
    "all_gather": mapped(lambda x: fs.all_gather(x, "data").sum() * x**2),
    "ppermute": mapped(lambda x: fs.ppermute(x, "data", [(0, 1), (1, 0)]) * x),
    "pmax": mapped(lambda x: fs.pmax(x * 2, "data") ** 2, P()),
    "a sum": mapped(lambda x: fs.psum(x.exp().sum(), "data"), P()),
    "expanded": EXPANDED,
    "of expanded cotangents": lambda x: EXPANDED(x).sum() + EXPANDED(x).square().sum(),
    "of one element, expanded": lambda x: LINEAR(x)[0].expand(3).sum(),
    "product": lambda x: PSUM(x).prod(),
    "device_put, all_gather": put_and_resharded(P()),
    "device_put, flat": put_and_resharded(P.flat("data")),
}
X = torch.tensor([0.3, -1.2, 0.7, 2.1], dtype=torch.float64)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradcheck(name):
    f = FUNCTIONS[name]
    x = X.clone().requires_grad_()
    assert gradcheck(
        f, x, check_batched_grad=True, check_forward_ad=True, check_batched_forward_grad=True
    )
    assert gradgradcheck(
        f, x, check_batched_grad=True, check_fwd_over_rev=True, check_rev_over_rev=True
    )


@pytest.mark.parametrize("options", [{"retain_graph": True}, {"create_graph": True}])
def test_batched_gradients_of_retained_graph(options):
    x = X.clone().requires_grad_()
    y = PSUM(x)
    eye = torch.eye(2, dtype=X.dtype)
    jacobians = [
        torch.autograd.grad(y, x, eye, is_grads_batched=True, **options)[0] for _ in range(2)
    ]
    for jacobian in jacobians:
        torch.testing.assert_close(jacobian, torch.autograd.functional.jacobian(PSUM, X))
    if "create_graph" in options:
        (second,) = torch.autograd.grad(jacobians[1].sum(), x)
        torch.testing.assert_close(second, hessian(lambda x: PSUM(x).sum())(X).sum(0))
