"""A transformer's loss in every mode: on shards, in loss functions with ZeRO, on processes."""

from dataclasses import replace

import pytest
import torch

import fshard as fs
from fshard import P
from tests.tensor.serial import GRIDS, SMALL, assert_equal_to_serial, derivatives, mode_of, randn
from tests.tensor.transformer import Sizes, batch, params, serial_loss, shard_of, sharded_loss, specs


def both(name, kv_heads=None, **options):
    """Return the loss on shards and the serial one, as functions of the same parameters, and these."""
    mode, mesh = mode_of(name)
    sizes = Sizes.of(mode, kv_heads)
    p, (ids, labels) = params(sizes, randn), batch(sizes)
    in_specs = specs(mode, sizes), P(mode.tokens), P(mode.tokens)

    def on_shards(p, ids, labels):
        return sharded_loss(p, ids, labels, mode, sizes)

    f = fs.shard_map(on_shards, mesh=mesh, in_specs=in_specs, out_specs=P(), **options)

    def sharded(*leaves):
        return fs.unshard(f(dict(zip(p, leaves, strict=True)), ids, labels))

    def serial(*leaves):
        return serial_loss(dict(zip(p, leaves, strict=True)), ids, labels, sizes)

    return sharded, serial, list(p.values())


@pytest.mark.parametrize("name", GRIDS)
def test_loss_and_gradient_equal_serial(name):
    sharded, serial, leaves = both(name)
    assert_equal_to_serial(sharded, serial, leaves, order=1)


@pytest.mark.parametrize("name", SMALL)
def test_second_derivative_with_one_kv_head_equals_serial(name):
    sharded, serial, leaves = both(name, kv_heads=1)
    assert_equal_to_serial(sharded, serial, leaves)


@pytest.mark.parametrize("name", SMALL)
def test_error_in_float32_is_at_most_four_times_that_of_one_device(name):
    sharded, serial, leaves = both(name)
    exact = torch.cat([x.flatten() for x in derivatives(serial, leaves, 1)])
    errors = [
        torch.linalg.vector_norm(
            torch.cat([x.flatten() for x in derivatives(f, [x.float() for x in leaves], 1)]) - exact
        )
        for f in (sharded, serial)
    ]
    assert errors[0] <= 4 * errors[1]


# -- in loss functions, and on processes -------------------------------------------------------------------------------


def losses_of_training(name):
    """Return the value and gradient of the loss in `value_and_grad`, with ZeRO-3 over "data", and the serial ones."""
    kind, grid = GRIDS[name]
    axes = dict(zip("abc", grid, strict=False))
    mesh = fs.make_mesh({"data": 2, **axes})
    mode = fs.tensor.mode(kind, tuple(axes), mesh)
    sizes = Sizes.of(mode, 1)
    sizes = replace(sizes, batch=2 * sizes.batch)
    p, (ids, labels), layouts = params(sizes, randn), batch(sizes), specs(mode, sizes)

    def loss_fn(p, batch):
        own = {name: shard_of(x, layouts[name]) for name, x in p.items()}
        return sharded_loss(own, *batch, mode, sizes, also="data")

    stored = fs.shard_params(p, fs.fsdp("data"), mesh=mesh)
    value, found = fs.value_and_grad(loss_fn, mesh=mesh, batch=P(("data", *mode.tokens)))(stored, (ids, labels))
    leaves = {name: x.clone().requires_grad_() for name, x in p.items()}
    serial = serial_loss(leaves, ids, labels, sizes)
    gradient = dict(zip(p, torch.autograd.grad(serial, list(leaves.values())), strict=True))
    return (value, {name: fs.unshard(x) for name, x in found.items()}), (serial.detach(), gradient)


@pytest.mark.parametrize("name", SMALL)
def test_loss_functions_with_zero_have_the_serial_gradient(name):
    (value, found), (serial, gradient) = losses_of_training(name)
    torch.testing.assert_close(value.to(serial.dtype), serial)
    torch.testing.assert_close(found, gradient, rtol=1e-9, atol=1e-9)


def gradients_on_processes(name):
    sharded, serial, leaves = both(name)
    return derivatives(sharded, leaves, 1), derivatives(serial, leaves, 1)


def test_processes_have_the_serial_gradient(four):
    for name in "1d-4", "2d-2x2":
        for found, expected in four.run(gradients_on_processes, name):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    for (_, found), (_, gradient) in four.run(losses_of_training, "1d-2"):
        torch.testing.assert_close(found, gradient, rtol=1e-9, atol=1e-9)
