"""Local steps and gossip equal loops over lists of plain tensors.

An oracle is a function `combine(before, replicas, count)`: it takes the parameters of all replicas
before and after their inner step number `count`, and returns those that the rule leaves them with.
"""

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

# -- rules, and loops of plain tensors with the same arguments -------------------------------------


def averaged(every, after=0):
    """Average all replicas in every step up to `after`, then in each `every`-th one."""

    def combine(before, replicas, count):
        is_due = count <= after or count % every == 0
        if not is_due:
            return replicas
        mean = {k: torch.stack([replica[k] for replica in replicas]).mean(0) for k in FULL}
        return [mean] * 4

    return combine


def compressed_diloco(every):
    return diloco(every, compress=comm.error_feedback(comm.top_k(1.0)))


def outer_steps(every, fragments=1, delay=0, mix=1.0):
    """Take an outer step of SGD with Nesterov momentum on the mean change of all replicas.

    With two fragments, b and w are averaged half a period apart. With a delay, replicas train on
    before the outer step reaches them.
    """
    offsets = {"b": 0, "w": 0}
    if fragments == 2:
        offsets["w"] = every // 2
    anchor = dict(FULL)
    velocity = {k: torch.zeros_like(x) for k, x in FULL.items()}
    grads = {}

    def is_due(count, offset):
        return count > offset and (count - offset) % every == 0

    def combine(before, replicas, count):
        for k, offset in offsets.items():
            if is_due(count, offset):
                changes = [anchor[k] - replica[k] for replica in replicas]
                grads[k] = torch.stack(changes).mean(0)

            if is_due(count - delay, offset):
                velocity[k] = 0.5 * velocity[k] + grads[k]
                anchor[k] = anchor[k] - 0.75 * (grads[k] + 0.5 * velocity[k])
                outer = mix * anchor[k]
                replicas = [{**replica, k: outer + (1 - mix) * replica[k]} for replica in replicas]
        return replicas

    return combine


def mixed(graph):
    """Average each replica with its neighbours as they were before the step, then add its step."""

    def neighbours(i, shares):
        """List them in the order of a ring, which is the order of the additions."""
        ring = [j % 4 for j in range(i - 1, i + 3)]
        return [j for j in ring if shares[i, j]]

    def combine(before, replicas, count):
        shares = graph.matrix(count - 1)
        combined = []
        for i in range(4):
            row = neighbours(i, shares)
            replica = {}
            for k in FULL:
                mean = sum(before[j][k] for j in row) / len(row)
                replica[k] = mean + (replicas[i][k] - before[i][k])
            combined.append(replica)
        return combined

    return combine


def divided(graph):
    """Push sums.

    Parameters and a weight are shared along edges, and divided where they are used.
    """
    weights = torch.ones(4)
    totals = [dict(FULL) for _ in range(4)]

    def combine(before, replicas, count):
        nonlocal weights, totals
        shares = graph.matrix(count - 1).float()

        moved = []
        for i in range(4):
            moved.append({k: totals[i][k] + replicas[i][k] - before[i][k] for k in FULL})

        totals = []
        for j in range(4):
            totals.append({k: sum(shares[i, j] * moved[i][k] for i in range(4)) for k in FULL})
        weights = shares.T @ weights
        return [{k: totals[j][k] / weights[j] for k in FULL} for j in range(4)]

    return combine


def loop(combine, count):
    """Train by SGD on the rows of each replica; return the replicas of each leaf, stacked."""
    replicas = [dict(FULL) for _ in range(4)]
    for number in range(count):
        after = []
        for params, rows in zip(replicas, batch(number).chunk(4), strict=True):
            grads = torch.func.grad(loss_fn)(params, rows)
            after.append({k: params[k] - 0.25 * grads[k] for k in params})
        replicas = combine(replicas, after, number + 1)
    return {k: torch.stack([params[k] for params in replicas]) for k in FULL}


DIRECTED = comm.from_matrix(
    [[0.5, 0.25, 0.25, 0], [0, 0.5, 0.5, 0], [0.25, 0, 0.25, 0.5], [0.75, 0, 0, 0.25]],
    torch.eye(4).roll(1, 0) / 2 + torch.eye(4) / 2,
)
# Bytes that 4 devices send for a mean of w, of 12 numbers, and of b, of 3: 2 * 3/4 * 4 a number.
W = 72
B = 18
MEAN = W + B
EDGE = 60  # bytes of all parameters: 15 numbers
PUSHED = EDGE + 8  # and a weight, of float64
LOCAL = (local_sgd, averaged)
DILOCO = (diloco, outer_steps)
COMPRESSED = (compressed_diloco, outer_steps)
STREAMING = (streaming, outer_steps)
GOSSIP = (gossip, mixed)
PUSH_SUM = (push_sum, divided)
CASES = [  # rule and loop, the arguments of both, bytes that a device sends in 9 steps
    (*LOCAL, (4,), 2 * MEAN),
    (*LOCAL, (100, 2), 2 * MEAN),
    (*DILOCO, (1,), 9 * MEAN),
    (*DILOCO, (2,), 4 * MEAN),
    (*COMPRESSED, (2,), 4 * MEAN),
    (*STREAMING, (2, 1, 0, 1.0), 4 * MEAN),
    (*STREAMING, (4, 2, 0, 1.0), W + 2 * B),
    (*STREAMING, (4, 2, 1, 0.5), W + 2 * B),
    (*STREAMING, (4, 2, 3, 1.0), W + B),
    (*STREAMING, (2, 1, 1, 0.25), 4 * MEAN),
    (*GOSSIP, (comm.ring(4),), 9 * 2 * EDGE),
    (*GOSSIP, (comm.exponential(4),), 9 * 2 * EDGE),
    (*GOSSIP, (comm.one_peer(4),), 9 * EDGE),
    (*GOSSIP, (comm.hypercube(4),), 9 * EDGE),
    (*GOSSIP, (comm.complete(4),), 9 * 3 * EDGE),
    (*PUSH_SUM, (DIRECTED,), (5 * 2 + 4 * 1) * PUSHED),  # by the busiest device
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
    # The first step has exact gradients, so it has the bits of the formula.
    first = loop(combine(*args), 1)
    params, _, _ = train(rule(*args), 1)
    for k, x in params.items():
        assert torch.equal(fs.unshard(x), first[k])

    # Nine steps, within roundings.
    expected = loop(combine(*args), 9)
    with fs.ledger() as ledger:
        params, _, metrics = train(rule(*args), 9)
    mean = comm.mean(params)
    for k, x in expected.items():
        torch.testing.assert_close(fs.unshard(params[k]), x)
        torch.testing.assert_close(mean[k], x.mean(0))

    assert ledger.bytes(axis="node") - bytes_of_metrics == size
    assert str(fs.typeof(params["w"])) == "f32[4@node, 4, 3]"
    assert metrics["samples"] == 16
    assert metrics["finite"]


@pytest.mark.parametrize(
    ("make", "collective", "calls"),
    [
        (gossip(comm.ring(4)), "ppermute", [2, 4, 6]),
        (streaming(2, 1, delay=1), "psum", [0, 2, 4 + 1]),
    ],
)
def test_communication_is_under_way_during_the_inner_step(make, collective, calls):
    """When an inner step runs, the collective of the rule has been started.

    (Metrics take 2 psums.)
    """
    started = []

    def watched(inner, mesh):
        def run(*args):
            device = fs.axis_index(("node", "gpu"))
            count = ledger.calls(device, axis="node", collective=collective)
            started.append((device, count))
            return inner.gradient.run(*args)

        gradient = SimpleNamespace(options=inner.gradient.options, run=run)
        return make(dataclasses.replace(inner, gradient=gradient), mesh)

    with fs.ledger() as ledger:
        train(watched, count=3)

    expected = []
    for device in range(8):
        expected += [(device, count) for count in calls]
    assert sorted(started) == expected


# -- inside of a replica ---------------------------------------------------------------------------


def odd_params():
    """Return parameters of all kinds: tied, of 16 bits, without dims, empty, unused, frozen."""
    draw = torch.Generator().manual_seed(2)
    w = torch.randn(5, 3, generator=draw)
    return {
        "w": w,
        "tied": w,
        "bias": torch.randn(3, generator=draw).bfloat16(),
        "scale": torch.tensor(1.5),
        "empty": torch.zeros(0, 3),
        "unused": torch.ones(2),
        "frozen": torch.full((3,), 0.1),
    }


def odd_loss(params, x):
    hidden = torch.tanh(x @ params["w"] + params["bias"])
    y = hidden @ params["tied"].T * params["scale"]
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
    rules = fs.fsdp("gpu") if stage == 3 else P()
    params = fs.shard_params(odd_params(), rules, mesh=mesh, frozen="frozen")
    opt = opt or fs.optim.sgd(0.1)
    opt = fs.partition_optimizer(opt, mesh=mesh["gpu"], axis="gpu", stage=stage)
    return params, fs.train_step(odd_loss, opt, mesh=mesh["gpu"], batch=P("gpu"), **options)


def odd_batch(number):
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(20 + number))


def separate_runs(options):
    """Train two models alone on their rows, and average them by hand in the third step."""
    runs = []
    for _ in range(2):
        params, step = odd_start(fs.make_mesh({"gpu": 2}), **options)
        runs.append((params, step.init(params)))

    for number in range(4):
        for index, rows in enumerate(odd_batch(number).chunk(2)):
            params, state, _ = step(*runs[index], rows)
            runs[index] = (params, state)
        if number == 2:
            average(runs[0][0], runs[1][0])
    return [params for params, _ in runs]


def average(first, second):
    """Write the means of two models' shards to both."""
    for name in first:
        for x, y in zip(first[name].shards, second[name].shards, strict=True):
            y.copy_(x.copy_((x + y) / 2))


@pytest.mark.parametrize("case", INSIDE)
def test_replicas_have_the_bits_of_separate_runs_and_their_mean(case, tmp_path):
    """The replicas are also saved and restored, after the second step."""
    mesh = fs.make_mesh({"node": 2, "gpu": 2})
    params, inner = odd_start(mesh, **INSIDE[case])
    step = local_sgd(3)(inner, mesh)
    run = step.init(params)
    for number in range(4):
        run = step(*run, odd_batch(number))[:2]
        if number == 1:
            fs.save(tmp_path / "c", run)
            target = step.init(odd_start(mesh, **INSIDE[case])[0])
            run = fs.restore(tmp_path / "c", target)
    params, _ = run

    for index, expected in enumerate(separate_runs(INSIDE[case])):
        for name, x in params.items():
            assert torch.equal(fs.unshard(x)[index], fs.unshard(expected[name])), name
    assert params["tied"] is params["w"]
    assert comm.mean(params)["frozen"].tolist() == [torch.tensor(0.1).item()] * 3


def trained_by_streaming(inner, params, mesh, x):
    """Return the parameters of all replicas, by name, after five steps."""
    step = streaming(2, 2, delay=1)(inner, mesh)
    run = step.init(params)
    for _ in range(5):
        run = step(*run, x)[:2]
    params, _ = run

    trees = params if isinstance(params, list) else [params]
    result = {}
    for tree in trees:
        result |= fs.unshard(tree)
    return result


def test_replicas_of_pipelines_train_as_replicas_of_one_device():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
    opt = fs.optim.sgd(0.5, momentum=0.9)
    x = torch.randn(8, 4)

    # Each replica is a pipeline of two stages.
    mesh = fs.make_mesh({"node": 2, "pipe": 2})
    schedule = fs.pipeline_schedule("1f1b", stages=2, microbatches=2)
    stages = fs.pipeline.split_stages(model, 2)
    inner = fs.train_step(
        stages,
        opt,
        mesh=mesh["pipe"],
        batch=P(),
        schedule=schedule,
        loss=lambda y, batch: (y - batch[:, :2]).square().mean(),
    )
    params = fs.shard_stages(stages, mesh=mesh, schedule=schedule)
    actual = trained_by_streaming(inner, params, mesh, x)

    # Each replica is one device.
    flat = fs.make_mesh({"node": 2, "gpu": 1})
    apply, full, buffers = fs.functionalize(model)

    def loss_fn(params, x):
        y, _ = apply(params, buffers, x)
        return (y - x[:, :2]).square().mean()

    inner = fs.train_step(loss_fn, opt, mesh=flat["gpu"], batch=P("gpu"))
    expected = trained_by_streaming(inner, fs.shard_params(full, P(), mesh=flat), flat, x)

    torch.testing.assert_close(actual, expected)


# -- processes -------------------------------------------------------------------------------------

RULES = {
    "local_sgd": local_sgd(3, after=1),
    "streaming": streaming(2, 2, 1, 0.5, comm.error_feedback(comm.quantized(4, block=8))),
    "gossip": gossip(comm.ring(2)),
    "push_sum": push_sum(comm.from_matrix([[0.5, 0.5], [0.25, 0.75]])),
}


def all_rules(folder=None):
    """Train by each rule; return the leaves of its parameters and state. Resume, if in a folder."""
    results = {}
    for name, make in RULES.items():
        path = None if folder is None else f"{folder}/{name}"
        axes = {"node": 2, "gpu": 1}
        params, state, _ = train(make, axes=axes, folder=path, opt=fs.optim.adam(0.1))
        leaves = [*params.values(), *flatten(state["rule"])[0]]
        results[name] = [fs.unshard(x) for x in leaves]
    return results


def unlike_start():
    """Replicas that are unequal in the beginning raise."""
    mesh = fs.make_mesh({"node": 2, "gpu": 1})
    shards = tuple(torch.full((3,), float(device)) for device in local_devices(mesh))
    w = fs.mesh.Sharded((3,), fs.Layout(mesh, P()), shards)
    with pytest.raises(MismatchError, match=r'init: \["w"\] must be equal'):
        local_sgd(2)(inner_step(mesh), mesh).init({"w": w})


def in_processes(folder):
    unlike_start()
    return all_rules(folder)


def test_processes_and_resumed_runs_have_the_bits_of_virtual_replicas(two, tmp_path):
    unlike_start()
    expected = all_rules()

    resumed = all_rules(tmp_path / "virtual")
    of_processes = two.run(in_processes, f"{tmp_path}/processes")

    for results in (resumed, *of_processes):
        for name, leaves in expected.items():
            assert all(map(torch.equal, results[name], leaves)), name
