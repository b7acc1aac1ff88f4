"""Compressed gradients in a step: ZeRO, stages, loss scaling, clipping, checkpoints, overlap.

The oracle is one loop over plain tensors of two nodes (`sequential`).
"""

from typing import NamedTuple

import pytest
import torch

import fshard as fs
from fshard import P, comm
from fshard.mesh.layout import flatten
from tests.comm.steps import (
    AXES,
    FEEDBACK,
    FRACTION,
    RATE,
    batch,
    first_stage,
    follow,
    full_params,
    last_stage,
    loss_fn,
    train,
    train_stages,
)
from tests.helpers.processes import sums_in_order


def double(params, y):
    return 2 * y


# -- the oracle: one loop over plain tensors -------------------------------------------------------


def largest(x):
    """Return the part of a shard that top_k sends: all of it where that is no shorter."""
    count = -(-len(x) * int(100 * FRACTION) // 100)
    if (x.itemsize + 4) * count >= x.itemsize * len(x):
        return x
    index = x.abs().argsort(descending=True)[:count]
    return torch.zeros_like(x).index_copy(0, index, x[index])


class Run(NamedTuple):
    """Parameters, the sums of both nodes' residuals, and the norms of the sums that were sent."""

    params: dict[str, torch.Tensor]
    residuals: dict[str, torch.Tensor]
    norms: list[torch.Tensor]


def compressed(target, shards):
    """Return what is sent of a gradient: top_k of each of its shards."""
    sent = [largest(shard) for shard in target.flatten().chunk(shards)]
    return torch.cat(sent).view_as(target)


def sequential(loss_fn, params, *, shards=1, tied=False, max_norm=float("inf"), delay=0, count=3):
    """Follow two nodes: top_k of gradients and residuals, their sum, and SGD."""
    constants = {name: params[name] for name in ("frozen", "unused") if name in params}
    params = {name: x for name, x in params.items() if name not in constants}
    zeros = {name: torch.zeros_like(x) for name, x in params.items()}

    def gradient(params, x):
        def loss(params):
            ties = {"tied": params["w"]} if tied else {}
            return loss_fn({**params, **constants, **ties}, x)

        grads = torch.func.grad(loss)(params)
        return {name: g / 2 for name, g in grads.items()}

    residuals = [dict(zeros), dict(zeros)]
    waiting = [[zeros, zeros] for _ in range(delay)]
    norms = []
    for _ in range(count):
        waiting.append([gradient(params, x) for x in batch().chunk(2)])

        totals = dict(zeros)
        for grads, residual in zip(waiting.pop(0), residuals, strict=True):
            for name, g in grads.items():
                target = g + residual[name]
                sent = compressed(target, shards)
                residual[name] = target - sent
                totals[name] = totals[name] + sent

        norm = torch.stack([x.float().norm() for x in totals.values()]).norm()
        norms.append(norm)
        rate = RATE * min(1.0, max_norm / max(float(norm), 1e-9))
        params = {name: x - rate * totals[name] for name, x in params.items()}

    sums = {name: residuals[0][name] + residuals[1][name] for name in zeros}
    return Run({**params, **constants}, sums, norms)


CLIP = fs.optim.chain(fs.optim.clip_by_global_norm(0.5), fs.optim.sgd(RATE))
DELAYED = comm.delayed(FEEDBACK)
PROGRAMS = {  # options of the step, and of the loop
    "zero 0": ({}, {}),
    "zero 1": ({"stage": 1}, {"shards": 2}),
    "zero 1, both axes": ({"stage": 1, "axis": ("node", "gpu")}, {"shards": 2}),
    "zero 2": ({"stage": 2}, {"shards": 2}),
    "zero 3": ({"stage": 3, "rules": fs.fsdp("gpu")}, {"shards": 2}),
    "tied": ({"stage": 1, "tied": True}, {"shards": 2, "tied": True}),
    "accumulate": ({"accumulate": 2}, {}),
    "donate": ({"donate": True, "stage": 1}, {"shards": 2}),
    "clip": ({"opt": CLIP}, {"max_norm": 0.5}),
    "scaled": ({"opt": fs.optim.loss_scaled(fs.optim.sgd(RATE))}, {}),
    "delayed": ({"compress": comm.delayed(FEEDBACK, 2)}, {"delay": 2}),
    "delayed, zero 1": ({"compress": DELAYED, "stage": 1}, {"shards": 2, "delay": 1}),
}
STAGED = {
    "1f1b": ({}, {}),
    "gpipe, zero 1": ({"name": "gpipe", "axes": ("pipe", "gpu")}, {"shards": 2}),
    "delayed": ({"compress": DELAYED}, {"delay": 1}),
    "no parameters": ({"second": double, "keys": ()}, {}),
}


def run_program(name):
    options = {
        "compress": FEEDBACK,
        **(PROGRAMS.get(name) or STAGED[name.removeprefix("stages ")])[0],
    }
    return (train if name in PROGRAMS else train_stages)(
        {"node": options.pop("compress")}, **options
    )


def sequential_of_stages(options, arguments):
    """Follow the model of two stages."""
    second = options.get("second", last_stage)
    names = ("w", "b", "frozen", *options.get("keys", ("scale", "odd")))
    full = full_params()

    def loss(params, x):
        return second(params, first_stage(params, x)).square().mean()

    return sequential(loss, {name: full[name] for name in names}, **arguments)


def residuals_of(state):
    """Return the residuals by the name of the parameter."""
    compress = state["compress"]["node"]
    trees = fs.unshard(compress.get("residual") or compress["inner"]["residual"])
    if not isinstance(trees, list):
        trees = [trees]
    residuals = {}
    for tree in trees:
        residuals |= tree
    residuals["w"] = residuals.get("tied", residuals["w"])  # ties have one, which is the first's
    return residuals


def assert_close(actual, expected):
    bound = 100 * torch.finfo(expected.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=bound, atol=1e-5)


@pytest.mark.parametrize("name", [*PROGRAMS, *(f"stages {name}" for name in STAGED)])
def test_a_step_follows_the_sequential_loop(name):
    """Residuals are those of gradients that are not scaled."""
    params, state, metrics = run_program(name)

    if name in PROGRAMS:
        expected = sequential(loss_fn, full_params(), **PROGRAMS[name][1])
    else:
        expected = sequential_of_stages(*STAGED[name.removeprefix("stages ")])
    residuals = residuals_of(state)
    for key, x in expected.params.items():
        assert_close(params[key], x)
    for key, x in expected.residuals.items():
        assert_close(residuals[key], x)
    norms = [row["grad_norm"] for row in metrics]  # of gradients at these parameters
    assert_close(torch.stack(norms), torch.stack(expected.norms))


def test_power_sgd_projects_the_gradient_of_a_stage():
    """P = orthogonal(G Q^T) and the total is P P^T G, of the gradient G of all nodes."""
    full = full_params()
    compress = comm.power_sgd(2)
    q = compress.init([{"w": full["w"]}])["q"][0]["w"]

    params, state, _ = train_stages({"node": compress}, count=1)

    def loss(w):
        y = first_stage({**full, "w": w}, batch())
        return last_stage(full, y).square().mean()

    g = torch.func.grad(loss)(full["w"])
    p = torch.linalg.qr(g @ q.T).Q
    torch.testing.assert_close(params["w"], full["w"] - RATE * p @ p.T @ g)
    assert str(fs.typeof(state["compress"]["node"]["q"][0]["w"])) == "f32[2, 5]{at:pipe=0}"


@pytest.mark.parametrize(
    ("axes", "stage", "type_of_w"),
    [(("node",), 1, "f32[6, 5]{flat:gpu, U:node}"), (("node", "gpu"), 0, "f32[6, 5]{U:gpu+node}")],
    ids=str,
)
def test_residuals_are_unreduced_and_keep_their_total_on_another_mesh(
    axes, stage, type_of_w, tmp_path
):
    """The gradient is the reduced one and all residuals, on this mesh and on another."""
    compress = dict.fromkeys(axes, FEEDBACK)
    params, state, _ = train(compress, stage=stage, opt=fs.optim.sgd(1.0), count=1)
    assert str(fs.typeof(state["compress"]["node"]["residual"]["w"])) == type_of_w
    _, example, _ = train(compress, stage=stage, mesh=fs.make_mesh({"node": 4, "gpu": 2}), count=1)
    fs.save(tmp_path / "c", state)
    full = full_params()
    gradient = torch.func.grad(lambda w: loss_fn({**full, "w": w}, batch()))(full["w"])
    for tree in (state, fs.restore(tmp_path / "c", example)):
        residuals = [fs.unshard(tree["compress"][axis]["residual"]["w"]) for axis in axes]
        torch.testing.assert_close(full["w"] - params["w"] + sum(residuals), gradient)


def compressed_run(compress, nodes, stage):
    """Return parameters, state and the step of a run whose gradients are `gradients_of(x)`."""
    mesh = fs.make_mesh({"node": nodes, "gpu": 2})
    opt = fs.optim.sgd(1.0)
    opt = fs.partition_optimizer(
        opt, mesh=mesh, axis="gpu", stage=stage, compress={"node": compress}
    )
    rules = fs.fsdp("gpu") if stage == 3 else P()
    params = fs.shard_params({"w": torch.zeros(6, 5), "odd": torch.zeros(7)}, rules, mesh=mesh)

    def loss(params, x):
        return (params["w"] * x.mean(0)[:, None]).sum() + (params["odd"] * x.mean()).sum()

    return params, opt.init(params), fs.train_step(loss, opt, mesh=mesh, batch=P(mesh.axis_names))


def gradients_of(x):
    return {"w": x.mean(0)[:, None].expand(6, 5), "odd": x.mean().expand(7)}


def totals(state, *names):
    """Return the sum over devices of each array below these keys of the compressor's state."""
    trees = [state["compress"]["node"]]
    for name in names:
        trees = [tree[name] for tree in trees]
    return fs.unshard(trees[0])


MOVES = [(4, 1, 0), (1, 4, 0), (2, 3, 1), (2, 1, 2), (1, 3, 3)]
"""Nodes that save, nodes that restore, and the stage of ZeRO."""


def moved(compress, saving, restoring, stage, path):
    """Save a run after two steps and restore it on other nodes; return both, and the step there."""
    params, state, step = compressed_run(compress, saving, stage)
    for _ in range(2):
        params, state, _ = step(params, state, torch.ones(24, 6).cumsum(1))
    fs.save(path, {"params": params, "state": state})
    target, initial, step = compressed_run(compress, restoring, stage)
    restored = fs.restore(path, {"params": target, "state": initial})
    return (params, state), (restored["params"], restored["state"]), step


@pytest.mark.parametrize(("saving", "restoring", "stage"), MOVES)
@pytest.mark.parametrize(
    ("compress", "names"),
    [
        (FEEDBACK, ("residual",)),
        (comm.momentum_corrected(comm.top_k(FRACTION)), ("inner", "residual")),
        (comm.ef21(comm.top_k(FRACTION)), ("estimate",)),
        (comm.delayed(FEEDBACK), ("queue_0",)),
    ],
    ids=["feedback", "momentum", "ef21", "delayed"],
)
def test_totals_of_compressors_are_kept_on_any_number_of_devices(
    compress, names, saving, restoring, stage, tmp_path
):
    (_, before), (_, after), _ = moved(compress, saving, restoring, stage, tmp_path / "c")
    for name, x in totals(before, *names).items():
        torch.testing.assert_close(totals(after, *names)[name], x)


@pytest.mark.parametrize(("saving", "restoring", "stage"), MOVES)
def test_residuals_of_several_devices_are_sent_by_one(saving, restoring, stage, tmp_path):
    """Nothing of the gradients of all steps is lost: parameters and residuals are their sum."""
    _, (params, state), step = moved(FEEDBACK, saving, restoring, stage, tmp_path / "c")
    x = torch.ones(24, 6).cumsum(1)

    params, state, _ = step(params, state, x)

    residuals = totals(state, "residual")
    for name, gradient in gradients_of(x).items():
        torch.testing.assert_close(residuals[name] - fs.unshard(params[name]), 3 * gradient)
        assert restoring > 1 or not residuals[name].any()


@pytest.mark.parametrize(("saving", "restoring", "stage"), MOVES)
def test_ef21_continues_with_the_total_of_its_estimates(saving, restoring, stage, tmp_path):
    """If all is sent, the estimates are the gradients: each step is that of plain SGD."""
    everything = comm.ef21(comm.top_k(1.0))
    _, (params, state), step = moved(everything, saving, restoring, stage, tmp_path / "c")
    x = torch.ones(24, 6).cumsum(1)

    after, *_ = step(params, state, x)

    fs.save(tmp_path / "d", after)  # raises if replicas differ
    for name, gradient in gradients_of(x).items():
        change = fs.unshard(params[name]) - fs.unshard(after[name])
        torch.testing.assert_close(change, gradient)


@pytest.mark.parametrize("saving", [1, 2])
def test_delayed_gradients_of_a_checkpoint_are_applied_by_any_number_of_devices(saving, tmp_path):
    restoring = 3 - saving
    _, (params, state), step = moved(DELAYED, saving, restoring, 0, tmp_path / "c")

    after, state, _ = step(params, state, torch.zeros(24, 6))

    waiting = totals(state, "queue_0")
    assert not any(x.any() for x in waiting.values())
    residuals = totals(state, "inner", "residual")
    before = torch.ones(24, 6).cumsum(1)  # the batch of the two steps before
    for name, gradient in gradients_of(before).items():
        torch.testing.assert_close(residuals[name] - fs.unshard(after[name]), 2 * gradient)


@pytest.mark.parametrize(
    "compress",
    [
        FEEDBACK,
        comm.error_feedback(comm.random_k(0.05)),
        comm.momentum_corrected(comm.sign(block=8)),
        comm.ef21(comm.quantized(8, block=8)),
        comm.delayed(FEEDBACK),
    ],
)
def test_a_step_that_is_not_finite_leaves_the_state_alone(compress):
    """A step is skipped if a gradient is not finite, sent or not.

    The next one has the old state.
    """
    mesh = fs.make_mesh(AXES)
    opt = fs.optim.loss_scaled(fs.optim.sgd(RATE), initial=8.0)
    opt = fs.partition_optimizer(opt, mesh=mesh, axis="gpu", stage=1, compress={"node": compress})

    def loss_fn(p, x):
        return (p["w"] * x.mean(0)[:, None]).sum()

    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P(mesh.axis_names))
    params = fs.shard_params({"w": full_params()["w"]}, P(), mesh=mesh)
    params, state, _ = step(params, opt.init(params), batch())

    infinite = batch().clone()
    infinite[3, 3] = float("inf")
    after, after_state, metrics = step(params, state, infinite)

    assert not metrics["finite"]
    assert_equal(after, params)
    assert_equal(after_state["compress"], state["compress"])
    _, _, metrics = step(after, after_state, batch())
    assert metrics["finite"]


def assert_equal(actual, expected):
    leaves = flatten(fs.unshard(actual))[0]
    expected_leaves = flatten(fs.unshard(expected))[0]
    assert all(map(torch.equal, leaves, expected_leaves))


# -- overlap ---------------------------------------------------------------------------------------


def logging_psum(log):
    """Return a psum that logs its start and its end."""

    def phases(grads, state, axis):
        log.append("start")
        total = yield fs.psum.start(grads, axis)
        log.append("end")
        return comm.Reduced(total, grads, state)

    return comm.Compressor(lambda params: {}, phases)


def train_delayed(nodes=2):
    """Return what happens in three steps, and whether the results are those without overlap."""
    log = []
    mesh = fs.make_mesh({"node": nodes})
    results = []

    def logged_loss(params, x):
        log.append("forward")
        return loss_fn(params, x)

    for delayed in (
        comm.delayed(logging_psum(log)),
        comm.delayed(logging_psum(log))._replace(early=None),
    ):
        log.clear()
        params = fs.shard_params(full_params(), P(), mesh=mesh, frozen="frozen")
        opt = fs.partition_optimizer(
            fs.optim.sgd(RATE), mesh=mesh, axis="node", stage=0, compress={"node": delayed}
        )
        step = fs.train_step(logged_loss, opt, mesh=mesh, batch=P("node"))
        params, *_ = follow(step, params, opt, 3)
        results.append(([*log], [*params.values()]))
    (events, params), (_, expected) = results
    return events, all(map(torch.equal, params, expected))


def check_overlap(events, devices):
    """The reduction starts before the forward, and ends after it.

    Nothing waits in the first step, where the forward comes first.
    """
    order = "".join(event[0] for event in events)
    forward = "f" * devices
    start = "s" * devices
    end = "e" * devices
    assert order == forward + start + end + 2 * (start + forward + end)


def test_a_delayed_reduction_starts_before_the_forward():
    events, is_equal = train_delayed()
    assert is_equal
    check_overlap(events, 2)


def test_delayed_gradients_are_reduced_if_other_leaves_are_used():
    """The leaves with a gradient change in every step, so what was started cannot be used."""
    mesh = fs.make_mesh({"node": 2})
    results = []

    def loss(params, x):
        used = params["w"] if x[0, 0] > 0 else params["odd"]
        return (used**2).sum() + (params["b"] * x.mean()).sum()

    for delayed in (comm.delayed(FEEDBACK), comm.delayed(FEEDBACK)._replace(early=None)):
        params = fs.shard_params(full_params(), P(), mesh=mesh)
        opt = fs.partition_optimizer(
            fs.optim.sgd(RATE), mesh=mesh, axis="node", stage=0, compress={"node": delayed}
        )
        step = fs.train_step(loss, opt, mesh=mesh, batch=P("node"))
        state = opt.init(params)
        for sign in (1, -1, 1, 1, -1, -1):
            params, state, _ = step(params, state, sign * torch.ones(8, 6))
        results.append([*fs.unshard(params).values()])
    assert all(map(torch.equal, *results))


ON_PROCESSES = ("zero 3", "delayed, zero 1", "stages delayed")


def in_processes():
    with sums_in_order():
        return train_delayed(nodes=4), {name: run_program(name)[0] for name in ON_PROCESSES}


def test_processes_overlap_and_have_the_bits_of_virtual_devices(four):
    expected = {name: run_program(name)[0] for name in ON_PROCESSES}
    for (events, is_equal), programs in four.run(in_processes):
        assert is_equal
        check_overlap(events, 1)
        for name, params in expected.items():
            assert all(torch.equal(programs[name][key], x) for key, x in params.items()), name


@pytest.mark.parametrize(
    "compress", [FEEDBACK, comm.random_k(0.1), comm.delayed(comm.sign(block=8))]
)
def test_an_abstract_mesh_counts_the_bytes_of_a_virtual_one(compress):
    def loss_fn(p, x):
        return (x @ p["w"]).square().mean()

    def sent(runtime, device):
        mesh = fs.make_mesh(AXES, runtime=runtime)
        opt = fs.optim.sgd(RATE)
        opt = fs.partition_optimizer(
            opt, mesh=mesh, axis="gpu", stage=1, compress={"node": compress}
        )
        step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P(mesh.axis_names))
        params = fs.shard_params({"w": torch.zeros(6, 50, device=device)}, P(), mesh=mesh)
        with fs.ledger() as ledger:
            follow(step, params, opt, 2, batch().to(device))
        return ledger.bytes(axis="node")

    assert sent("abstract", "meta") == sent("virtual", "cpu")
