"""`fs.plan.cost(copies=)`: bytes and memory are those that the processes of a run measure."""

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.errors import PlanError
from fshard.recovery.copies import Copies
from tests.helpers.processes import run_processes

WIDTH = 160
STEPS = 4


def program(mesh, stage):
    """Return a step of a small model, its parameters and its state, and the batch."""
    params = {f"{number}.w": torch.ones(WIDTH, WIDTH) for number in range(3)}
    params["bias"] = torch.ones(7)
    rules = fs.fsdp("data", unit="[*]") if stage == 3 else P()
    params = fs.shard_params(params, rules, mesh=mesh)
    opt = fs.partition_optimizer(fs.optim.adamw(0.1), mesh=mesh, axis="data", stage=stage)

    def loss_fn(params, x):
        for number in range(3):
            x = torch.tanh(x @ params[f"{number}.w"])
        return x.square().mean() + params["bias"].sum()

    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), donate=True)
    return step, params, opt.init(params), torch.ones(12, WIDTH)


def measured(sizes, stage, copies, memory):
    """Save before each of some steps; return what the last save sends, and the peaks of memory."""
    mesh = fs.make_mesh(sizes, device="cpu")
    kept = Copies(copies, memory)
    kept.begin(0, mesh, range(mesh.size), None)
    with fs.memory.limit() as used:
        step, params, state, batch = program(mesh, stage)
        for number in range(STEPS):
            with fs.ledger() as comm:
                kept.save(number, [params, state])
            params, state, metrics = step(params, state, batch)
            del metrics  # its numbers count too
            kept.complete()
    return comm.bytes(collective="copy"), comm.bytes(), used.peak(), used.peak("host")


@pytest.mark.parametrize(
    ("sizes", "stage", "copies", "memory"),
    [
        ({"data": 2}, 0, 1, "device"),
        ({"data": 2}, 2, 1, "host"),
        ({"data": 2}, 3, 1, "device"),
        ({"data": 3}, 2, 2, "device"),
        ({"data": 3}, 3, 1, "device"),
        ({"data": 2, "model": 2}, 2, 1, "device"),
        ({"data": 2, "model": 2}, 3, 3, "host"),
    ],
)
def test_cost_with_copies_equals_what_processes_measure(sizes, stage, copies, memory):
    cluster = fs.plan.cluster("h100")
    step, *trees = program(fs.make_mesh(sizes), stage)
    options = {"copies": copies, "copies_in": memory}
    cost = fs.plan.cost(step, *trees, cluster=cluster, **options)
    without = fs.plan.cost(step, *trees, cluster=cluster)

    count = cost.mesh.size
    results = run_processes(measured, count, sizes, stage, copies, memory)
    assert max(sent for sent, *_ in results) == cost.comm.bytes(collective="copy")
    assert all(total == sent for sent, total, *_ in results)
    assert cost.sent() - cost.comm.bytes(collective="copy") == without.sent()
    assert max(host for *_, host in results) == cost.peak("host")
    assert max(peak for *_, peak, _ in results) == cost.peak()
    assert cost.seconds >= without.seconds


def test_cost_with_wrong_copies_raises():
    step, *trees = program(fs.make_mesh({"data": 2}), 2)
    with pytest.raises(PlanError, match="copies must be"):
        fs.plan.cost(step, *trees, cluster=fs.plan.cluster("h100"), copies=True)
