"""Inputs that must be equal on all devices are compared where they enter: unequal ones raise and
name the leaf.
"""

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
    return fs.Booster(fs.FSDPPlugin(mesh=mesh)).boost(
        layer, torch.optim.SGD(layer.parameters(), 0.1)
    )


def shard_stages(mesh, x):
    schedule = fs.pipeline_schedule("1f1b", stages=2, microbatches=2)
    return fs.shard_stages([tree(0.0), tree(x)], mesh=fs.make_mesh({"pipe": 2}), schedule=schedule)


def map_data(mesh, f, x):
    return fs.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x)


def put(tensor, spec):
    return lambda mesh, x: fs.device_put(tensor(x), fs.Layout(mesh, spec))


CALLS = {  # with another x on each device
    "device_put": put(tree, P()),
    "device_put, sharded": put(tree, P("data")),
    "device_put, flat": put(tree, P.flat("data")),
    "device_put, order": put(lambda x: {"weight": torch.tensor([x, 1 - x])}, P()),
    "shard_params": lambda mesh, x: fs.shard_params(tree(x), fs.fsdp("data"), mesh=mesh),
    "shard_params, module": lambda mesh, x: fs.shard_params(linear(x), P(), mesh=mesh),
    "device_put, shard_module": lambda mesh, x: fs.array.shard_module(linear(x), {}, mesh=mesh),
    "shard_stages": shard_stages,
    "boost": boost,
    "shard_map": lambda mesh, x: map_data(mesh, lambda params: params["weight"], tree(x)),
    "from_local": lambda mesh, x: fs.from_local(torch.tensor([x]), fs.Layout(mesh, P())),
}
ALLOWED = {
    "a shard of its own": lambda mesh, x: fs.from_local(
        torch.tensor([x]), fs.Layout(mesh, P("data"))
    ),
    "a summand": lambda mesh, x: fs.from_local(
        torch.tensor([x]), fs.Layout(mesh, P(unreduced="data"))
    ),
    "NaN": put(lambda x: torch.tensor([torch.nan]), P()),
    "strides": put(lambda x: torch.ones(2, 2).mT if x else torch.ones(1).expand(2, 2), P()),
    "values in shard_map": lambda mesh, x: map_data(
        mesh, lambda y: fs.device_put(y, fs.Layout(mesh, P())).shards[0], torch.arange(2.0)
    ),
}


def errors():
    """Return the error of each call on a device that gives its own value; None where there is none."""
    mesh = fs.make_mesh({"data": 2})
    index = fs.axis_index("data") if mesh.runtime == "virtual" else fs.mesh.process_index()
    with fs.ledger() as comm:
        CALLS["shard_params"](mesh, 1.0)
    assert not comm.by_collective()  # no part of the program
    texts = dict.fromkeys((*CALLS, *ALLOWED))
    for name, call in {**CALLS, **ALLOWED}.items():
        call(mesh, 1.0)
        try:
            call(mesh, float(index))
        except MismatchError as error:
            texts[name] = str(error)
    return texts


def test_unequal_inputs_raise_on_devices_and_processes(two):
    devices = fs.run(errors, mesh=fs.make_mesh({"data": 2}))
    for kind, texts in [
        *(("devices", texts) for texts in devices),
        *(("processes", texts) for texts in two.run(errors)),
    ]:
        assert [texts[name] for name in ALLOWED] == [None] * len(ALLOWED)
        for name in CALLS:
            leaf = "the tensor" if name == "from_local" else '"weight"]'
            text = str(texts[name])
            words = leaf, "equal", f"on all {kind} along", f"got other values on {kind} 1 than on 0"
            assert text.startswith(name.split(",")[0]) and all(word in text for word in words), text
            assert "bias" not in text


def test_unequal_replicas_from_local_raise_on_virtual_mesh():
    layout = fs.Layout(fs.make_mesh({"data": 2, "model": 2}), P("data"))
    assert fs.unshard(fs.from_local(lambda data, model: torch.tensor([data]), layout)).tolist() == [
        0,
        1,
    ]
    text = r"equal on all devices along model; got other values on devices \d than on \d"
    with pytest.raises(MismatchError, match=text):
        fs.from_local(lambda data, model: torch.tensor([model]), layout)
