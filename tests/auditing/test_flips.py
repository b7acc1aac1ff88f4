"""Each flipped bit is named by step, device and leaf. Oracle: the place where the test flipped it."""

import random
import warnings

import pytest
import torch
from torch import nn

import fshard as fs
from fshard import P
from fshard.mesh.spmd.scope import here
from tests.helpers.bit_flips import MOMENTS, Flip
from tests.helpers.foreign_backward import foreign_backward

SIZES = {"a": 48, "b": 8, "c": 40}


def make_step(stage, other, flip, tmp_path, every=2):
    """Return an audited step of two layers on 4 devices, audited on 2 in another stage."""
    mesh = fs.make_mesh({"data": 4})
    generator = torch.Generator().manual_seed(0)
    params = {
        "a": torch.randn(6, 8, generator=generator),
        "b": torch.randn(8, generator=generator),
        "c": torch.randn(8, 5, generator=generator),
    }
    params = fs.shard_params(params, fs.fsdp("data") if stage == 3 else P(), mesh=mesh)
    opt = fs.partition_optimizer(fs.optim.adamw(0.01), mesh=mesh, axis="data", stage=stage)

    def loss_fn(params, batch):
        x, y = batch
        hidden = flip.activation(torch.tanh(x @ params["a"] + params["b"]))
        return (hidden @ params["c"] - y).square().mean()

    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), reproducible=True, slices=8)
    half = fs.make_mesh({"data": 2})
    step = fs.audit(
        step, every=every, mesh=half, stage=other, folder=tmp_path, on_difference="warn"
    )
    return step, params


def batch_of(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(16, 6, generator=generator), torch.randn(16, 5, generator=generator)


def drawn_flip(rng, moment):
    """Draw a flip at a moment."""
    skipped = 0
    if moment == "activation":
        skipped = rng.randrange(2)
    return Flip(
        moment=moment,
        device=rng.randrange(4),
        leaf=rng.choice(["a", "b", "c"]),
        sizes=SIZES,
        position=rng.randrange(48),
        bit=rng.randrange(18, 31),
        skipped=skipped,
    )


def named(rng, moment, stage, tmp_path):
    """Run with a drawn flip; return it, the step, and the number of the audited one."""
    every = rng.choice([1, 2])
    flip = drawn_flip(rng, moment)
    step, params = make_step(stage, rng.randrange(4), flip, tmp_path, every)
    state = step.init(params)
    audited = every * rng.choice([1, 2])
    if flip.moment == "state":
        audited = 2  # of the zeros at the start a flip makes 1e-19, which any gradient rounds away
    with flip.installed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(1, audited + 1):
            flip.is_armed = number == audited
            params, state, _ = step(params, state, batch_of(number))
    return flip, step, audited


def check_named(rng, moment, stage, tmp_path):
    flip, step, audited = named(rng, moment, stage, tmp_path)
    assert flip.has_happened
    outcome = step.last
    assert not outcome.is_equal, flip
    assert len(outcome.findings) == 1, (flip, outcome.text)
    (finding,) = outcome.findings
    expected_leaf = "c" if flip.moment == "activation" else flip.leaf
    actual = outcome.step, finding.device, finding.leaf.removeprefix("exp_avg.")
    assert actual == (audited, flip.device, expected_leaf), (flip, outcome.text)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("moment", MOMENTS)
def test_flip_of_one_bit_is_named(moment, stage, tmp_path):
    check_named(random.Random(f"{moment} {stage}"), moment, stage, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("block", range(20))
def test_flip_of_one_bit_is_named_in_a_thousand_draws(block, tmp_path):
    rng = random.Random(block)
    for number in range(50):
        check_named(rng, rng.choice(MOMENTS), rng.randrange(4), tmp_path / str(number))


@pytest.mark.parametrize("moment", MOMENTS)
def test_flip_of_one_bit_is_named_where_autograd_has_threads(moment, tmp_path):
    """As on an accelerator; but the backwards of a step run in the thread that records it."""
    with foreign_backward() as engine:
        check_named(random.Random(f"{moment} 3"), moment, 3, tmp_path)
    assert engine.backwards == 0


# -- other programs --------------------------------------------------------------------------------


def run_until(step, params, batch, flip, audited=2):
    state = step.init(params)
    with flip.installed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(1, audited + 1):
            flip.is_armed = number == audited
            params, state, _ = step(params, state, batch)
    assert flip.has_happened
    assert not step.last.is_equal
    return step.last


@pytest.mark.parametrize("device", range(4))
@pytest.mark.parametrize("is_exact", [True, False], ids=["bits", "rounding"])
def test_flip_in_tensor_parallel_layers_is_named(device, is_exact, tmp_path):
    """The sum over "model" spreads it to the other device, which is innocent."""
    mesh = fs.make_mesh({"data": 2, "model": 2})
    torch.manual_seed(0)
    full = {"a": torch.randn(6, 8), "b": torch.randn(8), "c": torch.randn(8, 5)}
    rules = {"a": P(None, "model"), "b": P("model"), "c": P("model")}
    params = fs.shard_params(full, rules, mesh=mesh)
    opt = fs.partition_optimizer(fs.optim.adamw(0.01), mesh=mesh, axis="data", stage=1)
    flip = Flip("activation", device, "", SIZES, position=7, bit=29)

    def loss_fn(params, batch):
        x, y = batch
        hidden = flip.activation(torch.tanh(x @ params["a"] + params["b"]))
        return (fs.psum(hidden @ params["c"], "model") - y).square().mean()

    options = {"reproducible": True} if is_exact else {}
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), local="model", **options)
    other = fs.make_mesh({"data": 1, "model": 2})
    step = fs.audit(step, every=2, mesh=other, folder=tmp_path, on_difference="warn")
    outcome = run_until(step, params, batch_of(0), flip)
    (finding,) = outcome.findings
    assert (finding.device, finding.phase) == (device, "psum over model")


@pytest.mark.parametrize("device", range(4))
@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_flip_in_stages_is_named(device, name, tmp_path):
    """Messages spread it to the other stage, which is innocent."""
    mesh = fs.make_mesh({"pipe": 2, "data": 2})
    schedule = fs.pipeline_schedule(name, stages=2, microbatches=4)
    torch.manual_seed(0)
    flip = Flip("activation", device, "", SIZES, position=7, bit=29)

    class Flipped(nn.Module):
        def forward(self, x):
            return flip.activation(x)

    layers = [nn.Linear(6, 8), Flipped(), nn.Linear(8, 8), Flipped(), nn.Linear(8, 5)]
    stages = fs.pipeline.split_stages(nn.Sequential(*layers), 2)
    params = fs.shard_stages(stages, fs.fsdp("data"), mesh=mesh, schedule=schedule)
    opt = fs.partition_optimizer(fs.optim.adamw(0.01), mesh=mesh, axis="data", stage=3)

    def loss(y, batch):
        return (y - batch[1]).square().mean()

    step = fs.train_step(
        stages, opt, mesh=mesh, batch=P("data"), schedule=schedule, loss=loss, reproducible=True
    )
    step = fs.audit(step, every=2, stage=1, folder=tmp_path, on_difference="warn")
    outcome = run_until(step, params, batch_of(0), flip)
    (finding,) = outcome.findings
    assert (finding.device, finding.phase.split(" ")[0]) == (device, "output")


@pytest.mark.parametrize("device", [0, 1])
def test_flip_in_the_run_that_audits_is_named_as_such(device, tmp_path):
    flip = Flip("activation", device, "", SIZES, position=7, bit=29)
    step, params = make_step(1, 3, flip, tmp_path)
    whole = flip.activation

    def of_other(x):
        scope = here()
        return whole(x) if scope.mesh.size == 2 else x

    flip.activation = of_other
    outcome = run_until(step, params, batch_of(0), flip)
    (finding,) = outcome.findings
    assert finding.device == device
    assert "in the other layout, which audits" in finding.text
