"""Two meshes at work at the same time: on virtual devices two Python threads give the serial bits."""

import threading
from queue import Queue

import torch

import fshard as fs
from fshard import P
from tests.helpers.processes import run_processes

STEPS = 5


def learner_step(mesh):
    """Return parameters, state and step of a small model under ZeRO-3."""
    params = {"w": torch.arange(16.0).reshape(4, 4) / 16}
    params = fs.shard_params(params, fs.fsdp("data"), mesh=mesh)
    opt = fs.partition_optimizer(fs.optim.adamw(0.1), mesh=mesh, axis="data", stage=3)

    def loss_fn(params, x):
        return (x @ params["w"] - 1).square().mean()

    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"))
    return params, opt.init(params), step


def train(numbers):
    """Train on some devices; return all losses."""
    mesh = fs.make_mesh({"data": 2}, devices=numbers)
    params, state, step = learner_step(mesh)
    losses = []
    for number in range(STEPS):
        x = torch.arange(32.0).reshape(8, 4).sin() + sum(numbers) + number
        params, state, metrics = step(params, state, x)
        losses.append(metrics["loss"].item())
    return losses


def in_threads(functions):
    """Return what functions return that run at the same time."""
    results = {}

    def run(name, function):
        results[name] = function()

    threads = [
        threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(functions)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return [results[number] for number in range(len(functions))]


def test_two_threads_with_disjoint_virtual_meshes_train_as_one_after_the_other():
    meshes = [(0, 1), (3, 2)]
    expected = [train(numbers) for numbers in meshes]
    for _ in range(3):
        assert in_threads([lambda: train(meshes[0]), lambda: train(meshes[1])]) == expected


def sampler(mesh):
    specs = {"in_specs": (P(), P(None, "model")), "out_specs": P(None, "model")}
    return fs.shard_map(lambda x, w: x @ w, mesh=mesh, **specs)


def act_and_learn(start):
    """Return the losses of a learner, whose batches an actor samples with its last weights."""
    learner = fs.make_mesh({"data": 2}, devices=(0, 1))
    actor = fs.make_mesh({"model": 2}, devices=(2, 3))
    sample = sampler(actor)
    weights, rollouts = Queue(1), Queue(1)

    def act():
        for _ in range(STEPS):
            rollouts.put(fs.unshard(sample(torch.ones(8, 4), weights.get())))

    actor_thread = start(act)
    params, state, step = learner_step(learner)
    losses = []
    for _ in range(STEPS):
        weights.put(fs.reshard(params["w"], fs.Layout(actor, P(None, "model"))))
        for _ in range(2):  # the actor samples meanwhile
            params, state, metrics = step(params, state, torch.ones(8, 4))
        params, state, metrics = step(params, state, rollouts.get())
        losses.append(metrics["loss"].item())
    actor_thread.join(60)
    return losses


def serial():
    """Return the losses of the same program in one thread."""
    actor = fs.make_mesh({"model": 2}, devices=(2, 3))
    sample = sampler(actor)
    params, state, step = learner_step(fs.make_mesh({"data": 2}, devices=(0, 1)))
    losses = []
    for _ in range(STEPS):
        w = fs.reshard(params["w"], fs.Layout(actor, P(None, "model")))
        for _ in range(2):
            params, state, metrics = step(params, state, torch.ones(8, 4))
        rollout = fs.unshard(sample(torch.ones(8, 4), w))
        params, state, metrics = step(params, state, rollout)
        losses.append(metrics["loss"].item())
    return losses


def started(function):
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def test_actor_in_a_thread_samples_while_the_learner_steps():
    assert act_and_learn(started) == serial()


def on_processes():
    """The same program on processes: the actor samples while the learner takes two steps."""
    fs.make_mesh({"all": 4})
    learner = fs.make_mesh({"data": 2}, devices=(0, 1))
    actor = fs.make_mesh({"model": 2}, devices=(2, 3))
    sample = sampler(actor)
    params, state, step = learner_step(learner)
    losses = []
    for _ in range(STEPS):
        w = fs.reshard(params["w"], fs.Layout(actor, P(None, "model")))
        for _ in range(2):
            params, state, metrics = step(params, state, torch.ones(8, 4))
        rollout = fs.unshard(sample(torch.ones(8, 4), w))
        rollout = fs.broadcast_to(rollout, learner, source=actor)
        params, state, metrics = step(params, state, rollout)
        losses.append(fs.broadcast_to(metrics["loss"], source=learner).item())
    return losses


def test_actor_and_learner_on_processes_have_the_serial_losses():
    for losses in run_processes(on_processes, 4):
        torch.testing.assert_close(losses, serial(), rtol=1e-6, atol=1e-6)
