"""Each kind of program under the rules of NCCL, with backwards in threads of their own, gives the
usual results.

To run any test of processes so: FSHARD_BACKEND=nccl_rules FSHARD_FOREIGN_BACKWARD=1 make test
ARGS=...; see conftest.py.
"""

import os
import tempfile
import time
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_map_only

import fshard as fs
from fshard import P
from fshard.mesh.runtimes import process
from fshard.pipeline.schedule.builders import BUILDERS
from tests.helpers import foreign_programs
from tests.helpers.foreign_backward import foreign_backward
from tests.helpers.foreign_programs import adamw, draw, layers
from tests.helpers.processes import Processes, run_processes
from tests.mesh.runtimes import fake_device, nccl_rules
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
    """Send to the next device, then receive, in a loop; then exchange messages and collectives in
    both directions.
    """

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


def first_messages():
    """Send to all others before receiving in another order; then exchange along the other axis."""
    mesh = fs.make_mesh({"data": 2, "pipe": 2})

    def main():
        received = []
        for axis in (("data", "pipe"), "pipe"):
            index = fs.axis_index(axis)
            others = [other for other in range(fs.axis_size(axis)) if other != index]
            for other in others:
                fs.send(draw(2, seed=index) + other, axis, to=other)
            received += [fs.recv(torch.zeros(2), axis, source=other) for other in others[::-1]]
        pairs = [(0, 1), (1, 0)]
        return torch.stack(received), fs.ppermute(received[0], "data", pairs)

    return fs.run(main, mesh=mesh)


def late_receiver():
    """Receive a first message only after the sender has taken part in more calls, on the host, too."""

    def main():
        index = fs.axis_index("data")
        if index < 3:
            for number in range(3):
                fs.send(draw(2, seed=number), "data", to=index + 1)
        total = fs.psum(torch.ones(1), "data").item()
        received = [torch.zeros(2)]
        if index > 0:
            received = [fs.recv(torch.zeros(2), "data", source=index - 1) for _ in range(3)]
            fs.send(received[-1], "data", to=index - 1)
        if index < 3:
            received.append(fs.recv(torch.zeros(2), "data", source=index + 1))
        return total, torch.stack(received)

    return fs.run(main, mesh=fs.make_mesh({"data": 4}))


def experts():
    """Train two layers of experts under ZeRO-3: rows of differing numbers, and an expert without
    any.
    """
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
            routing = fs.experts.route(x @ p["router"] - x.new_tensor([0.0, 0.0, 0.0, 1e3]), 2)
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
        x = draw(2, 4, seed=seed).to(mesh.device_type)
        made.backward(model(x).square().mean(), opt)
        opt.step()
        opt.zero_grad()
    return dict(model.unwrap().named_parameters())


def hybrid_sharding():
    """Train with parameters sharded along one axis and copied along another: reductions have two
    steps.
    """
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
    "first messages": first_messages,
    "late receiver": late_receiver,
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


def connections(names):
    """Return the ranks of the groups and of the pairs that each program connects, which has run
    after the others.
    """
    result, known = [], []
    for name in names:
        run_plainly(name)
        comms = nccl_rules.communicators()
        assert len(comms) == nccl_rules.counts["rendezvous"]
        new = comms[len(known) :]
        groups = sorted([members for channel, members in new if channel == ""])
        pairs = sorted([members for channel, members in new if channel != ""])
        result.append((groups, pairs))
        known = comms
    return result


@cache
def processes(n, backend=""):
    return Processes(n, environment={"FSHARD_BACKEND": backend})


@pytest.fixture(scope="module", autouse=True)
def pools():
    yield
    for n in (2, 4):
        processes(n).close()
        processes(n, "nccl_rules").close()
    processes(2, fake_device.BACKEND).close()
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


def send_without_recv():
    """Send twice; process 1 receives once, and does not wait for the end of process 0."""

    def main():
        for size in (1, 2) if fs.axis_index("d") == 0 else ():
            fs.send(torch.ones(size), "d", to=1)
        return fs.recv(torch.ones(1), "d", source=0) if fs.axis_index("d") else None

    fs.run(main, mesh=fs.make_mesh({"d": 2}, timeout=2))


def test_send_without_recv_under_the_rules_of_nccl_raises_at_the_end():
    """Waiting for a send blocks no host there: what has not arrived when the process leaves is
    found by asking.
    """
    with pytest.raises(fs.errors.MismatchError, match="sent but never received:") as error:
        run_processes(send_without_recv, 2, environment={"FSHARD_BACKEND": "nccl_rules"})
    text = str(error.value)
    assert text.count("a message of") == 1 and "float32[2]" in text


def receive_what_nobody_sends():
    def main():
        if fs.axis_index("d") == 0:
            fs.recv(torch.ones(2), "d", source=1)

    fs.run(main, mesh=fs.make_mesh({"d": 2}))


def test_first_receive_without_a_message_under_fshard_check_raises():
    """NCCL blocks the host in a first receive until the sender comes, if it ever does."""
    environment = {"FSHARD_BACKEND": "nccl_rules", "FSHARD_CHECK": "1"}
    with pytest.raises(fs.errors.DeadlockError, match="waits in recv of a message"):
        run_processes(receive_what_nobody_sends, 2, environment=environment, timeout=30)


# -- a device that is not the host -----------------------------------------------------------------
# Headers, counters, rows of agreement and losses in host memory go over gloo: a queue of the device
# refuses them.

BESIDE_GLOO = ("zero 3", "accumulated", "stages", "booster", "zbv of 2", "checkpoint")
"""Programs that are tried so; the others were, by hand."""


def run_beside_gloo(name):
    """Return the result in host memory, the violations of the rules, host synchronisations, and
    what both links carried.
    """
    fake_device.install()
    nccl_rules.violations.clear()
    nccl_rules.counts.clear()
    # Without `foreign_backward`: autograd itself has a thread for the device.
    result = tree_map_only(torch.Tensor, lambda x: x.cpu(), run_plainly(name))
    counts = nccl_rules.counts
    has_used_both = counts["launches"] > 0 and counts["on gloo"] > 0
    return result, [*nccl_rules.violations], counts["host syncs"], has_used_both


@pytest.mark.parametrize("name", BESIDE_GLOO)
def test_program_on_a_device_beside_gloo_has_equal_results(name):
    reports = processes(2, fake_device.BACKEND).run(run_beside_gloo, name)
    for expected, (result, *report) in zip(
        processes(2).run(run_plainly, name), reports, strict=True
    ):
        assert report == [[], 0, True]
        torch.testing.assert_close(result, expected)


def give_host_tensors_to_the_device():
    """Use a group of the device alone, as those of messages are, and the queue of the device
    itself.
    """
    fake_device.install()
    mesh = fs.make_mesh({"d": 2})
    world = process.ProcessWorld.of(mesh)
    link = world._route(0, 1)
    axis = world._transports[0, 1].pg
    texts = []
    for call in (
        lambda: link.pg.send([torch.ones(1)], 1),
        lambda: nccl_rules.NcclRules.launch(axis, "all_reduce", (), [torch.ones(1)], []),
        lambda: torch.ones(2, device=mesh.device_type) + torch.ones(2),
    ):
        with pytest.raises((nccl_rules.RuleError, RuntimeError)) as error:
            call()
        texts.append(str(error.value))
    nccl_rules.violations.clear()
    return mesh.device_type, axis.is_eager, link.pg.is_eager, texts


def test_host_tensor_given_to_the_queue_of_a_device_raises():
    """Groups of axes are bound to their device, those of messages are not, as in real worlds."""
    for kind, *is_eager, texts in processes(2, fake_device.BACKEND).run(
        give_host_tensors_to_the_device
    ):
        assert (kind, is_eager) == (fake_device.NAME, [True, False])
        assert [text.split()[0] for text in texts] == ["No", "No", "Expected"]


def run_new_processes(fn, *args):
    return run_processes(fn, 2, *args, environment={"FSHARD_BACKEND": fake_device.BACKEND})


def make_groups(is_in_order):
    """Make two groups of the same processes: in one order, or not."""
    world = process.ProcessWorld.of(fs.make_mesh({"d": 2}))
    names = ["first", "second"]
    if not is_in_order and world.rank == 1:
        names.reverse()
    for name in names:
        world.make_group((0, 1), name)


def test_bound_groups_made_in_different_orders_are_a_deadlock():
    """To make a bound group blocks the host until all its members do, as NCCL's `device_id` does."""
    environment = {"FSHARD_BACKEND": "nccl_rules", "NCCL_RULES_EAGER": "1"}
    run_processes(make_groups, 2, True, environment=environment)
    with pytest.raises(nccl_rules.RuleError, match="Deadlock: .*rendezvous"):
        run_processes(make_groups, 2, False, environment=environment)


# -- errors of a device ----------------------------------------------------------------------------
# On NCCL no wait raises them. Here too a thread finds them, by a stream that stands where a wait
# blocks.


def leave_one_out(path):
    fake_device.install()
    os.dup2(os.open(path / str(os.environ["RANK"]), os.O_WRONLY | os.O_CREAT), 2)
    mesh = fs.make_mesh({"d": 2}, timeout=4)
    works = process.ProcessWorld.of(mesh)._works

    def main():
        x = torch.ones(3, device=mesh.device_type)
        fs.psum(x, "d")
        if fs.axis_index("d") == 0:
            fs.psum(x, "d")
        while works.error is None:  # until process 0 has failed
            time.sleep(0.05)

    fs.run(main, mesh=mesh)


def fail_on_one():
    fake_device.install()
    mesh = fs.make_mesh({"d": 2}, timeout=6)

    def main():
        if fs.axis_index("d") == 1:
            raise KeyError("mine")
        fs.psum(torch.ones(2, device=mesh.device_type), "d")

    fs.run(main, mesh=mesh)


class AbortingWorks(dict):
    """The works of an engine that a thread aborts just before one begins."""

    def __init__(self, engine):
        super().__init__()
        self.engine = engine

    def __setitem__(self, key, work):
        self.engine.abort()
        super().__setitem__(key, work)


def test_operation_that_starts_while_a_thread_aborts_raises_and_does_not_wait_for_ever():
    """The thread that watches for losses aborts the groups beside the thread that trains."""
    engine = object.__new__(nccl_rules.Engine)
    engine.failure = ("", "")
    engine.tell = lambda *_: None
    engine.works = AbortingWorks(engine)
    group = SimpleNamespace(engine=engine)
    op = nccl_rules.Op(0, 0, ("world", ""), (0, 1), "all_reduce", (torch.float32,))
    with pytest.raises(torch.distributed.DistBackendError, match="was aborted"):
        nccl_rules.NcclRules.post(group, op, [], {})


def test_hang_of_a_device_is_found_by_the_watch_and_names_the_call(tmp_path):
    with pytest.raises(fs.errors.CollectiveTimeoutError, match="did not end within 3.6 s"):
        run_new_processes(leave_one_out, tmp_path)
    text = (tmp_path / "0").read_text()
    assert "psum of float32[3] over d" in text and "test_under_nccl_rules.py" in text


def test_failure_of_another_process_ends_calls_of_a_device():
    with pytest.raises(KeyError, match="mine") as error:
        run_new_processes(fail_on_one)
    notes = "\n".join(error.value.__notes__)
    assert "LostProcessError: Process 1 has failed: look for its own error." in notes


def test_program_connects_pairs_of_ranks_only_where_messages_are_sent():
    environment = {"FSHARD_BACKEND": "nccl_rules"}
    zero3, pipeline = ([(0, 1)], []), ([], [(0, 1), (0, 1)])  # a pair for each direction
    of_two = run_processes(connections, 2, ["zero 3", "1f1b of 2"], environment=environment)
    assert of_two == [[zero3, pipeline]] * 2

    of_four = run_processes(connections, 4, ["hybrid", "ring"], environment=environment)
    for rank, (hybrid, ring) in enumerate(of_four):
        model, data = rank // 2 * 2, rank % 2  # the first ranks of its groups
        groups = [(0, 1, 2, 3), (0, 2, 1, 3), (model, model + 1), (data, data + 2)]
        neighbours = [sorted([rank, (rank + step) % 4]) for step in (-1, 1)]
        assert hybrid == (sorted(groups), [])
        assert ring == ([], sorted(map(tuple, neighbours)))
