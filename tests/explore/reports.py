"""Reports of small steps, for tests of pages."""

from functools import cache

import torch

import fshard as fs
from fshard import P, optim
from fshard.plan import cluster, cost

meta = torch.device("meta")


@cache
def zero(stage=3, devices=4):
    """Return the report of three layers, whose numbers the devices do not divide."""
    mesh = fs.make_mesh({"data": 2, "model": 2}, runtime="abstract")
    weights = [torch.empty(30, 30, device=meta) for _ in range(3)]
    params = fs.shard_params(weights, fs.fsdp("data", unit="[*]") if stage == 3 else P(), mesh=mesh)
    opt = fs.partition_optimizer(optim.adamw(0.1), mesh=mesh, axis="data", stage=stage)

    def loss_fn(params, x):
        for w in params:
            x = torch.tanh(x @ w)
        return x.square().mean()

    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), donate=True)
    arguments = params, opt.init(params), torch.empty(4 * devices, 30, device=meta)
    return cost(step, *arguments, cluster=cluster("h100", node=8), sizes={"data": devices})


@cache
def staged():
    mesh = fs.make_mesh({"pipe": 2, "data": 3}, runtime="abstract")
    schedule = fs.pipeline_schedule("1f1b", stages=2, microbatches=2)
    weights = [[torch.empty(8, 8, device=meta)] for _ in range(2)]
    params = fs.shard_stages(weights, fs.fsdp("data"), mesh=mesh, schedule=schedule)
    opt = fs.partition_optimizer(optim.adamw(0.1), mesh=mesh, axis="data", stage=3)
    options = {
        "mesh": mesh,
        "batch": P("data"),
        "schedule": schedule,
        "loss": lambda y, x: y.sum(),
        "donate": True,
    }
    step = fs.train_step([lambda params, x: torch.tanh(x @ params[0])] * 2, opt, **options)
    return cost(
        step, params, opt.init(params), torch.empty(12, 8, device=meta), cluster=cluster("h100")
    )
