"""Wrong arguments of `fs.comm` raise errors that name the argument.

A row of a table is a call, and a text that the error matches.
"""

import pytest
import torch

import fshard as fs
from fshard import P, comm
from tests.comm import boosted as booster
from tests.comm import graphs, replicas, servers, steps

MESH = fs.make_mesh(replicas.AXES)
FEEDBACK = steps.FEEDBACK


def replicas_of(rule, **options):
    """Return a function that makes a step of replicas with options of a rule."""
    return lambda: rule(replicas.inner_step(MESH), **options, mesh=MESH, axis="node")


def diloco_of(**options):
    return replicas_of(comm.streaming_diloco, outer=replicas.NESTEROV, every=4, **options)


def started(use, rules=None):
    """Return a function that starts replicas, and calls `use(step, tree, params, state)`.

    `tree` has the parameters of one model.
    """

    def call():
        step = replicas.local_sgd(2)(replicas.inner_step(MESH), MESH)
        tree = fs.shard_params(replicas.FULL, rules or P(), mesh=MESH)
        params, state = step.init(tree)
        return use(step, tree, params, state)

    return call


class Signs(torch.optim.SGD):
    pass


def functional_booster():
    main = fs.Booster(fs.DDPPlugin(local_steps=booster.EVERY)).init
    arguments = booster.network(), fs.optim.sgd(0.1), torch.nn.functional.mse_loss
    fs.run(lambda: main(*arguments), mesh=fs.make_mesh(booster.NODES))


def loop_of(plugin=fs.DDPPlugin, **options):
    """Return a function that trains in a loop with options of a plugin."""
    return lambda: booster.run(plugin(**options))


def chain_of_a_compressor_without_indices():
    comm.chain(comm.sign(), comm.top_k(0.1))


def compress_along_the_axis_of_the_parameters():
    steps.train({"gpu": FEEDBACK}, stage=3, rules=fs.fsdp("gpu"))


def compress_reproducibly():
    steps.train({"node": FEEDBACK}, reproducible=True, slices=4)


def start_from_plain_tensors():
    replicas.local_sgd(2)(replicas.inner_step(MESH), MESH).init(replicas.FULL)


def start_replicas_twice(step, tree, params, state):
    step.init(params)


def step_on_one_model(step, tree, params, state):
    step(tree, state, replicas.batch(0))


def mean_of_one_model(step, tree, params, state):
    comm.mean(tree)


def power_sgd_on_shards():
    rule = replicas.diloco(1, compress=comm.power_sgd(1))
    replicas.train(rule, stage=3, rules=fs.fsdp("gpu"))


def local_steps_with_an_optimizer_of_a_user():
    plugin = booster.PLUGINS["local steps"]
    booster.run(plugin, optimizer=lambda model: Signs(model.parameters(), 0.1))


ONE_RECEIVER = comm.from_matrix([[0, 1], [0, 1]], [[1, 0], [1, 0]])


COMPRESSORS = [
    (lambda: comm.top_k(0), "top_k: fraction must be in"),
    (lambda: comm.random_k(1.5), "random_k: fraction must be in"),
    (lambda: comm.quantized(3), "quantized: bits must be 8, 4, 2"),
    (lambda: comm.quantized(8, block=0), "quantized: block must be"),
    (lambda: comm.quantized(8, block=12), "block must be a multiple of 8"),
    (lambda: comm.quantized("fp8", stochastic=True), "stochastic must be False"),
    (lambda: comm.power_sgd(0), "power_sgd: rank must be"),
    (lambda: comm.error_feedback(comm.sign(), decay=2), "error_feedback: decay must be"),
    (lambda: comm.momentum_corrected(comm.sign(), 1.0), "momentum_corrected: momentum must be"),
    (lambda: comm.delayed(comm.sign(), 0), "delayed: steps must be"),
    (
        chain_of_a_compressor_without_indices,
        "chain: the compressors must be top_k or random_k",
    ),
]

GRAPHS = [
    (lambda: comm.from_matrix([[0.5, 0.4], [0.5, 0.5]]), "row 0 sums to 0.9"),
    (
        lambda: comm.from_matrix([[1.0, 0.0], [0.0, 1.0]]),
        "must be connected; got no path from 1 to 0",
    ),
    (lambda: comm.from_matrix([[2.0, -1.0], [0.5, 0.5]]), "row 0 has -1"),
    (lambda: comm.from_matrix([[1.0, 0.0]]), "must be square"),
    (lambda: comm.from_matrix([]), "must be square"),
    (lambda: comm.hypercube(6), "power of two"),
    (lambda: comm.ring(0), "n must be in"),
    (lambda: graphs.mixed(comm.ring(3), torch.zeros(2, 1), 1), "the graph must be of 2 devices"),
]

STEPS = [
    (
        compress_along_the_axis_of_the_parameters,
        "axes that do not shard the parameters",
    ),
    (
        compress_reproducibly,
        "reproducible must be False",
    ),
    (lambda: steps.train({"node": comm.power_sgd(1)}, stage=1), "must not be power_sgd"),
    (lambda: steps.train({"host": FEEDBACK}), "host"),
    (lambda: steps.train({"node": 0.1}), "compress must be a compressor"),
    (lambda: steps.train(FEEDBACK), "compress must be a"),
    (lambda: steps.train({"node": FEEDBACK}, reduce=torch.int8), "reduce must be a floating dtype"),
    (lambda: steps.train_stages({"pipe": FEEDBACK}), "axes that do not shard the parameters"),
    (lambda: fs.DDPPlugin(options={"reduce": torch.int8}), "reduce must be a floating dtype"),
    (
        lambda: fs.DDPPlugin(compress=FEEDBACK, reproducible=True),
        "compress must be None with reproducible",
    ),
    (lambda: booster.run(fs.DDPPlugin(compress=FEEDBACK)), "for each axis"),
]

REPLICAS = [
    (replicas_of(comm.local_sgd, every=0), "every must be"),
    (replicas_of(comm.diloco, outer=replicas.NESTEROV, every=0), "every must be"),
    (diloco_of(fragments=5), "fragments must be"),
    (diloco_of(fragments=2, delay=4), "delay must be"),
    (diloco_of(fragments=2, mix=1.5), "mix must be"),
    (lambda: replicas.train(replicas.streaming(4, 3)), "fragments must be at most 2"),
    (lambda: replicas.train(replicas.gossip(comm.ring(3))), "graph must be of 4 devices"),
    (lambda: replicas.train(replicas.push_sum(comm.ring(3))), "graph must be of 4 devices"),
    (
        replicas_of(comm.push_sum, graph=ONE_RECEIVER),
        "must receive a share in each round; got none for 0 in round 0",
    ),
    (lambda: comm.local_sgd(lambda *x: x, every=1, mesh=MESH, axis="node"), "inner must be a step"),
    (
        start_from_plain_tensors,
        "must be arrays",
    ),
    (started(lambda *args: None, fs.fsdp("node")), "replicated along node"),
    (started(start_replicas_twice), "replicated along node"),
    (
        started(step_on_one_model),
        "must have a first dim along",
    ),
    (started(mean_of_one_model), "must be those of all replicas"),
    (
        power_sgd_on_shards,
        "needs full matrices",
    ),
]

LOOPS = [
    (loop_of(local_steps=2, reproducible=True), "local_steps must be None with reproducible"),
    (
        loop_of(gossip=comm.ring, compress=booster.COMPRESS),
        "compress and gossip must not be combined",
    ),
    (loop_of(fs.ZeroPlugin, stage=2, gossip=comm.ring), "gossip must be None in stage 2"),
    (loop_of(local_steps=0), "local_steps must be an integer >= 1"),
    (loop_of(local_steps=2, mesh=fs.make_mesh({"data": 1})), "local_steps must be along one axis"),
    (loop_of(local_steps=2), "local_steps must be for each axis of node, gpu"),
    (loop_of(local_steps={"node": 2, "gpu": 3}), "local_steps must be along one axis"),
    (loop_of(gossip={"node": comm.ring(3)}), "gossip must be a graph of the 2 devices along node"),
    (functional_booster, "init: local_steps and gossip must be used in a loop"),
    (
        local_steps_with_an_optimizer_of_a_user,
        "with an optimizer of torch or fs.optim; got Signs",
    ),
]

ARRIVALS = [
    (
        lambda: comm.Arrivals([(0, 0), (0, 2)], bound=2),
        "the version must be 1, which the worker has received",
    ),
    (
        lambda: comm.Arrivals([(0, 0), (0, 0)], bound=2),
        "the version must be 1, which the worker has received",
    ),
    (lambda: comm.Arrivals([(0, 0), (1, 0)], bound=0), "at most the bound"),
    (lambda: comm.arrivals([1.0, 0.0], bound=2, count=3), "speeds"),
    (lambda: comm.arrivals([1.0] * 3, bound=1, count=3), "bound must be at least 2"),
    (lambda: servers.server_of(servers.LIVE, n=3), "workers below 2"),
    (lambda: servers.server_of(servers.LIVE, n=1), "workers below 0"),
    (lambda: servers.server_of(servers.LIVE, compress=comm.power_sgd(1)), "compress"),
    (lambda: servers.server_of(servers.LIVE, live=True), "processes"),
]
MISUSE = [*COMPRESSORS, *GRAPHS, *STEPS, *REPLICAS, *LOOPS, *ARRIVALS]


@pytest.mark.parametrize(("call", "message"), MISUSE, ids=lambda x: x if isinstance(x, str) else "")
def test_misuse_raises_and_names_the_argument(call, message):
    with pytest.raises((ValueError, fs.errors.FshardError), match=message):
        call()
