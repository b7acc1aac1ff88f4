"""Traces of loaders of six families, by ranks of an engine; the oracle is a real load, to the bit."""

from __future__ import annotations

import pytest
import torch
from transformers.core_model_loading import revert_weight_conversion

import fshard as fs
from tests.refit.engine import Rank
from tests.refit.families import FAMILIES
from tests.refit.oracle import traced_copy


def _weights(family, dtype=torch.float32):
    return {name: x.to(dtype) for name, x in FAMILIES[family].model().state_dict().items()}


def _maker(family, rank, dtype=torch.float32):
    """Return a function that makes the engine of a rank, and its loader."""

    def make():
        engine = FAMILIES[family].engine(rank).to(dtype)
        return engine.load_weights, engine

    return make


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_trace_of_an_engine_is_its_load_on_each_rank(family, size):
    weights = _weights(family)
    ranks = [Rank(number, size) for number in range(size)]
    fs.refit.check_ranks([traced_copy(_maker(family, rank), weights) for rank in ranks])


@pytest.mark.parametrize("size", [2, 4])
def test_trace_of_experts_by_their_names_in_files_is_the_load(size):
    model = FAMILIES["qwen3_moe"].model()
    weights = revert_weight_conversion(model, model.state_dict())
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in weights
    traced_copy(_maker("qwen3_moe", Rank(size - 1, size)), weights)


def test_trace_of_from_pretrained_follows_its_conversions(monkeypatch):
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # a trace is of one thread
    model = FAMILIES["qwen3_moe"].model()
    weights = revert_weight_conversion(model, model.state_dict())

    def make():
        target = FAMILIES["qwen3_moe"].model()

        def load(weights):
            other = type(model).from_pretrained(None, config=model.config, state_dict=dict(weights))
            target.load_state_dict(other.state_dict())

        return load, target

    traced = traced_copy(make, weights)
    gates = [*traced.boxes("model.layers.0.mlp.experts.gate_up_proj")]
    assert [box.source.split(".")[-2] for box in gates] == ["gate_proj", "up_proj"] * 4


@pytest.mark.parametrize("family", FAMILIES)
def test_trace_of_an_engine_in_another_dtype_has_one_cast(family):
    traced = traced_copy(_maker(family, Rank(1, 2), torch.bfloat16), _weights(family))
    for name in traced.targets:
        assert {box.dtypes for box in traced.boxes(name)} == {(torch.float32, torch.bfloat16)}


@pytest.mark.parametrize("family", FAMILIES)
def test_trace_of_load_state_dict_is_one_box_per_leaf(family):
    def make():
        model = FAMILIES[family].model()
        return model.load_state_dict, model

    traced = traced_copy(make, FAMILIES[family].model().state_dict())
    for name, leaf in traced.targets.items():
        (box,) = traced.boxes(name)
        assert box.source in (name, leaf.tied_to)
