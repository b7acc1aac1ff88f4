"""`Booster(digest=True)` names the replica that differs: the test has changed it on one device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.errors import AuditError

MESH = fs.make_mesh({"data": 4})
PLUGINS = {
    "ddp": lambda: fs.DDPPlugin(mesh=MESH),
    "zero 1": lambda: fs.ZeroPlugin(stage=1, mesh=MESH),
    "zero 3": lambda: fs.FSDPPlugin(mesh=MESH),
}


def batchnorm_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def trained(plugin, change=lambda device, booster, model, optimizer: None, *, digest=True):
    """Train three steps as each device; return its shards and its number of digests.

    Before the second step each device calls `change` with its number.
    """

    def main():
        device = fs.axis_index("data")
        booster = fs.Booster(plugin(), digest=digest)
        model = batchnorm_model()
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        model, optimizer, *_ = booster.boost(model, optimizer)
        generator = torch.Generator().manual_seed(1)
        for step in range(3):
            if step == 1:
                change(device, booster, model, optimizer)
            x = torch.randn(8, 4, generator=generator).chunk(4)[device]
            booster.backward(model(x).square().mean(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
        with booster.parameters(model) as shards:
            return [x.clone() for x in shards.values()], optimizer.digests

    return fs.run(main, mesh=MESH)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_digests_of_a_loop_change_no_bit(plugin):
    actual = trained(PLUGINS[plugin])
    expected = trained(PLUGINS[plugin], digest=False)
    for (shards, digests), (expected_shards, no_digests) in zip(actual, expected, strict=True):
        torch.testing.assert_close(shards, expected_shards, rtol=0, atol=0)
        assert (digests, no_digests) == (3, 0)


def change_weight(device, booster, model, optimizer):
    with booster.parameters(model) as shards:
        shards["2.weight"].add_(float(device == 2))


def change_state(device, booster, model, optimizer):
    (shard,) = optimizer.state["exp_avg"]["2.weight"].shards
    shard.add_(float(device == 2))


def change_buffer(device, booster, model, optimizer):
    if device == 2:
        model.module[1].running_mean.add_(1.0)  # of which a step takes the mean over devices


@pytest.mark.parametrize(
    ("change", "leaf"),
    [(change_weight, "parameter 2.weight"), (change_state, "state exp_avg.2.weight")],
)
def test_digest_of_a_loop_names_the_leaf_and_the_device(change, leaf):
    with pytest.raises(AuditError) as error:
        trained(PLUGINS["ddp"], change)
    text = str(error.value)
    assert text.startswith("step 2: replicas must be equal on all devices")
    assert f"{leaf} has other values on device 2 (data=2) than on most, after the step" in text


@pytest.mark.parametrize(("plugin", "change"), [("ddp", change_buffer), ("zero 1", change_weight)])
def test_digest_of_a_loop_passes_what_a_step_makes_equal(plugin, change):
    """A step takes the mean of buffers, and in ZeRO 1 gathers the parameters from their shards."""
    assert [digests for _, digests in trained(PLUGINS[plugin], change)] == [3] * 4


def test_digest_of_stages_compares_the_devices_of_each_stage():
    mesh = fs.make_mesh({"pipe": 2, "data": 2})

    def main(changed):
        plugin = fs.HybridParallelPlugin(pipeline=2, zero_stage=0, microbatches=2, mesh=mesh)
        booster = fs.Booster(plugin, digest=True)
        model = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2)]
        optimizer = torch.optim.AdamW(nn.Sequential(*model).parameters(), 0.1)
        model, optimizer, *_ = booster.boost(model, optimizer)
        for _ in range(2):
            with booster.parameters(model) as shards:
                if fs.axis_index("pipe") == 1 and fs.axis_index("data") == 1:
                    shards["3.weight"].add_(changed)
            batch = torch.ones(8, 4), torch.ones(8, 2)
            booster.execute_pipeline(iter([batch]), model, nn.functional.mse_loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.digests

    torch.manual_seed(0)
    assert fs.run(main, 0.0, mesh=mesh) == [2] * 4
    with pytest.raises(
        AuditError, match=r"parameter \[1\].3.weight differs .* device 2 .* device 3"
    ):
        fs.run(main, 1.0, mesh=mesh)


def test_digest_of_functional_steps_names_the_leaf():
    booster = fs.Booster(fs.DDPPlugin(mesh=MESH), digest=True)
    model = batchnorm_model()
    optimizer = fs.optim.sgd(0.1)
    state = booster.init(model, optimizer, nn.functional.mse_loss)
    batch = torch.randn(16, 4), torch.ones(16, 2)
    state, _ = booster.step(state, batch)
    state.params["2.weight"].shards[3].add_(1.0)
    with pytest.raises(AuditError, match="step 2: replicas must be .*\n.*2.weight has .* device 3"):
        booster.step(state, batch)


def test_digest_with_replicas_that_differ_raises():
    def main():
        booster = fs.Booster(fs.DDPPlugin(mesh=MESH, local_steps=2), digest=True)
        booster.boost(batchnorm_model(), fs.optim.sgd(0.1))

    with pytest.raises(ValueError, match="boost: digest=True must be used without local_steps"):
        fs.run(main, mesh=MESH)


def test_audit_of_a_boosted_loop_names_the_way_out():
    def main():
        model, *_ = fs.Booster(fs.DDPPlugin(mesh=MESH)).boost(nn.Linear(2, 2))
        fs.audit(model)

    with pytest.raises(ValueError, match=r"got LoopModel. .* fs.Booster\(plugin, digest=True\)"):
        fs.run(main, mesh=MESH)
