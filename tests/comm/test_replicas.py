"""Local steps and gossip against loops of plain tensors."""

import pytest
import torch

import fshard as fs
from fshard import P, comm

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


def train(make, count=6, axes=None, **options):
    mesh = fs.make_mesh(axes or AXES)
    step = make(inner_step(mesh, **options), mesh)
    params, state = step.init(fs.shard_params(FULL, P(), mesh=mesh))
    metrics = {}
    for number in range(count):
        params, state, metrics = step(params, state, batch(number))
    return params, state, metrics


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


def test_local_sgd_averages_every_few_steps():
    params, _, metrics = train(lambda inner, mesh: comm.local_sgd(inner, every=4, mesh=mesh, axis="node"))
    assert str(fs.typeof(params["w"])) == "f32[4@node, 4, 3]"
    assert_like(params, plain(lambda before, after, count: averaged(after) if count % 4 == 0 else after))
    assert metrics["samples"] == 16 and metrics["finite"]


def test_first_steps_are_synchronous():
    params, *_ = train(lambda inner, mesh: comm.local_sgd(inner, every=100, after=2, mesh=mesh, axis="node"))
    assert_like(params, plain(lambda before, after, count: averaged(after) if count <= 2 else after))


def test_diloco_is_the_loop_of_its_paper():
    def outer(inner, mesh):
        return comm.diloco(inner, fs.optim.sgd(0.7, momentum=0.9, nesterov=True), every=2, mesh=mesh, axis="node")

    anchor, velocity = dict(FULL), {k: torch.zeros_like(x) for k, x in FULL.items()}

    def act(before, after, count):
        if count % 2:
            return after
        for k in FULL:
            g = anchor[k] - averaged(after)[0][k]
            velocity[k] = 0.9 * velocity[k] + g
            anchor[k] = anchor[k] - 0.7 * (g + 0.9 * velocity[k])
        return [dict(anchor)] * 4

    expected = plain(act)
    assert_like(train(outer)[0], expected)


def test_diloco_of_every_step_is_the_synchronous_step_to_the_bit():
    params, *_ = train(
        lambda inner, mesh: comm.diloco(inner, fs.optim.sgd(1.0), every=1, mesh=mesh, axis="node"), count=2
    )
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
    compress = comm.error_feedback(comm.top_k(1.0))

    def make(compress):
        return lambda inner, mesh: comm.diloco(
            inner, fs.optim.sgd(0.5), every=2, mesh=mesh, axis="node", compress=compress
        )

    assert_like(train(make(compress))[0], {k: fs.unshard(x) for k, x in train(make(None))[0].items()})
    params, state, _ = train(
        make(comm.error_feedback(comm.chain(comm.top_k(0.2), comm.quantized(2, block=8)), decay=0.95))
    )
    assert all(x.isfinite().all() for x in map(fs.unshard, params.values())) and "residual" in state["rule"][0]["compress"]


@pytest.mark.parametrize("name", ["ring", "exponential", "one_peer", "hypercube", "complete"])
def test_gossip_mixes_and_steps(name):
    graph = getattr(comm, name)(4)
    params, *_ = train(lambda inner, mesh: comm.gossip(inner, graph, mesh=mesh, axis="node"))

    def act(before, after, count):
        stacked = {k: torch.stack([r[k] for r in before]) for k in FULL}
        weights = graph.matrix(count - 1).float()
        mixed = {k: torch.einsum("ij,j...->i...", weights, x) for k, x in stacked.items()}
        return [{k: mixed[k][i] + after[i][k] - before[i][k] for k in FULL} for i in range(4)]

    assert_like(params, plain(act))


DIRECTED = comm.from_matrix(
    [[0.5, 0.25, 0.25, 0], [0, 0.5, 0.5, 0], [0.25, 0, 0.25, 0.5], [0.75, 0, 0, 0.25]],
    torch.eye(4).roll(1, 0) / 2 + torch.eye(4) / 2,
)


def test_push_sum_keeps_both_sums():
    params, state, _ = train(lambda inner, mesh: comm.push_sum(inner, DIRECTED, mesh=mesh, axis="node"))
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
    params, *_ = train(lambda inner, mesh: comm.gossip(inner, comm.ring(4), mesh=mesh, axis="node"), count=1)
    grads = [slope(FULL, x) for x in batch(0).chunk(4)]
    for name, x in comm.mean(params).items():
        torch.testing.assert_close(x, FULL[name] - 0.25 * torch.stack([g[name] for g in grads]).mean(0))


@pytest.mark.parametrize("stage", [0, 2])
def test_inner_optimizers_have_state_of_their_own(stage, tmp_path):
    def make(inner, mesh):
        return comm.local_sgd(inner, every=3, mesh=mesh, axis="node")

    options = {"opt": fs.optim.loss_scaled(fs.optim.adam(0.1)), "stage": stage}
    params, state, _ = train(make, count=4, **options)
    fs.save(tmp_path / "c", (params, state))
    mesh = fs.make_mesh(AXES)
    step = make(inner_step(mesh, **options), mesh)
    again = fs.restore(tmp_path / "c", step.init(fs.shard_params(FULL, P(), mesh=mesh)))
    for number in (4, 5):
        again = step(*again, batch(number))[:2]
    whole = train(make, count=6, **options)[0]
    assert all(torch.equal(fs.unshard(again[0][name]), fs.unshard(whole[name])) for name in whole)


def gossip_of_two():
    axes = {"node": 2, "gpu": 1}
    params, *_ = train(lambda inner, mesh: comm.gossip(inner, comm.ring(2), mesh=mesh, axis="node"), axes=axes)
    return {name: fs.unshard(x) for name, x in params.items()}


def test_processes_have_the_bits_of_virtual_replicas(two):
    expected = gossip_of_two()
    for params in two.run(gossip_of_two):
        assert all(torch.equal(params[name], expected[name]) for name in expected)


def sharded_along_node(mesh):
    return comm.local_sgd(inner_step(mesh), every=2, mesh=mesh, axis="node").init(
        fs.shard_params(FULL, fs.fsdp("node"), mesh=mesh)
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda mesh: comm.local_sgd(inner_step(mesh), every=0, mesh=mesh, axis="node"), "local_sgd: every must be"),
        (lambda mesh: comm.local_sgd(lambda *x: x, every=1, mesh=mesh, axis="node"), "inner must be a step"),
        (
            lambda mesh: comm.gossip(inner_step(mesh), comm.ring(3), mesh=mesh, axis="node"),
            "graph must be of 4 devices",
        ),
        (sharded_along_node, "replicated along node"),
        (lambda mesh: comm.local_sgd(inner_step(mesh), every=2, mesh=mesh, axis="node").init(FULL), "must be arrays"),
    ],
)
def test_wrong_uses_raise(call, message):
    with pytest.raises(ValueError, match=message):
        call(fs.make_mesh(AXES))
