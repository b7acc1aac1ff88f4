"""Inputs that must be equal on all devices are compared where they enter: unequal ones raise and name the leaf."""

import pytest
import torch
from torch import nn

import fshard as fs
from fshard import P
from fshard.errors import MismatchError


def linear(x):
    layer = nn.Linear(2, 4, dtype=torch.float64)
    nn.init.constant_(layer.weight, x)
    nn.init.ones_(layer.bias)
    return layer


def tree(x):
    return {"equal": torch.ones(2, dtype=torch.bfloat16), "weight": torch.full((4, 2), x)}


def boost(mesh, x):
    layer = linear(x)
    return fs.Booster(fs.FSDPPlugin(mesh=mesh)).boost(layer, torch.optim.SGD(layer.parameters(), 0.1))


def shard_stages(mesh, x):
    schedule = fs.pipeline_schedule("1f1b", stages=2, microbatches=2)
    return fs.shard_stages([tree(0.0), tree(x)], mesh=fs.make_mesh({"pipe": 2}), schedule=schedule)


CALLS = {
    "device_put": lambda mesh, x: fs.device_put(tree(x), fs.Layout(mesh, P())),
    "device_put, sharded": lambda mesh, x: fs.device_put(tree(x), fs.Layout(mesh, P("data"))),
    "device_put, flat": lambda mesh, x: fs.device_put(tree(x), fs.Layout(mesh, P.flat("data"))),
    "device_put, order": lambda mesh, x: fs.device_put({"weight": torch.tensor([x, 1 - x])}, fs.Layout(mesh, P())),
    "shard_params": lambda mesh, x: fs.shard_params(tree(x), fs.fsdp("data"), mesh=mesh),
    "shard_params, module": lambda mesh, x: fs.shard_params(linear(x), P(), mesh=mesh),
    "device_put, shard_module": lambda mesh, x: fs.array.shard_module(linear(x), {}, mesh=mesh),
    "shard_stages": shard_stages,
    "boost": boost,
    "shard_map": lambda mesh, x: fs.shard_map(
        lambda params: params["weight"], mesh=mesh, in_specs=P("data"), out_specs=P("data")
    )(tree(x)),
    "from_local": lambda mesh, x: fs.from_local(torch.tensor([x]), fs.Layout(mesh, P())),
}
NO_CALLS = {
    "a shard of its own": lambda mesh, x: fs.from_local(torch.tensor([x]), fs.Layout(mesh, P("data"))),
    "a summand": lambda mesh, x: fs.from_local(torch.tensor([x]), fs.Layout(mesh, P(unreduced="data"))),
    "NaN": lambda mesh, x: fs.device_put(torch.tensor([torch.nan]), fs.Layout(mesh, P())),
    "strides": lambda mesh, x: fs.device_put(
        torch.ones(2, 2).mT if x else torch.ones(1).expand(2, 2), fs.Layout(mesh, P())
    ),
    "values in shard_map": lambda mesh, x: fs.shard_map(
        lambda y: fs.device_put(y, fs.Layout(mesh, P())).shards[0], mesh=mesh, in_specs=P("data"), out_specs=P("data")
    )(torch.arange(2.0)),
}


def errors_of(calls):
    """Return the error of each call on a device that gives its own value; None where there is none."""
    mesh = fs.make_mesh({"data": 2})
    index = fs.axis_index("data") if mesh.runtime == "virtual" else fs.mesh.process_index()
    errors = {}
    for name, call in calls.items():
        call(mesh, 1.0)
        try:
            errors[name] = None
            call(mesh, float(index))
        except MismatchError as error:
            errors[name] = str(error)
    return errors


def check(found, kind):
    for errors, others in found:
        for name, error in errors.items():
            assert error is not None, name
            leaf = "the tensor" if name == "from_local" else '"weight"]'
            assert error.startswith(name.split(",")[0]) and leaf in error and "equal" in error, error
            assert (
                f"on all {kind} along" in error
                and f"got other values on {kind} 1 than on 0" in error
                and "bias" not in error
            )
        assert others == dict.fromkeys(NO_CALLS)


def both():
    mesh = fs.make_mesh({"data": 2})
    with fs.ledger() as comm:
        CALLS["shard_params"](mesh, 1.0)
    assert not comm.by_collective()  # no part of the program
    return errors_of(CALLS), errors_of(NO_CALLS)


def test_unequal_inputs_raise_on_devices():
    check(fs.run(both, mesh=fs.make_mesh({"data": 2})), "devices")


def test_unequal_inputs_raise_on_processes(two):
    check(two.run(both), "processes")


def test_unequal_replicas_from_local_raise_on_virtual_mesh():
    mesh = fs.make_mesh({"data": 2, "model": 2})
    layout = fs.Layout(mesh, P("data"))
    assert fs.unshard(fs.from_local(lambda data, model: torch.tensor([data]), layout)).tolist() == [0, 1]
    with pytest.raises(
        MismatchError, match=r"equal on all devices along model; got other values on devices \d than on \d"
    ):
        fs.from_local(lambda data, model: torch.tensor([model]), layout)
