"""Combinators: chains, masks, labels, skipping, accumulation, averages, master weights."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fshard as fs
from fshard import P, optim
from fshard.optim.contract import copied
from tests.optim.helpers.optimizers import by_step, by_update, example, leaves_of, same, trees


def test_chain_steps_as_its_last_optimizer():
    params, steps = example()
    opt = optim.chain(optim.clip_by_value(0.5), optim.adamw(0.1, fused=False))
    clipped = [optim.clip_by_value(0.5).update(grads, (), None)[0] for grads in steps]
    assert same(
        by_step(opt, params, steps)[0], by_step(optim.adamw(0.1, fused=False), params, clipped)[0]
    )
    assert optim.chain(optim.adamw(0.1), optim.scale(0.5)).step is None


def test_masked_optimizer_freezes_masked_transformation_passes_on():
    params = {"w": torch.ones(2), "b": torch.ones(2)}
    mask = {"w": True, "b": False}
    frozen = optim.masked(optim.sgd(0.5), mask)
    updates, _ = frozen.update(params, frozen.init(params), params)
    assert updates["b"] is None and updates["w"].tolist() == [-0.5, -0.5]
    passed = optim.masked(optim.scale(3.0), mask)
    updates, _ = passed.update(params, passed.init(params), params)
    assert updates["b"].tolist() == [1, 1] and updates["w"].tolist() == [3, 3]


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_nonfinite_gradient_skips_step_on_all_devices(bad):
    layout = fs.Layout(fs.make_mesh({"data": 4}), P("data"))
    params = fs.device_put([torch.ones(8), torch.ones(4)], layout)
    grads = torch.ones(8)
    grads[7] = bad
    opt = optim.skip_if_not_finite(optim.adamw(0.1))
    state = opt.init(params)
    with fs.ledger() as comm:
        updates, after = opt.update(fs.device_put([grads, torch.ones(4)], layout), state, params)
    assert (
        updates == [None, None] and after["skipped"] == 1 and same(after["inner"], state["inner"])
    )
    assert comm.calls() == 1
    _, after = opt.update(fs.device_put([torch.ones(8), torch.ones(4)], layout), after, params)
    assert after["skipped"] == 1 and after["inner"]["count"] == 1


def test_accumulate_takes_one_step_with_mean():
    params, steps = example(torch.float64)
    opt = optim.accumulate(optim.adamw(0.1, fused=False), every=5)
    at = optim.leaves.Leaves.of(params)
    total = steps[0]
    for grads in steps[1:]:
        total = at.rebuild([a + b for a, b in zip(leaves_of(total), leaves_of(grads), strict=True)])
    mean = optim.leaves.Leaves.of(total).mapped(lambda x: x / 5)
    assert same(
        by_step(opt, params, steps)[0], by_step(optim.adamw(0.1, fused=False), params, [mean])[0]
    )


def test_accumulate_counts_a_missing_gradient_as_zero():
    """A parameter with none in all steps is left alone."""
    opt = optim.accumulate(optim.sgd(1.0, momentum=0.5), every=2)
    params = [torch.ones(2), torch.ones(2)]
    state = opt.init(params)
    for grads in (
        [torch.ones(2), torch.ones(2)],
        [None, torch.ones(2)],
        [torch.ones(2), None],
        [None, None],
    ):
        params, state = opt.step(grads, state, params)
    expected = [torch.ones(2), torch.ones(2)]
    plain = optim.sgd(1.0, momentum=0.5)
    before = plain.init(expected)
    for grads in ([torch.full((2,), 0.5), torch.ones(2)], [torch.full((2,), 0.5), None]):
        expected, before = plain.step(grads, before, expected)
    assert all(map(torch.equal, params, expected))


@pytest.mark.parametrize("stage", range(4))
def test_ema_of_a_partitioned_optimizer_has_memory_of_its_own(stage):
    """The parameters are updated in place, and their averages are not."""
    mesh = fs.make_mesh({"data": 2})
    params = fs.shard_params([torch.arange(6.0)], fs.fsdp("data") if stage == 3 else P(), mesh=mesh)
    opt = fs.partition_optimizer(
        optim.ema(optim.sgd(0.5), 0.9), mesh=mesh, axis="data", stage=stage
    )
    state = opt.init(params)
    grad = torch.linspace(-1, 1, 6)
    expected = torch.arange(6.0)
    for step in range(1, 4):
        layout = opt.gradients(params[0].layout)
        params, state = opt.step([fs.device_put(grad, layout)], state, params)
        expected = expected.lerp(torch.arange(6.0) - 0.5 * step * grad, 0.1)
        torch.testing.assert_close(fs.unshard(optim.ema_params(state))[0], expected)


def test_ema_averages_parameters_after_each_step():
    params, steps = example(torch.float64)
    opt = optim.chain(optim.clip_by_value(1.0), optim.ema(optim.sgd(0.1, fused=False), 0.9))
    expected = copied(params)
    moving = copied(params)
    inner = optim.chain(optim.clip_by_value(1.0), optim.sgd(0.1, fused=False))
    state = inner.init(moving)
    for grads in steps:
        moving, state = inner.step(copied(grads), state, moving)
        for a, p in zip(leaves_of(expected), leaves_of(moving), strict=True):
            a.lerp_(p, 1 - 0.9)
    assert same(optim.ema_params(by_step(opt, params, steps)[1]), expected)
    with pytest.raises(optim.OptimizerError, match="no average"):
        optim.ema_params(state)


@given(st.data())
def test_master_weights_round_to_float32_bits(data):
    params, steps = data.draw(trees((torch.bfloat16, torch.float16)))
    inner = optim.adamw(data.draw(st.sampled_from([1e-4, 1.0, 1e2])))
    wide = [
        optim.leaves.Leaves.of(tree).mapped(lambda x: x if x is None else x.float())
        for tree in (params, *steps)
    ]
    for run in (by_step, by_update):
        after, state = run(optim.with_master_weights(inner), params, steps)
        alone, _ = run(inner, wide[0], wide[1:])
        assert same(state["master"], alone)
        for master, p in zip(leaves_of(state["master"]), leaves_of(after), strict=True):
            assert same([master.to(p.dtype)], [p])


def test_copied_tied_arrays_stay_tied():
    mesh = fs.make_mesh({"data": 2})
    x = torch.ones(4)
    tied = fs.shard_params({"a": x, "b": x}, P(), mesh=mesh)
    assert tied["a"] is tied["b"]
    copies = copied(tied)
    assert copies["a"] is copies["b"] and copies["a"].shards[0] is not tied["a"].shards[0]
