"""`replicated` declares a value that is equal on all devices by construction."""

import pytest
import torch
from torch.func import grad, jvp

import fshard as fs
from fshard import P

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)


def ring_sum(x):
    """All-reduce along a ring, by ppermutes alone."""
    n = fs.axis_size("data")
    total = passed = x
    for _ in range(n - 1):
        passed = fs.ppermute(passed, "data", [(index, (index + 1) % n) for index in range(n)])
        total = total + passed
    return total


def mapped(f, **options):
    return fs.shard_map(
        f, mesh=fs.make_mesh({"data": 4}), in_specs=P("data"), out_specs=P(), **options
    )


X = torch.arange(8.0)  # integers: a ring adds in another order on each device


@pytest.mark.parametrize("check", [True, False])
def test_replicated_ring_sum_has_derivatives_of_psum(check):
    weight = torch.tensor([1.0, -2.0])
    ring = mapped(lambda x: fs.replicated(ring_sum(x**2), "data"), check=check)
    psum = mapped(lambda x: fs.psum(x**2, "data"))
    for of in (
        lambda f: fs.unshard(f(X)),
        lambda f: grad(lambda x: (fs.unshard(f(x)) * weight).sum())(X),
        lambda f: jvp(lambda x: fs.unshard(f(x)), (X,), (torch.ones(8),))[1],
    ):
        assert torch.equal(of(ring), of(psum))


def test_replicated_sends_no_bytes():
    with fs.ledger() as comm:
        fs.unshard(mapped(lambda x: fs.replicated({"x": 0 * x}, "data"))(X)["x"])
    assert comm.bytes() == 0


def test_replicated_in_loss_changes_nothing():
    mesh = fs.make_mesh({"data": 2})
    params = torch.ones(2)
    values = [
        fs.value_and_grad(lambda w, x, f=f: (w * f(x)).mean(), mesh=mesh, batch=P("data"))(
            fs.shard_params(params, P(), mesh=mesh), torch.ones(2, 2)
        )
        for f in (ring_sum, lambda x: fs.replicated(ring_sum(x), "data"))
    ]
    assert all(torch.equal(fs.unshard(x), fs.unshard(y)) for x, y in zip(*values, strict=True))
