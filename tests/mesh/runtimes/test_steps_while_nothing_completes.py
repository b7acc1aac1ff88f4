"""A step returns although none of its calls completes: its host waits for the device nowhere.

The oracle is the group of `nccl_rules`, which is held: the results stay NaN, and a host that waits
for one waits for ever. Sums in float64 complete, and are counted: rows in host memory are among
them, for which the host waits for the other hosts, as over gloo. Reads of results are another
oracle's: see `test_host_syncs`. Experts are not here, since they read how many rows they receive.
"""

from functools import cache

import pytest
from torch import nn

import fshard as fs
from fshard import P
from tests.helpers.foreign_programs import Remat, adamw, draw, layers
from tests.helpers.processes import Processes
from tests.mesh.runtimes import nccl_rules


def zero(stage, opt=None, **options):
    """Return a step of ZeRO."""
    mesh = fs.make_mesh({"data": 2})
    apply, params, buffers = fs.functionalize(layers())
    params = fs.shard_params(params, fs.fsdp("data") if stage == 3 else P(), mesh=mesh)
    opt = fs.partition_optimizer(opt or fs.optim.adamw(0.1), mesh=mesh, axis="data", stage=stage)
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


def repeated(step, params, state):
    """Return a function that takes one more step."""
    trees = [params, state]
    x = draw(8, 4)

    def again():
        *trees[:], _ = step(*trees, x)

    return again


def booster(wrap=lambda layer: layer):
    """Return a step of torch's loop with clipping."""
    made = fs.Booster(fs.FSDPPlugin(mesh=fs.make_mesh({"data": 2})))
    model = nn.Sequential(*map(wrap, layers()))
    model, opt, *_ = made.boost(model, adamw(model))
    x = draw(4, 4)

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
    "booster": (booster, LOSS + NORM),
    "booster, rematerialised": (lambda: booster(Remat), LOSS + NORM),
}
"""Steps, and the number of their sums in float64."""


def take_held_step(name):
    """Take two steps, then one in which nothing completes; return its sums in float64, host waits
    and violations.
    """
    make, _ = STEPS[name]
    step = make()
    for _ in range(2):
        step()
    nccl_rules.violations.clear()
    nccl_rules.counts.clear()
    nccl_rules.hold()
    try:
        step()
    finally:
        nccl_rules.release()
    counts = nccl_rules.counts
    return counts["sums in float64"], counts["host syncs"], [*nccl_rules.violations]


@cache
def processes():
    return Processes(2, environment={"FSHARD_BACKEND": "nccl_rules", "FSHARD_TIMEOUT": "60"})


@pytest.fixture(scope="module", autouse=True)
def pool():
    yield
    processes().close()
    processes.cache_clear()


@pytest.mark.parametrize("name", STEPS)
def test_step_returns_while_nothing_completes(name):
    _, sums = STEPS[name]
    assert processes().run(take_held_step, name) == [(sums, 0, [])] * 2
