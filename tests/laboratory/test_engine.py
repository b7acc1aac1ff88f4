"""The engine answers the newest state, keeps answers, places errors, and proves in a thread.

Oracles: the states that were sent; `fs.testing.certify`'s verdict on a program with a fault.
"""

import queue
import threading

import pytest

from fshard.laboratory.answer import Answer
from fshard.laboratory.engine import Engine
from fshard.laboratory.proof import prove, why_not_proven
from fshard.laboratory.state import LabState
from fshard.laboratory.subject import Subject
from fshard.plan.models import Transformer

TINY = Transformer(
    layers=2, hidden=32, ffn=64, heads=4, kv_heads=4, vocab=64, sequence=16, gated=False
)
LONG = Transformer(
    layers=2, hidden=256, ffn=1024, heads=4, kv_heads=4, vocab=64, sequence=512, gated=False
)
Q = "layers.*.q.weight"


def state(**fields):
    """Return a state of the tiny model as JSON."""
    return LabState(**{"model": TINY, "devices": 4, **fields}).to_json()


@pytest.fixture
def engine():
    made = Engine(Subject(), LabState(model=TINY, devices=4))
    yield made
    made.close()


def test_first_message_is_answered_with_the_state_at_first(engine):
    reply = engine.reply({"id": 1, "slot": "A", "state": None, "leaf": Q})

    assert (reply["kind"], reply["id"], reply["slot"]) == ("answer", 1, "A")
    assert reply["state"] == engine.state.to_json()
    assert reply["shards"]["pattern"] == Q
    assert "import fshard as fs" in reply["code"]
    assert reply["milliseconds"] >= 0


def test_answer_is_kept_for_undo(engine):
    for number, plan in enumerate([{}, {"zero_stage": 1}, {}]):
        reply = engine.reply({"id": number, "slot": "A", "state": state(plan=plan)})

    assert reply["document"] is engine.reply({"id": 9, "slot": "B", "state": state()})["document"]
    assert reply["milliseconds"] is None


def test_older_message_is_dropped(engine):
    engine.expect({"id": 5, "slot": "A"})

    older = engine.reply({"id": 4, "slot": "A", "state": state()})
    other_slot = engine.reply({"id": 4, "slot": "B", "state": state()})

    assert older == {"id": 4, "slot": "A", "kind": "dropped"}
    assert other_slot["kind"] == "answer"


def test_pages_count_their_messages_apart(engine):
    """A page that is loaded again, or a second view of a widget, begins with the first id."""
    first = engine.reply({"id": 7, "page": "x", "slot": "A", "state": None})
    second = engine.reply(
        {"id": 1, "page": "y", "slot": "A", "state": state(plan={"zero_stage": 1})}
    )
    assert [(reply["kind"], reply["page"]) for reply in (first, second)] == [
        ("answer", "x"),
        ("answer", "y"),
    ]
    assert engine.shown_state == LabState.from_json(second["state"])


def test_leaf_alone_has_its_shards_and_drops_no_answer(engine):
    engine.expect({"id": 5, "slot": "A"})

    reply = engine.reply(
        {"id": 6, "slot": "A", "state": state(), "leaf": "batch", "only": "shards"}
    )
    answer = engine.reply({"id": 5, "slot": "A", "state": state()})

    assert (reply["kind"], reply["shards"]["pattern"]) == ("shards", "batch")
    assert answer["kind"] == "answer"


@pytest.mark.parametrize(
    ("changes", "field", "text"),
    [
        ({"plan": {"tensor": 3}}, "plan.tensor", "number of devices"),
        ({"plan": {"tensor": 2}, "overrides": {Q: {"data": 1}}}, f"overrides.{Q}", "P("),
        ({"plan": {"tensor": 4, "tensor_mode": "2d"}}, "plan.tensor", "do not divide"),
        ({"nothing": 1}, "nothing", "must have fields"),
    ],
    ids=["sizes", "override", "program", "unknown"],
)
def test_state_without_an_answer_is_an_error_beside_its_control(engine, changes, field, text):
    reply = engine.reply({"id": 1, "slot": "A", "state": {**state(), **changes}})

    assert (reply["kind"], reply["field"]) == ("error", field)
    assert text in reply["text"]
    assert "\n" not in reply["text"]
    assert engine.shown_state == engine.state


def test_answers_of_two_threads_are_those_of_one(engine):
    plans = [{"zero_stage": 3}, {"zero_stage": 1, "tensor": 2}]
    replies = {}

    def answer(slot, plan):
        replies[slot] = engine.reply({"id": 1, "slot": slot, "state": state(plan=plan)})

    threads = [threading.Thread(target=answer, args=pair) for pair in zip("AB", plans, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for slot, plan in zip("AB", plans, strict=True):
        expected = Answer(LabState.from_json(state(plan=plan)), Subject()).document()
        assert replies[slot]["document"] == expected


@pytest.mark.parametrize(
    "plan", [{"zero_stage": 3}, {"tensor": 2}, {"pipeline": 2}], ids=["zero", "tensor", "stages"]
)
@pytest.mark.parametrize("in_thread", [False, True], ids=["here", "thread"])
def test_lines_of_an_answer_are_of_the_model_or_of_no_program(engine, in_thread, plan):
    """Wherever the engine runs: below this test, or below threads of the standard library."""
    replies = []

    def answer():
        replies.append(engine.reply({"id": 1, "slot": "A", "state": state(plan=plan)}))

    if in_thread:
        thread = threading.Thread(target=answer)
        thread.start()
        thread.join()
    else:
        answer()

    (shown,) = replies[0]["document"]["plans"]
    lines = [row["site"] for row in shown["rows"]]
    for device in shown["devices"]:
        lines += [line for _, _, line in device["holders"]]
    outside = [line for line in lines if line and "plan/models.py:" not in line]
    assert lines and outside == []
    if "tensor" in plan:
        assert any(lines)


# -- proofs ----------------------------------------------------------------------------------------


def proof_of(engine, **fields):
    """Return the last message of a state's proof."""
    messages = queue.Queue()
    engine.send = messages.put
    reply = engine.reply({"id": 1, "slot": "A", "state": state(**fields)})
    assert reply["kind"] == "answer"
    message = messages.get(timeout=120)
    while message["verdict"] == "running":
        message = messages.get(timeout=120)
    return message


@pytest.mark.parametrize(
    "fields",
    [
        {"plan": {"zero_stage": 3}, "overrides": {Q: {"data": 1}}},
        {"plan": {"tensor": 2, "zero_stage": 1}, "overrides": {Q: {"model": 1}}},
        {"plan": {"pipeline": 2}},
        pytest.param({"plan": {"sequence": 2, "zero_stage": 3}}, marks=pytest.mark.thorough),
        pytest.param({"plan": {"replicas": 2, "recompute": "full"}}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_proof_of_a_state_is_within_rounding(engine, fields):
    message = proof_of(engine, **fields)

    assert (message["kind"], message["id"]) == ("proof", 1)
    assert message["verdict"] in ("equal", "rounding")
    assert Q in [row["leaf"] for row in message["rows"]]


def test_proof_of_a_faulty_loss_names_a_leaf():
    answer = Answer(LabState(model=TINY, devices=2), Subject())
    model = answer.model
    faulty = type(model).loss_of

    class Faulty(type(model)):
        def loss_of(self, output, batch, plan=None):
            from fshard import axis_size

            return faulty(self, output, batch, plan) * axis_size("data")

    object.__setattr__(
        answer,
        "__dict__",
        {
            **vars(answer),
            "model": Faulty(
                **{
                    name: vars(model)[name]
                    for name in ("build", "blocks", "layers", "batch", "loss", "optimizer")
                }
            ),
        },
    )

    result = prove(answer, lambda: False)

    assert result["verdict"] == "differs"
    assert "2 times" in result["text"]


def test_proof_that_is_abandoned_ends():
    answer = Answer(LabState(model=TINY, devices=2), Subject())

    assert prove(answer, lambda: True) is None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"devices": 32}, "16 virtual devices"),
        ({"model": Transformer(2, 1024, 4096, 8, 8, 1024, 16)}, "4,000,000 parameters"),
        ({"model": LONG, "plan": {"rows": 64}}, "400,000,000,000 operations in a step"),
        ({"plan": {"zero_stage": 3}, "overrides": {Q: {"data": None}}}, "replicates one"),
        ({"model": Transformer(**{**vars(TINY), "dropout": 0.1})}, "dropout"),
    ],
    ids=["devices", "parameters", "operations", "off", "dropout"],
)
def test_state_without_a_proof_has_a_reason(fields, reason):
    answer = Answer(LabState(**{"model": TINY, "devices": 4, **fields}), Subject())

    assert reason in why_not_proven(answer)
