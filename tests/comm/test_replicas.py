"""Local steps and gossip against loops of plain tensors."""

import pytest
import torch

import fshard as fs
from fshard import P, comm
from fshard.errors import MismatchError
from fshard.mesh.layout import flatten
from fshard.mesh.spmd.run import local_devices

AXES = {"node": 4, "gpu": 2}


def dyadic(*shape, seed):
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).float() / 8


FULL = {"w": dyadic(4, 3, seed=0), "b": dyadic(3, seed=1)}


def loss_fn(params, x):
    return ((x @ params["w"] + params["b"]) * (x[:, :3] - 1)).sum(1).mean()


def batch(step):
    return dyadic(16, 4, seed=10 + step)


def inner_step(mesh, opt=None, stage=1):
    inner = mesh["gpu"]
    opt = fs.partition_optimizer(opt or fs.optim.sgd(0.25), mesh=inner, axis="gpu", stage=stage)
    return fs.train_step(loss_fn, opt, mesh=inner, batch=P("gpu"))


def train(make, count=6, axes=None, folder=None, rules=None, **options):
    """Train replicas; with a folder, save them after half of the steps and go on with what was restored."""
    mesh = fs.make_mesh(axes or AXES)
    step = make(inner_step(mesh, **options), mesh)
    params, state = step.init(fs.shard_params(FULL, rules or P(), mesh=mesh))
    metrics = {}
    for number in range(count):
        if folder is not None and number == count // 2:
            fs.save(folder, (params, state))
            step = make(inner_step(mesh, **options), mesh)
            params, state = fs.restore(folder, step.init(fs.shard_params(FULL, P(), mesh=mesh)))
        params, state, metrics = step(params, state, batch(number))
    return params, state, metrics


def sent(make, count):
    """Return the bytes that a device sends along the axis of the replicas in some steps, without those of the metrics."""
    totals = []
    for rule in (make, local_sgd(every=100)):
        with fs.ledger() as ledger:
            train(rule, count)
        totals.append(ledger.bytes(axis="node"))
    return totals[0] - totals[1]


def slope(params, x):
    return torch.func.grad(loss_fn)(params, x)


def plain(act, count=6, n=4):
    """SGD on each replica's rows; `act(before, after, step)` follows."""
    replicas = [dict(FULL) for _ in range(n)]
    for number in range(count):
        parts, before = batch(number).chunk(n), replicas
        grads = [slope(params, x) for params, x in zip(before, parts, strict=True)]
        after = [{k: p[k] - 0.25 * g[k] for k in p} for p, g in zip(before, grads, strict=True)]
        replicas = act(before, after, number + 1)
    return {k: torch.stack([params[k] for params in replicas]) for k in FULL}


def averaged(replicas):
    return [{k: torch.stack([r[k] for r in replicas]).mean(0) for k in FULL}] * len(replicas)


def assert_like(params, expected, **tolerance):
    for name in expected:
        torch.testing.assert_close(fs.unshard(params[name]), expected[name], **tolerance)


def local_sgd(**options):
    return lambda inner, mesh: comm.local_sgd(inner, **options, mesh=mesh, axis="node")


@pytest.mark.parametrize(("every", "first"), [(4, 0), (100, 2)])
def test_local_sgd_averages_every_few_steps(every, first):
    params, _, metrics = train(local_sgd(every=every, after=first))
    assert str(fs.typeof(params["w"])) == "f32[4@node, 4, 3]"
    expected = plain(lambda _, after, count: averaged(after) if count <= first or count % every == 0 else after)
    assert_like(params, expected)
    assert metrics["samples"] == 16 and metrics["finite"]


NESTEROV = fs.optim.sgd(0.75, momentum=0.5, nesterov=True)


def streaming(every, fragments, delay=0, mix=1.0, compress=None):
    options = {"every": every, "fragments": fragments, "delay": delay, "mix": mix, "compress": compress}
    return lambda inner, mesh: comm.streaming_diloco(inner, NESTEROV, **options, mesh=mesh, axis="node")


def diloco(opt=NESTEROV, **options):
    return lambda inner, mesh: comm.diloco(inner, opt, **options, mesh=mesh, axis="node")


@pytest.mark.parametrize(
    ("every", "fragments", "delay", "mix"),
    [(2, 1, 0, 1.0), (4, 2, 0, 1.0), (4, 2, 1, 0.5), (4, 2, 3, 1.0), (2, 1, 1, 0.25)],
)
def test_streaming_diloco_is_a_loop_over_fragments(every, fragments, delay, mix):
    """The parameters are b, then w."""
    offsets = {"b": 0, "w": every // 2 if fragments == 2 else 0}
    anchor, velocity, grads = dict(FULL), {k: torch.zeros_like(x) for k, x in FULL.items()}, {}

    def act(before, after, count):
        for k, offset in offsets.items():
            if count > offset and (count - offset) % every == 0:
                grads[k] = torch.stack([anchor[k] - replica[k] for replica in after]).mean(0)
            if count - delay > offset and (count - delay - offset) % every == 0:
                velocity[k] = 0.5 * velocity[k] + grads[k]
                anchor[k] = anchor[k] - 0.75 * (grads[k] + 0.5 * velocity[k])
                after = [{**replica, k: mix * anchor[k] + (1 - mix) * replica[k]} for replica in after]
        return after

    expected = plain(act, count=9)
    for make in [streaming(every, fragments, delay, mix)] + [diloco(every=2)] * (fragments == mix == 1):
        assert_like(train(make, count=9)[0], expected)


def test_diloco_of_every_step_is_the_synchronous_step_to_the_bit():
    params, *_ = train(diloco(fs.optim.sgd(1.0), every=1), count=2)
    mesh = fs.make_mesh({"data": 8})
    opt = fs.optim.sgd(0.25)
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"))
    whole = fs.shard_params(FULL, P(), mesh=mesh)
    state = opt.init(whole)
    for number in range(2):
        whole, state, _ = step(whole, state, batch(number))
    for name in FULL:
        assert all(torch.equal(x, fs.unshard(whole[name])) for x in fs.unshard(params[name]))


def test_compressed_diloco_keeps_what_it_has_not_sent():
    make = diloco(every=2, compress=comm.error_feedback(comm.top_k(1.0)))
    assert_like(train(make)[0], {k: fs.unshard(x) for k, x in train(diloco(every=2))[0].items()})


def learned(make, count=60, d=8):
    """Fit a linear map; return the first and the last loss, and the bytes that a device sends in a step."""
    mesh = fs.make_mesh({"node": 2, "gpu": 1})
    draw = torch.Generator().manual_seed(0)
    target, x = torch.randn(d, d, generator=draw), torch.randn(64, d, generator=draw)

    def loss_fn(params, batch):
        return (batch[0] @ params["w"] - batch[1]).square().mean()

    step = make(loss_fn, mesh)
    params, state = step.init(fs.shard_params({"w": torch.zeros(d, d)}, P(), mesh=mesh))
    losses = []
    with fs.ledger() as ledger:
        for _ in range(count):
            params, state, metrics = step(params, state, (x, x @ target))
            losses.append(metrics["loss"].item())
    return losses[0], losses[-1], ledger


def sparse_loco(loss_fn, mesh):
    inner = fs.train_step(loss_fn, fs.optim.adamw(0.05), mesh=mesh["gpu"], batch=P("gpu"))
    compress = comm.error_feedback(comm.chain(comm.top_k(0.25), comm.quantized(2, block=8)), decay=0.95)
    return comm.diloco(inner, fs.optim.sgd(0.7), every=10, mesh=mesh, axis="node", compress=compress)


def mu_loco(loss_fn, mesh):
    inner = fs.train_step(loss_fn, fs.optim.muon(0.05), mesh=mesh["gpu"], batch=P("gpu"))
    outer = fs.optim.sgd(0.7, momentum=0.6, nesterov=True)
    return comm.diloco(inner, outer, every=10, mesh=mesh, axis="node")


@pytest.mark.parametrize(("make", "size"), [(sparse_loco, 16 * 4 + 16 * 2 // 8 + 2 * 4), (mu_loco, 64 * 4)])
def test_sparse_loco_and_mu_loco_learn_and_send_what_theory_says(make, size):
    first, last, ledger = learned(make)
    quiet = learned(lambda loss_fn, mesh: comm.local_sgd(make(loss_fn, mesh)._inner, every=100, mesh=mesh, axis="node"))
    assert last < first / 4
    assert ledger.bytes(axis="node") - quiet[2].bytes(axis="node") == 6 * size


def gossip(graph):
    return lambda inner, mesh: comm.gossip(inner, graph, mesh=mesh, axis="node")


@pytest.mark.parametrize("name", ["ring", "exponential", "one_peer", "hypercube", "complete"])
def test_gossip_mixes_and_steps(name):
    """The first step has exact gradients, so it has the bits of the formula."""
    graph = getattr(comm, name)(4)

    def act(before, after, count):
        row = [[j % 4 for j in range(i - 1, i + 3) if graph.matrix(count - 1)[i, j % 4]] for i in range(4)]
        mean = [{k: sum(before[j][k] for j in js) / len(js) for k in FULL} for js in row]
        return [{k: mean[i][k] + (after[i][k] - before[i][k]) for k in FULL} for i in range(4)]

    assert_like(train(gossip(graph), 1)[0], plain(act, 1), rtol=0, atol=0)
    assert_like(train(gossip(graph))[0], plain(act))


def push_sum(graph):
    return lambda inner, mesh: comm.push_sum(inner, graph, mesh=mesh, axis="node")


DIRECTED = comm.from_matrix(
    [[0.5, 0.25, 0.25, 0], [0, 0.5, 0.5, 0], [0.25, 0, 0.25, 0.5], [0.75, 0, 0, 0.25]],
    torch.eye(4).roll(1, 0) / 2 + torch.eye(4) / 2,
)


def test_push_sum_keeps_both_sums():
    params, state, _ = train(push_sum(DIRECTED))
    weights, totals = torch.ones(4), [dict(FULL) for _ in range(4)]

    def act(before, after, count):
        nonlocal weights, totals
        shares = DIRECTED.matrix(count - 1).float()
        moved = [{k: totals[i][k] + after[i][k] - before[i][k] for k in FULL} for i in range(4)]
        totals = [{k: sum(shares[i, j] * moved[i][k] for i in range(4)) for k in FULL} for j in range(4)]
        weights = shares.T @ weights
        return [{k: totals[j][k] / weights[j] for k in FULL} for j in range(4)]

    assert_like(params, plain(act))
    weight = fs.unshard(state["rule"])
    assert weight.sum().item() == pytest.approx(4) and not torch.allclose(weight, torch.ones(4, dtype=torch.float64))


def test_the_mean_of_gossip_moves_as_the_mean_gradient():
    params, *_ = train(gossip(comm.ring(4)), count=1)
    grads = [slope(FULL, x) for x in batch(0).chunk(4)]
    for name, x in comm.mean(params).items():
        torch.testing.assert_close(x, FULL[name] - 0.25 * torch.stack([g[name] for g in grads]).mean(0))


@pytest.mark.parametrize(
    ("make", "count", "size"),
    [
        (local_sgd(every=4), 8, 2 * 90),
        (diloco(every=4), 8, 2 * 90),
        (streaming(4, 2, delay=1), 11, 2 * 90),
        (gossip(comm.ring(4)), 1, 2 * 60),
        (gossip(comm.one_peer(4)), 1, 60),
    ],
)
def test_bytes_are_those_of_theory(make, count, size):
    """There are 15 numbers: a mean of 4 devices sends 2 * 3/4 * 60 bytes, an edge of a graph 60."""
    assert sent(make, count) == size


@pytest.mark.parametrize(
    ("make", "collective", "calls"),
    [(gossip(comm.ring(4)), "ppermute", [2, 4, 6]), (streaming(2, 1, delay=1), "psum", [0, 2, 4 + 1])],
)
def test_communication_is_under_way_during_the_inner_step(make, collective, calls):
    """The metrics take 2 calls of psum."""
    started = []

    def watched(inner, mesh):
        def step(*args):
            device = fs.axis_index(("node", "gpu"))
            started.append((device, ledger.calls(device, axis="node", collective=collective)))
            return inner(*args)

        step.init = inner.init
        return make(step, mesh)

    with fs.ledger() as ledger:
        train(watched, count=3)
    assert sorted(started) == [(device, count) for device in range(8) for count in calls]


# -- inside of a replica -----------------------------------------------------------------------------------------------


def odd_params():
    draw = torch.Generator().manual_seed(2)
    w = torch.randn(5, 3, generator=draw)
    params = {"w": w, "tied": w, "bias": torch.randn(3, generator=draw).bfloat16(), "scale": torch.tensor(1.5)}
    return params | {"empty": torch.zeros(0, 3), "unused": torch.ones(2), "frozen": torch.full((3,), 0.1)}


def odd_loss(params, x):
    y = torch.tanh(x @ params["w"] + params["bias"]) @ params["tied"].T * params["scale"]
    return (y[:, :3] * params["frozen"]).square().sum(1).mean() + params["empty"].sum()


INSIDE = {
    "ZeRO 0": {"stage": 0},
    "ZeRO 1": {"stage": 1},
    "ZeRO 2": {"stage": 2, "opt": fs.optim.adam(0.1)},
    "ZeRO 3": {"stage": 3, "opt": fs.optim.adam(0.1)},
    "accumulation": {"accumulate": 2},
    "donated memory": {"donate": True},
    "clipping": {"opt": fs.optim.chain(fs.optim.clip_by_global_norm(0.1), fs.optim.sgd(0.1))},
    "loss scaling": {"opt": fs.optim.loss_scaled(fs.optim.adam(0.1))},
}


def odd_start(mesh, stage=1, opt=None, **options):
    """Return parameters on a mesh, and a step on its axis gpu."""
    params = fs.shard_params(odd_params(), fs.fsdp("gpu") if stage == 3 else P(), mesh=mesh, frozen="frozen")
    opt = fs.partition_optimizer(opt or fs.optim.sgd(0.1), mesh=mesh["gpu"], axis="gpu", stage=stage)
    return params, fs.train_step(odd_loss, opt, mesh=mesh["gpu"], batch=P("gpu"), **options)


def odd_batch(number):
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(20 + number))


@pytest.mark.parametrize("case", INSIDE)
def test_replicas_have_the_bits_of_separate_runs_and_their_mean(case, tmp_path):
    mesh = fs.make_mesh({"node": 2, "gpu": 2})
    params, inner = odd_start(mesh, **INSIDE[case])
    step = comm.local_sgd(inner, every=3, mesh=mesh, axis="node")
    run, runs = step.init(params), []
    for number in range(4):
        run = step(*run, odd_batch(number))[:2]
        if number == 1:
            fs.save(tmp_path / "c", run)
            run = fs.restore(tmp_path / "c", step.init(odd_start(mesh, **INSIDE[case])[0]))
    for _ in range(2):
        params, inner = odd_start(fs.make_mesh({"gpu": 2}), **INSIDE[case])
        runs.append((params, inner.init(params)))
    for number in range(4):
        runs = [inner(*run, rows)[:2] for run, rows in zip(runs, odd_batch(number).chunk(2), strict=True)]
        if number == 2:
            leaves = [[x.shards for x in params.values()] for params, _ in runs]
            for first, second in zip(*leaves, strict=True):
                for x, y in zip(first, second, strict=True):
                    y.copy_(x.copy_((x + y) / 2))
    for name, x in run[0].items():
        assert all(torch.equal(fs.unshard(x)[i], fs.unshard(params[name])) for i, (params, _) in enumerate(runs)), name
    assert run[0]["tied"] is run[0]["w"] and comm.mean(run[0])["frozen"].tolist() == [torch.tensor(0.1).item()] * 3


def test_replicas_of_pipelines_train_as_replicas_of_one_device():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
    mesh, schedule = fs.make_mesh({"node": 2, "pipe": 2}), fs.pipeline_schedule("1f1b", stages=2, microbatches=2)
    stages = fs.pipeline.split_stages(model, 2)
    opt, x = fs.optim.sgd(0.5, momentum=0.9), torch.randn(8, 4)
    options = {"mesh": mesh["pipe"], "batch": P(), "schedule": schedule}
    inner = fs.train_step(stages, opt, **options, loss=lambda y, batch: (y - batch[:, :2]).square().mean())
    apply, full, buffers = fs.functionalize(model)
    whole = fs.make_mesh({"node": 2, "gpu": 1})

    def loss_fn(params, x):
        return (apply(params, buffers, x)[0] - x[:, :2]).square().mean()

    runs = {
        mesh: (inner, fs.shard_stages(stages, mesh=mesh, schedule=schedule)),
        whole: (fs.train_step(loss_fn, opt, mesh=whole["gpu"], batch=P("gpu")), fs.shard_params(full, P(), mesh=whole)),
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


# -- numbers, processes, errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("every", "settled"), [(1, 0.75), (4, 0.6884), (16, 0.5502)])
def test_local_steps_settle_beside_the_minimum(every, settled):
    """Curvatures 1 and 3, targets 0 and 1: the minimum of the mean is at 3/4."""
    mesh = fs.make_mesh({"node": 2, "gpu": 1})

    def loss_fn(params, x):
        return (x[:, 0] / 2 * (params["x"] - x[:, 1]).square()).mean()

    inner = fs.train_step(loss_fn, fs.optim.sgd(0.1), mesh=mesh["gpu"], batch=P("gpu"))
    step = local_sgd(every=every)(inner, mesh)
    run = step.init(fs.shard_params({"x": torch.tensor(0.0, dtype=torch.float64)}, P(), mesh=mesh))
    for _ in range(96):
        run = step(*run, torch.tensor([[1.0, 0.0], [3.0, 1.0]], dtype=torch.float64))[:2]
    assert comm.mean(run[0])["x"].item() == pytest.approx(settled, abs=6e-5)


QUANTIZED = comm.error_feedback(comm.quantized(4, block=8))
RULES = {
    "local_sgd": local_sgd(every=3, after=1),
    "streaming": streaming(2, 2, delay=1, mix=0.5, compress=QUANTIZED),
    "gossip": gossip(comm.ring(2)),
    "push_sum": push_sum(comm.from_matrix([[0.5, 0.5], [0.25, 0.75]])),
}


def all_rules(folder=None):
    results = {}
    for name, make in RULES.items():
        path = None if folder is None else f"{folder}/{name}"
        options = {"axes": {"node": 2, "gpu": 1}, "folder": path, "opt": fs.optim.adam(0.1)}
        params, state, _ = train(make, **options)
        results[name] = [fs.unshard(x) for x in [*params.values(), *flatten(state["rule"])[0]]]
    return results


def unlike_start():
    mesh = fs.make_mesh({"node": 2, "gpu": 1})
    layout = fs.Layout(mesh, P())
    w = fs.mesh.Sharded((3,), layout, tuple(torch.full((3,), float(i)) for i in local_devices(mesh)))
    with pytest.raises(MismatchError, match=r'init: \["w"\] must be equal'):
        local_sgd(every=2)(inner_step(mesh), mesh).init({"w": w})


def in_processes(folder):
    unlike_start()
    return all_rules(folder)


def test_processes_and_resumed_runs_have_the_bits_of_virtual_replicas(two, tmp_path):
    unlike_start()
    expected = all_rules()
    for results in (all_rules(tmp_path / "virtual"), *two.run(in_processes, f"{tmp_path}/processes")):
        for name, xs in expected.items():
            assert all(torch.equal(x, y) for x, y in zip(results[name], xs, strict=True)), name


def made(rule, **options):
    return lambda mesh: rule(inner_step(mesh), **options, mesh=mesh, axis="node")


def started(use, rules=None):
    """Return a function that starts replicas and calls `use` with the step, one tree, the replicas and the state."""

    def call(mesh):
        step, tree = local_sgd(every=2)(inner_step(mesh), mesh), fs.shard_params(FULL, rules or P(), mesh=mesh)
        return use(step, tree, *step.init(tree))

    return call


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (made(comm.local_sgd, every=0), "every must be"),
        (made(comm.diloco, outer=NESTEROV, every=0), "every must be"),
        (made(comm.streaming_diloco, outer=NESTEROV, every=4, fragments=5), "fragments must be"),
        (made(comm.streaming_diloco, outer=NESTEROV, every=4, fragments=2, delay=4), "delay must be"),
        (made(comm.streaming_diloco, outer=NESTEROV, every=4, fragments=2, mix=1.5), "mix must be"),
        (lambda mesh: train(streaming(4, 3)), "fragments must be at most 2"),
        (lambda mesh: train(gossip(comm.ring(3))), "graph must be of 4 devices"),
        (lambda mesh: train(push_sum(comm.ring(3))), "graph must be of 4 devices"),
        (lambda mesh: comm.local_sgd(lambda *x: x, every=1, mesh=mesh, axis="node"), "inner must be a step"),
        (lambda mesh: local_sgd(every=2)(inner_step(mesh), mesh).init(FULL), "must be arrays"),
        (started(lambda *args: None, fs.fsdp("node")), "replicated along node"),
        (started(lambda step, tree, params, state: step.init(params)), "replicated along node"),
        (started(lambda step, tree, params, state: step(tree, state, batch(0))), "must have a first dim along"),
        (started(lambda step, tree, params, state: comm.mean(tree)), "must be those of all replicas"),
        (
            lambda mesh: train(diloco(every=1, compress=comm.power_sgd(1)), stage=3, rules=fs.fsdp("gpu")),
            "needs full matrices",
        ),
    ],
)
def test_wrong_uses_raise(call, message):
    with pytest.raises(ValueError, match=message):
        call(fs.make_mesh(AXES))
