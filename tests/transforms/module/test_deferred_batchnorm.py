"""Running statistics after microbatches are those of one call with the whole batch."""

from copy import deepcopy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fshard as fs

KINDS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def net(dims, momentum, affine):
    torch.manual_seed(0)
    return nn.Sequential(KINDS[dims](3, momentum=momentum, affine=affine), nn.Tanh()).double()


@settings(max_examples=25)
@given(
    dims=st.sampled_from([*KINDS]),
    steps=st.lists(st.lists(st.integers(2, 4), min_size=1, max_size=4), min_size=1, max_size=3),
    momentum=st.sampled_from([None, 0.1, 1.0]),
    affine=st.booleans(),
    remat=st.booleans(),
)
def test_deferred_batchnorm_counts_a_step_as_one_batch(dims, steps, momentum, affine, remat):
    whole, module = net(dims, momentum, affine), net(dims, momentum, affine)
    apply, params, buffers = fs.functionalize(module, deferred_batch_norm=True)
    for x in params.values():
        x.requires_grad_()
    run = fs.remat(apply) if remat else apply
    for step, rows in enumerate(steps):
        batches = [torch.randn(n, 3, *[2] * (dims - 2), dtype=torch.float64) + step for n in rows]
        whole(torch.cat(batches))
        for x in batches:
            x.requires_grad_()
            y, buffers = run(params, buffers, x)
            (g,) = torch.autograd.grad(y.sum(), x)
            expected = net(dims, None, affine)(x)
            assert torch.equal(y, expected) and torch.equal(g, *torch.autograd.grad(expected.sum(), x))
        buffers = fs.nn.commit_batch_norm(module, buffers)
        for name, x in whole.named_buffers():
            torch.testing.assert_close(buffers[name], x, rtol=1e-11, atol=1e-11)
            assert buffers[name].dtype == x.dtype
    assert int(whole[0].num_batches_tracked) == len(steps) and not buffers["0.pending"].any()


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("remat", [False, True])
def test_deferred_batchnorm_in_stages_updates_once_a_step(name, remat):
    first = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh()).double()
    whole, batches = deepcopy(first), [torch.randn(rows, 3, dtype=torch.float64) for rows in (4, 4, 2)]
    apply, params, state = fs.functionalize(first, deferred_batch_norm=True)
    run = fs.remat(apply) if remat else apply

    def stage(params, x):
        nonlocal state
        y, state = run(params, state, x)
        return y

    schedule = fs.pipeline_schedule(name, stages=2, microbatches=3)
    step = fs.pipeline.pipelined(
        [stage, lambda w, x: w * x], schedule, lambda y, _: y.sum(), mesh=fs.make_mesh({"pipe": 2})
    )
    for turn in range(2):
        step([params, torch.ones(())], [x + turn for x in batches])
        state = fs.nn.commit_batch_norm(first, state)
        whole(torch.cat(batches) + turn)
    for key, x in whole.named_buffers():
        torch.testing.assert_close(state[key], x, rtol=1e-12, atol=1e-12)


def test_deferred_batchnorm_of_integers_has_equal_bits():
    whole, module = nn.BatchNorm1d(2, momentum=0.5), nn.BatchNorm1d(2, momentum=0.5)
    apply, params, buffers = fs.functionalize(module, deferred_batch_norm=True)
    rows = torch.tensor([[1.0, 8], [3, 2], [5, 4], [7, 6]])
    whole(rows)
    for x in rows.split(2):
        _, buffers = apply(params, buffers, x)
    buffers = fs.nn.commit_batch_norm(module, buffers)
    assert all(torch.equal(buffers[name], x) for name, x in whole.named_buffers())
    again = fs.nn.commit_batch_norm(module, buffers)  # nothing is pending
    assert all(torch.equal(again[name], x) for name, x in buffers.items())


def test_deferred_batchnorm_leaves_evaluation_unchanged():
    module = nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False), nn.BatchNorm1d(2)).eval()
    apply, params, buffers = fs.functionalize(module, deferred_batch_norm=True)
    x = torch.randn(4, 2)
    y, after = apply(params, buffers, x)
    assert torch.equal(y, module(x)) and all(after[name] is buffers[name] for name in buffers)
    assert [name for name in buffers if "pending" in name] == ["1.pending"]
