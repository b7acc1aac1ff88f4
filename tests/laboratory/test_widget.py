"""`fs.lab` makes a lab of a model, a mesh and a layout; its widget sends answers.

Oracle: the state's fields; messages that the widget would send to a page.
"""

import importlib
import sys
import time

import pytest

import fshard as fs
from fshard.errors import PlanError
from fshard.laboratory.state import SMALL, LabState
from fshard.plan.models import Transformer

TINY = Transformer(
    layers=2, hidden=32, ffn=64, heads=4, kv_heads=4, vocab=64, sequence=16, gated=False
)


def test_lab_of_nothing_has_the_small_model():
    lab = fs.lab()

    assert lab.state == LabState()
    assert lab.state.model == SMALL
    assert str(lab) == "lab of Transformer: Parallelism(data=8) on 8 devices"


def test_lab_of_a_mesh_and_a_layout_has_both():
    lab = fs.lab(
        TINY, mesh={"data": 2, "model": 2}, layout=fs.Parallelism(zero_stage=3), cluster="cpu"
    )

    assert lab.plan == fs.Parallelism(data=2, tensor=2, zero_stage=3)
    assert (lab.state.devices, lab.state.cluster, lab.state.model) == (4, "cpu", TINY)
    assert 'fs.make_mesh({"data": 2, "model": 2})' in lab.code
    assert lab.answer.peak > 0


def test_lab_of_a_state_or_its_text_is_of_that_state():
    state = LabState(model=TINY, devices=4, plan={"zero_stage": 1})

    assert fs.lab(state=state).state == fs.lab(state=state.text).state == state


def test_lab_of_a_mesh_with_another_axis_raises():
    with pytest.raises(PlanError, match="axes of mesh must be among data, pipe"):
        fs.lab(mesh={"rows": 2})


def test_widget_without_anywidget_names_the_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "anywidget", None)

    with pytest.raises(PlanError, match=r'pip install "fshard\[notebooks\]"'):
        fs.lab().widget()


def test_widget_answers_a_message(monkeypatch):
    pytest.importorskip("anywidget")
    # Without a proof: 32 devices are more than one runs on.
    lab = fs.lab(TINY, devices=32)
    widget = lab.widget()
    sent = []
    monkeypatch.setattr(widget, "send", sent.append)

    widget._handle_custom_msg(
        {"id": 1, "slot": "A", "state": {**lab.state.to_json(), "plan": {"zero_stage": 2}}}, []
    )
    while not sent:
        time.sleep(0.01)

    assert sent[0]["kind"] == "answer"
    assert lab.plan.zero_stage == 2


def test_lab_is_loaded_on_first_use():
    assert "lab" not in vars(importlib.import_module("fshard"))


def test_lab_of_a_mesh_with_stages_has_a_microbatch_for_each():
    lab = fs.lab(mesh={"pipe": 2, "data": 4}, layout=fs.Parallelism(zero_stage=1))

    assert (lab.plan.microbatches, lab.plan.data, lab.plan.zero_stage) == (2, 4, 1)
