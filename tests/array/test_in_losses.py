"""Arrays inside the functions of devices: losses of `fs.value_and_grad`, and `fs.shard_map`."""

import pytest
import torch
from torch.nn import functional as F

import fshard as fs
from fshard import P

F64 = torch.float64
MESH = fs.make_mesh({"data": 2, "model": 2})
MODEL = fs.Layout(MESH["model"])
DRAW = torch.Generator().manual_seed(0)
SHAPES = {"words": (10, 4), "norm": (4,), "up": (6, 4), "bias": (6,), "down": (4, 6)}
SPECS = {"words": P("model"), "norm": P(), "up": P("model"), "bias": P("model"), "down": P(None, "model")}
SERIAL = {name: torch.randn(shape, generator=DRAW, dtype=F64) for name, shape in SHAPES.items()}
IDS = torch.randint(0, 10, (8, 5), generator=DRAW)


def loss_fn(params, ids):
    x = F.embedding(ids, params["words"])
    h = F.gelu(F.linear(F.layer_norm(x, (4,), params["norm"]), params["up"], params["bias"]))
    h = F.layer_norm(x + F.linear(h, params["down"]), (4,), params["norm"])
    return F.cross_entropy(F.linear(h, params["words"]).flatten(0, 1), ids.flatten())


def as_arrays(params, ids):
    """Cut the full parameters of a device to arrays along "model"."""
    arrays = {
        name: fs.array.constrain(fs.Sharded(SHAPES[name], MODEL, (x,)), SPECS[name]) for name, x in params.items()
    }
    return arrays, fs.Sharded(tuple(ids.shape), MODEL, (ids,))


def loss_of_arrays(params, ids):
    return fs.array.constrain(loss_fn(*as_arrays(params, ids)), P()).local


@pytest.mark.parametrize("rules", [P(), fs.fsdp("data"), fs.fsdp(("data", "model"))])
def test_loss_of_arrays_has_the_serial_gradient(rules):
    params = fs.shard_params(SERIAL, rules, mesh=MESH)
    with fs.ledger() as comm:
        loss, grads = fs.value_and_grad(loss_of_arrays, mesh=MESH, batch=P("data"))(params, IDS)
    wanted, value = torch.func.grad_and_value(loss_fn)(SERIAL, IDS)
    torch.testing.assert_close(loss, value.float(), check_dtype=False)
    torch.testing.assert_close(fs.unshard(grads), wanted)
    assert not comm.calls(collective="all_to_all")  # the logits stay sharded over the vocabulary


def test_arrays_in_shard_map_know_their_device():
    def look_up(ids):
        words = fs.Sharded((10, 4), MODEL.with_spec(P("model")), (SERIAL["words"].chunk(2)[fs.axis_index("model")],))
        found = F.embedding(fs.Sharded(tuple(ids.shape), MODEL, (ids,)), words)
        return fs.array.constrain(found, P()).local

    found = fs.shard_map(look_up, mesh=MESH, in_specs=P("data"), out_specs=P("data"))(IDS)
    torch.testing.assert_close(fs.unshard(found), F.embedding(IDS, SERIAL["words"]))
