"""Mistakes in one of two layouts are found. Oracle: patches, which the test has put there itself."""

import warnings

import pytest
import torch
from torch import nn

import fshard as fs
from fshard import P
from tests.helpers.layout_mistakes import (
    MISTAKES,
    buffers_of_one_device,
    lost_microbatch,
    stale_message,
)

OF_UNITS = ("missing_wait", "stale_unit", "swapped_shards", "lost_element")


def audited(step, folder, **layout):
    return fs.audit(step, every=1, folder=folder, on_difference="warn", **layout)


def outcome_of(step, params, batch, *buffers, steps=2):
    """Run some audited steps; return the last outcome."""
    state = step.init(params)
    for number in range(steps):
        torch.manual_seed(number)
        params, state, *buffers, _ = step(params, state, *buffers, batch)
    return step.last


def model_step(folder, stages):
    """Return a step with dropout and an uneven batch on 4 devices, audited on 2."""
    generator = torch.Generator().manual_seed(0)
    params = {
        "a": torch.randn(6, 8, generator=generator),
        "b": torch.randn(8, generator=generator),
        "c": torch.randn(8, 4, generator=generator),
    }
    mesh = fs.make_mesh({"data": 4})
    stage, other = stages
    params = fs.shard_params(params, fs.fsdp("data") if stage == 3 else P(), mesh=mesh)
    opt = fs.partition_optimizer(fs.optim.adamw(0.01), mesh=mesh, axis="data", stage=stage)
    batch = torch.randn(29, 6, generator=generator), torch.randn(29, 4, generator=generator)

    def loss_fn(params, batch):
        x, y = batch
        hidden = nn.functional.dropout(torch.tanh(x @ params["a"] + params["b"]), 0.2)
        return (hidden @ params["c"] - y).square().mean()

    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), reproducible=True, slices=16)
    half = fs.make_mesh({"data": 2})
    return audited(step, folder, mesh=half, stage=other), params, batch


@pytest.mark.parametrize("size", [4, 2], ids=["in the step", "in the audit"])
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_mistake_in_one_layout_is_found(mistake, size, tmp_path):
    stages = (3, 3) if mistake.__name__ in OF_UNITS else (1, 3)
    step, params, batch = model_step(tmp_path, stages)
    with mistake(size), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome = outcome_of(step, params, batch)
    assert not outcome.is_equal
    assert "both layouts repeat themselves" in outcome.findings[-1].text


@pytest.mark.parametrize("mistake", [lost_microbatch, stale_message], ids=lambda x: x.__name__)
def test_mistake_in_stages_is_found(mistake, tmp_path):
    mesh = fs.make_mesh({"pipe": 2, "data": 2})
    schedule = fs.pipeline_schedule("1f1b", stages=2, microbatches=4)
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)]
    stages = fs.pipeline.split_stages(nn.Sequential(*layers), 2)
    params = fs.shard_stages(stages, fs.fsdp("data"), mesh=mesh, schedule=schedule)
    opt = fs.partition_optimizer(fs.optim.adamw(0.01), mesh=mesh, axis="data", stage=3)

    def loss(y, batch):
        return (y - batch[1]).square().mean()

    step = fs.train_step(
        stages, opt, mesh=mesh, batch=P("data"), schedule=schedule, loss=loss, reproducible=True
    )
    # As many slices in all: 2 x 4 = 1 x 8.
    pair = fs.make_mesh({"pipe": 2, "data": 1})
    other = fs.pipeline_schedule("gpipe", stages=2, microbatches=8)
    step = audited(step, tmp_path, mesh=pair, schedule=other, stage=1)
    batch = torch.randn(16, 6), torch.randn(16, 4)
    with mistake(4), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome = outcome_of(step, params, batch)
    assert not outcome.is_equal
    assert "both layouts repeat themselves" in outcome.findings[-1].text


def test_mistake_in_buffers_is_found(tmp_path):
    mesh = fs.make_mesh({"data": 4})
    torch.manual_seed(0)
    apply, params, buffers = fs.functionalize(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)))

    def loss_fn(params, buffers, batch):
        y, buffers = apply(params, buffers, batch)
        return y.square().mean() + y.sum() * 0.1, buffers

    params = fs.shard_params(params, fs.fsdp("data"), mesh=mesh)
    opt = fs.partition_optimizer(fs.optim.adamw(0.01), mesh=mesh, axis="data", stage=3)
    step = fs.train_step(
        loss_fn, opt, mesh=mesh, batch=P("data"), has_buffers=True, reproducible=True
    )
    step = audited(step, tmp_path, mesh=fs.make_mesh({"data": 2}))
    with buffers_of_one_device(2), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome = outcome_of(step, params, torch.randn(16, 6), buffers)
    assert outcome.findings[-1].phase == "buffer"
