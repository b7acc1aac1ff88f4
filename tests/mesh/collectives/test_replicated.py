"""`replicated` declares a value that is equal on all devices by construction."""

import pytest
import torch

import fshard as fs
from fshard import P

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


def ring_sum(x, axis="data"):
    """All-reduce along a ring, by ppermutes alone."""
    n = fs.axis_size(axis)
    total = passed = x
    for _ in range(n - 1):
        passed = fs.ppermute(passed, axis, [(index, (index + 1) % n) for index in range(n)])
        total = total + passed
    return total


def mapped(f, n=4, **options):
    return fs.shard_map(f, mesh=fs.make_mesh({"data": n}), in_specs=P("data"), out_specs=P(), **options)


X = torch.arange(8.0)  # integers: a ring adds in another order on each device


@pytest.mark.parametrize("check", [True, False])
def test_replicated_ring_sum_has_gradient_of_psum(check):
    f = mapped(lambda x: fs.replicated(ring_sum(x**2), "data"), check=check)
    expected = mapped(lambda x: fs.psum(x**2, "data"))
    weight = torch.tensor([1.0, -2.0])
    assert torch.equal(fs.unshard(f(X)), fs.unshard(expected(X)))
    found, wanted = (torch.func.grad(lambda x, f=f: (fs.unshard(f(x)) * weight).sum())(X) for f in (f, expected))
    assert torch.equal(found, wanted)
    v = torch.ones(8)
    assert torch.equal(*(torch.func.jvp(lambda x, f=f: fs.unshard(f(x)), (X,), (v,))[1] for f in (f, expected)))


def test_replicated_sends_no_bytes():
    with fs.ledger() as comm:
        fs.unshard(mapped(lambda x: fs.replicated({"x": 0 * x}, "data"))(X.requires_grad_(False))["x"])
    assert comm.bytes() == 0


def test_replicated_unequal_values_raise_under_check():
    with pytest.raises(fs.errors.PromiseError, match=r'the argument of fs.replicated over "data" must be equal'):
        mapped(lambda x: fs.replicated(x, "data"), check=True)(X)


def test_audit_without_replicated_names_it():
    x = X.clone().requires_grad_()
    with pytest.raises(fs.errors.PromiseError, match=r"declare it with fs.replicated\(x, axis\)"):
        fs.unshard(mapped(ring_sum, check=True)(x)).sum().backward()


def test_replicated_in_loss_changes_nothing():
    def loss(w, x):
        return (w * fs.replicated(ring_sum(x), "data")).mean()

    mesh = fs.make_mesh({"data": 2})
    params = fs.shard_params(torch.ones(2), P(), mesh=mesh)
    value, grads = fs.value_and_grad(loss, mesh=mesh, batch=P("data"))(params, torch.ones(2, 2))
    plain = fs.value_and_grad(lambda w, x: (w * ring_sum(x)).mean(), mesh=mesh, batch=P("data"))
    expected = plain(params, torch.ones(2, 2))
    assert torch.equal(value, expected[0]) and torch.equal(fs.unshard(grads), fs.unshard(expected[1]))
