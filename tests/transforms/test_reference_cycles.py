"""What a step has held is let go when it returns: cycles would keep it until Python looks for them."""

import gc

import pytest
import torch

import fshard as fs
from fshard import P

SIZE = 64
LEAF = SIZE * SIZE * 4


def kept_in_cycles(call):
    """Return what nothing but cycles keeps after a call: classes, and the shapes of tensors as large as a matrix."""
    call()
    call()  # whatever is made once
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        call()
        gc.collect()
        large = [tuple(x.shape) for x in gc.garbage if isinstance(x, torch.Tensor) and x.nbytes >= LEAF]
        return sorted({type(x).__name__ for x in gc.garbage}), large
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def loss(params, x):
    for w in params:
        x = torch.tanh(x @ w)
    return x.square().mean()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_step_frees_all_tensors(stage):
    mesh = fs.make_mesh({"data": 2})
    params = fs.shard_params([torch.eye(SIZE)] * 1 + [torch.ones(SIZE, SIZE)], fs.fsdp("data"), mesh=mesh)
    opt = fs.partition_optimizer(fs.optim.adamw(0.1), mesh=mesh, axis="data", stage=stage)
    step, state = fs.train_step(loss, opt, mesh=mesh, batch=P("data"), accumulate=2), opt.init(params)
    _, large = kept_in_cycles(lambda: step(params, state, torch.ones(SIZE, SIZE)))
    assert large == []


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zbv"])
def test_pipelined_step_frees_all_tensors(name):
    count = 4 if name == "zbv" else 2
    schedule = fs.pipeline_schedule(name, stages=count, microbatches=2)
    step = fs.pipeline.pipelined(
        [lambda w, x: torch.tanh(x @ w)] * count,
        schedule,
        lambda y, x: y.square().mean(),
        mesh=fs.make_mesh({"pipe": 2}),
    )
    batch = [torch.ones(SIZE, SIZE)] * 2
    assert kept_in_cycles(lambda: step([torch.eye(SIZE)] * count, batch)) == ([], [])


def test_staged_step_frees_all_tensors():
    mesh, schedule = fs.make_mesh({"pipe": 2, "data": 2}), fs.pipeline_schedule("1f1b", stages=2, microbatches=2)
    stages = fs.pipeline.split_stages(torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.Linear(SIZE, SIZE)), 2)
    params = fs.shard_stages(stages, fs.fsdp("data"), mesh=mesh, schedule=schedule)
    opt = fs.partition_optimizer(fs.optim.adamw(0.1), mesh=mesh, axis="data", stage=3)
    step = fs.train_step(
        stages, opt, mesh=mesh, batch=P("data"), schedule=schedule, loss=lambda y, x: y.square().mean()
    )
    state = opt.init(params)
    assert kept_in_cycles(lambda: step(params, state, torch.ones(4 * SIZE, SIZE))) == ([], [])
