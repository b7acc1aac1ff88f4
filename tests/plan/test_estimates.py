"""A plan prints the numbers of its program: bytes and seconds of drawn pairs of a model and a layout are
near those of the program with all layers and microbatches, which `fs.plan.cost` runs in full.
"""

from dataclasses import replace
from functools import cache
from importlib import import_module
from random import Random

import pytest
import torch

import fshard as fs
from fshard import optim
from fshard.errors import PlanError
from fshard.mesh.layout import flatten
from fshard.parallelism import Parallelism
from fshard.pipeline.split.balance import partition
from fshard.plan import PlanEstimate, Transformer, cluster, search
from fshard.plan.formulas import layers_of_stages
from fshard.plan.layers import LayerTracer, LayerWeights
from fshard.plan.program import layered_model
from fshard.plan.programs.staged import size_of_stages
from fshard.plan.search import PROGRAMS
from tests.helpers.sampled import THOROUGH, thorough
from tests.pipeline.schedule.drawn import NAMES as SCHEDULES

H100 = cluster("h100", node=8)
ADAMW = optim.with_master_weights(optim.adamw(3e-4))

LLAMA_7B = Transformer(32, 4096, 11008, 32, 32, 32000, 4096)
GPT = {"gated": False, "bias": True}
MODELS = {
    "tiny": Transformer(4, 256, 1024, 4, 4, 1000, 128),
    "small": Transformer(8, 512, 2048, 8, 8, 1024, 256),
    "GPT-2": Transformer(12, 768, 3072, 12, 12, 50257, 1024, tied=True, **GPT),
    "with dropout": Transformer(6, 1024, 4096, 16, 16, 50304, 2048, dropout=0.1, **GPT),
    "float32": Transformer(4, 1024, 4096, 16, 16, 32000, 1024, dtype=torch.float32),
    "Llama 1B": Transformer(16, 2048, 8192, 32, 8, 128256, 4096),
    "Llama 7B": LLAMA_7B,
    "Mistral": Transformer(6, 4096, 14336, 32, 8, 32000, 8192),
    "experts": Transformer(4, 512, 2048, 8, 8, 1000, 128, experts=16, top_k=2, expert_ffn=512),
    "Mixtral": Transformer(
        4, 4096, 14336, 32, 8, 32000, 4096, experts=8, top_k=2, expert_ffn=14336
    ),
}
MOST_WORK = 64
"""The layers times microbatches of a program that a test runs in full."""


@cache
def tracer(name):
    return LayerTracer(layered_model(MODELS[name], None, ADAMW, None, None), H100)


def drawn_pair(seed):
    """Return the name of a model and a plan, that divide each other and are not too long to run."""
    random = Random(seed)
    while True:
        name = random.choice(list(MODELS))
        try:
            plan = drawn_plan(random, MODELS[name])
        except PlanError:  # fields that contradict each other
            continue
        model = MODELS[name]
        inner = plan.experts * plan.sequence * plan.tensor
        is_short = model.layers * plan.microbatches <= MOST_WORK
        has_experts = not model.experts or model.experts % inner == 0
        has_heads = model.heads % (plan.tensor * plan.sequence) == 0
        drops_in_sequences = model.dropout and plan.sequence_mode in ("ring", "ulysses")
        if drops_in_sequences:  # these attentions have no dropout
            continue
        if is_short and has_experts and has_heads and plan.stages <= model.layers:
            return name, plan


def drawn_plan(random, model):
    devices = random.choice((8, 16, 32, 64))
    sizes = {
        "tensor": random.choice((1, 1, 2, 4, 8)),
        "pipeline": random.choice((1, 1, 1, 2, 4)),
        "sequence": random.choice((1, 1, 1, 2, 4)),
        "replicas": random.choice((1, 1, 1, 2)),
        "experts": random.choice((1, 2, 8)) if model.experts else 1,
    }
    modes = ("gather", "ring", "ulysses") if sizes["sequence"] > 1 else ("gather", "megatron")
    named = "except attention" if model.experts else "except attention, mlp"
    schedule = random.choice(SCHEDULES) if sizes["pipeline"] > 1 else "1f1b"
    is_on_host = sizes["pipeline"] == 1 and random.random() < 0.15
    options = {
        "zero_stage": random.choice((0, 1, 2, 3)),
        "rows": random.choice((1, 1, 2, 4)),
        "microbatches": random.choice((1, 2, 3, 4, 8)),
        "recompute": random.choice(("never", "full", "selective", "except attention", named)),
        "sequence_mode": random.choice(modes),
        "state_memory": "host" if is_on_host else "device",
    }
    return Parallelism(**sizes, **options, schedule=schedule).on(devices)


CHEAPEST = (13, 29, 40, 90, 104, 250)
SEEDS = range(300) if THOROUGH else CHEAPEST


@pytest.mark.parametrize("seed", SEEDS)
def test_estimates_are_within_a_tenth_of_the_program(seed):
    name, plan = drawn_pair(seed)
    estimate = PlanEstimate(plan, tracer(name))
    report = estimate.cost(MODELS[name].build())
    assert estimate.program is not None
    assert estimate.peak == pytest.approx(report.peak(), rel=0.1), (name, plan)
    assert estimate.seconds == pytest.approx(report.seconds, rel=0.1), (name, plan)


@pytest.mark.parametrize(
    "fields",
    [
        {"data": 8, "zero_stage": 2, "microbatches": 6},
        thorough(
            {
                "data": 2,
                "tensor": 4,
                "sequence_mode": "megatron",
                "zero_stage": 3,
                "microbatches": 5,
            }
        ),
        thorough({"data": 4, "pipeline": 2, "microbatches": 9}),
    ],
)
def test_estimates_of_many_layers_and_microbatches_are_the_programs(fields):
    """Both numbers are beyond those of the programs that run: the lines through these go on."""
    model = replace(LLAMA_7B, layers=12)
    plan = Parallelism(**{"data": 1, **fields})
    layered = layered_model(model, None, ADAMW, None, None)
    estimate = PlanEstimate(plan, LayerTracer(layered, H100))
    report = estimate.cost(model.build())
    assert estimate.program_size < model.layers * plan.microbatches
    assert estimate.peak == pytest.approx(report.peak(), rel=1e-3)
    assert estimate.seconds == pytest.approx(report.seconds, rel=1e-2)


@pytest.mark.parametrize(
    ("name", "layers", "fields"),
    [
        ("small", 10, {"data": 32, "zero_stage": 3, "microbatches": 2, "recompute": "full"}),
        ("tiny", 4, {"data": 4, "replicas": 2, "zero_stage": 2, "microbatches": 6}),
        ("Mistral", 10, {"data": 4, "zero_stage": 2, "microbatches": 2, "recompute": "full"}),
    ],
)
def test_gradients_under_way_are_as_many_as_in_the_program(name, layers, fields):
    """Their queue is full after some layers, or microbatches if all layers are one bucket."""
    model = replace(MODELS[name], layers=layers)
    plan = Parallelism(**fields)
    layered = layered_model(model, None, ADAMW, None, None)
    estimate = PlanEstimate(plan, LayerTracer(layered, H100))
    report = estimate.cost(model.build())
    assert estimate.peak == pytest.approx(report.peak(), rel=1e-3)


@pytest.mark.parametrize("zero_stage", [thorough(0), 1])
def test_seconds_of_buckets_of_several_layers_are_the_programs(zero_stage):
    """A bucket has the gradients of four layers: one layer more adds a bucket, or none."""
    model = replace(MODELS["small"], layers=16)
    plan = Parallelism(data=8, zero_stage=zero_stage)
    layered = layered_model(model, None, ADAMW, None, None)
    estimate = PlanEstimate(plan, LayerTracer(layered, H100))
    assert estimate.seconds == pytest.approx(estimate.cost(model.build()).seconds, rel=0.01)


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_formulas_shard_dense_parameters_along_experts_too(zero_stage):
    plan = Parallelism(data=2, experts=4, zero_stage=zero_stage)
    estimate = PlanEstimate(plan, tracer("experts"))
    report = estimate.cost(MODELS["experts"].build())
    parameters, state, _ = [stored_bytes(tree) for tree in report.arguments]
    assert estimate.formula_memory["parameters"] == pytest.approx(parameters, rel=1e-3)
    assert estimate.formula_memory["state"] == pytest.approx(state, rel=1e-3)
    assert estimate.least_memory() <= report.peak()


def stored_bytes(tree):
    """Return the bytes of a tree on the first device."""
    return sum([x.shards[0].nbytes for x in flatten(tree)[0] if isinstance(x, fs.Sharded)])


STAGED = (
    {"data": 2, "pipeline": 4, "microbatches": 6, "schedule": "gpipe", "zero_stage": 1},
    thorough({"data": 4, "pipeline": 2, "microbatches": 6, "schedule": "1f1b"}),
    thorough({"data": 2, "pipeline": 4, "microbatches": 6, "schedule": "zb-h1", "tensor": 2}),
    thorough({"data": 2, "pipeline": 4, "microbatches": 4, "chunks": 2, "zero_stage": 2}),
    thorough({"data": 1, "pipeline": 8, "microbatches": 6, "schedule": "1f1b", "rows": 2}),
    thorough({"data": 2, "pipeline": 2, "microbatches": 6, "tensor": 2, "recompute": "full"}),
    thorough({"data": 2, "pipeline": 4, "microbatches": 5, "schedule": "zbv", "zero_stage": 1}),
)


@pytest.mark.parametrize("fields", STAGED)
def test_estimates_of_stages_are_the_programs(fields):
    """The costs of four stages, in the schedule of all, are those of the program of all."""
    fields = {"schedule": "interleaved", **fields}
    plan = Parallelism(**fields)
    estimate = PlanEstimate(plan, tracer("small"))
    report = estimate.cost(MODELS["small"].build())
    assert size_of_stages(plan, 1) < MODELS["small"].layers * plan.microbatches
    assert estimate.peak == pytest.approx(report.peak(), rel=0.05)
    assert estimate.seconds == pytest.approx(report.seconds, rel=0.1)
    assert estimate.least_memory() <= report.peak()


def test_layers_of_stages_are_those_that_a_split_has():
    random = Random(1)
    for _ in range(200):
        layers = random.randint(1, 20)
        stages = random.randint(1, layers)
        first, last = random.choice((1, 3, 40, 90)), random.choice((0, 1, 40, 95))
        weights = LayerWeights(first, random.choice((10, 13)), last)
        costs = [weights.layer] * layers
        costs[0] += first
        costs[-1] += last
        assert [*layers_of_stages(layers, stages, weights)] == partition(costs, stages)


@pytest.mark.parametrize("mode", ["megatron", "gather"])
def test_named_values_of_layers_that_devices_share_are_kept(mode):
    """Their products are not done again; without names all of them are."""
    flops = dict[str, int]()
    for recompute in ("never", "except attention, mlp", "except attention", "full"):
        plan = Parallelism(data=1, tensor=2, sequence_mode=mode, recompute=recompute)
        report = PlanEstimate(plan, tracer("tiny")).cost(MODELS["tiny"].build())
        flops[recompute] = report.flops()
    assert [*flops.values()] == sorted(set(flops.values()))


def test_a_search_prints_what_programs_take():
    options = {"devices": 8, "cluster": H100, "global_batch": 32, "optimizer": ADAMW}
    options |= {"zero_stage": (1, 3), "recompute": "never", "tensor": 1, "pipeline": 1}
    plans = search(MODELS["tiny"], **options, rows=4)
    for estimate in plans:
        report = estimate.cost(MODELS["tiny"].build())
        assert estimate.program is not None
        assert estimate.seconds == pytest.approx(report.seconds, rel=0.03)
        assert estimate.peak == pytest.approx(report.peak(), rel=0.03)
    assert [x.seconds for x in plans] == sorted([x.seconds for x in plans])
    assert plans[0].explain().count("other") >= 1


def test_plans_that_are_one_program_are_one_row():
    """In stages ZeRO-2 is ZeRO-1, since a device reduces gradients after its last microbatch."""
    options = {"devices": 4, "cluster": H100, "global_batch": 16, "optimizer": ADAMW}
    plans = search(
        MODELS["tiny"], **options, rows=4, schedule="1f1b", tensor=1, pipeline=2, recompute="never"
    )
    assert [x.plan.zero_stage for x in plans].count(2) == 0
    (merged,) = [x.plan for x in plans if x.plan.zero_stage == 1]
    assert plans.stages[merged] == [1, 2] and "1 = 2" in str(plans)
    costs = [
        PlanEstimate(replace(merged, zero_stage=stage), tracer("tiny")).cost(MODELS["tiny"].build())
        for stage in (1, 2)
    ]
    assert costs[0].seconds == costs[1].seconds and costs[0].peak() == costs[1].peak()


def test_plans_by_formulas_alone_are_behind_those_whose_programs_ran(monkeypatch):
    """Formulas call some of them faster, by less than formulas may be wrong."""
    monkeypatch.setattr(import_module("fshard.plan.search"), "PROGRAMS", 60)
    options = {"devices": 8, "cluster": H100, "global_batch": 64, "optimizer": ADAMW}
    plans = search(MODELS["tiny"], **options, rows=8, tensor=1, recompute="never")
    ran = [x for x in plans if x.program is not None]
    left = [x for x in plans if x.program is None]
    assert ran and [*plans] == [*ran, *left]
    assert min(x.seconds for x in left) < max(x.seconds for x in ran)
    assert [x.seconds for x in ran] == sorted(x.seconds for x in ran)


def test_plans_whose_programs_are_too_long_keep_no_other_from_being_costed(monkeypatch):
    """Those with the least memory by formulas have small microbatches, and a long program each."""
    module = import_module("fshard.plan.search")
    options = {"devices": 8, "cluster": H100, "global_batch": 64, "optimizer": ADAMW}
    options |= {"recompute": "never", "pipeline": 1, "tensor": 1, "goal": "memory"}
    monkeypatch.setattr(module, "PROGRAMS", 0)
    by_formula = search(MODELS["tiny"], **options)
    sizes = sorted([x.program_size for x in by_formula])
    monkeypatch.setattr(module, "SHOWN", 1)
    monkeypatch.setattr(module, "PROGRAMS", sizes[0])
    assert by_formula[0].program_size > sizes[0]

    assert search(MODELS["tiny"], **options)[0].program is not None


def test_programs_that_are_too_long_for_a_search_are_marked():
    deep = replace(MODELS["tiny"], layers=64)
    options = {"devices": 16, "cluster": H100, "global_batch": 256, "optimizer": ADAMW}
    plans = search(deep, **options, pipeline=16, zero_stage=3, schedule="gpipe", rows=1)
    assert all(x.program_size > PROGRAMS and x.program is None for x in plans)
    assert "~" in str(plans) and "by formulas" in str(plans.table().notes)


def test_estimate_is_printed_with_its_numbers_where_they_are_known():
    plan = Parallelism(data=8, rows=8, zero_stage=1)
    layout = "data=8, ZeRO-1, 1 x 8"
    assert repr(PlanEstimate(plan, tracer("tiny"))) == f"PlanEstimate({layout})"

    by_formula = PlanEstimate(plan, tracer("tiny"), by_formula=True)
    seconds, size = by_formula.seconds, by_formula.peak / 1e9
    expected = f"PlanEstimate({layout}: ~{seconds:.3g} s a step, ~{size:.3g} GB a device)"
    assert repr(by_formula) == expected
