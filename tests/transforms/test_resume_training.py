"""A run goes on in another stage, or on another mesh, as if nothing had happened; and what else is
known of leaves goes along.
"""

import io
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard import P, optim
from fshard.mesh.layout import flatten
from tests.optim.helpers.per_device_rules import MOMENTUM, ROWS

by_shape = optim.by_label(
    {"m": optim.muon(0.1), "v": optim.adamw(0.1)}, lambda path, x: "m" if x.ndim == 2 else "v"
)
OPTIMIZERS = {
    "adamw": optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1, fused=False)),
    "muon": optim.loss_scaled(optim.ema(by_shape, 0.5)),
    "masters": optim.with_master_weights(optim.accumulate(optim.sgd(0.1, momentum=0.9), 2)),
    "plain": MOMENTUM,
    "plain rows": ROWS,
}
MESHES = ({"data": 1}, {"data": 2}, {"data": 4}, {"data": 2, "model": 2})


def fresh():
    torch.manual_seed(0)
    tied = torch.randn(6, 6)
    return {
        "a": tied,
        "b": [torch.randn(6), tied],
        "c": torch.randn(6, 3),
        "d": torch.randn(3),
        "idle": torch.ones(5),
    }


def loss_fn(p, batch):
    x = torch.tanh(batch[0] @ p["a"] + p["b"][0]) @ p["b"][1].T
    return ((x @ p["c"]) * p["d"] - batch[1]).square().mean()


def rules(stage):
    return fs.fsdp("data") if stage == 3 else P()


def go(params, state, opt, mesh, turns):
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), reproducible=True)
    for turn in turns:
        torch.manual_seed(turn)
        params, state, _ = step(params, state, (torch.randn(8, 6), torch.randn(8, 3)))
    return params, state


def begun(name, axes, stage):
    mesh = fs.make_mesh(axes)
    params = fs.shard_params(fresh(), rules(stage), mesh=mesh, frozen="d")
    opt = fs.partition_optimizer(OPTIMIZERS[name], mesh=mesh, axis="data", stage=stage)
    return params, opt.init(params), opt, mesh


def moved_on(name, first, then):
    """Train two steps, save and read, move to another mesh and stage, train two more."""
    params, state = go(*begun(name, *first), range(2))
    file = io.BytesIO()
    torch.save((params, state), file)
    file.seek(0)
    params, state = torch.load(file, weights_only=False)
    axes, stage = then
    mesh = fs.make_mesh(axes)
    params = fs.shard_params(params, rules(stage), mesh=mesh)
    opt = fs.partition_optimizer(OPTIMIZERS[name], mesh=mesh, axis="data", stage=stage)
    state = fs.device_put(state, fs.mesh.layouts(opt.init(params)))
    params, state = go(params, state, opt, mesh, range(2, 4))
    assert params["a"] is params["b"][1] and params["d"].layout.frozen
    return flatten(fs.unshard((params, state)))[0]


@cache
def unmoved(name):
    params, state = go(*begun(name, {"data": 1}, 0), range(4))
    return flatten(fs.unshard((params, state)))[0]


@pytest.mark.parametrize("name", OPTIMIZERS)
@given(st.tuples(*[st.tuples(st.sampled_from(MESHES), st.sampled_from([0, 1, 2, 3]))] * 2))
@settings(max_examples=6)
def test_training_continues_in_any_stage_on_any_mesh(name, ways):
    assert all(map(torch.equal, moved_on(name, *ways), unmoved(name)))


def test_state_of_another_layout_raises_with_fix():
    params, state = go(*begun("adamw", {"data": 2}, 3), range(1))
    there = fs.shard_params(params, P(), mesh=params["a"].mesh)
    *_, opt, mesh = begun("adamw", {"data": 2}, 0)
    with pytest.raises(
        ValueError, match=r"fs.device_put\(state, fs.mesh.layouts\(opt.init\(params\)\)\)"
    ):
        go(there, state, opt, mesh, range(1))


# -- what is known of leaves -----------------------------------------------------------------------


def test_reshard_keeps_ties_units_and_frozen_leaves():
    mesh = fs.make_mesh({"data": 2})
    other = fs.make_mesh({"data": 4})
    w = torch.arange(6.0)
    params = fs.shard_params(
        {"a": w, "b": [w], "c": torch.ones(3)}, fs.fsdp("data", unit=8), mesh=mesh, frozen="c"
    )
    for moved in (
        fs.reshard(params, fs.Layout(mesh)),
        fs.device_put(params, fs.Layout(mesh)),
        fs.device_put(params, fs.Layout(other, P.flat("data"))),
        fs.shard_params(params, P(), mesh=other),
    ):
        assert moved["a"] is moved["b"][0]
        assert [moved[name].layout.frozen for name in "ac"] == [False, True]
    assert (
        moved["c"].layout.unit == "c"
        and fs.reshard(params, fs.Layout(mesh))["c"].layout.unit == "unit 2"
    )
    full = fs.unshard(params)
    assert full["a"] is full["b"][0] and torch.equal(full["a"], w)
    put = fs.device_put({"a": w, "b": w}, fs.Layout(mesh))
    assert put["a"] is put["b"]
