"""Steps free what they have held when they return: cycles would keep it until Python looks for them."""

import gc

import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy

import fshard as fs
from fshard import P

SIZE = 64
LEAF = SIZE * SIZE * 4


def kept_in_cycles(call):
    """Return what nothing but cycles keeps after a call: classes, and the shapes of tensors as
    large as a matrix.
    """
    call()
    call()  # whatever is made once
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        call()
        gc.collect()
        large = [
            tuple(x.shape) for x in gc.garbage if isinstance(x, torch.Tensor) and x.nbytes >= LEAF
        ]
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
    params = fs.shard_params(
        [torch.eye(SIZE)] * 1 + [torch.ones(SIZE, SIZE)], fs.fsdp("data"), mesh=mesh
    )
    opt = fs.partition_optimizer(fs.optim.adamw(0.1), mesh=mesh, axis="data", stage=stage)
    step = fs.train_step(loss, opt, mesh=mesh, batch=P("data"), accumulate=2)
    state = opt.init(params)
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
    mesh = fs.make_mesh({"pipe": 2, "data": 2})
    schedule = fs.pipeline_schedule("1f1b", stages=2, microbatches=2)
    stages = fs.pipeline.split_stages(
        torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.Linear(SIZE, SIZE)), 2
    )
    params = fs.shard_stages(stages, fs.fsdp("data"), mesh=mesh, schedule=schedule)
    opt = fs.partition_optimizer(fs.optim.adamw(0.1), mesh=mesh, axis="data", stage=3)
    step = fs.train_step(
        stages,
        opt,
        mesh=mesh,
        batch=P("data"),
        schedule=schedule,
        loss=lambda y, x: y.square().mean(),
    )
    state = opt.init(params)
    assert kept_in_cycles(lambda: step(params, state, torch.ones(4 * SIZE, SIZE))) == ([], [])


# -- forwards that end in an error, and outputs without a backward ---------------------------------

PLUGINS = {"ddp": fs.DDPPlugin, "zero 2": lambda: fs.ZeroPlugin(stage=2), "fsdp": fs.FSDPPlugin}
WIDE, ROWS = 37, 3


def fails(model, x):
    with pytest.raises(RuntimeError):
        model(torch.cat([x, x], 1))


def drops(model, x):
    model(x).sum().item()


def drops_what_failed_midway(model, x):
    model.module[3].p = 2.0
    with pytest.raises(ValueError, match="dropout"):
        model(x)
    model.module[3].p = 0.0


def _is_wide(x):
    """Return whether something is a tensor of these tests; those of others may have no shape yet."""
    return issubclass(type(x), torch.Tensor) and not is_lazy(x) and WIDE in x.shape


@pytest.mark.parametrize("does", [fails, drops, drops_what_failed_midway])
@pytest.mark.parametrize("plugin", PLUGINS)
def test_failed_and_evaluated_calls_leave_no_state(plugin, does):
    x = torch.randn(ROWS, 6)
    counts = list[int]()
    gc.collect()
    gc.freeze()  # only what is made from here on is looked at

    def main():
        layers = (
            nn.Linear(6, WIDE),
            nn.Tanh(),
            nn.Linear(WIDE, WIDE),
            nn.Dropout(0.0),
            nn.Sigmoid(),
            nn.Linear(WIDE, 2),
        )
        model = nn.Sequential(*layers)
        booster = fs.Booster(PLUGINS[plugin]())
        model, opt, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(10):
            does(model, x)
            booster.backward(model(x).square().mean(), opt)
            opt.step(), opt.zero_grad()
            if step in (1, 9):
                gc.collect()
                counts.append(sum(map(_is_wide, gc.get_objects())))

    fs.run(main, mesh=fs.make_mesh({"data": 2}))
    assert max(counts[2:]) <= max(counts[:2]) + 6, counts
