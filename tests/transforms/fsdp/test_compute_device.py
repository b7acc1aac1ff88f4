"""Steps compute on the mesh's device where parameters are stored elsewhere; oracle: torch on one
device.

Other memory is emulated by meta tensors beside a mesh of CPUs: an operation on one has no values,
or raises.
"""

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.memory.transfers import Transfer
from fshard.mesh.layout import flatten
from fshard.optim.norms import device_of_sums
from fshard.transforms.fsdp import units
from tests.transforms.helpers.gradients import Product, assert_equal, serial


@pytest.fixture
def apart(monkeypatch):
    """Return a function that moves the host shards of a tree to memory that only copies read."""
    values = {}
    start = units.start

    def start_copy(sources, targets, link):
        def copy():
            for source, target in zip(sources, targets, strict=True):
                _, value = values[id(source)]
                target.copy_(value)

        if any(source.is_meta for source in sources):
            return Transfer(targets, copy)
        return start(sources, targets, link)

    def move(tree):
        for leaf in flatten(tree)[0]:
            if leaf.layout.memory == "host":
                stored = []
                for shard in leaf.shards:
                    x = torch.empty_like(shard, device="meta")
                    values[id(x)] = x, shard
                    stored.append(x)
                leaf.shards = tuple(stored)
        return tree

    monkeypatch.setattr(units, "start", start_copy)
    return move


def as_stored(p, x):
    """Use parameters as models do that ask them where to make a tensor; one is not used."""
    mask = torch.ones(p["w"].shape[1], dtype=x.dtype, device=p["w"].device)
    return ((x.to(p["b"].device) @ p["w"] * mask + p["b"]) ** 2).mean()


def in_a_function(p, x):
    return ((Product.apply(x, p["w"]) + p["b"]) ** 2).mean()


def numbers(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


PARAMS = {"w": (5, 3), "b": (3,), "unused": (2, 3)}
MEMORIES = {
    "all": "host",
    "some": {"block.w": "host", "**": "device"},
    "others": {"block.w": "device", "**": "host"},
}


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("zero_stage", [0, 3])
@pytest.mark.parametrize("loss_fn", [as_stored, in_a_function])
def test_gradient_of_params_in_host_memory_is_computed_on_the_meshs_device(
    apart, loss_fn, zero_stage, memory
):
    params = {name: numbers(*shape) for name, shape in PARAMS.items()}
    batch = numbers(4, 5)
    mesh = fs.make_mesh({"data": 2})
    rules = fs.fsdp("data", unit="block") if zero_stage else P()
    arrays = {"block": params}
    arrays = apart(fs.shard_params(arrays, rules, mesh=mesh, memory=MEMORIES[memory]))

    def block_loss(p, x):
        return loss_fn(p["block"], x)

    run = fs.value_and_grad(block_loss, mesh=mesh, batch=P("data"), accumulate=2)
    loss, grads = run(arrays, batch)
    grads = grads["block"]
    found = [None if grads[name] is None else fs.unshard(grads[name]) for name in sorted(grads)]
    assert_equal((loss, found), serial(loss_fn, params, batch))


def test_param_of_a_unit_that_one_device_skips_has_zeros_of_the_meshs_device(apart):
    """As an expert that got no tokens: its neighbours in the bucket have gradients."""
    params = {"w": numbers(3, 3), "v": numbers(3, 3)}
    mesh = fs.make_mesh({"data": 2})
    rules = fs.fsdp("data", unit="block")
    arrays = apart(fs.shard_params({"block": params}, rules, mesh=mesh, memory="host"))

    def loss_fn(p, x):
        y = x @ p["block"]["w"]
        if fs.axis_index("data") == 1:
            y = y @ p["block"]["v"]
        return y.square().mean()

    batch = numbers(2, 3)
    _, grads = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"))(arrays, batch)
    w, v = (x.clone().requires_grad_() for x in params.values())
    losses = [(batch[:1] @ w).square().mean(), (batch[1:] @ w @ v).square().mean()]
    expected = torch.autograd.grad(sum(losses) / 2, [w, v])
    for name, value in zip(params, expected, strict=True):
        torch.testing.assert_close(fs.unshard(grads["block"][name]), value)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("zero_stage", [0, 3])
def test_stages_in_host_memory_are_computed_on_the_meshs_device(apart, zero_stage, tied):
    first = {"w": numbers(3, 3), "b": numbers(3), "unused": numbers(2)}
    last = {"w": first["w"] if tied else numbers(3, 3) + 1, "b": numbers(3) - 1}
    batch = numbers(8, 3)
    mesh = fs.make_mesh({"pipe": 2, "data": 2})
    schedule = fs.pipeline_schedule("1f1b", stages=2, microbatches=2)
    rules = fs.fsdp("data") if zero_stage else P()
    options = {"mesh": mesh, "schedule": schedule}
    # A tied weight is sent to the stage that borrows it, from the memory of devices.
    memory = {"0.w": "device", "1.w": "device", "**": "host"} if tied else "host"
    params = apart(fs.shard_stages([first, last], rules, memory=memory, **options))

    def layer(p, x):
        return torch.tanh(x.to(p["w"].device) @ p["w"] + p["b"])

    def loss(y, x):
        return y.square().mean()

    run = fs.value_and_grad([layer, layer], loss=loss, batch=P("data"), **options)
    found_loss, grads = run(params, batch)
    leaves, structure = flatten([first, last])
    by_id = {id(x): x.clone().requires_grad_() for x in leaves}
    variables = [by_id[id(x)] for x in leaves]
    p, q = structure.unflatten(variables)
    expected_loss = loss(layer(q, layer(p, batch)), batch)
    torch.testing.assert_close(found_loss, expected_loss.detach())
    expected = torch.autograd.grad(expected_loss, variables, allow_unused=True)
    for g, value in zip(flatten(grads, none_is_leaf=True)[0], expected, strict=True):
        assert (g is None) == (value is None)
        if g is not None:
            torch.testing.assert_close(fs.unshard(g), value)


def test_norm_of_leaves_in_two_memories_is_computed_on_the_meshs_device():
    """Whichever is the first; of leaves in host memory alone it needs no device."""
    mesh = fs.make_mesh({"data": 2})
    on_device = fs.device_put(torch.ones(4), fs.Layout(mesh, P("data")))
    on_host = fs.Sharded((4,), on_device.layout, (torch.ones(2, device="meta"),) * 2)
    plain = torch.ones(3, device="meta")
    cpu, meta = torch.device("cpu"), torch.device("meta")
    assert device_of_sums([on_host, on_device]) == cpu == device_of_sums([on_device, on_host])
    assert device_of_sums([on_host, on_host]) == meta == device_of_sums([plain])
    assert device_of_sums([plain, on_device]) == cpu
