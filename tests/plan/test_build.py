"""A plan is a program: what it builds trains as on one device, and has the needs that were
estimated.
"""

from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

import fshard as fs
from fshard import optim
from fshard.errors import PlanError
from fshard.parallelism import Parallelism
from fshard.plan import PlanEstimate, Transformer, cluster, search
from fshard.plan.layers import LayerTracer
from fshard.plan.program import layered_model
from tests.helpers.sampled import thorough

H100 = cluster("h100", node=8)
SMALL = Transformer(4, 32, 64, 4, 2, 60, 16, dtype=torch.float32)
LARGE = Transformer(4, 4096, 11008, 32, 8, 32000, 4096)
MEGATRON = {"sequence_mode": "megatron"}


@pytest.fixture
def without_programs(monkeypatch):
    """Let a search rank by the formulas alone, which is faster."""
    monkeypatch.setattr(import_module("fshard.plan.search"), "PROGRAMS", 0)


def plan_with(**fields):
    """Return a plan of one device along "data" unless another number is given."""
    return Parallelism(**{"data": 1, **fields})


class ExpertLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(32, 32)
        self.moe = fs.nn.MoE(32, 16, experts=8, top_k=2, axis="expert")

    def forward(self, x):
        x = x + self.inner(functional.layer_norm(x, (32,)))
        return x + self.moe(x.flatten(0, 1)).unflatten(0, x.shape[:2])


class ExpertModel(nn.Module):
    """Layers of experts, and a buffer that each forward changes."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(60, 32)
        self.head = nn.Linear(32, 60)
        self.layers = nn.ModuleList(ExpertLayer() for _ in range(4))

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class CountingModel(ExpertModel):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids):
        self.calls += 1
        return super().forward(ids)


class KeywordModel(CountingModel):
    """Called by name, as models of transformers are, whose results have the loss."""

    def forward(self, ids, labels):
        logits = super().forward(ids)
        return SimpleNamespace(
            loss=functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        )


def dense():
    return SMALL.build().to_empty(device="cpu")


def dense_with_experts():
    return (
        replace(SMALL, experts=8, top_k=2, expert_ffn=16, shared=8).build().to_empty(device="cpu")
    )


IDS = torch.randint(0, 60, (8, 16), generator=torch.manual_seed(1))
TRAINED = [
    (dense, {"data": 2, "zero_stage": 3, "rows": 2, "microbatches": 2}),
    (dense, {"data": 2, "tensor": 2, "zero_stage": 1, "rows": 4, "recompute": "full", **MEGATRON}),
    (dense, {"data": 2, "sequence": 2, "rows": 4, "zero_stage": 2}),
    # Four devices do not divide two heads of keys: attention shards samples along their axis.
    (dense, {"tensor": 4, "rows": 4, "microbatches": 2, **MEGATRON}),
    (dense, {"tensor": 4, "rows": 8, "recompute": "full", **MEGATRON}),
    (dense, {"data": 2, "replicas": 2, "rows": 2, "zero_stage": 3}),
    (dense, {"data": 2, "rows": 4, "zero_stage": 1, "state_memory": "host"}),
    (dense, {"data": 2, "tensor": 2, "rows": 4, "zero_stage": 3, "recompute": "except attention, mlp"}),
    (dense, {"sequence": 2, "tensor": 2, "rows": 8, "sequence_mode": "ring", "recompute": "selective"}),
    (dense, {"data": 2, "pipeline": 2, "zero_stage": 1, "microbatches": 4, "schedule": "zb-h1", "recompute": "selective"}),
    (dense, {"pipeline": 2, "tensor": 2, "microbatches": 8, "schedule": "interleaved", "chunks": 2, **MEGATRON}),
    (dense, {"data": 2, "sequence": 2, "pipeline": 2, "rows": 2, "microbatches": 2, "sequence_mode": "ulysses"}),
    (ExpertModel, {"data": 2, "experts": 2, "zero_stage": 1, "rows": 2}),
    (ExpertModel, {"experts": 2, "tensor": 2, "rows": 4, **MEGATRON}),
    (ExpertModel, {"data": 2, "experts": 2, "zero_stage": 3, "rows": 2, "recompute": "full"}),
    (ExpertModel, {"experts": 2, "pipeline": 2, "rows": 2, "microbatches": 2}),
    (dense_with_experts, {"experts": 2, "pipeline": 2, "rows": 2, "microbatches": 2}),
    (CountingModel, {"data": 2, "rows": 4}),
    (KeywordModel, {"data": 2, "rows": 2, "microbatches": 2, "zero_stage": 3}),
    (KeywordModel, {"data": 2, "pipeline": 2, "rows": 2, "microbatches": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("build", "options"), TRAINED)
def test_what_a_plan_builds_trains_as_on_one_device(build, options):
    def model():
        module = build()
        torch.manual_seed(0)
        for x in module.parameters():
            nn.init.normal_(x, std=0.2)
        return module

    named = build is KeywordModel
    batch = {"ids": IDS, "labels": IDS} if named else (IDS, IDS)
    plan = plan_with(**options)
    module = model()
    torch_optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    losses = []
    for _ in range(3):
        loss = (
            module(**batch).loss
            if named
            else functional.cross_entropy(module(IDS).flatten(0, 1), IDS.flatten())
        )
        torch_optimizer.zero_grad()
        loss.backward()
        torch_optimizer.step()
        losses.append(loss.item())
    layered = layered_model(model(), batch, optim.adamw(3e-3), None, None)
    step, *trees = PlanEstimate(plan, LayerTracer(layered, H100)).build(model(), mesh=plan.mesh())
    for expected in losses:
        *trees, metrics = step(*trees, batch)
        assert metrics["loss"].item() == pytest.approx(expected, rel=1e-4)
    if build is CountingModel:
        assert trees[2]["calls"] == 3


def test_stages_of_sharded_experts_are_counted():
    """The blocks of other stages, which have the experts of all devices, run for their shapes
    alone.
    """
    model = Transformer(4, 64, 128, 4, 4, 60, 16, experts=8, top_k=2, expert_ffn=16)
    tracer = LayerTracer(layered_model(model, None, optim.sgd(0.1), None, None), H100)
    estimate = PlanEstimate(plan_with(pipeline=2, tensor=2, microbatches=4, **MEGATRON), tracer)
    flops = [
        sum(x.flops for x in device.operations)
        for device in estimate.cost(model.build()).devices.values()
    ]
    assert estimate.flops == 2 * sum(flops)


@pytest.mark.usefixtures("without_programs")
def test_a_search_tries_the_axis_of_experts():
    model = Transformer(4, 512, 2048, 8, 8, 1000, 128, experts=16, top_k=2, expert_ffn=512)
    options = {
        "devices": 8,
        "cluster": H100,
        "global_batch": 32,
        "optimizer": optim.sgd(0.1),
        "tensor": 1,
        "rows": 1,
    }
    plans = search(model, schedule="1f1b", zero_stage=(0, 1), recompute="never", **options)
    assert {x.plan.experts for x in plans} == {1, 8} and "experts=8" in str(plans)
    several = search(model, sequence=(1, 2), pipeline=1, experts=1, recompute="never", **options)
    assert {x.plan.sequence for x in several} == {1, 2}
    copies = search(
        model,
        replicas=(1, 2),
        state_memory=("device", "host"),
        experts=1,
        recompute="never",
        **options,
    )
    assert {(x.plan.replicas, x.plan.pipeline == 1) for x in copies} > {(1, False), (2, True)}
    assert {(x.plan.state_memory, x.plan.pipeline == 1) for x in copies} > {
        ("device", False),
        ("host", True),
    }


NEAR = [
    *({"data": 4, "zero_stage": stage, "rows": 4} for stage in range(4)),
    *({"data": 2, "tensor": 2, "zero_stage": stage, "rows": 4, **MEGATRON} for stage in (0, 1, 3)),
    {"data": 4, "zero_stage": 1, "rows": 4, "recompute": "full"},
    *({"data": 2, "replicas": 2, "zero_stage": stage, "rows": 2} for stage in (0, 1, 3)),
    {"rows": 2, "state_memory": "host"},
    {"data": 4, "zero_stage": 3, "rows": 2, "microbatches": 2, "state_memory": "host"},
    {"data": 2, "tensor": 2, "rows": 2, "recompute": "selective", **MEGATRON},
    {"data": 2, "pipeline": 2, "rows": 2, "microbatches": 4, "recompute": "except mlp"},
    {"data": 2, "sequence": 2, "zero_stage": 2, "rows": 2},
    {"tensor": 2, "sequence": 2, "rows": 2, "sequence_mode": "ring"},
    {"data": 2, "zero_stage": 2, "rows": 2, "microbatches": 4},
    {"data": 2, "pipeline": 4, "zero_stage": 1, "microbatches": 8},
    thorough({"data": 4, "pipeline": 2, "zero_stage": 2, "microbatches": 4}),
    thorough({"data": 4, "pipeline": 2, "zero_stage": 3, "microbatches": 4, "recompute": "full"}),
    {"pipeline": 2, "tensor": 2, "microbatches": 4, **MEGATRON},
    {"pipeline": 2, "rows": 2, "microbatches": 4, "schedule": "zbv", "chunks": 2},
    {
        "pipeline": 2,
        "rows": 2,
        "microbatches": 4,
        "schedule": "interleaved",
        "chunks": 2,
        "recompute": "full",
    },
]
TRACER = LayerTracer(
    layered_model(LARGE, None, optim.with_master_weights(optim.adamw(3e-4)), None, None), H100
)


@pytest.mark.parametrize("options", NEAR)
def test_estimates_are_near_the_cost_of_the_program(options):
    """Operations are equal; seconds and bytes are near, since layers are multiplied and the ends
    differ.
    """
    plan = plan_with(**options)
    estimate = PlanEstimate(plan, TRACER)
    report = estimate.cost(LARGE.build())
    flops = sum(event.flops for device in report.devices.values() for event in device.operations)
    assert estimate.flops == flops * plan.devices / len(report.devices)
    assert estimate.seconds == pytest.approx(report.seconds, rel=0.06)
    assert 0.94 < estimate.peak / report.peak() < 1.18


@pytest.mark.usefixtures("without_programs")
def test_the_best_plan_is_saved_scaled_and_built(tmp_path):
    model = Transformer(4, 64, 128, 4, 4, 60, 16, dtype=torch.float32)
    plans = search(
        model, devices=8, cluster=H100, global_batch=32, optimizer=optim.sgd(0.1), tensor=2, rows=2
    )
    best = plans[0]
    best.save(tmp_path / "plan.toml")
    assert Parallelism.load(tmp_path / "plan.toml") == best.plan and best.mesh == best.plan.axes
    small = best.scaled(4)
    step, params, state = small.build(model.build().to_empty(device="cpu"))
    _, _, metrics = step(params, state, (torch.zeros(32, 16, dtype=torch.int64),) * 2)
    assert metrics["samples"] == 32 and step.mesh.size == 4
    with pytest.raises(
        PlanError, match=r"mesh must have the sizes of the plan, .*; got Mesh\(data=4"
    ):
        small.build(model.build(), mesh=fs.make_mesh({"data": 4}))
    with pytest.raises(
        ValueError, match='replicas must be 1; got 2.*; state_memory must be "device"'
    ):
        fs.HybridParallelPlugin(plan_with(replicas=2, state_memory="host"))
    staged = plan_with(pipeline=2, tensor=2, microbatches=4, recompute="full", **MEGATRON)
    plugin = fs.HybridParallelPlugin(staged, blocks="layers")
    assert (plugin.pipeline, plugin.blocks, plugin.sequence_mode) == (2, "layers", "megatron")
    with pytest.raises(
        ValueError,
        match=r'recompute must be "never", .*; microbatches must be 1 without stages; got 2.*',
    ):
        fs.HybridParallelPlugin(replace(staged, pipeline=1, microbatches=2))
    with pytest.raises(
        PlanError, match=r"write fs.HybridParallelPlugin\(best.plan, blocks='layers'"
    ):
        small.plugin()


def test_stages_count_no_weights_of_other_stages():
    vocab = 20_000  # so that the embedding is far larger than a layer
    model = Transformer(3, 16, 32, 2, 2, vocab, 8)
    layered = layered_model(model, None, optim.adamw(1e-3), None, None)
    plan = Parallelism(data=1, pipeline=3, tensor=2, microbatches=3, rows=1, schedule="1f1b")
    estimate = PlanEstimate(plan, LayerTracer(layered, cluster("h100", node=8)))

    _, between, _ = estimate.cost(model.build()).devices.values()

    embedding = model.build().embedding.weight
    assert between.used.peak() < embedding.nbytes / 10
