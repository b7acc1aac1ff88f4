"""`fs.plan.rank`: all meshes and options are tried; the order is that of their costs, reasons have
the number.
"""

from dataclasses import replace
from math import prod

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.errors import PlanError
from fshard.plan import cluster, cost, rank
from tests.plan.machines import FIXED, H100, Block

WIDTH, TOKENS = 16, 6


def program(mesh, *, stage, recomputed=False):
    """A GPT without values, of layers that "model" shards; the batch has 16 samples."""
    model = torch.nn.Sequential(Block(4), Block(4)).to("meta")
    x = torch.empty(16, TOKENS, WIDTH, device="meta")
    plan = fs.tensor_parallel(
        model, axis="model", sample=torch.ones(2, TOKENS, WIDTH, device="meta"), check=False
    )
    apply, params, buffers = fs.functionalize(model, plan=plan)
    rules = fs.fsdp("data", unit="[*]", within=plan.rules) if stage == 3 else plan.rules
    params = fs.shard_params(params, rules, mesh=mesh)

    def loss_fn(params, x):
        run = fs.remat(apply) if recomputed else apply
        return plan.full(run(params, buffers, x)[0]).square().mean()

    opt = fs.partition_optimizer(fs.optim.adamw(0.1), mesh=mesh, axis="data", stage=stage)
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), donate=True, local=plan.axes)
    return step, (params, opt.init(params), x)


OPTIONS = {"stage": [0, 3], "recomputed": [False, True]}


def test_all_are_tried_and_the_order_is_that_of_costs():
    plans = rank(program, devices=8, axes=["data", "model"], options=OPTIONS, cluster=H100)
    tried = [*plans, *plans.rejected]
    assert (
        len({(tuple(plan.sizes.values()), tuple(plan.options.values())) for plan in tried})
        == len(tried)
        == 16
    )
    assert all(prod(plan.sizes.values()) == 8 for plan in tried)
    assert [plan.cost.seconds for plan in plans] == sorted(plan.cost.seconds for plan in plans)
    assert {plan.sizes["model"] for plan in plans.rejected} == {8}  # there are 4 heads
    assert all("divide the heads" in plan.reason for plan in plans.rejected)
    step, arguments = program(fs.make_mesh(plans[0].sizes, runtime="abstract"), **plans[0].options)
    assert cost(step, *arguments, cluster=H100).seconds == plans[0].cost.seconds
    assert sum(plans[2].terms.values()) == pytest.approx(plans[2].cost.seconds)
    assert "divide the heads" in str(plans) or "heads" in str(plans)


def test_sizes_may_be_limited():
    axes = {"data": range(1, 9), "model": (2, 4)}
    plans = rank(program, devices=8, axes=axes, options={"stage": [3]}, cluster=H100)
    assert sorted(plan.sizes["model"] for plan in plans) == [2, 4]
    with pytest.raises(
        PlanError, match="the sizes of data, model must have a product of 6; got none"
    ):
        rank(
            program,
            devices=6,
            axes={"data": (4,), "model": (2,)},
            options={"stage": [3]},
            cluster=H100,
        )


def test_plans_beyond_the_memory_are_rejected_with_the_excess():
    options = {"stage": [0, 3], "recomputed": [True]}
    sizes = {"data": (8,), "model": (1,)}
    free = rank(program, devices=8, axes=sizes, options=options, cluster=H100)
    peaks = {plan.options["stage"]: plan.cost.peak() for plan in free}
    assert peaks[3] < peaks[0]
    small = replace(H100, memory=float(peaks[3]))
    plans = rank(program, devices=8, axes=sizes, options=options, cluster=small)
    assert [plan.options["stage"] for plan in plans] == [3]
    assert plans.rejected[0].reason.startswith(f"{peaks[0] - peaks[3]:,} bytes over the memory; ")
    with pytest.raises(
        PlanError,
        match=r"no plan of 8 devices fits; the nearest is data=8, model=1, stage=3.*: 1 bytes over",
    ):
        rank(
            program,
            devices=8,
            axes=sizes,
            options=options,
            cluster=replace(small, memory=peaks[3] - 1.0),
        )


def test_a_faster_network_changes_the_order_towards_more_communication():
    assert FIXED["stage"] == 3 and cluster("cpu").efficiency.overlap == 0
    slow = replace(
        H100, links=tuple(replace(link, bandwidth=link.bandwidth / 1e4) for link in H100.links)
    )
    fast, slowed = (
        rank(program, devices=4, axes=["data", "model"], options={"stage": [0]}, cluster=machine)
        for machine in (H100, slow)
    )
    sent = [float(plans[0].cost.sent()) for plans in (fast, slowed)]
    assert sent[1] <= sent[0] and sent[1] == min(float(plan.cost.sent()) for plan in slowed)
