"""Steps of all kinds on a fake GPU: how often the host waits for a copy; bits, against steps that
copy nothing.

Reads of numbers, such as that of `loss_scaled`, are no copies: tests/transforms/test_host_syncs.py
counts them.
"""

from collections import Counter

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.memory import transfers
from fshard.nn import checkpoint_name, save_names
from tests.memory.offloaded import PLUGINS as OFFLOADS
from tests.memory.offloaded import batch, loop_of, tensors
from tests.memory.training import CASE, same_bits, trained
from tests.mesh.layout.fake_gpu import FakeGpu

LAYERS, WIDTH = 4, 3


def gradients(memory, *, gradients_on="device", activations=(), **options):
    """Return a function that returns the loss and gradient of a batch: ZeRO-3, in units of 12
    parameters.
    """
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
    others = {
        key: options[key] for key in options.keys() & {"accumulate", "compute", "reduce_once"}
    }
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


def test_peak_of_a_device_far_behind_the_host_is_bounded(monkeypatch):
    """Two transfers more than where all copies end at once: of a unit, and of an activation."""
    options, _ = GRADIENTS["parameters and activations"]
    x = torch.randn(64, WIDTH)
    peaks = []
    for make in (lambda _: None, FakeGpu):
        monkeypatch.setattr(transfers, "UNDER_WAY", 1)
        make(monkeypatch)
        gradient = gradients(**options)
        gradient(x)
        with fs.memory.limit() as used:
            gradient(x)
        peaks.append(used.peak())
    unit = 12 * WIDTH * WIDTH * 4
    assert peaks[0] <= peaks[1] <= peaks[0] + 2 * unit + 2 * x.nbytes


READERS = ("streamed", "written_back", "_receive_on_host", "_params_on_host")
"""Functions of an update after which the host may read: new state, gradients, and parameters."""


def waits_of_updates(gpu):
    """Return the functions in which the host has waited since the state was made, and how often."""
    waits = Counter()
    for functions in gpu.waiting:
        if "stored" not in functions:
            readers = [name for name in functions if name in READERS]
            waits[readers[-1] if readers else " ".join(functions[-4:])] += 1
    return waits


ONCE = {"streamed": 1}
GRADIENTS_AND_PARAMETERS = {"_receive_on_host": 1, "_params_on_host": 1}
STEPS = {  # options of `trained`, and the waits of the host in a step
    "state": ({}, {}, ONCE),
    "masters": ({}, {"name": "masters", "half": True}, ONCE),
    "clipped": ({}, {"clips": True}, ONCE),
    "fp16": ({}, {"fp16": True}, ONCE),
    "lamb, two devices": ({}, {"name": "lamb", "n": 2}, {"streamed": 2}),
    "stage 1": ({}, {"stage": 1}, ONCE),
    "plain functions": ({}, {"name": "plain"}, {"written_back": 1}),
    "updated there": ({"update_on": "host"}, {"clips": True}, GRADIENTS_AND_PARAMETERS),
    "masters, updated there": (
        {"update_on": "host"},
        {"name": "masters", "half": True, "fp16": True},
        {"_receive_on_host": 1},
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_step_waits_once_for_state_of_the_host(gpu, name):
    how, case, expected_waits = STEPS[name]
    case = {**CASE, "n": 1, **case}
    expected = trained(**case)
    assert gpu.log == []
    result = trained("host", **how, **case)
    assert same_bits(result, expected)
    assert waits_of_updates(gpu) == {name: 3 * count for name, count in expected_waits.items()}


LOOPS = {  # plugins, and the waits of the host in a step, on all devices: they update on the host
    "zero 1": {"_receive_on_host": 1, "_params_on_host": 2},
    "fsdp of one device": {"_receive_on_host": 1},
    "stages 1": {"_receive_on_host": 1, "_params_on_host": 4},
    "stages 3": {"_receive_on_host": 1},
}


@pytest.mark.parametrize("name", LOOPS)
def test_step_of_a_loop_waits_once_for_gradients_of_the_host(gpu, name):
    expected = looped(name)
    assert gpu.log == []
    losses = looped(name, offload="host")
    assert losses == expected
    assert waits_of_updates(gpu) == {name: 3 * count for name, count in LOOPS[name].items()}


def looped(name, **options):
    def main():
        loop = loop_of(name, **options)
        return [loop.step(*map(loop.part, batch(step)), clip=0.1) for step in range(3)]

    return fs.run(main, mesh=fs.make_mesh(OFFLOADS[name][1]))


def experts(params, x):
    routing = fs.experts.route(x @ params["router"], 2)
    x = x + fs.experts.moe(x, routing, params["experts"], axis="expert")[0]
    return x.square().mean()


def test_experts_copy_nothing_between_host_and_device(gpu):
    """Their counts are read as numbers: no copy that this test sees."""
    mesh = fs.make_mesh({"expert": 2})
    weights = {
        "router": torch.randn(3, 4),
        "experts": {
            "gate": torch.randn(4, 3, 5),
            "up": torch.randn(4, 3, 5),
            "down": torch.randn(4, 5, 3),
        },
    }
    rules = {"experts.*": P("expert"), "**": P()}
    params = fs.shard_params(weights, fs.fsdp(("expert",), within=rules), mesh=mesh)
    gradient = fs.value_and_grad(experts, mesh=mesh, batch=P("expert"), local="expert")
    gradient(params, gpu.on_host(torch.randn(8, 3)))
    assert gpu.waiting == []
