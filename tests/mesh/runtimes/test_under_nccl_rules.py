"""Each kind of program under the rules of NCCL, with backwards in threads of their own, gives the usual results.

To run any test of processes so: FSHARD_BACKEND=nccl_rules FSHARD_FOREIGN_BACKWARD=1 make test ARGS=...; see conftest.py.
"""

import tempfile
from functools import cache, partial

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.pipeline.schedule.builders import BUILDERS
from tests.helpers import foreign_programs
from tests.helpers.foreign_backward import foreign_backward
from tests.helpers.foreign_programs import adamw, draw, layers
from tests.helpers.processes import Processes
from tests.mesh.runtimes import nccl_rules
from tests.mesh.runtimes.programs import the_example


def stages(name, count):
    """Take three steps of a schedule: from the second on, messages are received ahead."""
    mesh = fs.make_mesh({"pipe": count})
    n = count * (1 if name in ("gpipe", "1f1b", "zb-h1", "zb-h2") else 2)
    schedule = fs.pipeline_schedule(name, stages=n, microbatches=2 * count)
    split = fs.pipeline.split_stages(layers(count=n), n, "uniform")
    params = fs.shard_stages(split, P(), mesh=mesh, schedule=schedule)
    gradient = fs.value_and_grad(
        split, mesh=mesh, batch=P(), schedule=schedule, loss=lambda y, x: y.square().mean()
    )
    losses = []
    for seed in range(3):
        loss, grads = gradient(params, draw(4 * count, 4, seed=seed))
        losses.append(loss)
    return losses, fs.unshard(grads)


def ring():
    """Send to the next device, then receive, in a loop; then exchange messages and collectives in both directions."""

    def main():
        index = fs.axis_index("data")
        n = fs.axis_size("data")
        x = draw(3) * (1 + index)
        for _ in range(3):
            fs.send(x, "data", to=(index + 1) % n)
            x = x + fs.recv(torch.zeros(3), "data", source=(index - 1) % n)
            x = fs.psum(x, "data") + x
        return fs.all_gather(x, "data", to="replicated")

    return fs.run(main, mesh=fs.make_mesh({"data": 4}))


def experts():
    """Train two layers of experts under ZeRO-3: rows of differing numbers, and an expert without any."""
    mesh = fs.make_mesh({"data": 2, "expert": 2})
    axes = ("data", "expert")
    shapes = {"gate": (3, 5), "up": (3, 5), "down": (5, 3)}
    weights = {
        "router": draw(3, 4),
        "experts": {name: draw(4, *shape) for name, shape in shapes.items()},
    }
    within = {"experts.*": P("expert"), "**": P()}
    params = fs.shard_params(weights, fs.fsdp(axes, within=within), mesh=mesh)

    def loss_fn(p, x):
        for _ in range(2):
            routing = fs.experts.route(x @ p["router"] - torch.tensor([0.0, 0.0, 0.0, 1e3]), 2)
            x = x + fs.experts.moe(x, routing, p["experts"], axis="expert")[0]
        return x.square().mean() + fs.experts.balance_loss(routing, axes)

    loss, grads = fs.value_and_grad(loss_fn, mesh=mesh, batch=P(axes), local="expert")(
        params, draw(16, 3)
    )
    return loss, fs.unshard(grads)


def checkpoint(stage=3):
    """Save in the middle and restore: the steps after it are those of the uninterrupted run."""
    mesh = fs.make_mesh({"data": 2})
    apply, params, buffers = fs.functionalize(layers())
    params = fs.shard_params(params, fs.fsdp("data"), mesh=mesh)
    opt = fs.partition_optimizer(fs.optim.adamw(0.1), mesh=mesh, axis="data", stage=stage)
    loss_fn = lambda params, x: apply(params, buffers, x)[0].square().mean()  # noqa: E731
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"))
    state = opt.init(params)
    params, state, _ = step(params, state, draw(8, 4))
    with tempfile.TemporaryDirectory() as folder:
        paths = fs.run(
            lambda: fs.broadcast(torch.tensor([*folder.encode()]), "data", source=0), mesh=mesh
        )[0]
        path = bytes(paths.tolist()).decode()
        fs.save(f"{path}/saved", (params, state))
        params, state = fs.restore(f"{path}/saved", (params, state))
        params, state, metrics = step(params, state, draw(8, 4, seed=1))
        fs.run(lambda: fs.psum(torch.ones(1), "data"), mesh=mesh)
    return fs.unshard(params), metrics["loss"]


def hybrid():
    """Train with tensor, data and pipeline parallelism in one mesh of four."""
    mesh = fs.make_mesh({"data": 2, "pipe": 1, "model": 2})
    made = fs.Booster(fs.HybridParallelPlugin(tensor=2, mesh=mesh, sample=draw(2, 4)))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    model, opt, *_ = made.boost(model, adamw(model))
    for seed in range(2):
        made.backward(model(draw(2, 4, seed=seed)).square().mean(), opt)
        opt.step()
        opt.zero_grad()
    return dict(model.unwrap().named_parameters())


def hybrid_sharding():
    """Train with parameters sharded along one axis and copied along another: reductions have two steps."""
    mesh = fs.make_mesh({"replicas": 2, "data": 2})
    apply, params, buffers = fs.functionalize(layers(count=4))
    params = fs.shard_params(params, fs.fsdp("data", unit="*"), mesh=mesh)
    opt = fs.optim.chain(fs.optim.clip_by_global_norm(0.1), fs.optim.adamw(0.1))
    opt = fs.partition_optimizer(opt, mesh=mesh, axis="data", stage=3)
    loss_fn = lambda params, x: apply(params, buffers, x)[0].square().mean()  # noqa: E731
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P(("replicas", "data")))
    state = opt.init(params)
    for seed in range(3):
        params, state, metrics = step(params, state, draw(8, 4, seed=seed))
    return fs.unshard(params), metrics["loss"], metrics["grad_norm"]


TWO = {
    **{
        name: program
        for name, (program, _) in foreign_programs.PROGRAMS.items()
        if name != "refused"
    },
    **{f"{name} of 2": partial(stages, name, 2) for name in BUILDERS},
    "checkpoint": checkpoint,
}
SOME = ("1f1b", "interleaved", "zbv")
"""Schedules that are tried on four devices; test_message_order.py has them all."""
FOUR = {
    **{f"{name} of 4": partial(stages, name, 4) for name in SOME},
    "readme": lambda: the_example()[0],
    "ring": ring,
    "experts": experts,
    "hybrid": hybrid,
    "hybrid sharding": hybrid_sharding,
}


def run_plainly(name):
    """Return the result of a program."""
    return {**TWO, **FOUR}[name]()


def run(name):
    """Return the result, the violations of the rules and the number of host synchronisations."""
    nccl_rules.violations.clear()
    before = nccl_rules.counts["host syncs"]
    with foreign_backward():
        result = run_plainly(name)
    return result, nccl_rules.violations, nccl_rules.counts["host syncs"] - before


@cache
def processes(n, backend=""):
    return Processes(n, environment={"FSHARD_BACKEND": backend})


@pytest.fixture(scope="module", autouse=True)
def pools():
    yield
    for n in (2, 4):
        processes(n).close()
        processes(n, "nccl_rules").close()
    processes.cache_clear()


@pytest.mark.parametrize("name", [*TWO, *FOUR])
def test_program_under_the_rules_of_nccl_has_equal_results(name):
    n = 2 if name in TWO else 4
    reports = processes(n, "nccl_rules").run(run, name)
    for expected, (result, violations, syncs) in zip(
        processes(n).run(run_plainly, name), reports, strict=True
    ):
        assert (violations, syncs) == ([], 0)
        torch.testing.assert_close(result, expected)
