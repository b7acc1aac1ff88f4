"""A step returns although none of its calls completes: its host waits for the device nowhere.

The oracle is the group of `nccl_rules`, which is held: the results stay NaN, and a host that waits
for one waits for ever. Sums in float64 complete, and are counted: rows in host memory are among
them, for which the host waits for the other hosts, as over gloo. So do the tables that layers of
experts read. Reads of other results are another oracle's: see `test_host_syncs`. Copies of host
memory are a third one's: see `test_copies_on_a_gpu`.
"""

from functools import cache

import pytest
import torch
from torch import nn

import fshard as fs
from fshard import P
from tests.helpers.foreign_programs import Remat, adamw, draw, layers
from tests.helpers.processes import Processes
from tests.mesh.runtimes import fake_device, nccl_rules


def zero(stage, opt=None, *, memory="device", state_memory="device", update_on="device", **options):
    """Return a step of ZeRO."""
    mesh = fs.make_mesh({"data": 2})
    apply, params, buffers = fs.functionalize(layers())
    rules = fs.fsdp("data") if stage == 3 else P()
    params = fs.shard_params(params, rules, mesh=mesh, memory=memory)
    opt = opt or fs.optim.adamw(0.1)
    opt = fs.partition_optimizer(
        opt, mesh=mesh, axis="data", stage=stage, state_memory=state_memory, update_on=update_on
    )
    step = fs.train_step(
        lambda params, x: apply(params, buffers, x)[0].square().mean(),
        opt,
        mesh=mesh,
        batch=P("data"),
        **options,
    )
    return repeated(step, params, opt.init(params))


def stages(name):
    """Return a step of stages, whose parameters are sharded as well."""
    mesh = fs.make_mesh({"pipe": 2})
    n = 2 if name in ("1f1b", "zb-h1") else 4
    schedule = fs.pipeline_schedule(name, stages=n, microbatches=4)
    split = fs.pipeline.split_stages(layers(count=n), n, "uniform")
    params = fs.shard_stages(split, P(), mesh=mesh, schedule=schedule)
    opt = fs.optim.adamw(0.1)
    step = fs.train_step(
        split,
        opt,
        mesh=mesh,
        batch=P(),
        schedule=schedule,
        loss=lambda y, x: y.square().mean(),
    )
    return repeated(step, params, opt.init(params))


EXPERTS, LAYERS = 4, 3


def experts():
    """Return a step of layers of experts under ZeRO-3; one is computed again in the backward."""
    mesh = fs.make_mesh({"expert": 2})
    width = 3  # no shard of a parameter has as many bytes as the table
    shapes = {"gate": (width, 5), "up": (width, 5), "down": (5, width)}
    weights = {
        "router": draw(width, EXPERTS),
        "experts": {name: draw(EXPERTS, *shape) for name, shape in shapes.items()},
    }
    rules = fs.fsdp("expert", within={"experts.*": P("expert"), "**": P()})
    params = fs.shard_params(weights, rules, mesh=mesh)
    opt = fs.optim.adamw(0.1)

    def layer(p, x):
        routing = fs.experts.route(x @ p["router"], 2)
        return x + fs.experts.moe(x, routing, p["experts"], axis="expert", capacity=1.5)[0]

    def loss_fn(p, x):
        for _ in range(LAYERS - 1):
            x = layer(p, x)
        return fs.remat(layer)(p, x).square().mean()

    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("expert"), local="expert")
    return repeated(step, params, opt.init(params), draw(8, width))


def is_table_of_experts(op):
    """Return True for the number of rows of each expert, which all devices gather: int64, as bytes."""
    return op.name == "all_gather" and op.signature == (torch.uint8, 8 * EXPERTS)


def repeated(step, params, state, x=None):
    """Return a function that takes one more step, and returns its parameters and state."""
    trees = [params, state]
    x = draw(8, 4) if x is None else x

    def again():
        *trees[:], _ = step(*trees, x)
        return trees

    return again


def booster(wrap=lambda layer: layer):
    """Return a step of torch's loop with clipping."""
    mesh = fs.make_mesh({"data": 2})
    made = fs.Booster(fs.FSDPPlugin(mesh=mesh))
    model = nn.Sequential(*map(wrap, layers()))
    model, opt, *_ = made.boost(model, adamw(model))
    x = draw(4, 4).to(mesh.device_type)

    def again():
        made.backward(model(x).square().mean(), opt)
        made.clip_grad_norm(opt, 1.0)
        opt.step()
        opt.zero_grad()

    return again


CLIPPED = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.adamw(0.1))
LOSS, NORM = 1, 1
"""Sums in float64: of the loss, with what the processes agree on in host memory; of gradients'
squares.
"""
STEPS = {
    "zero 0": (lambda: zero(0), LOSS),
    "zero 1": (lambda: zero(1), LOSS + NORM),
    "zero 2": (lambda: zero(2), LOSS + NORM),
    "zero 3": (lambda: zero(3), LOSS + NORM),
    "accumulated": (lambda: zero(2, accumulate=2), LOSS + NORM),
    "clipped": (lambda: zero(3, CLIPPED), LOSS + NORM),
    "1f1b": (lambda: stages("1f1b"), LOSS + NORM),
    "zb-h1": (lambda: stages("zb-h1"), LOSS + NORM),
    "interleaved": (lambda: stages("interleaved"), LOSS + NORM),
    "experts": (experts, LOSS + NORM),
    "parameters on the host": (lambda: zero(3, memory="host"), LOSS + NORM),
    "state on the host": (lambda: zero(3, state_memory="host"), LOSS + NORM),
    "updated on the host": (lambda: zero(3, state_memory="host", update_on="host"), LOSS + NORM),
    "booster": (booster, LOSS + NORM),
    "booster, rematerialised": (lambda: booster(Remat), LOSS + NORM),
}
"""Steps, and the number of their sums in float64."""


def take_held_step(name):
    """Take two steps, then one in which nothing completes; return its sums, reads, host waits and
    violations.
    """
    make, _ = STEPS[name]
    step = make()
    for _ in range(2):
        step()
    return held(step)


def held(call):
    """Call while nothing completes; return the sums in float64, reads, host waits and violations."""
    nccl_rules.violations.clear()
    nccl_rules.counts.clear()
    nccl_rules.hold(is_table_of_experts)
    try:
        call()
    finally:
        nccl_rules.release()
    counts = nccl_rules.counts
    numbers = counts["sums in float64"], counts["reads"], counts["host syncs"]
    return *numbers, [*nccl_rules.violations]


def save_held_step(path):
    """Take a step and save its results in the background while nothing completes; then let the writer go on."""
    step = zero(3)
    step()
    checkpoints = fs.Checkpoints(path)

    def step_and_save():
        params, state = step()
        checkpoints.save(1, {"params": params, "state": state}, wait=False)

    report = held(step_and_save)
    checkpoints.wait()
    return *report, checkpoints.latest


def take_held_step_on_a_device(name):
    """Take a held step on a device that is not the host; return the functions that bring its values to the host."""
    fake_device.install()
    make, _ = STEPS[name]
    step = make()
    for _ in range(2):
        step()
    fake_device.reads.clear()
    _, _, *waits = held(step)
    return waits, [*fake_device.reads]


@cache
def processes(backend="nccl_rules"):
    return Processes(2, environment={"FSHARD_BACKEND": backend, "FSHARD_TIMEOUT": "60"})


@pytest.fixture(scope="module", autouse=True)
def pool():
    yield
    processes().close()
    processes(fake_device.BACKEND).close()
    processes.cache_clear()


@pytest.mark.parametrize("name", STEPS)
def test_step_returns_while_nothing_completes(name):
    _, sums = STEPS[name]
    reads = LAYERS + 1 if name == "experts" else 0  # one of each forward
    assert processes().run(take_held_step, name) == [(sums, reads, 0, [])] * 2


COPIED = (
    "parameters on the host",
    "state on the host",
    "updated on the host",
    "booster, rematerialised",  # what is saved is on the host until the backward
)
"""Steps with copies between host and device, which need the streams of a GPU."""


@pytest.mark.parametrize("name", sorted(STEPS.keys() - set(COPIED)))
def test_held_step_on_a_device_reads_only_the_tables_of_experts(name):
    """Of a layer the host reads one table in each forward."""
    reads = ["moe _sorted _read"] * (LAYERS + 1) if name == "experts" else []
    pool = processes(fake_device.BACKEND)
    assert pool.run(take_held_step_on_a_device, name) == [([0, []], reads)] * 2


def test_save_in_the_background_returns_while_nothing_completes(tmp_path):
    assert processes().run(save_held_step, tmp_path) == [(LOSS + NORM, 0, 0, [], 1)] * 2
