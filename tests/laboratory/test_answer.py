"""Answers of the lab have the numbers of `fs.plan.cost`, and name the leaves of the program.

Oracles: `fs.plan.cost` of the step written out by the public functions; `fs.plan.search`'s numbers
for long programs; the layouts of `shard_params`.
"""

import time
from functools import cache

import pytest
import torch
from torch import nn

import fshard as fs
from fshard import P
from fshard.errors import LayoutError
from fshard.laboratory.answer import Answer
from fshard.laboratory.controls import MODELS
from fshard.laboratory.state import SMALL, LabState, StateError
from fshard.laboratory.subject import Subject
from fshard.plan import PlanEstimate
from fshard.plan.models import Transformer

TINY = Transformer(
    layers=2, hidden=32, ffn=64, heads=4, kv_heads=4, vocab=64, sequence=16, gated=False
)
SUBJECT = Subject()
Q = "layers.*.q.weight"


@cache
def answer_of(text):
    return Answer(LabState.from_json(text), SUBJECT)


def answered(**fields):
    """Return the answer of a state of the tiny model."""
    return answer_of(LabState(**{"model": TINY, **fields}).text)


def cost_of_zero_3(rules):
    """Return the cost of ZeRO-3 on 8 devices, by the public functions."""
    mesh = fs.make_mesh({"data": 8}, runtime="abstract")
    apply, params, buffers = fs.functionalize(TINY.build())
    params = fs.shard_params(params, rules, mesh=mesh)
    opt = fs.partition_optimizer(fs.optim.adamw(3e-4), mesh=mesh, axis="data", stage=3)

    def loss_fn(params, batch):
        ids, labels = batch
        logits, _ = apply(params, buffers, ids)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), donate=True)
    ids, labels = torch.empty(2, 8, TINY.sequence, dtype=torch.int64, device="meta")
    h100 = fs.plan.cluster("h100")
    return fs.plan.cost(step, params, opt.init(params), (ids, labels), cluster=h100)


FLAT = fs.fsdp("data", unit="layers.*")


@pytest.mark.parametrize(
    ("overrides", "rules"),
    [
        ({}, FLAT),
        ({Q: {"data": 1}}, {Q: P(None, "data"), "**": FLAT}),
        ({"layers.*.up.weight": {"data": None}}, {"layers.*.up.weight": P(), "**": FLAT}),
    ],
    ids=["flat", "dim", "off"],
)
def test_answer_has_the_numbers_of_plan_cost(overrides, rules):
    answer = answered(plan={"zero_stage": 3}, overrides=overrides)
    expected = cost_of_zero_3(rules)

    (plan,) = answer.document()["plans"]

    assert plan["numbers"]["seconds"] == expected.seconds
    assert plan["numbers"]["peak"] == expected.peak()
    assert plan["numbers"]["sent"] == expected.sent()
    calls = sum([row["calls"] for row in plan["rows"]])
    assert calls == expected.comm.calls()


@pytest.mark.parametrize(
    "fields",
    [
        {"zero_stage": 1, "tensor": 2},
        {"zero_stage": 1, "pipeline": 2},
        {"zero_stage": 2, "recompute": "full", "microbatches": 2},
    ],
    ids=str,
)
def test_answer_has_the_numbers_of_the_plan_s_program(fields):
    answer = answered(plan=fields)
    estimate = PlanEstimate(answer.plan, SUBJECT.tracer(answer.state))
    expected = estimate.cost(TINY.build())

    assert answer.seconds == expected.seconds
    assert answer.peak == expected.peak()


def test_answer_of_a_long_program_has_the_numbers_of_a_search():
    fields = {"tensor": 8, "pipeline": 16, "zero_stage": 1, "microbatches": 16}
    model = MODELS["Llama 3.1, 405 B"]
    state = LabState(model=model, devices=16384, plan={**fields, "recompute": "full"})
    answer = Answer(state, SUBJECT)
    begin = time.process_time()

    (plan,) = answer.document()["plans"]

    assert time.process_time() - begin < 12  # about 2 on a quiet machine, with the layers' traces
    numbers = plan["numbers"]
    estimate = PlanEstimate(state.parallelism, SUBJECT.tracer(state))
    assert (numbers["seconds"], numbers["peak"]) == (estimate.seconds, estimate.peak)
    assert numbers["mfu"] == pytest.approx(estimate.utilization())
    assert numbers["tokens"] == pytest.approx(estimate.tokens_per_second)
    assert "3 of 16 devices of the pipeline" in plan["facts"]["drawn"]
    leaves = {leaf["pattern"]: leaf for leaf in answer.layouts()["leaves"]}
    assert leaves[Q]["count"] == 126


def test_second_answer_of_a_model_is_quick():
    answered(plan={"zero_stage": 3}).document()  # traces the layers
    begin = time.process_time()

    answered(plan={"zero_stage": 3, "replicas": 2}).document()

    assert time.process_time() - begin < 1.5  # 0.2 on a quiet machine


# -- leaves ----------------------------------------------------------------------------------------


def leaf(answer, pattern):
    """Return the row of a leaf."""
    (row,) = [row for row in answer.layouts()["leaves"] if row["pattern"] == pattern]
    return row


@pytest.mark.parametrize(
    ("plan", "dims", "flat", "movable"),
    [
        ({}, [[], []], [], ["data"]),
        ({"zero_stage": 3}, [[], []], ["data"], ["data"]),
        ({"tensor": 2}, [["model"], []], [], ["model"]),
        ({"tensor": 2, "zero_stage": 3}, [["model"], []], ["data"], ["model"]),
        ({"pipeline": 2}, [[], []], [], []),
        ({"recompute": "full"}, [[], []], [], ["data"]),
    ],
    ids=str,
)
def test_leaf_has_the_axes_on_its_dims(plan, dims, flat, movable):
    row = leaf(answered(plan=plan), Q)

    assert (row["dims"], row["flat"], row["movable"]) == (dims, flat, movable)
    assert (row["count"], row["shape"], row["dtype"]) == (2, [32, 32], "bf16")
    assert row["bytes"] == 2 * 32 * 32 * 2


def test_leaves_are_in_the_order_of_the_model_and_number_those_of_the_document():
    answer = answered(plan={"zero_stage": 3})
    (plan,) = answer.document()["plans"]

    rows = answer.layouts()["leaves"]

    names = list(
        dict.fromkeys(
            [
                name.replace("0", "*").replace("1", "*")
                for name, _ in TINY.build().named_parameters()
            ]
        )
    )
    assert [row["pattern"] for row in rows] == [*names, "batch"]
    for row in rows[:-1]:
        paths = [plan["leaves"][number]["path"] for number in row["leaves"]]
        last = row["pattern"].rpartition("*.")[2]
        assert len(paths) == row["count"]
        assert all([last in path and path.startswith("params") for path in paths])


@pytest.mark.parametrize(
    ("plan", "dims", "expected"),
    [
        ({"zero_stage": 3}, {"data": 0}, [["data"], []]),
        ({"zero_stage": 3, "recompute": "full"}, {"data": 1}, [[], ["data"]]),
        ({"tensor": 2}, {"model": 1}, [[], ["model"]]),
        ({"tensor": 2}, {"model": None}, [[], []]),
        ({"tensor": 2, "recompute": "selective"}, {"model": 1}, [[], ["model"]]),
        ({"tensor": 1}, {"model": 1}, [[], []]),
    ],
    ids=str,
)
def test_override_moves_an_axis_to_another_dim(plan, dims, expected):
    row = leaf(answered(plan=plan, overrides={Q: dims}), Q)

    assert row["dims"] == expected
    assert row["overridden"] == ("model" not in dims or plan["tensor"] > 1)


def test_override_of_an_embedding_moves_words_to_features():
    row = leaf(
        answered(plan={"tensor": 2}, overrides={"embedding.weight": {"model": 1}}),
        "embedding.weight",
    )

    assert row["dims"] == [[], ["model"]]


def test_override_along_zero_beside_shared_layers_has_the_library_s_error():
    answer = answered(plan={"tensor": 2}, overrides={Q: {"data": 1}})

    with pytest.raises(LayoutError, match=r'layers.0.q.weight is P\("model", "data"\)'):
        answer.document()


@pytest.mark.parametrize(
    ("plan", "overrides"),
    [
        ({}, {"layers.*.nothing": {"data": 0}}),
        ({}, {Q: {"data": 2}}),
        ({"pipeline": 2}, {Q: {"data": 0}}),
        ({"sequence": 2}, {Q: {"seq": 0}}),
    ],
    ids=["leaf", "dim", "stages", "axis"],
)
def test_override_that_no_leaf_can_have_names_it(plan, overrides):
    (pattern,) = overrides

    with pytest.raises(StateError) as caught:
        answered(plan=plan, overrides=overrides).document()

    assert caught.value.field == f"overrides.{pattern}"


def test_shards_are_drawn_of_leaves_and_of_the_batch():
    answer = answered(plan={"zero_stage": 3})

    assert answer.shards(None) is None
    assert answer.shards(Q)["svg"].count("<rect") > 8
    assert answer.shards("batch")["svg"].startswith("<svg")


# -- a module of the reader ------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Residual() for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_answer_of_a_module_has_its_leaves():
    x = torch.randn(4, 8)
    subject = Subject(Tower(), (x, x), lambda output, batch: (output - batch[1]).square().mean())
    answer = Answer(LabState(model=None, plan={"zero_stage": 3}), subject)

    (plan,) = answer.document()["plans"]

    assert plan["title"].startswith("Tower")
    assert leaf(answer, "blocks.*.up.weight")["flat"] == ["data"]


def test_state_without_a_model_needs_a_module():
    with pytest.raises(StateError) as caught:
        Answer(LabState(model=None), SUBJECT).document()

    assert caught.value.field == "model"


def test_default_model_is_small():
    assert SMALL.parameters < 2_200_000
