"""Loops of replicas that train apart, against lists of plain modules; their checkpoints, and those
of residuals.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

import fshard as fs
from fshard import comm
from fshard.errors import CheckpointError
from tests.comm.boosted import (
    ALL,
    COMPRESS,
    DATA,
    EVERY,
    NODES,
    PLUGINS,
    RING,
    Loop,
    adamw,
    network,
    run,
)


def rows_of(length, axes, axis, replica):
    """Return the rows of the devices of a replica; where they have none, those that they compute on
    instead.
    """
    mesh = fs.make_mesh(axes)
    devices = [d for d in range(mesh.size) if mesh.coordinates(d)[axis] == replica]
    ranges = [range(length * d // mesh.size, length * (d + 1) // mesh.size) for d in devices]
    return [row for rows in ranges for row in rows] or [
        min(rows.start, length - 1) for rows in ranges
    ]


def plain(axes, axis, rule, count=6, batch=8):
    """Train a module for each replica, on its rows of a batch; `rule(before, after, step)` follows.

    Return them all.
    """
    models = [network() for _ in range(axes[axis])]
    opts = [adamw(model) for model in models]
    for step, (x, y) in zip(range(count), DataLoader(DATA, batch), strict=False):
        before = [copy.deepcopy(dict(model.named_parameters())) for model in models]
        for i, (model, opt) in enumerate(zip(models, opts, strict=True)):
            rows = rows_of(len(x), axes, axis, i)
            opt.zero_grad()
            mse_loss(model(x[rows]), y[rows]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
        with torch.no_grad():
            for name in before[0]:
                column = [model.get_parameter(name) for model in models]
                values = rule([b[name] for b in before], [x.clone() for x in column], step + 1)
                _ = [x.copy_(value) for x, value in zip(column, values, strict=True)]
    return models


def averaged(every):
    return lambda before, after, step: (
        after if step % every else [torch.stack(after).mean(0)] * len(after)
    )


def mixed(before, after, step):
    n = len(after)
    return [
        (before[i - 1] + before[i] + before[(i + 1) % n]) / 3 + after[i] - before[i]
        for i in range(n)
    ]


def unchanged(before, after, step):
    return after


@pytest.mark.parametrize(
    ("plugin", "axes", "rule"),
    [
        (fs.DDPPlugin(local_steps=EVERY), {"node": 3, "gpu": 2}, averaged(4)),
        (fs.ZeroPlugin(stage=1, local_steps=EVERY), {"gpu": 2, "node": 2}, averaged(4)),
        (fs.DDPPlugin(local_steps=4), {"node": 5}, averaged(4)),
        (fs.ZeroPlugin(stage=1, gossip=RING), {"node": 4, "gpu": 1}, mixed),
        (fs.DDPPlugin(gossip=comm.ring(3)), {"node": 3}, mixed),
        (fs.DDPPlugin(compress=ALL), NODES, unchanged),
        (fs.ZeroPlugin(stage=1, compress=ALL), NODES, unchanged),
        (fs.ZeroPlugin(stage=2, compress=ALL), NODES, unchanged),
    ],
    ids=[
        "ddp",
        "zero 1",
        "one axis",
        "gossip",
        "graph",
        "compress, ddp",
        "compress, zero 1",
        "compress, zero 2",
    ],
)
def test_loops_train_as_a_list_of_modules(plugin, axes, rule):
    """The last batch has 3 samples, fewer than devices: a replica with none computes on its
    neighbours'.
    """
    models = plain({"node": 1} if rule is unchanged else axes, "node", rule)
    mesh = fs.make_mesh(axes)
    states = [model.state_dict() for model in models]
    mean = {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}
    for device, (state, output) in enumerate(run(plugin, axes=axes)):
        torch.testing.assert_close(dict(state), mean)
        model = models[mesh.coordinates(device)["node"] % len(models)]
        torch.testing.assert_close(output, model(DATA.tensors[0][:3]))


def test_nothing_is_sent_between_averages():
    def main():
        loop = Loop(fs.DDPPlugin(local_steps={"node": 3})).steps(1)
        with fs.ledger() as ledger:
            loop.steps(4)
        return ledger.bytes(axis="node")

    d = sum(x.nbytes for x in network().parameters())
    assert fs.run(main, mesh=fs.make_mesh(NODES)) == [d] * 4  # a pmean of two devices


def scaled(model):
    return fs.optim.loss_scaled(fs.optim.adam(0.05))


@pytest.mark.parametrize("name", PLUGINS)
def test_resumed_loops_have_the_bits_of_others(name, tmp_path):
    """With draws and buffers that differ between replicas, between two averages; and with draws of
    a compressor.
    """
    options = {"dropout": 0.5, "optimizer": scaled if name == "gossip" else adamw}

    def main():
        loop = Loop(PLUGINS[name], **options).steps(2)
        loop.booster.save(tmp_path, *loop.parts)
        again = Loop(PLUGINS[name], **options)
        again.booster.load(tmp_path, *again.parts)
        return loop.steps(3).weights(), again.steps(3).weights()

    results = fs.run(main, mesh=fs.make_mesh(NODES))
    for expected, actual in results:
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    is_replica = "compress" not in name
    assert torch.equal(results[0][0][1], results[1][0][1])
    assert torch.equal(results[0][0][1], results[2][0][1]) != is_replica


@pytest.mark.parametrize(
    "axes", [{"node": 3, "gpu": 1}, {"node": 1, "gpu": 1}, {"node": 1, "gpu": 2}]
)
def test_totals_of_residuals_are_kept_on_another_mesh(axes, tmp_path):
    def main(plugin, act):
        loop = Loop(plugin)
        act(loop)
        return fs.unshard(loop.opt.state["compress"]["node"]["residual"])

    def save(loop):
        loop.booster.save(tmp_path, *loop.steps(2).parts)

    def load(loop):
        loop.booster.load(tmp_path, *loop.parts)

    expected = fs.run(main, PLUGINS["compress"], save, mesh=fs.make_mesh(NODES))[0]
    for actual in fs.run(main, fs.DDPPlugin(compress=COMPRESS), load, mesh=fs.make_mesh(axes)):
        torch.testing.assert_close(actual, expected)
    assert any(x.any() for x in expected.values())


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD], ids=["AdamW", "SGD"])
def test_state_dict_lists_residuals_as_those_of_compressors(make):
    def main(state=None):
        module = network()
        booster = fs.Booster(fs.DDPPlugin(compress=COMPRESS, precision="fp16"))
        model, opt, *_ = booster.boost(module, make(module.parameters(), lr=0.01))
        if state is not None:
            opt.load_state_dict(state)
        else:
            booster.backward(model(DATA.tensors[0][:8].float()).square().mean(), opt)
            opt.step()
        return copy.deepcopy(opt.state_dict())

    state = fs.run(main, mesh=fs.make_mesh(NODES))[0]
    assert {name.partition(".")[0] for name in state["compress"]} == {"compress"}
    assert any(x.any() for x in state["compress"].values()) and "inner.scale" in state["loss_scale"]
    older = {**state, "loss_scale": state["loss_scale"] | state["compress"]}
    del older["compress"]
    for saved in (state, older):
        for nodes in (3, 1):
            for loaded in fs.run(main, saved, mesh=fs.make_mesh({"node": nodes, "gpu": 1})):
                torch.testing.assert_close(loaded, state)


@pytest.mark.parametrize("devices", [(2, 1), (1, 2)])
def test_a_compressor_of_all_axes_is_resumed_from_and_on_one_device(devices, tmp_path):
    """Given without an axis, it is along the axis of the batch, on one device too."""
    plugin = fs.DDPPlugin(compress=comm.error_feedback(comm.top_k(0.1)))

    def residuals(act):
        loop = Loop(plugin)
        act(loop)
        return fs.unshard(loop.opt.state["compress"]["data"]["residual"])

    def save(loop):
        loop.booster.save(tmp_path, *loop.steps(2).parts)

    def load(loop):
        loop.booster.load(tmp_path, *loop.parts)

    saving, restoring = (fs.make_mesh({"data": n}) for n in devices)
    expected = fs.run(residuals, save, mesh=saving)[0]
    torch.testing.assert_close(fs.run(residuals, load, mesh=restoring)[0], expected)
    assert any(x.any() for x in expected.values()) == (devices[0] > 1)


def test_states_of_replicas_are_their_mean(tmp_path):
    """`save_model` and `state_dict` hold the mean, which all replicas load; checkpoints need as
    many replicas.
    """

    def main():
        loop = Loop(PLUGINS["local steps"]).steps(2)
        loop.booster.save(tmp_path / "all", *loop.parts)
        loop.booster.save_model(loop.model, tmp_path / "mean")
        mean = loop.model.state_dict()
        optimizer = loop.opt.state_dict()
        loop.booster.load_model(loop.model, tmp_path / "mean")
        loop.opt.load_state_dict(optimizer)
        return mean, loop.weights(), optimizer, loop.opt.state_dict()

    for mean, (state, output), optimizer, after in fs.run(main, mesh=fs.make_mesh(NODES)):
        model = network()
        model.load_state_dict(fs.restore(tmp_path / "mean"))
        torch.testing.assert_close(dict(state), dict(mean), rtol=0, atol=0)
        torch.testing.assert_close(output, model(DATA.tensors[0][:3]))
        torch.testing.assert_close(after, optimizer, rtol=0, atol=0)

    def loaded():
        loop = Loop(fs.DDPPlugin())
        loop.booster.load(tmp_path / "all", *loop.parts)

    with pytest.raises(CheckpointError, match="must have shape"):
        fs.run(loaded, mesh=fs.make_mesh(NODES))
