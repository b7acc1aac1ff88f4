"""The layouts that JAX's page "Distributed arrays and automatic parallelization" shows, one by one."""

import pytest
import torch

import fshard as fs
from fshard import P


def put(x, mesh, *entries):
    return fs.device_put(x, fs.Layout(mesh, P(*entries)))


def types(*xs):
    return [str(fs.typeof(x)).removeprefix("f32") for x in xs]


MESH = fs.make_mesh((4, 2), ("a", "b"))


def test_computation_follows_data():
    a = torch.randn(64, 64)
    b = torch.randn(64, 64)
    x = put(a, MESH, "a", "b")
    with fs.ledger() as comm:
        y = torch.sin(x)
        total = x.sum(0)
    assert types(x, y, total) == ["[64@a, 64@b]", "[64@a, 64@b]", "[64@b]{U:a}"]
    assert comm.calls() == 0
    left = put(a, MESH, "a")
    right = put(b, MESH, None, "b")
    with fs.ledger() as comm:
        product = left @ right
    assert types(product) == ["[64@a, 64@b]"]
    assert comm.calls() == 0
    torch.testing.assert_close(fs.unshard(product), a @ b)


def test_uncommitted_values_join_and_conflicts_are_resolved_by_cost():
    x = put(torch.ones(64, 64), MESH, "a", "b")
    y = put(torch.ones(64, 64), MESH, "b", "a")
    assert types(x + 1, x * torch.tensor(2.0)) == ["[64@a, 64@b]"] * 2
    other = fs.make_mesh({"c": 2})
    with pytest.raises(fs.errors.MeshError, match="must be on one mesh"):
        x + put(torch.ones(64, 64), other)
    with fs.ledger() as comm:
        z = x + y
    assert types(z) == ["[64@a, 64@b]"]
    assert comm.bytes() > 0 and float(z.sum()) == 2 * 64 * 64
