"""Local steps and gossip against loops of plain tensors."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

import fshard as fs
from fshard import P, comm
from fshard.errors import MismatchError
from fshard.mesh.layout import flatten
from fshard.mesh.spmd.run import local_devices
from tests.comm.replicas import (
    FULL,
    batch,
    diloco,
    gossip,
    inner_step,
    local_sgd,
    loss_fn,
    push_sum,
    streaming,
    train,
)

# -- rules, and loops of plain tensors with the same arguments ---------------------------------------------------------


def averaged(every, after=0):
    def combine(before, replicas, count):
        is_due = count <= after or count % every == 0
        return (
            [{k: torch.stack([x[k] for x in replicas]).mean(0) for k in FULL}] * 4
            if is_due
            else replicas
        )

    return combine


def compressed_diloco(every):
    return diloco(every, compress=comm.error_feedback(comm.top_k(1.0)))


def outer_steps(every, fragments=1, delay=0, mix=1.0):
    """The parameters are b, then w."""
    offsets = {"b": 0, "w": every // 2 if fragments == 2 else 0}
    anchor = dict(FULL)
    velocity = {k: torch.zeros_like(x) for k, x in FULL.items()}
    grads = {}

    def combine(before, replicas, count):
        for k, offset in offsets.items():
            if count > offset and (count - offset) % every == 0:
                grads[k] = torch.stack([anchor[k] - replica[k] for replica in replicas]).mean(0)
            if count - delay > offset and (count - delay - offset) % every == 0:
                velocity[k] = 0.5 * velocity[k] + grads[k]
                anchor[k] = anchor[k] - 0.75 * (grads[k] + 0.5 * velocity[k])
                replicas = [
                    {**replica, k: mix * anchor[k] + (1 - mix) * replica[k]} for replica in replicas
                ]
        return replicas

    return combine


def mixed(graph):
    def combine(before, replicas, count):
        rows = [
            [j % 4 for j in range(i - 1, i + 3) if graph.matrix(count - 1)[i, j % 4]]
            for i in range(4)
        ]
        means = [{k: sum(before[j][k] for j in row) / len(row) for k in FULL} for row in rows]
        return [{k: means[i][k] + (replicas[i][k] - before[i][k]) for k in FULL} for i in range(4)]

    return combine


def divided(graph):
    weights = torch.ones(4)
    totals = [dict(FULL) for _ in range(4)]

    def combine(before, replicas, count):
        nonlocal weights, totals
        shares = graph.matrix(count - 1).float()
        moved = [{k: totals[i][k] + replicas[i][k] - before[i][k] for k in FULL} for i in range(4)]
        totals = [
            {k: sum(shares[i, j] * moved[i][k] for i in range(4)) for k in FULL} for j in range(4)
        ]
        weights = shares.T @ weights
        return [{k: totals[j][k] / weights[j] for k in FULL} for j in range(4)]

    return combine


def loop(combine, count):
    """SGD on each replica's rows, then `combine(before, replicas, step)`; return the replicas of each leaf, stacked."""
    replicas = [dict(FULL) for _ in range(4)]
    for number in range(count):
        rows = batch(number).chunk(4)
        before = replicas
        grads = [
            torch.func.grad(loss_fn)(params, x) for params, x in zip(before, rows, strict=True)
        ]
        after = [{k: p[k] - 0.25 * g[k] for k in p} for p, g in zip(before, grads, strict=True)]
        replicas = combine(before, after, number + 1)
    return {k: torch.stack([params[k] for params in replicas]) for k in FULL}


DIRECTED = comm.from_matrix(
    [[0.5, 0.25, 0.25, 0], [0, 0.5, 0.5, 0], [0.25, 0, 0.25, 0.5], [0.75, 0, 0, 0.25]],
    torch.eye(4).roll(1, 0) / 2 + torch.eye(4) / 2,
)
W, B = (
    72,
    18,
)  # bytes that 4 devices send for a mean of w, and of b: 2 * 3/4 * 4 bytes for each number
EDGE = 60  # bytes of all parameters
CASES = [  # rule, loop, their arguments, bytes that a device sends in 9 steps
    (local_sgd, averaged, (4,), 2 * (W + B)),
    (local_sgd, averaged, (100, 2), 2 * (W + B)),
    (diloco, outer_steps, (1,), 9 * (W + B)),
    (diloco, outer_steps, (2,), 4 * (W + B)),
    (compressed_diloco, outer_steps, (2,), 4 * (W + B)),
    (streaming, outer_steps, (2, 1, 0, 1.0), 4 * (W + B)),
    (streaming, outer_steps, (4, 2, 0, 1.0), W + 2 * B),
    (streaming, outer_steps, (4, 2, 1, 0.5), W + 2 * B),
    (streaming, outer_steps, (4, 2, 3, 1.0), W + B),
    (streaming, outer_steps, (2, 1, 1, 0.25), 4 * (W + B)),
    (gossip, mixed, (comm.ring(4),), 9 * 2 * EDGE),
    (gossip, mixed, (comm.exponential(4),), 9 * 2 * EDGE),
    (gossip, mixed, (comm.one_peer(4),), 9 * EDGE),
    (gossip, mixed, (comm.hypercube(4),), 9 * EDGE),
    (gossip, mixed, (comm.complete(4),), 9 * 3 * EDGE),
    (
        push_sum,
        divided,
        (DIRECTED,),
        (5 * 2 + 4 * 1) * (EDGE + 8),
    ),  # the busiest one; a weight in each message
]


@pytest.fixture(scope="module")
def bytes_of_metrics():
    with fs.ledger() as ledger:
        train(local_sgd(100), 9)
    return ledger.bytes(axis="node")


@pytest.mark.parametrize(
    ("rule", "combine", "args", "size"), CASES, ids=lambda x: getattr(x, "__name__", None)
)
def test_replicas_follow_a_loop_of_plain_tensors(rule, combine, args, size, bytes_of_metrics):
    """The first step has exact gradients, so it has the bits of the formula."""
    first = loop(combine(*args), 1)
    expected = loop(combine(*args), 9)
    assert all(torch.equal(fs.unshard(x), first[k]) for k, x in train(rule(*args), 1)[0].items())
    with fs.ledger() as ledger:
        params, _, metrics = train(rule(*args), 9)
    assert ledger.bytes(axis="node") - bytes_of_metrics == size
    assert (
        str(fs.typeof(params["w"])) == "f32[4@node, 4, 3]"
        and metrics["samples"] == 16
        and metrics["finite"]
    )
    mean = comm.mean(params)
    for k, x in expected.items():
        torch.testing.assert_close((fs.unshard(params[k]), mean[k]), (x, x.mean(0)))


@pytest.mark.parametrize(
    ("make", "collective", "calls"),
    [
        (gossip(comm.ring(4)), "ppermute", [2, 4, 6]),
        (streaming(2, 1, delay=1), "psum", [0, 2, 4 + 1]),
    ],
)
def test_communication_is_under_way_during_the_inner_step(make, collective, calls):
    """The metrics take 2 calls of psum."""
    started = []

    def watched(inner, mesh):
        def run(*args):
            device = fs.axis_index(("node", "gpu"))
            started.append((device, ledger.calls(device, axis="node", collective=collective)))
            return inner.gradient.run(*args)

        gradient = SimpleNamespace(options=inner.gradient.options, run=run)
        return make(dataclasses.replace(inner, gradient=gradient), mesh)

    with fs.ledger() as ledger:
        train(watched, count=3)
    assert sorted(started) == [(device, count) for device in range(8) for count in calls]


# -- inside of a replica -----------------------------------------------------------------------------------------------


def odd_params():
    draw = torch.Generator().manual_seed(2)
    w = torch.randn(5, 3, generator=draw)
    params = {
        "w": w,
        "tied": w,
        "bias": torch.randn(3, generator=draw).bfloat16(),
        "scale": torch.tensor(1.5),
    }
    return params | {
        "empty": torch.zeros(0, 3),
        "unused": torch.ones(2),
        "frozen": torch.full((3,), 0.1),
    }


def odd_loss(params, x):
    y = torch.tanh(x @ params["w"] + params["bias"]) @ params["tied"].T * params["scale"]
    return (y[:, :3] * params["frozen"]).square().sum(1).mean() + params["empty"].sum()


INSIDE = {
    "ZeRO 0": {"stage": 0},
    "ZeRO 1": {"stage": 1},
    "ZeRO 2": {"stage": 2, "opt": fs.optim.adam(0.1)},
    "ZeRO 3": {"stage": 3, "opt": fs.optim.adam(0.1)},
    "owners": {"stage": 2, "opt": fs.optim.shampoo(0.1)},
    "accumulation": {"accumulate": 2},
    "donated memory": {"donate": True},
    "clipping": {"opt": fs.optim.chain(fs.optim.clip_by_global_norm(0.1), fs.optim.sgd(0.1))},
    "loss scaling": {"opt": fs.optim.loss_scaled(fs.optim.adam(0.1))},
}


def odd_start(mesh, stage=1, opt=None, **options):
    """Return parameters on a mesh, and a step on its axis gpu."""
    params = fs.shard_params(
        odd_params(), fs.fsdp("gpu") if stage == 3 else P(), mesh=mesh, frozen="frozen"
    )
    opt = fs.partition_optimizer(
        opt or fs.optim.sgd(0.1), mesh=mesh["gpu"], axis="gpu", stage=stage
    )
    return params, fs.train_step(odd_loss, opt, mesh=mesh["gpu"], batch=P("gpu"), **options)


def odd_batch(number):
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(20 + number))


@pytest.mark.parametrize("case", INSIDE)
def test_replicas_have_the_bits_of_separate_runs_and_their_mean(case, tmp_path):
    mesh = fs.make_mesh({"node": 2, "gpu": 2})
    params, inner = odd_start(mesh, **INSIDE[case])
    step = local_sgd(3)(inner, mesh)
    run = step.init(params)
    runs = []
    for number in range(4):
        run = step(*run, odd_batch(number))[:2]
        if number == 1:
            fs.save(tmp_path / "c", run)
            run = fs.restore(tmp_path / "c", step.init(odd_start(mesh, **INSIDE[case])[0]))
    for _ in range(2):
        params, inner = odd_start(fs.make_mesh({"gpu": 2}), **INSIDE[case])
        runs.append((params, inner.init(params)))
    for number in range(4):
        runs = [
            inner(*run, rows)[:2]
            for run, rows in zip(runs, odd_batch(number).chunk(2), strict=True)
        ]
        if number == 2:
            leaves = [[x.shards for x in params.values()] for params, _ in runs]
            for first, second in zip(*leaves, strict=True):
                for x, y in zip(first, second, strict=True):
                    y.copy_(x.copy_((x + y) / 2))
    for name, x in run[0].items():
        assert all(
            torch.equal(fs.unshard(x)[i], fs.unshard(params[name]))
            for i, (params, _) in enumerate(runs)
        ), name
    assert (
        run[0]["tied"] is run[0]["w"]
        and comm.mean(run[0])["frozen"].tolist() == [torch.tensor(0.1).item()] * 3
    )


def test_replicas_of_pipelines_train_as_replicas_of_one_device():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
    mesh = fs.make_mesh({"node": 2, "pipe": 2})
    schedule = fs.pipeline_schedule("1f1b", stages=2, microbatches=2)
    stages = fs.pipeline.split_stages(model, 2)
    opt = fs.optim.sgd(0.5, momentum=0.9)
    x = torch.randn(8, 4)
    options = {"mesh": mesh["pipe"], "batch": P(), "schedule": schedule}
    inner = fs.train_step(
        stages, opt, **options, loss=lambda y, batch: (y - batch[:, :2]).square().mean()
    )
    apply, full, buffers = fs.functionalize(model)
    flat = fs.make_mesh({"node": 2, "gpu": 1})

    def loss_fn(params, x):
        return (apply(params, buffers, x)[0] - x[:, :2]).square().mean()

    runs = {
        mesh: (inner, fs.shard_stages(stages, mesh=mesh, schedule=schedule)),
        flat: (
            fs.train_step(loss_fn, opt, mesh=flat["gpu"], batch=P("gpu")),
            fs.shard_params(full, P(), mesh=flat),
        ),
    }
    results = []
    for mesh, (inner, params) in runs.items():
        step = streaming(2, 2, delay=1)(inner, mesh)
        run = step.init(params)
        for _ in range(5):
            run = step(*run, x)[:2]
        trees = run[0] if isinstance(run[0], list) else [run[0]]
        results.append({name: fs.unshard(x) for tree in trees for name, x in tree.items()})
    torch.testing.assert_close(results[0], results[1])


# -- processes ---------------------------------------------------------------------------------------------------------

RULES = {
    "local_sgd": local_sgd(3, after=1),
    "streaming": streaming(2, 2, 1, 0.5, comm.error_feedback(comm.quantized(4, block=8))),
    "gossip": gossip(comm.ring(2)),
    "push_sum": push_sum(comm.from_matrix([[0.5, 0.5], [0.25, 0.75]])),
}


def all_rules(folder=None):
    results = {}
    for name, make in RULES.items():
        path = None if folder is None else f"{folder}/{name}"
        params, state, _ = train(
            make, axes={"node": 2, "gpu": 1}, folder=path, opt=fs.optim.adam(0.1)
        )
        results[name] = [fs.unshard(x) for x in [*params.values(), *flatten(state["rule"])[0]]]
    return results


def unlike_start():
    mesh = fs.make_mesh({"node": 2, "gpu": 1})
    layout = fs.Layout(mesh, P())
    w = fs.mesh.Sharded(
        (3,), layout, tuple(torch.full((3,), float(i)) for i in local_devices(mesh))
    )
    with pytest.raises(MismatchError, match=r'init: \["w"\] must be equal'):
        local_sgd(2)(inner_step(mesh), mesh).init({"w": w})


def in_processes(folder):
    unlike_start()
    return all_rules(folder)


def test_processes_and_resumed_runs_have_the_bits_of_virtual_replicas(two, tmp_path):
    unlike_start()
    expected = all_rules()
    for results in (
        all_rules(tmp_path / "virtual"),
        *two.run(in_processes, f"{tmp_path}/processes"),
    ):
        for name, xs in expected.items():
            assert all(torch.equal(x, y) for x, y in zip(results[name], xs, strict=True)), name
