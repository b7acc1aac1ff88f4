"""Parameters in other memory: bits equal those of parameters on the device, bytes those of the
table.
"""

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard import P, optim
from fshard.memory.transfers import Transfer, stress
from fshard.transforms.fsdp import units
from tests.helpers.sampled import examples

KINDS = st.sampled_from(["device", "host", "disk"])
CASES = st.fixed_dictionaries(
    {
        "n": st.sampled_from([1, 2, 4]),
        "name": st.sampled_from(["adamw", "lamb", "masters", "ema"]),
        "clips": st.booleans(),
        "microbatches": st.sampled_from([1, 3]),
        "keeps": st.booleans(),
        "stages": st.booleans(),
        "exact": st.booleans(),
        "state_memory": KINDS,
        "update_on": st.sampled_from(["device", "host"]),
    }
)
OPTIMIZERS = {
    "adamw": lambda: optim.adamw(0.05),
    "lamb": lambda: optim.lamb(0.05),
    "masters": lambda: optim.with_master_weights(optim.sgd(0.05, momentum=0.9)),
    "ema": lambda: optim.ema(optim.sgd(0.05, momentum=0.9), 0.5),
}
FIXED = {
    "n": 2, "name": "adamw", "clips": False, "microbatches": 1, "keeps": False, "stages": False, "exact": False,
    "state_memory": "host", "update_on": "host",
}  # fmt: skip
SIZES = [8, 6, 7, 3, 5, 2]


def trained(
    memory, *, n, name, clips, microbatches, keeps, stages, exact, state_memory, update_on, steps=3
):
    """Return the parameters after some steps of an MLP, a unit for each layer, and the ledger of
    the last one.
    """
    torch.manual_seed(0)
    dtype = torch.bfloat16 if name == "masters" else torch.float32
    layers = [{"w": torch.randn(a, b), "b": torch.randn(b)} for a, b in itertools.pairwise(SIZES)]
    layers = [{key: x.to(dtype) for key, x in layer.items()} for layer in layers]
    batch = torch.randn(12, SIZES[0]).to(dtype)

    def layer(params, x):
        return torch.tanh(x @ params["w"] + params["b"])

    def loss_fn(params, x):
        for weights in params:
            x = layer(weights, x)
        return x.float().square().mean()

    opt = OPTIMIZERS[name]()
    opt = optim.chain(optim.clip_by_global_norm(0.1), opt) if clips else opt
    if stages:
        layers = layers[:3]
        mesh = fs.make_mesh({"pipe": 3, "data": n})
        schedule = fs.pipeline_schedule("1f1b", stages=3, microbatches=2 if exact else microbatches)
        params = fs.shard_stages(
            layers, fs.fsdp("data"), mesh=mesh, schedule=schedule, memory=memory
        )
        program = [layer] * 3
        options = {"schedule": schedule, "loss": lambda y, x: y.float().square().mean()}
    else:
        mesh = fs.make_mesh({"data": n})
        params = fs.shard_params(layers, fs.fsdp("data", unit="[*]"), mesh=mesh, memory=memory)
        slices = {"slices": 4} if exact else {"accumulate": microbatches}
        program, options = loss_fn, {"reshard_after_forward": not keeps, **slices}
    opt = fs.partition_optimizer(
        opt, mesh=mesh, axis="data", stage=3, state_memory=state_memory, update_on=update_on
    )
    step = fs.train_step(
        program, opt, mesh=mesh, batch=P("data"), donate=True, reproducible=exact, **options
    )
    state = opt.init(params)
    for _ in range(steps):
        with fs.ledger() as comm:
            params, state, _ = step(params, state, batch)
    return params, comm


def same_bits(result, expected):
    pairs = zip(fs.mesh.layout.flatten(result)[0], fs.mesh.layout.flatten(expected)[0], strict=True)
    return all(torch.equal(fs.unshard(x), fs.unshard(y)) for x, y in pairs)


def is_possible(case):
    is_updated = case["state_memory"] != "device" or case["update_on"] == "device"
    return is_updated and not (case["exact"] and case["state_memory"] == "disk")


@settings(max_examples=examples(9), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CASES.filter(is_possible), st.lists(KINDS, min_size=5, max_size=5))
def test_bits_equal_those_of_parameters_on_the_device(disk_folder, case, kinds):
    """Layers in drawn memory; with NaN in every buffer that was not waited for, in a limit, which
    refuses mixtures.
    """
    expected, _ = trained("device", **case)
    with stress(poison=True), fs.memory.limit():
        result, _ = trained(
            {
                f"{i}.**" if case["stages"] else f"[{i}].**": kind
                for i, kind in enumerate(kinds[: 3 if case["stages"] else 5])
            },
            **case,
        )
    assert same_bits(result, expected)


@pytest.mark.parametrize("stages", [False, True])
def test_a_missing_wait_changes_bits(monkeypatch, stages):
    case = FIXED | {"stages": stages}
    expected, _ = trained("device", **case)
    monkeypatch.setattr(Transfer, "wait", lambda transfer: transfer._targets)
    with stress(poison=True):
        result, _ = trained("host", **case)
    assert not same_bits(result, expected)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_bytes_are_those_of_the_table(n, microbatches, keeps):
    """2 K p, less the two units that are still unsharded at each turn, and the first layer, whose
    backward needs none; K p if units are kept. Gradients go down once a backward.
    """
    case = FIXED | {"n": n, "microbatches": microbatches, "keeps": keeps}
    _, comm = trained("host", **case, steps=1)
    sizes = [
        4 * (-(-a * b // n) + -(-b // n)) for a, b in itertools.pairwise(SIZES)
    ]  # of the first device
    fetched = sum(sizes) + (0 if keeps else sum(sizes[1:-2]))
    assert comm.moved("host", "device") == microbatches * fetched
    assert comm.moved("device", "host") == microbatches * sum(sizes)


def test_units_are_fetched_before_they_are_used(monkeypatch):
    """In the second step, which knows the order: some at the beginning, two when the backward
    begins, then one for each.
    """
    events = []
    begin = units.start
    layers = [torch.full((6, 6), 0.1 + number) for number in range(6)]
    mesh = fs.make_mesh({"data": 1})
    params = fs.shard_params(layers, fs.fsdp("data", unit="[*]"), mesh=mesh, memory="host")

    def recorded(sources, targets, link):
        (source,) = sources
        events.append(f"fetch {round(source[0].item() - 0.1)}")
        return begin(sources, targets, link)

    def loss_fn(params, x):
        for number, w in enumerate(params):
            x = torch.tanh(x @ w)
            events.append(f"use {number}")
            x.register_hook(lambda g, number=number: events.append(f"backward {number}"))
        return x.sum()

    gradient = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"))
    gradient(params, torch.ones(2, 6))
    monkeypatch.setattr(units, "start", recorded)
    events.clear()
    gradient(params, torch.ones(2, 6))
    forward = [f"fetch {i}" for i in (0, 1, 2)] + [
        "use 0",
        "fetch 3",
        "use 1",
        "fetch 4",
        "use 2",
        "fetch 5",
    ]
    forward += [f"use {i}" for i in (3, 4, 5)]
    backward = [
        "fetch 3",
        "fetch 2",
        "backward 5",
        "backward 4",
        "backward 3",
        "fetch 1",
    ]  # 5, 4 and 0 need no copy
    assert events == [*forward, *backward, *(f"backward {i}" for i in (2, 1, 0))]


def test_tied_parameters_are_in_one_memory():
    w = torch.ones(4)
    mesh = fs.make_mesh({"data": 2})
    with pytest.raises(fs.errors.LayoutError, match="tied to a leaf in host memory"):
        fs.shard_params({"a": w, "b": w}, P(), mesh=mesh, memory={"a": "host", "b": "device"})


@pytest.mark.parametrize("update_on", ["device", "host"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_of_parameters_on_the_host_are_summed_along_the_axes_that_replicate_them(
    update_on, accumulate
):
    """HSDP: sharded along "data", and each shard's gradient is a sum along "node" too."""
    mesh = fs.make_mesh({"node": 2, "data": 2})
    torch.manual_seed(0)
    full = {"w": torch.randn(5, 3), "b": torch.randn(3)}
    x = torch.randn(8, 5)
    axes = ("node", "data")

    def loss_fn(params, x):
        return (torch.tanh(x @ params["w"]) + params["b"]).square().mean()

    params = fs.shard_params(full, fs.fsdp("data"), mesh=mesh, memory="host")
    opt = fs.partition_optimizer(
        fs.optim.sgd(0.5), mesh=mesh, axis="data", stage=3, state_memory="host", update_on=update_on
    )
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P(axes), donate=True, accumulate=accumulate)
    state = opt.init(params)
    expected = {name: value.clone().requires_grad_() for name, value in full.items()}
    for _ in range(2):
        params, state, _ = step(params, state, x)
        grads = torch.autograd.grad(loss_fn(expected, x), [*expected.values()])
        with torch.no_grad():
            for value, grad in zip(expected.values(), grads, strict=True):
                value -= 0.5 * grad
    for name, value in expected.items():
        assert params[name].layout.memory == "host"
        torch.testing.assert_close(fs.unshard(params[name]), value.detach())
        shards = params[name].shards
        assert torch.equal(shards[0], shards[2])  # replicas along "node"
        assert torch.equal(shards[1], shards[3])
