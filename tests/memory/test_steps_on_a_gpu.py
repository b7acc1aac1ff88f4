"""Steps of all kinds on a fake GPU: how often the host waits for a copy; bits, against steps that copy nothing.

Reads of numbers, such as that of `loss_scaled`, are no copies: tests/transforms/test_host_syncs.py counts them.
"""

import pytest
import torch
from torch import nn

import fshard as fs
from fshard import P, optim
from fshard.nn import checkpoint_name, save_names
from tests.memory.offloaded import batch, loop_of, network, norm_of, tensors
from tests.memory.offloaded import PLUGINS as OFFLOADS
from tests.memory.training import CASE, same_bits, trained

LAYERS, WIDTH = 4, 3


def gradients(memory, *, gradients_on="device", activations=(), **options):
    """Return a function that returns the loss and gradient of a batch: ZeRO-3, in units of 12 parameters."""
    mesh = fs.make_mesh({"data": 1})
    draw = torch.Generator().manual_seed(0)
    layers = [[torch.randn(WIDTH, WIDTH, generator=draw) for _ in range(12)] for _ in range(LAYERS)]
    params = fs.shard_params(layers, fs.fsdp("data", unit="[*]"), mesh=mesh, memory=memory)

    def block(weights, x):
        for w in weights:
            x = checkpoint_name(torch.tanh(x @ w), "x")
        return x

    def loss_fn(params, x):
        for weights in params:
            x = fs.remat(block, save_names(offload=activations))(weights, x)
        return x.square().mean()

    options["gradients"] = lambda layout: layout.with_memory(gradients_on)
    gradient = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"), **options)
    return lambda x: gradient(params, x)


GRADIENTS = {  # options, and the waits of the host in a step
    "parameters": ({"memory": "host"}, 0),
    "parameters, accumulated": ({"memory": "host", "accumulate": 2}, 0),
    "parameters, 16 bits": ({"memory": "host", "compute": torch.bfloat16}, 0),
    "activations": ({"memory": "device", "activations": ("x",)}, 0),
    "parameters and activations": ({"memory": "host", "activations": ("x",)}, 0),
    # The host updates there: it waits for the last copy, when the backward is launched.
    "gradients": ({"memory": "host", "gradients_on": "host"}, 1),
    # It adds them there: of each unit it waits for the gradient of the slice before.
    "gradients of two slices": (
        {"memory": "host", "gradients_on": "host", "accumulate": 2, "reduce_once": False},
        1 + LAYERS,
    ),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradient_waits_for_copies_that_the_host_reads(gpu, name):
    options, expected_waits = GRADIENTS[name]
    others = {key: options[key] for key in options.keys() & {"accumulate", "compute", "reduce_once"}}
    x = torch.randn(4, WIDTH)
    expected = gradients("device", **others)(x)
    assert gpu.log == []
    gradient = gradients(**options)
    for _ in range(2):
        before = len(gpu.log)
        loss, grads = gradient(gpu.on_host(x.clone()))
        assert gpu.log[before:].count("host waits") == expected_waits
        assert torch.equal(loss, expected[0])
        for result, right in zip(tensors(grads), tensors(expected[1]), strict=True):
            assert torch.equal(result, right)
