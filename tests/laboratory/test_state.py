"""The state of the lab: it survives JSON, and each contradiction is about a control.

Oracles: equality after a round trip; the list of controls of the default state.
"""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard.errors import PlanError
from fshard.laboratory.controls import MODELS, changed, controls_of, fields_with_controls
from fshard.laboratory.state import OPTIMIZERS, SMALL, LabState, StateError

SIZES = st.sampled_from([1, 2, 4])
FIELDS_OF_PLANS = {
    "tensor": SIZES,
    "pipeline": SIZES,
    "sequence": SIZES,
    "replicas": SIZES,
    "zero_stage": st.integers(0, 3),
    "rows": SIZES,
    "microbatches": st.one_of(st.none(), SIZES),
    "schedule": st.sampled_from(["1f1b", "gpipe", "interleaved", "zbv"]),
    "chunks": st.one_of(st.none(), SIZES),
    "tensor_mode": st.sampled_from(["1d", "2d", "3d"]),
    "sequence_mode": st.sampled_from(["gather", "ring", "megatron"]),
    "recompute": st.sampled_from(["never", "selective", "full", "except attention"]),
    "state_memory": st.sampled_from(["device", "host"]),
}
DIMS = st.dictionaries(st.sampled_from(["data", "model"]), st.one_of(st.none(), st.integers(0, 1)))
STATES = st.fixed_dictionaries(
    {},
    optional={
        "devices": st.sampled_from([1, 6, 8, 16]),
        "plan": st.fixed_dictionaries({}, optional=FIELDS_OF_PLANS),
        "overrides": st.dictionaries(st.sampled_from(["layers.*.q.weight", "head.weight"]), DIMS),
        "optimizer": st.sampled_from([*OPTIMIZERS]),
        "cluster": st.sampled_from(["h100", "cpu"]),
        "model": st.sampled_from(
            [LabState(model=x, devices=1).to_json()["model"] for x in MODELS.values()]
        ),
    },
)


@settings(max_examples=200, deadline=None)
@given(STATES)
def test_state_from_json_survives_or_names_a_control(content):
    known = {*fields_with_controls(LabState()), "plan.experts"}
    error = None
    try:
        state = LabState.from_json(content)
    except StateError as raised:
        error = raised
    if error is not None:
        assert error.field in known
        assert "must" in str(error) or "no meaning" in str(error)
        return

    again = LabState.from_json(json.loads(state.text))

    assert again == state
    assert hash(again) == hash(state)
    assert again.parallelism.devices == state.devices


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ({"devices": 0}, "devices"),
        ({"devices": True}, "devices"),
        ({"plan": {"tensor": 3}}, "plan.tensor"),
        ({"plan": {"pipeline": 4}}, "plan.pipeline"),
        ({"plan": {"schedule": "mine"}}, "plan.schedule"),
        ({"plan": {"pipeline": 2, "chunks": 2}}, "plan.chunks"),
        ({"plan": {"sequence_mode": "megatron"}}, "plan.sequence_mode"),
        ({"plan": {"data": 3}}, "devices"),
        ({"plan": {"warmup": 3}}, "plan"),
        ({"plan": 3}, "plan"),
        ({"optimizer": "mine"}, "optimizer"),
        ({"cluster": "mine"}, "cluster"),
        ({"overrides": {"head.weight": {"data": "0"}}}, "overrides.head.weight"),
        ({"model": {"layers": 2}}, "model"),
        ({"colour": 1}, ""),
    ],
)
def test_state_with_a_contradiction_names_its_field(content, field):
    with pytest.raises(StateError) as caught:
        LabState.from_json(content)

    assert caught.value.field == field


@pytest.mark.parametrize(
    ("size", "value"),
    [
        ("heads", 7),
        ("kv_heads", 3),
        ("layers", 0),
        ("hidden", "256"),
        ("dtype", "int8"),
        ("norms", "x"),
    ],
)
def test_state_of_a_model_that_cannot_be_built_names_its_size(size, value):
    model = {**LabState().to_json()["model"], size: value}

    with pytest.raises(StateError) as caught:
        LabState.from_json({"model": model})

    assert caught.value.field == f"model.{size}"


def test_state_of_text_that_is_no_json_raises():
    with pytest.raises(StateError, match="must be JSON"):
        LabState.from_json("{")


def test_microbatches_follow_the_stages_until_they_are_chosen():
    state = changed(LabState(), "plan.pipeline", 2)
    assert state.parallelism.microbatches == 2
    assert changed(state, "plan.pipeline", 1).parallelism.microbatches == 1

    chosen = changed(state, "plan.microbatches", 4)
    assert changed(chosen, "plan.pipeline", 1).parallelism.microbatches == 4


def test_state_takes_the_devices_of_a_parallelism():
    state = LabState(devices=4, plan=fs.Parallelism(data=2, tensor=2))

    assert state.to_json()["plan"] == {"tensor": 2}
    assert state.parallelism == fs.Parallelism(data=2, tensor=2)


def test_state_keeps_all_fields_of_a_transformer():
    model = replace(SMALL, dtype=torch.float32, bias=("qkv",), norms="around")

    assert LabState.from_json(LabState(model=model).text).model == model


# -- controls --------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS.values(), ids=[*MODELS])
def test_controls_have_the_values_of_the_state(model):
    state = LabState(model=model, devices=16, plan=fs.Parallelism(tensor=2, zero_stage=1))
    content = {**state.to_json(), "plan": vars(state.parallelism)}

    for group in controls_of(state):
        for control in group["controls"]:
            outer, _, name = control["field"].partition(".")
            value = (
                content[outer] if not name else content[outer].get(name, getattr(model, name, None))
            )
            assert control["value"] == value or control["field"] == "model.dtype"
            assert control["help"]
            if control["kind"] == "choice":
                assert control["value"] in [choice["value"] for choice in control["choices"]]


def test_choices_that_contradict_the_state_have_the_error_of_it():
    state = LabState(plan=fs.Parallelism(tensor=2))
    for group in controls_of(state):
        for control in group["controls"]:
            for choice in control.get("choices", []):
                try:
                    changed(state, control["field"], choice["value"])
                    error = None
                except PlanError as raised:
                    error = str(raised)
                assert choice["why_not"] == error
