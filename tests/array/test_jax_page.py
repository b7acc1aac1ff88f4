"""The programs of JAX's page "Distributed arrays and automatic parallelization", one by one."""

import itertools

import pytest
import torch

import fshard as fs
from fshard import P


def put(x, mesh, *entries):
    return fs.device_put(x, fs.Layout(mesh, P(*entries)))


def types(*xs):
    return [str(fs.typeof(x)).removeprefix("f32") for x in xs]


MESH = fs.make_mesh((4, 2), ("a", "b"))


def test_intro_elementwise_results_are_sharded_like_their_argument():
    x = torch.randn(64, 64)
    y = put(x, MESH, "a", "b")
    z = torch.sin(y)
    assert types(y, z) == ["[64@a, 64@b]"] * 2
    assert len(z.shards) == 8 and tuple(z.shards[0].shape) == (16, 32)
    torch.testing.assert_close(fs.unshard(z), torch.sin(x))


def test_layouts_describe_how_values_are_spread():
    x = torch.randn(64, 64)
    for entries, shown, shard in (
        (("a", "b"), "[64@a, 64@b]", (16, 32)),
        (("b", "a"), "[64@b, 64@a]", (32, 16)),
        ((("a", "b"), None), "[64@a+b, 64]", (8, 64)),
        ((None, "b"), "[64, 64@b]", (64, 32)),
        ((None, "a"), "[64, 64@a]", (64, 16)),
        (("a",), "[64@a, 64]", (16, 64)),
        ((), "[64, 64]", (64, 64)),
    ):
        y = put(x, MESH, *entries)
        assert (types(y), tuple(y.shards[0].shape)) == ([shown], shard)


def test_computation_follows_data():
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    x = put(a, MESH, "a", "b")
    with fs.ledger() as comm:
        y, total = torch.sin(x), x.sum(0)
    assert types(x, y, total) == ["[64@a, 64@b]", "[64@a, 64@b]", "[64@b]{U:a}"]
    assert comm.calls() == 0
    left, right = put(a, MESH, "a"), put(b, MESH, None, "b")
    with fs.ledger() as comm:
        product = left @ right
    assert types(product) == ["[64@a, 64@b]"]
    assert comm.calls() == 0
    torch.testing.assert_close(fs.unshard(product), a @ b)


def test_uncommitted_values_join_and_conflicts_are_resolved_by_cost():
    x, y = put(torch.ones(64, 64), MESH, "a", "b"), put(torch.ones(64, 64), MESH, "b", "a")
    assert types(x + 1, x * torch.tensor(2.0)) == ["[64@a, 64@b]"] * 2
    other = fs.make_mesh({"c": 2})
    with pytest.raises(fs.errors.MeshError, match="must be on one mesh"):
        x + put(torch.ones(64, 64), other)
    with fs.ledger() as comm:
        z = x + y
    assert types(z) == ["[64@a, 64@b]"]
    assert comm.bytes() > 0 and float(z.sum()) == 2 * 64 * 64


def test_constraining_intermediates():
    x = put(torch.randn(64, 64), MESH, "a", "b")

    def f(x):
        x = x + 1
        return fs.array.constrain(x, P(None, "b"))

    assert types(f(x)) == ["[64, 64@b]"]
    torch.testing.assert_close(fs.unshard(f(x)), fs.unshard(x) + 1)


def predict(params, inputs):
    for w, b in params:
        outputs = inputs @ w + b
        inputs = torch.relu(outputs)
    return outputs


def loss(params, batch):
    inputs, targets = batch
    return ((predict(params, inputs) - targets) ** 2).sum(-1).mean()


def init(sizes):
    draw = torch.Generator().manual_seed(0)
    return [
        (torch.randn(m, n, generator=draw) / m**0.5, torch.randn(n, generator=draw))
        for m, n in itertools.pairwise(sizes)
    ]


def check(params, batch, arrays, array_batch):
    for w, b in (*params, *arrays):
        w.requires_grad_(), b.requires_grad_()
    wanted, found = loss(params, batch), loss(arrays, array_batch)
    wanted.backward(), found.backward()
    torch.testing.assert_close(fs.unshard(found.detach()), wanted.detach())
    for (w, b), (x, c) in zip(params, arrays, strict=True):
        assert (x.grad.spec, c.grad.spec) == (x.spec, c.spec)
        torch.testing.assert_close(fs.unshard(x.grad), w.grad, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(fs.unshard(c.grad), b.grad, rtol=1e-4, atol=1e-4)


def test_8_way_batch_data_parallelism():
    mesh = fs.make_mesh({"batch": 8})
    params, batch = init([12, 16, 16, 8]), (torch.randn(32, 12), torch.randn(32, 8))
    check(params, batch, [(put(w, mesh), put(b, mesh)) for w, b in params], [put(x, mesh, "batch") for x in batch])


def test_4_way_batch_and_2_way_model_tensor_parallelism():
    mesh = fs.make_mesh({"batch": 4, "model": 2})
    params, batch = init([12, 16, 16, 8]), (torch.randn(32, 12), torch.randn(32, 8))
    (w1, b1), (w2, b2), (w3, b3) = params
    arrays = [
        (put(w1, mesh, None, "model"), put(b1, mesh, "model")),
        (put(w2, mesh, "model"), put(b2, mesh)),
        (put(w3, mesh, None, "model"), put(b3, mesh, "model")),
    ]
    check(params, batch, arrays, [put(x, mesh, "batch") for x in batch])


def test_random_numbers_are_the_same_on_any_layout():
    layouts = [fs.Layout(MESH, spec) for spec in (P(), P("a"), P("a", "b"))]
    draws = [fs.array.rand(8, 8, layout=layout, generator=torch.Generator().manual_seed(0)) for layout in layouts]
    assert all(torch.equal(fs.unshard(x), fs.unshard(draws[0])) for x in draws)
