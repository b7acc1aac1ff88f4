"""A model on replicas, and the step inside of one."""

import torch

import fshard as fs
from fshard import P, comm

AXES = {"node": 4, "gpu": 2}


NESTEROV = fs.optim.sgd(0.75, momentum=0.5, nesterov=True)


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
    return fs.train_step(loss_fn, opt, mesh=inner, batch=P("gpu"), donate=True)


def train(make, count=6, axes=None, folder=None, rules=None, **options):
    """Train replicas; with a folder, save them after half of the steps and go on with what was
    restored.
    """
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


def local_sgd(every, after=0):
    return lambda inner, mesh: comm.local_sgd(
        inner, every=every, after=after, mesh=mesh, axis="node"
    )


def diloco(every, **options):
    return lambda inner, mesh: comm.diloco(
        inner, NESTEROV, every=every, **options, mesh=mesh, axis="node"
    )


def streaming(every, fragments, delay=0, mix=1.0, compress=None):
    options = {
        "every": every,
        "fragments": fragments,
        "delay": delay,
        "mix": mix,
        "compress": compress,
    }
    return lambda inner, mesh: comm.streaming_diloco(
        inner, NESTEROV, **options, mesh=mesh, axis="node"
    )


def gossip(graph):
    return lambda inner, mesh: comm.gossip(inner, graph, mesh=mesh, axis="node")


def push_sum(graph):
    return lambda inner, mesh: comm.push_sum(inner, graph, mesh=mesh, axis="node")
